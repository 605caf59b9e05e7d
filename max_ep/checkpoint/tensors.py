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
from dataclasses import dataclass, replace
from typing import Any

from ..plural import counted
from .architectures import described
from .decoder import Attention, Decoder, LatentAttention, Moe, Names
from .files import Tensor, and_others, are_equal

SCALES = "_scale_inv"
"""Behind the name of a matrix."""

WIDE = ("BF16", "F16", "F32")
"""Dtypes of tensors that are not in FP8."""
_FP8 = "F8_E4M3"
_U8 = "U8"
_OF_SCALES = (*WIDE, "F8_E8M0")

_LEFTOVERS = re.compile(r"(.*\.)?(inv_freq|k_scale|v_scale)")
"""Names of tensors that have no effect: rotary frequencies, which are computed, and
scales of a KV cache in FP8."""

_FUSED = "mlp", "gate_up_proj", "down_proj"
"""What transformers 5 calls the MoE layer, and its tensors of all experts."""

_HEAD = "lm_head.weight"

_ONE_MORE = ("DeepseekV3ForCausalLM", "HYV3ForCausalLM")
"""Architectures with a layer behind the last one that ``config.json`` may not name."""

_OF_IMAGES = "model.visual."
"""The begin of names of tensors that text does not need."""


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
    parts: tuple[Part, ...] = ()
    """Where it may be in a tensor of all experts."""
    here: str = ""
    """What our own decoder calls it."""


@dataclass(frozen=True)
class Part:
    """A matrix in a tensor of all experts."""

    name: str
    shape: tuple[int, ...]
    """The whole tensor's."""
    expert: int
    begin: int
    """The first row of the expert's matrix."""
    step: int = 1
    """How many rows on the next one is."""
    is_transposed: bool = False
    """Whether rows are columns of the tensor."""
    scales: str | None = None
    """The tensor with the exponents of its blocks, if it is in MXFP4."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor is stored: in one of its own, or in an expert's part."""

    tensor: Tensor
    here: str = ""
    """What our own decoder calls it."""
    part: Part | None = None
    shape: tuple[int, ...] = ()
    """That of the part."""
    scales: Tensor | None = None
    """Exponents of blocks of an expert's part in MXFP4."""

    @property
    def has_rows(self) -> bool:
        """Whether its rows stand one after another, as rows of the tensor."""
        part = self.part
        return part is None or (part.step == 1 and not part.is_transposed)


def needed_tensors(config: Mapping[str, Any]) -> dict[str, Needed]:
    """Returns by name what a model needs, whose ``config.json`` is checked."""
    names = described(config).names
    return {
        name: replace(needed, other_name=_other(name, names), here=_here(name, names))
        for name, needed in _needed(config)
    }


def _other(name: str, names: Names) -> str | None:
    """Returns how transformers 5 names a tensor, if in another way."""
    other = name.replace(f".{names.moe}.", f".{_FUSED[0]}.")
    for end, their_end in names.in_transformers.items():
        other = other.replace(f".{end}", f".{their_end}")
    return None if other == name else other


def _here(name: str, names: Names) -> str:
    """Returns how our decoder names a tensor."""
    here = name.removeprefix(f"{names.model}.").replace(f".{names.moe}.", ".mlp.")
    if names.correction and here.endswith(f".mlp.{names.correction}"):
        return here.removesuffix(names.correction) + "gate.e_score_correction_bias"
    here = here.replace(f".mlp.{names.router}.", ".mlp.gate.gate_score.")
    here = here.replace(f".mlp.{names.shared}.", ".mlp.shared_experts.")
    here = here.replace(f".mlp.{names.shared}_gate.weight", ".mlp.shared_gate")
    expert, dot, matrix = here.rpartition(".experts.")
    for theirs, ours in zip(names.matrices, Names().matrices):
        matrix = matrix.replace(f".{theirs}.", f".{ours}.")
    return expert + dot + matrix


def loaded_bytes(config: Mapping[str, Any], n_gpus: int) -> tuple[int, int]:
    """Returns the bytes of weights on each GPU, in FP8 and wider, with heads of zeros.
    Each has all but the experts of others; the CPU, where ``n_gpus`` is 0, has all in
    float32."""
    model = described(config)
    kept, in_fp8, wide = kept_in_fp8(model, n_gpus), 0, 0
    of = model.layers[0].attention
    is_latent = isinstance(of, LatentAttention)
    for name, needed in needed_tensors(config).items():
        n = math.prod(of.filled(name, needed.shape) if is_latent else needed.shape)
        n = n // (n_gpus or 1) if needed.is_expert else n
        if any(part in name for part in kept):
            in_fp8 += n
        else:
            wide += (2 if n_gpus else 4) * n
    return in_fp8, wide


def kept_in_fp8(model: Decoder, n_gpus: int) -> tuple[str, ...]:
    """Returns parts of the names of matrices that stay in blockwise FP8."""
    if not model.keeps_fp8(n_gpus):
        return ()
    more = (".shared_experts.",) if model.moe.dispatches_shared else ()
    return (".experts.", *more)


def check_tensors(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    kept: tuple[str, ...] = (),
) -> dict[str, Stored]:
    """Returns by name where each tensor that a model needs is stored. ``kept`` are
    parts of the names of those that stay in FP8.

    Raises:
        ValueError: One is missing, has another shape or dtype, or there are some that
            the model does not have; or experts that stay in FP8 are not in it.
    """
    block = described(config).fp8_block
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
        if found.scales is not None:
            used.add(found.scales.name)
            _check_dtype(tensor, (_U8,))
            _check_dtype(found.scales, (_U8,))
            continue
        may_be_fp8 = needed.is_matrix and block and found.has_rows
        _check_dtype(tensor, (*WIDE, _FP8) if may_be_fp8 else WIDE)
        if needed.is_matrix and not is_fp8 and any(part in name for part in kept):
            raise ValueError(
                f"{tensor} is in {tensor.dtype}, and config.json says that it is in "
                "blockwise FP8"
            )
        if is_fp8 and block:
            scales = tensors.get(tensor.name + SCALES)
            if scales is None:
                raise ValueError(f"{tensor} is in FP8 without {tensor.name}{SCALES}")
            stored[name + SCALES] = _scales_of(found, scales, needed, block)
            used.add(scales.name)
    if missing:
        folder = next(iter(tensors.values())).file.parent if tensors else "the model"
        shape = list(needed_tensors(config)[missing[0]].shape)
        raise ValueError(
            f"{folder} has no tensor {missing[0]} of shape {shape}"
            f"{and_others(missing)}, which its config.json asks for"
        )
    _check_copy(config, tensors)
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
            return Stored(tensors[known], needed.here)
    parts = [part for part in needed.parts if part.name in tensors]
    if not parts:
        return None
    # As in transformers: rows are columns only where the shape says so.
    fits = [part for part in parts if tensors[part.name].shape == part.shape]
    part = (fits or parts)[0]
    _check_shape(tensors[part.name], part.shape)
    if part.scales is None:
        return Stored(tensors[part.name], needed.here, part, needed.shape)
    scales = tensors.get(part.scales)
    if scales is None:
        raise ValueError(f"{tensors[part.name]} is in MXFP4 without {part.scales}")
    _check_shape(scales, part.shape[:-1])
    return Stored(tensors[part.name], needed.here, part, needed.shape, scales)


def _check_copy(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuses another ``lm_head`` than the embedding that is tied to it: transformers
    does not tie them then."""
    model, copy = described(config), tensors.get(_HEAD)
    embedding = tensors[f"{model.names.model}.embed_tokens.weight"]
    if copy and model.is_tied and not are_equal(copy, embedding):
        raise ValueError(
            f"{copy} is not {embedding.name}, and config.json says "
            "tie_word_embeddings=true; say false, or remove the tensor"
        )


def _check_shape(tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tensor.shape != wanted:
        raise ValueError(
            f"{tensor} has shape {list(tensor.shape)}, and config.json wants "
            f"{list(wanted)}"
        )


def _check_dtype(tensor: Tensor, served: tuple[str, ...]) -> None:
    if tensor.dtype not in served:
        raise ValueError(
            f"{tensor} has dtype {tensor.dtype}; served is {' or '.join(served)}"
        )


def _scales_of(
    matrix: Stored, scales: Tensor, needed: Needed, block: tuple[int, int]
) -> Stored:
    """Checks the scales of a matrix in FP8, or of a tensor that has it, and returns
    where its own are."""
    *experts, rows, columns = matrix.tensor.shape
    _check_shape(scales, (*experts, -(-rows // block[0]), -(-columns // block[1])))
    if scales.dtype not in _OF_SCALES:
        raise ValueError(
            f"{scales} has dtype {scales.dtype}; served is {' or '.join(_OF_SCALES)}"
        )
    here, part = f"{needed.here}_scale", matrix.part
    if part is None:
        return Stored(scales, here)
    if part.begin % block[0]:
        raise ValueError(
            f"{scales} has a scale for {counted(block[0], 'row')}, of gate and of up; "
            "store each in a tensor of its own"
        )
    begin, n_rows = part.begin // block[0], -(-needed.shape[0] // block[0])
    own = Part(scales.name, scales.shape, part.expert, begin)
    return Stored(scales, here, own, (n_rows, scales.shape[-1]))


def _leftovers_of(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Returns whether a tensor is skipped: it has no effect, is the copy of tied
    embeddings, or of a layer behind the last one, which predicts further tokens."""
    model = described(config)
    n_layers, is_tied = len(model.layers), model.is_tied
    n_more = config.get("num_nextn_predict_layers") or config.get("num_mtp_modules")
    n_more = n_more or int(config["architectures"][0] in _ONE_MORE)

    def is_leftover(name: str) -> bool:
        if _LEFTOVERS.fullmatch(name) or (is_tied and name == _HEAD):
            return True
        if name.startswith(_OF_IMAGES):
            return True
        of_layer = re.match(r"model\.layers\.(\d+)\.", name)
        return bool(of_layer) and 0 <= int(of_layer[1]) - n_layers < n_more

    return is_leftover


def _needed(config: Mapping[str, Any]) -> Iterator[tuple[str, Needed]]:
    model = described(config)
    hidden, names = model.hidden_size, model.names
    embedding = (model.vocab_size, hidden)
    yield f"{names.model}.embed_tokens.weight", Needed(embedding)
    yield f"{names.model}.norm.weight", Needed((hidden,))
    if not model.is_tied:
        yield _HEAD, Needed(embedding)
    for i, layer in enumerate(model.layers):
        prefix = f"{names.model}.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", Needed((hidden,))
        of = layer.attention
        latent = isinstance(of, LatentAttention)
        tensors = _latent(of, hidden) if latent else _attention(of, hidden)
        for name, shape in tensors:
            yield f"{prefix}.self_attn.{name}", Needed(shape, len(shape) == 2)
        if layer.moe is None:
            yield from _mlp(f"{prefix}.mlp", hidden, model.mlp_dim)
        else:
            yield from _moe(prefix, layer.moe, hidden, names)


_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _attention(of: Attention, hidden: int) -> _Shapes:
    queries, keys = of.n_heads * of.head_dim, of.n_kv_heads * of.head_dim
    for name, n in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"{name}.weight", (n, hidden)
        if of.has_bias:
            yield f"{name}.bias", (n,)
    yield "o_proj.weight", (hidden, queries)
    if of.has_output_bias:
        yield "o_proj.bias", (hidden,)
    if of.norm:
        whole = of.norm == "all"
        yield "q_norm.weight", (queries if whole else of.head_dim,)
        yield "k_norm.weight", (keys if whole else of.head_dim,)
    if of.has_sinks:
        yield "sinks", (of.n_heads,)
    if of.has_gate:
        yield "g_proj.weight", (of.n_heads, hidden)


def _latent(of: LatentAttention, hidden: int) -> _Shapes:
    head = of.nope_dim + of.rope_dim
    yield "q_a_proj.weight", (of.q_rank, hidden)
    yield "q_a_layernorm.weight", (of.q_rank,)
    yield "q_b_proj.weight", (of.n_heads * head, of.q_rank)
    yield "kv_a_proj_with_mqa.weight", (of.kv_rank + of.rope_dim, hidden)
    yield "kv_a_layernorm.weight", (of.kv_rank,)
    yield "kv_b_proj.weight", (of.n_heads * (of.nope_dim + of.value_dim), of.kv_rank)
    yield "o_proj.weight", (hidden, of.n_heads * of.value_dim)


def _mlp(name: str, hidden: int, inner: int) -> Iterator[tuple[str, Needed]]:
    for part in ("gate_proj", "up_proj"):
        yield f"{name}.{part}.weight", Needed((inner, hidden), True)
    yield f"{name}.down_proj.weight", Needed((hidden, inner), True)


def _moe(
    layer: str, of: Moe, hidden: int, names: Names
) -> Iterator[tuple[str, Needed]]:
    moe = f"{layer}.{names.moe}"
    n, inner = of.n_experts, of.dim
    yield f"{moe}.{names.router}.weight", Needed((n, hidden))
    if of.router.has_bias:
        yield f"{moe}.{names.router}.bias", Needed((n,))
    if names.correction:
        yield f"{moe}.{names.correction}", Needed((n,))
    if of.shared_dim:
        yield from _mlp(f"{moe}.{names.shared}", hidden, of.shared_dim)
    if of.has_shared_gate:
        yield f"{moe}.{names.shared}_gate.weight", Needed((1, hidden))
    other, gate_up, down = _FUSED
    if of.is_clamped:
        yield f"{moe}.experts.{gate_up}_bias", Needed((n, 2 * inner))
        yield f"{moe}.experts.{down}_bias", Needed((n, hidden))
    fused = f"{layer}.{other}.experts"
    gap = 2 if names.is_interleaved else 1
    second = 1 if names.is_interleaved else inner
    matrices = zip(names.matrices, ((inner, hidden), (inner, hidden), (hidden, inner)))
    places = ((gate_up, 0, gap), (gate_up, second, gap), (down, 0, 1))
    for (matrix, sizes), (tensor, begin, step) in zip([*matrices], places):
        rows, columns = 2 * inner if tensor == gate_up else hidden, sizes[1]
        shapes = {False: (n, rows, columns), True: (n, columns, rows)}
        for expert in range(n):
            of_all, where = f"{fused}.{tensor}", (expert, begin, step)
            parts = tuple(
                Part(of_all, shapes[turned], *where, turned) for turned in names.fused
            )
            if names.may_be_mxfp4 and columns % 32 == 0:
                blocks = (n, rows, columns // 32, 16)
                scales = f"{of_all}_scales"
                parts += (Part(f"{of_all}_blocks", blocks, *where, scales=scales),)
            yield (
                f"{moe}.experts.{expert}.{matrix}.weight",
                Needed(sizes, is_matrix=True, is_expert=True, parts=parts),
            )
