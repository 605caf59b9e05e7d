# SPDX-License-Identifier: Apache-2.0
"""`protocol="auto"`: a cost model, against the tables that its constants are from."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from cases import CASES

from bench.fit_costs import fit, measured
from max_ep import EPConfig, choice
from max_ep.choice import choose_protocol, predict

ROWS = measured()


def test_constants_are_those_of_the_tables() -> None:
    found = fit(ROWS)
    assert {k: round(us, 1) for k, us in found.fixed_us.items()} == choice.FIXED_US
    assert round(found.wire_gbps) == choice.WIRE_GBPS
    assert round(found.rows_gbps) == choice.ROWS_GBPS


def test_predictions_are_near_what_was_measured() -> None:
    for row in ROWS:
        us = predict(row.config, row.protocol).us
        assert abs(us / row.us - 1) < 0.2, (row.protocol, row.combine_mode, us, row.us)


def test_auto_is_as_fast_as_the_best_of_the_tables() -> None:
    """Within 5 %, at every size that was measured, by what was measured."""

    def size(row):
        config = row.config
        return row.combine_mode, config.n_ranks, config.max_tokens_per_rank

    n_compared = 0
    for _, group in itertools.groupby(sorted(ROWS, key=size), size):
        rows = list(group)
        us = {row.protocol: row.us for row in rows}
        chosen = choose_protocol(rows[0].config)
        if len(us) > 1:  # else the run's time was up for the others
            assert us[chosen] <= 1.05 * min(us.values()), (rows[0].config, us)
            n_compared += 1
    assert n_compared >= 22


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
