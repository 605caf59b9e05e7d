# SPDX-License-Identifier: Apache-2.0
"""Blocks of code on pages: each runs as it stands, or is part of a program that runs.

Python and Mojo: a block is run here (``RUN``), or the page has named, above it, the
file that contains it. Shell: the real parsers take the commands, and the files that
they read are there, or a command above makes them.
"""

import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.children import ROOT, ran, slow

from max_ep import cli
from max_ep.stats import Statistics

PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("graphs/*.md")]
    + [*ROOT.glob("integrations/*/*.md")]
)
RUN = ["all_gather", "balance", "elastic", "formats", "pytorch", "upstream"]
"""Pages of docs/ whose blocks of Python are one program, but for those from files; of
upstream.md each is one (`test_upstream.py`)."""

LANGUAGES = {"python", "mojo", "sh", "text", "diff"}
PROGRAMS = set("cd curl git make max-ep mpirun pip python torchrun uv".split())
READERS_OWN = {"my_program.py"}
"""Stands for a program of the reader's."""


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yields the language and text of each block, and the text above it."""
    text = page.read_text()
    for match in re.finditer(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", text, re.M):
        yield match[2], textwrap.dedent(match[3]), text[: match.start()]


def file_with(block: str, above: str) -> Path | None:
    """Returns which of the files named above a block contains it, if one does."""
    pages = rf"docs/(?:{'|'.join(RUN)})\.md"
    for name in re.findall(rf"(?:graphs|tests)/[\w/]+\.(?:py|mojo)|{pages}", above):
        text = (ROOT / name).read_text()
        if any(textwrap.indent(block, n * " ") in text for n in (0, 4, 8, 12, 16)):
            return ROOT / name
    return None


def is_run(file: Path) -> bool:
    """Whether a file is a test, or the tests name it, in words or as a module."""
    others = [path for path in (ROOT / "tests").rglob("*.py") if path != HERE]
    words = rf"{file.name}\b|\b(?:import|from) .*\b{file.stem}\b|\.{file.stem}\""
    is_test = file.is_relative_to(ROOT / "tests") and file.name.startswith("test_")
    is_test = is_test or file.suffix == ".md"  # which is run here
    return is_test or any(re.search(words, x.read_text()) for x in others)


HERE = Path(__file__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_are_run_or_part_of_what_is_run(page):
    runs_here = page.parent.name == "docs" and page.stem in RUN
    for language, block, above in blocks(page):
        assert language in LANGUAGES, block
        if language in ("python", "mojo") and not runs_here:
            file = file_with(block, above)
            assert file is not None, f"no file named above contains:\n{block}"
            assert is_run(file), f"no test runs {file}"
        if language == "text":
            words = [line.split(" ")[0] for line in block.splitlines()]
            assert not PROGRAMS.intersection(words), f"this is a command:\n{block}"


def program_of(page: Path, n_blocks: int | None = None) -> str:
    """Joins the first blocks of a page, or all, that no file has."""
    of_python = [found[1:] for found in blocks(page) if found[0] == "python"]
    own = [block for block, above in of_python if not file_with(block, above)]
    return "\n".join(own[:n_blocks])


@pytest.mark.parametrize("name", ["all_gather", "formats"])
def test_a_page_runs(name):
    program = program_of(ROOT / f"docs/{name}.md")
    assert program
    exec(compile(program, name, "exec"), {})


@pytest.mark.parametrize(
    "name, n_blocks",
    [
        pytest.param("pytorch", 1, marks=slow, id="first block"),
        pytest.param("pytorch", None, id="page"),
        # Has libraries of its own.
        pytest.param("elastic", None, marks=slow, id="elastic"),
    ],
)
def test_the_pytorch_pages_run(tmp_path, name, n_blocks):
    """On CPU, as a program that `torchrun` starts."""
    page = ROOT / f"docs/{name}.md"
    how_to = (ROOT / "docs/pytorch.md").read_text()
    assert "`torchrun --nproc-per-node 4 program.py`" in how_to
    (tmp_path / "program.py").write_text(program_of(page, n_blocks))
    command = sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"
    how = dict(OMP_NUM_THREADS="1", MAX_EP_TIMEOUT_S="600", PYTHONPATH=str(ROOT))
    done = ran(*command, "program.py", **how, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_balance_page_runs(tmp_path, monkeypatch, run_cli):
    """With statistics as `who_waits.py` saves them, which test_stats.py runs."""
    from graphs.who_waits import N_EXPERTS, N_RANKS

    page = ROOT / "docs/balance.md"
    lines = [words for name, words in commands(page) if name == "max-ep"]
    assert ["serve", "MODEL", "--balance"] in lines
    lines.remove(["serve", "MODEL", "--balance"])
    monkeypatch.chdir(tmp_path)
    counts = np.random.default_rng(0).integers(
        1, 99, (3, N_RANKS, N_EXPERTS // N_RANKS)
    )
    waits = np.zeros((3, N_RANKS, N_RANKS), np.int64)
    Statistics(waits, waits, counts.astype(np.int32), N_EXPERTS).save("waits.npz")
    for words in lines:
        assert "of the busiest rank" in run_cli(*words), words
    made = {}
    exec(compile(program_of(page), "balance", "exec"), made)
    assert made["config"].num_logical_experts == N_EXPERTS
    assert made["config"].n_experts > N_EXPERTS


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields program and words of each line of the shell on a page."""
    for language, block, _ in blocks(page):
        for line in block.replace("\\\n", " ").splitlines() if language == "sh" else ():
            for part in shlex.split(line, comments=True), []:
                while part:
                    end = part.index("&&") if "&&" in part else len(part)
                    words = [w for w in part[:end] if not re.match(r"[A-Z_]+=", w)]
                    yield Path(words[0]).name, words[1:]
                    part = part[end + 1 :]


def check_python(words: list[str]) -> None:
    """A module or a file that is there, and has the flags."""
    if words[0] == "-m":
        home, words = words[1].replace(".", "/"), words[1:]
        paths = [ROOT / f"{home}.py", ROOT / home / "__main__.py"]
        there = [path for path in paths if path.exists()]
        if not there:
            assert words[0] in ("pytest", "graphs.serve.run"), words
            return
        source = there[0].read_text()
    else:
        source = (ROOT / words[0]).read_text()
    for flag in (word for word in words if word.startswith("--")):
        assert f'"{flag}"' in source, f"{words[0]} has no {flag}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_those_of_the_programs(page, monkeypatch):
    run = SimpleNamespace(**{f"run_{name}": lambda _: 0 for name in COMMANDS})
    monkeypatch.setattr(cli.importlib, "import_module", lambda *_: run)
    targets = re.findall(r"^(\w[\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.M)
    made: set[str] = set()
    for program, words in commands(page):
        assert program in PROGRAMS, program
        if program == "max-ep":
            assert cli.main(words) == 0, words
        elif program == "python" and words[0] not in READERS_OWN:
            check_python(words)
        elif program == "make":
            assert {word for word in words if "=" not in word} <= {*targets}
        # Behind one of these a file is written.
        outputs = {b for a, b in zip(words, words[1:]) if a in OUTPUTS}
        for word in set(words) - outputs:
            if re.search(r"\.(npz|png|py|json)$", word) and word not in READERS_OWN:
                assert word in made or (ROOT / word).exists(), f"{word} is not made"
        made |= outputs


OUTPUTS = {"--save", "--out", "--plot"}
COMMANDS = "demo plan bench build stats balance serve who doctor".split()


def test_changed_imports_are_there():
    for name in ("README.md", "docs/from_max.md"):
        lines = "".join(
            b for language, b, _ in blocks(ROOT / name) if language == "diff"
        )
        imports = re.findall(r"^\+(from .*)$", lines, re.M)
        assert imports
        exec("\n".join(imports), {})
