# SPDX-License-Identifier: Apache-2.0
"""The worlds that are explored: small, and each for a reason."""

from __future__ import annotations

import random

from .launches import Token, World

SPLIT = ("dispatch_async", "dispatch_wait", "combine_async", "combine_wait")
FUSED = ("dispatch", "combine")

# [dispatch][rank][token][k]: a token for both ranks, one for the own rank only; one
# for the other rank only, and a rank with nothing to send.
TWO_RANKS: tuple = (
    (((0, 1),), ((1, 1),)),
    (((1, 0),), ()),
)
# Nobody sends to another, or at all; a choice without an expert.
NOTHING_EXCHANGED: tuple = (
    (((0, 0),), ((1, -1),)),
    ((), ()),
)
TWO_TOKENS: tuple = (
    (((0, 1), (1, -1)), ((0, 0),)),
    (((1, 1),), ((1, 0), (0, 1))),
)
BOTH_WAYS: tuple = ((((0, 1),), ((1, 0),)),)
# Each token goes to every rank; a rank without tokens.
EVERYBODY: tuple = (
    (((0, 1), (0, 1)), ((0, 1),)),
    (((0, 1),), ()),
)
THREE_RANKS: tuple = (
    (((0, 1),), ((2, 2),), ()),
    ((), ((0, 2),), ((1, 0),)),
)


def replays(body: tuple[str, ...], n: int, first: tuple[str, ...] = ()) -> dict:
    """A captured graph that is replayed, maybe after launches of another one."""
    return {"program": first + body * n, "replayed": (len(first), len(body))}


# The next dispatch is under way while this combine is awaited.
OVERLAP = replays(
    ("dispatch_async", "combine_wait", "dispatch_wait", "combine_async"), 2, SPLIT[:3]
)
# Generations of 3 bits: 6, 7, and then 2.
WRAPS = {**replays(FUSED, 4), "generation_bits": 3, "first_generation": 5}


def by_rank() -> list[World]:
    """The by-rank protocol on GPUs, with sums, and the all-gather."""
    reduced = {"protocol": "by_rank", "is_reduced": True}
    return [
        World(
            "fused, 2 blocks",
            routing=TWO_RANKS,
            n_blocks=2,
            n_index_warps=2,
            most_counting_warps=1,
            indexes_in_lanes=True,
            **replays(FUSED, 1),
            **reduced,
        ),
        World(
            "fused, 2 blocks, indexed by blocks",
            routing=TWO_RANKS,
            n_blocks=2,
            n_index_warps=2,
            indexes_by_blocks=True,
            **replays(FUSED, 1),
            **reduced,
        ),
        World("split", routing=TWO_RANKS, n_blocks=2, **replays(SPLIT, 2), **reduced),
        World("overlap", routing=TWO_RANKS, **OVERLAP, **reduced),
        World(
            "chunks",
            routing=TWO_TOKENS,
            n_early_tokens=1,
            n_parts=2,
            **replays(FUSED, 2),
            **reduced,
        ),
        World(
            "chunks, two at once, indexed by blocks",
            routing=TWO_TOKENS,
            n_early_tokens=1,
            n_parts=2,
            n_parts_at_once=2,
            indexes_by_blocks=True,
            **replays(FUSED, 2),
            **reduced,
        ),
        World("dispatch only", "by_rank", routing=TWO_RANKS, **replays(FUSED[:1], 3)),
        World("fused", routing=TWO_RANKS, **replays(FUSED, 3), **reduced),
        World("3 ranks", routing=THREE_RANKS, **replays(FUSED[:1], 2), **reduced),
        World(
            "in turn",
            routing=TWO_RANKS,
            n_blocks=2,
            in_turn=True,
            **replays(SPLIT, 2),
            **reduced,
        ),
        World(
            "nothing exchanged",
            routing=NOTHING_EXCHANGED,
            **replays(FUSED, 2),
            **reduced,
        ),
        World(
            "a rank without experts",
            routing=(((), ((0, 0),)), (((0, 0),), ())),
            n_experts=1,
            **replays(FUSED, 2),
            **reduced,
        ),
        World(
            "all-gather",
            "all_gather",
            routing=EVERYBODY,
            is_reduced=True,
            carries_choices=True,
            n_blocks=2,
            n_index_warps=2,
            **replays(FUSED, 2),
        ),
    ]


def random_program(chance: random.Random, is_reduced: bool, n_ops: int) -> tuple:
    """Ops in any order that the protocol allows, mixed as nobody would."""
    program: list[str] = []
    sent = received = answered = 0
    is_combining = False
    while len(program) < n_ops or sent > received or is_combining:
        may = []
        # The notes of a dispatch are kept until the next but one, those of the rows
        # of a reduced combine until the next is received.
        may_send = sent == received and not (is_combining and sent > answered)
        may_receive = not (is_reduced and is_combining)
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
    is_reduced = protocol != "by_expert" and chance.random() < 0.7
    program = random_program(chance, is_reduced, 8)
    return World(
        f"random {seed}",
        protocol,
        routing=routing,
        program=program,
        is_reduced=is_reduced,
        n_experts=n_experts,
        n_blocks=chance.randint(1, 2),
        n_index_warps=1 if protocol == "by_expert" else chance.randint(1, 2),
        n_parts=chance.randint(1, 2),
        n_parts_at_once=chance.randint(1, 2),
        most_counting_warps=chance.randint(1, 2),
        indexes_by_blocks=chance.random() < 0.5,
        indexes_in_lanes=chance.random() < 0.5,
        carries_choices=protocol == "all_gather"
        and is_reduced
        and chance.random() < 0.3,
        n_early_tokens=chance.randint(0, 3),
        has_shared_expert=protocol != "by_expert" and chance.random() < 0.3,
    )


def by_expert() -> list[World]:
    """The by-expert protocol on GPUs."""
    slots = {"protocol": "by_expert"}
    return [
        World("slots, fused", routing=TWO_RANKS, **replays(FUSED, 3), **slots),
        World(
            "slots, split",
            routing=TWO_TOKENS,
            n_parts=2,
            has_shared_expert=True,
            **replays(SPLIT, 2),
            **slots,
        ),
        World(
            "slots, 2 blocks",
            routing=TWO_RANKS,
            n_blocks=2,
            has_shared_expert=True,
            **replays(FUSED, 2),
            **slots,
        ),
        World("slots, overlap", routing=TWO_RANKS, **OVERLAP, **slots),
        World(
            "slots, dispatch only", routing=TWO_RANKS, **replays(FUSED[:1], 3), **slots
        ),
        World(
            "slots, one combine after another",
            routing=BOTH_WAYS,
            **replays(FUSED[1:], 3, FUSED[:1]),
            **slots,
        ),
        World(
            "slots, nothing exchanged",
            routing=NOTHING_EXCHANGED,
            **replays(FUSED, 2),
            **slots,
        ),
        World(
            "slots, a rank without experts",
            routing=(((), ((0, 0),)), (((0, 0),), ())),
            n_experts=1,
            **replays(FUSED, 3),
            **slots,
        ),
        World(
            "slots, in turn",
            routing=TWO_RANKS,
            in_turn=True,
            **replays(SPLIT, 2),
            **slots,
        ),
        World("slots, generations wrap", routing=TWO_RANKS, **WRAPS, **slots),
        World("slots, 3 ranks", routing=THREE_RANKS, **replays(FUSED, 2), **slots),
    ]


def by_rank_rows() -> list[World]:
    """The same combine behind the other dispatch."""
    slots = {"protocol": "by_rank"}
    return [
        World("rows, fused", routing=TWO_RANKS, **replays(FUSED, 3), **slots),
        World("rows, split", routing=TWO_TOKENS, **replays(SPLIT, 2), **slots),
        World(
            "rows, 2 blocks",
            routing=TWO_RANKS,
            n_blocks=2,
            n_index_warps=2,
            **replays(FUSED, 2),
            **slots,
        ),
        World("rows, overlap", routing=TWO_RANKS, **OVERLAP, **slots),
        World("rows, generations wrap", routing=TWO_RANKS, **WRAPS, **slots),
        World("rows, 3 ranks", routing=THREE_RANKS, **replays(FUSED, 2), **slots),
    ]


def cpu() -> list[World]:
    """All protocols of CPU ranks."""
    worlds = []
    kinds = (
        ("by_expert", False),
        ("by_rank", False),
        ("by_rank", True),
    )
    for protocol, is_reduced in kinds:
        name = f"CPU, {protocol}{' sums' if is_reduced else ''}"
        common = {
            "protocol": protocol,
            "is_reduced": is_reduced,
            "target": "cpu",
            "streams": True,
            "has_shared_expert": protocol == "by_expert",
        }
        worlds += [
            World(name, routing=TWO_TOKENS, **replays(SPLIT, 2), **common),
            World(f"{name}, overlap", routing=TWO_RANKS, **OVERLAP, **common),
            World(
                f"{name}, dispatch only",
                routing=TWO_RANKS,
                **replays(SPLIT[:2], 3),
                **common,
            ),
            World(
                f"{name}, combine only",
                routing=BOTH_WAYS,
                **replays(SPLIT[2:], 3, SPLIT[:2]),
                **common,
            ),
            World(
                f"{name}, a rank without experts",
                routing=(((), ((0, 0),)), (((0, 0),), ())),
                n_experts=1,
                **replays(SPLIT, 2),
                **common,
            ),
            World(
                f"{name}, generations wrap",
                routing=TWO_RANKS,
                **{**WRAPS, **replays(SPLIT, 4)},
                **common,
            ),
            World(
                f"{name}, in turn",
                routing=THREE_RANKS,
                in_turn=True,
                **replays(SPLIT, 3),
                **common,
            ),
        ]
    worlds.append(
        World(
            "CPU, all-gather",
            "all_gather",
            routing=EVERYBODY,
            is_reduced=True,
            carries_choices=True,
            target="cpu",
            streams=True,
            **replays(SPLIT, 3),
        )
    )
    return worlds


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
    small = {"protocol": "by_rank", "is_one_agent": True}
    slots = {"protocol": "by_expert", "is_one_agent": True}
    cpu = {**slots, "target": "cpu", "streams": True}
    return [
        World(
            "tiny, fused",
            is_reduced=True,
            routing=one_way,
            **replays(FUSED, 1),
            **small,
        ),
        World(
            "tiny, dispatch only",
            routing=one_token,
            **replays(FUSED[:1], 3),
            **small,
        ),
        World("tiny, slots", routing=one_token, **replays(FUSED, 2), **slots),
        World("tiny, CPU", routing=one_token, **replays(SPLIT, 2), **cpu),
        World(
            "tiny, CPU, dispatch only",
            routing=one_token,
            **replays(SPLIT[:2], 3),
            **cpu,
        ),
    ]


def large() -> list[World]:
    """Worlds that take minutes: `python -m tests.model --deep`."""
    reduced = {"protocol": "by_rank", "is_reduced": True}
    return [
        World("3 ranks, fused", routing=THREE_RANKS, **replays(FUSED, 2), **reduced),
        World("3 ranks, overlap", routing=THREE_RANKS, **OVERLAP, **reduced),
        World(
            "fused, 2 blocks, 3 replays",
            routing=TWO_TOKENS,
            n_blocks=2,
            n_index_warps=2,
            **replays(FUSED, 3),
            **reduced,
        ),
        World("generations wrap", routing=TWO_RANKS, **WRAPS, **reduced),
    ]


def stopped() -> list[World]:
    """Programs that a launch refuses to go on with, before it uses anything wrong."""
    reduced = {"is_reduced": True, "routing": TWO_RANKS, "may_be_refused": True}
    send, wait, combine, combine_wait = SPLIT
    # The notes of a dispatch's rows are those of the next one.
    program = (send, wait, combine, send, wait, combine_wait)
    return [
        World(
            f"{protocol}, combine awaited after the next dispatch",
            protocol,
            program=program,
            n_blocks=n_blocks,
            **reduced,
        )
        for protocol, n_blocks in (("by_rank", 1), ("by_rank", 2), ("all_gather", 1))
    ]


def refused() -> list[World]:
    """Programs that must not be run: that the model says why is a test of it."""
    reduced = {"protocol": "by_rank", "is_reduced": True, "routing": TWO_RANKS}
    send, wait, combine, combine_wait = SPLIT
    return [
        # Fused forms wait for what a rank sends that has not begun.
        World("fused, in turn", in_turn=True, program=FUSED * 2, **reduced),
        # Nobody has told, since no rank has begun a launch since.
        World(
            "dispatch only, in turn, told by the next launch",
            in_turn=True,
            shares_gpu=False,
            program=SPLIT[:2] * 2,
            **reduced,
        ),
        # The choices are kept for two dispatches, by parity.
        World(
            "combine awaited after two more dispatches",
            program=(send, wait, combine, send, wait, send, combine_wait, wait),
            **{**reduced, "is_reduced": False},
        ),
        # No place is left, and nobody reads: the rank waits for itself.
        World(
            "sent twice, received never", program=(send, send, wait, wait), **reduced
        ),
    ]
