# SPDX-License-Identifier: Apache-2.0
"""The compiled GPU kernels that `test_codegen*.py` look at: what each one is."""

import hashlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from assembly import Kernel, parse_ptx

from max_ep.cache import cache_dir
from max_ep.extension import mojo_dir, run_mojo, sources_hash

NVIDIA, AMD = "sm_90a", "gfx942"

N_PAIRS, N_RANKS = 256, 8
"""Those of the programs that compile the kernels."""

PROGRAMS = Path(__file__).resolve().parent / "mojo"


def variants(program: str, how: str = "both|phase") -> list[str]:
    """Returns what a program compiles, by kernel and variant, and for AMD `both`.

    By rank: with `chunks` a rank may send so many tokens that they go in chunks;
    `oversubscribed`: ranks share a GPU; `sums`: combine returns sums, whose type is
    that on the wire; `wide`: ids are int64; `keeps`: rows may change between phases."""
    text = (PROGRAMS / program).read_text()
    call = rf'    emit_(?:{how})\[.*?"(\w+)"[^"]*?\]\(\s*"(\w+)"\s*\)'
    return [".".join(names) for names in re.findall(call, text, re.DOTALL)]


BY_EXPERT = [*variants("codegen.mojo"), "set_up.any"]
FOR_AMD = [*variants("codegen.mojo", "both"), "set_up.any"]
BY_RANK = variants("codegen_by_rank.mojo")


def mojo_constant(name: str, path: str = "max_ep/layout.mojo") -> float:
    text = (mojo_dir() / path).read_text()
    values = re.findall(rf"^ *comptime {name}(?:: \w+)? = (.*)$", text, re.MULTILINE)
    assert len(values) == 1, f"{path}: `comptime {name}` stands {len(values)} times"
    return float(re.sub(r"^(?:Float32|Int32)\((.*)\)$", r"\1", values[0]))


def counter_word(name: str) -> int:
    """Finds a word of the counters' header by its name in `counters.mojo`."""
    return int(mojo_constant(name, "max_ep/counters.mojo"))


@dataclass
class Compiled:
    """A kernel for NVIDIA, and what to expect of it."""

    name: str
    is_by_rank: bool
    text: str
    kernel: Kernel
    cubin: bytes

    def __post_init__(self) -> None:
        kernel, name, is_by_rank = self.kernel, self.name, self.is_by_rank
        find, is_set_up = kernel.find, name.startswith("set_up")
        self.is_dispatch = name.startswith("dispatch")
        self.phase = "dispatch" if self.is_dispatch else "combine"
        # Whether it has the send phase, and the receive phase.
        self.sends = "_wait." not in name and not is_set_up
        self.receives = "_async." not in name and not is_set_up
        # Whether it publishes at its end what it has read. By rank only waits of ranks
        # that share a GPU, and those of dispatch that a combine of rows follows: it
        # would not publish for them.
        is_last = name.startswith("dispatch_wait") and not self.has("sums")
        is_last = is_last or self.has("oversubscribed")
        self.publishes_at_end = is_last if is_by_rank else self.receives
        # Whether it polls, a few times only, for the launch that sends next.
        is_one = not self.is_dispatch or self.has("sums")
        self.records_readers = is_by_rank and self.receives and is_one and not is_last
        # Whether what it sends has flags of its own, and what it receives.
        self.sends_chunks = self.sends and (not is_by_rank or self.has("chunks"))
        has_chunks = not is_by_rank or self.is_dispatch and self.has("chunks")
        self.receives_chunks = self.receives and has_chunks

        # Where data is stored and loaded that is its own flag, and where `SENTINEL` is
        # put back; all other ordinary accesses of 16 bytes, and all accesses of them.
        relaxed = "store relaxed system"
        self.inline_stores = find(lambda op: op.kind == relaxed and op.n_bytes == 16)
        # To each rank of eight, after the words of 256 pairs and two of each rank.
        beat = f"+{8 * (256 + 2 * 8)}]"
        self.heartbeats = find(
            lambda op: op.kind == relaxed and op.n_bytes == 8 and beat in op.text
        )
        polled = "load relaxed system"
        self.inline_polls = find(lambda op: op.kind == polled and ".b128" in op.text)
        end = "{-1, -1, -1, -1}"
        self.sentinel_stores = find(
            lambda op: op.what == "store" and op.text.endswith(end)
        )
        self.loads_16 = find(lambda op: op.moves_16("load"))
        self.stores_16 = find(lambda op: op.moves_16("store")) - self.sentinel_stores
        self.moved = find(lambda op: op.n_bytes == 16)

        # Loops that write chunks or messages and publish their flags; loops that await
        # what was sent, and use it; where done words are published and loaded outside.
        release, acquire = "store release system", "load acquire system"
        loops = kernel.loops()
        flagged = [loop for loop in loops if loop.find_kind(release)]
        self.send_loops = [loop for loop in flagged if loop.body & self.stores_16]
        used = self.sentinel_stores if is_by_rank else self.loads_16
        self.receive_loops = [
            loop
            for loop in loops
            if loop.body & used and (is_by_rank or loop.find_kind(acquire))
        ]
        sent, received = (
            set().union(*(loop.body for loop in of))
            for of in (self.send_loops, self.receive_loops)
        )
        # Where a warp waits for others of its block: in a loop that writes nothing.
        acquired = kernel.find_kind("load acquire block")
        waits = [x.body for x in kernel.smallest_loops(acquired)]
        writes = find(lambda op: op.what in ("store", "atomic"))
        self.block_polls = acquired.intersection(
            set().union(*(wait for wait in waits if not wait & writes))
        )
        self.done_words = kernel.find_kind(release) - sent
        self.done_polls = kernel.find_kind(acquire) - received

    def has(self, word: str) -> bool:
        return word in self.name.partition(".")[2].split("_")

    def shown(self, places: set[int]) -> list[str]:
        return [self.kernel.ops[i].text for i in sorted(places)]

    def header_words(self) -> dict[str, int]:
        """Returns the registers that hold a word of the counters' header. By rank
        the lanes of a warp have a word each, and hand them out."""
        shuffle = r"shfl\.sync\.idx\.b32\s+(%r\d+), %r\d+, (\d+), 31, -1"
        load = r"ld\.global\.b32\s+(%r\d+), \[%rd\d+\+(\d+)\]"
        words = {}
        for op in self.kernel.ops:
            if found := re.fullmatch(shuffle if self.is_by_rank else load, op.text):
                words[found[1]] = int(found[2]) // (1 if self.is_by_rank else 4)
        return words

    def ends_at(self, place: int) -> set[int]:
        """Finds from which number on a wait for an arrival word ends."""
        (register,) = re.findall(r"%\w+", self.kernel.ops[place].result)
        runs = [self.kernel.run(place, {register: n}) for n in range(9)]
        of_each = [[run.get(x) for run in runs] for x in runs[0] if x.startswith("%p")]
        return {x.index(1 - x[0]) for x in of_each if set(x) == {0, 1}}

    def generations(self) -> dict[str, int]:
        """Gives each register with a word of the header a number of its own."""
        return {r: 1000 * word for r, word in self.header_words().items()}


def generation(word: str) -> int:
    """The number that `Compiled.generations` gives to a word."""
    return 1000 * counter_word(f"{word.upper()}")


def compiled(program: str) -> Path:
    """Runs a program that compiles kernels, if none has been run for these sources;
    returns its folder, with what it `printed`."""
    sources = [PROGRAMS / name for name in (program, "emitting.mojo", "groups.mojo")]
    state = sources_hash() + "".join(source.read_text() for source in sources)
    name = hashlib.sha256(state.encode()).hexdigest()[:16]
    folder = cache_dir() / "codegen" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(dir=folder.parent)
        said = run_mojo("run", "-I", ".", str(PROGRAMS / program), made)
        Path(made, "printed").write_text(said)
        try:
            os.rename(made, folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return folder


def compile_kernels(program: str, is_by_rank: bool) -> dict[str, Compiled]:
    """Returns the kernels for NVIDIA of a program, by name."""
    kernels = {}
    for path in sorted(compiled(program).glob(f"{NVIDIA}.*.s")):
        name, text = path.stem.removeprefix(f"{NVIDIA}."), path.read_text()
        cubin = path.with_suffix(".cubin").read_bytes()
        kernels[name] = Compiled(name, is_by_rank, text, parse_ptx(text), cubin)
    return kernels


EVERY = [f"by_expert {name}" for name in BY_EXPERT]
EVERY += [f"by_rank {name}" for name in BY_RANK]


def kernels(pattern: str = "", but: str = "$^") -> pytest.MarkDecorator:
    """Runs a test with the kernels whose name matches a pattern, but for others."""
    names = [n for n in EVERY if re.search(pattern, n) and not re.search(but, n)]
    assert names
    return pytest.mark.parametrize("it", names, indirect=True)
