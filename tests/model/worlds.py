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


def worlds_of(
    prefix: str, common: dict, rows: list[tuple[str, tuple, dict, dict]]
) -> list[World]:
    """Makes worlds of a table: name, routing, program, and what else they have."""
    return [
        World(prefix + name, routing=routing, **(common | program | more))
        for name, routing, program, more in rows
    ]


# One rank has no expert.
NO_EXPERTS: tuple = (((), ((0, 0),)), (((0, 0),), ()))
TWO_BLOCKS = dict(n_blocks=2, n_index_warps=2)
BY_BLOCKS = dict(indexes_by_blocks=True)
CHUNKS = dict(n_inline_tokens=1, n_chunks=2)
SUMS = dict(protocol="by_rank", has_sums=True)


def by_rank() -> list[World]:
    """The by-rank protocol on GPUs, with sums, and the all-gather."""
    lanes = dict(most_counting_warps=1, indexes_in_lanes=True)
    fused, dispatch = replays(FUSED, 2), FUSED[:1]
    gather = dict(protocol="all_gather", has_metadata=True)
    rows = dict(has_sums=False)
    return worlds_of(
        "",
        SUMS,
        [
            ("fused, 2 blocks", TWO_RANKS, replays(FUSED, 1), TWO_BLOCKS | lanes),
            (
                "fused, 2 blocks, indexed by blocks",
                TWO_RANKS,
                replays(FUSED, 1),
                TWO_BLOCKS | BY_BLOCKS,
            ),
            ("split", TWO_RANKS, replays(SPLIT, 2), dict(n_blocks=2)),
            ("overlap", TWO_RANKS, OVERLAP, {}),
            ("chunks", TWO_TOKENS, fused, CHUNKS),
            (
                "chunks, two at once, indexed by blocks",
                TWO_TOKENS,
                fused,
                CHUNKS | BY_BLOCKS | dict(n_chunks_at_once=2),
            ),
            ("dispatch only", TWO_RANKS, replays(dispatch, 3), rows),
            ("fused", TWO_RANKS, replays(FUSED, 3), {}),
            ("3 ranks", THREE_RANKS, replays(dispatch, 2), {}),
            ("in turn", TWO_RANKS, replays(SPLIT, 2), dict(n_blocks=2, in_turn=True)),
            ("nothing exchanged", NOTHING_EXCHANGED, fused, {}),
            ("a rank without experts", NO_EXPERTS, fused, dict(n_experts=1)),
            ("all-gather", EVERYBODY, fused, TWO_BLOCKS | gather),
        ],
    )


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
        most_counting_warps=chance.randint(1, 2),
        indexes_by_blocks=chance.random() < 0.5,
        indexes_in_lanes=chance.random() < 0.5,
        has_metadata=protocol == "all_gather" and has_sums and chance.random() < 0.3,
        n_inline_tokens=chance.randint(0, 3),
        has_shared_expert=protocol != "by_expert" and chance.random() < 0.3,
    )


def by_expert() -> list[World]:
    """The by-expert protocol on GPUs."""
    shared = dict(has_shared_expert=True)
    again = replays(FUSED[1:], 3, FUSED[:1])
    return worlds_of(
        "slots, ",
        dict(protocol="by_expert"),
        [
            ("fused", TWO_RANKS, replays(FUSED, 3), {}),
            ("split", TWO_TOKENS, replays(SPLIT, 2), dict(n_chunks=2) | shared),
            ("2 blocks", TWO_RANKS, replays(FUSED, 2), dict(n_blocks=2) | shared),
            ("overlap", TWO_RANKS, OVERLAP, {}),
            ("dispatch only", TWO_RANKS, replays(FUSED[:1], 3), {}),
            ("one combine after another", BOTH_WAYS, again, {}),
            ("nothing exchanged", NOTHING_EXCHANGED, replays(FUSED, 2), {}),
            ("a rank without experts", NO_EXPERTS, replays(FUSED, 3), {"n_experts": 1}),
            ("in turn", TWO_RANKS, replays(SPLIT, 2), dict(in_turn=True)),
            ("generations wrap", TWO_RANKS, WRAPS, {}),
            ("3 ranks", THREE_RANKS, replays(FUSED, 2), {}),
        ],
    )


def by_rank_rows() -> list[World]:
    """The same combine behind the other dispatch."""
    return worlds_of(
        "rows, ",
        dict(protocol="by_rank"),
        [
            ("fused", TWO_RANKS, replays(FUSED, 3), {}),
            ("split", TWO_TOKENS, replays(SPLIT, 2), {}),
            ("2 blocks", TWO_RANKS, replays(FUSED, 2), TWO_BLOCKS),
            ("overlap", TWO_RANKS, OVERLAP, {}),
            ("generations wrap", TWO_RANKS, WRAPS, {}),
            ("3 ranks", THREE_RANKS, replays(FUSED, 2), {}),
        ],
    )


def cpu() -> list[World]:
    """All protocols of CPU ranks."""
    worlds = []
    on_cpu = dict(target="cpu", streams=True)
    wraps = WRAPS | replays(SPLIT, 4)
    for protocol, has_sums in (
        ("by_expert", False),
        ("by_rank", False),
        ("by_rank", True),
    ):
        name = f"CPU, {protocol}{' sums' if has_sums else ''}"
        common = on_cpu | dict(protocol=protocol, has_sums=has_sums)
        common["has_shared_expert"] = protocol == "by_expert"
        worlds += worlds_of(
            name,
            common,
            [
                ("", TWO_TOKENS, replays(SPLIT, 2), {}),
                (", overlap", TWO_RANKS, OVERLAP, {}),
                (", dispatch only", TWO_RANKS, replays(SPLIT[:2], 3), {}),
                (", combine only", BOTH_WAYS, replays(SPLIT[2:], 3, SPLIT[:2]), {}),
                (
                    ", a rank without experts",
                    NO_EXPERTS,
                    replays(SPLIT, 2),
                    dict(n_experts=1),
                ),
                (", generations wrap", TWO_RANKS, wraps, {}),
                (", in turn", THREE_RANKS, replays(SPLIT, 3), dict(in_turn=True)),
            ],
        )
    gather = dict(protocol="all_gather", has_sums=True, has_metadata=True)
    rows = [("CPU, all-gather", EVERYBODY, replays(SPLIT, 3), {})]
    return worlds + worlds_of("", on_cpu | gather, rows)


def by_protocol() -> dict[str, list[World]]:
    """All worlds, by whose code they are a model of."""
    return {
        "by rank, sums": by_rank(),
        "by rank, rows": by_rank_rows(),
        "by expert": by_expert(),
        "CPU ranks": cpu(),
    }


def all_worlds() -> list[World]:
    return [world for some in by_protocol().values() for world in some]


def tiny() -> list[World]:
    """Worlds so small that all steps can be interleaved in every order."""
    one_token = ((((1,),), ((0,),)), (((1,),), ()))
    one_way = ((((1,),), ()),)
    slots = dict(protocol="by_expert")
    cpu = slots | dict(target="cpu", streams=True)
    return worlds_of(
        "tiny, ",
        dict(is_one_agent=True, protocol="by_rank"),
        [
            ("fused", one_way, replays(FUSED, 1), dict(has_sums=True)),
            ("dispatch only", one_token, replays(FUSED[:1], 3), {}),
            ("slots", one_token, replays(FUSED, 2), slots),
            ("CPU", one_token, replays(SPLIT, 2), cpu),
            ("CPU, dispatch only", one_token, replays(SPLIT[:2], 3), cpu),
        ],
    )


def large() -> list[World]:
    """Worlds that take minutes: `python -m tests.model --deep`."""
    return worlds_of(
        "",
        SUMS,
        [
            ("3 ranks, fused", THREE_RANKS, replays(FUSED, 2), {}),
            ("3 ranks, overlap", THREE_RANKS, OVERLAP, {}),
            ("fused, 2 blocks, 3 replays", TWO_TOKENS, replays(FUSED, 3), TWO_BLOCKS),
            ("generations wrap", TWO_RANKS, WRAPS, {}),
        ],
    )


def stopped() -> list[World]:
    """Programs that a launch refuses to go on with, before it uses anything wrong."""
    send, wait, combine, combine_wait = SPLIT
    # What is saved of a dispatch's rows is that of the next one.
    program = dict(program=(send, wait, combine, send, wait, combine_wait))
    return [
        World(
            f"{protocol}, combine awaited after the next dispatch",
            protocol,
            n_blocks=n_blocks,
            routing=TWO_RANKS,
            has_sums=True,
            may_be_refused=True,
            **program,
        )
        for protocol, n_blocks in (("by_rank", 1), ("by_rank", 2), ("all_gather", 1))
    ]


def refused() -> list[World]:
    """Programs that must not be run: that the model says why is a test of it."""
    send, wait, combine, combine_wait = SPLIT
    after_two = dict(
        program=(send, wait, combine, send, wait, send, combine_wait, wait)
    )
    twice = dict(program=(send, send, wait, wait))
    at_begin = dict(in_turn=True, shares_gpu=False)
    rows = [
        # Fused forms wait for what a rank sends that has not begun.
        ("fused, in turn", dict(program=FUSED * 2), dict(in_turn=True)),
        # Nobody has published, since no rank has begun a launch since.
        (
            "dispatch only, in turn, published by the next launch",
            dict(program=SPLIT[:2] * 2),
            at_begin,
        ),
        # The choices are kept for two dispatches, by parity.
        ("combine awaited after two more dispatches", after_two, dict(has_sums=False)),
        # No place is left, and nobody reads: the rank waits for itself.
        ("sent twice, received never", twice, {}),
    ]
    return worlds_of("", SUMS, [(n, TWO_RANKS, p, more) for n, p, more in rows])
