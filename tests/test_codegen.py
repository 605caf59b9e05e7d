# SPDX-License-Identifier: Apache-2.0
"""What the GPU kernels become, for NVIDIA's H200; no GPU needed.

A test on GPUs finds a missing memory order once in many runs, or never. The
assembly shows it each time: so here stands, for every kernel, what the `# ORDER:`
comments and invariants (docs/protocol.md) promise, as far as one can see it there.
Where both phases of an exchange are in one kernel, both are looked at. What only
kernels by rank promise is in `test_codegen_by_rank.py`; registers, memory, and AMD's
MI300X are in `test_codegen_resources.py`.
"""

import re

from kernels import (
    BY_EXPERT,
    BY_RANK,
    N_PAIRS,
    N_RANKS,
    Compiled,
    generation,
    kernels,
    mojo_constant,
)

from max_ep.extension import mojo_dir

COUNTERS = "max_ep/counters.mojo"


def test_all_variants_are_compiled(by_expert, by_rank):
    """And all of each is looked at: what is never reached would pass any test."""
    assert set(by_expert) == set(BY_EXPERT)
    assert set(by_rank) == set(BY_RANK)
    for x in (*by_expert.values(), *by_rank.values()):
        assert len(x.kernel.reach_from_start([])) == len(x.kernel.ops), x.name


# ------------------------------------------------------------------ orders and scopes


@kernels()
def test_system_scope(it):
    """Which accesses there are between ranks, how they are ordered, and how large."""
    expected = {
        # Flags of messages and chunks; done words.
        ("store release system", 8): it.sends or it.publishes_at_end,
        ("load acquire system", 8): it.sends
        or it.receives_chunks
        # By rank who receives may look for who sends next.
        or it.records_readers,
        # Counts and numbers of tokens; kept rows; heartbeats.
        ("store relaxed system", 8): it.sends
        and (it.is_dispatch or it.has("drops"))
        or it.has("masks"),
        ("load relaxed system", 8): it.receives and it.is_dispatch or it.has("masks"),
        # Entries, inline-flag tokens and partial sums.
        ("store relaxed system", 16): it.sends and it.is_by_rank,
        ("load relaxed system", 16): it.receives and it.is_by_rank,
    }
    kinds = {(op.kind, op.n_bytes) for op in it.kernel.ops if op.scope == "system"}
    assert kinds == {kind for kind, is_there in expected.items() if is_there}
    assert not it.kernel.find(
        lambda op: op.what == "fence" or op.order in ("volatile", "sc")
    )


@kernels()
def test_device_scope(it):
    """Blocks meet in one `arrive`; what else they share is the failure record, and if
    ranks mask what makes blocks agree on who is masked."""
    ordered = [op.kind for op in it.kernel.ops if op.scope == "device"]
    if not it.sends and not it.receives:
        assert not ordered
        return
    assert ordered.count("atomic acq_rel device") == 1
    relaxed = {"load relaxed device", "atomic relaxed device"}
    relaxed |= {"store relaxed device"} if it.has("masks") else set()
    assert set(ordered) == relaxed | {"atomic acq_rel device"}


@kernels()
def test_block_scope(it):
    """Warps hand work on in shared memory by release and acquire, as PTX shows."""
    kinds = {op.kind for op in it.kernel.ops if op.scope == "block"}
    # By rank few choices are indexed by lanes, which need not be awaited.
    hands_on = it.receives or it.sends_chunks
    expected = {"store release block", "load acquire block"} if hands_on else set()
    if it.is_by_rank and it.receives:
        expected.add("atomic release block")  # Rows are counted by several warps.
    assert kinds - {"atomic relaxed block"} == (expected if it.is_dispatch else set())


@kernels()
def test_every_wait_looks_at_the_clock(it):
    """A loop that waits for a peer has a deadline; what records readers polls less."""
    polls = it.kernel.find_kind("load acquire system", "load relaxed system")
    clock = it.kernel.find(lambda op: "%globaltimer" in op.text)
    loops = it.kernel.smallest_loops(polls)
    timeless = [loop for loop in loops if not loop.body & clock]
    assert len(timeless) == it.records_readers
    for loop in timeless:
        assert loop.body & polls == loop.find_kind("load acquire system")


def asked_generations(it: Compiled, place: int) -> set[tuple[str, str]]:
    """Finds what a word that a rank loads is compared with. Runs what follows the load
    with words of generations around each of the header's."""
    known, found = it.generations(), set()
    loaded = re.findall(r"%\w+", it.kernel.ops[place].result)
    for name in (f"{x}_{y}" for x in ("dispatch", "combine") for y in WORDS):
        number = generation(name)
        shift = 0 if it.is_by_rank and name == "combine_sent" else 32
        runs = []
        for other in (5, 999_999):  # Whatever the other half is.
            for n in range(number - 1, number + 3):
                word = n << shift | other << 32 - shift
                now = known | dict.fromkeys(loaded, 0) | {loaded[0]: word}
                runs.append(it.kernel.run(place, now))
        for register in (r for r in runs[0] if r.startswith("%p")):
            values = [run.get(register) for run in runs]
            if values[0] != 0:
                values = [1 - value if value is not None else None for value in values]
            if values == [0, 1, 1, 1] * 2:
                found.add(("reached", name))
            if values == [0, 0, 1, 0] * 2:
                found.add(("equals", f"{name} + 1"))
    return found


WORDS = ("sent", "received")


@kernels()
def test_waits_are_for_the_right_generation(it):
    """I3: done words must have reached what was sent last; flags equal the next."""
    other = "combine" if it.is_dispatch else "dispatch"
    expected = set()
    if it.sends:
        expected.add(("reached", f"{it.phase}_sent"))
    if it.records_readers:
        expected.add(("reached", f"{other}_sent"))
    if it.receives_chunks or it.has("drops") and not it.is_dispatch:
        expected.add(("equals", f"{it.phase}_received + 1"))
    polls = it.kernel.find_kind("load acquire system")
    asked = [asked_generations(it, place) for place in polls]
    assert all(len(of_one) == 1 for of_one in asked)
    assert set().union(*asked) == expected


@kernels("by_rank dispatch(_wait)?\\.")
def test_counts_are_of_the_next_generation(it):
    """What is compared at once; of several words one may be compared later."""
    polls = it.kernel.find(
        lambda op: op.kind == "load relaxed system" and ".b128" not in op.text
    )
    asked = set().union(*(asked_generations(it, place) for place in polls))
    assert asked == {("equals", "dispatch_received + 1")}


@kernels()
def test_generations_that_are_published(it):
    """A done word is of what was read; by rank, of both directions and before."""
    read = [generation(f"{phase}_received") for phase in ("dispatch", "combine")]
    read[not it.is_dispatch] += it.publishes_at_end
    done = read[0] << 32 | read[1] if it.is_by_rank else read[not it.is_dispatch] << 32
    places = it.done_words
    assert len(places) == (it.publishes_at_end or it.is_by_rank and it.sends)
    for place in places:
        register = it.kernel.ops[place].text.rpartition(", ")[2]
        assert it.kernel.value(register, it.generations()) == done


# ------------------------------------------------------------- what comes before what


@kernels()
def test_payload_is_written_before_its_flag(it):
    """I2, in a round of the send loop: no byte after its release; a `syncwarp`."""
    loops = it.send_loops
    assert len(loops) == it.sends_chunks
    for loop in loops:
        written = loop.body & it.stores_16
        released = loop.find_kind("store release system")
        assert released <= loop.reach_in_round(written)
        assert not it.shown(loop.reach_in_round(released) & written)
        met = it.kernel.find_kind("warp_barrier")
        assert not released & it.kernel.reach(written, met)


@kernels("by_expert")
def test_message_is_read_after_its_flag(it):
    """I2, in a round of the receive loop: no byte of a message before its acquire.
    Combine's lanes await a message each and read all of them: a `syncwarp` is
    between."""
    loops = it.receive_loops
    assert len(loops) == it.receives
    for loop in loops:
        read = loop.body & it.loads_16
        awaited = loop.find_kind("load acquire system")
        assert read <= loop.reach_in_round(awaited)
        assert not it.shown(awaited & loop.reach_in_round(read))
        if it.is_dispatch:
            assert not it.shown(read & loop.reach_from_entry(awaited))
        else:
            met = loop.find_kind("warp_barrier")
            assert not it.shown(read & loop.reach_from_entry(met))


def unclear(it: Compiled) -> dict[str, bool]:
    """Returns the predicates that are so if done words must be polled. By rank the
    header may say that all were there before: it compares a generation that was sent
    with the one that all ranks were seen to have read."""
    word_of = it.header_words()
    drained = [
        {int(generation(f"{x}_{y}")) // 1000 for y in ("sent", "drained")}
        for x in ("dispatch", "combine")
    ]
    values: dict[str, bool] = {}
    for op in it.kernel.ops:
        compare = r"setp\.(eq|ne)\.\w+\s+(%p\d+), (%r\d+), (%r\d+)"
        if found := re.fullmatch(compare, op.text):
            if {word_of.get(found[3]), word_of.get(found[4])} in drained:
                values[found[2]] = found[1] == "ne"
    return values


@kernels("(dispatch|combine)(_async)?\\.")
def test_peers_are_written_after_their_readers_are_done(it):
    """I3: a warp votes that all done words are there before it writes to a peer. Only
    PTX shows a vote. Each lane awaits some of the words, so a warp barrier must carry
    what it has acquired to the others."""
    kernel = it.kernel
    written = kernel.find_kind("store relaxed system") - it.heartbeats
    for loop in it.send_loops:
        written |= loop.body & it.stores_16
    awaited = it.done_polls
    votes = kernel.find_kind("vote")
    voted = {v for v in votes if {v} & kernel.reach(awaited, votes - {v})}
    if it.is_by_rank:
        assert voted and unclear(it)
        too_soon = kernel.reach_knowing(unclear(it), voted)
    else:
        too_soon = kernel.reach_from_start(voted)
    assert written and not it.shown(written & too_soon)
    met = kernel.find_kind("warp_barrier")
    assert not it.shown(written & kernel.reach(awaited, met))


@kernels("by_expert", but="set_up")
def test_blocks_have_read_before_they_arrive(it):
    """I3: a block's warps meet before one of them says that it has ended."""
    arrived = it.kernel.find_kind("atomic acq_rel device")
    met = it.kernel.find_kind("barrier")
    assert not arrived & it.kernel.reach(it.loads_16 | it.stores_16, met)


@kernels("by_expert.*(wait|dispatch\\.|combine\\.)|_oversub|dispatch_wait.bf16")
def test_done_words_come_last(it):
    """I3: all blocks have read and written what they must when peers hear of it. One
    lane learns that all blocks have arrived: a `syncwarp` carries it to the others."""
    kernel = it.kernel
    arrived = kernel.find_kind("atomic acq_rel device")
    barriers = kernel.find_kind("barrier")
    assert not arrived & kernel.reach(it.moved, barriers)
    done = it.done_words
    assert done and done <= kernel.reach(arrived)
    # By rank the first one is that of the launch's start.
    met = {i for i in barriers if not it.is_by_rank or i in kernel.reach(barriers)}
    assert met and not done & kernel.reach_from_start(met)
    assert not it.shown((it.moved | arrived) & kernel.reach(done))
    unmet = kernel.reach(arrived, kernel.find_kind("warp_barrier"))
    assert not it.shown(done & unmet)


@kernels("by_expert dispatch")
def test_warps_hand_on_what_is_there(it):
    """Slots, and the rows of all pairs, are stored before they are handed on."""
    awaited = it.block_polls
    for loop in it.send_loops:
        slots = loop.find(lambda op: op.is_plain and op.n_bytes != 16)
        assert slots and not it.shown(slots & loop.reach_from_entry(awaited))
    for loop in it.receive_loops:
        assert loop.entry not in it.kernel.reach_from_start(awaited)

    loops = [x for x in it.kernel.loops() if x.find_kind("store release block")]
    assert len(loops) == it.sends
    for loop in loops:
        stored = loop.find(lambda op: op.is_plain and op.what == "store")
        released = loop.find_kind("store release block")
        assert stored and released <= loop.reach_in_round(stored)
        assert not it.shown(stored & loop.reach_in_round(released))
        assert not released & it.kernel.reach(stored, loop.find_kind("warp_barrier"))

    in_loops = set().union(*(loop.body for loop in loops))
    for ready in it.kernel.find_kind("store release block") - in_loops:
        met = it.kernel.find_kind("warp_barrier", "barrier")
        stored = it.kernel.find(lambda op: op.kind == "store" and op.space == "shared")
        unmet = [i for i in stored if ready in it.kernel.reach([i], met)]
        # The lane that publishes also writes the largest count.
        assert len(unmet) == 1 < len(stored)


@kernels(but="chunks$|set_up")
def test_shared_words_are_read_after_a_meeting(it):
    """What one lane has written another reads after a barrier or a vote. In a loop a
    lane also reads what it has written itself; elsewhere an exchange may do, too."""
    kernel = it.kernel
    shared = kernel.find(lambda op: op.space == "shared")
    written = shared & kernel.find_kind("store", "atomic relaxed block")
    read = shared & kernel.find_kind("load")
    met = kernel.find_kind("barrier", "warp_barrier", "some_barrier", "vote")
    met |= kernel.find_kind("load acquire block")
    for place in read if it.is_dispatch else ():
        own = (loop.body for loop in kernel.loops() if place in loop.body)
        assert not it.shown({place} & kernel.reach(written.difference(*own), met))
    if it.is_dispatch and not it.is_by_rank or it.has("many"):
        return
    met |= kernel.find(lambda op: op.text.startswith(("shfl", "redux")))
    assert written and not it.shown(read & kernel.reach(written, met))


@kernels("by_expert dispatch(_wait)?\\.")
def test_a_word_is_stored_again_after_a_meeting(it):
    """Zeros, where rows do not fit, over what another lane has stored."""
    stored: dict[str, set[int]] = {}
    of_header = range(4 * int(mojo_constant("N_HEADER_WORDS", COUNTERS)))
    for i in it.kernel.find(lambda op: op.is_plain and op.what == "store"):
        register, _, offset = it.kernel.ops[i].address.partition("+")
        # One lane writes the header, in which the failure record is.
        if not offset or int(offset) not in of_header:
            stored.setdefault(f"{register}+{offset}", set()).add(i)
    met = it.kernel.find_kind("warp_barrier", "barrier")
    assert any(len(places) > 1 for places in stored.values())
    for places in stored.values():
        for place in places:
            assert not it.shown((places - {place}) & it.kernel.reach([place], met))


@kernels(but="set_up")
def test_words_of_a_block_are_zero_before_they_are_used(it):
    """One warp zeroes them; then all warps meet."""
    used = it.kernel.find(lambda op: op.scope == "block")
    met = it.kernel.find_kind("barrier")
    assert used or it.is_by_rank and it.sends and not it.receives
    assert not it.shown(used & it.kernel.reach_from_start(met))


@kernels("by_expert.*dispatch.bf16_shared")
def test_own_tokens_are_read_after_a_barrier(it):
    """I4: what the sending warps have staged is there when others copy it."""
    in_loops = (loop.body for loop in it.send_loops + it.receive_loops)
    copied = it.loads_16.difference(*in_loops)
    (sending,) = it.send_loops
    staged = sending.body & it.stores_16
    assert copied and copied <= it.kernel.reach(staged)
    met = it.kernel.find_kind("barrier")
    assert not it.shown(copied & it.kernel.reach(staged, met))


# By what a launch does; `rows` and `sums`: what its combine sends.
FAILURES = {
    "dispatch sends": "DROPPED NOT_READ",
    "dispatch receives": "TOO_MANY_ROWS NO_COUNT NO_MESSAGE",
    "rows sends": "NOTHING_DISPATCHED TOO_MANY_ROWS BAD_SOURCE NOT_READ",
    "rows receives": "BAD_N_TOKENS TOO_MANY_ROWS NO_MESSAGE WRONG_EXPERT OVERTAKEN",
    "sums sends": "NOTHING_DISPATCHED TOO_MANY_ROWS NOT_READ",
    "sums receives": "BAD_N_TOKENS NO_MESSAGE OVERTAKEN",
}


@kernels(but="set_up")
def test_what_a_launch_refuses(it):
    """Each guard is there: it records a failure of its own."""
    source = (mojo_dir() / "max_ep/failures.mojo").read_text()
    codes = re.findall(r"comptime (\w+) = Int32\((\d+)\)", source)
    names = {code: name for name, code in codes}
    recorded = re.findall(r"\.cas\.b32\s[^\n]*, (\d+);", it.text)
    what = "dispatch" if it.is_dispatch else "sums" if it.is_by_rank else "rows"
    wanted = {"WRONG_COUNTERS"}
    if it.sends:
        wanted |= set(FAILURES[f"{what} sends"].split())
    if it.receives:
        wanted |= set(FAILURES[f"{what} receives"].split())
    if what == "sums" and not it.sends:
        wanted |= {"TOO_MANY_ROWS", "OTHER_ROWS"}
    if not it.sends and it.is_dispatch and not it.is_by_rank and it.has("shared"):
        wanted.add("NOT_SENT")
    if it.has("masks"):
        # Who is late is masked, but for a first block that decides nothing.
        wanted -= {"NOT_READ", "NO_MESSAGE"}
    assert {names[code] for code in recorded} == wanted


@kernels("by_expert combine")
def test_rows_that_may_change_are_sent(it):
    """Then own rows go the way of the others, and the wait does not read where they
    were given."""
    of_all, of_peers = N_PAIRS, N_PAIRS - N_PAIRS // N_RANKS
    n_pairs = re.compile(rf"mul\.\S+\s+\S+ \S+ {of_peers}")
    assert of_all == 1 << 8  # a product with it is a shift
    counted = it.kernel.find(lambda op: bool(n_pairs.fullmatch(op.text)))
    assert bool(counted) == (it.sends and not it.has("keeps"))
    given = it.kernel.find(lambda op: op.text.endswith("_param_0]"))
    assert bool(given) == (it.sends or not it.has("keeps"))


@kernels("_wide")
def test_wide_ids_are_narrowed_to_their_range(it):
    """2**32 is no expert 0. Ids are the only words of 8 bytes that are read."""
    text = "\n".join(op.text for op in it.kernel.ops)
    ids = it.kernel.find(
        lambda op: op.kind == "load" and op.space == "global" and op.n_bytes == 8
    )
    assert ids
    for place in ids:
        bound = rf"max\.s64\s+(%rd\d+), {it.kernel.ops[place].result}, -2\n"
        (raised,) = re.findall(bound, text)
        assert re.search(rf"min\.s64\s+%rd\d+, {raised}, 2147483647\n", text)
