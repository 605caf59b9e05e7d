# SPDX-License-Identifier: Apache-2.0
"""What the GPU kernels of `rank_slots` become for NVIDIA's H200; no GPU needed.

As tests/test_codegen.py does for `expert_slots`: what "`rank_slots` on GPUs" of
docs/protocol.md promises, as far as one can see it in the assembly. How many
accesses there are is the tuner's business, and not looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from assembly import Kernel, Loop, nvidia_resources, parse_ptx

from max_ep.extension import run_mojo
from max_ep.limits import MAX_GPU_PAIRS, MAX_RANKS

PROGRAM = Path(__file__).resolve().parent / "mojo" / "codegen_rank_slots.mojo"

# Those that the program compiles, by kernel and variant. With `parts` a rank may
# send so many tokens that they are not early; with `turns` ranks share a GPU; with
# `sent` peers have the tokens already; with `carried` tokens take choices along;
# with `beside` the waiting half may begin while the sending half runs; combine's type
# is that on the wire.
NAMES = """
dispatch_async.bf16 dispatch_async.fp8_reduced
dispatch_async.bf16_reduced_shared_parts dispatch_async.fp8_gather_sent_parts
send_tokens.bf16_gather_parts dispatch.bf16_reduced_gather_sent
dispatch_wait.bf16_padded_turns dispatch_wait.fp8_reduced
dispatch_wait.fp8_shared_parts_turns
dispatch.bf16 dispatch.fp8_reduced_padded dispatch.bf16_reduced_parts
dispatch.fp8_shared_parts dispatch.bf16_reduced_carried_parts
dispatch.bf16_reduced_many
combine_async.bf16 combine_async.f32
combine_wait.bf16_shared combine_wait.f32_turns
combine.bf16 combine.bf16_shared combine.f32
dispatch_async.bf16_reduced_parts_beside dispatch_wait.bf16_beside
dispatch_wait.fp8_reduced_shared_beside
combine_async.bf16_beside combine_wait.bf16_beside
""".split()

DISPATCHES = [name for name in NAMES if name.startswith("dispatch")]
"""Those that send or read entries and counts."""

SENDERS = [name for name in NAMES if "_wait." not in name]
RECEIVERS = [n for n in NAMES if "_async." not in n and "send_tokens" not in n]

# Waits that tell what they have read at their end: of ranks that share a GPU, and
# those that an un-reduced combine follows, which would not tell.
TELL_AT_END = [
    name
    for name in NAMES
    if name.endswith("_turns")
    or name.startswith("dispatch_wait.")
    and "_reduced" not in name
]

BESIDE = [name for name in NAMES if name.endswith("_beside")]
WAIT_BESIDE = [name for name in BESIDE if name in RECEIVERS]

N_REGISTERS = 128
"""Of a thread, so that a block of 512 has those of a multiprocessor."""

SPILLED = {"dispatch.fp8_shared_parts": 8}
"""Local memory of a thread, at most, since its registers do not suffice; bytes."""

_WORDS_OF_A_PHASE = ("sent", "received", "clear")
_OTHER_WORDS = "n_tokens_even n_tokens_odd combine_of blocks_done failure".split()

N_PAIRS, N_RANKS = 256, 8
"""Those of the program."""

IDS_BYTES = 16 * 1024
"""Ids of few choices, in shared memory."""


@dataclass
class Compiled:
    """A kernel, and what to expect of it."""

    name: str
    text: str
    kernel: Kernel
    cubin: bytes
    num_threads: int
    header: dict[str, int]
    """Words of the counters' header, which a warp's lanes hold."""

    def has(self, word: str) -> bool:
        """Tells whether the variant is of a kind."""
        return word in self.name.partition(".")[2].split("_")

    @property
    def is_dispatch(self) -> bool:
        """Whether it is one of the dispatch kernels."""
        return self.name in DISPATCHES

    @property
    def sends(self) -> bool:
        """Whether it has the sending half."""
        return self.name in SENDERS

    @property
    def receives(self) -> bool:
        """Whether it has the receiving half."""
        return self.name in RECEIVERS

    @property
    def tells_at_end(self) -> bool:
        """Whether it tells at its end what it has read."""
        return self.name in TELL_AT_END

    @property
    def waits_beside(self) -> bool:
        """Whether its sending half may still run."""
        return self.name in WAIT_BESIDE

    @property
    def sends_beside(self) -> bool:
        """Whether its waiting half may begin before it has ended."""
        return self.name in BESIDE and self.sends

    @property
    def looks_at_done_words(self) -> bool:
        """Whether it sends, or looks for the launch that sends next."""
        is_combine = not self.is_dispatch
        notes = not self.tells_at_end and (is_combine or self.has("reduced"))
        return self.sends or notes

    @property
    def notes_readers(self) -> bool:
        """Whether it looks, a few times only, for the launch that sends next."""
        is_one = not self.is_dispatch or self.has("reduced")
        return self.receives and not self.tells_at_end and is_one

    @property
    def sends_parts(self) -> bool:
        """Whether it may send tokens whose parts have flags."""
        return self.sends and self.has("parts")

    def puts(self) -> set[int]:
        """Returns where 16 bytes are stored that announce themselves."""
        return self.kernel.find(
            lambda op: op.kind == "store relaxed system" and op.n_bytes == 16
        )

    def looks(self) -> set[int]:
        """Returns where such 16 bytes are looked at."""
        return self.kernel.find(
            lambda op: op.kind == "load relaxed system" and ".b128" in op.text
        )

    def looks_at_counts(self) -> set[int]:
        """Returns where two neighbouring counts are looked at."""
        return self.kernel.find(
            lambda op: op.kind == "load relaxed system" and ".v2.b64" in op.text
        )

    def stores_16(self) -> set[int]:
        """Returns the ordinary stores of 16 bytes, but for those of `EMPTY`."""
        stores = self.kernel.find(lambda op: op.moves_16("store"))
        return stores - self.puts_back()

    def puts_back(self) -> set[int]:
        """Returns where `EMPTY` is stored."""
        return self.kernel.find(
            lambda op: op.what == "store" and op.text.endswith("{-1, -1, -1, -1}")
        )

    def moved(self) -> set[int]:
        """Returns all accesses of 16 bytes."""
        return self.kernel.find(lambda op: op.n_bytes == 16)

    def sets(self, register: str) -> set[int]:
        """Returns where a register is set."""
        setting = re.compile(rf"\S+\s+{register},")
        return self.kernel.find(lambda op: bool(setting.match(op.text)))

    def part_loops(self) -> list[Loop]:
        """Returns the loops that write parts of tokens and publish their flags."""
        return [
            loop
            for loop in self.kernel.loops()
            if loop.find_kind("store release system") and loop.body & self.stores_16()
        ]

    @property
    def receives_parts(self) -> bool:
        """Whether it may receive tokens whose parts have flags."""
        return self.receives and self.is_dispatch and self.has("parts")

    def receive_loops(self) -> list[Loop]:
        """Returns the loops that await what announces itself, and put `EMPTY` back."""
        return [loop for loop in self.kernel.loops() if loop.body & self.puts_back()]

    def first_looks(self) -> list[Loop]:
        """Returns the loops that look at it while numbers of tokens are awaited."""
        return [
            loop
            for loop in self.kernel.loops()
            if loop.body & self.looks() and not loop.body & self.puts_back()
        ]

    def part_receive_loop(self) -> Loop:
        """Returns that receive loop which awaits flags of parts."""
        (loop,) = (
            loop
            for loop in self.receive_loops()
            if loop.find_kind("load acquire system")
        )
        return loop

    def done_words(self) -> set[int]:
        """Returns where done words are published."""
        published = self.kernel.find_kind("store release system")
        return published.difference(*(loop.body for loop in self.part_loops()))

    def header_words(self) -> dict[str, int]:
        """Returns the registers that all lanes have a word of the header in."""
        shuffle = r"shfl\.sync\.idx\.b32\s+(%r\d+), %r\d+, (\d+), 31, -1"
        found = (re.fullmatch(shuffle, op.text) for op in self.kernel.ops)
        return {shuffled[1]: int(shuffled[2]) for shuffled in found if shuffled}

    def header_reads(self) -> set[int]:
        """Returns where the register is set that those words are handed out of."""
        words = map(str, sorted(self.header.values()))
        shuffle = rf"shfl\.sync\.idx\.b32\s+%r\d+, (%r\d+), ({'|'.join(words)}), 31, -1"
        found = (re.fullmatch(shuffle, op.text) for op in self.kernel.ops)
        (register,) = {shuffled[1] for shuffled in found if shuffled}
        return self.sets(register)

    def ends(self) -> set[int]:
        """Returns where a thread leaves the kernel."""
        return self.kernel.find(lambda op: bool(re.match(r"(ret|exit)\b", op.text)))

    def touches(self, *words: int) -> set[int]:
        """Returns where words of the header are accessed by their own addresses."""
        ends = [f"+{4 * word}]" for word in words]
        return self.kernel.find(
            lambda op: (
                op.space in ("global", "generic")
                and any(end in op.text for end in ends)
            )
        )

    def made_of(self, some: set[str]) -> set[str]:
        """Returns some registers, and those that are ever computed from them."""
        made: set[str] = set()
        more = set(some)
        while more - made:
            made |= more
            for op in self.kernel.ops:
                if operands_of(op.text) & made:
                    more |= registers(result_of(op.text))
        return made

    def go_by(self, some: set[str]) -> set[int]:
        """Returns the accesses, votes and branches that use some registers."""
        return self.kernel.find(
            lambda op: bool(
                registers(op.predicate) & some
                or (op.what or op.text.startswith("br"))
                and operands_of(op.text) & some
            )
        )

    def unclear(self) -> dict[str, bool]:
        """Returns the predicates that are so if the done words must be looked at.

        They compare a generation that was sent with the one that all ranks were
        seen to have read. A lane has each of the header's words.
        """
        register = r"(%r\d+)"
        word_of = self.header_words()
        values: dict[str, bool] = {}
        sent_and_clear = [
            {self.header[f"{phase}_sent"], self.header[f"{phase}_clear"]}
            for phase in ("dispatch", "combine")
        ]
        for op in self.kernel.ops:
            compare = rf"setp\.(eq|ne)\.\w+\s+(%p\d+), {register}, {register}"
            if found := re.fullmatch(compare, op.text):
                words = {word_of.get(found[3]), word_of.get(found[4])}
                if words in sent_and_clear:
                    values[found[2]] = found[1] == "ne"
        return values


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    folder = tmp_path_factory.mktemp("assembly")
    printed = run_mojo("run", "-I", ".", str(PROGRAM), str(folder))
    num_threads, *words = map(int, printed.split())
    names = [f"{x}_{y}" for x in ("dispatch", "combine") for y in _WORDS_OF_A_PHASE]
    names += _OTHER_WORDS
    header = dict(zip(names, words, strict=True))
    compiled = {}
    for path in sorted(folder.glob("*.s")):
        name = path.stem.removeprefix("sm_90a.")
        text = path.read_text()
        cubin = path.with_suffix(".cubin").read_bytes()
        compiled[name] = Compiled(
            name, text, parse_ptx(text), cubin, num_threads, header
        )
    return compiled


@pytest.fixture(params=NAMES)
def it(request: pytest.FixtureRequest, assembly: dict[str, Compiled]) -> Compiled:
    return assembly[request.param]


def only(names: list[str]) -> pytest.MarkDecorator:
    """Looks at some of the kernels."""
    return pytest.mark.parametrize("it", names, indirect=True)


def shown(it: Compiled, places: set[int]) -> list[str]:
    return [it.kernel.ops[i].text for i in sorted(places)]


def address_of(text: str) -> str:
    """Returns what an access has as its address: a register, maybe an offset."""
    return text[text.index("[") + 1 : text.index("]")]


def registers(text: str) -> set[str]:
    return set(re.findall(r"%(?:r|rd|p)\d+", text))


def result_of(text: str) -> str:
    """Returns what an operation sets: a register, or several; empty if nothing."""
    found = re.match(r"\S+\s+(%\w+(?:\|%\w+)?|\{[^}]*\}),", text)
    return found[1] if found else ""


def operands_of(text: str) -> set[str]:
    """Returns the registers that an operation uses."""
    return registers(text.replace(result_of(text), "", 1))


def test_all_are_looked_at(assembly: dict[str, Compiled]) -> None:
    assert set(assembly) == set(NAMES)
    for it in assembly.values():
        # What is never reached would pass any test of what comes before what.
        assert len(it.kernel.reach_from_start([])) == len(it.kernel.ops), it.name


@only([name for name in NAMES if name not in WAIT_BESIDE])
def test_nothing_is_read_before_the_launch_before_has_ended(it: Compiled) -> None:
    """Blocks may begin earlier: till then only the parameters are there.

    Fails if anything is loaded, or shared, before `await_launch_before`, or if a
    kernel does without it.
    """
    awaited = it.kernel.find_kind("launch_wait")
    assert len(awaited) == 1
    before = it.kernel.reach_from_start(awaited)
    early = {i for i in before if it.kernel.ops[i].space not in ("", "param")}
    assert not shown(it, early)
    assert not before & it.kernel.find(lambda op: bool(op.order))


def test_the_next_launch_may_begin(it: Compiled) -> None:
    """Every thread says so, once, before it does anything with memory.

    A half that sends beside the waiting one says it when all before itself has ended,
    on which the other builds; whatever else there is, at once. Fails if the two halves
    of `await_launch_before` change places, in either.
    """
    said = it.kernel.find_kind("launch_next")
    assert len(said) == 1
    awaited = it.kernel.find_kind("launch_wait")
    before = it.kernel.reach_from_start(said)
    if it.sends_beside:
        assert not said & it.kernel.reach_from_start(awaited)
    else:
        assert not awaited & before
    assert not it.ends() & before
    early = {i for i in before if it.kernel.ops[i].space not in ("", "param")}
    assert not shown(it, early)


@only(WAIT_BESIDE)
def test_what_was_before_both_halves_is_acquired(it: Compiled) -> None:
    """Every thread reads the header so before it touches other memory.

    The cache of its multiprocessor may hold what stood there before the kernels that
    came before the sending half: the acquire empties it. Fails if the header is read
    by `header_word`, and if anything is loaded or stored before it.
    """
    acquired = it.header_reads()
    assert len(acquired) == 1
    assert acquired <= it.kernel.find_kind("load acquire device")
    assert not any(it.kernel.ops[i].predicate for i in acquired)
    before = it.kernel.reach_from_start(acquired)
    early = {i for i in before if it.kernel.ops[i].space not in ("", "param", "shared")}
    assert not shown(it, early)
    assert not it.ends() & before


@only(WAIT_BESIDE)
def test_ends_after_the_sending_half(it: Compiled) -> None:
    """Who comes next hears of the end of this kernel only: it must be that of both.

    Until then it does not wait for it: it may have to receive, so that other ranks'
    sending halves end. Fails if it leaves on some way without
    `await_kernels_before`, also where it may not go, or has that before its work.
    """
    kernel = it.kernel
    awaited = kernel.find_kind("launch_wait")
    assert it.ends()
    assert not it.ends() & kernel.reach_from_start(awaited)
    of_peers = kernel.find_kind("load relaxed system", "load acquire system")
    assert not shown(it, (it.moved() | of_peers) & kernel.reach(awaited))


@only([name for name in WAIT_BESIDE if name in TELL_AT_END])
def test_blocks_that_have_read_are_counted_after_the_sending_half(
    it: Compiled,
) -> None:
    """They count in the whole word, of which the sending half has used a half.

    Fails if `is_last_block` comes before `await_kernels_before`.
    """
    awaited = it.kernel.find_kind("launch_wait")
    early = it.kernel.reach_from_start(awaited)
    counted = it.touches(it.header["blocks_done"])
    assert it.kernel.find_kind("atomic acq_rel device") < counted
    assert not shown(it, (counted | it.done_words()) & early)


@only([name for name in BESIDE if name not in TELL_AT_END])
def test_halves_count_their_blocks_apart(it: Compiled) -> None:
    """Each has half of a word, finds its last block by it, and leaves 0 there.

    The other half of the word may hold any number, and keeps it. Fails if a launch
    counts by `arrive`, or in the other half, if its last block stores 0, and if it
    takes away another number than has come.
    """
    kernel = it.kernel
    (arrived,) = kernel.find_kind("atomic acq_rel device")
    (taken,) = it.touches(it.header["blocks_done"]) - {arrived}
    assert taken in kernel.reach([arrived])
    assert taken not in kernel.reach_from_start({arrived})
    assert kernel.ops[taken].kind == "atomic relaxed device"
    assert all(".add." in kernel.ops[i].text for i in (arrived, taken))

    of_this, of_other = (1 << 16, 1) if it.receives else (1, 1 << 16)
    assert kernel.ops[arrived].text.endswith(f", {of_this}")
    found = result_of(kernel.ops[arrived].text)
    n_taken = kernel.ops[taken].text.rpartition(", ")[2]
    n_blocks = {
        result_of(op.text) for op in kernel.ops if op.text.endswith(", %nctaid.x")
    }
    (leaves,) = (op.predicate for op in kernel.ops[arrived:taken] if op.predicate)
    for n in (1, 66):
        known = dict.fromkeys(n_blocks, n)
        for other in (0, 5):
            for n_before in range(n):
                known[found] = n_before * of_this + other * of_other
                is_last = kernel.value(leaves.lstrip("@!"), known) == ("!" in leaves)
                assert is_last == (n_before == n - 1)
            left = known[found] + of_this + kernel.value(n_taken, known)
            assert left & 0xFFFF_FFFF == other * of_other


@only(BESIDE)
def test_nothing_depends_on_what_the_other_half_notes(it: Compiled) -> None:
    """It may have noted that or not: only failure records may say what was found.

    Fails if a wait goes by the generation that was sent, by the number of tokens of
    this dispatch, or by what the last `combine_async` has answered; and if a sending
    half goes by whether ranks have read what the other direction has sent.
    """
    noted = {
        "dispatch_async": ["combine_clear"],
        "dispatch_wait": ["dispatch_sent", "n_tokens_even", "n_tokens_odd"],
        "combine_async": ["dispatch_clear"],
        "combine_wait": ["combine_sent", "combine_of"],
    }[it.name.partition(".")[0]]
    words = {it.header[word] for word in noted}
    handed_out = {r for r, word in it.header_words().items() if word in words}
    assert len(handed_out) == len(words)
    unsure = it.made_of(handed_out)
    # The code says that there is a record; the words behind it, what was found.
    code = it.header["failure"]
    told = it.touches(*range(code + 1, code + 8)) & it.kernel.find_kind("store")
    told -= {i for i in told if registers(address_of(it.kernel.ops[i].text)) & unsure}
    assert not shown(it, it.go_by(unsure) - told)
    # Nor does it read such a word by itself, but to wait till it has moved.
    read = it.touches(*words) - it.kernel.find_kind("store")
    assert not shown(it, read - it.kernel.find_kind("load acquire device"))


@only([name for name in BESIDE if name in SENDERS])
def test_the_sending_half_tells_when_all_have_read(it: Compiled) -> None:
    """The word that it releases then, nothing else of it writes.

    Fails if it notes what it sends by an ordinary store, and if that is not its last
    block to begin.
    """
    sent = it.header["dispatch_sent" if it.is_dispatch else "combine_sent"]
    (released,) = it.kernel.find_kind("store release device")
    assert it.touches(sent) == {released}
    (arrived,) = it.kernel.find_kind("atomic acq_rel device")
    taken = it.touches(it.header["blocks_done"]) - {arrived}
    assert released not in it.kernel.reach_knowing({}, taken)


@only([name for name in WAIT_BESIDE if name not in TELL_AT_END])
def test_the_sending_half_has_read_what_the_waiting_half_moves(it: Compiled) -> None:
    """I3: it tells peers what was read by a word that the waiting half moves.

    So that waits till this exchange is noted as sent, in one thread of all. Fails
    without `await_sending_half`, if that looks at another word or for another
    generation, or is relaxed, and if the word moves even though it has given up.
    """
    kernel = it.kernel
    phase = "dispatch" if it.is_dispatch else "combine"
    sent, received = (it.header[f"{phase}_{x}"] for x in ("sent", "received"))
    looks = kernel.find_kind("load acquire device") - it.header_reads()
    assert looks and looks == it.touches(sent)
    number = {r: 100 for r, word in it.header_words().items() if word == received}
    not_yet = {}
    for look in looks:
        found = result_of(kernel.ops[look].text)
        assert len(it.sets(found)) == 1
        (compared,) = (
            op
            for op in kernel.ops
            if op.text.startswith("setp.") and found in operands_of(op.text)
        )
        held = {
            x: kernel.value(result_of(compared.text), {**number, found: x})
            for x in (100, 101, 102)
        }
        assert held[100] == held[102] != held[101] and None not in held.values()
        not_yet[result_of(compared.text)] = bool(held[100])
    moved = it.touches(received)
    assert moved and moved <= kernel.find_kind("store")
    assert not shown(it, moved & kernel.reach_knowing(not_yet))
    # The other threads do not wait, and what has come does not.
    (arrived,) = kernel.find_kind("atomic acq_rel device")
    taken = it.touches(it.header["blocks_done"]) - {arrived}
    waits = it.go_by(it.made_of({result_of(kernel.ops[i].text) for i in looks}))
    assert not shown(it, (looks | waits) & kernel.reach_from_start(taken))


@only([n for n in WAIT_BESIDE if n.startswith("dispatch") and "_shared" in n])
def test_own_number_of_tokens_is_awaited(it: Compiled) -> None:
    """Rows of the shared expert come first: others are laid out behind them.

    Their number, too, is what came from this rank. Fails if index warps do not wait
    till numbers are there, or read it before that.
    """
    arrived = it.kernel.find_kind("atomic release block")
    published = it.kernel.find_kind("store release block")
    (ready,) = (i for i in published if not arrived & it.kernel.reach([i]))
    word = address_of(it.kernel.ops[ready].text)
    awaited = {
        i
        for i in it.kernel.find_kind("load acquire block")
        if address_of(it.kernel.ops[i].text) == word
    }
    before = it.kernel.reach_from_start(awaited)
    assert arrived and not arrived & before
    # Till then a warp knows, of shared words, whether the launch may go.
    known = it.kernel.find(
        lambda op: op.what == "load" and op.space == "shared" and op.n_bytes == 4
    )
    assert len(known & before) == 1


def test_system_scope(it: Compiled) -> None:
    """Which accesses there are between ranks, and of which sizes.

    Fails if `publish` or `peek` is relaxed, if `put_16` or `peek_16` becomes two
    accesses or four, or stronger, and if entries or numbers are published by
    `publish`.
    """
    kinds = {(op.kind, op.n_bytes) for op in it.kernel.ops if op.scope == "system"}
    expected = set()
    if it.sends or it.tells_at_end:
        expected.add(("store release system", 8))  # Done words; flags of parts.
    if it.looks_at_done_words:
        expected.add(("load acquire system", 8))
    if it.sends:
        expected.add(("store relaxed system", 16))  # What is early.
    if it.sends and it.is_dispatch:
        expected.add(("store relaxed system", 8))  # Counts and numbers.
    if it.receives:
        expected.add(("load relaxed system", 16))
    if it.receives and it.is_dispatch:
        expected.add(("load relaxed system", 8))  # Numbers of tokens.
        expected.add(("load relaxed system", 16))  # Two counts, or what is early.
    if it.receives_parts:
        expected.add(("load acquire system", 8))  # Their flags.
    assert kinds == expected
    assert not it.kernel.find(
        lambda op: op.what == "fence" or op.order in ("volatile", "sc")
    )


def test_every_wait_looks_at_the_clock(it: Compiled) -> None:
    """Who waits for a rank that has died finds out, whatever it waits for.

    Fails if a loop that waits for a peer, or for `send_tokens`, does without its
    deadline. `note_readers` looks a few times, and needs none.
    """
    looks = it.kernel.find_kind(
        "load acquire system", "load relaxed system", "load acquire device"
    )
    clock = it.kernel.find(lambda op: "%globaltimer" in op.text)
    first_looks = [loop.body for loop in it.first_looks()]
    timeless = [
        loop
        for loop in it.kernel.smallest_loops(looks)
        if not loop.body & clock and not any(loop.body <= x for x in first_looks)
    ]
    assert len(timeless) == it.notes_readers
    for loop in timeless:
        assert loop.body & looks == loop.find_kind("load acquire system")


@only([name for name in NAMES if name in DISPATCHES and name in RECEIVERS])
def test_first_looks_end_with_the_wait_for_numbers(it: Compiled) -> None:
    """They look while the block waits for one of its warps, which looks at the clock.

    Fails if the loop ends by what is looked at: of tokens that are guessed, and need
    not come. If lanes may end it one by one, since they vote in it. And if it leaves
    anything in the region.
    """
    (loop,) = it.first_looks()
    (awaited,) = loop.find_kind("load acquire block")
    assert awaited in loop.kernel.reach([loop.entry], (), loop.body) | {loop.entry}
    word = result_of(it.kernel.ops[awaited].text)
    votes = loop.find(
        lambda op: (
            op.text.startswith("vote.sync")
            and bool(operands_of(op.text) & it.made_of({word}))
        )
    )
    said = it.made_of({result_of(it.kernel.ops[i].text) for i in votes})
    for i in loop.body:
        for after in it.kernel.ops[i].successors:
            if after not in loop.body:
                leaves = it.kernel.ops[i].predicate.lstrip("@!")
                assert leaves in said, it.kernel.ops[i].text
    stores = loop.find(lambda op: op.what in ("store", "atomic"))
    assert not shown(it, stores)


def test_readers_have_reached_what_was_sent(it: Compiled) -> None:
    """I3: a done word says dispatch in its upper half, and combine in its lower one.

    Each is compared with the generation of that direction that this rank has sent
    last; only the flags of parts are compared otherwise. Fails if a launch goes by
    the other half, or is content with a generation before.
    """
    words = it.header_words()
    n_parts = 0
    for place in it.kernel.find_kind("load acquire system"):
        half, compared, sign = (op.text for op in it.kernel.ops[place + 1 : place + 4])
        if compared.startswith("setp."):
            n_parts += 1
            continue
        found = re.fullmatch(r"sub\.s32\s+(%r\d+), %r\d+, (%r\d+)", compared)
        assert found, compared
        phase = "dispatch" if half.startswith("mov.b64 \t{_,") else "combine"
        assert words[found[2]] == it.header[f"{phase}_sent"], phase
        reached = rf"setp\.(gt|lt)\.s32\s+%p\d+, {found[1]}, (-1|0)"
        said = re.fullmatch(reached, sign)
        assert said and said.groups() in [("gt", "-1"), ("lt", "0")], sign
    assert n_parts == 2 * it.receives_parts


def test_generations_that_are_published(it: Compiled) -> None:
    """A done word is of what was read, a part's flag of what is sent, as numbers.

    Where ranks share a GPU, a wait tells at its end, and of itself. Fails if a launch
    tells of what was sent, or of itself at its begin, and if a flag is of the
    generation before.
    """
    number = {word: 100 + word for word in it.header.values()}
    known = {r: number[w] for r, w in it.header_words().items() if w in number}
    read = [number[it.header[f"{x}_received"]] for x in ("dispatch", "combine")]
    read[not it.is_dispatch] += it.tells_at_end
    sent = number[it.header["dispatch_sent"]] + 1
    done = it.done_words()
    for place in it.kernel.find_kind("store release system"):
        register = it.kernel.ops[place].text.rpartition(", ")[2]
        wanted = read[0] << 32 | read[1] if place in done else sent << 32
        assert it.kernel.value(register, known) == wanted, shown(it, {place})


def test_readers_are_noted_when_all_have_read(it: Compiled) -> None:
    """What the next launch that sends goes by: each lane looks at some words only.

    Fails if `note_readers` goes by those of one lane, or notes another generation
    than the one that was sent, or the other direction's.
    """
    phase = "combine" if it.is_dispatch else "dispatch"
    word = it.header[f"{phase}_clear"]
    noted = it.kernel.find(
        lambda op: op.kind == "store" and op.n_bytes == 4 and f"+{4 * word}]" in op.text
    )
    assert len(noted) == it.notes_readers
    seen = it.kernel.find_kind("load acquire system")
    assert not noted & it.kernel.reach(seen, it.kernel.find_kind("vote"))
    for text in shown(it, noted):
        register = text.rpartition(", ")[2]
        assert it.header_words()[register] == it.header[f"{phase}_sent"]


def test_released_is_what_has_something_before_it(it: Compiled) -> None:
    """Done words, once; flags of parts, where there are any.

    Fails if early tokens, or partial sums, get flags, if done words are published
    at both ends of a launch, and if a wait publishes them though the next launch
    of its rank will.
    """
    assert len(it.done_words()) == (it.sends or it.tells_at_end)
    assert len(it.part_loops()) == it.sends_parts


def test_device_scope(it: Compiled) -> None:
    """Blocks meet in one `arrive`; what else they share is the failure record.

    `send_tokens` tells the dispatch that runs beside it, and a sending half the waiting
    one. Fails if `arrive` is relaxed, if a fused kernel counts its blocks at the end,
    too, if `leave_word` or `look_at` is relaxed, and if a dispatch does not look, or
    looks in vain.
    """
    found = Counter(op.kind for op in it.kernel.ops if op.scope == "device")
    assert found.pop("atomic acq_rel device") == 1
    tells = "send_tokens" in it.name or it.sends_beside
    assert found.pop("store release device", 0) == tells
    looks = "_sent" in it.name or it.waits_beside
    assert bool(found.pop("load acquire device", 0)) == looks
    assert set(found) == {"load relaxed device", "atomic relaxed device"}


@only([name for name in NAMES if name in DISPATCHES and name in RECEIVERS])
def test_rows_are_used_after_they_are_counted(it: Compiled) -> None:
    """Count warps hand the rows on; no warp fills a row before it has seen that.

    Fails without `_are_counted`, if `block_peek` or `block_arrive` is relaxed, and
    without the `syncwarp` before a warp arrives.
    """
    for loop in it.receive_loops():
        counted = loop.find_kind("load acquire block")
        filled = loop.body & it.stores_16()
        assert filled
        assert not shown(it, filled & it.kernel.reach_knowing({}, counted))

    # When it has its rows; where several warps count, first when it has its sum.
    arrived = it.kernel.find_kind("atomic release block")
    last = {i for i in arrived if not arrived & it.kernel.reach([i])}
    assert last
    assert (last < arrived) == it.has("many")
    noted = it.kernel.find(lambda op: op.kind == "store" and op.space == "shared")
    met = it.kernel.find_kind("warp_barrier", "barrier")
    for arrivals in filter(None, (arrived - last, last)):
        before = noted - it.kernel.reach(arrivals)
        assert before and not arrivals & it.kernel.reach(before, met)


@only([name for name in NAMES if name in DISPATCHES and name in RECEIVERS])
def test_numbers_of_tokens_are_handed_on(it: Compiled) -> None:
    """They are there before the block hears of it, and are read behind that.

    Fails without the `syncwarp` before they are published, if that is relaxed, and
    without the wait for it.
    """
    arrived = it.kernel.find_kind("atomic release block")
    published = it.kernel.find_kind("store release block")
    # The others are published by warps that arrive later.
    (ready,) = (i for i in published if not arrived & it.kernel.reach([i]))
    noted = it.kernel.find(lambda op: op.kind == "store" and op.space == "shared")
    met = it.kernel.find_kind("warp_barrier", "barrier")
    assert ready in it.kernel.reach(noted)
    assert ready not in it.kernel.reach(noted, met)

    # Whatever way a warp comes, it receives nothing before.
    loops = it.receive_loops()
    assert len(loops) == 1 + it.receives_parts
    awaited = it.kernel.find_kind("load acquire block")
    awaited = awaited.difference(*(loop.body for loop in loops))
    ready = {i for i in awaited if not arrived & it.kernel.reach([i])}
    for loop in loops:
        assert loop.entry not in it.kernel.reach_from_start(ready)


@only([n for n in NAMES if n in DISPATCHES and n in SENDERS and "_parts" in n])
def test_many_choices_are_counted_before_they_are_entered(it: Compiled) -> None:
    """Index warps meet between counting, reading what was counted, and counting on.

    Fails without one of the barriers of `_index_by_blocks` but the first and the
    last, which start the count and end it.
    """
    met = it.kernel.find_kind("some_barrier")
    assert all(it.kernel.ops[i].text.endswith("1, 256") for i in met)
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


@only(SENDERS)
def test_what_is_early_is_its_own_flag(it: Compiled) -> None:
    """Nothing else is stored in a peer's region, and nothing is published after it.

    Addresses of regions come out of a table, so nobody knows their space.
    Fails if an early token or a partial sum goes by `store16`.
    """
    for loop in it.kernel.loops():
        if not loop.body & it.puts():
            continue
        assert not loop.find_kind("store release system")
        assert not shown(it, loop.body & it.stores_16())
    plain = it.kernel.find(
        lambda op: op.is_plain and op.what == "store" and op.space == "generic"
    )
    in_parts = set().union(*(loop.body for loop in it.part_loops()))
    assert not shown(it, plain - it.puts_back() - in_parts)


@only([n for n in SENDERS if n != "dispatch.bf16_reduced_gather_sent"])
def test_data_that_looks_empty_is_replaced(it: Compiled) -> None:
    """Fails without `without_empty`: a receiver would wait for what has come."""
    stand_in = re.compile(r"selp\.b32\s+%r\d+, 2147483647, ")
    assert it.kernel.find(lambda op: bool(stand_in.match(op.text)))


def test_empty_is_put_back_after_it_was_read(it: Compiled) -> None:
    """Ordinary stores, each behind the loads of the same 16 bytes.

    Fails if `EMPTY` is stored before the bytes are looked at, or by `put_16`, or
    not at all.
    """
    places = it.puts_back()
    assert bool(places) == it.receives
    looks = it.looks()
    for place in places:
        op = it.kernel.ops[place]
        assert op.moves_16("store"), op.text
        address = address_of(op.text)
        of_these = {i for i in looks if address_of(it.kernel.ops[i].text) == address}
        assert of_these, op.text
        # An address is a register that is set anew where the next one is made.
        made = it.sets(address.partition("+")[0])
        assert made and place not in it.kernel.reach_from_start(made)
        assert place in it.kernel.reach(of_these, made)
        assert not of_these & it.kernel.reach([place], made), op.text


def test_all_that_is_awaited_is_put_back(it: Compiled) -> None:
    """Each of the 16 bytes that a lane has under way becomes `EMPTY` again.

    Entries and carried choices say their generation, and stay. Fails if one of
    several loads is left out: the next use of that place would take the old bytes for
    new.
    """
    clock = it.kernel.find(lambda op: "%globaltimer" in op.text)
    awaited = it.looks() & set().union(
        *(
            loop.body
            for loop in it.kernel.smallest_loops(it.looks())
            if loop.body & clock and not loop.body & it.puts_back()
        )
    )
    has_entries = it.is_dispatch and it.receives and it.has("reduced")
    stay = len(it.receive_loops()) * (has_entries + it.has("carried"))
    assert len(awaited) == len(it.puts_back()) + stay, shown(it, awaited)


@only([name for name in SENDERS if "_parts" in name])
def test_part_is_written_before_its_flag(it: Compiled) -> None:
    """I2, in a turn of the sending loop: no byte of a part behind its release.

    Fails if it is published first, and without the `syncwarp` between: the lanes
    that wrote it must meet those that publish it.
    """
    (loop,) = it.part_loops()
    written = loop.body & it.stores_16()
    released = loop.find_kind("store release system")
    assert released <= loop.reach_in_turn(written)
    assert not shown(it, loop.reach_in_turn(released) & written)
    met = it.kernel.find_kind("warp_barrier")
    assert not released & it.kernel.reach(written, met)


@only([n for n in NAMES if n in DISPATCHES and n in RECEIVERS and "_parts" in n])
def test_part_is_read_after_its_flag(it: Compiled) -> None:
    """I2, in a turn of the receiving loop: no byte of a part before its acquire.

    Fails if a part is loaded first, and if the flag is not awaited.
    """
    loop = it.part_receive_loop()
    read = loop.find(lambda op: op.moves_16("load"))
    awaited = loop.find_kind("load acquire system")
    assert awaited and read
    behind = read & loop.reach_in_turn(awaited)
    assert behind
    assert not shown(it, awaited & loop.reach_in_turn(behind))
    # Own tokens, which stand where they were given, may be under way before.
    assert bool(read - behind) == it.name.startswith("dispatch.bf16")


@only(SENDERS)
def test_peers_are_written_after_their_readers_are_done(it: Compiled) -> None:
    """I3: no way leads to a peer's region but past the vote on all done words.

    Unless the header says that all were there already: here it does not. Each lane
    awaits some of the words, so a warp barrier must carry what it has acquired.
    Fails if a half sends without `await_readers`, or that is without its
    `syncwarp`, or goes by the wrong words of the header.
    """
    kernel = it.kernel
    written = kernel.find_kind("store relaxed system")
    for loop in it.part_loops():
        written |= loop.body & it.stores_16()  # Their flags come after them.
    awaited = kernel.find_kind("load acquire system").difference(
        *(loop.body for loop in it.receive_loops())
    )
    votes = kernel.find_kind("vote")
    voted = {v for v in votes if {v} & kernel.reach(awaited, votes - {v})}
    assert voted and it.unclear()
    assert not shown(it, written & kernel.reach_knowing(it.unclear(), voted))
    met = kernel.find_kind("warp_barrier")
    assert not shown(it, written & kernel.reach(awaited, met))


@only([name for name in NAMES if name not in TELL_AT_END])
def test_done_words_tell_of_earlier_launches(it: Compiled) -> None:
    """A launch tells at its begin, if it sends, and counts its blocks there.

    By then the kernel before has ended, which nothing of this one may delay.
    Fails if the words are published, or blocks counted, after anything was sent or
    received, and without the barrier between reading the header and `arrive`. A
    token's first part is loaded before, from where it was given.
    """
    kernel = it.kernel
    moved = it.puts() | it.looks() | it.stores_16() | it.puts_back()
    assert not it.done_words() & kernel.reach(moved)
    arrived = kernel.find_kind("atomic acq_rel device")
    assert not arrived & kernel.reach(moved)
    assert not arrived & kernel.reach_from_start(kernel.find_kind("barrier"))


@only(TELL_AT_END)
def test_done_words_come_last(it: Compiled) -> None:
    """I3: all blocks have read, and put `EMPTY` back, when peers are told so.

    Fails without the block barrier before `arrive`, or if the words are published
    before it.
    """
    kernel = it.kernel
    arrived = kernel.find_kind("atomic acq_rel device")
    barriers = kernel.find_kind("barrier")
    assert not arrived & kernel.reach(it.moved(), barriers)
    done = it.done_words()
    assert done <= kernel.reach(arrived)
    # The first one is that of `start_launch`.
    met = {i for i in barriers if i in kernel.reach(barriers)}
    assert met and not done & kernel.reach_from_start(met)
    assert not shown(it, (it.moved() | arrived) & kernel.reach(done))


@only(TELL_AT_END)
def test_all_lanes_learn_that_blocks_have_arrived(it: Compiled) -> None:
    """I3: one lane arrives, others publish; a shuffle carries no memory order.

    `publish_done` of `expert_slots` has a `syncwarp` for it.
    """
    arrived = it.kernel.find_kind("atomic acq_rel device")
    behind = it.kernel.reach(arrived, it.kernel.find_kind("warp_barrier"))
    assert not shown(it, it.done_words() & behind)


def test_payload_moves_by_16_bytes(it: Compiled) -> None:
    """Nothing narrower in a region but words that are published.

    Fails if `load16` or `store16` has a smaller alignment.
    """
    narrow = it.kernel.find(
        lambda op: op.is_plain and op.space == "generic" and op.n_bytes != 16
    )
    assert not shown(it, narrow)


def test_nothing_is_read_as_a_constant(it: Compiled) -> None:
    """That cache hears of no other writer: not of peers, nor of the kernel before.

    With launches that overlap, even the tokens may be written after a block has
    begun. Fails if `load16`, or the load of the tokens, says that what it reads is
    invariant.
    """
    assert not shown(it, it.kernel.find(lambda op: op.is_read_only))


def test_shared_memory_suffices(it: Compiled) -> None:
    """4 bytes for each pair and 20 for each rank: `MAX_GPU_PAIRS` of them fit.

    Fails if a block keeps more for each pair, or too much besides.
    """
    sizes = re.findall(r"\.shared \.align \d+ \.b8 \S+\[(\d+)\];", it.text)
    n_bytes = sum(int(size) for size in sizes)
    # Two tables of addresses, and numbers of tokens.
    n_of_pairs = 4 if it.is_dispatch and it.receives else 0
    fixed = n_bytes - n_of_pairs * N_PAIRS - 16 * N_RANKS
    assert fixed >= 0
    # Many choices are counted, 4 bytes for each expert, in the room for few.
    counts_many = it.is_dispatch and it.sends and it.has("parts")
    more = max(0, 4 * (MAX_GPU_PAIRS + 288) - IDS_BYTES) if counts_many else 0
    assert n_of_pairs * MAX_GPU_PAIRS + 20 * MAX_RANKS + fixed + more <= 48 * 1024
    # All else of receiving is little; sending has its choices there.
    assert fixed <= (21 * 1024 if it.is_dispatch and it.sends else 256)


def test_no_local_memory(it: Compiled) -> None:
    """No array that is indexed at run time, and few spilled registers.

    Fails if a `comptime for` over an array becomes a plain one.
    """
    assert not shown(it, it.kernel.find(lambda op: op.space == "local"))
    assert ".local" not in it.text
    assert nvidia_resources(it.cubin).stack_bytes <= SPILLED.get(it.name, 0)


def test_block_is_resident(it: Compiled) -> None:
    """The registers of a multiprocessor suffice for a block of `NUM_THREADS`.

    Fails if a kernel's `MAX_THREADS_PER_BLOCK_METADATA` says otherwise.
    """
    assert it.num_threads * N_REGISTERS == 65536
    assert f"\n.maxntid {it.num_threads}\n" in it.text
    assert nvidia_resources(it.cubin).n_registers <= N_REGISTERS


def test_the_reader_of_assembly_sees_inline_assembly() -> None:
    """What it says about 128 bits, waits, and ways that predicates rule out."""
    put = "{ .reg .b128 word; mov.b128 word, {%rd1, %rd2};"
    put += " st.relaxed.sys.global.b128 [%rd3], word; }"
    look = "{ .reg .b128 word; ld.relaxed.sys.global.b128 word, [%rd1];"
    look += " mov.b128 {%rd2, %rd3}, word; }"
    kernel = parse_ptx(
        f"\n{{\ngriddepcontrol.wait;\n{look}\n$L: {put}\n@%p1 bra $L;\nret;\n}}\n"
    )
    assert [(op.kind, op.n_bytes) for op in kernel.ops if op.what] == [
        ("launch_wait", 0),
        ("load relaxed system", 16),
        ("store relaxed system", 16),
    ]
    (loop,) = kernel.loops()
    assert loop.find_kind("store relaxed system")
    # It is the first instruction, and nothing comes before it.
    assert not kernel.reach_from_start(kernel.find_kind("launch_wait"))

    # while True: if is_waiting: look; is_waiting = False; store
    turns = "\n{\nmov.pred %p1, -1;\n$L: not.pred %p2, %p1;\n@%p2 bra $S;\n"
    turns += "ld.acquire.sys.b64 %rd1, [%rd2];\nmov.pred %p1, 0;\n"
    turns += "$S: st.global.b64 [%rd3], %rd4;\nbra $L;\n}\n"
    kernel = parse_ptx(turns)
    looked = kernel.find_kind("load acquire system")
    stored = kernel.find_kind("store")
    assert stored <= kernel.reach_from_start(looked)
    assert not stored & kernel.reach_knowing({}, looked)
    assert stored <= kernel.reach_knowing({}, ())
    weak = parse_ptx(turns.replace("mov.pred %p1, -1", "setp.eq.b32 %p1, %r1, 0"))
    assert stored <= weak.reach_knowing({}, looked)
    assert not stored & weak.reach_knowing({"%p1": True}, looked)
