# SPDX-License-Identifier: Apache-2.0
"""A decoder on one device, CPU or GPU, around MAX's own blocks.

MAX's MoE models need collectives, which a CPU does not have, and take expert
parallelism on several GPUs only. This is MAX's single-device ``Transformer`` with an
MoE layer that dispatches, or whose experts gather their tokens. On the CPU several
ranks share the device and run one after another; each has a slice of the tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

from max import tree
from max.dtype import DType
from max.graph import TensorValue, Value, ops
from max.nn.embedding import Embedding
from max.nn.kv_cache import KVCacheInputsPerDevice, KVCacheParamInterface
from max.nn.layer import Module
from max.nn.linear import MLP, Linear
from max.nn.moe import MoE, MoEGate
from max.nn.norm import RMSNorm
from max.nn.transformer import Transformer, TransformerBlock
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec
from max.pipelines.lib.interfaces.batch_processor import ragged_kv_symbolic_input_tree

from .. import EPBatchManager
from ..experts import grouped_swiglu, routed_swiglu
from ..graph.moe import through_experts
from .hopper import experts_anywhere, route
from .settings import gathers, place_experts


class OneDeviceMoe(MoE):
    """MAX's MoE layer, with dispatch and combine between ranks of one device."""

    def __init__(self, manager: EPBatchManager, layer: int, **kwargs: Any) -> None:
        """Makes MAX's ``MoE`` of these ``kwargs``; of the layers with experts this is
        number ``layer``."""
        super().__init__(**kwargs)
        self._manager, self._layer = manager, layer

    def __call__(self, x: TensorValue) -> TensorValue:
        """Runs the layer on ``[n_tokens, hidden_dim]``."""
        if gathers(self._manager.config, self.moe_dim):
            ids, weights = route(self.gate, x)
            choices = ids.cast(DType.int32), weights.cast(DType.float32)
            sums = routed_swiglu(x, *choices, self.gate_up_proj, self.down_proj)
            return ops.rebind(sums, x.shape)
        return self._through_ranks(x)

    def _through_ranks(self, x: TensorValue) -> TensorValue:
        n_ranks = self._manager.config.n_gpus_per_node
        slices = [_slices(values, n_ranks) for values in (x, *route(self.gate, x))]
        sums = through_experts(self._manager, *slices, self._experts_of, self._layer)
        whole = sums[0] if len(sums) == 1 else ops.concat(sums)
        return ops.rebind(whole, x.shape).cast(x.dtype)

    def _experts_of(
        self, rank: int, dispatched: tuple[TensorValue, ...]
    ) -> TensorValue:
        """Runs the experts of a rank on the rows it received."""
        if self.quant_config:
            rows, row_scales, *groups = dispatched
            gate_up = self.gate_up_proj, self._scales("gate_proj", "up_proj")
            down = self.down_proj, self._scales("down_proj")
            return grouped_swiglu((rows, row_scales), gate_up, down, *groups[:2])
        rows, row_offsets, expert_ids, *_ = dispatched
        if self._manager.config.target == "cpu":
            n = self._manager.config.n_local_experts
            own = slice(rank * n, (rank + 1) * n)
            weights = self.gate_up_proj[own], self.down_proj[own]
            return grouped_swiglu(rows, *weights, row_offsets, expert_ids)
        n_rows = ops.shape_to_tensor(rows.shape)[0].cast(DType.uint32)
        return experts_anywhere(self, dispatched, rows, n_rows)

    def _scales(self, *names: str) -> TensorValue:
        """Stacks the scales of all experts' matrices of these names."""
        scales = [getattr(e, name).weight_scale for e in self.experts for name in names]
        stacked = ops.stack(scales).reshape((len(self.experts), -1, scales[0].shape[1]))
        return stacked.to(self.devices[0])


def _slices(values: TensorValue, n: int) -> list[TensorValue]:
    """Divides rows into ``n`` slices of equal size; the last ones may be shorter."""
    if n == 1:
        return [values]
    total = ops.shape_to_tensor(values.shape)[0]
    size = (total + (n - 1)) // n
    zero = ops.constant(0, total.dtype, total.device)
    ends = [zero, *(ops.min(size * i, total) for i in range(1, n)), total]
    return [
        ops.slice_tensor(values, [(slice(begin, end), f"tokens_of_rank_{i}"), ...])
        for i, (begin, end) in enumerate(zip(ends, ends[1:]))
    ]


class OneDeviceDecoder(Transformer):
    """MAX's single-device transformer; its graph has the group's EP inputs, if layers
    dispatch."""

    def __init__(
        self,
        config: Any,
        rope: Callable[..., Any],
        attention: Callable[..., Module],
        gate_cls: Callable[..., MoEGate],
        moe_dim: int,
        dense_layers: Collection[int] = (),
    ) -> None:
        """Makes the decoder of MAX's config; its ``ep_config`` is the group.

        ``rope`` and ``attention`` make these layers, called with what all models have.
        ``dense_layers`` have an MLP in place of the MoE layer, and ``moe_dim`` elements
        stand between an expert's two matmuls.
        """
        self.config, group = config, config.ep_config
        self._manager = EPBatchManager(group)
        self._dispatches = not gathers(group, moe_dim)
        dtype, device = config.dtype, config.devices[0]
        hidden, norm_dtype = config.hidden_size, config.norm_dtype or dtype
        embedding = Embedding(config.vocab_size, hidden, dtype, device)
        head = Linear(hidden, config.vocab_size, dtype, device)
        if config.tie_word_embeddings:
            head.set_shared_weight("weight", embedding.weight)
        rope = rope(
            dim=hidden,
            n_heads=config.num_attention_heads,
            theta=config.rope_theta,
            max_seq_len=config.max_seq_len,
            head_dim=config.kv_params.head_dim,
        )

        def norm() -> RMSNorm:
            eps = config.rms_norm_eps
            return RMSNorm(hidden, norm_dtype, eps, multiply_before_cast=False)

        def gate(**sizes: Any) -> MoEGate:  # MAX's MoE has only bfloat16 ones
            gate_dtype = getattr(config, "gate_dtype", None) or dtype
            return gate_cls(**(sizes | {"dtype": gate_dtype}))

        def mlp(layer_idx: int) -> Module:
            if layer_idx in dense_layers:
                sizes = hidden, config.intermediate_size
                return MLP(dtype, None, *sizes, config.devices)
            return OneDeviceMoe(
                self._manager,
                layer=layer_idx - sum(i < layer_idx for i in dense_layers),
                devices=config.devices,
                hidden_dim=hidden,
                num_experts=group.n_experts,
                num_logical_experts=group.num_logical_experts,
                num_experts_per_token=group.top_k,
                moe_dim=moe_dim,
                gate_cls=gate,
                dtype=group.dispatch_dtype if group.is_quantized else dtype,
                quant_config=group.dispatch_quant_config,
            )

        layers = [
            TransformerBlock(
                attention=attention(
                    rope=rope,
                    num_attention_heads=config.num_attention_heads,
                    num_key_value_heads=config.num_key_value_heads,
                    hidden_size=hidden,
                    kv_params=config.kv_params,
                    layer_idx=i,
                    devices=config.devices,
                    scale=config.attention_multiplier,
                    norm_dtype=norm_dtype,
                ),
                mlp=mlp(i),
                attention_norm=norm(),
                mlp_norm=norm(),
                residual_multiplier=config.residual_multiplier,
            )
            for i in range(config.num_hidden_layers)
        ]
        super().__init__(
            dim=hidden,
            n_heads=config.num_attention_heads,
            layers=layers,
            norm=norm(),
            output=head,
            embedding=embedding,
            kv_params=config.kv_params,
            rope=rope,
            return_logits=config.return_logits,
            embedding_multiplier=config.embedding_multiplier,
        )

    def graph_specs(self, model: Any, name: str) -> dict[str, GraphSpec]:
        """Loads a pipeline model's weights, and returns what MAX compiles."""
        self.load_state_dict(
            place_experts(model.state_dict, self.config.ep_config),
            override_quantization_encoding=True,
            weight_alignment=1,
            strict=not model.huggingface_config.tie_word_embeddings,
        )
        inputs = tree.leaves(self.input_tree(model.kv_params))
        spec = GraphSpec(self, name, inputs, weights=self.state_dict())
        return {GraphRole.DECODER: spec}

    def input_tree(self, kv_params: KVCacheParamInterface) -> OrderedDict[str, object]:
        """Returns the graph's inputs by name, in their order."""
        inputs = ragged_kv_symbolic_input_tree(
            kv_params=kv_params,
            device_refs=list(self.config.devices),
            include_signal_buffers=False,
        )
        inputs["ep"] = self._manager.input_types() if self._dispatches else []
        return inputs

    def __call__(
        self,
        tokens: Value[Any],
        row_offsets: Value[Any],
        return_n_logits: Value[Any],
        *rest: Value[Any],
    ) -> tuple[TensorValue, ...]:
        """Takes the graph's inputs, the leaves of :meth:`input_tree`."""
        values = iter(rest)
        caches = self.kv_params.unflatten_kv_inputs(values)
        (cache,) = tree.leaves(caches, leaf=KVCacheInputsPerDevice)
        if self._dispatches:
            self._manager.fetch_buffers(values)
        return super().__call__(
            tokens.tensor, cache, return_n_logits.tensor, row_offsets.tensor
        )
