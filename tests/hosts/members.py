# SPDX-License-Identifier: Apache-2.0
"""Processes whose ranks reach those of other hosts by the link alone.

    python -m tests.hosts.members RANKS_PER_HOST FIRST_SEED END_SEED [N_RANKS]

runs generations of every case with each seed, and compares what ranks got with the
oracle, bit for bit: rows, tables and results are those of one host.
"""

import functools
import os
import random
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from max.driver import CPU
from max.engine import InferenceSession

from max_ep import EPCommInitializer, EPConfig, launch
from max_ep.limits import LINK_VARIABLE
from max_ep.memory import masked_ranks
from max_ep.memory.link import Link
from tests.harness import Groups, assert_round_trip, fused_round_trip, round_trip
from tests.hosts.part import Part
from tests.oracle.cases import Case
from tests.oracle.drawn import ROUTINGS, Inputs, make_inputs, token_counts
from tests.oracle.oracle import Expected, expected

_SUMS = dict(protocol="by_rank", combine_mode="sums")
_ROWS = dict(protocol="by_rank")
CASES = {
    case.name: case
    for case in [
        # 4 ranks do not divide 14: the last rank holds 2 experts.
        Case("hosts_sums", 4, 14, 4, 256, 12, fused_shared_expert=True, **_SUMS),
        # 2, 2, 1 and 0 experts.
        Case("hosts_rows", 4, 5, 3, 384, 7, "fp8", output_layout="padded", **_ROWS),
        Case("hosts_dropped", 4, 7, 3, 96, 7, "mxfp4", max_output_rows=17, **_ROWS),
        Case("hosts_fp8", 4, 7, 4, 384, 7, partial="fp8", **_SUMS),
    ]
}
N_GENERATIONS = 4


def of_ranks(n_ranks: int, names: Sequence[str]) -> dict[str, Case]:
    return {name: replace(CASES[name], n_ranks=n_ranks) for name in names}


def given_to(cases: Mapping[str, Case], generation: int, seed: int) -> dict:
    """Draws what all ranks are given: some choose nobody, some have no tokens."""
    routing = list(ROUTINGS)[(generation + seed) % len(ROUTINGS)]
    drawn = {}
    for name, case in cases.items():
        named = replace(case, name=f"{name}/{generation}/{seed}")
        counts = token_counts(named, routing)
        counts[(generation + seed) % case.n_ranks] = 0
        drawn[name] = make_inputs(named, routing, counts=counts)
    return drawn


class Member:
    """A process with one rank of each case's group."""

    def __init__(
        self,
        node_id: int,
        n_ranks: int,
        is_fused: bool,
        cases: Sequence[str],
        timeout_s: float,
    ) -> None:
        self.node_id, self.cases = node_id, of_ranks(n_ranks, cases)
        self.timeout_s = timeout_s
        self.session = InferenceSession(devices=[CPU()])
        local = {name: Part.of(case, 1) for name, case in self.cases.items()}
        build = fused_round_trip if is_fused else round_trip
        how = dict(config=self._config, build=build)
        name = f"hosts_{build.__name__}_{n_ranks}_{len(cases)}"
        self.groups = Groups(self.session, name, local, **how)

    def _config(self, local: Case) -> EPConfig:
        n = self.cases[local.name].n_ranks
        where = dict(n_nodes=n, n_gpus_per_node=1, node_id=self.node_id)
        return self.cases[local.name].config(**where, timeout_s=self.timeout_s)

    def begin(self) -> None:
        """Begins again, with the link that the environment describes."""
        self.groups.close()
        comms = self.groups.comms
        self.groups.comms = {n: EPCommInitializer(c.config) for n, c in comms.items()}
        for comm in self.groups.comms.values():
            comm.ep_init(self.session)

    def run(self, generation: int, seed: int) -> None:
        node = slice(self.node_id, self.node_id + 1)
        given = given_to(self.cases, generation, seed)
        own = {
            name: Inputs(
                g.tokens[node],
                g.ids[node],
                g.weights[node],
                None,
                g.expert_rows and g.expert_rows[node],
            )
            for name, g in given.items()
        }
        got = self.groups.run(own)
        for name, case in self.cases.items():
            named = replace(case, name=f"{name}/{generation}/{seed}")
            want = expected(named, given[name])
            here = Expected(want.dispatch[node], want.combine[node])
            where = f"rank {self.node_id}, {name}, seed {seed}, {generation}"
            assert_round_trip(where, got[name], here)


def run_seeds(
    node_id: int,
    n_ranks: int,
    per_host: int,
    seeds: range,
    is_fused: bool,
    cases: Sequence[str] = tuple(CASES),
    fault: str = "",
) -> int:
    """Returns how many generations were right. Faults are those of `_plant`."""
    _plant(fault)
    os.environ[LINK_VARIABLE] = f"{per_host}:{seeds[0]}"
    member = Member(node_id, n_ranks, is_fused, cases, 2 if fault else 10)
    n_right = 0
    for seed in seeds:
        os.environ[LINK_VARIABLE] = f"{per_host}:{seed}"
        if seed != seeds[0]:
            member.begin()
        if fault == "killed" and node_id == KILLED and seed == seeds[0]:
            delay_s = random.Random(seed).random() * 0.5
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for generation in range(N_GENERATIONS if not fault else 1000):
            member.run(generation, seed)
            n_right += len(member.cases)
    member.groups.close()
    return n_right


KILLED = 2


def _plant(fault: str) -> None:
    """Has processes with links that keep no fences."""
    if fault == "no fences":
        masked_ranks.Link = functools.partial(Link, keeps_fences=False)


if __name__ == "__main__":
    per_host, first, end, *more = map(int, sys.argv[1:])
    n_ranks = more[0] if more else 4
    given = n_ranks, per_host, range(first, end), False
    print(launch(run_seeds, n_ranks, given, timeout_s=3600))
