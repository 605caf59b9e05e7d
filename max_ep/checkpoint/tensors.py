# SPDX-License-Identifier: Apache-2.0
"""The tensors that a model needs, and where a checkpoint stores each.

A matrix of an expert is a tensor of its own, or a part of one with all experts, as
transformers 5 names them. In blockwise FP8 a matrix has factors of its blocks beside
it, in a tensor with ``_scale_inv`` behind its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..moe_shape import MoeShape, dense_layers, fp8_block
from .files import Tensor, and_others

SCALES = "_scale_inv"
"""Behind the name of a matrix."""

WIDE = ("BF16", "F16", "F32")
"""Dtypes of tensors that are not in FP8."""
_FP8 = "F8_E4M3"
_OF_SCALES = (*WIDE, "F8_E8M0")

_LEFTOVERS = re.compile(r"(.*\.)?(inv_freq|k_scale|v_scale)")
"""Names of tensors that have no effect: rotary frequencies, which are computed, and
scales of a KV cache in FP8."""

_PARTS = {
    "Qwen3MoeForCausalLM": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "MiniMaxM2ForCausalLM": ("block_sparse_moe", "w1", "w3", "w2"),
    "DeepseekV3ForCausalLM": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
"""The MoE layer, and an expert's matrices; in transformers 5 the first ones."""
_FUSED = "mlp", "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class Needed:
    """A tensor that a model needs."""

    shape: tuple[int, ...]
    is_matrix: bool = False
    """Whether it may be in FP8."""
    is_expert: bool = False
    """Whether it is one of a routed expert: other ranks do not load it."""
    other_name: str | None = None
    """How transformers 5 names it."""
    part: Part | None = None
    """Where it is in a tensor of all experts."""


@dataclass(frozen=True)
class Part:
    """A matrix in a tensor of all experts."""

    name: str
    shape: tuple[int, ...]
    """The whole tensor's."""
    expert: int
    begin: int
    """The first row of the expert's matrix."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor is stored: in one of its own, or in rows of an expert's part."""

    tensor: Tensor
    expert: int | None = None
    begin: int = 0
    n_rows: int = 0


def needed_tensors(config: Mapping[str, Any]) -> dict[str, Needed]:
    """Returns by name what a model needs, whose ``config.json`` is checked."""
    return dict(_needed(config))


def loaded_bytes(config: Mapping[str, Any], n_gpus: int) -> int:
    """Returns the bytes of weights on all GPUs together, in bfloat16 and FP8: each has
    all but the experts of others."""
    of_expert = 1 if shape_of(config).keeps_fp8(n_gpus) else 2
    return sum(
        math.prod(needed.shape) * (of_expert if needed.is_expert else 2 * n_gpus)
        for needed in needed_tensors(config).values()
    )


def shape_of(config: Mapping[str, Any]) -> MoeShape:
    """Returns the sizes of the MoE layers of a checked ``config.json``."""
    return MoeShape.of(_Fields(config))


class _Fields:
    """A ``config.json`` with attributes."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.__dict__.update(config)


def check_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], keeps_fp8: bool = False
) -> dict[str, Stored]:
    """Returns by name where each tensor that a model needs is stored.

    Raises:
        ValueError: One is missing, has another shape or dtype, or there are some that
            the model does not have; or experts that stay in FP8 are not in it.
    """
    block = fp8_block(_Fields(config))
    stored: dict[str, Stored] = {}
    used: set[str] = set()
    missing = []
    for name, needed in needed_tensors(config).items():
        found = _find(name, needed, tensors)
        if found is None:
            missing.append(name)
            continue
        tensor = found.tensor
        used.add(tensor.name)
        stored[name] = found
        is_fp8 = tensor.dtype == _FP8
        _check_dtype(tensor, needed.is_matrix and block and found.expert is None)
        if keeps_fp8 and needed.is_expert and not is_fp8:
            raise ValueError(
                f"{tensor} is in {tensor.dtype}, and config.json says that it is in "
                "blockwise FP8"
            )
        if is_fp8 and block:
            scales = tensors.get(tensor.name + SCALES)
            if scales is None:
                raise ValueError(f"{tensor} is in FP8 without {tensor.name}{SCALES}")
            _check_scales(scales, needed.shape, block)
            used.add(scales.name)
            stored[name + SCALES] = Stored(scales)
    if missing:
        folder = next(iter(tensors.values())).file.parent if tensors else "the model"
        shape = list(needed_tensors(config)[missing[0]].shape)
        raise ValueError(
            f"{folder} has no tensor {missing[0]} of shape {shape}"
            f"{and_others(missing)}, which its config.json asks for"
        )
    is_leftover = _leftovers_of(config)
    more = [t for n, t in tensors.items() if n not in used and not is_leftover(n)]
    if more:
        raise ValueError(
            f"{more[0]}{and_others(more)}: {config['architectures'][0]} with this "
            "config.json has no such tensor; remove it, or serve the model without "
            "max_ep"
        )
    return stored


def _find(name: str, needed: Needed, tensors: Mapping[str, Tensor]) -> Stored | None:
    """Finds a tensor by its names, or in one of all experts, and checks its shape."""
    for known in (name, needed.other_name):
        if known in tensors:
            _check_shape(tensors[known], needed.shape)
            return Stored(tensors[known])
    part = needed.part
    if part is None or part.name not in tensors:
        return None
    _check_shape(tensors[part.name], part.shape)
    return Stored(tensors[part.name], part.expert, part.begin, needed.shape[0])


def _check_shape(tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tensor.shape != wanted:
        raise ValueError(
            f"{tensor} has shape {list(tensor.shape)}, and config.json wants "
            f"{list(wanted)}"
        )


def _check_dtype(tensor: Tensor, may_be_fp8: Any) -> None:
    served = (*WIDE, _FP8) if may_be_fp8 else WIDE
    if tensor.dtype not in served:
        raise ValueError(
            f"{tensor} has dtype {tensor.dtype}; served is {' or '.join(served)}"
        )


def _check_scales(scales: Tensor, shape: tuple[int, ...], block: list[int]) -> None:
    _check_shape(scales, tuple(-(-n // b) for n, b in zip(shape, block)))
    if scales.dtype not in _OF_SCALES:
        raise ValueError(
            f"{scales} has dtype {scales.dtype}; served is {' or '.join(_OF_SCALES)}"
        )


def _leftovers_of(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Returns whether a tensor is skipped: it has no effect, is the copy of tied
    embeddings, or of a layer behind the last one, which predicts further tokens."""
    n_layers = config["num_hidden_layers"]
    n_more = config.get("num_nextn_predict_layers") or config.get("num_mtp_modules")
    n_more = n_more or int(config["architectures"][0] == "DeepseekV3ForCausalLM")
    is_tied = config["tie_word_embeddings"]

    def is_leftover(name: str) -> bool:
        if _LEFTOVERS.fullmatch(name) or (is_tied and name == "lm_head.weight"):
            return True
        of_layer = re.match(r"model\.layers\.(\d+)\.", name)
        return bool(of_layer) and 0 <= int(of_layer[1]) - n_layers < n_more

    return is_leftover


def _needed(config: Mapping[str, Any]) -> Iterator[tuple[str, Needed]]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", Needed((vocabulary, hidden))
    yield "model.norm.weight", Needed((hidden,))
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", Needed((vocabulary, hidden))
    is_deepseek = config["architectures"][0] == "DeepseekV3ForCausalLM"
    attention = _latent_attention if is_deepseek else _attention
    dense = {*_dense_layers_of(config)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", Needed((hidden,))
        for name, shape in attention(config).items():
            is_matrix = len(shape) == 2
            yield f"{layer}.self_attn.{name}.weight", Needed(shape, is_matrix)
        if i in dense:
            yield from _mlp(f"{layer}.mlp", hidden, config["intermediate_size"])
        else:
            yield from _moe(layer, config)


def _dense_layers_of(config: Mapping[str, Any]) -> Iterator[int]:
    yield from range(config.get("first_k_dense_replace", 0))
    yield from dense_layers(_Fields(config))


def _attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, n_heads = config["hidden_size"], config["num_attention_heads"]
    head = config["head_dim"] or hidden // n_heads
    queries, keys = n_heads * head, config["num_key_value_heads"] * head
    whole = config["architectures"][0] == "MiniMaxM2ForCausalLM"
    return dict(
        q_proj=(queries, hidden),
        k_proj=(keys, hidden),
        v_proj=(keys, hidden),
        o_proj=(hidden, queries),
        q_norm=(queries if whole else head,),
        k_norm=(keys if whole else head,),
    )


def _latent_attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, n_heads = config["hidden_size"], config["num_attention_heads"]
    of_queries, latent = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value = config["v_head_dim"]
    return dict(
        q_a_proj=(of_queries, hidden),
        q_a_layernorm=(of_queries,),
        q_b_proj=(n_heads * (nope + rotated), of_queries),
        kv_a_proj_with_mqa=(latent + rotated, hidden),
        kv_a_layernorm=(latent,),
        kv_b_proj=(n_heads * (nope + value), latent),
        o_proj=(hidden, n_heads * value),
    )


def _mlp(name: str, hidden: int, inner: int) -> Iterator[tuple[str, Needed]]:
    for part in ("gate_proj", "up_proj"):
        yield f"{name}.{part}.weight", Needed((inner, hidden), True)
    yield f"{name}.down_proj.weight", Needed((hidden, inner), True)


def _moe(layer: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Needed]]:
    shape, architecture = shape_of(config), config["architectures"][0]
    hidden, inner = shape.hidden_size, shape.moe_dim
    moe, *matrices = _PARTS[architecture]
    other, gate_up, last = _FUSED

    def router(name: str, sizes: tuple[int, ...]) -> tuple[str, Needed]:
        return f"{layer}.{moe}.{name}", Needed(
            sizes, other_name=f"{layer}.{other}.{name}"
        )

    yield router("gate.weight", (shape.n_experts, hidden))
    if architecture == "MiniMaxM2ForCausalLM":
        yield router("e_score_correction_bias", (shape.n_experts,))
    if architecture == "DeepseekV3ForCausalLM":
        yield router("gate.e_score_correction_bias", (shape.n_experts,))
        wide = config["n_shared_experts"] * inner
        yield from _mlp(f"{layer}.{moe}.shared_experts", hidden, wide)
    n, names = shape.n_experts, f"{layer}.{other}.experts"
    up, down = (inner, hidden), (hidden, inner)
    of_all = (f"{names}.{gate_up}", (n, 2 * inner, hidden))
    of_all_down = (f"{names}.{last}", (n, *down))
    places = ((up, of_all, 0), (up, of_all, inner), (down, of_all_down, 0))
    for expert in range(n):
        for matrix, (sizes, fused, begin) in zip(matrices, places):
            yield (
                f"{layer}.{moe}.experts.{expert}.{matrix}.weight",
                Needed(
                    sizes,
                    is_matrix=True,
                    is_expert=True,
                    part=Part(*fused, expert, begin),
                ),
            )
