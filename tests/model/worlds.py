# SPDX-License-Identifier: Apache-2.0
"""The worlds that are explored: small, and each for a reason."""

import importlib
import random
from pathlib import Path

from .launches import Token, World, replays

SPLIT = ("dispatch_async", "dispatch_wait", "combine_async", "combine_wait")
LIFECYCLES = [
    importlib.import_module(f".{path.stem}", __package__)
    for path in sorted(Path(__file__).parent.glob("lifecycle_*.py"))
]
"""A file for each way in which launches on GPUs begin and end, with its worlds."""

# [dispatch][rank][token][k]: a token for both ranks, one for the own rank only; one
# for the other rank only, and a rank with nothing to send.
TWO_RANKS: tuple = ((((0, 1),), ((1, 1),)), (((1, 0),), ()))
# Nobody sends to another, or at all; a choice without an expert.
NOTHING_EXCHANGED: tuple = ((((0, 0),), ((1, -1),)), ((), ()))
TWO_TOKENS: tuple = ((((0, 1), (1, -1)), ((0, 0),)), (((1, 1),), ((1, 0), (0, 1))))
BOTH_WAYS: tuple = ((((0, 1),), ((1, 0),)),)
# Each token goes to every rank; a rank without tokens.
EVERYBODY: tuple = ((((0, 1), (0, 1)), ((0, 1),)), (((0, 1),), ()))
THREE_RANKS: tuple = ((((0, 1),), ((2, 2),), ()), ((), ((0, 2),), ((1, 0),)))


# The next dispatch is under way while this combine is awaited.
OVERLAP = replays(
    ("dispatch_async", "combine_wait", "dispatch_wait", "combine_async"), 2, SPLIT[:3]
)
# Generations of 3 bits: 6, 7, and then 2.
WRAPS = {**replays(SPLIT, 4), "generation_bits": 3, "first_generation": 5}


def worlds_of(prefix: str, common: dict, table: str) -> list[World]:
    """Makes worlds of a table: name, routing, program, and what else they have."""
    rows = [line.split(" | ", 3) for line in table.strip("\n").splitlines()]
    return [
        World(prefix + name, routing=eval(of), **(common | eval(program) | eval(more)))
        for name, of, program, more in rows
    ]


# One rank has no expert.
NO_EXPERTS: tuple = (((), ((0, 0),)), (((0, 0),), ()))
GATHER = dict(protocol="all_gather", has_metadata=True)
SLOTS = dict(protocol="by_expert")
SUMS = dict(protocol="by_rank", has_sums=True)
ON_CPU = dict(model="cpu", streams=True)
LINKED = dict(ranks_per_host=1)


CPU_WORLDS = """
 | TWO_TOKENS | replays(SPLIT, 2) | {}
, overlap | TWO_RANKS | OVERLAP | {}
, dispatch only | TWO_RANKS | replays(SPLIT[:2], 3) | {}
, combine only | BOTH_WAYS | replays(SPLIT[2:], 3, SPLIT[:2]) | {}
, a rank without experts | NO_EXPERTS | replays(SPLIT, 2) | dict(n_experts=1)
, generations wrap | TWO_RANKS | WRAPS | {}
, in turn | THREE_RANKS | replays(SPLIT, 3) | dict(in_turn=True)
, linked | THREE_RANKS | replays(SPLIT, 3) | dict(ranks_per_host=2)
, linked, dispatch only | TWO_RANKS | replays(SPLIT[:2], 3) | LINKED
, linked, combine only | BOTH_WAYS | replays(SPLIT[2:], 3, SPLIT[:2]) | LINKED
"""

BY_PROTOCOL: dict[str, list[World]] = {
    **{lifecycle.CODE.rstrip(": "): lifecycle.WORLDS for lifecycle in LIFECYCLES},
    "CPU ranks": [
        *worlds_of(
            "",
            ON_CPU | GATHER | dict(has_sums=True),
            "CPU, all-gather | EVERYBODY | replays(SPLIT, 3) | {}",
        ),
        *worlds_of(
            "CPU, by_expert", ON_CPU | SLOTS | dict(has_shared_expert=True), CPU_WORLDS
        ),
        *worlds_of("CPU, by_rank", ON_CPU | dict(protocol="by_rank"), CPU_WORLDS),
        *worlds_of("CPU, by_rank sums", ON_CPU | SUMS, CPU_WORLDS),
    ],
}
"""All worlds, by whose code they are a model of."""

# A token each; a rank with nothing to send.
ONE_TOKEN: tuple = ((((1,),), ((0,),)), (((1,),), ()))

TINY = worlds_of(
    "tiny, ",
    dict(is_one_agent=True) | ON_CPU,
    """
CPU | ONE_TOKEN | replays(SPLIT, 2) | SLOTS
CPU, dispatch only | ONE_TOKEN | replays(SPLIT[:2], 3) | SLOTS
""",
)
TINY += [world for lifecycle in LIFECYCLES for world in lifecycle.TINY]
"""Worlds so small that all steps can be interleaved in every order."""

SEND, WAIT, COMBINE, COMBINE_WAIT = SPLIT
AFTER_TWO = SEND, WAIT, COMBINE, SEND, WAIT, SEND, COMBINE_WAIT, WAIT
REFUSED = worlds_of(
    "",
    ON_CPU | SUMS,
    """
combine awaited after two more dispatches | TWO_RANKS | dict(program=AFTER_TWO) | {}
sent twice, received never | TWO_RANKS | dict(program=(SEND, SEND, WAIT, WAIT)) | {}
""",
)
"""Programs that must not be run: that the model says why is a test of it.

The number of tokens is kept for two dispatches, by parity. No place is left, and nobody
reads: the rank waits for itself.
"""


def random_program(chance: random.Random, has_sums: bool, n_ops: int) -> tuple:
    """Ops in any order that the protocol allows, mixed as nobody would."""
    program: list[str] = []
    sent = received = answered = 0
    is_combining = False
    while len(program) < n_ops or sent > received or is_combining:
        may = []
        # What is saved of a dispatch is kept until the next but one, what of the rows
        # for sums until the next is received.
        may_send = sent == received and not (is_combining and sent > answered)
        may_receive = not (has_sums and is_combining)
        is_long = len(program) >= n_ops
        if may_send and not is_long:
            may.append("dispatch_async")
        if sent > received and may_receive:
            may.append("dispatch_wait")
        if received and not is_combining and not is_long:
            may.append("combine_async")
        if is_combining:
            may.append("combine_wait")
        op = chance.choice(may)
        program.append(op)
        sent += op == "dispatch_async"
        received += op == "dispatch_wait"
        if op == "combine_async":
            is_combining, answered = True, received
        elif op == "combine_wait":
            is_combining = False
    return tuple(program)


def random_world(seed: int) -> World:
    """A larger world, for random walks."""
    chance = random.Random(seed)
    n_ranks = chance.randint(2, 4)
    top_k = chance.randint(1, 3)
    n_experts = chance.randint(1, n_ranks)

    def token() -> Token:
        return tuple(chance.randint(-1, n_experts - 1) for _ in range(top_k))

    routing = tuple(
        tuple(
            tuple(token() for _ in range(chance.randint(0, 3))) for _ in range(n_ranks)
        )
        for _ in range(3)
    )
    protocol = chance.choice(("by_expert", "by_rank", "all_gather"))
    has_sums = protocol != "by_expert" and chance.random() < 0.7
    program = random_program(chance, has_sums, 8)
    # Words that nobody reads, at a rank without experts, may come in any order.
    may_be_linked = protocol != "all_gather" and n_experts == n_ranks
    return World(
        f"random {seed}",
        "cpu",
        protocol,
        routing=routing,
        program=program,
        has_sums=has_sums,
        n_experts=n_experts,
        has_metadata=protocol == "all_gather" and has_sums and chance.random() < 0.3,
        has_shared_expert=protocol == "by_expert" and chance.random() < 0.3,
        streams=True,
        ranks_per_host=chance.choice((0, 1, 2)) if may_be_linked else 0,
    )
