# SPDX-License-Identifier: Apache-2.0
"""A decoder on one device, CPU or GPU, around MAX's own blocks.

MAX's Qwen3 builds on collectives, which a CPU has not, and takes expert parallelism
only with several GPUs. This is MAX's single-device ``Transformer`` with an MoE layer
that dispatches. On CPU several ranks share the device and run one after another; each
takes a part of the tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from max import tree
from max.dtype import DType
from max.graph import Graph, TensorValue, Value, ops
from max.graph import Module as GraphModule
from max.nn.embedding import Embedding
from max.nn.kv_cache import KVCacheInputsPerDevice, KVCacheParamInterface
from max.nn.layer import Module
from max.nn.linear import Linear
from max.nn.moe import MoE
from max.nn.transformer import Transformer, TransformerBlock
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec
from max.pipelines.lib.interfaces.batch_processor import (
    ragged_kv_symbolic_input_tree,
)

from ..experts import grouped_swiglu
from ..manager import EPBatchManager
from ..moe import through_experts
from .forward import route


class OneDeviceMoe(MoE):
    """MAX's MoE layer, with dispatch and combine between ranks of one device."""

    def __init__(self, manager: EPBatchManager, gate_dtype: DType, **kwargs: Any):
        """Makes the layer.

        Args:
            manager: Of a group whose ranks are all on this device.
            gate_dtype: Dtype of the router's weights; MAX's layer has bfloat16.
            kwargs: Arguments of MAX's ``MoE``.
        """
        super().__init__(**kwargs)
        self._manager = manager
        self.gate = self.gate_cls(
            devices=self.devices,
            hidden_dim=self.hidden_dim,
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_token,
            dtype=gate_dtype,
        )

    def __call__(self, x: TensorValue) -> TensorValue:
        """Runs the layer.

        Args:
            x: ``[n_tokens, hidden_dim]``.

        Returns:
            The same shape and dtype.
        """
        config = self._manager.config
        ids, weights = route(self.gate, x)
        parts = [_parts(values, config.n_gpus_per_node) for values in (x, ids, weights)]
        sums = through_experts(self._manager, *parts, self._experts_of)
        whole = sums[0] if len(sums) == 1 else ops.concat(sums)
        result = ops.rebind(whole, x.shape).cast(x.dtype)
        return result + self.shared_experts(x) if self.has_shared_experts else result

    def _experts_of(
        self, rank: int, dispatched: tuple[TensorValue, ...]
    ) -> TensorValue:
        """Runs the experts of a rank on the rows it received."""
        if self._manager.config.target == "cpu":
            n = self._manager.config.n_local_experts
            gate_up, down = (
                weights[rank * n : (rank + 1) * n]
                for weights in (self.gate_up_proj, self.down_proj)
            )
            rows, row_offsets, expert_ids, _ = dispatched
            return grouped_swiglu(rows, gate_up, down, row_offsets, expert_ids)
        n_rows = ops.shape_to_tensor(dispatched[0].shape)[0].cast(DType.uint32)
        computed = self._local_ep_compute(dispatched, dispatched[0], n_rows)
        assert computed is not None
        return computed


def _parts(values: TensorValue, n: int) -> list[TensorValue]:
    """Cuts rows into ``n`` parts of equal size, but for the last of them."""
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
    """MAX's single-device transformer whose graph has the group's EP inputs."""

    def __init__(
        self,
        config: Any,
        manager: EPBatchManager,
        rope: Any,
        attention_of: Callable[[int], Module],
        mlp_of: Callable[[int], Module],
        norm: Callable[[], Module],
    ) -> None:
        """Makes the decoder.

        Args:
            config: MAX's config of the architecture.
            manager: The group; its inputs come last in the graph.
            rope: Rotary embedding of the attention layers.
            attention_of: Makes a layer's attention.
            mlp_of: Makes a layer's MoE or MLP.
            norm: Makes a norm over the hidden size.
        """
        self.config = config
        self._manager = manager
        device = config.devices[0]
        embedding = Embedding(
            config.vocab_size, config.hidden_size, config.dtype, device
        )
        head = Linear(config.hidden_size, config.vocab_size, config.dtype, device)
        if config.tie_word_embeddings:
            head.set_shared_weight("weight", embedding.weight)
        super().__init__(
            dim=config.hidden_size,
            n_heads=config.num_attention_heads,
            layers=[
                TransformerBlock(
                    attention=attention_of(i),
                    mlp=mlp_of(i),
                    attention_norm=norm(),
                    mlp_norm=norm(),
                    residual_multiplier=config.residual_multiplier,
                )
                for i in range(config.num_hidden_layers)
            ],
            norm=norm(),
            output=head,
            embedding=embedding,
            kv_params=config.kv_params,
            rope=rope,
            return_logits=config.return_logits,
            embedding_multiplier=config.embedding_multiplier,
        )

    def input_tree(self, kv_params: KVCacheParamInterface) -> OrderedDict[str, object]:
        """Names the graph's inputs, in their order."""
        inputs = ragged_kv_symbolic_input_tree(
            kv_params=kv_params,
            device_refs=list(self.config.devices),
            include_signal_buffers=False,
        )
        inputs["ep"] = self._manager.input_types()
        return inputs

    def trace(
        self,
        *input_types: Any,
        name: str | None = None,
        module: GraphModule | None = None,
        custom_extensions: Iterable[Path] = (),
        is_device_graph: bool = False,
    ) -> Graph:
        """Traces the graph, whose inputs are the leaves of :meth:`input_tree`.

        The arguments are those of MAX's modules.
        """
        n_ep = len(self._manager.input_types())

        def forward(
            tokens: Value[Any],
            row_offsets: Value[Any],
            return_n_logits: Value[Any],
            *rest: Value[Any],
        ) -> tuple[TensorValue, ...]:
            self._manager.fetch_buffers(rest[-n_ep:])
            caches = tree.leaves(
                self.kv_params.unflatten_kv_inputs(iter(rest[:-n_ep])),
                leaf=KVCacheInputsPerDevice,
            )
            return self(
                tokens.tensor, caches[0], return_n_logits.tensor, row_offsets.tensor
            )

        return Graph(
            name or type(self).__qualname__,
            forward,
            input_types=input_types,
            custom_extensions=list(custom_extensions),
            module=module,
            is_device_graph=is_device_graph,
        )


def spec_of(model: Any, decoder: OneDeviceDecoder, name: str) -> dict[str, GraphSpec]:
    """Gives a decoder its weights, and says what MAX is to compile.

    Args:
        model: The pipeline model.
        decoder: Its decoder.
        name: Of the graph.
    """
    decoder.load_state_dict(
        model.state_dict,
        override_quantization_encoding=True,
        weight_alignment=1,
        strict=not model.huggingface_config.tie_word_embeddings,
    )
    return {
        GraphRole.DECODER: GraphSpec(
            decoder,
            name,
            tree.leaves(decoder.input_tree(model.kv_params)),
            weights=decoder.state_dict(),
        )
    }
