# SPDX-License-Identifier: Apache-2.0
"""Rules a reviewer need not check: formatting, docstrings, layers, atomics, paths."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
from mojo.run import subprocess_run_mojo

from max_ep.extension import mojo_dir

ROOT = Path(__file__).resolve().parent.parent
MOJO_FILES = sorted((ROOT / "mojo").rglob("*.mojo"))
PYTHON_FILES = sorted(
    path
    for folder in ("max_ep", "graphs", "bench", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
MARKDOWN_FILES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

# Each module of the Mojo package may import only from those to its left.
LAYERS = (
    "layout flags cpu_copy counters failures row_tables token_format formats "
    "transport launch_checks expert_slots rank_slots side_stream gpu_setup "
    "setup shmem_modules gpu_launch watch api watch_ops ops all_gather_ops "
    "routing routing_ops"
).split()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [*MOJO_FILES, *PYTHON_FILES], ids=name_of)
def test_licence_line_comes_first(path: Path) -> None:
    first = path.read_text().partition("\n")[0]
    assert first in ("# SPDX-License-Identifier: Apache-2.0", ""), name_of(path)


def test_mojo_is_formatted() -> None:
    mblack = Path(sys.executable).with_name("mblack")
    done = subprocess.run(
        [str(mblack), "--check", "--preview", "-l", "80", *map(str, MOJO_FILES)],
        capture_output=True,
        text=True,
        # Importing MAX sets variables behind Python's back that keep another
        # Python from finding its packages.
        env=dict(os.environ),
    )
    assert done.returncode == 0, f"run `make format`:\n{done.stderr}"


# What users of the Mojo package import, and what a new token format is read from:
# each parameter, argument and result has its line. Elsewhere one line is enough.
FULLY_DOCUMENTED = re.compile(r"/max_ep/(api/\w+|token_format|layout)\.mojo:")


def test_mojo_docstrings() -> None:
    """Every public symbol has one, but the ops' bodies: they repeat their launchers."""
    done = subprocess_run_mojo(
        ["doc", "--diagnose-missing-doc-strings", "-o", os.devnull, "max_ep"],
        cwd=mojo_dir(),
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stderr.splitlines() if "warning:" in line]
    assert said, "the check does not work"
    of_users = [line for line in said if FULLY_DOCUMENTED.search(line)]
    without = [
        line
        for line in said
        if "missing a doc string" in line
        and not re.search(r"/(all_gather_|routing_|watch_)?ops\.mojo:", line)
    ]
    assert not of_users + without


@pytest.mark.parametrize("path", MOJO_FILES, ids=name_of)
def test_every_memory_order_is_argued(path: Path) -> None:
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines):
        if re.search(r"ordering\s*=|\bfence\[", line):
            above = "\n".join(lines[max(0, i - 8) : i])
            assert "# ORDER:" in above, f"{name_of(path)}:{i + 1}: {line.strip()}"


@pytest.mark.parametrize("path", MOJO_FILES, ids=name_of)
def test_atomics_live_in_flags(path: Path) -> None:
    if path.name != "flags.mojo":
        assert not re.search(r"std\.atomic|Atomic\[|fence\[", path.read_text())


@pytest.mark.parametrize("path", MOJO_FILES, ids=name_of)
def test_layers_point_one_way(path: Path) -> None:
    package = mojo_dir() / "max_ep"
    if (
        package not in path.parents
        or path.parent == package
        and (path.name == "__init__.mojo")
    ):
        pytest.skip("not a layer")
    relative = path.relative_to(package)
    own = LAYERS.index(relative.parts[0].removesuffix(".mojo"))
    pattern = r"^from (\.+)(\w+)" if relative.parts[1:] else r"^from (\.)(\w+)"
    for dots, module in re.findall(pattern, path.read_text(), re.MULTILINE):
        if len(dots) == len(relative.parts):
            assert LAYERS.index(module) < own, f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", MARKDOWN_FILES, ids=name_of)
def test_paths_in_documents_exist(path: Path) -> None:
    text = path.read_text()
    named = re.findall(
        r"(?<![\w/])((?:mojo|max_ep|graphs|tests|bench|docs|\.ci)/[\w./-]*\w)", text
    )
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    missing = [p for p in named if not (ROOT / p).exists()]
    missing += [p for p in links if not (path.parent / p).exists()]
    assert not missing


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.json")), ids=name_of)
def test_no_folder_stands_in_results(path: Path) -> None:
    assert not re.findall(r"[\s\"'=]/(?:\w+/)+", path.read_text())


@pytest.mark.parametrize(
    "path", [*MOJO_FILES, *PYTHON_FILES, *MARKDOWN_FILES], ids=name_of
)
def test_no_machine_is_named(path: Path) -> None:
    found = re.findall(r"(?<![\w.])/(?:work|root|home)/\w+", path.read_text())
    assert not found


def test_numbers_beside_a_name_are_the_constants() -> None:
    """Where a document says `NAME` (64), so do the sources."""
    sources = "\n".join(path.read_text() for path in [*MOJO_FILES, *PYTHON_FILES])
    values: dict[str, set[str]] = {}
    for name, value in re.findall(
        r"^(?:comptime )?(_?[A-Z][A-Z0-9_]+)(?:: \w+)? = ([\d_]+)$", sources, re.M
    ):
        values.setdefault(name, set()).add(value.replace("_", ""))
    n_compared = 0
    for path in MARKDOWN_FILES:
        if "results" in path.parts:  # of the commit that was measured
            continue
        for name, number in re.findall(
            r"`(_?[A-Z][A-Z0-9_]+)` \((\d+)\)", path.read_text()
        ):
            assert values.get(name) == {number}, (name_of(path), name, number)
            n_compared += 1
    assert n_compared >= 10


def test_names_in_the_protocol_are_in_the_sources() -> None:
    """What docs/protocol.md has in backquotes and looks like a name of ours."""
    text = (ROOT / "docs/protocol.md").read_text()
    sources = "\n".join(path.read_text() for path in [*MOJO_FILES, *PYTHON_FILES])
    named = set(re.findall(r"`(_?[A-Za-z][A-Za-z0-9]*_[A-Za-z0-9_]+)`", text))
    assert len(named) > 80
    assert named <= set(re.findall(r"\w+", sources))


def test_recipe_of_a_token_format_names_what_the_trait_wants() -> None:
    source = (ROOT / "mojo/max_ep/token_format.mojo").read_text()
    trait = source[source.index("\ntrait TokenFormat") :]
    trait = trait[: trait.index("\n\n\n")]
    wanted = set(re.findall(r"^    comptime (\w+): [^=\n]+$", trait, re.M))
    for member in re.split(r"^    (?=@staticmethod)", trait, flags=re.M)[1:]:
        if member.rstrip().endswith("..."):  # no body: each format has its own
            wanted.add(re.search(r"def (\w+)", member)[1])
    text = (ROOT / "CONTRIBUTING.md").read_text()
    recipe = re.search(r"trait `TokenFormat` \((.*?)\)", text)[1]
    assert set(re.findall(r"`(\w+)`", recipe)) == wanted


def test_processes_of_a_test_run_have_cores_of_their_own(monkeypatch) -> None:
    """Fails if two of the processes share a core while one is idle."""
    taken = []
    monkeypatch.setattr(conftest, "ALL_CORES", {3, 5, 7, 9, 11})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: taken.append(cores))
    for i in range(2):
        worker = dict(workerid=f"gw{i}", workercount=2, testrunuid="")
        ini = SimpleNamespace(addinivalue_line=lambda *_: None, workerinput=worker)
        conftest.pytest_configure(ini)
    assert sorted(sum(taken, [])) == [3, 5, 7, 9, 11] and all(taken)


def test_readme_example_is_the_program() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    program = (ROOT / "graphs/round_trip.py").read_text()
    assert blocks and all(block in program for block in blocks)


def test_readme_commands_are_run_by_ci() -> None:
    readme = (ROOT / "README.md").read_text()
    commands = [
        line.strip()
        for block in re.findall(r"```(?:sh|console)\n(.*?)```", readme, re.S)
        for line in block.splitlines()
        if line.strip() and not line.startswith("#")
    ]
    ci = (ROOT / ".ci/run").read_text()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for command in commands:
        words = command.partition("#")[0].split()
        run_by_ci = " ".join(words) in ci
        run_by_tests = f'"{" ".join(words)}"' in tests
        assert run_by_ci or run_by_tests, f"nothing runs `{command}`"


def test_tests_in_reliability_exist() -> None:
    """And the mutations of the model that it names."""
    text = (ROOT / "docs/reliability.md").read_text()
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    names = set(re.findall(r"`(test_\w+?)(?:\[(\w+)\])?`", text))
    assert len(names) > 25
    missing = [name for name, _ in names if f"def {name}(" not in sources]
    missing += [part for _, part in names if part and f'"{part}"' not in sources]
    mutations = re.findall(r'"([a-z][a-z -]+)"', text)
    missing += [name for name in mutations if f'"{name}"' not in sources]
    assert mutations and not missing
