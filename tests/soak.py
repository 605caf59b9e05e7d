# SPDX-License-Identifier: Apache-2.0
"""What the processes of `test_soak.py` run: very many generations, two groups at once.

See `processes.py` for data, graphs and members.
"""

from __future__ import annotations

import os
import time

import numpy as np
import processes
from processes import Engine, Member, Shape

from max_ep.memory.initializer import GROUP_VARIABLE

_CYCLE = 28
"""Generations whose inputs are made beforehand; the next `_CYCLE` have them again."""

SHAPES = {
    "async_wait": processes.SMALL,
    "shared_by_rank": processes.SHARED_BY_RANK,
    "shared_sums": processes.SHARED_SUMS,
}
"""Graphs, each with the group that it is for."""

# The protocol that "auto" takes on CPU has them all in CI; each did by hand.
N_GENERATIONS = dict.fromkeys(SHAPES, 300) | {"shared_by_rank": 4_000}
if "MAX_EP_SOAK" in os.environ:
    N_GENERATIONS = dict.fromkeys(SHAPES, int(os.environ["MAX_EP_SOAK"]))

N_OF_TWO_GROUPS = 60
"""Generations of each of two groups."""


def soak(node_id: int, graphs: str, notes: str) -> dict[str, int]:
    """Runs all of `N_GENERATIONS`, and compares each with the oracle.

    Token counts change from one to the next (`make_batch`), and every rank is late
    now and then, by itself.

    Returns:
        How many were right, by graph.
    """
    engine = Engine(graphs)
    engine.join(processes.SMALL.config(node_id))
    n_right = {}
    for graph, n_generations in N_GENERATIONS.items():
        shape = SHAPES[graph]
        processes.meet(notes, graph, node_id, processes.N_RANKS)
        group = f"{os.environ[GROUP_VARIABLE]}-{graph}"
        member = Member(engine, shape.config(node_id), shape, group)
        prepared = [member.prepare(generation) for generation in range(1, _CYCLE + 1)]
        rng = np.random.default_rng(node_id)
        try:
            for i in range(n_generations):
                if rng.random() < 0.005:
                    time.sleep(rng.random() * 0.01)
                member.round_trip(graph, i + 1, prepared[i % _CYCLE])
        finally:
            member.comm.close()
        n_right[graph] = n_generations
    return n_right


def two_groups(node_id: int, graphs: str, notes: str) -> int:
    """Runs two groups at once, whose phases each rank mixes in an order of its own.

    Returns:
        How many generations each of them had.
    """
    engine, config = Engine(graphs), processes.SMALL.config(node_id)
    engine.join(config)
    processes.meet(notes, "two_groups", node_id, processes.N_RANKS)
    name = os.environ[GROUP_VARIABLE]
    shapes = [Shape(seed=seed) for seed in (1, 2)]
    members = [
        Member(engine, config, shape, f"{name}-{i}") for i, shape in enumerate(shapes)
    ]
    rng = np.random.default_rng(node_id)
    try:
        for generation in range(1, N_OF_TWO_GROUPS + 1):
            for i in rng.permutation(2):
                members[i].dispatch_async(generation)
            received = {}
            for i in rng.permutation(2):
                received[i] = members[i].dispatch_wait(generation)
            for i in rng.permutation(2):
                members[i].combine_async(generation, *received[i])
            for i in rng.permutation(2):
                members[i].combine_wait(generation, generation)
    finally:
        for member in members:
            member.comm.close()
    return N_OF_TWO_GROUPS
