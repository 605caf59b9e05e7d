# SPDX-License-Identifier: Apache-2.0
"""What the GPU kernels become, for NVIDIA's H200 and AMD's MI300X; no GPU needed.

A test on GPUs finds a missing memory order once in many runs, or never. The
assembly shows it each time: so here stands, for every kernel, what the `# ORDER:`
comments and invariants (docs/protocol.md) promise, as far as one can see it there.
Where both halves of a phase are in one kernel, both are looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from assembly import (
    Kernel,
    Loop,
    amd_resources,
    nvidia_resources,
    parse_amdgcn,
    parse_ptx,
)

from max_ep.extension import run_mojo
from max_ep.limits import MAX_GPU_PAIRS, MAX_RANKS

PROGRAM = Path(__file__).resolve().parent / "mojo" / "codegen.mojo"

NVIDIA, AMD = "sm_90a", "gfx942"

# Those that tests/mojo/codegen.mojo compiles, by kernel and variant.
NAMES = """
dispatch_async.bf16 dispatch_async.bf16_shared
dispatch_async.fp8 dispatch_async.fp8_scaled
dispatch_wait.bf16 dispatch_wait.bf16_padded dispatch_wait.bf16_shared
dispatch_wait.fp8 dispatch_wait.fp8_padded
dispatch.bf16 dispatch.bf16_shared dispatch.fp8_padded
combine_async.bf16
combine_wait.bf16 combine_wait.bf16_shared combine_wait.f32
combine.bf16 combine.bf16_shared combine.bf16_many
clear.any
""".split()

# Registers of a multiprocessor's threads, and of the threads of an MI300X unit that
# share a SIMD: a block of 512 puts two waves on each of the four.
NVIDIA_REGISTERS = 65536
AMD_REGISTERS_OF_TWO_WAVES = 256

# Local memory that a thread uses since its registers do not suffice, in bytes. It
# should be none, and is for all others.
SPILLED = {
    (NVIDIA, "dispatch_async.fp8_scaled"): 72,
}


@dataclass
class Compiled:
    """A kernel for a target, and what to expect of it."""

    target: str
    name: str
    text: str
    kernel: Kernel
    cubin: bytes
    num_threads: int
    in_flight: int
    encoded_in_flight: int
    top_k: int
    header: dict[str, int]
    """Words of the counters' header."""

    @property
    def spilled(self) -> int:
        """Bytes of local memory that are known."""
        return SPILLED.get((self.target, self.name), 0)

    def has(self, word: str) -> bool:
        """Tells whether the variant is of a kind."""
        return word in self.name.partition(".")[2].split("_")

    @property
    def is_dispatch(self) -> bool:
        """Whether it is one of the dispatch kernels."""
        return self.name.startswith("dispatch")

    @property
    def sends(self) -> bool:
        """Whether it has the sending half."""
        kernels = ("dispatch_async", "dispatch", "combine_async", "combine")
        return self.name.partition(".")[0] in kernels

    @property
    def receives(self) -> bool:
        """Whether it has the receiving half."""
        kernels = ("dispatch_wait", "dispatch", "combine_wait", "combine")
        return self.name.partition(".")[0] in kernels

    def loads_16(self) -> set[int]:
        """Returns where tokens or rows are loaded."""
        return self.kernel.find(lambda op: op.moves_16("load"))

    def stores_16(self) -> set[int]:
        """Returns where tokens or rows are stored."""
        return self.kernel.find(lambda op: op.moves_16("store"))

    def header_words(self) -> dict[str, int]:
        """PTX: returns the registers that a word of the header is loaded into."""
        load = r"ld\.global\.b32\s+(%r\d+), \[%rd\d+\+(\d+)\]"
        found = (re.fullmatch(load, op.text) for op in self.kernel.ops)
        return {loaded[1]: int(loaded[2]) // 4 for loaded in found if loaded}

    def send_loops(self) -> list[Loop]:
        """Returns the loops that write messages: they publish something, too."""
        return [
            loop
            for loop in self.kernel.loops()
            if loop.find_kind("store release system") and loop.body & self.stores_16()
        ]

    def receive_loops(self) -> list[Loop]:
        """Returns the loops that read messages: they await something, too."""
        return [
            loop
            for loop in self.kernel.loops()
            if loop.find_kind("load acquire system") and loop.body & self.loads_16()
        ]


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    folder = tmp_path_factory.mktemp("assembly")
    printed = run_mojo("run", "-I", ".", str(PROGRAM), str(folder))
    *numbers, record, sent, received, combine_sent, combine_received = map(
        int, printed.split()
    )
    num_threads, in_flight, encoded_in_flight, top_k, max_top_k = numbers
    header = dict(
        dispatch_sent=sent,
        dispatch_received=received,
        combine_sent=combine_sent,
        combine_received=combine_received,
    )
    compiled = {}
    for path in sorted(folder.glob("*.s")):
        target, _, name = path.stem.partition(".")
        text = path.read_text()
        compiled[path.stem] = Compiled(
            target,
            name,
            text,
            parse_ptx(text) if target == NVIDIA else parse_amdgcn(text, record),
            path.with_suffix(".cubin").read_bytes() if target == NVIDIA else b"",
            num_threads,
            in_flight,
            encoded_in_flight,
            max_top_k if name.endswith("_many") else top_k,
            header,
        )
    return compiled


@pytest.fixture(params=[f"{target}.{n}" for target in (NVIDIA, AMD) for n in NAMES])
def it(request: pytest.FixtureRequest, assembly: dict[str, Compiled]) -> Compiled:
    return assembly[request.param]


def only(targets: list[str], names: list[str]) -> pytest.MarkDecorator:
    """Looks at some of the kernels."""
    ids = [f"{target}.{name}" for target in targets for name in names]
    return pytest.mark.parametrize("it", ids, indirect=True)


def shown(it: Compiled, places: set[int]) -> list[str]:
    return [it.kernel.ops[i].text for i in sorted(places)]


def test_all_are_looked_at(assembly: dict[str, Compiled]) -> None:
    assert set(assembly) == {f"{target}.{n}" for target in (NVIDIA, AMD) for n in NAMES}
    for it in assembly.values():
        # What is never reached would pass any test of what comes before what.
        assert len(it.kernel.reach_from_start([])) == len(it.kernel.ops), it.name


def test_system_scope(it: Compiled) -> None:
    """Everything between ranks: flags by release and acquire, counts relaxed.

    Each wait is two loads, one before its loop and one in it.

    Fails if `publish` or `peek` is relaxed or of device scope, if a wait goes by
    `peek_number` or is left out, and if `publish_number` is stronger than it says.
    """
    counts = it.is_dispatch
    n_waits = it.sends * (2 if counts else 1) + it.receives
    found = Counter(op.kind for op in it.kernel.ops if op.scope == "system")
    assert bool(found.pop("load relaxed system", 0)) == (it.receives and counts)
    assert found == +Counter(
        {
            # A message's flag; the done word.
            "store release system": it.sends + it.receives,
            "store relaxed system": it.sends and counts,
            "load acquire system": 2 * n_waits,
        }
    )
    assert not it.kernel.find(
        lambda op: op.what == "fence" or op.order in ("volatile", "sc")
    )
    flags = it.kernel.find(lambda op: op.scope == "system" and op.n_bytes != 8)
    assert not shown(it, flags)


def test_device_scope(it: Compiled) -> None:
    """Blocks meet in `arrive`; what else they share is the failure record.

    Fails if `arrive` is relaxed.
    """
    found = Counter(op.kind for op in it.kernel.ops if op.scope == "device")
    relaxed = {"load relaxed device", "atomic relaxed device"}
    if it.sends or it.receives:
        assert found.pop("atomic acq_rel device") == 1
        assert set(found) == relaxed
    else:
        assert not found


@only([NVIDIA], NAMES)
def test_block_scope(it: Compiled) -> None:
    """Warps hand work on in shared memory, by release and acquire.

    Only PTX tells: an AMD block's accesses to shared memory stay in order anyway.
    Fails if `block_publish` is relaxed.
    """
    found = Counter(op.kind for op in it.kernel.ops if op.scope == "block")
    found.pop("atomic relaxed block", 0)
    # The slots of choices; that the pairs are there, which is asked twice.
    slots, pairs = it.is_dispatch * it.sends, it.is_dispatch * it.receives
    assert found == +Counter(
        {
            "store release block": slots + pairs,
            "load acquire block": slots + 2 * pairs,
        }
    )


@only([NVIDIA], NAMES)
def test_every_wait_looks_at_the_clock(it: Compiled) -> None:
    """Who waits for a rank that has died finds out, whatever it waits for.

    Fails if a loop that waits for a peer does without its deadline.
    """
    looks = it.kernel.find_kind("load acquire system", "load relaxed system")
    clock = it.kernel.find(lambda op: "%globaltimer" in op.text)
    for loop in it.kernel.smallest_loops(looks):
        assert loop.body & clock, shown(it, loop.body & looks)


@only([NVIDIA], NAMES)
def test_readers_have_reached_what_was_sent(it: Compiled) -> None:
    """I3: done words are compared with the generation that was sent last.

    Messages' flags must be equal to theirs. Fails if a half is content with the done
    word of a generation before, or with a message of a later one.
    """
    phase = "dispatch" if it.is_dispatch else "combine"
    how = Counter[str]()
    for place in it.kernel.find_kind("load acquire system"):
        _, compared, sign = (op.text for op in it.kernel.ops[place + 1 : place + 4])
        if found := re.fullmatch(r"setp\.(eq|ne)\.b32\s.*", compared):
            how[found[1]] += 1
            continue
        found = re.fullmatch(r"sub\.s32\s+(%r\d+), %r\d+, (%r\d+)", compared)
        assert found, compared
        assert it.header_words()[found[2]] == it.header[f"{phase}_sent"]
        reached = rf"setp\.(gt|lt)\.s32\s+%p\d+, {found[1]}, (-1|0)"
        said = re.fullmatch(reached, sign)
        assert said and said.groups() in [("gt", "-1"), ("lt", "0")], sign
        how[said[1]] += 1
    # Of each wait, the first look and the next ones.
    n_waits = it.sends * (2 if it.is_dispatch else 1)
    assert how == +Counter(gt=n_waits, lt=n_waits, eq=it.receives, ne=it.receives)


@only([NVIDIA], [n for n in NAMES if "_async." not in n and n != "clear.any"])
def test_done_words_are_of_what_was_read(it: Compiled) -> None:
    """The generation that follows the one that was received before, as a number.

    Fails if it is the one before, or the one that was sent.
    """
    phase = "dispatch" if it.is_dispatch else "combine"
    number = {word: 100 + word for word in it.header.values()}
    known = {r: number[w] for r, w in it.header_words().items() if w in number}
    read = number[it.header[f"{phase}_received"]] + 1
    sending = set().union(*(loop.body for loop in it.send_loops()))
    done = it.kernel.find_kind("store release system") - sending
    registers = [text.rpartition(", ")[2] for text in shown(it, done)]
    assert [it.kernel.value(r, known) for r in registers] == [read << 32]


@only([NVIDIA], [n for n in NAMES if n.startswith("dispatch")])
def test_warps_hand_on_what_is_there(it: Compiled) -> None:
    """The slots of a unit are noted before they are handed on, and read after it.

    Likewise the rows of all pairs are, before a message is looked at.
    Fails without the `syncwarp` or the `block_peek` between.
    """
    awaited = it.kernel.find_kind("load acquire block")
    for loop in it.send_loops():
        slots = loop.find(lambda op: op.is_plain and op.n_bytes != 16)
        assert slots and not shown(it, slots & loop.reach_from_entry(awaited))
    for loop in it.receive_loops():
        assert loop.entry not in it.kernel.reach_from_start(awaited)

    loops = [x for x in it.kernel.loops() if x.find_kind("store release block")]
    assert len(loops) == it.sends
    for loop in loops:
        noted = loop.find(lambda op: op.is_plain and op.what == "store")
        released = loop.find_kind("store release block")
        assert noted and released <= loop.reach_in_turn(noted)
        assert not shown(it, noted & loop.reach_in_turn(released))
        assert not released & it.kernel.reach(noted, loop.find_kind("warp_barrier"))

    in_loops = set().union(*(loop.body for loop in loops))
    for ready in it.kernel.find_kind("store release block") - in_loops:
        met = it.kernel.find_kind("warp_barrier", "barrier")
        noted = it.kernel.find(lambda op: op.kind == "store" and op.space == "shared")
        unmet = [i for i in noted if ready in it.kernel.reach([i], met)]
        # The lane that publishes also writes the largest count.
        assert len(unmet) == 1 < len(noted)


def test_message_is_written_before_its_flag(it: Compiled) -> None:
    """I2, in a turn of the sending loop: no byte of a message behind its release.

    Fails if it is published first, and without the `syncwarp` between.
    """
    loops = it.send_loops()
    assert len(loops) == it.sends
    for loop in loops:
        written = loop.body & it.stores_16()
        released = loop.find_kind("store release system")
        assert len(released) == 1
        assert released <= loop.reach_in_turn(written)
        assert not shown(it, loop.reach_in_turn(released) & written)
        if it.target == NVIDIA:
            # The lanes that wrote it meet the one that publishes it. In an AMD wave
            # all go in step, and a release waits for what all have stored.
            met = it.kernel.find_kind("warp_barrier")
            assert not released & it.kernel.reach(written, met)


def test_message_is_read_after_its_flag(it: Compiled) -> None:
    """I2, in a turn of the receiving loop: no byte of a message before its acquire.

    Combine's lanes await a message each and read all of them, so they meet between.
    Fails if a message is copied first, and without combine's `syncwarp`.
    """
    loops = it.receive_loops()
    assert len(loops) == it.receives
    for loop in loops:
        read = loop.body & it.loads_16()
        awaited = loop.find_kind("load acquire system")
        assert read <= loop.reach_in_turn(awaited)
        assert not shown(it, awaited & loop.reach_in_turn(read))
        if it.is_dispatch:
            assert not shown(it, read & loop.reach_from_entry(awaited))
        elif it.target == NVIDIA:
            met = loop.find_kind("warp_barrier")
            assert not shown(it, read & loop.reach_from_entry(met))


@only([NVIDIA], NAMES)
def test_slots_are_written_after_their_readers_are_done(it: Compiled) -> None:
    """I3: a warp votes that all done words are there before it writes to a peer.

    Only PTX shows a vote; an AMD wave counts bits. Each lane awaits some of the words,
    so a warp barrier must carry what it has acquired to the others.
    Fails if `_send_half` does not await the done words.
    """
    written = it.kernel.find_kind("store relaxed system")
    for loop in it.send_loops():
        written |= loop.body & it.stores_16()
    awaited = it.kernel.find_kind("load acquire system")
    votes = it.kernel.find_kind("vote")
    voted = {v for v in votes if {v} & it.kernel.reach(awaited, votes - {v})}
    assert not shown(it, written & it.kernel.reach_from_start(voted))
    awaited = awaited.difference(*(loop.body for loop in it.receive_loops()))
    met = it.kernel.find_kind("warp_barrier")
    assert not shown(it, written & it.kernel.reach(awaited, met))


def test_done_words_come_last(it: Compiled) -> None:
    """I3: all blocks have read and written what they must when peers are told so.

    Fails without the block barrier before `arrive`, or the `syncwarp` behind it.
    """
    kernel = it.kernel
    arrived = kernel.find_kind("atomic acq_rel device")
    met = kernel.find_kind("barrier")
    moved = it.loads_16() | it.stores_16()
    assert not arrived & kernel.reach(moved, met)

    copying = [loop.body for loop in kernel.loops() if loop.body & moved]
    done = kernel.find_kind("store release system").difference(*copying)
    assert len(done) == it.receives
    assert done <= kernel.reach(arrived)
    assert not done & kernel.reach_from_start(met)
    assert not shown(it, (moved | arrived) & kernel.reach(done))
    if it.target == NVIDIA:
        # One lane learns that all blocks have arrived; the others go by it.
        behind = kernel.reach(arrived, kernel.find_kind("warp_barrier"))
        assert not shown(it, done & behind)


@only([NVIDIA, AMD], ["dispatch.bf16_shared"])
def test_own_tokens_are_read_behind_a_barrier(it: Compiled) -> None:
    """I4: what the sending warps put aside is there when others fetch it.

    Fails without the block barrier between.
    """
    fetched = it.loads_16().difference(
        *(loop.body for loop in it.send_loops() + it.receive_loops())
    )
    assert len(fetched) == it.in_flight
    (sending,) = it.send_loops()
    put_aside = sending.body & it.stores_16()
    assert fetched <= it.kernel.reach(put_aside)
    met = it.kernel.find_kind("barrier")
    assert not shown(it, fetched & it.kernel.reach(put_aside, met))


def test_payload_moves_by_16_bytes(it: Compiled) -> None:
    """As many accesses of 16 bytes as the code means, and no narrower ones.

    Fails if `load16` or `store16` has a smaller alignment: then it is four accesses
    in PTX (an AMD GPU has unaligned ones of 16 bytes).
    """
    per_step, shared = it.in_flight, it.has("shared")
    n_loads = n_stores = 0
    if it.is_dispatch and it.sends:
        # FP8 reads 32 bytes for 16 that it sends, and sends scales behind them.
        sent = it.encoded_in_flight if it.has("fp8") else per_step
        n_loads += sent * (1 + it.has("fp8"))
        n_stores += sent * (1 + it.has("fp8")) * (1 + shared)
    if it.is_dispatch and it.receives:
        n_loads += per_step * (1 + shared)
        n_stores += per_step * (1 + shared)
    if not it.is_dispatch and it.sends:
        n_loads += per_step
        n_stores += per_step
    if not it.is_dispatch and it.receives:
        n_loads += it.top_k + shared
        n_stores += 1
    if it.target == NVIDIA:
        assert (len(it.loads_16()), len(it.stores_16())) == (n_loads, n_stores)
        for loop in it.kernel.loops():
            for copying in loop.copying():
                narrow = copying.find(lambda op: op.is_plain and op.n_bytes != 16)
                assert not shown(it, narrow)
    else:
        # With 64 lanes a token takes a step or two, and no loop need be left.
        assert len(it.loads_16()) >= n_loads
        assert len(it.stores_16()) >= n_stores

    # Addresses of regions come out of a table, so nobody knows their space.
    narrow = it.kernel.find(
        lambda op: op.is_plain and op.space == "generic" and op.n_bytes != 16
    )
    has_scales = it.is_dispatch and it.receives and it.has("fp8")
    assert len(shown(it, narrow)) == has_scales
    assert all(it.kernel.ops[i].kind == "load" for i in narrow)


@only([NVIDIA], NAMES)
def test_only_tokens_are_read_as_constants(it: Compiled) -> None:
    """Nothing that a peer or another warp writes: that cache does not hear of it.

    Only PTX has such loads. Fails if `load16` says that what it reads is invariant.
    """
    tokens: set[int] = set()
    if it.is_dispatch and it.sends:
        (sending,) = it.send_loops()
        tokens = sending.body & it.loads_16()
    assert it.kernel.find(lambda op: op.is_read_only) == tokens


@only([NVIDIA], ["dispatch.bf16", "combine.bf16"])
def test_shared_memory_is_what_the_config_counts_with(it: Compiled) -> None:
    """So much for each pair and each rank: `MAX_GPU_PAIRS` of them fit."""
    sizes = re.findall(r"\.shared \.align \d+ \.b8 \S+\[(\d+)\];", it.text)
    n_bytes = sum(int(size) for size in sizes)
    # 256 pairs and 8 ranks, as tests/mojo/codegen.mojo has them.
    assert 0 < n_bytes <= 12 * 256 + 16 * 8 + 64
    assert 12 * MAX_GPU_PAIRS + 16 * MAX_RANKS + 64 <= 48 * 1024


def test_no_local_memory(it: Compiled) -> None:
    """No array that is indexed at run time, and no spilled registers but known ones.

    Fails if a `comptime for` over an array becomes a plain one.
    """
    local = it.kernel.find(lambda op: op.space == "local")
    if it.target == NVIDIA:
        assert not shown(it, local)
        assert ".local" not in it.text
        resources = nvidia_resources(it.cubin)
        # The assembler may spill a little to get by with half of the registers.
        is_choice = resources.n_registers * it.num_threads <= NVIDIA_REGISTERS // 2
        spilled = resources.stack_bytes
        assert spilled == it.spilled or (is_choice and spilled <= 16)
    else:
        resources = amd_resources(it.text)
        assert bool(local) == bool(resources["vgpr_spill_count"]) == bool(it.spilled)
        assert resources["private_segment_fixed_size"] == it.spilled


def test_block_is_resident(it: Compiled) -> None:
    """The registers of a multiprocessor suffice for a block of `NUM_THREADS`.

    Fails if a kernel's `MAX_THREADS_PER_BLOCK_METADATA` says otherwise.
    """
    has_bound = it.name != "clear.any"
    if it.target == NVIDIA:
        assert (f"\n.maxntid {it.num_threads}\n" in it.text) == has_bound
        n_registers = nvidia_resources(it.cubin).n_registers
        assert n_registers * it.num_threads <= NVIDIA_REGISTERS
    else:
        resources = amd_resources(it.text)
        assert resources["wavefront_size"] == 64
        if has_bound:
            assert resources["max_flat_workgroup_size"] == it.num_threads
        assert resources["vgpr_count"] <= AMD_REGISTERS_OF_TWO_WAVES


def test_the_reader_of_assembly_sees_orders() -> None:
    """What it says about single instructions; else all of the above says nothing."""

    def kinds(kernel: Kernel) -> list[str]:
        return [op.kind for op in kernel.ops if op.order]

    def amd(*lines: str) -> Kernel:
        return parse_amdgcn("\n".join(f"\t{line}" for line in (*lines, "s_endpgm")), 0)

    ptx = (
        "\n{\n@%p1 st.release.sys.b64 [%rd1], %rd2;\n$L: ld.volatile.b64 %rd1, [%rd2];"
    )
    ptx += "\n@!%p1 bra $L;\nst.relaxed.gpu.global.b64 [%rd1], %rd2;\nret;\n}\n"
    assert kinds(parse_ptx(ptx)) == [
        "store release system",
        "load volatile",
        "store relaxed device",
    ]
    (loop,) = parse_ptx(ptx).loops()
    assert (loop.entry, loop.body) == (1, {1, 2})

    store = "flat_store_dwordx2 v[0:1], v[2:3] sc0 sc1"
    load = "flat_load_dwordx2 v[0:1], v[2:3] sc0 sc1"
    wait, back, inv = "s_waitcnt vmcnt(0)", "buffer_wbl2 sc0 sc1", "buffer_inv sc0 sc1"
    other = "global_store_dword v[0:1], v2, off"
    assert kinds(amd(back, wait, store)) == ["store release system"]
    assert kinds(amd(load, wait, inv)) == ["load acquire system"]
    for weak in ([wait, back, store], [back, store], [back, wait, other, store]):
        assert kinds(amd(*weak)) == ["store relaxed system"]
    for weak in ([load, inv], [load, other, wait, inv], [load, wait, "buffer_inv sc1"]):
        assert kinds(amd(*weak)) == ["load relaxed system"]
    jumped = parse_amdgcn(f"\t{back}\n\t{wait}\n.LBB0_1:\n\t{store}\n\ts_endpgm", 0)
    assert kinds(jumped) == ["store relaxed system"]
