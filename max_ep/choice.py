# SPDX-License-Identifier: Apache-2.0
"""Which wire protocol ``protocol="auto"`` takes: the one that should be fastest.

A round trip, dispatch and combine, is predicted as ``fixed + wire bytes / WIRE_GBPS +
row bytes / ROWS_GBPS``, for uniform routing and ``max_tokens_per_rank`` tokens. Every
rank has the same ``EPConfig``, so all come to the same choice, without a GPU too.

The constants are fitted to the measured tables
``docs/performance.md`` and ``protocols_4_ranks.json`` by
``python -m bench.fit_costs``, which prints them; a test compares them with these.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config_checks import check_protocol
from .limits import FP8_BLOCK, PROTOCOLS

if TYPE_CHECKING:
    from .config import EPConfig

FIXED_US = {
    ("expert_slots", "unreduced"): 27.9,
    ("gather", "reduced"): 11.5,
    ("gather", "unreduced"): 19.9,
    ("rank_slots", "reduced"): 11.9,
    ("rank_slots", "unreduced"): 19.2,
}
"""Microseconds of a round trip without bytes, by protocol and combine mode."""

WIRE_GBPS = 319
"""1e9 bytes a second that cross the links of a rank, as far as they cost time."""

ROWS_GBPS = 7718
"""1e9 bytes a second of rows that a rank delivers and takes back, likewise."""

MARGIN = 0.01
"""How much faster than ``rank_slots`` another protocol must be to be taken."""


@dataclass(frozen=True)
class Prediction:
    """What a protocol would do with a configuration."""

    protocol: str
    wire_bytes: float
    """Bytes that cross a rank's links in one direction, there and back, on average."""
    row_bytes: float
    """Bytes of the rows that dispatch delivers and combine takes, on average."""
    us: float
    """Microseconds of a round trip on GPUs."""
    refusal: str
    """Why the configuration cannot have the protocol; empty: it can."""


def predict(config: EPConfig, protocol: str) -> Prediction:
    """Predicts a round trip of ``max_tokens_per_rank`` tokens a rank.

    Args:
        config: The group; its ``protocol`` does not matter.
        protocol: One of ``limits.PROTOCOLS``.
    """
    there = config.hidden_size * config.dispatch_dtype.size_in_bytes
    if config.is_quantized:
        there += 4 * config.hidden_size // FP8_BLOCK
    row_back = config.hidden_size * config.combine_dtype.size_in_bytes
    back = config.hidden_size * config.combine_wire_dtype.size_in_bytes
    # Messages of a token that leave its rank.
    to_experts = config.top_k * (1 - 1 / config.n_ranks)
    to_ranks = (config.n_ranks - 1) * _chance_of_a_rank(config)
    messages = {
        "expert_slots": to_experts,
        "rank_slots": to_ranks,
        "gather": config.n_ranks - 1,
    }[protocol]
    n = config.max_tokens_per_rank
    messages_back = to_ranks if config.is_reduced else to_experts
    wire = n * (messages * there + messages_back * back)
    rows = n * config.top_k * (there + row_back)
    candidate = copy.copy(config)
    candidate.protocol = protocol
    try:
        check_protocol(candidate)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    fixed = FIXED_US.get((protocol, config.combine_mode), math.inf)
    us = fixed + wire / WIRE_GBPS / 1e3 + rows / ROWS_GBPS / 1e3
    return Prediction(protocol, wire, rows, us, refusal)


def _chance_of_a_rank(config: EPConfig) -> float:
    """Returns how likely a token has an expert on a given rank."""
    others = config.n_experts - config.n_local_experts
    all_choices = math.comb(config.n_experts, config.top_k)
    return 1 - math.comb(others, config.top_k) / all_choices


def choose_protocol(config: EPConfig) -> str:
    """Chooses the protocol of a configuration.

    On CPU ``rank_slots`` where it can be (docs/performance.md).

    Args:
        config: The group; its ``protocol`` does not matter.

    Returns:
        One of ``limits.PROTOCOLS``; if the configuration can have none, the one
        whose refusal says why.
    """
    possible = {
        protocol: prediction
        for protocol in PROTOCOLS
        if not (prediction := predict(config, protocol)).refusal
    }
    if "rank_slots" not in possible:
        # Both others need less of it, but for the number of tokens and experts.
        return "expert_slots" if "expert_slots" in possible else "rank_slots"
    if config.target == "cpu":
        return "rank_slots"
    best = min(possible.values(), key=lambda prediction: prediction.us)
    is_better = best.us < possible["rank_slots"].us * (1 - MARGIN)
    return best.protocol if is_better else "rank_slots"
