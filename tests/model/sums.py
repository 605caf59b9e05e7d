# SPDX-License-Identifier: Apache-2.0
"""Combine that returns sums, on GPUs."""

from __future__ import annotations

from .launches import Agent, Launch
from .memory import SENTINEL
from .steps import (
    await_readers,
    header_word,
    is_last_to_start,
    moving,
    publish_at_end,
    publish_earlier_reads,
    record_readers,
)

_COMBINE = "combine to sums: "


def send_partials(launch: Launch, a: Agent, block: int) -> None:
    world, rank = launch.world, launch.rank
    n, m = launch.dispatch_read, launch.combined + 1
    where = _COMBINE + "send_partials"
    a.load(_COMBINE + "_send", ("most_received", rank), ("most", n))
    most = max(len(world.tokens(n, src)) for src in world.ranks)
    others = [(rank + 1 + i) % world.n_ranks for i in range(world.n_ranks - 1)]
    items = [(t, src) for t in range(most) for src in others]
    is_waiting = True
    for t, src in items[block :: world.n_blocks]:
        a.load(where, ("received_tokens", rank, src), ("received", n, src))
        if t >= len(world.tokens(n, src)):
            continue
        a.load(where, ("received_rows", rank, src, t), ("row", n, src, t))
        if rank not in world.owners(n, src, t):
            continue
        a.load(where, ("received_weights", rank, src, t), ("row", n, src, t))
        if is_waiting:
            await_readers(launch, a, True)
            is_waiting = False
        for chunk in range(world.n_chunks):
            truth = ("partial", m, rank, src, t, chunk)
            a.store_relaxed(
                _COMBINE + "store_partial",
                _partial(launch, src, rank, t, chunk),
                truth,
                truth,
            )


def _partial(launch: Launch, to: int, owner: int, t: int, chunk: int) -> tuple:
    if launch.world.has("dispatch and combine sharing a buffer"):
        return ("inline_token", to, owner, t, chunk)
    return ("partial", to, owner, t, chunk)


def is_bad_answer(launch: Launch, a: Agent, n: int, of: int) -> bool:
    """Refuses a result that cannot be that of the dispatch.

    What is saved of the own rows is of the last dispatch that was received; the
    number of tokens is kept for two. It is compared first, but not used before.
    """
    where = _COMBINE + "is_bad_answer"
    is_bad = launch.before["dispatch_received"] != of
    if launch.world.has("combine of an earlier dispatch is not refused"):
        is_bad = False
    if is_bad or launch.before["dispatch_sent"] not in (of, launch.following(of)):
        a.refuse(where)
        return True
    place = ("n_tokens", launch.rank, launch.parity(of, n))
    a.load(where, place, ("n_tokens", n))
    return False


def _receive(launch: Launch, a: Agent, block: int, m: int, n: int, of: int) -> None:
    if not is_bad_answer(launch, a, n, of):
        add_tokens(launch, a, block, m, n)


def add_tokens(launch: Launch, a: Agent, block: int, m: int, n: int) -> None:
    """Adds up tokens of the `m`-th combine, which answers the `n`-th dispatch."""
    world, rank = launch.world, launch.rank
    where = _COMBINE + "add_tokens"
    for t in range(len(world.tokens(n, rank))):
        if t % world.n_blocks != block:
            continue
        owners = world.owners(n, rank, t)
        truth = ("row", n, rank, t)
        # It says, too, which other ranks have rows of it.
        a.load(where, ("received_rows", rank, rank, t), truth)
        if rank in owners:
            a.load(where, ("received_weights", rank, rank, t), truth)
        for owner in owners:
            for chunk in range(world.n_chunks if owner != rank else 0):
                place = _partial(launch, rank, owner, t, chunk)
                meant = ("partial", m, owner, rank, t, chunk)
                a.load_relaxed(_COMBINE + "_await_16", place, ("filled",), meant)
                a.store(_COMBINE + "_await_16", place, SENTINEL)


def combine_async(launch: Launch) -> None:
    for block in range(launch.world.n_blocks):
        a = launch.agent(f"block {block}, counting warp")
        header_word(
            launch,
            a,
            "combine_sent",
            "dispatch_received",
            "combine_received",
            "combine_drained",
        )
        words = {
            "combine_of": launch.before["dispatch_received"],
            "combine_sent": launch.next("combine_sent"),
        }
        is_last_to_start(launch, a, moving(launch, words))
    publish_earlier_reads(launch)
    for block in range(launch.world.n_blocks):
        send_partials(launch, launch.agent(f"block {block}, sender"), block)


def combine_wait(launch: Launch) -> None:
    world = launch.world
    publishes_at_end = world.publishes_at_combine_end
    generation = launch.next("combine_received")
    m = launch.combine_read + 1
    words = ["combine_received", "dispatch_received", "dispatch_sent", "combine_of"]
    for block in range(world.n_blocks):
        first = len(launch.agents)
        a = launch.agent(f"block {block}, counting warp")
        header_word(launch, a, *words)
        if not publishes_at_end:
            is_last_to_start(
                launch, a, moving(launch, {"combine_received": generation})
            )
            if block == 0:
                record_readers(launch, launch.agent("recording warp"), False)
        a = launch.agent(f"block {block}, receiver")
        _receive(launch, a, block, m, launch.answers[m], launch.before["combine_of"])
        if publishes_at_end:
            publish_at_end(launch, block, first, "combine_received", generation)


def combine(launch: Launch) -> None:
    world = launch.world
    m, n = launch.combine_read + 1, launch.dispatch_read
    for block in range(world.n_blocks):
        a = launch.agent(f"block {block}, counting warp")
        header_word(
            launch,
            a,
            "combine_sent",
            "combine_received",
            "dispatch_received",
            "dispatch_sent",
            "combine_drained",
        )
        words = {
            "combine_sent": launch.next("combine_sent"),
            "combine_received": launch.next("combine_received"),
            "combine_of": launch.before["dispatch_received"],
        }
        is_last_to_start(launch, a, moving(launch, words))
    publish_earlier_reads(launch)
    record_readers(launch, launch.agent("recording warp"), False)
    for block in range(world.n_blocks):
        send_partials(launch, launch.agent(f"block {block}, sender"), block)
        a = launch.agent(f"block {block}, receiver")
        _receive(launch, a, block, m, n, launch.before["dispatch_received"])
