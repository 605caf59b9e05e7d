# SPDX-License-Identifier: Apache-2.0
"""The compiled GPU kernels that `test_codegen*.py` look at: what each one is."""

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from max_ep.cache import cache_dir, kept
from max_ep.extension import mojo_dir, run_mojo, sources_hash
from tests.children import ALL_CASES, MOJO_PROGRAMS
from tests.codegen.assembly import Kernel, parse_ptx

NVIDIA, AMD = "sm_90a", "gfx942"

N_PAIRS, N_RANKS = 256, 8
"""Sizes in the programs that compile the kernels."""

PROGRAMS = MOJO_PROGRAMS


def variants(program: str, how: str = "both|phase") -> list[str]:
    """Returns what a program compiles, by kernel and variant, and for AMD `both`. All
    that is compiled for `make test` stands in `main`.

    By rank: with `chunks` a rank may send so many tokens that they go in chunks;
    `oversubscribed`: ranks share a GPU; `sums`: combine returns sums, whose type is
    that on the wire; `wide`: ids are int64; `keeps`: rows may change between phases."""
    text = (PROGRAMS / program).read_text()
    if not ALL_CASES:
        text = text.partition("\ndef main()")[2]
    call = rf'    emit_(?:{how})\[.*?"(\w+)"[^"]*?\]\(\s*"(\w+)"\s*\)'
    return [".".join(names) for names in re.findall(call, text, re.DOTALL)]


PROTOCOLS = {"by_expert": "codegen.mojo", "by_rank": "codegen_by_rank.mojo"}
"""The program that compiles the kernels of each."""
VARIANTS = {protocol: variants(program) for protocol, program in PROTOCOLS.items()}
VARIANTS["by_expert"].append("set_up.any")
FOR_AMD = [*variants("codegen.mojo", "both"), "set_up.any"]


def mojo_constant(name: str, path: str = "max_ep/protocol/layout.mojo") -> float:
    text = (mojo_dir() / path).read_text()
    values = re.findall(rf"^ *comptime {name}(?:: \w+)? = (.*)$", text, re.MULTILINE)
    assert len(values) == 1, f"{path}: `comptime {name}` stands {len(values)} times"
    return float(re.sub(r"^(?:Float32|Int32)\((.*)\)$", r"\1", values[0]))


def counter_word(name: str) -> int:
    """Finds a word of the counters' header by its name in `counters.mojo`."""
    return int(mojo_constant(name, "max_ep/protocol/counters.mojo"))


@dataclass
class Tuning:
    """A `Tuning` of `few_rows.mojo`."""

    n_warps: int
    n_slices: int
    n_rows: int
    n_steps: int

    @property
    def of_block(self) -> int:
        return self.n_warps // self.n_slices * self.n_rows

    @property
    def n_threads(self) -> int:
        return 32 * self.n_warps


def tuning(name: str, file: str = "few_rows.mojo") -> Tuning:
    text = (mojo_dir() / "max_ep_experts" / file).read_text()
    (numbers,) = re.findall(
        rf"^comptime {name} = Tuning\(([\d, ]+), True\)", text, re.M
    )
    return Tuning(*map(int, numbers.split(",")))


@dataclass
class Compiled:
    """A kernel for NVIDIA, and what to expect of it."""

    name: str
    is_by_rank: bool
    text: str
    kernel: Kernel
    cubin: bytes

    def __post_init__(self) -> None:
        name, is_by_rank = self.name, self.is_by_rank
        is_set_up = name.startswith("set_up")
        self.is_dispatch = name.startswith("dispatch")
        # Whether it has the send phase, and the receive phase.
        self.sends = "_wait." not in name and not is_set_up
        self.receives = "_async." not in name and not is_set_up
        # Whether it publishes at its end what it has read.
        self.publishes_at_end = self.has("oversubscribed")
        # Whether it polls, a few times only, for the launch that sends next.
        self.records_readers = self.receives and not self.publishes_at_end
        # Whether what it sends has flags of its own, and what it receives.
        has_chunks = not is_by_rank or self.is_dispatch and self.has("chunks")
        self.receives_chunks = self.receives and has_chunks

    def has(self, word: str) -> bool:
        return word in self.name.partition(".")[2].split("_")

    def shown(self, places: set[int]) -> list[str]:
        return [self.kernel.ops[i].text for i in sorted(places)]


def compiled(program: str) -> Path:
    """Runs a program that compiles kernels, if none has been run for these sources;
    returns its folder, with what it `printed`."""
    sources = [PROGRAMS / name for name in (program, "emitting.mojo", "groups.mojo")]
    options = ["-g1"] if program == "emulated.mojo" else []  # lines of the source
    options += [] if ALL_CASES else ["-D", "FEW_CASES"]
    state = "".join([sources_hash(), *options, *(x.read_text() for x in sources)])
    name = hashlib.sha256(state.encode()).hexdigest()[:16]
    folder = cache_dir() / "codegen" / name

    def make(path: Path) -> None:
        said = run_mojo(
            "run", *options, "-I", ".", str(PROGRAMS / program), str(folder)
        )
        path.write_text(said)

    return kept(folder / "printed", make).parent


@functools.cache
def compile_kernels(protocol: str) -> dict[str, Compiled]:
    """Returns the kernels for NVIDIA of a protocol, by name."""
    kernels, is_by_rank = {}, protocol == "by_rank"
    for path in sorted(compiled(PROTOCOLS[protocol]).glob(f"{NVIDIA}.*.s")):
        name, text = path.stem.removeprefix(f"{NVIDIA}."), path.read_text()
        cubin = path.with_suffix(".cubin").read_bytes()
        kernels[name] = Compiled(name, is_by_rank, text, parse_ptx(text), cubin)
    return kernels


EVERY = [f"{protocol} {name}" for protocol, of in VARIANTS.items() for name in of]


def kernels(pattern: str = "", but: str = "$^") -> pytest.MarkDecorator:
    """Runs a test with the kernels whose name matches a pattern, but for others."""
    names = [n for n in EVERY if re.search(pattern, n) and not re.search(but, n)]
    assert names
    return pytest.mark.parametrize("it", names, indirect=True)
