# SPDX-License-Identifier: Apache-2.0
"""The by-expert protocol on GPUs; its combine also returns rows to dispatch by rank.

Ranks of several hosts, which SHMEM reaches, are not modelled.
"""

from __future__ import annotations

from .launches import Agent, Launch

_STEPS = "steps: "
_DISPATCH = "dispatch by expert: "
_COMBINE = "combine to rows: "


def await_done_words(launch: Launch, a: Agent, direction: str) -> None:
    generation = launch.before[f"{direction}_sent"]
    n_sent = launch.dispatched if direction == "dispatch" else launch.combined
    where = (_DISPATCH if direction == "dispatch" else _COMBINE) + "_start"
    a.load(where, (f"{direction}_sent", launch.rank), is_=generation)
    for rank in launch.world.ranks:
        a.load_acquire(
            _STEPS + "await_done_words",
            (f"{direction}_done", launch.rank, rank),
            ("reached", 0, generation),
            ("at least", 0, n_sent),
        )


def await_message(
    launch: Launch, a: Agent, flag: tuple, generation: int, meant: tuple
) -> None:
    a.load_acquire(_STEPS + "await_message", flag, ("equals", generation), meant)


def publish_done(
    launch: Launch, a: Agent, direction: str, generation: int, n: int
) -> None:
    for rank in launch.world.ranks:
        a.publish(
            _STEPS + "publish_done",
            (f"{direction}_done", rank, launch.rank),
            (generation, 0),
            (n, 0),
        )


def _finish(launch: Launch, block: int, first: int, is_sending: bool) -> None:
    """A block has ended; the last one moves the generation and publishes it."""
    direction = "dispatch" if launch.op.startswith("dispatch") else "combine"
    is_receiving = not launch.op.endswith("_async")
    where = (_DISPATCH if direction == "dispatch" else _COMBINE) + "_finish"

    def publish(last: Agent) -> None:
        if is_sending and direction == "dispatch":
            sent = launch.next("dispatch_sent")
            n = launch.dispatched + 1
            place = ("n_tokens", launch.rank, launch.parity(sent, n))
            n_tokens = len(launch.world.tokens(n, launch.rank))
            last.store(where, place, n_tokens, ("n_tokens", n))
            last.store(where, ("dispatch_sent", launch.rank), sent)
        elif is_sending:
            place = ("combine_sent", launch.rank)
            last.store(where, place, launch.next("combine_sent"))
            place = ("combine_of", launch.rank)
            last.store(where, place, launch.before["dispatch_received"])
        if is_receiving:
            received = launch.next(f"{direction}_received")
            last.store(where, (f"{direction}_received", launch.rank), received)
            n = launch.dispatch_read if direction == "dispatch" else launch.combine_read
            publish_done(launch, last, direction, received, n + 1)

    a = launch.agent(f"block {block}, end", range(first, len(launch.agents)))
    a.arrive(_STEPS + "is_last_block", launch.world.n_blocks, publish)


# --------------------------------------------------------------------------- dispatch


def _messages(launch: Launch, n: int, src: int) -> list[tuple[int, int, int, int]]:
    """Token, k, expert and slot of each choice that is sent."""
    slots: dict[int, int] = {}
    messages = []
    for t, experts in enumerate(launch.world.tokens(n, src)):
        for k, expert in enumerate(experts):
            if expert >= 0:
                messages.append((t, k, expert, slots.get(expert, 0)))
                slots[expert] = slots.get(expert, 0) + 1
    return messages


def _index_choices(launch: Launch, block: int) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatched + 1
    generation = launch.next("dispatch_sent")
    where = _DISPATCH + "_index_choices"
    a = launch.agent(f"block {block}, first warp")
    parity = launch.parity(generation, n)
    tokens = world.tokens(n, rank)
    for i, t in enumerate(range(block, len(tokens), world.n_blocks)):
        for k, expert in enumerate(tokens[t]):
            truth = ("choice", n, t, k)
            a.store(where, ("choices", rank, parity, t, k), expert, truth)
            a.store(where, ("slots", rank, t, k), 0, truth)
        a.block_publish(where, ("INDEXED", rank, block), i + 1)
    await_done_words(launch, a, "dispatch")
    for expert in list(world.experts)[block :: world.n_blocks]:
        a.store_relaxed(
            where,
            ("dispatch_count", world.rank_of(expert), expert, rank),
            (generation, world.count(n, rank, expert)),
            ("count", n, rank, expert),
        )


def _send_messages(launch: Launch, block: int) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatched + 1
    generation = launch.next("dispatch_sent")
    where = _DISPATCH + "_send_messages"
    a = launch.agent(f"block {block}, sender")
    parity = launch.parity(generation, n)
    await_done_words(launch, a, "dispatch")
    tokens = world.tokens(n, rank)
    for i, t in enumerate(range(block, len(tokens), world.n_blocks)):
        a.block_load_acquire(where, ("INDEXED", rank, block), i + 1)
        for k in range(len(tokens[t])):
            truth = ("choice", n, t, k)
            a.load(where, ("choices", rank, parity, t, k), truth)
            a.load(where, ("slots", rank, t, k), truth)
        if world.has_shared_expert:
            staged = ("staged", n, rank, t)
            a.store(
                _DISPATCH + "_send_unit", ("dispatch_staged", rank, t), staged, staged
            )
        mine = [m for m in _messages(launch, n, rank) if m[0] == t]
        for _, k, expert, slot in mine:
            truth = ("message", n, rank, t, k)
            for chunk in range(world.n_chunks):
                place = (world.rank_of(expert), expert, rank, slot, chunk)
                a.store(
                    _DISPATCH + "_send_unit", ("dispatch_message", *place), truth, truth
                )
        for _, k, expert, slot in mine:
            a.publish(
                where,
                ("dispatch_message_flag", world.rank_of(expert), expert, rank, slot),
                (generation, (t, k)),
                ("message", n, rank, t, k),
            )


def _read_counts(launch: Launch, block: int) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatch_read + 1
    generation = launch.next("dispatch_received")
    where = _DISPATCH + "read_counts"
    a = launch.agent(f"block {block}, counter")
    received = launch.before["dispatch_received"]
    a.load(_DISPATCH + "_start", ("dispatch_received", rank), is_=received)
    for expert in world.experts_of(rank):
        for src in world.ranks:
            a.load_relaxed(
                where,
                ("dispatch_count", rank, expert, src),
                ("equals", generation),
                ("count", n, src, expert),
            )
    a.store(where, ("block_pair_rows", rank, block, 0), 1)
    if block == 0:
        for counter in range(world.n_index_warps):
            a.store(where, ("pair_rows", rank, counter), 1, ("pair rows", n))
    a.block_publish(_DISPATCH + "_receive_messages", ("PAIRS_READY", rank, block), 1)


def _receive_messages(launch: Launch, block: int) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatch_read + 1
    generation = launch.next("dispatch_received")
    where = _DISPATCH + "_receive_messages"
    a = launch.agent(f"block {block}, receiver")
    a.block_load_acquire(where, ("PAIRS_READY", rank, block), 1)
    a.load(where, ("block_pair_rows", rank, block, 0), is_=1)
    items = [
        (src, *message)
        for src in world.ranks
        for message in _messages(launch, n, src)
        if world.rank_of(message[2]) == rank
    ]
    for src, t, k, expert, slot in items[block :: world.n_blocks]:
        meant = ("message", n, src, t, k)
        flag = ("dispatch_message_flag", rank, expert, src, slot)
        await_message(launch, a, flag, generation, meant)
        for chunk in range(world.n_chunks):
            a.load(where, ("dispatch_message", rank, expert, src, slot, chunk), meant)
        if src == rank:
            record_own_row(launch, a, where, n, generation, t, k)


def record_own_row(
    launch: Launch, a: Agent, where: str, n: int, generation: int, t: int, k: int
) -> None:
    """Says in place of a choice's expert where its row is on the same rank."""
    place = ("choices", launch.rank, launch.parity(generation, n), t, k)
    a.store(where, place, "row", ("own row", n, t, k))


def _place_own_tokens(launch: Launch, block: int, after: list[int], n: int) -> None:
    world, rank = launch.world, launch.rank
    if not world.has_shared_expert:
        return
    a = launch.agent(f"block {block}, own tokens", after)
    for t in range(block, len(world.tokens(n, rank)), world.n_blocks):
        where = _DISPATCH + "_place_own_tokens"
        a.load(where, ("dispatch_staged", rank, t), ("staged", n, rank, t))


def _returns_early(launch: Launch) -> bool:
    """The mutation: a rank without tokens leaves at once."""
    return launch.world.has("early return of a rank with zero tokens") and not (
        launch.world.tokens(launch.dispatched + 1, launch.rank)
    )


def _send(launch: Launch, block: int) -> None:
    _index_choices(launch, block)
    _send_messages(launch, block)


def _receive(launch: Launch, block: int) -> None:
    _read_counts(launch, block)
    _receive_messages(launch, block)


def dispatch(launch: Launch) -> None:
    if _returns_early(launch):
        return
    for block in range(launch.world.n_blocks):
        first = len(launch.agents)
        _send(launch, block)
        senders = list(range(first, len(launch.agents)))
        _receive(launch, block)
        # Behind a block barrier.
        _place_own_tokens(launch, block, senders, launch.dispatch_read + 1)
        _finish(launch, block, first, True)


def dispatch_async(launch: Launch) -> None:
    if _returns_early(launch):
        return
    for block in range(launch.world.n_blocks):
        first = len(launch.agents)
        _send(launch, block)
        _finish(launch, block, first, True)


def dispatch_wait(launch: Launch) -> None:
    for block in range(launch.world.n_blocks):
        first = len(launch.agents)
        _place_own_tokens(launch, block, [], launch.dispatch_read + 1)
        _receive(launch, block)
        _finish(launch, block, first, False)


# ---------------------------------------------------------------------------- combine


def _send_rows(launch: Launch, block: int) -> None:
    world, rank = launch.world, launch.rank
    n, m = launch.dispatch_read, launch.combined + 1
    generation = launch.next("combine_sent")
    where = _COMBINE + "_send_rows"
    a = launch.agent(f"block {block}, sender")
    for counter in range(world.n_index_warps):
        place = ("pair_rows", rank, counter)
        a.load(_COMBINE + "_share_pairs", place, ("pair rows", n))
    await_done_words(launch, a, "combine")
    items = [
        (src, *message)
        for src in world.ranks
        for message in _messages(launch, n, src)
        if world.rank_of(message[2]) == rank and src != rank
    ]
    for src, t, k, expert, _ in items[block :: world.n_blocks]:
        truth = ("row", m, src, t, k)
        for chunk in range(world.n_chunks):
            a.store(where, _combine_message(launch, src, t, k, chunk), truth, truth)
        flag = ("combine_message_flag", src, t, k)
        a.publish(where, flag, (generation, expert), truth)


def _combine_message(launch: Launch, to: int, t: int, k: int, chunk: int) -> tuple:
    if launch.world.has("dispatch and combine sharing a buffer"):
        # The recv buffers begin at the same byte.
        if launch.world.protocol != "by_expert":
            return ("inline_token", to, k, t, chunk)
        return ("dispatch_message", to, t, k, 0, chunk)
    return ("combine_message", to, t, k, chunk)


def _reduce_tokens(launch: Launch, block: int, n: int, of: int) -> None:
    world, rank = launch.world, launch.rank
    m = launch.combine_read + 1
    generation = launch.next("combine_received")
    where = _COMBINE + "_reduce_tokens"
    parity = launch.parity(of, n)
    a = launch.agent(f"block {block}, receiver")
    received = launch.before["combine_received"]
    a.load(_COMBINE + "_start", ("combine_received", rank), is_=received)
    a.load(where, ("n_tokens", rank, parity), ("n_tokens", n))
    tokens = world.tokens(n, rank)
    for t in range(block, len(tokens), world.n_blocks):
        for k, expert in enumerate(tokens[t]):
            place = ("choices", rank, parity, t, k)
            if expert >= 0 and world.rank_of(expert) == rank:
                # The row is read where it is.
                a.load(where, place, ("own row", n, t, k))
                continue
            a.load(where, place, ("choice", n, t, k))
            if expert < 0:
                continue
            meant = ("row", m, rank, t, k)
            flag = ("combine_message_flag", rank, t, k)
            await_message(launch, a, flag, generation, meant)
            for chunk in range(world.n_chunks):
                place = _combine_message(launch, rank, t, k, chunk)
                a.load(_COMBINE + "_reduce_chunk", place, meant)


def combine(launch: Launch) -> None:
    for block in range(launch.world.n_blocks):
        first = len(launch.agents)
        _send_rows(launch, block)
        of = launch.before["dispatch_received"]
        _reduce_tokens(launch, block, launch.dispatch_read, of)
        _finish(launch, block, first, True)


def combine_async(launch: Launch) -> None:
    for block in range(launch.world.n_blocks):
        first = len(launch.agents)
        _send_rows(launch, block)
        _finish(launch, block, first, True)


def combine_wait(launch: Launch) -> None:
    n = launch.answers[launch.combine_read + 1]
    for block in range(launch.world.n_blocks):
        first = len(launch.agents)
        _reduce_tokens(launch, block, n, launch.before["combine_of"])
        _finish(launch, block, first, False)


OPS = {
    "dispatch_async": dispatch_async,
    "dispatch_wait": dispatch_wait,
    "dispatch": dispatch,
    "combine_async": combine_async,
    "combine_wait": combine_wait,
    "combine": combine,
}
