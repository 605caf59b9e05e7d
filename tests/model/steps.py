# SPDX-License-Identifier: Apache-2.0
"""What dispatch and combine by rank on GPUs share."""

from __future__ import annotations

from collections.abc import Callable

from .launches import Agent, Launch

_STEPS = "steps: "


def header_word(launch: Launch, a: Agent, *words: str) -> None:
    """Reads those words of the header that the launch goes by."""
    for word in words:
        at = _STEPS + "header_word"
        a.load(at, (word, launch.rank), is_=launch.before[word])


def is_last_to_start(launch: Launch, a: Agent, then: Callable[[Agent], None]) -> None:
    """Counts the block; the last one does `then`."""
    a.arrive(_STEPS + "is_last_to_start", launch.world.n_blocks, then)


def moving(launch: Launch, words: dict[str, int]) -> Callable[[Agent], None]:
    """Writes the moves of words of the header."""

    def move(last: Agent) -> None:
        for word, value in words.items():
            where = f"{_STEPS}{launch.op}_kernel"
            last.store(where, (word, launch.rank), value)

    return move


def publish_reads(
    launch: Launch, a: Agent, word: tuple[int, int], truth: tuple[int, int]
) -> None:
    for rank in launch.world.ranks:
        a.publish(
            _STEPS + "publish_reads", ("dispatch_done", rank, launch.rank), word, truth
        )


def publish_earlier_reads(launch: Launch) -> None:
    """One warp of the first block publishes what earlier launches have read."""
    a = launch.agent("publishing warp")
    publish_reads(
        launch,
        a,
        (launch.before["dispatch_received"], launch.before["combine_received"]),
        (launch.dispatch_read, launch.combine_read),
    )


def await_readers(launch: Launch, a: Agent, is_combine: bool) -> None:
    direction = "combine" if is_combine else "dispatch"
    generation = launch.before[f"{direction}_sent"]
    if launch.before[f"{direction}_drained"] == generation:
        return
    n_sent = launch.combined if is_combine else launch.dispatched
    for rank in launch.world.ranks:
        a.load_acquire(
            _STEPS + "await_readers",
            ("dispatch_done", launch.rank, rank),
            ("reached", int(is_combine), generation),
            ("at least", int(is_combine), n_sent),
        )


def record_readers(launch: Launch, a: Agent, is_combine: bool) -> None:
    direction = "combine" if is_combine else "dispatch"
    generation = launch.before[f"{direction}_sent"]
    n_sent = launch.combined if is_combine else launch.dispatched
    a.poll(
        _STEPS + "record_readers",
        tuple(("dispatch_done", launch.rank, r) for r in launch.world.ranks),
        ("reached", int(is_combine), generation),
        ("at least", int(is_combine), n_sent),
        [((f"{direction}_drained", launch.rank), generation)],
    )


def publish_at_end(
    launch: Launch, block: int, first: int, word: str, generation: int
) -> None:
    """The last block that ends moves the generation, and publishes it."""

    def publish(last: Agent) -> None:
        is_combine = word == "combine_received"
        where = f"{_STEPS}{launch.op}_kernel"
        last.store(where, (word, launch.rank), generation)
        if is_combine:
            published = (launch.before["dispatch_received"], generation)
            truth = (launch.dispatch_read, launch.combine_read + 1)
        else:
            published = (generation, launch.before["combine_received"])
            truth = (launch.dispatch_read + 1, launch.combine_read)
        publish_reads(launch, last, published, truth)

    behind = range(first, len(launch.agents))
    a = launch.agent(f"block {block}, end", behind)
    where = _STEPS + "is_last_block"
    a.arrive(where, launch.world.n_blocks, publish)
