# SPDX-License-Identifier: Apache-2.0
"""`rank_slots` and `gather` of GPU ranks: dispatch.

Functions have the names of those in `mojo/max_ep/rank_slots/`, and the comments say
only what the model leaves out. Reduced combine is in `rank_combine.py`, un-reduced
combine is that of `expert_slots.py`.
"""

from __future__ import annotations

from .launches import TOKENS_SENT, Agent, Launch
from .memory import EMPTY
from .rank_combine import combine, combine_async, combine_wait
from .rank_steps import (
    await_readers,
    begin_block,
    header_word,
    header_word_beside,
    is_last_to_start,
    moving,
    moving_received,
    note_readers,
    publish_earlier_reads,
    tell_at_end,
)

_DISPATCH = "rank_slots/dispatch.mojo: "
_SEND = "rank_slots/dispatch_send.mojo: "
_RECEIVE = "rank_slots/dispatch_receive.mojo: "
_INDEX = "rank_slots/index.mojo: "
_COUNTS = "rank_slots/row_counts.mojo: "


# ------------------------------------------------------------------- the sending half


def tell_n_tokens(launch: Launch, a: Agent) -> None:
    n = launch.dispatched + 1
    await_readers(launch, a, False)
    for rank in launch.world.ranks:
        a.publish_number(
            _INDEX + "tell_n_tokens",
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
            _tell_count(launch, a, expert)


def _index_lanes(launch: Launch, a: Agent, block: int, indexer: int) -> None:
    for item in _items(launch, block, indexer):
        _tell_item(launch, a, item)


def _index_one_by_one(launch: Launch, a: Agent, block: int, indexer: int) -> None:
    """Tells what the block has counted, of one expert; then what is left."""
    world = launch.world
    n_counted = min(world.n_blocks, len(world.experts))
    if indexer == world.n_index_warps - 1 and block < n_counted:
        _tell_count(launch, a, world.experts[block])
    for item in _items(launch, n_counted + block, indexer):
        _tell_item(launch, a, item)


def _items(launch: Launch, first: int, indexer: int) -> range:
    world = launch.world
    tokens = world.tokens(launch.dispatched + 1, launch.rank)
    n_items = len(world.experts) + sum(map(len, tokens))
    return range(first + indexer * world.n_blocks, n_items, _stride(launch))


def _tell_item(launch: Launch, a: Agent, item: int) -> None:
    world = launch.world
    tokens = world.tokens(launch.dispatched + 1, launch.rank)
    choices = [(t, k) for t, experts in enumerate(tokens) for k in range(len(experts))]
    n_experts = len(world.experts)
    if item < n_experts:
        _tell_count(launch, a, world.experts[item])
    else:
        _enter_choice(launch, a, *choices[item - n_experts])


def _tell_count(launch: Launch, a: Agent, expert: int) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatched + 1
    a.publish_number(
        _INDEX + "_tell_count",
        ("dispatch_count", world.rank_of(expert), expert, rank),
        (launch.next("dispatch_sent"), world.count(n, rank, expert)),
        ("count", n, rank, expert),
    )


def _enter_choice(launch: Launch, a: Agent, t: int, k: int) -> None:
    n = launch.dispatched + 1
    generation = launch.next("dispatch_sent")
    expert = launch.world.tokens(n, launch.rank)[t][k]
    a.store(
        _INDEX + "_enter_choice",
        ("choices", launch.rank, launch.parity(generation, n), t, k),
        expert,
        ("choice", n, t, k),
    )
    _write_entry(launch, a, n, generation, t, k, expert)


def _stride(launch: Launch) -> int:
    return launch.world.n_index_warps * launch.world.n_blocks


def send_carried(launch: Launch, a: Agent, block: int, indexer: int) -> None:
    """Sends what was chosen for some tokens; one choice stands for all of a token."""
    world, rank = launch.world, launch.rank
    n = launch.dispatched + 1
    await_readers(launch, a, False)
    n_tokens = len(world.tokens(n, rank))
    for t in range(block + indexer * world.n_blocks, n_tokens, _stride(launch)):
        for i in range(world.n_ranks):
            to = (rank + 1 + i) % world.n_ranks
            a.put_16(
                _INDEX + "send_carried",
                ("carried_choice", to, rank, t),
                (launch.next("dispatch_sent"), 0),
                ("carried", n, rank, t),
            )


def _write_entry(
    launch: Launch, a: Agent, n: int, generation: int, t: int, k: int, expert: int
) -> None:
    put = a.put_16 if launch.world.is_reduced else a.publish_number
    for i in range(launch.world.n_ranks):
        to = (launch.rank + 1 + i) % launch.world.n_ranks
        put(
            _INDEX + "_write_entry",
            ("entry", to, launch.rank, t, k),
            (generation, expert),
            ("entry", n, launch.rank, t, k),
        )


def send_by_number(
    launch: Launch,
    a: Agent,
    block: int,
    has_input: bool,
    to_peers: bool,
    waits_for_index: bool,
) -> None:
    world = launch.world
    tokens = world.tokens(launch.dispatched + 1, launch.rank)
    mine = [t for t in range(len(tokens)) if t % world.n_blocks == block]
    if not mine:
        return
    if len(tokens) <= world.n_early_tokens:
        _send_early_tokens(launch, a, block, mine, has_input, to_peers, waits_for_index)
    else:
        _send_tokens_in_chunks(launch, a, mine, has_input, to_peers)


def _send_early_tokens(
    launch: Launch,
    a: Agent,
    block: int,
    mine: list[int],
    has_input: bool,
    to_peers: bool,
    waits_for_index: bool,
) -> None:
    world, rank = launch.world, launch.rank
    await_readers(launch, a, False)
    if waits_for_index and not world.indexes_in_lanes:
        a.block_peek(
            _SEND + "_send_early_tokens",
            ("INDEXED", rank, block),
            world.n_index_warps,
        )
    for t in mine:
        for part in range(world.n_parts):
            for to in _receivers(launch, t, has_input, to_peers):
                truth = ("token", launch.dispatched + 1, rank, t, part)
                place = ("early_token", to, rank, t, part)
                a.put_16(_SEND + "_store_steps", place, truth, truth)


def _send_tokens_in_chunks(
    launch: Launch, a: Agent, mine: list[int], has_input: bool, to_peers: bool
) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatched + 1
    generation = launch.next("dispatch_sent")
    await_readers(launch, a, False)
    for t in mine:
        receivers = _receivers(launch, t, has_input, to_peers)
        for first in range(0, world.n_parts, world.n_parts_at_once):
            parts = range(first, min(first + world.n_parts_at_once, world.n_parts))
            for part in parts:
                for to in receivers:
                    truth = ("token", n, rank, t, part)
                    place = ("token", to, rank, t, part)
                    a.store(_SEND + "_store_steps", place, truth, truth)
            for part in parts:
                for to in receivers:
                    a.publish(
                        _SEND + "_send_tokens_in_chunks",
                        ("chunk_flag", to, rank, t, part),
                        (generation, 0),
                        ("token", n, rank, t, part),
                    )


def _receivers(launch: Launch, t: int, has_input: bool, to_peers: bool) -> list[int]:
    world, rank = launch.world, launch.rank
    if world.protocol == "gather":
        targets = [r for r in world.ranks if world.experts_of(r)]
    else:
        targets = world.owners(launch.dispatched + 1, rank, t)
    peers = [r for r in targets if r != rank] if to_peers else []
    is_own = world.has_shared_expert or rank in targets
    return [*peers, rank] if is_own and not has_input else peers


def _send(
    launch: Launch, block: int, has_input: bool, tokens_are_sent: bool
) -> tuple[Agent, list[Agent]]:
    """Deals the sending half: numbers, index warps, senders."""
    world, rank = launch.world, launch.rank
    numbers = launch.agent(f"block {block}, numbers warp")
    if block == 0:
        tell_n_tokens(launch, numbers)
    indexers = []
    for indexer in range(world.n_index_warps):
        a = launch.agent(f"block {block}, index warp {indexer}")
        index_choices(launch, a, block, indexer)
        a.block_add(_DISPATCH + "_send", ("INDEXED", rank, block))
        if world.carries_choices:
            send_carried(launch, a, block, indexer)
        indexers.append(a)
    if not (tokens_are_sent and has_input):
        sender = launch.agent(f"block {block}, sender")
        send_by_number(launch, sender, block, has_input, not tokens_are_sent, True)
    return numbers, indexers


# ----------------------------------------------------------------- the receiving half


def read_numbers(launch: Launch, a: Agent, block: int) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatch_read + 1
    generation = launch.next("dispatch_received")
    for src in world.ranks:
        a.peek_number(
            _COUNTS + "read_numbers",
            ("dispatch_n_tokens", rank, src),
            ("equals", generation),
            ("number", n, src),
        )
        n_tokens = len(world.tokens(n, src))
        place = ("n_tokens_of", rank, block, src)
        a.store(_COUNTS + "read_numbers", place, n_tokens)
        if world.is_reduced and block == 0:
            place = ("received_tokens", rank, src)
            truth = ("received", n, src)
            a.store(_COUNTS + "read_numbers", place, n_tokens, truth)
    if block == 0:
        place = ("most_received", rank)
        a.store(_COUNTS + "read_numbers", place, 0, ("most", n))
    a.block_publish(_DISPATCH + "_receive", ("TOKENS_READY", rank, block), 1)


def lay_out_rows(launch: Launch, a: Agent, block: int, indexer: int) -> None:
    world, rank = launch.world, launch.rank
    n_counting = world.n_counting_warps
    counter = indexer - (world.n_index_warps - n_counting)
    if counter >= 0:
        _count_rows(launch, a, block, counter)
    if block == 0:
        where = _COUNTS + "lay_out_rows"
        a.block_peek(where, ("COUNTED", rank, block), n_counting)
        for other in range(n_counting):
            a.load(where, ("block_pair_rows", rank, block, other), is_=1)
        truth = ("pair rows", launch.dispatch_read + 1)
        a.store(where, ("pair_rows", rank, indexer), 1, truth)


def _count_rows(launch: Launch, a: Agent, block: int, counter: int) -> None:
    """One word stands for the rows before all pairs of a warp."""
    world, rank = launch.world, launch.rank
    where = _COUNTS + "_count_rows"
    _read_counts(launch, a, block, counter)
    if world.n_counting_warps > 1:
        a.block_arrive(where, ("SUMMED", rank, block))
        a.block_peek(where, ("SUMMED", rank, block), world.n_counting_warps)
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
        a.peek_two_numbers(
            _COUNTS + "_read_counts",
            ("dispatch_count", rank, expert, src),
            ("equals", generation),
            ("count", n, src, expert),
        )
    a.store(_COUNTS + "_read_counts", ("sums", rank, block, counter), 1)


def receive_tokens(launch: Launch, a: Agent, block: int, has_input: bool) -> None:
    world, rank = launch.world, launch.rank
    n = launch.dispatch_read + 1
    generation = launch.next("dispatch_received")
    where = _RECEIVE + "receive_tokens"
    most = max(len(world.tokens(n, src)) for src in world.ranks)
    items = [(t, src) for t in range(most) for src in world.ranks]
    mine = items[block :: world.n_blocks]
    are_early = most <= world.n_early_tokens
    if mine and are_early:
        # It might look while it does not know yet how many tokens there are.
        _look(launch, a, generation, *mine[0], has_input)
    a.block_peek(_DISPATCH + "_receive", ("TOKENS_READY", rank, block), 1)
    for src in world.ranks:
        a.load(where, ("n_tokens_of", rank, block, src))
    is_waiting = True
    for i, (t, src) in enumerate(mine):
        tokens = world.tokens(n, src)
        if t >= len(tokens):
            continue
        is_early = len(tokens) <= world.n_early_tokens
        is_looked_at = are_early and i == 0
        if not is_looked_at:
            _await_entries(launch, a, generation, t, src)
        is_input = has_input and src == rank
        notes = ("received_rows", rank, src, t)
        truth = ("row", n, src, t)
        if not _is_here(launch, t, src, is_input):
            if world.is_reduced:
                a.store(where, notes, None, truth)
            continue
        for part in range(0 if is_input else world.n_parts):
            meant = ("token", n, src, t, part)
            if is_early:
                place = ("early_token", rank, src, t, part)
                if not is_looked_at:
                    a.peek_16(_RECEIVE + "_look_at_steps", place, ("filled",), meant)
                a.store(_RECEIVE + "_await_steps", place, EMPTY)
            else:
                a.peek(
                    "expert_slots/device_steps.mojo: await_message",
                    ("chunk_flag", rank, src, t, part),
                    ("equals", generation),
                    meant,
                )
                place = ("token", rank, src, t, part)
                a.load(_RECEIVE + "_look_at_steps", place, meant)
        if is_waiting:
            _are_counted(launch, a, block)
            is_waiting = False
        if world.carries_choices and rank in world.owners(n, src, t):
            _place_carried(launch, a, n, generation, src, t)
        if world.is_reduced:
            a.store(where, notes, True, truth)
            a.store(where, ("received_weights", rank, src, t), True, truth)


def _is_here(launch: Launch, t: int, src: int, is_input: bool) -> bool:
    world, rank = launch.world, launch.rank
    n = launch.dispatch_read + 1
    is_here = rank in world.owners(n, src, t)
    is_here = is_here or (world.has_shared_expert and src == rank)
    is_early = len(world.tokens(n, src)) <= world.n_early_tokens
    if world.protocol == "gather" and is_early and world.experts_of(rank):
        # It came, even if no row is made of it.
        is_here = is_here or not is_input
    return is_here


def _look(
    launch: Launch, a: Agent, generation: int, t: int, src: int, has_input: bool
) -> None:
    """Sees an early token's entries, and then the token, whenever they are there."""
    world, rank = launch.world, launch.rank
    n = launch.dispatch_read + 1
    if t >= len(world.tokens(n, src)):
        return
    _await_entries(launch, a, generation, t, src)
    is_input = has_input and src == rank
    if _is_here(launch, t, src, is_input):
        for part in range(0 if is_input else world.n_parts):
            place = ("early_token", rank, src, t, part)
            meant = ("token", n, src, t, part)
            a.peek_16(_RECEIVE + "_look_at_steps", place, ("filled",), meant)


def _await_entries(launch: Launch, a: Agent, generation: int, t: int, src: int) -> None:
    n = launch.dispatch_read + 1
    for k in range(len(launch.world.tokens(n, src)[t])):
        place = ("entry", launch.rank, src, t, k)
        _await_words(launch, a, generation, place, ("entry", n, src, t, k))


def _await_words(
    launch: Launch, a: Agent, generation: int, place: tuple, meant: tuple
) -> None:
    peek = a.peek_16 if launch.world.is_reduced else a.peek_number
    peek(_RECEIVE + "_look_at_words", place, ("equals", generation), meant)


def _place_carried(
    launch: Launch, a: Agent, n: int, generation: int, src: int, t: int
) -> None:
    place = ("carried_choice", launch.rank, src, t)
    _await_words(launch, a, generation, place, ("carried", n, src, t))


def _are_counted(launch: Launch, a: Agent, block: int) -> None:
    world, rank = launch.world, launch.rank
    n_counting = world.n_counting_warps
    a.block_peek(_RECEIVE + "_are_counted", ("COUNTED", rank, block), n_counting)
    for counter in range(n_counting):
        where = _RECEIVE + "receive_tokens"
        a.load(where, ("block_pair_rows", rank, block, counter), is_=1)


# ------------------------------------------------------------- dispatch's kernels


def _has_nothing_and_returns(launch: Launch) -> bool:
    """The mutation: a rank without tokens leaves at once."""
    return launch.world.has("early return of a rank with zero tokens") and not (
        launch.world.tokens(launch.dispatched + 1, launch.rank)
    )


def _tell_dispatch(launch: Launch, a: Agent) -> None:
    """Each block says that it has read the header."""
    n = launch.dispatched + 1
    where = _DISPATCH + "_tell_dispatch"
    word = "tokens_sent_on_gpu"

    def leave(last: Agent) -> None:
        value = TOKENS_SENT + len(launch.world.tokens(n, launch.rank))
        last.leave_word(where, (word, launch.rank), value, ("tokens sent", n))

    a.arrive(where, launch.world.n_blocks, leave, word, is_put_back=False)


def _await_send_tokens(launch: Launch, a: Agent) -> None:
    where = _DISPATCH + "_await_send_tokens"
    place = ("tokens_sent_on_gpu", launch.rank)
    a.look_at(where, place, TOKENS_SENT, ("tokens sent", launch.dispatched + 1))
    a.store(where, place, 0)


def send_tokens(launch: Launch) -> None:
    """May run beside the dispatch of its tokens, see `World._launches`."""
    world = launch.world
    if _has_nothing_and_returns(launch):
        return
    reads_late = world.has("send_tokens tells what it reads late")
    told = () if reads_late else ("dispatch_received", "combine_received")
    for block in range(world.n_blocks):
        a = launch.agent(f"block {block}, counting warp")
        header_word(launch, a, "dispatch_sent", "dispatch_clear", *told)
        _tell_dispatch(launch, a)
    if reads_late:
        a = launch.agent("late telling warp")
        header_word(launch, a, "dispatch_received", "combine_received")
    publish_earlier_reads(launch)
    for block in range(world.n_blocks):
        a = launch.agent(f"block {block}, sender")
        send_by_number(launch, a, block, True, True, False)


def _are_sent(launch: Launch) -> bool:
    return "send_tokens" in launch.world.program


def _count_in_dispatch(launch: Launch, block: int, is_fused: bool) -> None:
    a = launch.agent(f"block {block}, counting warp")
    header_word(
        launch,
        a,
        "dispatch_sent",
        "dispatch_received",
        "combine_received",
        "dispatch_clear",
    )
    n = launch.dispatched + 1
    n_tokens = len(launch.world.tokens(n, launch.rank))
    words = {"dispatch_sent": launch.next("dispatch_sent")}
    if is_fused:
        words["dispatch_received"] = launch.next("dispatch_received")
    moves_first = launch.world.has("generations moved before the wait for send_tokens")

    def go_on(last: Agent) -> None:
        if moves_first:
            moving(launch, words)(last)
        if _are_sent(launch):
            _await_send_tokens(launch, last)
        where = f"{_DISPATCH}{launch.op}_kernel"
        parity = launch.parity(words["dispatch_sent"], n)
        last.store(where, ("n_tokens", launch.rank, parity), n_tokens, ("n_tokens", n))
        if not moves_first:
            moving(launch, words)(last)

    is_last_to_start(launch, a, go_on)


def dispatch_async(launch: Launch) -> None:
    if _has_nothing_and_returns(launch):
        return
    for block in range(launch.world.n_blocks):
        _count_in_dispatch(launch, block, False)
    publish_earlier_reads(launch)
    for block in range(launch.world.n_blocks):
        _send(launch, block, False, _are_sent(launch))


def _own_number(launch: Launch, a: Agent, block: int) -> None:
    """Reads how many rows of the shared expert there are: those of the own tokens."""
    n, rank = launch.dispatch_read + 1, launch.rank
    parity = launch.parity(launch.next("dispatch_received"), n)
    word = f"n_tokens[{parity}]"
    if launch.sending is None:
        place = ("n_tokens", rank, parity)
        at = "rank_slots/device_steps.mojo: header_word"
        a.load(at, place, ("n_tokens", n), launch.before[word])
    elif launch.world.has("the waiting half takes its own number from the header"):
        header_word_beside(launch, a, word)
    else:
        a.block_peek(_DISPATCH + "_receive", ("TOKENS_READY", rank, block), 1)
        number = len(launch.world.tokens(n, rank))
        a.load(_DISPATCH + "_receive", ("n_tokens_of", rank, block, rank), is_=number)


def dispatch_wait(launch: Launch) -> None:
    world = launch.world
    tells_at_end = world.tells_at_dispatch_end
    generation = launch.next("dispatch_received")
    # Where it looks at readers, it goes by `combine_sent`, too.
    sent = () if tells_at_end else ("combine_sent",)
    for block in range(world.n_blocks):
        first = len(launch.agents)
        a = begin_block(launch, block, "dispatch_received", "combine_received", *sent)
        if not tells_at_end:
            move = moving_received(launch, "dispatch_received", generation)
            is_last_to_start(launch, a, move)
            if world.is_reduced and block == 0:
                note_readers(launch, launch.agent("telling warp"), True)
        a = launch.agent(f"block {block}, numbers warp")
        read_numbers(launch, a, block)
        for indexer in range(world.n_index_warps):
            a = launch.agent(f"block {block}, index warp {indexer}")
            if world.has_shared_expert:
                _own_number(launch, a, block)
            lay_out_rows(launch, a, block, indexer)
        a = launch.agent(f"block {block}, receiver")
        receive_tokens(launch, a, block, False)
        if tells_at_end:
            tell_at_end(launch, block, first, "dispatch_received", generation)


def dispatch(launch: Launch) -> None:
    world = launch.world
    if _has_nothing_and_returns(launch):
        return
    for block in range(world.n_blocks):
        _count_in_dispatch(launch, block, True)
    publish_earlier_reads(launch)
    for block in range(world.n_blocks):
        numbers, indexers = _send(launch, block, True, _are_sent(launch))
        if world.is_reduced and block == 0:
            note_readers(launch, numbers, True)
        read_numbers(launch, numbers, block)
        for indexer, a in enumerate(indexers):
            lay_out_rows(launch, a, block, indexer)
        receive_tokens(launch, launch.agent(f"block {block}, receiver"), block, True)


OPS = {
    "send_tokens": send_tokens,
    "dispatch_async": dispatch_async,
    "dispatch_wait": dispatch_wait,
    "dispatch": dispatch,
    "combine_async": combine_async,
    "combine_wait": combine_wait,
    "combine": combine,
}
