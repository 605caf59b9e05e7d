# SPDX-License-Identifier: Apache-2.0
"""What launches on GPUs share."""

from collections.abc import Callable

from .launches import Agent, Launch

CODE = "steps: "


def header_word(a: Agent, *words: str) -> None:
    """Reads those words of the header that the launch goes by."""
    for word in words:
        a.load((word, a.rank), is_=a.before[word])


def move(a: Agent, **words: int) -> None:
    """Moves words of the header."""
    for word, value in words.items():
        a.store((word, a.rank), value)


def elect_last_to_start(a: Agent, then: Callable[[Agent], None]) -> None:
    a.arrive(then)


def elect_last_block(a: Agent, then: Callable[[Agent], None]) -> None:
    a.arrive(then)


def await_message(a: Agent, flag: tuple, generation: int, meant: tuple) -> None:
    a.load_acquire(flag, ("equals", generation), meant)


def returns_early(launch: Launch) -> bool:
    """The mutation: a rank without tokens leaves at once."""
    n, _ = launch.next("dispatch_sent")
    is_on = launch.world.has("early return of a rank with zero tokens")
    return is_on and not launch.world.tokens(n, launch.rank)


def publish_reads(a: Agent, word: tuple[int, int], truth: tuple[int, int]) -> None:
    for rank in a.world.ranks:
        a.publish(("dispatch_done", rank, a.rank), word, truth)


def publish_earlier_reads(launch: Launch) -> None:
    """One warp of the first block publishes what earlier launches have read."""
    received = "dispatch_received", "combine_received"
    word, truth = (
        tuple(of[word] for word in received) for of in (launch.before, launch.rounds)
    )
    publish_reads(launch.agent("publishing warp"), word, truth)


def await_readers(a: Agent, direction: str) -> None:
    generation, n = a.before[f"{direction}_sent"], a.launch.rounds[f"{direction}_sent"]
    if a.before[f"{direction}_drained"] == generation:
        return
    half = int(direction == "combine")
    for rank in a.world.ranks:
        reached, truth = ("reached", half, generation), ("at least", half, n)
        a.load_acquire(("dispatch_done", a.rank, rank), reached, truth)


def record_readers(a: Agent, direction: str) -> None:
    generation, n = a.before[f"{direction}_sent"], a.launch.rounds[f"{direction}_sent"]
    half = int(direction == "combine")
    places = tuple(("dispatch_done", a.rank, rank) for rank in a.world.ranks)
    then = ((f"{direction}_drained", a.rank), generation)
    a.poll(places, ("reached", half, generation), ("at least", half, n), then)


def publish_kept_counts(a: Agent) -> None:
    """An owner says how many rows of each source its experts have kept."""
    m, generation = a.next("combine_sent")
    for expert in a.world.experts_of(a.rank):
        for src in a.world.ranks:
            place, truth = ("combine_count", src, expert), ("kept", m, src, expert)
            a.store_relaxed(place, (generation, 0), truth)


def await_kept_count(a: Agent, expert: int) -> None:
    m, generation = a.next("combine_received")
    place, truth = ("combine_count", a.rank, expert), ("kept", m, a.rank, expert)
    a.load_acquire(place, ("equals", generation), truth)


def publish_at_end(launch: Launch, block: int, first: int) -> None:
    """The last block that ends moves the generation, and publishes it."""
    mine = f"{launch.direction}_received"

    def publish(last: Agent) -> None:
        n, generation = launch.next(mine)
        move(last, **{mine: generation})
        word, truth = (
            tuple(
                (of | {mine: now})[x] for x in ("dispatch_received", "combine_received")
            )
            for of, now in ((launch.before, generation), (launch.rounds, n))
        )
        publish_reads(last, word, truth)

    elect_last_block(
        launch.agent("end", block, range(first, len(launch.agents))), publish
    )
