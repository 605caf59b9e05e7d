# SPDX-License-Identifier: Apache-2.0
"""The command line is given what it cannot use: words drawn from a seed, and files that
are damaged, of another kind, or no files. Each ends in one sentence."""

import functools
import io
import os
import random
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from max_ep import cli, extension, install
from max_ep.balance import unbalanced
from max_ep.stats import Statistics
from max_ep.torch import library
from tests.children import ROOT, ran

N_CASES = 300
RUN_MOJO = extension.run_mojo

NUMBERS = "-1 0 1 3 4 7 33 65536 1e3 0x10 nan -inf abc '' 1_0 2.5 １ \udcff".split()
NUMBERS += [str(2**31), str(2**63), str(-(10**30)), str(10**30), "9" * 5000, " 4 "]
WORDS = [
    "",
    "-",
    "--",
    "-h",
    "fp8",
    "bfloat16",
    "mxfp4",
    "sums",
    "packed",
    "tiles",
    "\n",
]
WORDS += [
    "by_rank",
    "--ranks",
    "\udcff\udcfe",
    "é" * 100,
    "a" * 5000,
    "cpu",
    "sm_9",
    "*",
]

Files = dict[str, str]


def statistics(**other: object) -> dict[str, object]:
    ns = np.zeros((2, 4, 4), np.int64)
    rows = np.arange(2 * 4 * 3, dtype=np.int32).reshape(2, 4, 3)
    return dict(dispatch_ns=ns, combine_ns=ns, received=rows, n_experts=12) | other


def lie_about_size(path: Path) -> None:
    """Writes an archive whose members say that they are large."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, array in [*statistics().items(), ("phy2log", np.zeros((1, 2)))]:
            text = io.BytesIO()
            np.save(text, np.asarray(array))
            packed.writestr(f"{name}.npy", text.getvalue())
        for info in packed.filelist:
            info.file_size = 1 << 40


def lie_about_shape(path: Path) -> None:
    """Writes arrays of which only the headers are there."""
    header = {"descr": "<i8", "fortran_order": False, "shape": (1 << 40, 4, 4)}
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, header)
    with zipfile.ZipFile(path, "w") as packed:
        for name in [*statistics(), "phy2log", "n_ranks"]:
            packed.writestr(f"{name}.npy", text.getvalue())


WRONG_ARRAYS = dict(
    nan=dict(received=np.full((2, 4, 3), np.nan)),
    inf=dict(received=np.full((2, 4, 3), np.inf)),
    negative=dict(received=np.full((2, 4, 3), -1)),
    huge=dict(received=np.full((2, 4, 3), 2**62)),
    text=dict(received=np.full((2, 4, 3), "x")),
    objects=dict(received=np.full((2, 4, 3), None)),
    complex=dict(received=np.ones((2, 4, 3), complex)),
    dates=dict(received=np.zeros((2, 4, 3), "datetime64[s]")),
    flat=dict(received=np.ones(3, np.int32)),
    number=dict(received=np.int32(1)),
    none=dict(received=np.ones((0, 4, 3), np.int32)),
    no_ranks=dict(received=np.ones((2, 0, 3), int), n_experts=0),
    two_experts=dict(n_experts=np.array([12, 12])),
    half_an_expert=dict(n_experts=11.5),
    many_experts=dict(n_experts=2**62),
    waits=dict(dispatch_ns=np.zeros((2, 4, 3), int)),
    waits_nan=dict(combine_ns=np.full((2, 4, 4), np.nan)),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, Files]:
    """Files that commands read, and those that none may take, by what they are."""
    folder = tmp_path_factory.mktemp("files")
    good, bad = {}, {}
    Statistics(**statistics()).save(folder / "stats.npz")
    unbalanced(1, 12, 4).save(folder / "placement.npz")
    for name in ("stats", "placement"):
        good[name] = str(folder / f"{name}.npz")
        whole = Path(good[name]).read_bytes()
        for i in range(12):  # each with its last bytes missing
            end = len(whole) * i // 12
            path = folder / f"{name}-cut-{i}.npz"
            path.write_bytes(whole[:end])
            bad[f"{name} cut {i}"] = str(path)
    for name, other in WRONG_ARRAYS.items():
        path = folder / f"{name}.npz"
        np.savez(path, **statistics(**other))
        bad[name] = str(path)
    for name, (phy2log, n_ranks) in dict(
        float_ranks=(np.zeros((1, 4), int), 2.0),
        no_ranks_at_all=(np.zeros((1, 4), int), 0),
        expert_missing=(np.array([[0, 2]]), 1),
        expert_far=(np.array([[0, 2**40]]), 1),
        negative_expert=(np.array([[0, -1]]), 1),
    ).items():
        np.savez(folder / f"{name}.npz", phy2log=phy2log, n_ranks=n_ranks)
        bad[name] = str(folder / f"{name}.npz")
    for name, text in dict(
        empty=b"",
        garbage=random.Random(1).randbytes(4096),
        json=b'{"received": [1, 2]}',
        source=Path(__file__).read_bytes(),
        magic=b"PK\x03\x04" + bytes(100),
        numpy=b"\x93NUMPY\x01\x00" + bytes(100),
        pickle=b"\x80\x04K\x01.",
    ).items():
        bad[name] = str(folder / name)
        Path(bad[name]).write_bytes(text)
    np.save(folder / "array.npy", np.zeros(3))
    lie_about_size(folder / "size.npz")
    lie_about_shape(folder / "shape.npz")
    with zipfile.ZipFile(folder / "nothing.npz", "w"):
        pass
    os.mkfifo(folder / "pipe")
    for name in ("array.npy", "size.npz", "shape.npz", "nothing.npz", "pipe"):
        bad[name] = str(folder / name)
    for name in (
        "",
        "missing",
        "x" * 5000,
        "new\nline",
        "\udcff",
        "nul\0",
        "stats.npz/x",
    ):
        bad[f"named {name[:9]!r}"] = str(folder / name)
    bad |= dict(folder=str(folder), zero="/dev/zero", null="/dev/null", nowhere="")
    return good, bad


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, str]]:
    """Runs a command, which compiles nothing; returns its status and its error."""
    monkeypatch.setattr("max_ep.cli.build.build_all", lambda wanted: [])
    monkeypatch.setattr(library, "run_mojo", _mojo)
    monkeypatch.setattr(extension, "run_mojo", _mojo)

    def run(*words: str) -> tuple[int, str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
            stderr = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
            patch.setattr(sys, "stderr", stderr)
            try:
                status = cli.main(words)
            except SystemExit as ended:  # of argparse
                status = ended.code or 0
            stderr.seek(0)
            return status, stderr.read()

    return run


@functools.cache
def _mojo(*words: str) -> str:
    return RUN_MOJO(*words)


def drawn_words(draw: random.Random, good: Files, bad: Files, out: Path) -> list[str]:
    """Draws a command: half of its options are right."""

    def number(right: int) -> str:
        return str(right) if draw.random() < 0.6 else draw.choice(NUMBERS)

    def word(*right: str) -> str:
        return draw.choice(right) if draw.random() < 0.6 else draw.choice(WORDS)

    def options(**of: Callable[[], str]) -> list[str]:
        chosen = [name for name in of if draw.random() < 0.5]
        return [x for n in chosen for x in (f"--{n.replace('_', '-')}", of[n]())]

    def file(name: str) -> str:
        return good[name] if draw.random() < 0.6 else draw.choice([*bad.values()])

    def picture() -> str:
        ends = ("x.png", "x.doc", "x", "", "no/folder.png", "y" * 300, "\udcff.png")
        return draw.choice(["", "/dev/full", *(str(out / end) for end in ends)])

    sizes = dict(ranks=4, experts=8, top_k=2, hidden=256, tokens=8)
    if draw.random() < 0.3:
        sizes.pop(draw.choice(list(sizes)))
    given = [
        x
        for n, right in sizes.items()
        for x in (f"--{n.replace('_', '-')}", number(right))
    ]
    formats = lambda: word("bfloat16", "fp8", "float32")  # noqa: E731
    match command := draw.choice("plan stats balance build who doctor demo".split()):
        case "plan":
            of = dict(dispatch=formats, combine=formats, partial=formats)
            of |= dict(layout=lambda: word("packed"), protocol=lambda: word("by_rank"))
            of |= dict(combine_mode=lambda: word("sums", "rows"))
            words = given + options(**of)
        case "build":
            words = ["--torch", word("cpu"), *given, *options(dispatch=formats)]
        case "stats":
            words = [file("stats"), *options(plot=picture)]
        case "balance":
            n_files = draw.randint(0, 3)
            of = dict(replicas=lambda: number(4), current=lambda: file("placement"))
            of |= dict(top_k=lambda: number(2), hosts=lambda: number(1))
            of |= dict(max_replicas=lambda: number(2), out=picture, plot=picture)
            words = [file("stats") for _ in range(n_files)] + options(**of)
        case "who":
            words = [word("1", str(os.getpid()), "-7", "no such group", str(2**70))]
        case _:
            words = [draw.choice(WORDS)]
    if draw.random() < 0.1:
        words.insert(draw.randrange(len(words) + 1), draw.choice(WORDS))
    return [command, *words]


def complaint(words: list[str], status: int, said: str) -> str:
    """Returns what is wrong with the end of a command."""
    lines = said.splitlines()
    if status == 0:
        return ""
    if status not in (1, 2):
        return f"ended with {status}"
    if "Traceback" in said or "Error:" in said.replace("error:", ""):
        return "shows an exception"
    if status == 1 and not said.startswith(f"max-ep {words[0]}: "):
        return "does not begin with the command"
    if not lines or (status == 1 and len(said.replace("new\nline", "")) > 6000):
        return "says nothing, or too much"
    return ""


@pytest.mark.parametrize("seed", range(5))
def test_drawn_words(
    seed: int, files: tuple[Files, Files], run: Callable, tmp_path: Path
) -> None:
    """None ends in a traceback. Some did: files that NumPy takes for other things."""
    draw, wrong, n_ended = random.Random(seed), [], 0
    for _ in range(N_CASES // 5):
        words = drawn_words(draw, *files, tmp_path)
        try:
            status, said = run(*words)
        except Exception as error:
            wrong.append((words, repr(error)))
            continue
        n_ended += status != 0
        if what := complaint(words, status, said):
            wrong.append((words, what, said))
    assert not wrong
    assert n_ended > N_CASES / 10


def test_wrong_files(files: tuple[Files, Files], run: Callable) -> None:
    """Each is named, as is what to pass; and no plan is made of part of the files."""
    good, bad = files
    wrong = []
    for path in [*bad.values(), good["placement"]]:
        for words in (["stats", path], ["balance", good["stats"], path]):
            status, said = run(*words)
            named = path.encode("utf-8", "backslashreplace").decode() in said
            if status != 1 or not named or "max_ep.stats.Statistics.save" not in said:
                wrong.append((words, status, said))
    for path in [*bad.values(), good["stats"]]:
        status, said = run("balance", good["stats"], "--current", path)
        if status != 1 or "max_ep.balance.Placement.save" not in said:
            wrong.append((path, status, said))
    assert not wrong


WITHOUT = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Without())
{program}
"""
MAIN = "from max_ep.cli import main; sys.exit(main({words!r}.split()))"
SIZES = "--ranks 2 --experts 8 --top-k 2 --hidden 256 --tokens 8"


@pytest.mark.parametrize(
    "name, words, says",
    [
        ("max", f"plan {SIZES}", "max-ep plan: No module named 'max'; " + install.MAX),
        ("max", "demo", "max-ep demo: No module named 'max'; " + install.MAX),
        ("torch", f"build --torch cpu {SIZES}", f"'torch'; {install.TORCH}"),
    ],
)
def test_a_module_is_missing(name: str, words: str, says: str) -> None:
    """The error names what to install, and no extra of a package that no index has."""
    program = MAIN.format(words=words)
    done = ran(sys.executable, "-c", WITHOUT.format(name=name, program=program))
    assert done.returncode == 1 and done.stdout == ""
    assert says in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("package", ["max_ep.torch", "deep_ep"])
def test_torch_is_missing(package: str) -> None:
    program = WITHOUT.format(name="torch", program=f"import {package}")
    done = ran(sys.executable, "-c", program, cwd=ROOT / "integrations/deep_ep")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: max_ep.torch needs PyTorch, which cannot be imported: No module "
        f"named 'torch'; {install.TORCH}"
    )


def test_doctor_without_max() -> None:
    program = WITHOUT.format(name="max", program=MAIN.format(words="doctor"))
    done = ran(sys.executable, "-c", program, COLUMNS="7")
    assert done.returncode == 1 and not done.stderr
    assert "FAIL max" in done.stdout and "Graphs cannot run" in done.stdout


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize(
    "output, status, says",
    [
        (">/dev/full", 1, "No space left on device; is the disk of the"),
        (">&-", 0, ""),
        (">/dev/full 2>&1", 1, ""),
    ],
)
def test_output_that_cannot_be_written(
    output: str, status: int, says: str, is_buffered: bool, files: tuple[Files, Files]
) -> None:
    """Whether Python writes at once, or at its end."""
    command = f'"$0" -m max_ep.cli stats "$1" {output}'
    how = dict(PYTHONUNBUFFERED="" if is_buffered else "1")
    done = ran("sh", "-c", command, sys.executable, files[0]["stats"], **how)
    assert done.returncode == status
    assert re.match(f"max-ep( stats)?: {says}" if says else "$", done.stderr)
    assert done.stderr.count("\n") == bool(says), done.stderr
