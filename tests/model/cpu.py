# SPDX-License-Identifier: Apache-2.0
"""All protocols of CPU ranks: counts announce what was sent before them.

Functions have the names of those in `mojo/max_ep/cpu/`, where one there has the step. A
launch is its caller, workers (`for_each_chunk`), and the caller again.
"""

from collections.abc import Callable

from .by_expert import publish_done, received_messages
from .launches import Agent, Launch

CODE = "CPU: "
_N_WORKERS = 2


def await_readers(a: Agent, direction: str, only_owners: bool) -> None:
    sent = f"{direction}_sent"
    for rank in a.world.ranks:
        if only_owners and not a.world.experts_of(rank):
            continue
        place, truth = (f"{direction}_done", a.rank, rank), a.launch.rounds[sent]
        a.load_acquire(place, ("equals", a.before[sent]), ("at least", 0, truth))


def for_each_chunk(launch: Launch, items: list, work: Callable[..., None]) -> Agent:
    """Gives items to workers; returns the caller after them."""
    before = len(launch.agents) - 1
    n_workers = min(_N_WORKERS, len(items))
    for worker in range(n_workers):
        a = launch.agent(f"worker {worker}", after=[before])
        for item in items[worker::n_workers]:
            work(a, *item)
        a.drain_stores()
    return launch.agent("caller, end", after=range(before, len(launch.agents)))


def _received_tokens(launch: Launch, n: int) -> list[tuple[int, int]]:
    """Source and token of all tokens, if the rank has experts."""
    world = launch.world
    if not world.experts_of(launch.rank):
        return []
    return [(src, t) for src in world.ranks for t in range(len(world.tokens(n, src)))]


def _is_by_expert(a: Agent | Launch) -> bool:
    return a.world.protocol == "by_expert"


def write_source_info(a: Agent, place: tuple, word: tuple, truth: tuple) -> None:
    a.store(place, word, truth)


def _put_messages(a: Agent, t: int) -> None:
    n, generation = a.next("dispatch_sent")
    staged = ("staged", n, a.rank, t)
    a.store(("dispatch_staged", a.rank, t), staged, staged)
    for token, k, expert, slot in a.world.messages(n, a.rank):
        if token == t:
            truth = ("message", n, a.rank, t, k)
            place = (a.world.rank_of(expert), expert, a.rank, slot)
            a.stream(("dispatch_message", *place), truth)
            flag = ("dispatch_message_flag", *place)
            write_source_info(a, flag, (generation, (t, k)), truth)


def _put_token(a: Agent, t: int) -> None:
    n, _ = a.next("dispatch_sent")
    token = ("token", n, a.rank, t)
    a.store(("token", a.rank, a.rank, t), token, token)
    seen = {a.rank}
    for k, expert in enumerate(a.world.tokens(n, a.rank)[t]):
        if expert >= 0:
            to = a.world.rank_of(expert)
            _write_entry(a, (t, k), expert)
            if to not in seen:
                a.stream(("token", to, a.rank, t), token)
            seen.add(to)


def _write_entry(a: Agent, choice: tuple[int, int], expert: int) -> None:
    n, generation = a.next("dispatch_sent")
    to = a.world.rank_of(expert)
    truth = ("entry", n, a.rank, *choice)
    a.store(("entry", to, a.rank, *choice), (generation, expert), truth)
    if a.world.has_metadata:
        t = choice[0]
        a.store(
            ("metadata", to, a.rank, t), (generation, 0), ("metadata", n, a.rank, t)
        )


def _publish_counts(a: Agent) -> None:
    n, generation = a.next("dispatch_sent")
    if not _is_by_expert(a):
        for to in a.world.ranks:
            word = (generation, len(a.world.tokens(n, a.rank)))
            a.publish(("dispatch_n_tokens", to, a.rank), word, ("number", n, a.rank))
    for expert in a.world.experts:
        place = ("dispatch_count", a.world.rank_of(expert), expert, a.rank)
        word = (generation, a.world.count(n, a.rank, expert))
        a.publish(place, word, ("count", n, a.rank, expert))
    a.store(("dispatch_sent", a.rank), generation)


def dispatch_async(launch: Launch) -> None:
    world, rank = launch.world, launch.rank
    n, generation = launch.next("dispatch_sent")
    n_tokens = len(world.tokens(n, rank))
    if world.has("early return of a rank with zero tokens") and not n_tokens:
        return
    a = launch.agent("caller")
    await_readers(a, "dispatch", True)
    place = ("n_tokens", rank, launch.parity(generation, n))
    a.store(place, n_tokens, ("n_tokens", n))
    send = _put_messages if _is_by_expert(launch) else _put_token
    _publish_counts(for_each_chunk(launch, [(t,) for t in range(n_tokens)], send))


def lay_out_rows(a: Agent) -> None:
    n, generation = a.next("dispatch_received")
    for expert in a.world.experts_of(a.rank):
        for src in a.world.ranks:
            place, truth = ("dispatch_count", a.rank, expert, src), ("count", n, src)
            a.load_acquire(place, ("equals", generation), (*truth, expert))
    a.store(("pair_rows", a.rank, 0), 1, ("pair rows", n))


def _read_numbers(a: Agent) -> None:
    n, _ = a.next("dispatch_received")
    for src in a.world.ranks:
        if a.world.experts_of(a.rank):
            # Not a wait: a count that came says that this came before it.
            place, truth = ("dispatch_n_tokens", a.rank, src), ("number", n, src)
            a.load_acquire(place, ("anything",), truth)
        if a.world.has_sums:
            a.store(("received_tokens", a.rank, src), 1, ("received", n, src))


def _place_messages(a: Agent, src: int, t: int) -> None:
    n, _ = a.next("dispatch_received")
    for source, token, k, expert, slot in received_messages(a, n):
        if (source, token) == (src, t):
            place, meant = (a.rank, expert, src, slot), ("message", n, src, t, k)
            a.load(("dispatch_message", *place), meant)
            a.load(("dispatch_message_flag", *place), meant)
    if a.world.has_shared_expert and src == a.rank:
        a.load(("dispatch_staged", a.rank, t), ("staged", n, a.rank, t))


def _place_choices(a: Agent, src: int, t: int) -> None:
    n, generation = a.next("dispatch_received")
    for k, expert in enumerate(a.world.tokens(n, src)[t]):
        place = ("entry", a.rank, src, t, k)
        if expert < 0 or a.world.rank_of(expert) != a.rank:
            a.load_of_another_generation(place, generation)
            continue
        a.load_of(place, generation, ("entry", n, src, t, k))
        a.load(("token", a.rank, src, t), ("token", n, src, t))
        if a.world.has_metadata:
            a.load(("metadata", a.rank, src, t), ("metadata", n, src, t))
    if a.world.has_sums:
        a.store(("received_rows", a.rank, src, t), 1, ("row", n, src, t))


def dispatch_wait(launch: Launch) -> None:
    n, generation = launch.next("dispatch_received")
    a = launch.agent("caller")
    lay_out_rows(a)
    if not _is_by_expert(launch):
        _read_numbers(a)
    decode = _place_messages if _is_by_expert(launch) else _place_choices
    a = for_each_chunk(launch, _received_tokens(launch, n), decode)
    a.store(("dispatch_received", launch.rank), generation)
    publish_done(a, "dispatch")


def _send_rows(a: Agent, src: int, t: int) -> None:
    n, (m, generation) = a.launch.rounds["dispatch_received"], a.next("combine_sent")
    for source, token, k, _, _ in received_messages(a, n):
        if (source, token) == (src, t):
            truth = ("row", m, src, t, k)
            a.stream(_message(a, src, t, k), truth)
            flag = ("combine_message_flag", src, t, k)
            write_source_info(a, flag, (generation, (t, k)), truth)


def _send_sums(a: Agent, src: int, t: int) -> None:
    n, (m, generation) = a.launch.rounds["dispatch_received"], a.next("combine_sent")
    a.load(("received_tokens", a.rank, src), ("received", n, src))
    a.load(("received_rows", a.rank, src, t), ("row", n, src, t))
    if src != a.rank and a.rank in a.world.owners(n, src, t):
        truth = ("partial", m, a.rank, src, t)
        a.stream(_partial(a, src, a.rank, t), truth)
        flag = ("partial", src, a.rank, t, "info")
        write_source_info(a, flag, (generation, 1), truth)


def combine_async(launch: Launch) -> None:
    world, rank = launch.world, launch.rank
    n, (m, generation) = launch.rounds["dispatch_received"], launch.next("combine_sent")
    a = launch.agent("caller")
    a.load(("pair_rows", rank, 0), ("pair rows", n))
    if world.experts_of(rank):
        await_readers(a, "combine", False)
    if world.has_sums:
        a.store(("combine_of", rank), launch.before["dispatch_received"])
    send = _send_sums if world.has_sums else _send_rows
    a = for_each_chunk(launch, _received_tokens(launch, n), send)
    for expert in world.experts_of(rank):
        for src in world.ranks:
            word, truth = world.count(n, src, expert), ("rows", m, src, expert)
            a.publish(("combine_count", src, expert), (generation, word), truth)
    a.store(("combine_sent", rank), generation)


def _message(a: Agent, to: int, t: int, k: int) -> tuple:
    if a.world.has("dispatch and combine sharing a buffer"):
        by_expert = ("dispatch_message", to, t, k, 0)
        return by_expert if _is_by_expert(a) else ("token", to, k, t)
    return ("combine_message", to, t, k)


def _partial(a: Agent, to: int, owner: int, t: int) -> tuple:
    is_shared = a.world.has("dispatch and combine sharing a buffer")
    return ("token" if is_shared else "partial", to, owner, t)


def _await_rows(a: Agent) -> None:
    m, generation = a.next("combine_received")
    for expert in a.world.experts:
        place, truth = ("combine_count", a.rank, expert), ("rows", m, a.rank, expert)
        a.load_acquire(place, ("equals", generation), truth)


def _reduce_token(a: Agent, t: int) -> None:
    m, generation = a.next("combine_received")
    for k, expert in enumerate(a.world.tokens(a.launch.answers[m], a.rank)[t]):
        flag, meant = ("combine_message_flag", a.rank, t, k), ("row", m, a.rank, t, k)
        if expert < 0:
            a.load_of_another_generation(flag, generation)
        else:
            a.load_of(flag, generation, meant)
            a.load(_message(a, a.rank, t, k), meant)


def _add_sums(a: Agent, t: int) -> None:
    m, generation = a.next("combine_received")
    n = a.launch.answers[m]
    owners = a.world.owners(n, a.rank, t)
    if a.world.experts_of(a.rank):
        a.load(("received_rows", a.rank, a.rank, t), ("row", n, a.rank, t))
    for owner in a.world.ranks:
        flag = ("partial", a.rank, owner, t, "info")
        if owner == a.rank or owner not in owners:
            a.load_of_another_generation(flag, generation)
        else:
            meant = ("partial", m, owner, a.rank, t)
            a.load_of(flag, generation, meant)
            a.load(_partial(a, a.rank, owner, t), meant)


def combine_wait(launch: Launch) -> None:
    world, rank = launch.world, launch.rank
    m, generation = launch.next("combine_received")
    n = launch.answers[m]
    a = launch.agent("caller")
    if world.has_sums:
        parity = launch.parity(launch.before["combine_of"], n)
        a.load(("n_tokens", rank, parity), ("n_tokens", n))
    _await_rows(a)
    tokens = [(t,) for t in range(len(world.tokens(n, rank)))]
    a = for_each_chunk(launch, tokens, _add_sums if world.has_sums else _reduce_token)
    a.store(("combine_received", rank), generation)
    publish_done(a, "combine")
