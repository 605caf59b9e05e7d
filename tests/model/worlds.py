# SPDX-License-Identifier: Apache-2.0
"""The worlds that are explored: small, and each for a reason."""

import random

from .launches import Token, World

SPLIT = ("dispatch_async", "dispatch_wait", "combine_async", "combine_wait")
FUSED = ("dispatch", "combine")

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


def replays(body: tuple[str, ...], n: int, first: tuple[str, ...] = ()) -> dict:
    """A captured graph that is replayed, maybe after launches of another one."""
    return {"program": first + body * n, "replayed": (len(first), len(body))}


# The next dispatch is under way while this combine is awaited.
OVERLAP = replays(
    ("dispatch_async", "combine_wait", "dispatch_wait", "combine_async"), 2, SPLIT[:3]
)
# Generations of 3 bits: 6, 7, and then 2.
WRAPS = {**replays(FUSED, 4), "generation_bits": 3, "first_generation": 5}


def worlds_of(prefix: str, common: dict, table: str) -> list[World]:
    """Makes worlds of a table: name, routing, program, and what else they have."""
    rows = [line.split(" | ", 3) for line in table.strip("\n").splitlines()]
    return [
        World(prefix + name, routing=eval(of), **(common | eval(program) | eval(more)))
        for name, of, program, more in rows
    ]


# One rank has no expert.
NO_EXPERTS: tuple = (((), ((0, 0),)), (((0, 0),), ()))
TWO_BLOCKS = dict(n_blocks=2, n_index_warps=2)
BY_BLOCKS = dict(indexes_by_blocks=True)
CHUNKS = dict(n_inline_tokens=1, n_chunks=2)
TWO_AT_ONCE = BY_BLOCKS | dict(n_chunks_at_once=2)
SUMS = dict(protocol="by_rank", has_sums=True)


DROPS = dict(drops_rows=True)
LANES = dict(most_scan_warps=1, indexes_in_lanes=True)
TWICE, ONCE = replays(FUSED, 2), replays(FUSED, 1)
GATHER = dict(protocol="all_gather", has_metadata=True)
SLOTS = dict(protocol="by_expert")
ON_CPU = dict(target="cpu", streams=True)


CPU_WORLDS = """
 | TWO_TOKENS | replays(SPLIT, 2) | {}
, overlap | TWO_RANKS | OVERLAP | {}
, dispatch only | TWO_RANKS | replays(SPLIT[:2], 3) | {}
, combine only | BOTH_WAYS | replays(SPLIT[2:], 3, SPLIT[:2]) | {}
, a rank without experts | NO_EXPERTS | replays(SPLIT, 2) | dict(n_experts=1)
, generations wrap | TWO_RANKS | WRAPS | replays(SPLIT, 4)
, in turn | THREE_RANKS | replays(SPLIT, 3) | dict(in_turn=True)
"""

BY_PROTOCOL: dict[str, list[World]] = {
    "by rank, sums": worlds_of(
        "",
        SUMS,
        """
fused, 2 blocks | TWO_RANKS | ONCE | TWO_BLOCKS | LANES
fused, 2 blocks, indexed by blocks | TWO_RANKS | ONCE | TWO_BLOCKS | BY_BLOCKS
split | TWO_RANKS | replays(SPLIT, 2) | dict(n_blocks=2)
overlap | TWO_RANKS | OVERLAP | {}
chunks | TWO_TOKENS | TWICE | CHUNKS
chunks, two at once, indexed by blocks | TWO_TOKENS | TWICE | CHUNKS | TWO_AT_ONCE
dispatch only | TWO_RANKS | replays(FUSED[:1], 3) | dict(has_sums=False)
fused | TWO_RANKS | replays(FUSED, 3) | {}
3 ranks | THREE_RANKS | replays(FUSED[:1], 2) | {}
in turn | TWO_RANKS | replays(SPLIT, 2) | dict(n_blocks=2, in_turn=True)
nothing exchanged | NOTHING_EXCHANGED | TWICE | {}
a rank without experts | NO_EXPERTS | TWICE | dict(n_experts=1)
drops | TWO_RANKS | replays(FUSED, 3) | DROPS
drops, split | TWO_RANKS | replays(SPLIT, 2) | DROPS
all-gather | EVERYBODY | TWICE | TWO_BLOCKS | GATHER
""",
    ),
    "by rank, rows": worlds_of(
        "rows, ",
        dict(protocol="by_rank"),
        """
fused | TWO_RANKS | replays(FUSED, 3) | {}
drops | TWO_RANKS | replays(FUSED, 3) | DROPS
drops, overlap | TWO_RANKS | OVERLAP | DROPS
split | TWO_TOKENS | replays(SPLIT, 2) | {}
2 blocks | TWO_RANKS | TWICE | TWO_BLOCKS
overlap | TWO_RANKS | OVERLAP | {}
generations wrap | TWO_RANKS | WRAPS | {}
3 ranks | THREE_RANKS | TWICE | {}
""",
    ),
    "by expert": worlds_of(
        "slots, ",
        SLOTS,
        """
fused | TWO_RANKS | replays(FUSED, 3) | {}
split | TWO_TOKENS | replays(SPLIT, 2) | dict(n_chunks=2, has_shared_expert=True)
2 blocks | TWO_RANKS | TWICE | dict(n_blocks=2, has_shared_expert=True)
overlap | TWO_RANKS | OVERLAP | {}
dispatch only | TWO_RANKS | replays(FUSED[:1], 3) | {}
one combine after another | BOTH_WAYS | replays(FUSED[1:], 3, FUSED[:1]) | {}
nothing exchanged | NOTHING_EXCHANGED | TWICE | {}
a rank without experts | NO_EXPERTS | replays(FUSED, 3) | dict(n_experts=1)
in turn | TWO_RANKS | replays(SPLIT, 2) | dict(in_turn=True)
generations wrap | TWO_RANKS | WRAPS | {}
3 ranks | THREE_RANKS | TWICE | {}
""",
    ),
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

# A token each; a rank with nothing to send. And one that sends alone.
ONE_TOKEN: tuple = ((((1,),), ((0,),)), (((1,),), ()))
ONE_WAY: tuple = ((((1,),), ()),)

TINY = worlds_of(
    "tiny, ",
    dict(is_one_agent=True, protocol="by_rank"),
    """
fused | ONE_WAY | ONCE | dict(has_sums=True)
dispatch only | ONE_TOKEN | replays(FUSED[:1], 3) | {}
slots | ONE_TOKEN | TWICE | SLOTS
CPU | ONE_TOKEN | replays(SPLIT, 2) | SLOTS | ON_CPU
CPU, dispatch only | ONE_TOKEN | replays(SPLIT[:2], 3) | SLOTS | ON_CPU
""",
)
"""Worlds so small that all steps can be interleaved in every order."""

LARGE = worlds_of(
    "",
    SUMS,
    """
3 ranks, fused | THREE_RANKS | TWICE | {}
3 ranks, overlap | THREE_RANKS | OVERLAP | {}
fused, 2 blocks, 3 replays | TWO_TOKENS | replays(FUSED, 3) | TWO_BLOCKS
generations wrap | TWO_RANKS | WRAPS | {}
""",
)
"""Worlds that take minutes."""

SEND, WAIT, COMBINE, COMBINE_WAIT = SPLIT
STOPPED = [
    World(
        f"{protocol}, combine awaited after the next dispatch",
        protocol,
        # What is saved of a dispatch's rows is that of the next one.
        program=(SEND, WAIT, COMBINE, SEND, WAIT, COMBINE_WAIT),
        routing=TWO_RANKS,
        has_sums=True,
        may_be_refused=True,
        n_blocks=n_blocks,
    )
    for protocol, n_blocks in (("by_rank", 1), ("by_rank", 2), ("all_gather", 1))
]
"""Programs that a launch refuses to go on with, before it uses anything wrong."""

AFTER_TWO = SEND, WAIT, COMBINE, SEND, WAIT, SEND, COMBINE_WAIT, WAIT
REFUSED = worlds_of(
    "",
    SUMS,
    """
fused, in turn | TWO_RANKS | dict(program=FUSED * 2) | dict(in_turn=True)
dispatch only, published by the next launch | TWO_RANKS | replays(SPLIT[:2], 2) | \
dict(in_turn=True, shares_gpu=False)
combine awaited after two more dispatches | TWO_RANKS | dict(program=AFTER_TWO) | \
dict(has_sums=False)
sent twice, received never | TWO_RANKS | dict(program=(SEND, SEND, WAIT, WAIT)) | {}
""",
)
"""Programs that must not be run: that the model says why is a test of it.

Fused forms wait for what a rank sends that has not begun. Nobody has published, since
no rank has begun a launch since. The choices are kept for two dispatches, by parity. No
place is left, and nobody reads: the rank waits for itself.
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
            may += ["dispatch_async"] + ["dispatch"] * may_receive
        if sent > received and may_receive:
            may.append("dispatch_wait")
        if received and not is_combining and not is_long:
            may += ["combine_async"] + ["combine"] * (sent == received)
        if is_combining:
            may.append("combine_wait")
        op = chance.choice(may)
        program.append(op)
        sent += op in ("dispatch", "dispatch_async")
        received += op in ("dispatch", "dispatch_wait")
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
    return World(
        f"random {seed}",
        protocol,
        routing=routing,
        program=program,
        has_sums=has_sums,
        n_experts=n_experts,
        n_blocks=chance.randint(1, 2),
        n_index_warps=1 if protocol == "by_expert" else chance.randint(1, 2),
        n_chunks=chance.randint(1, 2),
        n_chunks_at_once=chance.randint(1, 2),
        most_scan_warps=chance.randint(1, 2),
        indexes_by_blocks=chance.random() < 0.5,
        indexes_in_lanes=chance.random() < 0.5,
        has_metadata=protocol == "all_gather" and has_sums and chance.random() < 0.3,
        n_inline_tokens=chance.randint(0, 3),
        has_shared_expert=protocol != "by_expert" and chance.random() < 0.3,
    )
