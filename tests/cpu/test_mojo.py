# SPDX-License-Identifier: Apache-2.0
"""The Mojo side as a Mojo program sees it: launchers, and FP8 rounding."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from max_ep import extension
from max_ep.extension import extension_path, run_mojo
from tests.children import MOJO_PROGRAMS, compiled_mojo, slow
from tests.errors import raises

PROGRAMS = MOJO_PROGRAMS


def run(name: str) -> str:
    return run_mojo("run", "-I", ".", str(PROGRAMS / name)).strip()


def test_programs_without_a_gpu():
    assert run("checks.mojo").split() == 5 * ["OK"]


@slow
def test_launches_compile_for_a_gpu(tmp_path: Path) -> None:
    """By MAX's names, and with factors that a closure captures; a GPU runs it below."""
    source, target = str(PROGRAMS / "seeds_gpu.mojo"), str(tmp_path / "seeds_gpu.o")
    how = ("--emit", "object", "--target-accelerator", "sm_90a")
    run_mojo("build", *how, "-I", ".", source, "-o", target)
    # Nobody is reached through SHMEM, whose functions a GPU does not find.
    assert b".entry" in (ptx := Path(target).read_bytes()) and b"nvshmem" not in ptx


PREAMBLE = """
from max_ep.protocol.call import check_group
from max_ep.formats.block_numbers import BlockNumbers, BlockScale, checked_block
from max_ep.formats.unused_words import unused_scales, unused_values
from max_ep.protocol.layout import Addressing, Group
from max_ep.launch.op_config import check_entry

comptime TWO_OF_THREE = Group(
    n_experts=2,
    n_ranks=2,
    max_tokens_per_rank=1,
    top_k=1,
    hidden_size=8,
    addressing=Addressing.BY_RANK,
    n_mapped=3,
)

struct Numbers[n: Int, s: DType](BlockNumbers):
    comptime name = "some"
    comptime block = Self.n
    comptime value_type = DType.int8
    comptime scale_type = Self.s

    @staticmethod
    def known_scales(bits: UInt32) -> UInt32:
        return bits

    @staticmethod
    def scale_of(amax: UInt32) -> BlockScale:
        return {0, 0}
"""


WRONG = """
check_entry["mxfp8_e5m2", "scale_block=32"] | no format mxfp8_e5m2
check_entry["mxfp8_dynamic", "scale_block=32"] | no format mxfp8_dynamic
check_entry["mxfp8", "value_bits=8 scale_block=64 scale_bytes=1"] | mxfp8; 64; Mojo 32
check_entry["mxfp4", "hidden_size=128 top_k=1"] | mxfp4 has scales; scale_block
checked_block[Numbers[48, DType.uint8]] | block of 48; in [16, 32]
unused_values[Numbers[32, DType.uint8]] | int8; `known_values` of their own
unused_scales[Numbers[32, DType.uint8]] | known_scales must replace some byte
check_group[TWO_OF_THREE, "cpu", 1] | a node has more ranks
"""


def test_what_does_not_compile(tmp_path):
    """It would deliver other bytes, wait on a GPU for what has arrived, or read behind
    the table of addresses. One compilation finds all: each is a function of its own."""
    rows = [line.split(" | ") for line in WRONG.strip().splitlines()]
    functions = [
        f'@export\ndef case_{i}() abi("C"):\n    _ = {call}()\n'
        for i, (call, _) in enumerate(rows)
    ]
    program = tmp_path / "program.mojo"
    program.write_text("\n\n".join([PREAMBLE, *functions]))
    where = "-I", str(extension_path().parent), str(program), "-o", f"{program}.so"
    with pytest.raises(RuntimeError) as caught:
        run_mojo("build", "--emit", "shared-lib", *where)
    _, *errors = re.split(r"instantiation failed\ndef case_", str(caught.value))
    assert len(errors) == len(rows), caught.value
    for i, (call, words) in enumerate(rows):
        (error,) = (x for x in errors if x.startswith(f"{i}("))
        missing = [word for word in words.split("; ") if word not in error]
        assert not missing, f"{call}: the error does not say {missing}: {error}"


def test_a_compilation_that_takes_too_long_says_what_to_do(monkeypatch):
    monkeypatch.setenv("MAX_EP_COMPILE_TIMEOUT_S", "0.001")
    words = "--version took more than 0.001 s; set MAX_EP_COMPILE_TIMEOUT_S"
    with raises(RuntimeError, words):
        run_mojo("--version")


@pytest.mark.gpu(1)
def test_kernels_of_two_ranks_on_one_gpu():
    assert run("seeds_gpu.mojo") == "OK"


@pytest.fixture(scope="module")
def failure_text() -> Callable[..., str]:
    """Runs `failure_text.mojo`, as the initializer does."""
    return compiled_mojo("failure_text.mojo")


@pytest.mark.parametrize(
    "record, words",
    [
        # code, phase, missing rank, expert or row, wanted, found, two numbers
        ("0 0 0 0 0 0 0 0", []),
        ("1 0 1 99 7 0 4 2", ["token 4, k 2: expert 99"]),
        # Ids that no logical expert has, as a placement hands them on, and others.
        ("1 0 1 -2147483643 7 0 4 2", ["k 2: expert 5.", "[-1, num_logical_experts)"]),
        (
            "1 0 1 -2147483648 7 0 4 2",
            ["k 2: expert -2147483648. Ids must be in [-1, n"],
        ),
        ("1 0 1 -2 7 0 4 2", ["k 2: expert -2. Ids must be in [-1, n_experts)"]),
        ("2 2 1 5 7 0 4 9", ["row 5: token 4, k 9", "src_info"]),
        ("6 1 3 4 7 6 0 0", ["count for expert 4 of generation 7 from rank 3"]),
        ("8 2 3 -1 7 6 0 0", ["done word of generation 7 from rank 3"]),
        ("10 3 1 5 7 7 4 2", ["row of token 4, k 2", "expert 5: rank 1 has combined"]),
        ("11 3 1 -1 7 0 0 0", ["two dispatches", "combine before the second"]),
        ("12 1 1 -1 7 0 0 0", ["before its dispatch_async"]),
        ("9 3 -1 12 0 0 2 3", ["another EPConfig", "top_k: 2 there, 3 in the graph"]),
    ],
)
def test_failure_records_in_words(failure_text, record, words):
    """What `EPCommInitializer.check` says of a rank's record."""
    said = failure_text("1", "5000", *record.split())
    assert said.startswith("max_ep: ") == bool(words)
    phases = "dispatch_async dispatch_wait combine_async combine_wait".split()
    phase = phases[int(record.split()[1])]
    for word in words + [f"{phase} on rank 1: "] * bool(words):
        assert word in said


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a compiler that writes the package's name."""

    def precompile(how: str, package: str, *options: str) -> None:
        Path(options[-1]).write_text(package)

    monkeypatch.setenv("MAX_EP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(extension, "run_mojo", precompile)
    return tmp_path


def test_a_package_that_was_deleted_is_compiled_again(cache):
    """A program may run for weeks, and somebody tidy up meanwhile."""
    for _ in range(2):
        path = extension_path()
        assert path.is_relative_to(cache) and path.read_text() == "max_ep"
        shutil.rmtree(path.parent)


def test_a_package_is_there_when_it_is_whole(cache, monkeypatch):
    """Fails if the compiler writes where others look: one may be killed half-way."""

    def is_killed(*args: str) -> None:
        Path(args[-1]).write_text("half of")
        raise RuntimeError("killed")

    with monkeypatch.context() as killing:
        killing.setattr(extension, "run_mojo", is_killed)
        with pytest.raises(RuntimeError, match="killed"):
            extension_path()
    assert extension_path().read_text() == "max_ep"
    files = {p.name for p in cache.rglob("*") if p.is_file()}
    assert files == {"max_ep.mojoc", "max_ep.mojoc.sum", "max_ep.mojoc.lock"}


def test_a_cache_that_cannot_be(cache, monkeypatch):
    file = cache / "file"
    file.touch()
    monkeypatch.setenv("MAX_EP_CACHE_DIR", str(file / "cache"))
    said = "nothing can be kept in .*file/cache.*MAX_EP_CACHE_DIR"
    with pytest.raises(RuntimeError, match=said):
        extension_path()
    monkeypatch.setattr(extension, "run_mojo", lambda *args: "region_bytes 1")
    with pytest.raises(RuntimeError, match=said):
        extension.region_sizes("n_ranks=8", "never asked")
