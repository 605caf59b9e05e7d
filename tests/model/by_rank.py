# SPDX-License-Identifier: Apache-2.0
"""Dispatch by rank on GPUs, and the all-gather's. Combine: `sums.py`, `rows.py`."""

from .by_expert import record_own_row
from .launches import Agent, Launch
from .memory import SENTINEL
from .steps import (
    await_message,
    await_readers,
    elect_last_to_start,
    header_word,
    move,
    publish_at_end,
    publish_earlier_reads,
    record_readers,
    returns_early,
)

CODE = "dispatch by rank: "


def publish_n_tokens(a: Agent) -> None:
    n, generation = a.next("dispatch_sent")
    await_readers(a, "dispatch")
    for rank in a.world.ranks:
        word = (generation, len(a.world.tokens(n, a.rank)))
        a.store_relaxed(
            ("dispatch_n_tokens", rank, a.rank), word, ("number", n, a.rank)
        )


def index_choices(a: Agent, indexer: int) -> None:
    """Publishes the counts of experts, and the entries of choices."""
    world, n_warps = a.world, a.world.n_index_warps
    n, _ = a.next("dispatch_sent")
    await_readers(a, "dispatch")
    tokens = world.tokens(n, a.rank)
    choices = [(t, k) for t, experts in enumerate(tokens) for k in range(len(experts))]
    if world.indexes_by_blocks:
        # A run of choices each; the last block has all counts. What it counts in
        # shared memory is left out: its index warps meet at barriers.
        length = -(-len(choices) // max(world.n_blocks - 1, 1))
        for t, k in choices[a.block * length :][:length][indexer::n_warps]:
            _enter_choice(a, t, k)
        if a.block == world.n_blocks - 1:
            for expert in world.experts[indexer::n_warps]:
                _publish_count(a, expert)
        return
    n_counted = 0
    if not world.indexes_in_lanes:
        # First what the block has counted, of one expert; then what is left.
        n_counted = min(world.n_blocks, len(world.experts))
        if indexer == n_warps - 1 and a.block < n_counted:
            _publish_count(a, world.experts[a.block])
    items = [*world.experts, *choices][n_counted:]
    for item in items[a.block + indexer * world.n_blocks :: n_warps * world.n_blocks]:
        if isinstance(item, int):
            _publish_count(a, item)
        else:
            _enter_choice(a, *item)


def _publish_count(a: Agent, expert: int) -> None:
    n, generation = a.next("dispatch_sent")
    place = ("dispatch_count", a.world.rank_of(expert), expert, a.rank)
    word = (generation, a.world.count(n, a.rank, expert))
    a.store_relaxed(place, word, ("count", n, a.rank, expert))


def _enter_choice(a: Agent, t: int, k: int) -> None:
    n, generation = a.next("dispatch_sent")
    expert = a.world.tokens(n, a.rank)[t][k]
    if a.world.has_sums or not _has_own_row(a, expert):
        place = ("choices", a.rank, a.launch.parity(generation, n), t, k)
        a.store(place, expert, ("choice", n, t, k))
    _write_entry(a, t, k, expert)


def _has_own_row(a: Agent, expert: int) -> bool:
    """Whether a choice's row is made on the choice's own rank."""
    return expert >= 0 and a.world.rank_of(expert) == a.rank


def _peers_and_self(a: Agent) -> list[int]:
    n_ranks = a.world.n_ranks
    return [(a.rank + 1 + i) % n_ranks for i in range(n_ranks)]


def _write_entry(a: Agent, t: int, k: int, expert: int) -> None:
    n, generation = a.next("dispatch_sent")
    for to in _peers_and_self(a):
        place, truth = ("entry", to, a.rank, t, k), ("entry", n, a.rank, t, k)
        a.store_relaxed(place, (generation, expert), truth)


def send_metadata(a: Agent, indexer: int) -> None:
    """Sends what was chosen for some tokens; one choice stands for all of a token."""
    n, generation = a.next("dispatch_sent")
    await_readers(a, "dispatch")
    n_tokens, n_blocks = len(a.world.tokens(n, a.rank)), a.world.n_blocks
    first, stride = a.block + indexer * n_blocks, a.world.n_index_warps * n_blocks
    for t in range(first, n_tokens, stride):
        for to in _peers_and_self(a):
            truth = ("metadata", n, a.rank, t)
            a.store_relaxed(("metadata", to, a.rank, t), (generation, 0), truth)


def send_by_number(a: Agent, reads_in_place: bool) -> None:
    tokens = a.world.tokens(a.next("dispatch_sent")[0], a.rank)
    mine = a.of_block(len(tokens))
    if mine and len(tokens) <= a.world.n_inline_tokens:
        _send_inline(a, mine, reads_in_place)
    elif mine:
        _send_chunks(a, mine, reads_in_place)


def _send_inline(a: Agent, mine: range, reads_in_place: bool) -> None:
    n, _ = a.next("dispatch_sent")
    await_readers(a, "dispatch")
    if not a.world.indexes_in_lanes:
        a.block_load_acquire("INDEXED", a.world.n_index_warps)
    for t in mine:
        for chunk in range(a.world.n_chunks):
            for to in _receivers(a, t, reads_in_place):
                truth = ("token", n, a.rank, t, chunk)
                a.store_relaxed(("inline_token", to, a.rank, t, chunk), truth, truth)


def _send_chunks(a: Agent, mine: range, reads_in_place: bool) -> None:
    n, generation = a.next("dispatch_sent")
    n_chunks, n_at_once = a.world.n_chunks, a.world.n_chunks_at_once
    await_readers(a, "dispatch")
    for t in mine:
        for first in range(0, n_chunks, n_at_once):
            chunks = range(first, min(first + n_at_once, n_chunks))
            sent = [(c, to) for c in chunks for to in _receivers(a, t, reads_in_place)]
            for chunk, to in sent:
                truth = ("token", n, a.rank, t, chunk)
                a.store(("token", to, a.rank, t, chunk), truth, truth)
            for chunk, to in sent:
                truth = ("token", n, a.rank, t, chunk)
                a.publish(("chunk_flag", to, a.rank, t, chunk), (generation, 0), truth)


def _receivers(a: Agent, t: int, reads_in_place: bool) -> list[int]:
    if a.world.protocol == "all_gather":
        targets = [r for r in a.world.ranks if a.world.experts_of(r)]
    else:
        targets = a.world.owners(a.next("dispatch_sent")[0], a.rank, t)
    peers = [r for r in targets if r != a.rank]
    is_own = a.world.has_shared_expert or a.rank in targets
    return [*peers, a.rank] if is_own and not reads_in_place else peers


def _send(
    launch: Launch, block: int, reads_in_place: bool
) -> tuple[Agent, list[Agent]]:
    """Writes the send phase: numbers, index warps, senders."""
    numbers = launch.agent("numbers warp", block)
    if block == 0:
        publish_n_tokens(numbers)
    indexers = []
    for indexer in range(launch.world.n_index_warps):
        a = launch.agent(f"index warp {indexer}", block)
        index_choices(a, indexer)
        a.block_add("INDEXED")
        if launch.world.has_metadata:
            send_metadata(a, indexer)
        indexers.append(a)
    send_by_number(launch.agent("sender", block), reads_in_place)
    return numbers, indexers


def read_numbers(a: Agent) -> None:
    n, generation = a.next("dispatch_received")
    for src in a.world.ranks:
        place, n_tokens = (
            ("dispatch_n_tokens", a.rank, src),
            len(a.world.tokens(n, src)),
        )
        a.load_relaxed(place, ("equals", generation), ("number", n, src))
        a.store(("n_tokens_of", a.rank, a.block, src), n_tokens)
        if a.world.has_sums and a.block == 0:
            a.store(("received_tokens", a.rank, src), n_tokens, ("received", n, src))
    if a.block == 0:
        a.store(("most_received", a.rank), 0, ("most", n))
    a.block_publish("TOKENS_READY", 1)


def lay_out_rows(a: Agent, indexer: int) -> None:
    n, _ = a.next("dispatch_received")
    n_scanners = a.world.n_scanners
    scanner = indexer - (a.world.n_index_warps - n_scanners)
    if scanner >= 0:
        _count_rows(a, scanner)
    if a.block == 0:
        a.block_load_acquire("SCANNED", n_scanners)
        for other in range(n_scanners):
            a.load(("block_pair_rows", a.rank, a.block, other), is_=1)
        a.store(("pair_rows", a.rank, indexer), 1, ("pair rows", n))


def _count_rows(a: Agent, scanner: int) -> None:
    """One word stands for the rows before all pairs of a warp."""
    n_scanners = a.world.n_scanners
    _read_counts(a, scanner)
    if n_scanners > 1:
        a.block_arrive("SUMMED")
        a.block_load_acquire("SUMMED", n_scanners)
        for other in range(n_scanners):
            a.load(("sums", a.rank, a.block, other), is_=1)
    a.store(("block_pair_rows", a.rank, a.block, scanner), 1)
    a.block_arrive("SCANNED")


def _read_counts(a: Agent, scanner: int) -> None:
    n, generation = a.next("dispatch_received")
    pairs = [(e, src) for e in a.world.experts_of(a.rank) for src in a.world.ranks]
    for expert, src in pairs[scanner :: a.world.n_scanners]:
        place, truth = (
            ("dispatch_count", a.rank, expert, src),
            ("count", n, src, expert),
        )
        a.load_relaxed(place, ("equals", generation), truth)
    a.store(("sums", a.rank, a.block, scanner), 1)


def receive_tokens(a: Agent, reads_in_place: bool) -> None:
    world, rank = a.world, a.rank
    n, _ = a.next("dispatch_received")
    most = max(len(world.tokens(n, src)) for src in world.ranks)
    items = [(t, src) for t in range(most) for src in world.ranks]
    a.block_load_acquire("TOKENS_READY", 1)
    for src in world.ranks:
        a.load(("n_tokens_of", rank, a.block, src))
    is_waiting = True
    for t, src in (items[i] for i in a.of_block(len(items))):
        if t >= len(world.tokens(n, src)):
            continue
        for k in range(len(world.tokens(n, src)[t])):
            _await_words(a, ("entry", rank, src, t, k), ("entry", n, src, t, k))
        is_input = reads_in_place and src == rank
        saved, truth = ("received_rows", rank, src, t), ("row", n, src, t)
        if not _is_here(a, t, src, is_input):
            if world.has_sums:
                a.store(saved, None, truth)
            continue
        if not is_input:
            _await_token(a, t, src)
        if is_waiting:
            _are_counted(a)
            is_waiting = False
        if world.has_metadata and rank in world.owners(n, src, t):
            _await_words(a, ("metadata", rank, src, t), ("metadata", n, src, t))
        if not world.has_sums and src == rank:
            for k, expert in enumerate(world.tokens(n, src)[t]):
                if _has_own_row(a, expert):
                    record_own_row(a, t, k)
        if world.has_sums:
            a.store(saved, True, truth)
            a.store(("received_weights", rank, src, t), True, truth)


def _await_token(a: Agent, t: int, src: int) -> None:
    n, generation = a.next("dispatch_received")
    is_inline = len(a.world.tokens(n, src)) <= a.world.n_inline_tokens
    for chunk in range(a.world.n_chunks):
        meant, of = ("token", n, src, t, chunk), (a.rank, src, t, chunk)
        if is_inline:
            a.load_relaxed(("inline_token", *of), ("filled",), meant)
            a.store(("inline_token", *of), SENTINEL)
        else:
            await_message(a, ("chunk_flag", *of), generation, meant)
            a.load(("token", *of), meant)


def _is_here(a: Agent, t: int, src: int, is_input: bool) -> bool:
    world, rank = a.world, a.rank
    n, _ = a.next("dispatch_received")
    is_here = rank in world.owners(n, src, t)
    is_here = is_here or (world.has_shared_expert and src == rank)
    is_inline = len(world.tokens(n, src)) <= world.n_inline_tokens
    if world.protocol == "all_gather" and is_inline and world.experts_of(rank):
        # It came, even if no row is made of it.
        is_here = is_here or not is_input
    return is_here


def _await_words(a: Agent, place: tuple, meant: tuple) -> None:
    a.load_relaxed(place, ("equals", a.next("dispatch_received")[1]), meant)


def _are_counted(a: Agent) -> None:
    a.block_load_acquire("SCANNED", a.world.n_scanners)
    for scanner in range(a.world.n_scanners):
        a.load(("block_pair_rows", a.rank, a.block, scanner), is_=1)


def _count(launch: Launch, block: int, is_fused: bool) -> None:
    """One warp of a block reads the header and counts the block; the last moves it."""
    a = launch.agent("electing warp", block)
    received = "dispatch_received", "combine_received"
    header_word(a, "dispatch_sent", *received, "dispatch_drained")
    n, generation = launch.next("dispatch_sent")
    words = {"dispatch_sent": generation}
    if is_fused:
        words["dispatch_received"] = launch.next("dispatch_received")[1]

    def go_on(last: Agent) -> None:
        place = ("n_tokens", launch.rank, launch.parity(generation, n))
        last.store(place, len(launch.world.tokens(n, launch.rank)), ("n_tokens", n))
        move(last, **words)

    elect_last_to_start(a, go_on)


def phase(launch: Launch, sends: bool, receives: bool) -> None:
    """A dispatch, or one phase of it."""
    if sends and returns_early(launch):
        return
    world = launch.world
    n, generation = launch.next("dispatch_received")
    publishes_at_end = not sends and world.publishes_at_dispatch_end
    for block in range(world.n_blocks):
        first = len(launch.agents)
        if sends:
            _count(launch, block, receives)
            if block == 0:
                publish_earlier_reads(launch)
            numbers, indexers = _send(launch, block, receives)
        else:
            a = launch.agent("electing warp", block)
            # Where it polls readers, it goes by `combine_sent`, too.
            sent = () if publishes_at_end else ("combine_sent",)
            header_word(a, "dispatch_received", "combine_received", *sent)
            if not publishes_at_end:
                elect_last_to_start(
                    a, lambda last: move(last, dispatch_received=generation)
                )
            numbers = launch.agent("numbers warp", block)
            warps = range(world.n_index_warps)
            indexers = [launch.agent(f"index warp {i}", block) for i in warps]
        if receives:
            if world.has_sums and block == 0 and not publishes_at_end:
                a = numbers if sends else launch.agent("recording warp")
                record_readers(a, "combine")
            read_numbers(numbers)
            for indexer, a in enumerate(indexers):
                if world.has_shared_expert and not sends:
                    parity = launch.parity(generation, n)
                    place, number = ("n_tokens", a.rank, parity), f"n_tokens[{parity}]"
                    a.load(place, ("n_tokens", n), launch.before[number])
                lay_out_rows(a, indexer)
            receive_tokens(launch.agent("receiver", block), sends)
        if publishes_at_end:
            publish_at_end(launch, block, first)
