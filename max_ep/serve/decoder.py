# SPDX-License-Identifier: Apache-2.0
"""Our decoder: what a checkpoint's description says, on the CPU, one GPU or several.

On several GPUs each has all of the attention, of its own requests, and its experts. On
the CPU several ranks share the device and run one after another; each has a slice of
the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from max import tree
from max.dtype import DType
from max.graph import (
    DeviceRef,
    ShardingStrategy,
    TensorType,
    TensorValue,
    Value,
    ops,
)
from max.nn.comm import Signals
from max.nn.data_parallelism import split_batch_replicated
from max.nn.embedding import Embedding, VocabParallelEmbedding
from max.nn.kv_cache import KVCacheInputsPerDevice
from max.nn.layer import LayerList, Module
from max.nn.linear import MLP, ColumnParallelLinear, Linear
from max.nn.norm import RMSNorm
from max.nn.transformer import ReturnLogits, logits_postprocess
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec

from .. import EPBatchManager
from ..checkpoint import Rope
from ..checkpoint.decoder import Decoder, Layer
from .attention import HeadsAttention
from .held import EXPERTS, HeldExperts
from .hopper import add_norm_anywhere, add_norm_linear_anywhere
from .moe import DecoderMoe, HeldMoe, Router, run_moe
from .rope import CheckpointRope
from .settings import balance_s, gathers, place_experts


class _Block(Module):
    """A layer, on each device."""

    def __init__(self, model: OurDecoder, of: Layer, layer_idx: int) -> None:
        super().__init__()
        self._of = (model,)  # not a part of it
        config, described = model.config, model.described
        devices, dtype = config.devices, config.dtype
        hidden, group = described.hidden_size, config.ep_config
        self.self_attn = HeadsAttention(
            of.attention,
            hidden,
            described.rms_norm_eps,
            config.kv_params,
            dtype,
            devices[0],
        )
        self.input_layernorm = model.new_norm()
        self.post_attention_layernorm = model.new_norm()
        self.mlp: Any = None
        self._is_moe = of.moe is not None
        each = ShardingStrategy.replicate(len(devices))
        of_experts = each
        if of.moe is None:
            self.mlp = MLP(dtype, None, hidden, described.mlp_dim, devices[:1])
        else:
            dense = described.dense_layers
            self._number = layer_idx - sum(i < layer_idx for i in dense)
            moe = of.moe
            kind = DecoderMoe if model.held is None else HeldMoe
            self.mlp = kind(
                devices=devices[:1],
                hidden_dim=hidden,
                num_experts=group.n_experts,
                num_logical_experts=group.num_logical_experts,
                num_experts_per_token=group.top_k,
                moe_dim=moe.dim,
                gate_cls=partial(_new_router, of=moe, of_model=dtype),
                dtype=group.dispatch_dtype if group.is_quantized else dtype,
                quant_config=group.dispatch_quant_config,
                has_shared_experts=moe.shared_dim > 0,
                shared_experts_dim=moe.shared_dim,
                shared_experts_dtype=dtype,
                ep_size=len(devices),
                ep_batch_manager=model.manager if len(devices) > 1 else None,
            )
            of_experts = ShardingStrategy.expert_parallel(len(devices))
        parts = ["self_attn", "input_layernorm", "post_attention_layernorm", "mlp"]
        self._shards = {name: [getattr(self, name)] for name in parts}
        if len(devices) > 1:
            for name in parts:
                part = getattr(self, name)
                part.sharding_strategy = of_experts if name == "mlp" else each
                self._shards[name] = list(part.shard(devices))

    def __call__(
        self,
        layer_idx: TensorValue,
        xs: list[TensorValue],
        more: Sequence[TensorValue] | None,
        caches: Sequence[Any],
        freqs: Sequence[TensorValue],
        row_offsets: Sequence[TensorValue],
    ) -> tuple[list[TensorValue], list[TensorValue]]:
        """Returns the hidden states of each device, and what is to be added to them;
        takes those of the layer before."""
        norms, attentions = self._shards["input_layernorm"], self._shards["self_attn"]
        firsts = [attention.qkv_proj for attention in attentions]
        if more is None:  # the first layer
            normed = [norm(x) for norm, x in zip(norms, xs)]
            qkv = [first(x) for first, x in zip(firsts, normed)]
        else:
            xs, normed, qkv = _add_and_norm(norms, xs, more, firsts)
        of_devices = zip(attentions, normed, qkv, caches, freqs, row_offsets)
        attended = [attention(layer_idx, *values) for attention, *values in of_devices]
        norms, shards = self._shards["post_attention_layernorm"], self._shards["mlp"]
        firsts = [mlp.gate.first if self._is_moe else None for mlp in shards]
        xs, middle, logits = _add_and_norm(norms, xs, attended, firsts)
        if not self._is_moe:
            return xs, [mlp(x) for mlp, x in zip(shards, middle)]
        (model,) = self._of
        results = run_moe(
            shards,
            middle,
            logits,
            model.manager,
            self._number,
            not model.dispatches,
            model.held,
        )
        return xs, results


def _add_and_norm(
    norms: Sequence[RMSNorm],
    xs: Sequence[TensorValue],
    more: Sequence[TensorValue],
    firsts: Sequence[Any],
) -> tuple[list[TensorValue], list[TensorValue], list[Any]]:
    """Returns sums and their norms on each device, and what the layer that takes a norm
    makes of it, if it is given."""
    totals, normed, products = [], [], []
    for norm, x, y, first in zip(norms, xs, more, firsts):
        if first is None:
            found = *add_norm_anywhere(norm, x, y), None
        else:
            found = add_norm_linear_anywhere(norm, x, y, first)
        for values, value in zip((totals, normed, products), found):
            values.append(value)
    return totals, normed, products


def _new_router(*, of: Any, of_model: DType, **sizes: Any) -> Router:
    """Makes a layer's router in the model's dtype; MAX's MoE asks for bfloat16."""
    return Router(of=of, **(sizes | {"dtype": of_model}))


class OurDecoder(Module):
    """A decoder as a checkpoint describes it; its graph has the group's inputs, if
    layers dispatch."""

    def __init__(self, config: Any, described: Decoder) -> None:
        """Makes the decoder of MAX's config, whose ``ep_config`` is the group."""
        super().__init__()
        self.config, self.described = config, described
        self.manager = EPBatchManager(config.ep_config)
        self.dispatches = not gathers(config.ep_config, described)
        self.held: HeldExperts | None = None
        if balance_s():
            self.held = HeldExperts(config.ep_config, described, config.dtype)
        self.devices, dtype = config.devices, config.dtype
        sizes = described.vocab_size, described.hidden_size
        n = len(self.devices)
        if n == 1:
            self.embed_tokens: Any = Embedding(*sizes, dtype, self.devices[0])
            self.lm_head: Any = Linear(*sizes[::-1], dtype, self.devices[0])
            if described.is_tied:
                self.lm_head.set_shared_weight("weight", self.embed_tokens.weight)
        else:
            self.embed_tokens = VocabParallelEmbedding(*sizes, dtype, self.devices)
            tied = self.embed_tokens.weight if described.is_tied else None
            self.lm_head = ColumnParallelLinear(
                *sizes[::-1], dtype, devices=self.devices, tied_weight=tied
            )
        self.layers = LayerList(
            [_Block(self, layer, i) for i, layer in enumerate(described.layers)]
        )
        self.norm = self.new_norm()
        self._norms = [self.norm]
        if n > 1:
            self.norm.sharding_strategy = ShardingStrategy.replicate(n)
            self._norms = list(self.norm.shard(self.devices))

    def new_norm(self) -> RMSNorm:
        """Makes a norm of hidden states."""
        return RMSNorm(
            self.described.hidden_size,
            self.config.dtype,
            self.described.rms_norm_eps,
            multiply_before_cast=False,
        )

    def graph_specs(self, weights: dict[str, Any], name: str) -> dict[str, GraphSpec]:
        """Loads weights under our names, and returns what MAX compiles."""
        self.load_state_dict(
            self.own_weights(weights),
            override_quantization_encoding=True,
            weight_alignment=1,
            strict=not self.described.is_tied,
        )
        spec = GraphSpec(self, name, self._input_types(), weights=self.state_dict())
        return {GraphRole.DECODER: spec}

    def own_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Returns the weights that are no inputs, under the names of the graph."""
        if self.held is None:
            return place_experts(weights, self.config.ep_config)
        return {name: w for name, w in weights.items() if EXPERTS not in name}

    def _input_types(self) -> list[Any]:
        """Returns the graph's inputs, as MAX's batches of Qwen3 have them."""
        cpu, device = DeviceRef.CPU(), self.devices[0]
        offsets = ["input_row_offsets_len"]
        types: list[Any] = [
            TensorType(DType.int64, ["total_seq_len"], device),
            TensorType(DType.uint32, offsets, device),
            TensorType(DType.int64, ["return_n_logits"], cpu),
        ]
        if len(self.devices) > 1:
            splits = [len(self.devices) + 1]
            types += [
                TensorType(DType.uint32, offsets, cpu),
                TensorType(DType.int64, splits, cpu),
                *Signals(devices=self.devices).input_types(),
            ]
        types += tree.leaves(self.config.kv_params.get_symbolic_inputs())
        types += self.manager.input_types() if self.dispatches else []
        return types + (self.held.input_types() if self.held else [])

    def __call__(self, *inputs: Value[Any]) -> tuple[TensorValue, ...]:
        """Takes the graph's inputs, and returns logits."""
        values = iter(inputs)
        tokens, offsets, n_logits = (next(values).tensor for _ in range(3))
        if len(self.devices) == 1:
            xs, of_rows = [self.embed_tokens(tokens)], [offsets]
            xs = self._through_layers(xs, of_rows, self._caches(values))
            return logits_postprocess(
                xs[0],
                offsets,
                n_logits,
                norm=self.norm,
                lm_head=self.lm_head,
                return_logits=self.config.return_logits,
            )
        host_offsets, splits = (next(values).tensor for _ in range(2))
        signals = [next(values).buffer for _ in self.devices]
        caches = self._caches(values)
        xs, of_rows = split_batch_replicated(
            self.devices,
            self.embed_tokens(tokens, signals),
            ops.distributed_broadcast(offsets.to(self.devices[0]), signals),
            host_offsets.cast(DType.int64),
            splits,
        )
        xs = self._through_layers(xs, of_rows, caches)
        last = [ops.gather(x, rows[1:] - 1, axis=0) for x, rows in zip(xs, of_rows)]
        all_last = ops.allgather(last, signals)
        normed = [norm(x) for norm, x in zip(self._norms, all_last)]
        logits = self.lm_head(normed, signals)[0]
        return (ops.cast(logits, DType.float32),)

    def _caches(self, values: Iterator[Value[Any]]) -> list[Any]:
        """Takes the inputs that are caches and the group's."""
        kv_params = self.config.kv_params
        n = len(kv_params.flattened_kv_inputs())
        flat = [next(values) for _ in range(n)]
        caches = kv_params.unflatten_kv_inputs(iter(flat))
        if self.dispatches:
            n_of_group = len(self.manager.input_types())
            self.manager.fetch_buffers([next(values) for _ in range(n_of_group)])
        if self.held:
            self.held.fetch(values)
        return tree.leaves(caches, leaf=KVCacheInputsPerDevice)

    def _through_layers(
        self,
        xs: list[TensorValue],
        row_offsets: Sequence[TensorValue],
        caches: Sequence[Any],
    ) -> list[TensorValue]:
        tables: list[tuple[Rope, list[TensorValue]]] = []
        more: list[TensorValue] | None = None
        for i, (block, layer) in enumerate(zip(self.layers, self.described.layers)):
            rope = layer.attention.rope
            freqs = next((table for known, table in tables if known == rope), None)
            if freqs is None:
                table = CheckpointRope(rope, self.config.max_seq_len).freqs_cis
                freqs = [table.to(device) for device in self.devices]
                tables.append((rope, freqs))
            layer_idx = ops.constant(i, DType.uint32, device=DeviceRef.CPU())
            xs, more = block(layer_idx, xs, more, caches, freqs, row_offsets)
        if self.held:
            self.held.store_counts()
        return [x + y for x, y in zip(xs, more)] if more else xs


def check_returns(model: Any) -> None:
    """Refuses what our decoder does not return on several devices."""
    if len(model.devices) > 1 and model.return_logits != ReturnLogits.LAST_TOKEN:
        raise ValueError(
            f"{model.return_logits} is not served on several GPUs; leave out what asks "
            "for the logits of whole prompts"
        )
