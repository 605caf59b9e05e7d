# SPDX-License-Identifier: Apache-2.0
"""Which protocol a group can have, and whether its memory can be counted."""

from __future__ import annotations

import warnings

from max.driver import accelerator_api, accelerator_architecture_name
from max.support.human_readable_formatter import to_human_readable_bytes as human

from .. import limits
from ..plural import counted
from .fields import ConfigFields


def _gpu_before_hopper() -> str:
    """Returns the name of an NVIDIA architecture that lacks launch overlap, or ""."""
    try:
        name = accelerator_architecture_name()
    except ValueError:  # there is no GPU
        return ""
    version = name.removeprefix("sm_").rstrip("af")
    return name if version.isdecimal() and int(version) < 90 else ""


def _refusal_of_target(config: ConfigFields) -> str:
    """Says where by rank does not run; empty: it runs on this target."""
    if config.target == "gpu" and accelerator_api() == "hip":
        return "with target='gpu' on AMD GPUs: its kernels are for NVIDIA GPUs"
    if config.target == "gpu" and (gpu := _gpu_before_hopper()):
        return f"with target='gpu' on {gpu}: its kernels need sm_90 or newer"
    return ""


def _too_large_by_rank(config: ConfigFields) -> str:
    """Names a field that is too large for by rank; empty: none is."""
    for field in ("n_experts", "max_tokens_per_rank"):
        if getattr(config, field) > limits.MAX_OF_ENTRY:
            return field
    return ""


def refusal_by_rank(config: ConfigFields) -> str:
    """Says why a group cannot have ``protocol="by_rank"``; empty: it can."""
    refusal, field = _refusal_of_target(config), _too_large_by_rank(config)
    if field and not refusal:
        n = getattr(config, field)
        return f"with {field}={n}: it takes at most {limits.MAX_OF_ENTRY}"
    return refusal


def choose_protocol(config: ConfigFields) -> str:
    """Returns what ``"auto"`` is. Over several hosts rows go by expert: it was not
    measured which of the two is faster there."""
    works = config.combines_sums or not (refusal_by_rank(config) or config.uses_shmem)
    return "by_rank" if works else "by_expert"


def warn_of_by_expert(config: ConfigFields) -> None:
    """Warns if what ``"auto"`` has become costs memory."""
    if note := cost_of_by_expert(config):
        # Between this function and EPConfig's caller are two of its methods.
        warnings.warn(f"max_ep: protocol='auto' is {note}", stacklevel=4)


def cost_of_by_expert(config: ConfigFields) -> str:
    """Says what by expert costs a group that is too large for by rank; empty: another
    protocol would not save anything."""
    field = _too_large_by_rank(config)
    if config.is_by_rank or not field or _refusal_of_target(config):
        return ""
    most = limits.MAX_OF_ENTRY
    costs, instead = (
        human(least_region_bytes(config, name)) for name in ("by_expert", "by_rank")
    )
    remedy = f"Pass {field} <= {most}"
    if field == "max_tokens_per_rank":
        remedy += " and send longer batches in parts"
    return (
        f"'by_expert': {field}={getattr(config, field)} is above {most}, the most of "
        f"'by_rank', and a rank's memory takes at least {costs} instead of {instead}. "
        f"{remedy}, or pass protocol='by_expert' if this is meant"
    )


def least_region_bytes(config: ConfigFields, protocol: str) -> int:
    """Counts the tokens and rows that a rank's symmetric memory has places for, in
    bytes: nearly all of it. Exact, for Python's integers do not overflow."""
    n_tokens, n_ranks = config.max_tokens_per_rank, config.exchange_ranks
    # A source has a place for each token, or for each token and expert.
    n_sent = n_ranks * (config.n_local_experts if protocol == "by_expert" else 1)
    n_back = config.top_k * (n_ranks if config.masks else 1)
    if config.combines_sums:
        n_back = n_ranks
    sent = config.row_columns * config.token_format.dtype.size_in_bytes
    back = config.hidden_size * config.combine_wire_dtype.size_in_bytes
    return n_tokens * (n_sent * sent + n_back * back)


USUAL = {
    "hidden_size": 16384,
    "max_tokens_per_rank": 65536,
    "n_experts": 1024,
    "router_top_k": limits.MAX_TOP_K,
}
"""Sizes of large models. What is the most times as large is called too large."""


def check_memory(config: ConfigFields) -> None:
    """Refuses what kernels cannot count, so that no size overflows in Mojo."""
    n_tokens, n_ranks = config.max_tokens_per_rank, config.exchange_ranks
    n_rows = n_ranks * n_tokens * min(config.top_k, config.n_local_experts)
    n_rows = max(n_rows, n_tokens * config.top_k)
    message = 4 * config.hidden_size + limits.METADATA_BYTES * config.router_top_k
    message += limits.SOURCE_INFO_BYTES
    n_bytes = least_region_bytes(config, config.protocol)
    hidden, tokens, experts, choices = USUAL
    for n, most, what, names in (
        (n_bytes, limits.MAX_ADDRESS, "bytes of memory", [hidden, tokens, experts]),
        (config.n_experts, limits.MAX_EXPERTS, experts, [experts]),
        (message, limits.MAX_COUNT, "bytes in a message", [hidden, choices]),
        (n_rows, limits.MAX_COUNT, "rows", [tokens]),
    ):
        if n > most:
            field = max(names, key=lambda name: getattr(config, name) / USUAL[name])
            given = f"{field}={getattr(config, field)} is too large"
            raise ValueError(
                f"{given}: it makes {n:,} {what}, and {most:,} is the most. A rank's "
                f"memory would take at least {n_bytes:,} bytes ({human(n_bytes)}). "
                f"Pass a smaller {field}"
            )


def check_protocol(config: ConfigFields) -> None:
    """Checks that the protocol can do what the other fields ask for."""
    can_mask = config.is_by_rank and config.n_ranks <= limits.MAX_MASKING_GPUS
    if config.masks and config.target == "gpu" and not can_mask:
        raise ValueError(
            f"on_timeout='mask' on GPUs with protocol={config.protocol!r} and "
            f"{counted(config.n_ranks, 'rank')}: it is for 'by_rank', and at most "
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
