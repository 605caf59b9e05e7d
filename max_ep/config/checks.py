# SPDX-License-Identifier: Apache-2.0
"""The checks of ``EPConfig``, in the order in which it makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from max.dtype import DType
from max.nn.quant_config import QuantConfig

from .. import limits
from ..balance import Placement
from ..formats import PLAIN_DTYPES
from ..limits import checked_int, shown
from ..plural import counted
from ..processes.store import store_of_environment
from .fields import ConfigFields
from .protocol import USUAL


def check_types(config: ConfigFields) -> None:
    """Checks what each field holds, by its annotation; integers become Python's."""
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if field.type == "bool":
            if not isinstance(value, (bool, np.bool_)):
                raise ValueError(f"{name}={shown(value)} must be True or False")
            setattr(config, name, bool(value))
        elif field.type == "int":
            # `check_memory` knows the most for the sizes that memory is made of.
            most = None if name in USUAL else limits.MAX_COUNT
            n = checked_int(name, value, _LEAST.get(name, 0), most)
            setattr(config, name, n)
        elif field.type == "str" and not isinstance(value, str):
            raise ValueError(f"{name}={shown(value)} must be text, not {_kind(value)}")
        elif field.type == "QuantConfig | None":
            if not isinstance(value, QuantConfig | None):
                raise ValueError(
                    f"{name} is a {_kind(value)}; it must be a QuantConfig, as those "
                    "that max_ep.blockwise_fp8_quant_config() and its like make"
                )


def _kind(value: object) -> str:
    return type(value).__name__


_LEAST = dict.fromkeys(
    (
        "hidden_size",
        "top_k",
        "n_experts",
        "max_tokens_per_rank",
        "n_gpus_per_node",
        "n_nodes",
        "ranks_per_gpu",
    ),
    1,
) | {"node_id": -1}
"""The least values of integers that may not be 0, or may be less."""


def check_choices(config: ConfigFields) -> None:
    """Checks fields of few values, and refuses what max_ep does not do."""
    for field, choices in (
        ("target", ("auto", *limits.TARGETS)),
        ("protocol", ("auto", *limits.PROTOCOLS)),
        ("combine_mode", limits.COMBINE_MODES),
        ("output_layout", limits.OUTPUT_LAYOUTS),
        ("scale_layout", ("auto", *limits.SCALE_LAYOUTS)),
        ("on_timeout", limits.ON_TIMEOUT),
    ):
        value = getattr(config, field)
        if value not in choices:
            names = ", ".join(repr(name) for name in choices)
            raise ValueError(f"{field}={shown(value)} is unknown; there are {names}")
    if config.fused_moe_ready:
        raise ValueError(
            "fused_moe_ready=True is not supported: MAX's EP sets it itself, on "
            "Blackwell GPUs, where one launch does dispatch, experts and combine; use "
            "ep_dispatch and ep_combine"
        )
    if config.fused_shared_expert and config.is_padded:
        raise ValueError(
            "fused_shared_expert=True needs output_layout='packed': among padded rows "
            "the shared expert's have no place. Compute it beside the routed experts "
            "and add it, as graphs/moe_layer.py does"
        )


def check_sizes(config: ConfigFields) -> None:
    """Checks numbers, and that they fit each other."""
    if config.node_id >= config.n_nodes:
        raise ValueError(
            f"node_id={config.node_id!r} must be an integer in [0, n_nodes="
            f"{config.n_nodes}), or -1"
        )
    config.timeout_s = limits.checked_timeout_s(config.timeout_s)
    start_s = limits.checked_timeout_s(config.start_timeout_s, "start_timeout_s")
    config.start_timeout_s = start_s
    if config.top_k > limits.MAX_TOP_K:
        raise ValueError(
            f"top_k={config.top_k} is above {limits.MAX_TOP_K}, the most of a token"
        )
    if config.top_k > config.n_experts:
        above = f"top_k={config.top_k} is above n_experts={config.n_experts}"
        raise ValueError(f"{above}: a token's experts are distinct")
    if config.n_ranks > limits.MAX_RANKS:
        product = f"n_gpus_per_node * n_nodes = {counted(config.n_ranks, 'rank')}"
        raise ValueError(f"{product}, at most {limits.MAX_RANKS} are supported")
    if config.n_gpus_per_node % config.ranks_per_gpu != 0:
        raise ValueError(
            f"ranks_per_gpu={config.ranks_per_gpu} must divide n_gpus_per_node="
            f"{config.n_gpus_per_node}, the ranks of this process"
        )
    spans_hosts = config.spans_hosts  # which reads the environment
    is_apart = config.target == "gpu" and config.n_nodes > 1
    if is_apart and not config.uses_shmem and config.n_gpus_per_node > 1:
        raise ValueError(
            f"n_gpus_per_node={config.n_gpus_per_node} with "
            f"n_nodes={counted(config.n_nodes, 'process')} of one host: each has one "
            "rank; pass n_gpus_per_node=1"
        )
    if config.uses_shmem and config.ranks_per_gpu > 1:
        raise ValueError(
            f"ranks_per_gpu={config.ranks_per_gpu} with n_nodes={config.n_nodes}: "
            "SHMEM has one rank on each GPU; pass ranks_per_gpu=1"
        )
    sends_to_some = not (config.router_top_k or config.use_allreduce)
    if config.masks and not sends_to_some:
        raise ValueError(
            "on_timeout='mask' is neither for an all-gather nor for "
            "use_allreduce=True; pass 'raise'"
        )
    if config.masks and spans_hosts:
        _check_masks_of_hosts(config)
    is_uneven = config.n_nodes > 1 or config.n_experts % config.n_ranks != 0
    has_more = config.fused_shared_expert or config.router_top_k
    if config.use_allreduce and (is_uneven or has_more):
        raise ValueError(
            f"use_allreduce=True with n_nodes={config.n_nodes}, n_experts="
            f"{config.n_experts}, fused_shared_expert={config.fused_shared_expert}: it "
            "needs n_nodes=1, experts that the ranks divide, and no all-gather. All "
            "ranks would add a fused shared expert: compute it beside the routed ones, "
            "on one rank"
        )
    n_pairs = config.n_local_experts * config.exchange_ranks
    if config.target == "gpu" and n_pairs > limits.MAX_GPU_PAIRS:
        raise ValueError(
            f"n_experts={config.n_experts} on {counted(config.n_ranks, 'GPU rank')} is "
            f"above {limits.MAX_GPU_PAIRS}, the most that fit into a block's shared "
            "memory"
        )


def _check_masks_of_hosts(config: ConfigFields) -> None:
    """Refuses masks where processes cannot leave and join, or cannot agree."""
    if config.target == "gpu":
        raise ValueError(
            f"on_timeout='mask' with n_nodes={counted(config.n_nodes, 'host')} of "
            "GPUs: they reach each other through NVSHMEM, which no process can leave "
            "or join. All processes start and end it together, and keep their numbers "
            "meanwhile. Pass 'raise', and start all processes again after one has died"
        )
    if config.protocol == "by_expert":
        raise ValueError(
            "on_timeout='mask' over several hosts with protocol='by_expert': it is for "
            "'by_rank'; pass that"
        )
    if not store_of_environment():
        raise ValueError(
            "on_timeout='mask' with ranks of several hosts: set "
            f"{limits.STORE_VARIABLE}=HOST:PORT, where `python -m "
            "max_ep.processes.store PORT` runs, so that the processes can agree on who "
            "goes on"
        )


def check_max_output_rows(config: ConfigFields) -> None:
    """Refuses a cap where rows cannot be dropped."""
    n_rows = config.max_output_rows
    if n_rows is None:
        return
    config.max_output_rows = checked_int("max_output_rows", n_rows, more=", or None")
    if config.is_padded or config.router_top_k:
        raise ValueError(
            f"max_output_rows={n_rows} with output_layout={config.output_layout!r}: "
            "only packed rows are dropped, of no all-gather; leave it out"
        )
    if config.target == "gpu" and not config.is_by_rank:
        raise ValueError(
            f"max_output_rows={n_rows} with protocol={config.protocol!r}: GPU ranks "
            "drop rows by rank only; pass protocol='by_rank', or leave it out"
        )


def check_hierarchical(config: ConfigFields) -> None:
    """Refuses relays where there is no sum of a host, or where one must be awaited of
    ranks that may send none."""
    if not config.hierarchical:
        return
    for field, is_wrong, wanted in (
        ("combine_mode", not config.combines_sums, "'sums'"),
        ("on_timeout", config.on_timeout == "mask", "'raise'"),
        ("max_output_rows", config.max_output_rows is not None, "None"),
    ):
        if is_wrong:
            raise ValueError(
                f"hierarchical=True with {field}={getattr(config, field)!r}: each host "
                f"sends one sum of all its rows of a token; pass {field}={wanted}"
            )
    n_before = config.n_local_experts * (config.n_ranks - 1)
    if config.relays and config.n_experts <= n_before:
        raise ValueError(
            f"hierarchical=True with n_experts={config.n_experts} on "
            f"{counted(config.n_ranks, 'rank')}: the last rank has none, and a rank "
            "that has none relays nothing; pass hierarchical=False"
        )


def check_all_gather(config: ConfigFields) -> None:
    """Checks that to dispatch each rank is an expert, and a token chooses them all."""
    for field, wanted in (
        ("protocol", "by_rank"),
        ("combine_mode", "sums"),
        ("n_experts", config.n_ranks),
        ("top_k", config.n_ranks),
        ("is_quantized", False),
        ("fused_shared_expert", False),
        ("output_layout", "packed"),
    ):
        value = getattr(config, field)
        if config.router_top_k and config.spans_hosts:
            raise ValueError(
                f"an all-gather with n_nodes={config.n_nodes}: it reaches the ranks of "
                "one host only; pass n_nodes=1, or use EPBatchManager"
            )
        if config.router_top_k and value != wanted:
            raise ValueError(
                f"an all-gather with {field}={value!r}: it sends each token to all "
                f"ranks, as if each were an expert, and as it is; pass {wanted!r}"
            )


def check_dtypes(config: ConfigFields) -> None:
    """Checks dtypes, and the format that follows from them."""
    for field in ("dispatch_dtype", "combine_dtype", "partial_dtype"):
        value = getattr(config, field)
        if not isinstance(value, DType | None):
            kind = f"{field}={shown(value)} is a {type(value).__name__}"
            raise ValueError(f"{kind}, it must be a max.dtype.DType, as DType.bfloat16")
    if config.combine_dtype not in PLAIN_DTYPES:
        raise ValueError(
            f"combine_dtype={config.combine_dtype} must be bfloat16 or float32"
        )
    if config.partial_dtype is not None:
        if not config.combines_sums:
            raise ValueError(
                f"partial_dtype={config.partial_dtype} with combine_mode="
                f"{config.combine_mode!r}, which sends no partial sums; leave it out, "
                "or pass combine_mode='sums'"
            )
        if config.partial_dtype not in PLAIN_DTYPES:
            raise ValueError(
                f"partial_dtype={config.partial_dtype} must be bfloat16 or "
                "float32, or None for combine_dtype"
            )
    if config.partial_format is not None:
        if not config.combines_sums or config.partial_dtype is not None:
            raise ValueError(
                f"combine_quant_config with combine_mode={config.combine_mode!r}, "
                f"partial_dtype={config.partial_dtype}: it quantizes partial sums; "
                "pass combine_mode='sums' and no partial_dtype, or leave it out"
            )
        config.partial_format.check_quant_config(
            config.combine_quant_config, "combine_quant_config"
        )
    config.token_format.check_quant_config(config.dispatch_quant_config)
    _check_options(config)


def _check_options(config: ConfigFields) -> None:
    """Refuses what the format of tokens has not."""
    token_format = config.token_format
    if config.nvfp4_dyn_global_scales and not token_format.row_scale_bytes:
        raise ValueError(
            f"nvfp4_dyn_global_scales=True with {token_format.name} dispatch; it "
            "needs dispatch_quant_config=max_ep.nvfp4_quant_config()"
        )
    if config.scale_layout == "packed" and token_format.rounds_scales:
        of_word = 4 * token_format.scale_block
        if not config.fp8_power_of_two_scales or config.hidden_size % of_word != 0:
            raise ValueError(
                "scale_layout='packed' has four exponents in a word: pass "
                "fp8_power_of_two_scales=True and a hidden_size that "
                f"{of_word} divides, not {config.hidden_size}"
            )
    are_pairs = token_format.is_quantized and not token_format.row_scale_bytes
    if config.tokens_are_quantized and not are_pairs:
        raise ValueError(
            f"tokens_are_quantized=True with {token_format.name} dispatch and "
            f"nvfp4_dyn_global_scales={config.nvfp4_dyn_global_scales}: they "
            "are pairs of values and scales of blocks; pass False, or a "
            "dispatch_quant_config without scales of whole tokens"
        )


def check_hidden_size(config: ConfigFields) -> None:
    """Checks that rows are made of whole 16-byte vectors and whole blocks."""
    of_uses = {"dispatch": config.token_format, "partial sums": config.partial_format}
    for use, token_format in of_uses.items():
        block = token_format.scale_block if token_format else 0
        if block and config.hidden_size % block != 0:
            raise ValueError(
                f"hidden_size={config.hidden_size} must be a multiple of {block} for "
                f"{token_format.name.upper()} {use}; pad it"
            )
    for field in ("dispatch_dtype", "combine_dtype", "partial_dtype"):
        dtype = getattr(config, field)
        is_packed = field == "dispatch_dtype"
        n_packed = config.token_format.values_per_byte if is_packed else 1
        n_bytes = config.hidden_size * dtype.size_in_bytes // n_packed if dtype else 0
        if n_bytes % limits.TOKEN_ALIGN_BYTES != 0:
            multiple = n_packed * limits.TOKEN_ALIGN_BYTES // dtype.size_in_bytes
            raise ValueError(
                f"hidden_size={config.hidden_size} of {dtype} ({field}) is {n_bytes} "
                f"bytes, which must be a multiple of {limits.TOKEN_ALIGN_BYTES}; pad "
                f"it to a multiple of {multiple}"
            )


def check_scale_layout(config: ConfigFields) -> None:
    """Chooses the layout of scales, and checks that there can be one."""
    layouts = config.token_format.scale_layouts
    if config.scale_layout == "auto":
        config.scale_layout = layouts[0] if layouts else "auto"
        return
    if config.scale_layout not in layouts:
        names = ", ".join(repr(name) for name in ("auto", *layouts))
        raise ValueError(
            f"scale_layout={config.scale_layout!r} with "
            f"{config.token_format.name} dispatch, which has {names}"
        )
    has_gaps = config.is_padded or config.fused_shared_expert
    if config.scale_layout == "tiles" and has_gaps:
        raise ValueError(
            f"scale_layout='tiles' with output_layout={config.output_layout!r} and "
            f"fused_shared_expert={config.fused_shared_expert}: MAX's matmuls take "
            "tiles for packed rows of routed experts only; pass 'rows'"
        )


def check_balance(config: ConfigFields) -> None:
    """Checks the fields of balanced experts, and puts the first plan into an array."""
    if not (config.eplb_enabled and config.num_logical_experts):
        config.num_logical_experts = config.n_experts
    if not config.eplb_enabled:
        if config.eplb_phy2log_plan is not None:
            raise ValueError(
                "eplb_phy2log_plan is given with eplb_enabled=False: nobody would use "
                "it; pass eplb_enabled=True, or leave the plan out"
            )
        return
    for field in ("num_moe_layers", "max_replicas"):
        more = " with eplb_enabled=True"
        checked_int(field, getattr(config, field), most=limits.MAX_EXPERTS, more=more)
    if not config.top_k <= config.num_logical_experts <= config.n_experts:
        raise ValueError(
            f"num_logical_experts={config.num_logical_experts} must be in [top_k="
            f"{config.top_k}, n_experts={config.n_experts}]: n_experts counts replicas"
        )
    if config.eplb_phy2log_plan is None:
        return
    placement = Placement(config.eplb_phy2log_plan, config.n_ranks)
    shape = config.num_moe_layers, config.n_experts
    has_all = placement.n_logical == config.num_logical_experts
    if placement.phy2log.shape != shape or not has_all:
        raise ValueError(
            f"eplb_phy2log_plan has {list(placement.phy2log.shape)} entries and "
            f"{counted(placement.n_logical, 'logical expert')}; it must have "
            f"[num_moe_layers, n_experts] = {list(shape)} and "
            f"num_logical_experts={config.num_logical_experts}"
        )
    placement.log2phy(config.max_replicas)  # raises if there are more
    config.eplb_phy2log_plan = placement.phy2log


def check_tables(
    config: ConfigFields, log2phy: Sequence[np.ndarray], logcnt: Sequence[np.ndarray]
) -> None:
    """Checks that each logical expert has replicas that there are, on all local ranks
    the same."""
    placements = []
    for of_rank, counts in zip(log2phy, logcnt, strict=True):
        if counts.min() < 1 or counts.max() > config.max_replicas:
            raise ValueError(
                f"logcnt has numbers in [{counts.min()}, {counts.max()}]; they must be "
                f"in [1, max_replicas={config.max_replicas}]"
            )
        is_used = np.arange(config.max_replicas) < counts[..., None]
        used = of_rank[is_used]
        if used.min() < 0 or used.max() >= config.n_experts:
            raise ValueError(
                f"log2phy has experts in [{used.min()}, {used.max()}]; they must be in "
                f"[0, n_experts={config.n_experts})"
            )
        _check_no_place_is_shared(is_used, of_rank)
        placements.append(np.where(is_used, of_rank, -1))
    for rank, placement in enumerate(placements):
        if not np.array_equal(placement, placements[0]):
            raise ValueError(
                f"log2phy and logcnt of local rank {rank} are another placement than "
                "those of local rank 0: tokens would go to other experts than the "
                "router chose; pass the same to all ranks"
            )


def _check_no_place_is_shared(is_used: np.ndarray, log2phy: np.ndarray) -> None:
    """Checks that a physical expert stands for one logical expert of a layer."""
    layer, logical, _ = np.nonzero(is_used)
    entries = np.unique(np.stack([layer, log2phy[is_used], logical], 1), axis=0)
    is_again = (entries[1:, :2] == entries[:-1, :2]).all(1)
    for i in np.flatnonzero(is_again)[:1]:
        (layer_idx, place, one), other = entries[i].tolist(), entries[i + 1, 2]
        raise ValueError(
            f"log2phy has physical expert {place} of layer {layer_idx} for the logical "
            f"experts {one} and {other}: it has the weights of one of them; pass the "
            "tables of a Placement, or others that name a place for one expert only"
        )
