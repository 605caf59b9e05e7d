# SPDX-License-Identifier: Apache-2.0
"""The checks of ``EPConfig``, in the order in which it makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from max.driver import accelerator_api, accelerator_architecture_name
from max.dtype import DType

from . import limits
from .balance import Placement
from .formats import PLAIN_DTYPES

if TYPE_CHECKING:
    from .config import EPConfig


def check_choices(config: EPConfig) -> None:
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
            raise ValueError(f"{field}={value!r} is unknown; there are {names}")
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


def _check_integer(
    config: EPConfig, field: str, least: int = 1, more: str = ""
) -> None:
    value = getattr(config, field)
    if not isinstance(value, int) or value < least:
        kind = type(value).__name__
        of_type = "" if kind == "int" else f" of Python's type int, not {kind}"
        raise ValueError(
            f"{field}={value!r} must be an integer >= {least}{of_type}{more}"
        )


def check_sizes(config: EPConfig) -> None:
    """Checks numbers, and that they fit each other."""
    for field in (
        "hidden_size",
        "top_k",
        "n_experts",
        "max_tokens_per_rank",
        "n_gpus_per_node",
        "n_nodes",
        "ranks_per_gpu",
    ):
        _check_integer(config, field)
    for field in ("n_sms", "router_top_k"):
        _check_integer(config, field, 0)
    if not isinstance(config.node_id, int) or not -1 <= config.node_id < config.n_nodes:
        raise ValueError(
            f"node_id={config.node_id!r} must be an integer in [0, n_nodes="
            f"{config.n_nodes}), or -1"
        )
    limits.checked_timeout_s(config.timeout_s)
    if config.top_k > limits.MAX_TOP_K:
        raise ValueError(
            f"top_k={config.top_k} is above {limits.MAX_TOP_K}, the most of a token"
        )
    if config.top_k > config.n_experts:
        above = f"top_k={config.top_k} is above n_experts={config.n_experts}"
        raise ValueError(f"{above}: a token's experts are distinct")
    if config.n_ranks > limits.MAX_RANKS:
        product = f"n_gpus_per_node * n_nodes = {config.n_ranks} ranks"
        raise ValueError(f"{product}, at most {limits.MAX_RANKS} are supported")
    if config.n_gpus_per_node % config.ranks_per_gpu != 0:
        raise ValueError(
            f"ranks_per_gpu={config.ranks_per_gpu} must divide n_gpus_per_node="
            f"{config.n_gpus_per_node}, the ranks of this process"
        )
    is_apart = config.target == "gpu" and config.n_nodes > 1
    if is_apart and not config.uses_shmem and config.n_gpus_per_node > 1:
        raise ValueError(
            f"n_gpus_per_node={config.n_gpus_per_node} with n_nodes={config.n_nodes} "
            "processes of one host: each has one rank; pass n_gpus_per_node=1"
        )
    if config.uses_shmem and config.ranks_per_gpu > 1:
        raise ValueError(
            f"ranks_per_gpu={config.ranks_per_gpu} with n_nodes={config.n_nodes}: "
            "SHMEM has one rank on each GPU; pass ranks_per_gpu=1"
        )
    sends_to_some = not (config.router_top_k or config.use_allreduce)
    if config.masks and (config.uses_shmem or not sends_to_some):
        raise ValueError(
            "on_timeout='mask' is for one host, and neither for an all-gather nor for "
            "use_allreduce=True; pass 'raise'"
        )
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
            f"n_experts={config.n_experts} on {config.n_ranks} GPU ranks is above "
            f"{limits.MAX_GPU_PAIRS}, the most that fit into a block's shared memory"
        )


def check_max_output_rows(config: EPConfig) -> None:
    """Refuses a cap where rows cannot be dropped."""
    n_rows = config.max_output_rows
    if n_rows is None:
        return
    _check_integer(config, "max_output_rows", more=", or None")
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


def check_all_gather(config: EPConfig) -> None:
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
        if config.router_top_k and value != wanted:
            raise ValueError(
                f"an all-gather with {field}={value!r}: it sends each token to all "
                f"ranks, as if each were an expert, and as it is; pass {wanted!r}"
            )


def check_dtypes(config: EPConfig) -> None:
    """Checks dtypes, and the format that follows from them."""
    for field in ("dispatch_dtype", "combine_dtype", "partial_dtype"):
        value = getattr(config, field)
        if not isinstance(value, DType | None):
            kind = f"{field}={value!r} is a {type(value).__name__}"
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
    config.token_format.check_options(config)


def check_hidden_size(config: EPConfig) -> None:
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


def check_scale_layout(config: EPConfig) -> None:
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


def _gpu_before_hopper() -> str:
    """Returns the name of an NVIDIA architecture that lacks launch overlap, or ""."""
    try:
        name = accelerator_architecture_name()
    except ValueError:  # there is no GPU
        return ""
    version = name.removeprefix("sm_").rstrip("af")
    return name if version.isdecimal() and int(version) < 90 else ""


def refusal_by_rank(config: EPConfig) -> str:
    """Says why a group cannot have ``protocol="by_rank"``; empty: it can."""
    if config.uses_shmem:
        return (
            f"with target='gpu' and n_nodes={config.n_nodes}: it reaches the GPUs of "
            "one host only"
        )
    if config.target == "gpu" and accelerator_api() == "hip":
        return "with target='gpu' on AMD GPUs: its kernels are for NVIDIA GPUs"
    if config.target == "gpu" and (gpu := _gpu_before_hopper()):
        return f"with target='gpu' on {gpu}: its kernels need sm_90 or newer"
    for field in ("n_experts", "max_tokens_per_rank"):
        n = getattr(config, field)
        if n > limits.MAX_OF_ENTRY:
            return f"with {field}={n}: it takes at most {limits.MAX_OF_ENTRY}"
    return ""


def check_protocol(config: EPConfig) -> None:
    """Checks that the protocol can do what the other fields ask for."""
    can_mask = config.is_by_rank and config.n_ranks <= limits.MAX_MASKING_GPUS
    if config.masks and config.target == "gpu" and not can_mask:
        raise ValueError(
            f"on_timeout='mask' on GPUs with protocol={config.protocol!r} and "
            f"{config.n_ranks} ranks: it is for 'by_rank', and at most "
            f"{limits.MAX_MASKING_GPUS} ranks; pass on_timeout='raise'"
        )
    if not config.is_by_rank:
        if config.combines_sums:
            raise ValueError(
                f"combine_mode='sums' with protocol={config.protocol!r}: the rank of "
                "an expert can add up a token's rows only with protocol='by_rank'; "
                "pass that, or 'auto', or combine_mode='rows'"
            )
        return
    if refusal := refusal_by_rank(config):
        raise ValueError(
            f"protocol='by_rank' {refusal}; pass protocol='by_expert' (and "
            "combine_mode='rows')"
        )


def check_balance(config: EPConfig) -> None:
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
        _check_integer(config, field, more=" with eplb_enabled=True")
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
            f"{placement.n_logical} logical experts; it must have [num_moe_layers, "
            f"n_experts] = {list(shape)} and num_logical_experts="
            f"{config.num_logical_experts}"
        )
    placement.log2phy(config.max_replicas)  # raises if there are more
    config.eplb_phy2log_plan = placement.phy2log


def check_tables(config: EPConfig, log2phy: np.ndarray, logcnt: np.ndarray) -> None:
    """Checks that each logical expert has replicas that there are."""
    if logcnt.min() < 1 or logcnt.max() > config.max_replicas:
        raise ValueError(
            f"logcnt has numbers in [{logcnt.min()}, {logcnt.max()}]; they must be in "
            f"[1, max_replicas={config.max_replicas}]"
        )
    used = log2phy[np.arange(config.max_replicas) < logcnt[..., None]]
    if used.min() < 0 or used.max() >= config.n_experts:
        raise ValueError(
            f"log2phy has experts in [{used.min()}, {used.max()}]; they must be in "
            f"[0, n_experts={config.n_experts})"
        )
