# SPDX-License-Identifier: Apache-2.0
"""`protocol="auto"`: a cost model."""

from __future__ import annotations

import dataclasses

import pytest
from cases import CASES

from max_ep import EPConfig, choice
from max_ep.choice import predict


def config_of(**changes) -> EPConfig:
    return CASES["two_ranks"].config(protocol="auto", **changes)


def test_auto_takes_what_can_be() -> None:
    two_hosts = dict(target="gpu", n_nodes=2, n_gpus_per_node=1)
    assert config_of().protocol == "rank_slots"
    assert config_of(target="gpu").protocol == "rank_slots"
    assert config_of(**two_hosts).protocol == "expert_slots"
    assert config_of(max_tokens_per_rank=65536).protocol == "expert_slots"
    with pytest.raises(ValueError, match="'rank_slots'.*one host only"):
        config_of(**two_hosts, combine_mode="reduced")


def test_another_protocol_is_taken_if_it_is_faster(monkeypatch) -> None:
    """By more than the margin; and the same one by every rank, on GPUs only."""
    config = config_of(target="gpu")
    slower = dict(choice.FIXED_US)
    us = predict(config, "gather").us
    for excess, wanted in ((1.005, "rank_slots"), (1.2, "gather")):
        slower["rank_slots", "unreduced"] = us * excess
        monkeypatch.setattr(choice, "FIXED_US", slower)
        for node_id in (-1, 0):
            changed = dataclasses.replace(config, protocol="auto", node_id=node_id)
            assert changed.protocol == wanted
        assert config_of().protocol == "rank_slots"
