# SPDX-License-Identifier: Apache-2.0
"""All protocols of CPU ranks: counts announce what was sent before them.

Functions have the names of those in `mojo/max_ep/cpu/`, where one there has the step. A
launch is its caller, workers (`for_each_chunk`), and the caller again.
"""

from collections.abc import Callable

from .launches import Agent, Launch

CODE = "CPU: "
_N_WORKERS = 2


def phase(launch: Launch) -> None:
    if not launch.returns_early():
        globals()[f"cpu_{launch.op}"](launch)


def publish_done(a: Agent, direction: str) -> None:
    n, generation = a.next(f"{direction}_received")
    for rank in a.world.ranks:
        a.publish((f"{direction}_done", rank, a.rank), (generation, 0), (n, 0))


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


def _near(a: Agent, to: int) -> int:
    """The rank in whose memory what is for a rank is written: its own, to stage it."""
    return a.rank if a.world.is_far(a.rank, to) else to


def send_some(a: Agent, t: int) -> None:
    world, rank, (n, generation) = a.world, a.rank, a.next("dispatch_sent")
    if not _is_by_expert(a):
        token = ("token", n, rank, t)
        a.store(("token", rank, rank, t), token, token)
        for k, expert in enumerate(world.tokens(n, rank)[t]):
            if expert >= 0:
                _write_entry(a, (t, k), expert)
        for to in world.owners(n, rank, t):
            if _near(a, to) != rank:
                a.stream(("token", to, rank, t), token)
        return
    staged = ("staged", n, rank, t)
    a.store(("staged_token", rank, t), staged, staged)
    for token_idx, k, expert, slot in world.messages(n, rank):
        if token_idx == t:
            truth, to = ("message", n, rank, t, k), world.rank_of(expert)
            place, flag = _message_places(to, expert, rank, slot)
            if world.is_far(rank, to):
                place, flag = _staged_message(rank, t, k)
            a.stream(place, truth)
            a.store(flag, (generation, (t, k)), truth)


def _message_places(to: int, *slot: int) -> tuple:
    return ("dispatch_message", to, *slot), ("message_flag", to, "dispatch", *slot)


def _staged_message(rank: int, *choice: int) -> tuple:
    return ("dispatch_put", rank, *choice), ("message_flag", rank, "put", *choice)


def _put_messages(a: Agent) -> None:
    n, _ = a.next("dispatch_sent")
    for t, k, expert, slot in a.world.messages(n, a.rank):
        to = a.world.rank_of(expert)
        if a.world.is_far(a.rank, to):
            places = _message_places(to, expert, a.rank, slot)
            for place, staged in zip(places, _staged_message(a.rank, t, k)):
                a.put(place, staged)


def _put_tokens(a: Agent) -> None:
    n, _ = a.next("dispatch_sent")
    for to in a.world.ranks:
        if not a.world.is_far(a.rank, to) or not a.world.experts_of(to):
            continue  # Nobody there says that it has read what is staged.
        for t, experts in enumerate(a.world.tokens(n, a.rank)):
            for k in range(len(experts)):
                a.put(("entry", to, a.rank, t, k), ("entry", a.rank, a.rank, t, k))
            if to in a.world.owners(n, a.rank, t):
                a.put(("token", to, a.rank, t), ("token", a.rank, a.rank, t))


def _write_entry(a: Agent, choice: tuple[int, int], expert: int) -> None:
    n, generation = a.next("dispatch_sent")
    to = _near(a, a.world.rank_of(expert))
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
    a.fence()
    staged = []
    for expert in a.world.experts:
        to = a.world.rank_of(expert)
        place = ("dispatch_count", to, expert, a.rank)
        word = (generation, a.world.count(n, a.rank, expert))
        truth = ("count", n, a.rank, expert)
        if a.world.is_far(a.rank, to) and not _is_by_expert(a):
            staged.append((place, ("staged_count", a.rank, expert)))
            a.store(staged[-1][1], word, truth)
            continue
        a.publish(place, word, truth)
    for place, at in staged:
        a.put(place, at)
    a.store(("dispatch_sent", a.rank), generation)


def cpu_dispatch_async(launch: Launch) -> None:
    world, rank = launch.world, launch.rank
    n, generation = launch.next("dispatch_sent")
    n_tokens = len(world.tokens(n, rank))
    a = launch.agent("caller")
    await_readers(a, "dispatch", True)
    place = ("n_tokens", rank, launch.parity(generation, n))
    a.store(place, n_tokens, ("n_tokens", n))
    items = [(t,) for t in range(n_tokens)]
    a = for_each_chunk(launch, items, send_some)
    (_put_messages if _is_by_expert(a) else _put_tokens)(a)
    _publish_counts(a)


def lay_out_rows(a: Agent) -> None:
    n, generation = a.next("dispatch_received")
    for expert in a.world.experts_of(a.rank):
        for src in a.world.ranks:
            place, truth = ("dispatch_count", a.rank, expert, src), ("count", n, src)
            a.load_acquire(place, ("equals", generation), (*truth, expert))
    a.store(("pair_row", a.rank, 0), 1, ("pair rows", n))


def _place_tokens(a: Agent) -> None:
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
    for source, token, k, expert, slot in a.world.received_messages(n, a.rank):
        if (source, token) == (src, t):
            place, meant = (a.rank, expert, src, slot), ("message", n, src, t, k)
            a.load(("dispatch_message", *place), meant)
            a.load(("message_flag", place[0], "dispatch", *place[1:]), meant)
    if a.world.has_shared_expert and src == a.rank:
        a.load(("staged_token", a.rank, t), ("staged", n, a.rank, t))


def _place_choice(a: Agent, src: int, t: int) -> None:
    n, generation = a.next("dispatch_received")
    for k, expert in enumerate(a.world.tokens(n, src)[t]):
        place = ("entry", a.rank, src, t, k)
        if expert < 0 or a.world.rank_of(expert) != a.rank:
            if a.world.ranks_per_host:  # its expert says that it is another rank's
                a.load(place)
            else:
                a.load_of_another_generation(place, generation)
            continue
        a.load_of(place, generation, ("entry", n, src, t, k))
        a.load(("token", a.rank, src, t), ("token", n, src, t))
        if a.world.has_metadata:
            a.load(("metadata", a.rank, src, t), ("metadata", n, src, t))
    if a.world.has_sums:
        a.store(("received_rows", a.rank, src, t), 1, ("row", n, src, t))


def cpu_dispatch_wait(launch: Launch) -> None:
    n, generation = launch.next("dispatch_received")
    a = launch.agent("caller")
    lay_out_rows(a)
    if not _is_by_expert(launch):
        _place_tokens(a)
    decode = _place_messages if _is_by_expert(launch) else _place_choice
    a = for_each_chunk(launch, _received_tokens(launch, n), decode)
    a.store(("dispatch_received", launch.rank), generation)
    publish_done(a, "dispatch")


def _send_rows(a: Agent, src: int, t: int) -> None:
    n, (m, generation) = a.launch.rounds["dispatch_received"], a.next("combine_sent")
    for source, token, k, _, _ in a.world.received_messages(n, a.rank):
        if (source, token) == (src, t):
            truth = ("row", m, src, t, k)
            place, flag = _message(a, src, t, k), ("message_flag", src, "combine", t, k)
            if a.world.is_far(a.rank, src):
                place, flag = _staged(a, src, t, k)
            a.stream(place, truth)
            a.store(flag, (generation, (t, k)), truth)


def _send_sums(a: Agent, src: int, t: int) -> None:
    n, (m, generation) = a.launch.rounds["dispatch_received"], a.next("combine_sent")
    a.load(("received_tokens", a.rank, src), ("received", n, src))
    a.load(("received_rows", a.rank, src, t), ("row", n, src, t))
    if src != a.rank and a.rank in a.world.owners(n, src, t):
        truth = ("partial", m, a.rank, src, t)
        place = _partial(a, src, a.rank, t)
        flag = ("message_flag", src, "partial", a.rank, t)
        if a.world.is_far(a.rank, src):
            place, flag = _staged(a, src, t)
        a.stream(place, truth)
        a.store(flag, (generation, 1), truth)


def _staged(a: Agent, *of: int) -> tuple:
    kind = "staged_partial" if a.world.has_sums else "staged_row"
    kind = "combine_put" if _is_by_expert(a) else kind
    return (kind, a.rank, *of), ("message_flag", a.rank, "staged", *of)


def _put_staged(a: Agent) -> None:
    n, rank, world = a.launch.rounds["dispatch_received"], a.rank, a.world
    places = []
    if world.has_sums:
        for src in world.ranks:
            for t in world.arriving(n, src, rank):
                flag = ("message_flag", src, "partial", rank, t)
                places.append((_partial(a, src, rank, t), flag, _staged(a, src, t)))
    else:
        for src, t, k, *_ in world.received_messages(n, rank):
            flag = ("message_flag", src, "combine", t, k)
            places.append((_message(a, src, t, k), flag, _staged(a, src, t, k)))
    for place, flag, staged in places:
        if world.is_far(rank, place[1]):
            a.put(place, staged[0])
            a.put(flag, staged[1])
    a.fence()


def cpu_combine_async(launch: Launch) -> None:
    world, rank = launch.world, launch.rank
    n, (m, generation) = launch.rounds["dispatch_received"], launch.next("combine_sent")
    a = launch.agent("caller")
    a.load(("pair_row", rank, 0), ("pair rows", n))
    if world.experts_of(rank):
        await_readers(a, "combine", False)
    if world.has_sums:
        a.store(("combine_of", rank), launch.before["dispatch_received"])
    send = _send_sums if world.has_sums else _send_rows
    a = for_each_chunk(launch, _received_tokens(launch, n), send)
    _put_staged(a)
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


def reduce_tokens(a: Agent, t: int) -> None:
    m, generation = a.next("combine_received")
    n = a.launch.answers[m]
    if a.world.has_sums:
        owners = a.world.owners(n, a.rank, t)
        if a.world.experts_of(a.rank):
            a.load(("received_rows", a.rank, a.rank, t), ("row", n, a.rank, t))
        places = [
            (
                ("partial", owner, t),
                _partial(a, a.rank, owner, t),
                ("partial", m, owner),
            )
            for owner in a.world.ranks
        ]
        are_there = [x in owners and x != a.rank for x in a.world.ranks]
    else:
        experts = a.world.tokens(n, a.rank)[t]
        places = [
            (("combine", t, k), _message(a, a.rank, t, k), ("row", m))
            for k in range(len(experts))
        ]
        are_there = [expert >= 0 for expert in experts]
    for k, ((of, message, what), is_there) in enumerate(zip(places, are_there)):
        flag = ("message_flag", a.rank, *of)
        if not is_there:
            a.load_of_another_generation(flag, generation)
            continue
        meant = (*what, a.rank, t) if a.world.has_sums else (*what, a.rank, t, k)
        a.load_of(flag, generation, meant)
        a.load(message, meant)


def cpu_combine_wait(launch: Launch) -> None:
    world, rank = launch.world, launch.rank
    m, generation = launch.next("combine_received")
    n = launch.answers[m]
    a = launch.agent("caller")
    if world.has_sums:
        parity = launch.parity(launch.before["combine_of"], n)
        a.load(("n_tokens", rank, parity), ("n_tokens", n))
    _await_rows(a)
    tokens = [(t,) for t in range(len(world.tokens(n, rank)))]
    a = for_each_chunk(launch, tokens, reduce_tokens)
    a.store(("combine_received", rank), generation)
    publish_done(a, "combine")
