# SPDX-License-Identifier: Apache-2.0
"""Dispatch by expert on GPUs. Combine is in `rows.py`.

Ranks of several hosts, which SHMEM reaches, are not modelled.
"""

from .launches import Agent, Launch
from .steps import await_message, elect_last_block, move, returns_early

CODE = "dispatch by expert: "


def await_done_words(a: Agent, direction: str) -> None:
    sent = f"{direction}_sent"
    a.load((sent, a.rank), is_=a.before[sent])
    for rank in a.world.ranks:
        reached, truth = ("reached", 0, a.before[sent]), a.launch.rounds[sent]
        place = (f"{direction}_done", a.rank, rank)
        a.load_acquire(place, reached, ("at least", 0, truth))


def publish_done(a: Agent, direction: str) -> None:
    n, generation = a.next(f"{direction}_received")
    for rank in a.world.ranks:
        a.publish((f"{direction}_done", rank, a.rank), (generation, 0), (n, 0))


def finish(launch: Launch, block: int, first: int) -> None:
    """A block has ended; the last one moves the generation and publishes it."""

    def publish(last: Agent) -> None:
        if launch.sends and launch.direction == "dispatch":
            n, generation = launch.next("dispatch_sent")
            place = ("n_tokens", launch.rank, launch.parity(generation, n))
            last.store(place, len(launch.world.tokens(n, launch.rank)), ("n_tokens", n))
            move(last, dispatch_sent=generation)
        elif launch.sends:
            move(last, combine_sent=launch.next("combine_sent")[1])
            move(last, combine_of=launch.before["dispatch_received"])
        if launch.receives:
            received = f"{launch.direction}_received"
            move(last, **{received: launch.next(received)[1]})
            publish_done(last, launch.direction)

    elect_last_block(
        launch.agent("end", block, range(first, len(launch.agents))), publish
    )


def _index_choices(a: Agent) -> None:
    n, generation = a.next("dispatch_sent")
    parity = a.launch.parity(generation, n)
    tokens = a.world.tokens(n, a.rank)
    for i, t in enumerate(a.of_block(len(tokens))):
        for k, expert in enumerate(tokens[t]):
            truth = ("choice", n, t, k)
            a.store(("choices", a.rank, parity, t, k), expert, truth)
            a.store(("slots", a.rank, t, k), 0, truth)
        a.block_publish("INDEXED", i + 1)
    await_done_words(a, "dispatch")
    for expert in (a.world.experts[i] for i in a.of_block(len(a.world.experts))):
        word = (generation, a.world.count(n, a.rank, expert))
        place = ("dispatch_count", a.world.rank_of(expert), expert, a.rank)
        a.store_relaxed(place, word, ("count", n, a.rank, expert))


def _send_messages(a: Agent) -> None:
    n, generation = a.next("dispatch_sent")
    parity = a.launch.parity(generation, n)
    await_done_words(a, "dispatch")
    tokens = a.world.tokens(n, a.rank)
    for i, t in enumerate(a.of_block(len(tokens))):
        a.block_load_acquire("INDEXED", i + 1)
        for k in range(len(tokens[t])):
            truth = ("choice", n, t, k)
            a.load(("choices", a.rank, parity, t, k), truth)
            a.load(("slots", a.rank, t, k), truth)
        if a.world.has_shared_expert:
            staged = ("staged", n, a.rank, t)
            a.store(("dispatch_staged", a.rank, t), staged, staged)
        mine = [m for m in a.world.messages(n, a.rank) if m[0] == t]
        for _, k, expert, slot in mine:
            truth, to = ("message", n, a.rank, t, k), a.world.rank_of(expert)
            for chunk in range(a.world.n_chunks):
                place = ("dispatch_message", to, expert, a.rank, slot, chunk)
                a.store(place, truth, truth)
        for _, k, expert, slot in mine:
            truth, to = ("message", n, a.rank, t, k), a.world.rank_of(expert)
            flag = ("dispatch_message_flag", to, expert, a.rank, slot)
            a.publish(flag, (generation, (t, k)), truth)


def read_counts(a: Agent) -> None:
    n, generation = a.next("dispatch_received")
    a.load(("dispatch_received", a.rank), is_=a.before["dispatch_received"])
    for expert in a.world.experts_of(a.rank):
        for src in a.world.ranks:
            place, truth = ("dispatch_count", a.rank, expert, src), ("count", n, src)
            a.load_relaxed(place, ("equals", generation), (*truth, expert))
    a.store(("block_pair_rows", a.rank, a.block, 0), 1)
    if a.block == 0:
        for counter in range(a.world.n_index_warps):
            a.store(("pair_rows", a.rank, counter), 1, ("pair rows", n))
    a.block_publish("PAIRS_READY", 1)


def _receive_messages(a: Agent) -> None:
    n, generation = a.next("dispatch_received")
    a.block_load_acquire("PAIRS_READY", 1)
    a.load(("block_pair_rows", a.rank, a.block, 0), is_=1)
    items = received_messages(a, n)
    for i in a.of_block(len(items)):
        src, t, k, expert, slot = items[i]
        meant, place = ("message", n, src, t, k), (a.rank, expert, src, slot)
        await_message(a, ("dispatch_message_flag", *place), generation, meant)
        for chunk in range(a.world.n_chunks):
            a.load(("dispatch_message", *place, chunk), meant)
        if src == a.rank:
            record_own_row(a, t, k)


def received_messages(a: Agent, n: int) -> list[tuple[int, ...]]:
    """Source, token, k, expert and slot of each choice that a rank receives."""
    world = a.world
    items = [(src, *m) for src in world.ranks for m in world.messages(n, src)]
    return [item for item in items if world.rank_of(item[3]) == a.rank]


def record_own_row(a: Agent, t: int, k: int) -> None:
    """Says in place of a choice's expert where its row is on the same rank."""
    n, generation = a.next("dispatch_received")
    place = ("choices", a.rank, a.launch.parity(generation, n), t, k)
    a.store(place, "row", ("own row", n, t, k))


def _place_own_tokens(a: Agent) -> None:
    n, _ = a.next("dispatch_received")
    for t in a.of_block(len(a.world.tokens(n, a.rank))):
        a.load(("dispatch_staged", a.rank, t), ("staged", n, a.rank, t))


def phase(launch: Launch, sends: bool, receives: bool) -> None:
    """A dispatch, or one phase of it."""
    if sends and returns_early(launch):
        return
    for block in range(launch.world.n_blocks):
        first = len(launch.agents)
        has_own = launch.world.has_shared_expert and receives
        if has_own and not sends:
            _place_own_tokens(launch.agent("own tokens", block))
        if sends:
            _index_choices(launch.agent("first warp", block))
            _send_messages(launch.agent("sender", block))
        senders = range(first, len(launch.agents))
        if receives:
            read_counts(launch.agent("counter", block))
            _receive_messages(launch.agent("receiver", block))
        if has_own and sends:  # after a block barrier
            _place_own_tokens(launch.agent("own tokens", block, senders))
        finish(launch, block, first)
