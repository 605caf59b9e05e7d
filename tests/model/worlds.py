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
GATHER_EARLY = replays(("dispatch", "send_tokens", "combine"), 2, ("send_tokens",))


def rank_slots() -> list[World]:
    """`rank_slots` and `gather` of GPU ranks."""
    reduced = {"protocol": "rank_slots", "is_reduced": True}
    return [
        World("fused", routing=TWO_RANKS, **replays(FUSED, 3), **reduced),
        World(
            "fused, 2 blocks",
            routing=TWO_RANKS,
            n_blocks=2,
            n_index_warps=2,
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
            "dispatch only", "rank_slots", routing=TWO_RANKS, **replays(FUSED[:1], 3)
        ),
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
            "gather, tokens first",
            "gather",
            routing=TWO_RANKS,
            is_reduced=True,
            **GATHER_EARLY,
        ),
        World(
            "gather, chunks",
            "gather",
            routing=TWO_TOKENS,
            is_reduced=True,
            n_early_tokens=1,
            **replays(("send_tokens", *SPLIT), 2),
        ),
    ]


def random_world(seed: int) -> World:
    """A larger world, for random walks."""
    chance = random.Random(seed)
    n_ranks = chance.randint(2, 4)
    top_k = chance.randint(1, 3)

    def token() -> Token:
        return tuple(chance.randint(-1, n_ranks - 1) for _ in range(top_k))

    routing = tuple(
        tuple(
            tuple(token() for _ in range(chance.randint(0, 3))) for _ in range(n_ranks)
        )
        for _ in range(3)
    )
    protocol = chance.choice(("rank_slots", "gather"))
    program = chance.choice((replays(FUSED, 4), replays(SPLIT, 3), OVERLAP))
    return World(
        f"random {seed}",
        protocol,
        routing=routing,
        is_reduced=True,
        n_blocks=chance.randint(1, 2),
        n_index_warps=chance.randint(1, 2),
        n_parts=chance.randint(1, 2),
        n_early_tokens=chance.randint(0, 3),
        **program,
    )


def by_protocol() -> dict[str, list[World]]:
    """All worlds, by whose code they are a model of."""
    return {"rank_slots": rank_slots()}


def all_worlds() -> list[World]:
    return [world for some in by_protocol().values() for world in some]


def tiny() -> list[World]:
    """Worlds so small that all steps can be interleaved in every order."""
    one_token = ((((1,),), ((0,),)), (((1,),), ()))
    small = {"protocol": "rank_slots", "routing": one_token, "is_one_agent": True}
    return [
        World("tiny, fused", is_reduced=True, **replays(FUSED, 1), **small),
        World("tiny, dispatch only", **replays(FUSED[:1], 3), **small),
    ]
