# SPDX-License-Identifier: Apache-2.0
"""What the GPU kernels become, for NVIDIA's H200; no GPU needed.

Here stands what shows in the assembly alone: scopes of ordered accesses, deadlines,
what waits for the launch before, and that each guard is there. What must come before
what, `tests/emulator/races.py` finds when kernels run. Registers, memory, and AMD's
MI300X are in `test_codegen_resources.py`.
"""

import re

import pytest

from max_ep.extension import mojo_dir
from tests.codegen.assembly import Kernel, parse_ptx
from tests.codegen.kernels import N_PAIRS, N_RANKS, VARIANTS, compile_kernels, kernels


@pytest.mark.parametrize("protocol", VARIANTS)
def test_all_variants_are_compiled(protocol):
    """And all of each is looked at: what is never reached would pass any test."""
    found = compile_kernels(protocol)
    assert set(found) == set(VARIANTS[protocol])
    for x in found.values():
        assert len(x.kernel.reach_from_start([])) == len(x.kernel.ops), x.name


def ptx(line: str) -> Kernel:
    return parse_ptx(f"\n{{\n{line};\nret;\n}}\n")


def test_the_reader_sees_what_should_not_be_there():
    """A blind reader would let the tests that look for it pass."""
    for line, found in (
        ("ld.volatile.b64 %rd1, [%rd2]", "load volatile system"),
        ("fence.acq_rel.sys", "fence acq_rel system"),
        ("fence.sc.gpu", "fence sc device"),
        ("red.relaxed.gpu.global.add.u32 [%rd1], 1", "atomic relaxed device"),
    ):
        assert ptx(line).ops[0].kind == found
    assert ptx("st.local.b32 [%rd1], %r1").ops[0].space == "local"
    assert ptx("ld.global.nc.v4.b32 {%r0, %r1, %r2, %r3}, [%rd4]").ops[0].is_read_only


@pytest.mark.parametrize(
    "line",
    [
        "cp.async.ca.shared.global [%r1], [%rd1], 16",
        "multimem.st.relaxed.sys.global.u32 [%rd1], %r1",
        "mbarrier.arrive.shared.b64 %rd2, [%rd1]",
        "call.uni (retval0), f, (param0)",
    ],
)
def test_the_reader_refuses_what_it_cannot_read(line):
    """A skipped line would hide an access, and what is awaited before it."""
    with pytest.raises(AssertionError, match=line.split()[0].partition(".")[0]):
        ptx(line)


@kernels()
def test_system_scope(it):
    """Which accesses there are between ranks, how they are ordered, and how large."""
    expected = {
        # Flags of messages and chunks; done words.
        ("store release system", 8): it.sends or it.publishes_at_end,
        ("load acquire system", 8): it.sends
        or it.receives_chunks
        # A launch that receives may look for who sends next.
        or it.records_readers,
        # Counts and numbers of tokens; kept rows; heartbeats.
        ("store relaxed system", 8): it.sends
        and (it.is_dispatch or it.has("drops"))
        or it.has("masks"),
        ("load relaxed system", 8): it.receives and it.is_dispatch or it.has("masks"),
        # Entries, inline-flag tokens and partial sums.
        ("store relaxed system", 16): it.sends and it.is_by_rank,
        # The assembler splits others if nobody uses the words in the middle.
        ("load volatile system", 16): it.receives and it.is_by_rank,
        # Two counts, each an access.
        ("load relaxed system", 16): it.receives and it.is_by_rank and it.is_dispatch,
    }
    kinds = {(op.kind, op.n_bytes) for op in it.kernel.ops if op.scope == "system"}
    assert kinds == {kind for kind, is_there in expected.items() if is_there}
    assert not it.kernel.find(lambda op: op.what == "fence" or op.order == "sc")


@kernels()
def test_every_wait_looks_at_the_clock(it):
    """A loop that waits for a peer has a deadline; what records readers polls less."""
    kinds = [f"load {order} system" for order in ("acquire", "relaxed", "volatile")]
    polls = it.kernel.find_kind(*kinds)
    clock = it.kernel.find(lambda op: "%globaltimer" in op.text)
    loops = it.kernel.smallest_loops(polls)
    timeless = [loop for loop in loops if not loop.body & clock]
    assert len(timeless) == it.records_readers
    for loop in timeless:
        acquires = it.kernel.find_kind("load acquire system")
        assert loop.body & polls == loop.body & acquires


@kernels(but="set_up")
def test_nothing_is_read_before_the_launch_before_has_ended(it):
    """Before that only parameters are there. Each thread lets the next one begin."""
    ends = it.kernel.find(lambda op: bool(re.match(r"(ret|exit)\b", op.text)))
    awaited = it.kernel.find_kind("launch_wait")
    lets_next = it.kernel.find_kind("launch_next")
    assert len(awaited) == len(lets_next) == 1
    for places in (awaited, lets_next):
        before = it.kernel.reach_from_start(places)
        early = {i for i in before if it.kernel.ops[i].space not in ("", "param")}
        assert not it.shown(early)
        assert not before & it.kernel.find(lambda op: bool(op.order))
        assert not before & ends
    assert not awaited & it.kernel.reach_from_start(lets_next)


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
    source = (mojo_dir() / "max_ep/protocol/failures.mojo").read_text()
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
        # A late rank is masked, but for a first block that decides nothing.
        wanted -= {"NOT_READ", "NO_MESSAGE"}
    assert {names[code] for code in recorded} == wanted


@kernels("by_expert combine")
def test_rows_that_may_change_are_sent(it):
    """Own rows that may change go the way of the others: the wait does not read them
    where they were given."""
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
    ids = re.findall(r"ld\.global\S*64\s+(.*), \[", text)
    assert ids
    for register in ids:
        (raised,) = re.findall(rf"max\.s64\s+(%rd\d+), {register}, -2\n", text)
        assert re.search(rf"min\.s64\s+%rd\d+, {raised}, 2147483647\n", text)


@kernels("_packed")
def test_scales_are_packed_as_exponents(it):
    """UE8M0: of each float32 its exponent, a byte; a lane has those of one word."""
    text = "\n".join(op.text for op in it.kernel.ops)
    stored = re.findall(r"st\S*\.b8\s+\[%rd\d+\+?(\d*)\], (%rs\d+)", text)
    assert [offset for offset, _ in stored] == ["", "1", "2", "3"]
    for _, byte in stored:
        (exponent,) = re.findall(rf"cvt\.u16\.u32\s+{byte}, (%r\d+)\n", text)
        assert re.search(rf"shr\.u32\s+{exponent}, %r\d+, 23\n", text)
