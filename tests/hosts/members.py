# SPDX-License-Identifier: Apache-2.0
"""Processes whose ranks reach those of other hosts by the link alone.

    python -m tests.hosts.members RANKS_PER_HOST FIRST_SEED END_SEED [N_RANKS]

runs generations of every case with each seed, and compares what ranks got with the
oracle, bit for bit: rows, tables and results are those of one host.
"""

import copy
import functools
import os
import random
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from max.driver import CPU
from max.engine import InferenceSession
from max.graph import Module

from max_ep import EPCommInitializer, EPConfig, LaunchError, extension_path, launch
from max_ep.limits import LINK_VARIABLE
from max_ep.memory import masked_ranks
from max_ep.memory.link import Link
from max_ep.memory.setup_graph import SETUP_GRAPH, setup_graph, setup_model
from tests.harness import Groups, assert_round_trip, fused_round_trip, round_trip
from tests.hosts.part import Part
from tests.oracle.cases import Case
from tests.oracle.drawn import ROUTINGS, Inputs, make_inputs, token_counts
from tests.oracle.oracle import Expected, expected

_SUMS = dict(protocol="by_rank", combine_mode="sums")
_ROWS = dict(protocol="by_rank")
_RELAY = dict(combine_mode="sums", protocol="by_rank", hierarchical=True)
CASES = {
    case.name: case
    for case in [
        # 4 ranks do not divide 14: the last rank holds 2 experts.
        Case("hosts_sums", 4, 14, 4, 256, 12, fused_shared_expert=True, **_SUMS),
        # 2, 2, 1 and 0 experts.
        Case("hosts_rows", 4, 5, 3, 384, 7, "fp8", output_layout="padded", **_ROWS),
        Case("hosts_dropped", 4, 7, 3, 96, 7, "mxfp4", max_output_rows=17, **_ROWS),
        Case("hosts_fp8", 4, 7, 4, 384, 7, partial="fp8", **_SUMS),
        Case("hosts_relay", 4, 23, 5, 80, 12, **_RELAY, fused_shared_expert=True),
        Case("hosts_relay_fp8", 4, 23, 9, 256, 7, partial="fp8", **_RELAY),
        Case("hosts_slots", 4, 5, 3, 96, 7, "nvfp4", scales="each", max_output_rows=17),
        Case("hosts_slots_padded", 4, 7, 3, 256, 7, "fp8", output_layout="padded"),
        Case("hosts_slots_shared", 4, 14, 4, 80, 12, fused_shared_expert=True),
    ]
}
OF_CI = "hosts_rows", "hosts_relay", "hosts_slots"
"""The cases that `make test` runs."""
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


@dataclass(frozen=True)
class Stage:
    """What the processes run, one stage after another."""

    per_host: int
    seeds: range
    fault: str = ""
    """`no fences`, or `killed`: the processes end one of their generations so."""
    killed: tuple[int, ...] = ()
    """Ranks whose processes die at one time, drawn from the seed."""


@dataclass(frozen=True)
class Run:
    """What processes do one after another, with which cases."""

    n_ranks: int
    stages: Sequence[Stage]
    is_fused: bool = False
    cases: Sequence[str] = tuple(CASES)

    def graph(self, module: Module, node_id: int = 0, timeout_s: float = 60) -> Groups:
        """Adds the graph of a process, where the variable of the link is set."""
        of_group = of_ranks(self.n_ranks, self.cases)

        def config(local: Case) -> EPConfig:
            where = dict(n_nodes=self.n_ranks, n_gpus_per_node=1, node_id=node_id)
            return of_group[local.name].config(**where, timeout_s=timeout_s)

        local = {name: Part.of(case, 1) for name, case in of_group.items()}
        build = fused_round_trip if self.is_fused else round_trip
        name = f"hosts_{self.stages[0].per_host}_of_{self.n_ranks}"
        return Groups(None, name, local, config=config, build=build, module=module)


class Member:
    """A process with one rank of each case's group."""

    def __init__(self, node_id: int, run: Run, timeout_s: float, graphs: str) -> None:
        """`graphs`: the file that has its graph, or none."""
        self.node_id, self.cases = node_id, of_ranks(run.n_ranks, run.cases)
        self.session, module = InferenceSession(devices=[CPU()]), Module()
        self.groups = run.graph(module, node_id, timeout_s)
        if graphs:
            models = self.session.load_all(graphs)
        else:
            setup_graph(next(iter(self.groups.comms.values())).config, module)
            how = dict(custom_extensions=[extension_path()])
            models = self.session.load_all(module, **how)
        for comm in self.groups.comms.values():
            setup_model(self.session, comm.config, models[SETUP_GRAPH])
        self.groups.start(self.session, models[self.groups.name])

    def begin(self, timeout_s: float) -> None:
        """Begins again, with the link that the environment describes."""
        self.groups.close()
        for name, comm in self.groups.comms.items():
            config = copy.copy(comm.config)
            config.timeout_s = timeout_s
            self.groups.comms[name] = EPCommInitializer(config)
        for comm in self.groups.comms.values():
            comm.ep_init(self.session)

    def run(self, generation: int, seed: int) -> None:
        per_host = int(os.environ[LINK_VARIABLE].split(":")[0])
        node = slice(self.node_id, self.node_id + 1)
        given = given_to(self.cases, generation, seed)
        own = {
            name: Inputs(
                g.tokens[node],
                g.ids[node],
                g.weights[node],
                g.input_scales,
                g.expert_rows and g.expert_rows[node],
            )
            for name, g in given.items()
        }
        got = self.groups.run(own)
        for name, case in self.cases.items():
            named = replace(case, name=f"{name}/{generation}/{seed}")
            want = expected(named, given[name], per_host)
            here = Expected(want.dispatch[node], want.combine[node])
            where = f"rank {self.node_id}, {name}, seed {seed}, {generation}"
            assert_round_trip(where, got[name], here)


def run_stages(node_id: int, run: Run, graphs: str, folder: str) -> None:
    """Writes how many results of each stage were right, or what was raised, into a file
    of the folder. Stops where a stage fails that has no fault."""
    member = None
    for i, stage in enumerate(run.stages):
        _plant(stage.fault)
        n_right = 0
        try:
            for seed in stage.seeds:
                os.environ[LINK_VARIABLE] = f"{stage.per_host}:{seed}"
                timeout_s = 2 if stage.fault else 60
                if member is None:
                    member = Member(node_id, run, timeout_s, graphs)
                else:
                    member.begin(timeout_s)
                if node_id in stage.killed:
                    delay_s = random.Random(seed).random() * 0.5
                    kill = os.getpid(), signal.SIGKILL
                    threading.Timer(delay_s, os.kill, kill).start()
                for generation in range(1000 if stage.fault else N_GENERATIONS):
                    member.run(generation, seed)
                    n_right += len(run.cases)
            said = f"{n_right} right"
        except Exception:
            said = traceback.format_exc()
        Path(folder, f"{node_id}.{i}").write_text(said)
        if not said.endswith(" right") and not stage.fault:
            return
    member.groups.close()


def said_of(run: Run, graphs: str = "") -> dict[int, list[str]]:
    """Launches the processes; returns what each says of its stages, and how it died."""
    died = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            launch(run_stages, run.n_ranks, (run, graphs, folder), timeout_s=3600)
        except LaunchError as error:
            died = error.failures
        said = {rank: [] for rank in range(run.n_ranks)}
        for path in sorted(Path(folder).iterdir()):
            said[int(path.stem)].append(path.read_text())
    for rank, how in died.items():
        said[rank].append(how)
    return said


def _plant(fault: str) -> None:
    """Has processes with links that keep no fences."""
    keeps = fault != "no fences"
    masked_ranks.Link = functools.partial(Link, keeps_fences=keeps)


if __name__ == "__main__":
    per_host, first, end, *more = map(int, sys.argv[1:])
    n_ranks = more[0] if more else 4
    run = Run(n_ranks, [Stage(per_host, range(first, end))])
    for rank, (said,) in said_of(run).items():
        print(rank, said)
