# SPDX-License-Identifier: Apache-2.0
"""Combine that returns sums, on GPUs."""

from .launches import Agent, Launch
from .memory import SENTINEL
from .steps import (
    await_kept_count,
    await_readers,
    elect_last_to_start,
    header_word,
    move,
    publish_at_end,
    publish_earlier_reads,
    publish_kept_counts,
    record_readers,
)

CODE = "combine to sums: "


def send_partials(a: Agent) -> None:
    world, rank = a.world, a.rank
    n, (m, _) = a.launch.rounds["dispatch_received"], a.next("combine_sent")
    a.load(("most_received", rank), ("most", n))
    most = max(len(world.tokens(n, src)) for src in world.ranks)
    others = [(rank + 1 + i) % world.n_ranks for i in range(world.n_ranks - 1)]
    items = [(t, src) for t in range(most) for src in others]
    is_waiting = True
    if world.drops_rows and a.block == 0:
        await_readers(a, "combine")
        publish_kept_counts(a)
    for t, src in (items[i] for i in a.of_block(len(items))):
        a.load(("received_tokens", rank, src), ("received", n, src))
        if t >= len(world.tokens(n, src)):
            continue
        a.load(("received_rows", rank, src, t), ("row", n, src, t))
        if rank not in world.owners(n, src, t):
            continue
        a.load(("received_weights", rank, src, t), ("row", n, src, t))
        if is_waiting:
            await_readers(a, "combine")
            is_waiting = False
        for chunk in range(world.n_chunks):
            truth = ("partial", m, rank, src, t, chunk)
            a.store_relaxed(_partial(a, src, rank, t, chunk), truth, truth)


def _partial(a: Agent, to: int, owner: int, t: int, chunk: int) -> tuple:
    is_shared = a.world.has("dispatch and combine sharing a buffer")
    return ("inline_token" if is_shared else "partial", to, owner, t, chunk)


def is_bad_answer(a: Agent, n: int, of: int) -> bool:
    """Refuses a result that cannot be that of the dispatch. What is saved of the own
    rows is of the last dispatch that was received; the number of tokens is kept for
    two. It is compared first, but not used before."""
    is_bad = a.before["dispatch_received"] != of
    if a.world.has("combine of an earlier dispatch is not refused"):
        is_bad = False
    if is_bad or a.before["dispatch_sent"] not in (of, a.launch.following(of)):
        a.refuse()
        return True
    a.load(("n_tokens", a.rank, a.launch.parity(of, n)), ("n_tokens", n))
    return False


def add_tokens(a: Agent, n: int, of: int) -> None:
    """Adds up tokens of a combine, which answers the `n`-th dispatch."""
    world, rank = a.world, a.rank
    if is_bad_answer(a, n, of):
        return
    m, _ = a.next("combine_received")
    for t in a.of_block(len(world.tokens(n, rank))):
        owners, truth = world.owners(n, rank, t), ("row", n, rank, t)
        # It says, too, which other ranks have rows of it.
        a.load(("received_rows", rank, rank, t), truth)
        if rank in owners:
            a.load(("received_weights", rank, rank, t), truth)
        if world.drops_rows:
            for k, expert in enumerate(world.tokens(n, rank)[t]):
                if expert >= 0 and world.rank_of(expert) != rank:
                    parity = a.launch.parity(of, n)
                    a.load(("choices", rank, parity, t, k), ("choice", n, t, k))
                    await_kept_count(a, expert)
        for owner in owners:
            for chunk in range(world.n_chunks if owner != rank else 0):
                place = _partial(a, rank, owner, t, chunk)
                a.load_relaxed(
                    place, ("filled",), ("partial", m, owner, rank, t, chunk)
                )
                a.store(place, SENTINEL)


def _count(launch: Launch, block: int, sends: bool, receives: bool) -> None:
    """One warp of a block reads the header and counts the block; the last moves it."""
    a = launch.agent("electing warp", block)
    answered = launch.before["dispatch_received"]
    words = ["dispatch_received", "combine_received"]
    moves = dict(combine_of=answered, combine_sent=launch.next("combine_sent")[1])
    if sends:
        words += ["combine_sent", "combine_drained"]
    else:
        words, moves = [*words, "combine_of"], {}
    if receives:
        words.append("dispatch_sent")
        moves["combine_received"] = launch.next("combine_received")[1]
    header_word(a, *words)
    if sends or not launch.world.publishes_at_combine_end:
        elect_last_to_start(a, lambda last: move(last, **moves))


def phase(launch: Launch, sends: bool, receives: bool) -> None:
    """A combine, or one phase of it."""
    n, of = launch.answered()
    publishes_at_end = not sends and launch.world.publishes_at_combine_end
    for block in range(launch.world.n_blocks):
        first = len(launch.agents)
        _count(launch, block, sends, receives)
        if sends and block == 0:
            publish_earlier_reads(launch)
        if receives and block == 0 and not publishes_at_end:
            record_readers(launch.agent("recording warp"), "dispatch")
        if sends:
            send_partials(launch.agent("sender", block))
        if receives:
            add_tokens(launch.agent("receiver", block), n, of)
        if publishes_at_end:
            publish_at_end(launch, block, first)
