# SPDX-License-Identifier: Apache-2.0
"""What the benchmark sends: shapes, peers, routing, data and bytes.

All of it is a function of names and seeds, so every process of a run has the same
inputs, whichever library it drives. NumPy only: neither MAX nor torch is imported
here. Bfloat16 is kept as its bits (``uint16``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from .. import mxfp8_quant_config, reference
from ..formats import BY_NAME
from ..plural import counted

TAG_COLUMNS = 16
"""Leading columns of a token whose signs spell its number in the group."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one model's MoE layer."""

    name: str
    hidden_size: int
    n_experts: int
    top_k: int
    model: str
    """A model with these sizes."""
    moe_dim: int = 0
    """Elements between an expert's two products, where experts are timed."""


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("h7168_e256_k8", 7168, 256, 8, "DeepSeek-V3"),
        Shape("h4096_e128_k8", 4096, 128, 8, "Qwen3-235B-A22B"),
        Shape("h4096_e8_k2", 4096, 8, 2, "Mixtral 8x7B"),
        Shape("h2048_e64_k8", 2048, 64, 8, "OLMoE-1B-7B"),
        Shape("h2048_e128_k8", 2048, 128, 8, "Qwen3-30B-A3B", moe_dim=768),
        Shape("h2880_e32_k4", 2880, 32, 4, "gpt-oss-20b"),
        Shape("h5120_e160_k6", 5120, 160, 6, "DeepSeek-V2"),
        Shape("h7168_e384_k8", 7168, 384, 8, "Kimi K2"),
        Shape("h7168_e896_k16", 7168, 896, 16, "Top-16 of 896 experts"),
    )
}

_SHAPE_NAME = re.compile(r"h(\d+)_e(\d+)_k(\d+)")


def shape_of(name: str) -> Shape:
    """Returns the sizes that a name such as ``h7168_e256_k8`` spells."""
    if not (sizes := _SHAPE_NAME.fullmatch(name)):
        wanted = "hHIDDEN_eEXPERTS_kTOP_K, such as h7168_e256_k8"
        raise ValueError(f"shape {name!r}: needs {wanted}")
    return Shape(name, *map(int, sizes.groups()), model=name)


DTYPES = ("bfloat16", "fp8", "mxfp8", "nvfp4", "mxfp4")
"""Formats of dispatch, by the names of ``max_ep.formats``."""

ROUTINGS = ("uniform", "zipf")
"""``zipf``: expert ``e`` is ``1 / (e + 1)`` as likely as expert 0."""

TOKENS = (1, 8, 32, 128, 512, 4096)
"""Tokens a rank."""

OURS = {
    "sums": {"protocol": "by_rank", "combine_mode": "sums"},
    "rows": {"protocol": "by_rank", "combine_mode": "rows"},
    "by_expert": {"protocol": "by_expert", "combine_mode": "rows"},
}
# What ranks that mask a late peer cost while none is late.
OURS |= {f"{x}_masks": OURS[x] | {"on_timeout": "mask"} for x in ("sums", "rows")}
OURS["sums_mxfp8"] = OURS["sums"] | {"combine_quant_config": mxfp8_quant_config()}
# Dispatch alone: of tokens that are quantized already, and with packed scales.
OURS["given"] = OURS["sums"] | {"tokens_are_quantized": True}
OURS["packed"] = OURS["sums"] | {
    "fp8_power_of_two_scales": True,
    "scale_layout": "packed",
}
"""Peers that are an ``EPBatchManager`` of this library: what ``EPConfig`` says."""

EXPERTS = {
    "experts": ("gathered", "dispatched", "products", "gathered_products"),
    "grouped_mm": ("products",),
}
"""Peers that compute experts, and what a layer of each is made of.

``gathered``: choices sorted, a first product that gathers its rows, the second product,
weighted rows added up; what one GPU serves. ``dispatched``: dispatch, both products,
combine of sums. ``products``: both products of rows that lie sorted by expert, with
SwiGLU between them; ``gathered_products``: of rows that the first product gathers.
``grouped_mm`` is ``torch._grouped_mm``.
"""

FORMS = {
    **dict.fromkeys(OURS, ("fused", "split", "fused_work", "work")),
    "sums": ("fused", "split", "fused_work", "work", "dispatch"),
    **dict.fromkeys(("given", "packed"), ("dispatch",)),
    "all_gather": ("all_gather",),
    "max": ("fused", "split"),
    "max_layer": ("fused",),
    "nccl": ("all_gather", "all_to_all"),
    **dict.fromkeys(("buffer", "buffer_sums"), ("fused", "split")),
    **dict.fromkeys(("elastic", "deepep_v2"), ("plain", "expanded")),
    **dict.fromkeys(("deepep_v1", "trtllm", "nccl_ep"), ("fused",)),
    **EXPERTS,
}
"""Peers, and what a layer of each is made of.

``fused``: one launch for dispatch and one for combine. ``split``: async, then wait.
``work``: async, other work, wait; ``fused_work``: the same work, then fused.
``dispatch``: the fused dispatch, without combine. ``plain``, ``expanded``: a row for
each (token, rank), or for each choice, of an ``ElasticBuffer``.
``all_gather`` is an ``AllGatherTokenDispatcher``; ``max`` MAX's EP; ``max_layer`` what
MAX's MoE layer does on one GPU, without expert parallelism; those from PyTorch see
``torch_layers.py`` and ``other_layers.py``.
"""

FROM_TORCH = (
    "nccl",
    "buffer",
    "buffer_sums",
    "elastic",
    "deepep_v1",
    "deepep_v2",
    "trtllm",
    "nccl_ep",
)
"""Peers that PyTorch runs, one process a GPU."""
LIBRARIES = {"buffer": "rows", "buffer_sums": "sums", "elastic": "plain"}
"""Peers of ``max_ep.torch``, whose kernels ``max-ep bench`` compiles ahead: what
combine sends, or how rows are dispatched."""
WITHOUT_GRAPHS = (*FROM_TORCH, "grouped_mm")
"""Peers that have no graphs to compile."""

_SCHEMES = {
    "sums": ("dedup", "dedup"),
    "rows": ("dedup", "slots"),
    "buffer": ("dedup", "slots"),
    "all_gather": ("gather", "gather"),
    "all_to_all": ("dedup", "dedup"),
}
_SCHEMES |= {f"{name}_masks": _SCHEMES[name] for name in ("sums", "rows")}
_RANKS = "sums_mxfp8 given packed buffer_sums elastic deepep_v2 trtllm nccl_ep"
_SCHEMES |= dict.fromkeys(_RANKS.split(), _SCHEMES["sums"])

# ``max_tokens_per_rank`` is a compile-time size, and the receive buffers grow
# with it: one configuration serves all token counts up to its own.
_MAX_TOKENS = (128, 512, 1024, 4096, 8192)
_EXPERT_LAYERS = 6


@dataclass(frozen=True)
class Config:
    """What one set of compiled graphs is for."""

    peer: str
    """One of :data:`FORMS`."""
    n_ranks: int
    shape_name: str
    dtype: str
    max_tokens: int
    """``max_tokens_per_rank``."""
    target: str = "gpu"
    """Or ``cpu``, whose ranks run one after another."""
    n_layers: int = 8
    """Layers of the timed graph, each with ids of its own."""

    def __post_init__(self) -> None:
        if self.peer in EXPERTS:
            object.__setattr__(self, "n_layers", _EXPERT_LAYERS)

    @property
    def shape(self) -> Shape:
        return SHAPES.get(self.shape_name) or shape_of(self.shape_name)

    @property
    def is_quantized(self) -> bool:
        """Whether dispatch quantizes."""
        return self.dtype != "bfloat16"

    @property
    def is_sums(self) -> bool:
        """Whether the router weights go with dispatch."""
        return OURS.get(self.peer, {}).get("combine_mode") == "sums"

    @property
    def combine_wire(self) -> str:
        """What combine sends, by the names of ``max_ep.formats``."""
        return "mxfp8" if self.peer == "sums_mxfp8" else "bfloat16"

    @property
    def name(self) -> str:
        """Names the folder of compiled graphs."""
        sizes = f"r{self.n_ranks}_{self.shape_name}_{self.dtype}_t{self.max_tokens}"
        return f"{self.peer}_{sizes}_l{self.n_layers}"


@dataclass(frozen=True)
class Case:
    """One row of the table, before its numbers."""

    config: Config
    form: str
    n_tokens: int
    """Tokens a rank."""
    routing: str

    @property
    def name(self) -> str:
        config = self.config.name
        return (
            f"{config} {self.form}, {counted(self.n_tokens, 'token')}, {self.routing}"
        )

    def row(self) -> dict:
        """Returns what docs/performance.json says of the case, without times."""
        config = self.config
        ids = expert_ids(config.shape, self.routing, config.n_ranks, self.n_tokens)
        return {
            "peer": config.peer,
            "form": self.form,
            "ranks": config.n_ranks,
            "shape": config.shape_name,
            "dtype": config.dtype,
            "routing": self.routing,
            "tokens": self.n_tokens,
            "wire_bytes": wire_bytes(self, ids),
        }


def max_tokens_for(n_tokens: int, peer: str) -> int:
    """Returns the ``max_tokens_per_rank`` that a token count is run with; experts have
    one at all sizes, as in a server."""
    sizes = (4096,) if peer in EXPERTS else _MAX_TOKENS
    for size in sizes:
        if n_tokens <= size:
            return size
    raise ValueError(f"{counted(n_tokens, 'token')} a rank: at most {max(sizes)}")


# -------------------------------------------------------------------------- data


def _rng(*names: object) -> np.random.Generator:
    """Makes a generator of its own for everything that has a name."""
    return np.random.default_rng(list("/".join(map(str, names)).encode()))


def expert_ids(
    shape: Shape, routing: str, n_ranks: int, n_tokens: int, seed: int = 0
) -> list[np.ndarray]:
    """Picks distinct experts a token: ``int32 [n_tokens, top_k]``, one a rank."""
    if routing not in ROUTINGS:
        raise ValueError(f"routing={routing!r}; there are {', '.join(ROUTINGS)}")
    weight = np.ones(shape.n_experts)
    if routing == "zipf":
        weight = 1 / np.arange(1, shape.n_experts + 1)

    def of_rank(rank: int) -> np.ndarray:
        rng = _rng(shape.name, routing, n_tokens, seed, rank, "ids")
        # The top_k of `weight` with Gumbel noise: drawn without replacement.
        score = np.log(weight) + rng.gumbel(size=(n_tokens, shape.n_experts))
        order = np.argsort(-score, axis=1)[:, : shape.top_k]
        return np.ascontiguousarray(order.astype(np.int32))

    return [of_rank(rank) for rank in range(n_ranks)]


def tokens(
    shape: Shape, n_ranks: int, n_tokens: int, seed: int = 0
) -> list[np.ndarray]:
    """Makes tokens that carry their number in the group.

    The signs of the first ``TAG_COLUMNS`` elements (all of magnitude 1) are the
    bits of ``rank * n_tokens + token``, so a row says whose it is even after FP8
    rounding. The others are windows of one normal sequence: quick to make, and no
    two tokens are alike. Bits are ``uint16 [n_tokens, hidden_size]`` a rank.
    """
    if n_ranks * n_tokens > 1 << TAG_COLUMNS:
        raise ValueError(f"{n_ranks} x {counted(n_tokens, 'token')} do not fit the tag")
    one, sign = np.uint16(0x3F80), np.uint16(0x8000)
    step = 8
    made = []
    for rank in range(n_ranks):
        rng = _rng(shape.name, n_tokens, seed, rank, "tokens")
        sequence = rng.standard_normal(shape.hidden_size + step * n_tokens, np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(
            reference.float32_to_bfloat16(sequence), shape.hidden_size
        )
        x = windows[: step * n_tokens : step].copy()
        number = rank * n_tokens + np.arange(n_tokens)[:, np.newaxis]
        bits = (number >> np.arange(TAG_COLUMNS) & 1).astype(np.uint16)
        x[:, :TAG_COLUMNS] = one + sign * bits
        made.append(x)
    return made


def router_weights(
    shape: Shape, n_ranks: int, n_tokens: int, seed: int = 0
) -> list[np.ndarray]:
    """Makes random weights that sum to 1: ``float32 [n_tokens, top_k]`` a rank."""

    def of_rank(rank: int) -> np.ndarray:
        rng = _rng(shape.name, n_tokens, seed, rank, "weights")
        w = rng.random((n_tokens, shape.top_k), np.float32) + np.float32(0.1)
        return w / w.sum(axis=1, keepdims=True)

    return [of_rank(rank) for rank in range(n_ranks)]


LAYER_FACTORS = (2.0, 2.0, 0.25)
"""Layer ``l`` of a chain multiplies its tokens by ``LAYER_FACTORS[l % 3]``.

The weights of a layer are :func:`exact_weights` times that. The rows of a token
are equal, so every sum is exact, in any order and also where each rank's part of
it is rounded to bfloat16 on the way. The chain's result is its input times
:func:`chain_factor`, bit for bit. A value of one of the two layers before has
another magnitude and shows.
"""


def exact_weights(shape: Shape, n_ranks: int, ids: np.ndarray) -> np.ndarray:
    """Makes weights of one rank's tokens that are powers of two and sum to 1.

    Those of the choices on one rank sum to a power of two as well: the ranks of a
    token share 1 by halves (1/2, 1/4, ..., and the last one twice), and the choices
    on a rank share its part in the same way.
    """
    n_local = reference.n_local_experts(shape.n_experts, n_ranks)
    rank_of = ids // n_local
    top_k = ids.shape[1]
    # For each choice: how many of its token's choices on the same rank come before it,
    # and how many there are.
    same = rank_of[:, :, np.newaxis] == rank_of[:, np.newaxis, :]
    earlier = np.tril(np.ones((top_k, top_k), bool), -1)
    place, n_same = (same & earlier).sum(axis=2), same.sum(axis=2)
    # For each choice's rank: how many ranks come before it, and how many there are.
    is_first = place == 0
    first_of = (same & is_first[:, np.newaxis, :]).argmax(axis=2)
    met_before = np.cumsum(is_first, axis=1) - is_first
    rank_place = np.take_along_axis(met_before, first_of, axis=1)
    n_met = is_first.sum(axis=1, keepdims=True)

    def halves(place: np.ndarray, n: np.ndarray) -> np.ndarray:
        return 0.5 ** np.minimum(place + 1, n - 1)

    weights = halves(rank_place, n_met) * halves(place, n_same)
    return weights.astype(np.float32)


def chain_factor(n_layers: int) -> float:
    """Returns what a chain of identity experts multiplies its tokens by."""
    return float(np.prod([LAYER_FACTORS[i % 3] for i in range(n_layers)]))


def expert_row(shape: Shape, rank: int) -> np.ndarray:
    """Makes the row that every expert of a rank returns in a chain that quantizes, of
    small integers: weighted sums are exact, and so are their parts in MXFP8."""
    column = np.arange(shape.hidden_size)
    return ((7 * column + 53 * rank) % 31 - 15).astype(np.float32)


def routes(shape: Shape, ids: list[np.ndarray]) -> list[reference.DispatchResult]:
    """Asks the oracle for the order of each rank's rows. The payload of a row is the
    number of its token in the group, so it is quick at any size."""
    first = np.cumsum([0, *map(len, ids)])
    numbers = [np.arange(a, b)[:, np.newaxis] for a, b in zip(first, first[1:])]
    return reference.dispatch(numbers, ids, shape.n_experts)


# ------------------------------------------------------------------------- bytes


def row_bytes(shape: Shape, dtype: str) -> int:
    """Returns the bytes of a row: elements and scales."""
    of, hidden = BY_NAME[dtype], shape.hidden_size
    values = of.row_columns(hidden) * of.dtype.size_in_bytes
    return values + of.n_scales(hidden) * of.scale_dtype.size_in_bytes


def rows_between(shape: Shape, ids: list[np.ndarray], scheme: str) -> np.ndarray:
    """Counts rows, from rank (row) to rank. ``slots``: one for each (token, choice);
    ``dedup``: for each (token, rank); ``gather``: every token to every rank."""
    n_ranks = len(ids)
    n_local = reference.n_local_experts(shape.n_experts, n_ranks)
    rows = np.zeros((n_ranks, n_ranks), np.int64)
    for src, rank_ids in enumerate(ids):
        if scheme == "gather":
            rows[src] = len(rank_ids)
            continue
        goes_to = np.where(rank_ids >= 0, rank_ids // n_local, -1)
        for dst in range(n_ranks):
            hits = goes_to == dst
            rows[src, dst] = hits.sum() if scheme == "slots" else hits.any(axis=1).sum()
    return rows


def wire_bytes(case: Case, ids: list[np.ndarray]) -> int:
    """Counts bytes of dispatch and combine that cross a link, of the busiest rank. What
    combine sends back has the busier direction of dispatch, reversed."""
    config, n_ranks = case.config, len(ids)
    name = case.form if config.peer == "nccl" else config.peer
    schemes = _SCHEMES.get(name, ("slots", "slots"))
    per_rank = np.zeros(n_ranks, np.int64)
    for scheme, wire in zip(schemes, (config.dtype, config.combine_wire)):
        n_bytes = row_bytes(config.shape, wire)
        rows = rows_between(config.shape, ids, scheme)
        remote = rows * (1 - np.eye(n_ranks, dtype=rows.dtype))
        # A link is full duplex, so the busier direction counts.
        per_rank += np.maximum(remote.sum(axis=1), remote.sum(axis=0)) * n_bytes
    return int(per_rank.max())
