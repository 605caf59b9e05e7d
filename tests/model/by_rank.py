# SPDX-License-Identifier: Apache-2.0
"""Dispatch by rank on GPUs. Combine by rank is in `sums.py` and `by_expert.py`."""

from __future__ import annotations

from .by_expert import record_own_row
from .launches import Agent, Launch
from .memory import SENTINEL
from .steps import (
    await_readers,
    header_word,
    is_last_to_start,
    moving,
    publish_at_end,
    publish_earlier_reads,
    record_readers,
)
from .sums import combine, combine_async, combine_wait

_DISPATCH = "dispatch by rank: "


# ------------------------------------------------------------------- the send phase


def publish_n_tokens(launch: Launch, a: Agent) -> None:
    n = launch.dispatched + 1
    await_readers(launch, a, False)
    for rank in launch.world.ranks:
        a.store_relaxed(
            _DISPATCH + "publish_n_tokens",
            ("dispatch_n_tokens", rank, launch.rank),
            (launch.next("dispatch_sent"), len(launch.world.tokens(n, launch.rank))),
            ("number", n, launch.rank),
        )


def index_choices(launch: Launch, a: Agent, block: int, indexer: int) -> None:
    await_readers(launch, a, False)
    if launch.world.indexes_by_blocks:
        _index_by_blocks(launch, a, block, indexer)
    elif launch.world.indexes_in_lanes:
        _index_lanes(launch, a, block, indexer)
    else:
        _index_one_by_one(launch, a, block, indexer)


def _index_by_blocks(launch: Launch, a: Agent, block: int, indexer: int) -> None:
    """Writes entries of the block's choices; all counts, if it is the last.

    What it counts in shared memory is left out: its index warps meet at barriers.
    """
    world = launch.world
    tokens = world.tokens(launch.dispatched + 1, launch.rank)
    choices = [(t, k) for t, experts in enumerate(tokens) for k in range(len(experts))]
    length = -(-len(choices) // max(world.n_blocks - 1, 1))
    run = choices[block * length : (block + 1) * length]
    for t, k in run[indexer :: world.n_index_warps]:
        _enter_choice(launch, a, t, k)
    if block == world.n_blocks - 1:
        for expert in world.experts[indexer :: world.n_index_warps]:
            _publish_count(launch, a, expert)


def _index_lanes(launch: Launch, a: Agent, block: int, indexer: int) -> None:
    for item in _items(launch, block, indexer):
        _publish_item(launch, a, item)


def _index_one_by_one(launch: Launch, a: Agent, block: int, indexer: int) -> None:
    """Publishes what the block has counted, of one expert; then what is left."""
    world = launch.world
    n_counted = min(world.n_blocks, len(world.experts))
    if indexer == world.n_index_warps - 1 and block < n_counted:
        _publish_count(launch, a, world.experts[block])
    for item in _items(launch, n_counted + block, indexer):
        _publish_item(launch, a, item)


def _items(launch: Launch, first: int, indexer: int) -> range:
    world = launch.world
    tokens = world.tokens(launch.dispatched + 1, launch.rank)
    n_items = len(world.experts) + sum(map(len, tokens))
    return range(first + indexer * world.n_blocks, n_items, _stride(launch))


def _publish_item(launch: Launch, a: Agent, item: int) -> None:
    world = launch.world
    tokens = world.tokens(launch.dispatched + 1, launch.rank)
    choices = [(t, k) for t, experts in enumerate(tokens) for k in range(len(experts))]
    n_experts = len(world.experts)
    if item < n_experts:
        _publish_count(launch, a, world.experts[item])
    else:
        _enter_choice(launch, a, *choices[item - n_experts])


def _publish_count(launch: Launch, a: Agent, expert: int) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatched + 1
    a.store_relaxed(
        _DISPATCH + "_publish_count",
        ("dispatch_count", world.rank_of(expert), expert, rank),
        (launch.next("dispatch_sent"), world.count(n, rank, expert)),
        ("count", n, rank, expert),
    )


def _enter_choice(launch: Launch, a: Agent, t: int, k: int) -> None:
    n = launch.dispatched + 1
    generation = launch.next("dispatch_sent")
    expert = launch.world.tokens(n, launch.rank)[t][k]
    if launch.world.has_sums or not _has_own_row(launch, expert):
        a.store(
            _DISPATCH + "_enter_choice",
            ("choices", launch.rank, launch.parity(generation, n), t, k),
            expert,
            ("choice", n, t, k),
        )
    _write_entry(launch, a, n, generation, t, k, expert)


def _has_own_row(launch: Launch, expert: int) -> bool:
    """Whether a choice's row is made on the choice's own rank."""
    return expert >= 0 and launch.world.rank_of(expert) == launch.rank


def _stride(launch: Launch) -> int:
    return launch.world.n_index_warps * launch.world.n_blocks


def send_metadata(launch: Launch, a: Agent, block: int, indexer: int) -> None:
    """Sends what was chosen for some tokens; one choice stands for all of a token."""
    world, rank = launch.world, launch.rank
    n = launch.dispatched + 1
    await_readers(launch, a, False)
    n_tokens = len(world.tokens(n, rank))
    for t in range(block + indexer * world.n_blocks, n_tokens, _stride(launch)):
        for i in range(world.n_ranks):
            to = (rank + 1 + i) % world.n_ranks
            a.store_relaxed(
                _DISPATCH + "send_metadata",
                ("metadata", to, rank, t),
                (launch.next("dispatch_sent"), 0),
                ("metadata", n, rank, t),
            )


def _write_entry(
    launch: Launch, a: Agent, n: int, generation: int, t: int, k: int, expert: int
) -> None:
    for i in range(launch.world.n_ranks):
        to = (launch.rank + 1 + i) % launch.world.n_ranks
        a.store_relaxed(
            _DISPATCH + "_write_entry",
            ("entry", to, launch.rank, t, k),
            (generation, expert),
            ("entry", n, launch.rank, t, k),
        )


def send_by_number(launch: Launch, a: Agent, block: int, has_input: bool) -> None:
    world = launch.world
    tokens = world.tokens(launch.dispatched + 1, launch.rank)
    mine = [t for t in range(len(tokens)) if t % world.n_blocks == block]
    if not mine:
        return
    if len(tokens) <= world.n_inline_tokens:
        _send_inline_flag_tokens(launch, a, block, mine, has_input)
    else:
        _send_chunks(launch, a, mine, has_input)


def _send_inline_flag_tokens(
    launch: Launch, a: Agent, block: int, mine: list[int], has_input: bool
) -> None:
    world, rank = launch.world, launch.rank
    await_readers(launch, a, False)
    if not world.indexes_in_lanes:
        a.block_load_acquire(
            _DISPATCH + "_send_inline_flag_tokens",
            ("INDEXED", rank, block),
            world.n_index_warps,
        )
    for t in mine:
        for chunk in range(world.n_chunks):
            for to in _receivers(launch, t, has_input):
                truth = ("token", launch.dispatched + 1, rank, t, chunk)
                place = ("inline_token", to, rank, t, chunk)
                a.store_relaxed(_DISPATCH + "_store_steps", place, truth, truth)


def _send_chunks(launch: Launch, a: Agent, mine: list[int], has_input: bool) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatched + 1
    generation = launch.next("dispatch_sent")
    await_readers(launch, a, False)
    for t in mine:
        receivers = _receivers(launch, t, has_input)
        for first in range(0, world.n_chunks, world.n_chunks_at_once):
            chunks = range(first, min(first + world.n_chunks_at_once, world.n_chunks))
            for chunk in chunks:
                for to in receivers:
                    truth = ("token", n, rank, t, chunk)
                    place = ("token", to, rank, t, chunk)
                    a.store(_DISPATCH + "_store_steps", place, truth, truth)
            for chunk in chunks:
                for to in receivers:
                    a.publish(
                        _DISPATCH + "_send_chunks",
                        ("chunk_flag", to, rank, t, chunk),
                        (generation, 0),
                        ("token", n, rank, t, chunk),
                    )


def _receivers(launch: Launch, t: int, has_input: bool) -> list[int]:
    world, rank = launch.world, launch.rank
    if world.protocol == "all_gather":
        targets = [r for r in world.ranks if world.experts_of(r)]
    else:
        targets = world.owners(launch.dispatched + 1, rank, t)
    peers = [r for r in targets if r != rank]
    is_own = world.has_shared_expert or rank in targets
    return [*peers, rank] if is_own and not has_input else peers


def _send(launch: Launch, block: int, has_input: bool) -> tuple[Agent, list[Agent]]:
    """Writes the send phase: numbers, index warps, senders."""
    world, rank = launch.world, launch.rank
    numbers = launch.agent(f"block {block}, numbers warp")
    if block == 0:
        publish_n_tokens(launch, numbers)
    indexers = []
    for indexer in range(world.n_index_warps):
        a = launch.agent(f"block {block}, index warp {indexer}")
        index_choices(launch, a, block, indexer)
        a.block_add(_DISPATCH + "_send", ("INDEXED", rank, block))
        if world.has_metadata:
            send_metadata(launch, a, block, indexer)
        indexers.append(a)
    send_by_number(launch, launch.agent(f"block {block}, sender"), block, has_input)
    return numbers, indexers


# ----------------------------------------------------------------- the receive phase


def read_numbers(launch: Launch, a: Agent, block: int) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatch_read + 1
    generation = launch.next("dispatch_received")
    for src in world.ranks:
        a.load_relaxed(
            _DISPATCH + "read_numbers",
            ("dispatch_n_tokens", rank, src),
            ("equals", generation),
            ("number", n, src),
        )
        n_tokens = len(world.tokens(n, src))
        place = ("n_tokens_of", rank, block, src)
        a.store(_DISPATCH + "read_numbers", place, n_tokens)
        if world.has_sums and block == 0:
            place = ("received_tokens", rank, src)
            truth = ("received", n, src)
            a.store(_DISPATCH + "read_numbers", place, n_tokens, truth)
    if block == 0:
        place = ("most_received", rank)
        a.store(_DISPATCH + "read_numbers", place, 0, ("most", n))
    a.block_publish(_DISPATCH + "_receive", ("TOKENS_READY", rank, block), 1)


def lay_out_rows(launch: Launch, a: Agent, block: int, indexer: int) -> None:
    world, rank = launch.world, launch.rank
    n_counting = world.n_counting_warps
    counter = indexer - (world.n_index_warps - n_counting)
    if counter >= 0:
        _count_rows(launch, a, block, counter)
    if block == 0:
        where = _DISPATCH + "lay_out_rows"
        a.block_load_acquire(where, ("COUNTED", rank, block), n_counting)
        for other in range(n_counting):
            a.load(where, ("block_pair_rows", rank, block, other), is_=1)
        truth = ("pair rows", launch.dispatch_read + 1)
        a.store(where, ("pair_rows", rank, indexer), 1, truth)


def _count_rows(launch: Launch, a: Agent, block: int, counter: int) -> None:
    """One word stands for the rows before all pairs of a warp."""
    world, rank = launch.world, launch.rank
    where = _DISPATCH + "_count_rows"
    _read_counts(launch, a, block, counter)
    if world.n_counting_warps > 1:
        a.block_arrive(where, ("SUMMED", rank, block))
        a.block_load_acquire(where, ("SUMMED", rank, block), world.n_counting_warps)
        for other in range(world.n_counting_warps):
            a.load(where, ("sums", rank, block, other), is_=1)
    a.store(where, ("block_pair_rows", rank, block, counter), 1)
    a.block_arrive(where, ("COUNTED", rank, block))


def _read_counts(launch: Launch, a: Agent, block: int, counter: int) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatch_read + 1
    generation = launch.next("dispatch_received")
    pairs = [(e, src) for e in world.experts_of(rank) for src in world.ranks]
    for expert, src in pairs[counter :: world.n_counting_warps]:
        a.load_relaxed(
            _DISPATCH + "_read_counts",
            ("dispatch_count", rank, expert, src),
            ("equals", generation),
            ("count", n, src, expert),
        )
    a.store(_DISPATCH + "_read_counts", ("sums", rank, block, counter), 1)


def receive_tokens(launch: Launch, a: Agent, block: int, has_input: bool) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatch_read + 1
    generation = launch.next("dispatch_received")
    where = _DISPATCH + "receive_tokens"
    most = max(len(world.tokens(n, src)) for src in world.ranks)
    items = [(t, src) for t in range(most) for src in world.ranks]
    mine = items[block :: world.n_blocks]
    a.block_load_acquire(_DISPATCH + "_receive", ("TOKENS_READY", rank, block), 1)
    for src in world.ranks:
        a.load(where, ("n_tokens_of", rank, block, src))
    is_waiting = True
    for t, src in mine:
        tokens = world.tokens(n, src)
        if t >= len(tokens):
            continue
        is_inline = len(tokens) <= world.n_inline_tokens
        _await_entries(launch, a, generation, t, src)
        is_input = has_input and src == rank
        saved = ("received_rows", rank, src, t)
        truth = ("row", n, src, t)
        if not _is_here(launch, t, src, is_input):
            if world.has_sums:
                a.store(where, saved, None, truth)
            continue
        for chunk in range(0 if is_input else world.n_chunks):
            meant = ("token", n, src, t, chunk)
            if is_inline:
                place = ("inline_token", rank, src, t, chunk)
                a.load_relaxed(_DISPATCH + "_await_steps", place, ("filled",), meant)
                a.store(_DISPATCH + "_await_steps", place, SENTINEL)
            else:
                a.load_acquire(
                    "steps: await_message",
                    ("chunk_flag", rank, src, t, chunk),
                    ("equals", generation),
                    meant,
                )
                place = ("token", rank, src, t, chunk)
                a.load(_DISPATCH + "_load_steps", place, meant)
        if is_waiting:
            _are_counted(launch, a, block)
            is_waiting = False
        if world.has_metadata and rank in world.owners(n, src, t):
            _place_metadata(launch, a, n, generation, src, t)
        if not world.has_sums and src == rank:
            for k, expert in enumerate(tokens[t]):
                if _has_own_row(launch, expert):
                    record_own_row(launch, a, where, n, generation, t, k)
        if world.has_sums:
            a.store(where, saved, True, truth)
            a.store(where, ("received_weights", rank, src, t), True, truth)


def _is_here(launch: Launch, t: int, src: int, is_input: bool) -> bool:
    world, rank = launch.world, launch.rank
    n = launch.dispatch_read + 1
    is_here = rank in world.owners(n, src, t)
    is_here = is_here or (world.has_shared_expert and src == rank)
    is_inline = len(world.tokens(n, src)) <= world.n_inline_tokens
    if world.protocol == "all_gather" and is_inline and world.experts_of(rank):
        # It came, even if no row is made of it.
        is_here = is_here or not is_input
    return is_here


def _await_entries(launch: Launch, a: Agent, generation: int, t: int, src: int) -> None:
    n = launch.dispatch_read + 1
    for k in range(len(launch.world.tokens(n, src)[t])):
        place = ("entry", launch.rank, src, t, k)
        _await_words(launch, a, generation, place, ("entry", n, src, t, k))


def _await_words(
    launch: Launch, a: Agent, generation: int, place: tuple, meant: tuple
) -> None:
    a.load_relaxed(_DISPATCH + "_await_words", place, ("equals", generation), meant)


def _place_metadata(
    launch: Launch, a: Agent, n: int, generation: int, src: int, t: int
) -> None:
    place = ("metadata", launch.rank, src, t)
    _await_words(launch, a, generation, place, ("metadata", n, src, t))


def _are_counted(launch: Launch, a: Agent, block: int) -> None:
    world, rank = launch.world, launch.rank
    n_counting = world.n_counting_warps
    a.block_load_acquire(
        _DISPATCH + "_are_counted", ("COUNTED", rank, block), n_counting
    )
    for counter in range(n_counting):
        where = _DISPATCH + "receive_tokens"
        a.load(where, ("block_pair_rows", rank, block, counter), is_=1)


# ------------------------------------------------------------- dispatch's kernels


def _has_nothing_and_returns(launch: Launch) -> bool:
    """The mutation: a rank without tokens leaves at once."""
    return launch.world.has("early return of a rank with zero tokens") and not (
        launch.world.tokens(launch.dispatched + 1, launch.rank)
    )


def _count_in_dispatch(launch: Launch, block: int, is_fused: bool) -> None:
    a = launch.agent(f"block {block}, counting warp")
    header_word(
        launch,
        a,
        "dispatch_sent",
        "dispatch_received",
        "combine_received",
        "dispatch_drained",
    )
    n = launch.dispatched + 1
    n_tokens = len(launch.world.tokens(n, launch.rank))
    words = {"dispatch_sent": launch.next("dispatch_sent")}
    if is_fused:
        words["dispatch_received"] = launch.next("dispatch_received")

    def go_on(last: Agent) -> None:
        where = f"{_DISPATCH}{launch.op}_kernel"
        parity = launch.parity(words["dispatch_sent"], n)
        last.store(where, ("n_tokens", launch.rank, parity), n_tokens, ("n_tokens", n))
        moving(launch, words)(last)

    is_last_to_start(launch, a, go_on)


def dispatch_async(launch: Launch) -> None:
    if _has_nothing_and_returns(launch):
        return
    for block in range(launch.world.n_blocks):
        _count_in_dispatch(launch, block, False)
    publish_earlier_reads(launch)
    for block in range(launch.world.n_blocks):
        _send(launch, block, False)


def dispatch_wait(launch: Launch) -> None:
    world = launch.world
    publishes_at_end = world.publishes_at_dispatch_end
    generation = launch.next("dispatch_received")
    # Where it polls readers, it goes by `combine_sent`, too.
    sent = () if publishes_at_end else ("combine_sent",)
    for block in range(world.n_blocks):
        first = len(launch.agents)
        a = launch.agent(f"block {block}, counting warp")
        header_word(launch, a, "dispatch_received", "combine_received", *sent)
        if not publishes_at_end:
            is_last_to_start(
                launch, a, moving(launch, {"dispatch_received": generation})
            )
            if world.has_sums and block == 0:
                record_readers(launch, launch.agent("publishing warp"), True)
        a = launch.agent(f"block {block}, numbers warp")
        read_numbers(launch, a, block)
        for indexer in range(world.n_index_warps):
            a = launch.agent(f"block {block}, index warp {indexer}")
            if world.has_shared_expert:
                n = launch.dispatch_read + 1
                parity = launch.parity(generation, n)
                number = launch.before[f"n_tokens[{parity}]"]
                place = ("n_tokens", launch.rank, parity)
                a.load("steps: header_word", place, ("n_tokens", n), number)
            lay_out_rows(launch, a, block, indexer)
        a = launch.agent(f"block {block}, receiver")
        receive_tokens(launch, a, block, False)
        if publishes_at_end:
            publish_at_end(launch, block, first, "dispatch_received", generation)


def dispatch(launch: Launch) -> None:
    world = launch.world
    if _has_nothing_and_returns(launch):
        return
    for block in range(world.n_blocks):
        _count_in_dispatch(launch, block, True)
    publish_earlier_reads(launch)
    for block in range(world.n_blocks):
        numbers, indexers = _send(launch, block, True)
        if world.has_sums and block == 0:
            record_readers(launch, numbers, True)
        read_numbers(launch, numbers, block)
        for indexer, a in enumerate(indexers):
            lay_out_rows(launch, a, block, indexer)
        receive_tokens(launch, launch.agent(f"block {block}, receiver"), block, True)


OPS = {
    "dispatch_async": dispatch_async,
    "dispatch_wait": dispatch_wait,
    "dispatch": dispatch,
    "combine_async": combine_async,
    "combine_wait": combine_wait,
    "combine": combine,
}
