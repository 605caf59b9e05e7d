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


def header_word_beside(launch: Launch, a: Agent, *words: str) -> None:
    """Reads them while the sending half runs: it may move none of them.

    From here on the agent, and who comes behind it, knows what the launches before
    the sending half have done: nothing else tells it (`Launch.behind`).
    """
    for word in words:
        kind, _, parity = word.rstrip("]").partition("[")
        place = (kind, launch.rank, *map(int, parity))
        a.look_once(_STEPS + "header_word_beside", place, launch.before[word])


def begin_block(launch: Launch, block: int, *words: str) -> Agent:
    """Begins the counting warp of a block, which has read the header.

    Beside a sending half all agents of the block come behind that, which the barrier
    in `start_launch` sees to.
    """
    if launch.sending is None:
        a = launch.agent(f"block {block}, counting warp")
        header_word(launch, a, *words)
        return a
    launch.behind = launch.begins_behind
    a = launch.agent(f"block {block}, begin")
    header_word_beside(launch, a, *words)
    launch.behind = (a.index,)
    return launch.agent(f"block {block}, counting warp")


def is_last_to_start(launch: Launch, a: Agent, then: Callable[[Agent], None]) -> None:
    """Counts the block; the last one does `then`."""
    where, n_blocks = _STEPS + "is_last_to_start", launch.world.n_blocks
    if launch.halves_overlap:
        a.arrive_in_half(where, n_blocks, launch.sending is not None, then)
    else:
        a.arrive(where, n_blocks, then)


def await_sending_half(launch: Launch, a: Agent, word: str, generation: int) -> None:
    a.look_until(_STEPS + "await_sending_half", (word, launch.rank), generation)


def moving(launch: Launch, words: dict[str, int]) -> Callable[[Agent], None]:
    """Writes the moves of words of the header."""
    file = _DISPATCH if "dispatch" in launch.op else _COMBINE
    launch.moved.update(words)

    def move(last: Agent) -> None:
        for word, value in words.items():
            where, place = f"{file}{launch.op}_kernel", (word, launch.rank)
            if launch.halves_overlap and word.endswith("_sent"):
                last.leave_word(where, place, value, None)
            else:
                last.store(where, place, value)

    return move


def moving_received(
    launch: Launch, word: str, generation: int
) -> Callable[[Agent], None]:
    """The same in a waiting half that tells nobody at its end."""
    move = moving(launch, {word: generation})

    def move_when_read(last: Agent) -> None:
        if launch.sending is not None:
            sent = word.replace("received", "sent")
            await_sending_half(launch, last, sent, generation)
        move(last)

    return move_when_read


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

    launch.moved[word] = generation
    behind = list(range(first, len(launch.agents)))
    if not launch.world.has("the waiting half does not await the sending half's end"):
        behind += launch.sending or ()
    a = launch.agent(f"block {block}, end", behind)
    where = "expert_slots/device_steps.mojo: is_last_block"
    a.arrive(where, launch.world.n_blocks, tell)
