# SPDX-License-Identifier: Apache-2.0
"""Checks of balanced experts: the fields of EPConfig, and the tables of a placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .balance import Placement

if TYPE_CHECKING:
    from .config import EPConfig


def check_fields(config: EPConfig) -> None:
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
        value = getattr(config, field)
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{field}={value!r} must be an integer >= 1 with eplb_enabled=True"
            )
    if not config.top_k <= config.num_logical_experts <= config.n_experts:
        raise ValueError(
            f"num_logical_experts={config.num_logical_experts} must be in [top_k="
            f"{config.top_k}, n_experts={config.n_experts}]: n_experts counts replicas"
        )
    if config.eplb_phy2log_plan is None:
        return
    placement = Placement(np.asarray(config.eplb_phy2log_plan), config.n_ranks)
    shape = config.num_moe_layers, config.n_experts
    if placement.phy2log.shape != shape or (
        placement.n_logical != config.num_logical_experts
    ):
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
