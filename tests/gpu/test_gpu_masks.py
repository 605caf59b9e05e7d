# SPDX-License-Identifier: Apache-2.0
"""GPU ranks that mask a peer: what the others get is the oracle's, without it.

A rank whose ops are left out of the graph is one that has died.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from max_ep import EPCommInitializer, EPConfig, reference
from max_ep.graph.checks import OpOrder
from tests.harness import (
    assert_round_trip,
    building,
    flatten,
    fused_round_trip,
    round_trip,
    take_outputs,
    to_numpy,
)
from tests.oracle.cases import PROTOCOLS, Case, in_protocols
from tests.oracle.drawn import Inputs, make_inputs
from tests.oracle.oracle import expected

BY_RANK = [suffix for suffix in PROTOCOLS if suffix]


def without(case: Case, given: Inputs, dead: int) -> Inputs:
    """What is left of some inputs: no tokens of a rank, no choices of its experts."""
    first, n_local = dead * case.n_local_experts, case.n_local_experts
    ids = [
        np.where((x >= first) & (x < first + n_local), -1, x).astype(x.dtype)
        for x in given.ids
    ]
    lists = [[*x] for x in (given.tokens, ids, given.weights)]
    for of_ranks in lists:
        of_ranks[dead] = of_ranks[dead][:0]
    return Inputs(*lists, given.input_scales, given.expert_rows)


def masks(comm: EPCommInitializer) -> list[list[int]]:
    first, n = comm.config.sizes().masked_word, comm.config.n_ranks
    return [
        to_numpy(c)[first : first + n].tolist() for c in comm._ranks.local.counters[0]
    ]


class Steps:
    """A captured step of some of a case's ranks: the last ones have died."""

    def __init__(
        self, session, case: Case, config: EPConfig, n_alive: int, build: Callable
    ) -> None:
        self.case, self.config, self.n_alive = case, config, n_alive
        name = f"masks_{case.name}_{build.__name__}_{config.ranks_per_gpu}"
        with building(name, case, config) as (manager, ranks, graph):
            built = build(manager, ranks[:n_alive])
            graph.output(*(v for rank in built for v in rank))
        self.model = session.load(graph)

    def check(self, comm: EPCommInitializer, routing: str, dead: int) -> float:
        """Runs a step and compares it with the oracle; returns how long it took."""
        given = make_inputs(self.case, routing)
        inputs = flatten(given, self.config) + comm.model_inputs()
        begin = time.monotonic()
        outputs = self.model.execute(*inputs)
        comm.check()
        taken = time.monotonic() - begin
        of_alive = replace(self.case, n_ranks=self.n_alive)
        got = take_outputs(of_alive, iter(outputs))
        want = expected(self.case, without(self.case, given, dead))
        where = f"{self.case.name}, {routing}"
        assert_round_trip(where, got, want.of(slice(self.n_alive)))
        return taken


def cases_of(n_ranks: int, n_tokens: int) -> dict[str, Case]:
    sizes = n_ranks, 2 * n_ranks + 1, 3, 512, n_tokens
    cases = in_protocols([Case("masks", *sizes)])
    quantized = dict(name="masks_mxfp8_sums", partial="mxfp8")
    return cases | {"masks_mxfp8_sums": replace(cases["masks_sums"], **quantized)}


@pytest.mark.gpu(1)
@pytest.mark.parametrize("n_tokens", [7, 300])
@pytest.mark.parametrize("suffix", [*BY_RANK, "_mxfp8_sums"])
def test_ranks_of_one_gpu_go_on(gpu_session, monkeypatch, suffix, n_tokens):
    """The last of three never launches: the others mask it, at once for nothing can
    come while they wait."""
    monkeypatch.setattr(OpOrder, "_others", lambda _, device_id: [device_id])
    case = cases_of(3, n_tokens)[f"masks{suffix}"]
    config = case.config(target="gpu", ranks_per_gpu=3, on_timeout="mask")
    steps = Steps(gpu_session, case, config, 2, round_trip)
    with EPCommInitializer(config) as comm:
        comm.ep_init(gpu_session)
        for routing in ("uniform", "full", "zipf", "masked"):
            steps.check(comm, routing, dead=2)
            assert masks(comm) == [[0, 0, 1], [0, 0, 1], [0, 0, 0]]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("suffix", BY_RANK)
def test_the_host_masks_and_readmits(gpu_session, suffix):
    """A living rank, between replays of a captured graph. Tokens are flagged."""
    case = cases_of(3, 7)[f"masks{suffix}"]
    config = case.config(target="gpu", ranks_per_gpu=3, on_timeout="mask")
    with building(f"masks_host{suffix}", case, config) as (manager, ranks, graph):
        built = round_trip(manager, ranks)
        flags = [
            manager.ep_degraded(given.ids, given.weights, i)[0]
            for i, given in enumerate(ranks)
        ]
        graph.output(*(v for rank in built for v in rank), *flags)
    model = gpu_session.load(graph)
    given = make_inputs(case, "uniform", counts=[case.max_tokens_per_rank] * 3)
    with EPCommInitializer(config) as comm:
        comm.ep_init(gpu_session)
        arguments = [*flatten(given, config), *comm.model_inputs()]
        model.execute(*arguments)
        captured = model.capture(1, *arguments)

        def check(n_alive: int) -> None:
            model.replay(1, *arguments)
            comm.check()
            outputs = iter(captured)
            got = take_outputs(case, outputs)[:n_alive]
            left = given if n_alive == 3 else without(case, given, 2)
            want = expected(case, left).of(slice(n_alive))
            assert_round_trip(f"{case.name}, {n_alive} alive", got, want)
            for rank in range(n_alive):
                is_degraded, _ = reference.degraded(
                    given.ids[rank],
                    given.weights[rank],
                    case.n_experts,
                    [rank >= n_alive for rank in range(3)],
                )
                assert (to_numpy(next(outputs)) == is_degraded).all()

        for _ in range(2):
            check(3)
            assert comm.active_ranks() == [0, 1, 2]
            comm.mask(2)
            assert comm.active_ranks() == [0, 1]
            for _ in range(3):
                check(2)
            comm.readmit(2)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("n_tokens", [7, 300])
@pytest.mark.parametrize("build", [round_trip, fused_round_trip])
@pytest.mark.parametrize("suffix", BY_RANK)
def test_a_missing_peer_is_masked(gpu_session, suffix, build, n_tokens):
    """Rank 0 waits once as long as the time-out, then never."""
    case = cases_of(2, n_tokens)[f"masks{suffix}"]
    config = case.config(target="gpu", timeout_s=0.5, on_timeout="mask")
    steps = Steps(gpu_session, case, config, 1, build)
    with EPCommInitializer(config) as comm:
        comm.ep_init(gpu_session)
        taken = [steps.check(comm, "full", dead=1)]
        assert masks(comm) == [[0, 1], [0, 0]]
        taken += [steps.check(comm, r, dead=1) for r in ("uniform", "zipf", "full")]
        print(f"seconds: {taken}")
        assert 0.5 <= taken[0] < 1.5 and max(taken[1:]) < 0.25


@pytest.mark.gpu(1)
@pytest.mark.parametrize("suffix", BY_RANK)
def test_processes_agree(suffix):
    """A process each, which may share a GPU."""
    from tests.gpu.gpu_agree import run

    run(cases_of(3, 7)[f"masks{suffix}"])
