# SPDX-License-Identifier: Apache-2.0
"""What the GPU kernels by rank become for NVIDIA's H200; no GPU needed.

Beside what `test_codegen.py` says of all kernels: launches that overlap, data that is
its own flag, chunks of tokens, and done words that the next launch publishes.
"""

import re

from kernels import Compiled, counter_word, kernels


def ends(it: Compiled) -> set[int]:
    return it.kernel.find(lambda op: bool(re.match(r"(ret|exit)\b", op.text)))


@kernels("by_rank|overlapped")
def test_nothing_is_read_before_the_launch_before_has_ended(it):
    """Till then only parameters are there. Each thread lets the next one begin."""
    awaited = it.kernel.find_kind("launch_wait")
    lets_next = it.kernel.find_kind("launch_next")
    assert len(awaited) == len(lets_next) == 1
    for places in (awaited, lets_next):
        before = it.kernel.reach_from_start(places)
        early = {i for i in before if it.kernel.ops[i].space not in ("", "param")}
        assert not it.shown(early)
        assert not before & it.kernel.find(lambda op: bool(op.order))
        assert not ends(it) & before
    assert not awaited & it.kernel.reach_from_start(lets_next)


@kernels(
    "by_rank.*(dispatch_async|combine|dispatch_wait.fp8_sums|dispatch\\.)", "oversub"
)
def test_done_words_say_what_earlier_launches_have_read(it):
    """A launch publishes at its begin, if it sends, and counts its blocks there. By
    then the kernel before has ended, which nothing of this one may delay. A token's
    first vectors are loaded before, from where it was given."""
    kernel = it.kernel
    assert len(it.done_words) == it.sends
    moved = it.inline_stores | it.inline_polls | it.stores_16
    moved |= it.sentinel_stores
    assert not it.done_words & kernel.reach(moved)
    arrived = kernel.find_kind("atomic acq_rel device")
    assert not arrived & kernel.reach(moved)
    assert not arrived & kernel.reach_from_start(kernel.find_kind("barrier"))


@kernels("by_rank")
def test_readers_are_recorded_when_all_have_read(it):
    """The next launch that sends goes by it: all words, of the other direction."""
    phase = "combine" if it.is_dispatch else "dispatch"
    word = counter_word(f"{phase.upper()}_DRAINED")
    recorded = it.kernel.find(
        lambda op: op.kind == "store" and op.n_bytes == 4 and f"+{4 * word}]" in op.text
    )
    assert len(recorded) == it.records_readers
    seen = it.kernel.find_kind("load acquire system")
    assert not recorded & it.kernel.reach(seen, it.kernel.find_kind("vote"))
    for text in it.shown(recorded):
        register = text.rpartition(", ")[2]
        assert it.header_words()[register] == counter_word(f"{phase.upper()}_SENT")


@kernels("by_rank.*dispatch(_wait)?\\.")
def test_rows_are_used_after_they_are_counted(it):
    """Scan warps hand the rows on after a `syncwarp`; none is filled before."""
    for loop in it.receive_loops:
        counted = loop.body & it.block_polls
        filled = loop.body & it.stores_16
        assert filled
        # As many as count.
        assert all(it.ends_at(i) == {1 + it.has("many")} for i in counted)
        assert not it.shown(filled & it.kernel.reach_knowing({}, counted))

    # When it has its rows; where several warps count, first when it has its sum.
    arrived = it.kernel.find_kind("atomic release block")
    last = {i for i in arrived if not arrived & it.kernel.reach([i])}
    assert last
    assert (last < arrived) == it.has("many")
    stored = it.kernel.find(lambda op: op.kind == "store" and op.space == "shared")
    met = it.kernel.find_kind("warp_barrier", "barrier")
    for arrivals in filter(None, (arrived - last, last)):
        before = stored - it.kernel.reach(arrivals)
        assert before and not arrivals & it.kernel.reach(before, met)


@kernels("by_rank.*dispatch(_wait)?\\.")
def test_numbers_of_tokens_are_handed_on(it):
    """They are published after a `syncwarp`, and read before all else."""
    arrived = it.kernel.find_kind("atomic release block")
    published = it.kernel.find_kind("store release block")
    # The others are published by warps that arrive later.
    (ready,) = (i for i in published if not arrived & it.kernel.reach([i]))
    stored = it.kernel.find(lambda op: op.kind == "store" and op.space == "shared")
    met = it.kernel.find_kind("warp_barrier", "barrier")
    assert ready in it.kernel.reach(stored)
    assert ready not in it.kernel.reach(stored, met)

    # Whatever way a warp comes, it receives nothing before.
    loops = it.receive_loops
    assert len(loops) == 1 + it.receives_chunks
    awaited = it.block_polls.difference(*(loop.body for loop in loops))
    waits = {i for i in awaited if not arrived & it.kernel.reach([i])}
    for loop in loops:
        assert loop.entry not in it.kernel.reach_from_start(waits)
        assert loop.entry not in it.kernel.reach(waits, met), "lanes go apart"


@kernels("by_rank.*dispatch(_async)?\\..*_chunks")
def test_many_choices_are_counted_before_they_are_entered(it):
    """Index warps meet between counting, reading what was counted, and counting on."""
    met = it.kernel.find_kind("some_barrier")
    assert met
    (rounds,) = (loop for loop in it.kernel.loops() if loop.body & met)
    # What is added is a register: 0 or 1.
    adds = it.kernel.find(
        lambda op: op.kind == "atomic relaxed block" and ", %r" in op.text
    )
    counts_on = adds & rounds.body
    assert counts_on and adds - rounds.body
    shared = it.kernel.find(lambda op: op.space == "shared")
    written = rounds.body & shared & it.kernel.find_kind("store")
    read = rounds.body & shared & it.kernel.find_kind("load")
    assert written and read
    assert not read & it.kernel.reach(adds | written, met)
    assert not (counts_on | written) & it.kernel.reach(read, met, rounds.body)
    # Zeros are there before anybody counts, all counts before they are published, and
    # whether one has given up.
    met |= it.kernel.find_kind("barrier")
    zeroed = shared & it.kernel.find_kind("store") - rounds.body
    gave_up = it.kernel.find_kind("store release block")
    gave_up = {i for i in gave_up if adds & it.kernel.reach([i])}
    asked = it.kernel.find_kind("load acquire block")
    assert zeroed and gave_up
    assert not it.shown(adds & it.kernel.reach(zeroed, met))
    published = it.kernel.find(
        lambda op: op.kind == "store relaxed system" and op.n_bytes == 8
    )
    counts = it.kernel.find(lambda op: op.kind == "load" and op.n_bytes == 4) & shared
    later = it.kernel.reach(counts_on)
    loops = it.kernel.smallest_loops(published - rounds.body)
    (last,) = (x.entry for x in loops if x.entry in later and x.body & counts)
    assert last not in it.kernel.reach(counts_on, met)
    assert not it.shown(asked & it.kernel.reach(gave_up, met))


@kernels("by_rank.*(dispatch|combine)(_async)?\\.")
def test_inline_data_is_its_own_flag(it):
    """Nothing else is stored in a peer's memory, and nothing is published after it.
    Data that looks like `SENTINEL` is replaced: a receiver would wait for it."""
    for loop in it.kernel.loops():
        if loop.body & it.inline_stores:
            assert not loop.find_kind("store release system")
            assert not it.shown(loop.body & it.stores_16)
    plain = it.kernel.find(
        lambda op: op.is_plain and op.what == "store" and op.space == "generic"
    )
    in_chunks = set().union(*(loop.body for loop in it.send_loops))
    assert not it.shown(plain - it.sentinel_stores - in_chunks)
    stand_in = re.compile(r"selp\.b32\s+%r\d+, 2147483647, ")
    replaced = it.kernel.find(lambda op: bool(stand_in.match(op.text)))
    assert replaced and (it.is_dispatch or len(replaced) == len(it.inline_stores))


@kernels("by_rank")
def test_sentinel_is_put_back_after_data_was_read(it):
    """By ordinary stores, each after the loads of the same 16 bytes, for all of them.
    Entries and routing metadata say their generation, and stay."""
    places = it.sentinel_stores
    assert bool(places) == it.receives
    polls = it.inline_polls
    for place in places:
        op = it.kernel.ops[place]
        assert op.moves_16("store"), op.text
        # A store may add an offset, which a poll has in a register of its own.
        base, _, offset = op.address.partition("+")
        added = rf"add\.s64\s+(%rd\d+), {base}, {offset or '$'};"
        same = {op.address, *re.findall(added, it.text)}
        of_these = {i for i in polls if it.kernel.ops[i].address in same}
        assert of_these, op.text
        # An address is a register that is set anew where the next one is made.
        setting = re.compile(rf"\S+\s+{op.address.partition('+')[0]},")
        made = it.kernel.find(lambda op, made=setting: bool(made.match(op.text)))
        assert made and place not in it.kernel.reach_from_start(made)
        assert place in it.kernel.reach(of_these, made)
        assert not of_these & it.kernel.reach([place], made), op.text

    clock = it.kernel.find(lambda op: "%globaltimer" in op.text)
    waits = (
        loop.body
        for loop in it.kernel.smallest_loops(polls)
        if loop.body & clock and not loop.body & places
    )
    awaited = polls & set().union(*waits)
    has_entries = it.is_dispatch and it.receives and it.has("sums")
    stay = len(it.receive_loops) * (has_entries + it.has("metadata"))
    assert len(awaited) == len(places) + stay, it.shown(awaited)


@kernels("by_rank combine\\.(fp8|mxfp8)")
def test_scales_of_sums_are_put_back_when_all_lanes_have_read(it):
    """I3: all lanes read the same 16 bytes, and one of them puts the sentinel back."""
    met = it.kernel.find_kind("warp_barrier")
    of_values = it.sentinel_stores & it.kernel.reach(it.inline_polls, met)
    of_scales = it.sentinel_stores - of_values
    assert of_scales and len(of_scales) == len(of_values)


@kernels("_packed")
def test_scales_are_packed_as_exponents(it):
    """UE8M0: of each float32 its exponent, a byte; a lane has those of one word."""
    text = "\n".join(op.text for op in it.kernel.ops)
    places = it.kernel.find(lambda op: op.kind == "store" and op.n_bytes == 1)
    stored = [it.kernel.ops[i] for i in sorted(places)]
    assert [op.address.partition("+")[2] for op in stored] == ["", "1", "2", "3"]
    for op in stored:
        byte = op.text.rpartition(", ")[2]
        (exponent,) = re.findall(rf"cvt\.u16\.u32\s+{byte}, (%r\d+)\n", text)
        assert re.search(rf"shr\.u32\s+{exponent}, %r\d+, 23\n", text)


@kernels("by_rank.*dispatch(_wait)?\\..*_chunks")
def test_chunk_is_read_after_its_flag(it):
    """I2, in a round of the receive loop: no byte of a chunk before its acquire."""
    (loop,) = (x for x in it.receive_loops if x.find_kind("load acquire system"))
    read = loop.find(lambda op: op.moves_16("load"))
    awaited = loop.find_kind("load acquire system")
    assert awaited and read
    later = read & loop.reach_in_round(awaited)
    assert later
    assert not it.shown(awaited & loop.reach_in_round(later))
    # Own tokens, which stand where they were given, may be under way before.
    assert bool(read - later) == it.name.startswith("dispatch.bf16")
