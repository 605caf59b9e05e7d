# SPDX-License-Identifier: Apache-2.0
"""All protocols of CPU ranks: counts announce what was sent before them.

Functions have the names of those in `mojo/max_ep/cpu/`. A launch is its caller,
workers (`for_each_chunk`), and the caller again.
"""

from __future__ import annotations

from collections.abc import Callable

from .launches import Agent, Launch

_DISPATCH = "cpu/dispatch.mojo: "
_COMBINE = "cpu/combine.mojo: "
_PLAN = "cpu/plan.mojo: "
_RANK = "cpu/rank.mojo: "
_N_WORKERS = 2


def await_readers(launch: Launch, a: Agent, direction: str, only_owners: bool) -> None:
    generation = launch.before[f"{direction}_sent"]
    n_sent = launch.dispatched if direction == "dispatch" else launch.combined
    for rank in launch.world.ranks:
        if only_owners and not launch.world.experts_of(rank):
            continue
        a.load_acquire(
            _RANK + "await_readers",
            (f"{direction}_done", launch.rank, rank),
            ("equals", generation),
            ("at least", 0, n_sent),
        )


def for_each_chunk(
    launch: Launch, items: list, work: Callable[[Agent, object], None]
) -> Agent:
    """Gives items to workers; returns the caller behind them."""
    before = len(launch.agents) - 1
    n_workers = min(_N_WORKERS, len(items))
    for worker in range(n_workers):
        a = launch.agent(f"worker {worker}", [before])
        for item in items[worker::n_workers]:
            work(a, item)
        a.drain_stores("cpu_copy.mojo: for_each_chunk")
    return launch.agent("caller, end", range(before, len(launch.agents)))


def _chunks(launch: Launch, n: int, src: int) -> list:
    return list(enumerate(launch.world.tokens(n, src)))


def _is_by_expert(launch: Launch) -> bool:
    return launch.world.protocol == "by_expert"


# --------------------------------------------------------------------------- dispatch


def _send_by_expert(launch: Launch) -> Agent:
    from .by_expert import _messages

    world, rank = launch.world, launch.rank
    n = launch.dispatched + 1
    generation = launch.next("dispatch_sent")
    where = _DISPATCH + "cpu_dispatch_async"

    def send(a: Agent, item: tuple) -> None:
        t, _ = item
        staged = ("staged", n, rank, t)
        a.store(where, ("dispatch_staged", rank, t), staged, staged)
        for token, k, expert, slot in _messages(launch, n, rank):
            if token != t:
                continue
            truth = ("message", n, rank, t, k)
            place = (world.rank_of(expert), expert, rank, slot)
            a.stream(where, ("dispatch_message", *place), truth, truth)
            a.store(
                _RANK + "write_source_info",
                ("dispatch_message_flag", *place),
                (generation, (t, k)),
                truth,
            )

    return for_each_chunk(launch, _chunks(launch, n, rank), send)


def _send_by_rank(launch: Launch) -> Agent:
    world, rank = launch.world, launch.rank
    n = launch.dispatched + 1
    generation = launch.next("dispatch_sent")
    where = _DISPATCH + "cpu_dispatch_async"

    def send(a: Agent, item: tuple) -> None:
        t, experts = item
        token = ("token", n, rank, t)
        a.store(where, ("token", rank, rank, t), token, token)
        seen = {rank}
        for k, expert in enumerate(experts):
            if expert < 0:
                continue
            to = world.rank_of(expert)
            _write_entry(launch, a, (t, k), expert, generation)
            if to not in seen:
                a.stream(where, ("token", to, rank, t), token, token)
            seen.add(to)

    return for_each_chunk(launch, _chunks(launch, n, rank), send)


def _write_entry(
    launch: Launch, a: Agent, choice: tuple, expert: int, generation: int
) -> None:
    world, rank, n = launch.world, launch.rank, launch.dispatched + 1
    where, to, (t, k) = _DISPATCH + "_write_entry", world.rank_of(expert), choice
    truth = ("entry", n, rank, t, k)
    a.store(where, ("entry", to, rank, t, k), (generation, expert), truth)
    if world.has_metadata:
        truth = ("metadata", n, rank, t)
        a.store(where, ("metadata", to, rank, t), (generation, 0), truth)


def _publish_counts(launch: Launch, a: Agent) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatched + 1
    generation = launch.next("dispatch_sent")
    where = _DISPATCH + "_publish_counts"
    if not _is_by_expert(launch):
        for to in world.ranks:
            a.publish(
                where,
                ("dispatch_n_tokens", to, rank),
                (generation, len(world.tokens(n, rank))),
                ("number", n, rank),
            )
    for expert in world.experts:
        a.publish(
            where,
            ("dispatch_count", world.rank_of(expert), expert, rank),
            (generation, world.count(n, rank, expert)),
            ("count", n, rank, expert),
        )
    a.store(where, ("dispatch_sent", rank), generation)


def dispatch_async(launch: Launch) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatched + 1
    generation = launch.next("dispatch_sent")
    if world.has("early return of a rank with zero tokens"):
        if not world.tokens(n, rank):
            return
    where = _DISPATCH + "cpu_dispatch_async"
    a = launch.agent("caller")
    await_readers(launch, a, "dispatch", True)
    place = ("n_tokens", rank, launch.parity(generation, n))
    a.store(where, place, len(world.tokens(n, rank)), ("n_tokens", n))
    send = _send_by_expert if _is_by_expert(launch) else _send_by_rank
    _publish_counts(launch, send(launch))


def _lay_out_rows(launch: Launch) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatch_read + 1
    a = launch.agent("caller")
    where = _PLAN + "lay_out_rows"
    for expert in world.experts_of(rank):
        for src in world.ranks:
            a.load_acquire(
                where,
                ("dispatch_count", rank, expert, src),
                ("equals", launch.next("dispatch_received")),
                ("count", n, src, expert),
            )
    a.store(where, ("pair_rows", rank, 0), 1, ("pair rows", n))
    if _is_by_expert(launch):
        return
    for src in world.ranks:
        if world.experts_of(rank):
            # Not a wait: a count that came says that this came before it.
            a.load_acquire(
                _DISPATCH + "_place_tokens",
                ("dispatch_n_tokens", rank, src),
                ("anything",),
                ("number", n, src),
            )
        if world.has_sums:
            place = ("received_tokens", rank, src)
            truth = ("received", n, src)
            a.store(_DISPATCH + "_place_tokens", place, 1, truth)


def dispatch_wait(launch: Launch) -> None:
    from .by_expert import _messages

    world, rank = launch.world, launch.rank
    n = launch.dispatch_read + 1
    generation = launch.next("dispatch_received")
    _lay_out_rows(launch)
    items = [(src, t) for src in world.ranks for t, _ in _chunks(launch, n, src)]

    def decode_messages(a: Agent, item: tuple) -> None:
        src, t = item
        for token, k, expert, slot in _messages(launch, n, src):
            if token == t and world.rank_of(expert) == rank:
                where = _DISPATCH + "_place_messages"
                place = (rank, expert, src, slot)
                meant = ("message", n, src, t, k)
                a.load(where, ("dispatch_message", *place), meant)
                a.load(where, ("dispatch_message_flag", *place), meant)
        if world.has_shared_expert and src == rank:
            place = ("dispatch_staged", rank, t)
            a.load(_DISPATCH + "cpu_dispatch_wait", place, ("staged", n, rank, t))

    def decode_tokens(a: Agent, item: tuple) -> None:
        src, t = item
        where = _DISPATCH + "_place_choice"
        for k, expert in enumerate(world.tokens(n, src)[t]):
            place = ("entry", rank, src, t, k)
            if expert >= 0 and world.rank_of(expert) == rank:
                a.load_of(where, place, generation, ("entry", n, src, t, k))
                a.load(where, ("token", rank, src, t), ("token", n, src, t))
                if world.has_metadata:
                    place = ("metadata", rank, src, t)
                    a.load(where, place, ("metadata", n, src, t))
            else:
                a.load_of_another_generation(where, place, generation)
        if world.has_sums:
            truth = ("row", n, src, t)
            a.store(where, ("received_rows", rank, src, t), 1, truth)

    decode = decode_messages if _is_by_expert(launch) else decode_tokens
    a = for_each_chunk(launch, items if world.experts_of(rank) else [], decode)
    where = _DISPATCH + "cpu_dispatch_wait"
    a.store(where, ("dispatch_received", rank), generation)
    for to in world.ranks:
        place = ("dispatch_done", to, rank)
        a.publish(where, place, (generation, 0), (n, 0))


# ---------------------------------------------------------------------------- combine


def combine_async(launch: Launch) -> None:
    from .by_expert import _messages

    world, rank = launch.world, launch.rank
    n, m = launch.dispatch_read, launch.combined + 1
    generation = launch.next("combine_sent")
    a = launch.agent("caller")
    a.load(_COMBINE + "_check_rows", ("pair_rows", rank, 0), ("pair rows", n))
    if world.experts_of(rank):
        await_readers(launch, a, "combine", False)

    def send_rows(a: Agent, item: tuple) -> None:
        src, t = item
        where = _COMBINE + "_send_rows"
        for token, k, expert, _ in _messages(launch, n, src):
            if token == t and world.rank_of(expert) == rank:
                truth = ("row", m, src, t, k)
                a.stream(where, _message(launch, src, t, k), truth, truth)
                a.store(
                    _RANK + "write_source_info",
                    ("combine_message_flag", src, t, k),
                    (generation, (t, k)),
                    truth,
                )

    def send_sums(a: Agent, item: tuple) -> None:
        src, t = item
        where = _COMBINE + "_send_sums"
        a.load(where, ("received_tokens", rank, src), ("received", n, src))
        a.load(where, ("received_rows", rank, src, t), ("row", n, src, t))
        if src == rank or rank not in world.owners(n, src, t):
            return
        truth = ("partial", m, rank, src, t)
        a.stream(where, _partial(launch, src, rank, t), truth, truth)
        a.store(
            _RANK + "write_source_info",
            ("partial", src, rank, t, "info"),
            (generation, 1),
            truth,
        )

    if world.has_sums:
        of = launch.before["dispatch_received"]
        a.store(_COMBINE + "_send_sums", ("combine_of", rank), of)
    items = [(src, t) for src in world.ranks for t, _ in _chunks(launch, n, src)]
    send = send_sums if world.has_sums else send_rows
    a = for_each_chunk(launch, items if world.experts_of(rank) else [], send)
    for expert in world.experts_of(rank):
        for src in world.ranks:
            a.publish(
                _COMBINE + "cpu_combine_async",
                ("combine_count", src, expert),
                (generation, world.count(n, src, expert)),
                ("rows", m, src, expert),
            )
    a.store(_COMBINE + "cpu_combine_async", ("combine_sent", rank), generation)


def _message(launch: Launch, to: int, t: int, k: int) -> tuple:
    if launch.world.has("dispatch and combine sharing a buffer"):
        if _is_by_expert(launch):
            return ("dispatch_message", to, t, k, 0)
        return ("token", to, k, t)
    return ("combine_message", to, t, k)


def _partial(launch: Launch, to: int, owner: int, t: int) -> tuple:
    if launch.world.has("dispatch and combine sharing a buffer"):
        return ("token", to, owner, t)
    return ("partial", to, owner, t)


def combine_wait(launch: Launch) -> None:
    world, rank = launch.world, launch.rank
    m = launch.combine_read + 1
    n = launch.answers[m]
    generation = launch.next("combine_received")
    a = launch.agent("caller")
    if world.has_sums:
        place = ("n_tokens", rank, launch.parity(launch.before["combine_of"], n))
        a.load(_COMBINE + "_check_unsent_rows", place, ("n_tokens", n))
    for expert in world.experts:
        a.load_acquire(
            _COMBINE + "_await_rows",
            ("combine_count", rank, expert),
            ("equals", generation),
            ("rows", m, rank, expert),
        )

    def reduce_token(a: Agent, item: tuple) -> None:
        t, experts = item
        where = _COMBINE + "cpu_combine_wait"
        for k, expert in enumerate(experts):
            flag = ("combine_message_flag", rank, t, k)
            if expert < 0:
                a.load_of_another_generation(where, flag, generation)
                continue
            meant = ("row", m, rank, t, k)
            a.load_of(where, flag, generation, meant)
            a.load(where, _message(launch, rank, t, k), meant)

    def add_sums(a: Agent, item: tuple) -> None:
        t, _ = item
        where = _COMBINE + "cpu_combine_wait"
        owners = world.owners(n, rank, t)
        if world.experts_of(rank):
            a.load(where, ("received_rows", rank, rank, t), ("row", n, rank, t))
        for owner in world.ranks:
            flag = ("partial", rank, owner, t, "info")
            if owner == rank or owner not in owners:
                a.load_of_another_generation(where, flag, generation)
                continue
            meant = ("partial", m, owner, rank, t)
            a.load_of(where, flag, generation, meant)
            a.load(where, _partial(launch, rank, owner, t), meant)

    reduce = add_sums if world.has_sums else reduce_token
    a = for_each_chunk(launch, _chunks(launch, n, rank), reduce)
    where = _COMBINE + "cpu_combine_wait"
    a.store(where, ("combine_received", rank), generation)
    for to in world.ranks:
        a.publish(where, ("combine_done", to, rank), (generation, 0), (m, 0))


OPS = {
    "dispatch_async": dispatch_async,
    "dispatch_wait": dispatch_wait,
    "combine_async": combine_async,
    "combine_wait": combine_wait,
}
