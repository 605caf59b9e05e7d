# SPDX-License-Identifier: Apache-2.0
"""The checks of an ``EPConfig``, before anything is built from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from max.dtype import DType
from max.nn.quant_config import QuantFormat

from .limits import (
    COMBINE_MODES,
    FP8_BLOCK,
    MAX_GPU_PAIRS,
    MAX_OF_ENTRY,
    MAX_RANKS,
    MAX_TIMEOUT_S,
    MAX_TOP_K,
    OUTPUT_LAYOUTS,
    PLAIN_DTYPES,
    PROTOCOLS,
    TARGETS,
    TOKEN_ALIGN_BYTES,
)

if TYPE_CHECKING:
    from .config import EPConfig

# Fields of MAX's EPConfig that ask for something this library does not do.
_REFUSED = {
    "nvfp4_dyn_global_scales": "NVFP4 dispatch",
    "fuse_ffn_combine_send": "the fused FFN",
    "fused_moe_ready": "the fused FFN",
    "use_allreduce": "all-reduce mode",
    "eplb_enabled": "expert load balancing",
}


def check_choices(config: EPConfig) -> None:
    """Checks the fields that name one of a few things.

    Raises:
        ValueError: If there is no such thing, or no two of them together.
    """
    _check_one_of("target", config.target, TARGETS, has_auto=True)
    _check_one_of("protocol", config.protocol, PROTOCOLS, has_auto=True)
    _check_one_of("combine_mode", config.combine_mode, COMBINE_MODES)
    _check_one_of("output_layout", config.output_layout, OUTPUT_LAYOUTS)
    for field, what in _REFUSED.items():
        if getattr(config, field):
            raise ValueError(
                f"{field}={getattr(config, field)!r} is not supported: max_ep "
                f"has no {what}"
            )
    if config.fused_shared_expert and config.is_padded:
        raise ValueError(
            "fused_shared_expert=True needs output_layout='packed': padded "
            "rows are those of the local experts, and the shared expert's "
            "would have no place there. Compute it beside the routed ones "
            "and add it, as graphs/moe_layer.py does"
        )


def _check_one_of(
    field: str, value: str, choices: tuple[str, ...], has_auto: bool = False
) -> None:
    names = [repr(name) for name in choices]
    if has_auto:
        if value == "auto":
            return
        names.insert(0, "'auto'")
    if value not in choices:
        raise ValueError(f"{field}={value!r} is unknown; there are " + ", ".join(names))


def check_sizes(config: EPConfig) -> None:
    """Checks sizes and counts.

    Raises:
        ValueError: If one is out of range.
    """
    for field in (
        "hidden_size",
        "top_k",
        "n_experts",
        "max_tokens_per_rank",
        "n_gpus_per_node",
        "n_nodes",
        "ranks_per_gpu",
    ):
        value = getattr(config, field)
        if not isinstance(value, int):
            raise ValueError(
                f"{field}={value!r} is a {type(value).__name__}, it must be an "
                "integer >= 1, of Python's type int"
            )
        if value < 1:
            raise ValueError(f"{field}={value!r} must be an integer >= 1")
    if config.top_k > MAX_TOP_K:
        raise ValueError(
            f"top_k={config.top_k} is above {MAX_TOP_K}, the most a token may have"
        )
    if config.top_k > config.n_experts:
        raise ValueError(
            f"top_k={config.top_k} is above n_experts={config.n_experts}: a "
            "token's experts are distinct"
        )
    if config.n_ranks > MAX_RANKS:
        raise ValueError(
            f"n_gpus_per_node * n_nodes = {config.n_ranks} ranks, at most "
            f"{MAX_RANKS} are supported"
        )
    if config.n_gpus_per_node % config.ranks_per_gpu != 0:
        raise ValueError(
            f"ranks_per_gpu={config.ranks_per_gpu} must divide n_gpus_per_node="
            f"{config.n_gpus_per_node}, the ranks of this process"
        )
    if config.uses_shmem and config.ranks_per_gpu > 1:
        raise ValueError(
            f"ranks_per_gpu={config.ranks_per_gpu} with n_nodes={config.n_nodes}: "
            "SHMEM has one rank on each GPU; pass ranks_per_gpu=1"
        )
    is_int = isinstance(config.node_id, int)
    if not is_int or not -1 <= config.node_id < config.n_nodes:
        raise ValueError(
            f"node_id={config.node_id!r} must be an integer in [0, n_nodes="
            f"{config.n_nodes}), or -1"
        )
    is_number = isinstance(config.timeout_s, (int, float))
    if not is_number or not 0 < config.timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout_s={config.timeout_s!r} must be a number of seconds, above 0 and "
            "at most a day"
        )

    if not isinstance(config.n_sms, int) or config.n_sms < 0:
        raise ValueError(
            f"n_sms={config.n_sms!r} must be an integer >= 0; 0 is all there are"
        )
    n_pairs = math.ceil(config.n_experts / config.n_ranks) * config.n_ranks
    if config.target == "gpu" and n_pairs > MAX_GPU_PAIRS:
        raise ValueError(
            f"n_experts={config.n_experts} on {config.n_ranks} GPU ranks is above "
            f"{MAX_GPU_PAIRS}, the most that fit into a block's shared memory"
        )


def check_dtypes(config: EPConfig) -> None:
    """Checks dtypes, of the wire and of results.

    Raises:
        ValueError: If one is out of range.
    """
    for field in ("dispatch_dtype", "combine_dtype", "partial_dtype"):
        value = getattr(config, field)
        if not isinstance(value, DType | None):
            raise ValueError(
                f"{field}={value!r} is a {type(value).__name__}, it must be a "
                "max.dtype.DType, as DType.bfloat16"
            )
    if config.combine_dtype not in PLAIN_DTYPES:
        raise ValueError(
            f"combine_dtype={config.combine_dtype} must be bfloat16 or float32"
        )
    if config.partial_dtype is not None:
        if not config.combines_sums:
            raise ValueError(
                f"partial_dtype={config.partial_dtype} with combine_mode="
                f"{config.combine_mode!r}: only combine_mode='sums' sends "
                "partial sums; pass None, or combine_mode='sums'"
            )
        if config.partial_dtype not in PLAIN_DTYPES:
            raise ValueError(
                f"partial_dtype={config.partial_dtype} must be bfloat16 or "
                "float32, or None for combine_dtype"
            )
    quant = config.dispatch_quant_config
    if config.dispatch_dtype in PLAIN_DTYPES:
        if quant is not None:
            raise ValueError(
                f"dispatch_quant_config given with dispatch_dtype="
                f"{config.dispatch_dtype}; pass None, or dispatch_dtype="
                "float8_e4m3fn"
            )
        return
    if config.dispatch_dtype != DType.float8_e4m3fn:
        raise ValueError(
            f"dispatch_dtype={config.dispatch_dtype} must be bfloat16, "
            "float32 or float8_e4m3fn"
        )
    if quant is None:
        raise ValueError(
            "dispatch_dtype=float8_e4m3fn needs a dispatch_quant_config: "
            "max_ep.blockwise_fp8_quant_config() makes the supported one"
        )
    if (
        quant.format != QuantFormat.BLOCKSCALED_FP8
        or quant.input_scale.block_size != (1, FP8_BLOCK)
        or quant.input_scale.dtype != DType.float32
    ):
        raise ValueError(
            f"dispatch_quant_config has format {quant.format}, scales of "
            f"{quant.input_scale.dtype} for blocks of "
            f"{quant.input_scale.block_size}; supported is "
            f"{QuantFormat.BLOCKSCALED_FP8} with float32 scales for blocks "
            f"of (1, {FP8_BLOCK})"
        )


def check_hidden_size(config: EPConfig) -> None:
    """Checks that rows are made of whole 16-byte words.

    Raises:
        ValueError: If one is out of range.
    """
    if config.is_quantized and config.hidden_size % FP8_BLOCK != 0:
        raise ValueError(
            f"hidden_size={config.hidden_size} must be a multiple of "
            f"{FP8_BLOCK} for FP8 dispatch; pad it"
        )
    for field in ("dispatch_dtype", "combine_dtype", "partial_dtype"):
        if getattr(config, field) is None:
            continue
        element_bytes = getattr(config, field).size_in_bytes
        if config.hidden_size * element_bytes % TOKEN_ALIGN_BYTES != 0:
            raise ValueError(
                f"hidden_size={config.hidden_size} of {getattr(config, field)} "
                f"({field}) is {config.hidden_size * element_bytes} bytes, "
                f"which must be a multiple of {TOKEN_ALIGN_BYTES}; pad it "
                f"to a multiple of {TOKEN_ALIGN_BYTES // element_bytes}"
            )


def refusal_by_rank(config: EPConfig) -> str:
    """Says why a group cannot have ``protocol="by_rank"``; empty: it can."""
    if config.uses_shmem:
        return (
            f"with target='gpu' and n_nodes={config.n_nodes}: it reaches the GPUs of "
            "one host only"
        )
    if config.is_on_amd:
        return "with target='gpu' on AMD GPUs: its kernels are for NVIDIA GPUs"
    for field in ("n_experts", "max_tokens_per_rank"):
        if getattr(config, field) > MAX_OF_ENTRY:
            return (
                f"with {field}={getattr(config, field)}: it can tell apart at most "
                f"{MAX_OF_ENTRY}"
            )
    return ""


def check_protocol(config: EPConfig) -> None:
    """Checks that the protocol can do what the other fields ask for.

    Raises:
        ValueError: If it cannot.
    """
    if not config.is_by_rank:
        if config.combines_sums:
            raise ValueError(
                f"combine_mode='sums' with protocol={config.protocol!r}: the rank of "
                "an expert can add up a token's rows only with protocol='by_rank'; "
                "pass that, or 'auto', or combine_mode='rows'"
            )
        return
    refusal = refusal_by_rank(config)
    if refusal:
        raise ValueError(
            f"protocol='by_rank' {refusal}; pass protocol='by_expert' (and "
            "combine_mode='rows')"
        )
