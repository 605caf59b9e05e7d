# SPDX-License-Identifier: Apache-2.0
"""What dispatch and combine of `rank_slots` on GPU ranks share.

Functions have the names of those in `mojo/max_ep/rank_slots/device_steps.mojo`.
"""

from __future__ import annotations

from collections.abc import Callable

from .launches import Agent, Launch

_STEPS = "rank_slots/device_steps.mojo: "
_DISPATCH = "rank_slots/dispatch.mojo: "
_COMBINE = "rank_slots/combine.mojo: "


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
    file = _DISPATCH if "dispatch" in launch.op else _COMBINE

    def move(last: Agent) -> None:
        for word, value in words.items():
            last.store(f"{file}{launch.op}_kernel", (word, launch.rank), value)

    return move


def publish_reads(
    launch: Launch, a: Agent, word: tuple[int, int], truth: tuple[int, int]
) -> None:
    for rank in launch.world.ranks:
        a.publish(
            _STEPS + "publish_reads",
            ("dispatch_done", rank, launch.rank),
            word,
            truth,
        )


def publish_earlier_reads(launch: Launch) -> None:
    """One warp of the first block tells what the launches before have read."""
    a = launch.agent("telling warp")
    publish_reads(
        launch,
        a,
        (launch.before["dispatch_received"], launch.before["combine_received"]),
        (launch.dispatch_read, launch.combine_read),
    )


def await_readers(launch: Launch, a: Agent, is_combine: bool) -> None:
    direction = "combine" if is_combine else "dispatch"
    generation = launch.before[f"{direction}_sent"]
    if launch.before[f"{direction}_clear"] == generation:
        return
    n_sent = launch.combined if is_combine else launch.dispatched
    for rank in launch.world.ranks:
        a.peek(
            _STEPS + "await_readers",
            ("dispatch_done", launch.rank, rank),
            ("reached", int(is_combine), generation),
            ("at least", int(is_combine), n_sent),
        )


def note_readers(launch: Launch, a: Agent, is_combine: bool) -> None:
    direction = "combine" if is_combine else "dispatch"
    generation = launch.before[f"{direction}_sent"]
    n_sent = launch.combined if is_combine else launch.dispatched
    a.look(
        _STEPS + "note_readers",
        tuple(("dispatch_done", launch.rank, r) for r in launch.world.ranks),
        ("reached", int(is_combine), generation),
        ("at least", int(is_combine), n_sent),
        [((f"{direction}_clear", launch.rank), generation)],
    )


def tell_at_end(
    launch: Launch, block: int, first: int, word: str, generation: int
) -> None:
    """The last block that ends moves the generation, and tells."""

    def tell(last: Agent) -> None:
        is_combine = word == "combine_received"
        where = f"{_COMBINE if is_combine else _DISPATCH}{launch.op}_kernel"
        last.store(where, (word, launch.rank), generation)
        if is_combine:
            told = (launch.before["dispatch_received"], generation)
            truth = (launch.dispatch_read, launch.combine_read + 1)
        else:
            told = (generation, launch.before["combine_received"])
            truth = (launch.dispatch_read + 1, launch.combine_read)
        publish_reads(launch, last, told, truth)

    a = launch.agent(f"block {block}, end", range(first, len(launch.agents)))
    where = "expert_slots/device_steps.mojo: is_last_block"
    a.arrive(where, launch.world.n_blocks, tell)
