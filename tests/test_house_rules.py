# SPDX-License-Identifier: Apache-2.0
"""Rules a reviewer need not check: format, layers, atomics, sizes."""

import ast
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest
from mojo.run import subprocess_run_mojo

from max_ep import install
from max_ep.extension import mojo_dir
from max_ep.plural import counted
from tests.children import ROOT, ran
from tests.docs.test_docs import DOCS, MOJO_FILES, PAGES, PYTHON_FILES, name_of

MOJO_TESTS = sorted((ROOT / "tests/mojo").rglob("*.mojo"))

# Each folder of the Mojo package may import only from itself and those to its left.
LAYERS = (
    "protocol work formats device row_limit dispatch_by_expert dispatch_by_rank "
    "combine_rows combine_sums cpu launch router"
).split()

# Each module or folder of the Python package may import only those to its left.
PYTHON_LAYERS = (
    "plural limits install npz quantize checkpoint processes cache first_import launch "
    "max_ep shmem_parts extension formats packing balance stats config agreement waits "
    "experts reference graph memory all_gather torch bench serve cli"
).split()


@pytest.mark.parametrize("path", [*MOJO_FILES, *PYTHON_FILES], ids=name_of)
def test_licence_line_comes_first(path):
    first = path.read_text().partition("\n")[0]
    assert first in ("# SPDX-License-Identifier: Apache-2.0", ""), name_of(path)


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_python_is_formatted(command):
    done = ran(Path(sys.executable).with_name("ruff"), *command.split(), ROOT)
    assert done.returncode == 0, f"run `make format`:\n{done.stdout}"


def test_mojo_is_formatted():
    mblack = Path(sys.executable).with_name("mblack")
    done = ran(
        mblack, "--check", "--preview", "-l", "88", "-C", *MOJO_FILES, *MOJO_TESTS
    )
    assert done.returncode == 0, f"run `make format`:\n{done.stderr}"


def pointers_of_kernel_arguments() -> Iterator[tuple[str, str]]:
    """Yields each field that is memory, and the line behind it."""
    memory = r"(?:[^=\n]*(?:Pointer|Array|Rows)|In|Out)\b"
    field = re.compile(rf"^    var (\w+): {memory}.*\n(.*)", re.M)
    for path in MOJO_FILES:
        for struct in path.read_text().split("\nstruct ")[1:]:
            head, _, body = struct.partition("):\n")
            if "KernelArgument" in head:
                for found, behind in field.findall(body.partition("\n    def ")[0]):
                    yield (
                        f"{re.match(r'[a-zA-Z0-9]+', head)[0]}.{found}",
                        behind.strip(),
                    )


def test_memory_of_a_kernel_argument_has_its_shape():
    """A reader of a kernel need not look for who made a pointer."""
    fields = dict(pointers_of_kernel_arguments())
    assert {"GivenTokens.tokens", "Buffers.counts", "DispatchedRows.rows"} <= {*fields}
    assert not [x for x, behind in fields.items() if not behind.startswith('"""')]


# What a new token format is read from: each parameter, argument and result has its
# line. The launchers' and kernels' are listed once, in the docstrings of their modules.
FULLY_DOCUMENTED = re.compile(r"/protocol/token_format\.mojo:")


def members_of_traits() -> set[str]:
    """Names what the traits of the package describe, for all who implement them."""
    traits = re.findall(
        r"^trait .*?(?=^\S)",
        "".join(path.read_text() + "\n#" for path in MOJO_FILES),
        re.MULTILINE | re.DOTALL,
    )
    return set(
        re.findall(r"^    (?:comptime|def) (\w+)", "".join(traits), re.MULTILINE)
    )


def needs_no_docstring(warning: str, described: set[str]) -> bool:
    """Whether a warning of `mojo doc` is of a function, constant or field inside the
    package, whose name may say it all, or of a member that a trait describes."""
    path, line = re.match(r"(.*?\.mojo):(\d+):", warning).groups()
    lines = (mojo_dir() / path).read_text().splitlines()[: int(line)]
    if member := re.match(r"    (?:comptime|def) (\w+)", lines[-1]):
        outer = next(text for text in reversed(lines) if re.match(r"\w", text))
        if member[1] in described and outer.startswith("struct"):
            return True
    if re.search(r"/(api|token_format)\.mojo", path):
        return False
    # `Group` is of users: its fields have one, and what its methods say is their names.
    kinds = "def" if "/layout." in path else "def|var|comptime"
    return bool(re.match(rf" *({kinds}) ", lines[-1]))


def test_mojo_docstrings():
    """Every public symbol that users meet has one, and every struct and module. Inside
    the package a function or field has one only if its name does not say it."""
    done = subprocess_run_mojo(
        ["doc", "--diagnose-missing-doc-strings", "-o", os.devnull, "max_ep"],
        cwd=mojo_dir(),
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stderr.splitlines() if "warning:" in line]
    assert said, "the check does not work"
    described = members_of_traits()
    of_formats = [line for line in said if FULLY_DOCUMENTED.search(line)]
    without = [
        line
        for line in said
        if "missing a doc string" in line
        and not re.search(r"/(routing_)?ops\.mojo:", line)
        and not needs_no_docstring(line, described)
    ]
    assert not of_formats + without


def test_lists_have_every_parameter_and_argument():
    """Covers what Mojo users call; `mojo doc` looks in each own function only."""
    texts = [
        (mojo_dir() / f"max_ep/launch/{x}.mojo").read_text() for x in ("api", "kernels")
    ]
    _, docstrings, codes = zip(*(text.split('"""', 2) for text in texts), strict=True)
    found = re.findall(
        r"^    (\w+(?:, \w+)*)(?: |$)", "".join(docstrings), re.MULTILINE
    )
    listed = {word for words in found for word in words.split(", ")}
    of_public = [
        names
        for function, names in mojo_names("".join(codes))
        if not function.startswith("_")
    ]
    assert of_public
    for names in of_public:
        assert names and set(names) <= listed, set(names) - listed


_ORDERS = (
    r"ordering\s*=|\bfence\[|\"(?:cp\.async|fence)"
    r"|\barrive(?:_cluster)?\(|\b(?:fence_mbarrier_init|wgmma_fence_aligned|cluster_sync)\("
)
"""Orders of atomics, and what copies, barriers and matmuls of a block order."""


@pytest.mark.parametrize("path", MOJO_FILES, ids=name_of)
def test_every_memory_order_is_argued(path):
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines):
        if re.search(_ORDERS, line):
            above = "\n".join(lines[max(0, i - 8) : i])
            assert "# ORDER:" in above, f"{name_of(path)}:{i + 1}: {line.strip()}"


@pytest.mark.parametrize("path", MOJO_FILES, ids=name_of)
def test_atomics_live_in_flags(path):
    if path.name != "flags.mojo":
        assert not re.search(r"std\.atomic|Atomic\[|fence\[", path.read_text())


def imports_of(path: Path) -> Iterator[tuple[str, ...]]:
    """Yields the modules of the package that a module of it imports, from its root."""
    folder = path.relative_to(mojo_dir() / "max_ep").parts[:-1]
    found = re.findall(r"^from (\.+)([\w.]+) import", path.read_text(), re.MULTILINE)
    for dots, module in found:
        yield *folder[: len(folder) - len(dots) + 1], *module.split(".")


PACKAGE_FILES = [
    path
    for path in MOJO_FILES
    if path.is_relative_to(mojo_dir() / "max_ep") and path.name != "__init__.mojo"
]


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=name_of)
def test_layers_point_one_way(path):
    own = path.relative_to(mojo_dir() / "max_ep").parts[0]
    for layer, *_ in imports_of(path):
        if layer != own:
            assert LAYERS.index(layer) < LAYERS.index(own), f"imports {layer}"


def test_what_mojo_imports_is_used():
    """A name that stands once in a file stands in its import only, and a module's name
    without what is in it."""
    unused, n = [], 0
    for path in [*MOJO_FILES, *MOJO_TESTS]:
        code = re.sub(r'"""[\s\S]*?"""', "", path.read_text())
        if path.name == "__init__.mojo":  # which hands on
            continue
        for name in re.findall(r"^import (?:\S+ as )?(\S+)$", code, re.M):
            n += 1
            if not re.search(rf"\b{name}\.\w", code):
                unused.append(f"{path.relative_to(ROOT)}: {name}")
        for names in re.findall(r"^from \S+ import (\([^)]*\)|.*)", code, re.M):
            for name in re.findall(r"(\w+)\s*(?:,|\)|$)", names):
                n += 1
                if len(re.findall(rf"\b{name}\b", code)) == 1:
                    unused.append(f"{path.relative_to(ROOT)}: {name}")
    assert n > 1000 and not unused, unused


def test_no_import_circle_in_mojo():
    graph = nx.DiGraph()
    for path in PACKAGE_FILES:
        name = path.relative_to(mojo_dir() / "max_ep").with_suffix("").parts
        graph.add_edges_from((name, module) for module in imports_of(path))
    assert graph.number_of_edges() > 100
    assert not list(nx.simple_cycles(graph))


def python_imports() -> nx.DiGraph:
    """Which module of `max_ep` imports which, also in functions and for types."""
    paths = [path for path in PYTHON_FILES if path.is_relative_to(ROOT / "max_ep")]
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in paths}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = nx.DiGraph()
    for name, path in modules.items():
        folder = path.relative_to(ROOT).parts[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            above = folder[: len(folder) - node.level + 1] if node.level else ()
            home = ".".join((*above, *filter(None, [node.module])))
            for alias in node.names:
                inner = f"{home}.{alias.name}"
                imported = inner if inner in modules else home
                if imported in modules and imported != name:
                    graph.add_edge(name, imported)
    return graph


def test_no_import_circle_in_python():
    graph = python_imports()
    assert graph.number_of_edges() > 200
    assert not [c for c in nx.strongly_connected_components(graph) if len(c) > 1]


def test_python_layers_point_one_way():
    """`max_ep` itself finds its names when they are asked for."""
    layers = {name: i for i, name in enumerate(PYTHON_LAYERS)}
    for name, imported in python_imports().edges:
        own, other = (x.removeprefix("max_ep.").split(".")[0] for x in (name, imported))
        is_lower = layers[other] < layers[own] or own == other
        assert is_lower, f"{name} imports {imported}"


def test_serving_and_matmuls_stand_apart():
    """The core does not import `max_ep.serve`; the matmuls know nothing of EP."""
    core = [path for path in PYTHON_FILES if path.is_relative_to(ROOT / "max_ep")]
    serve = [path for path in core if "serve" in path.relative_to(ROOT).parts]
    assert len(serve) > 5
    for path in set(core) - set(serve):
        assert not re.search(
            r"^\s*(from|import) [\w.]*\bserve\b", path.read_text(), re.MULTILINE
        ), name_of(path)
    matmuls = [path for path in MOJO_FILES if path.parent.name == "max_ep_experts"]
    assert len(matmuls) > 5
    for path in matmuls:
        imported = re.findall(r"^from (\S+)", path.read_text(), re.MULTILINE)
        assert not [name for name in imported if "max_ep" in name], name_of(path)


@pytest.mark.parametrize("path", [*MOJO_FILES, *MOJO_TESTS, *PYTHON_FILES], ids=name_of)
def test_comments_are_sentences_of_their_own(path):
    """A comment or docstring that begins with one of these words continues a thought
    that a reader does not have."""
    begin = r"(?:#|\"\"\") ?(?:Of|Who|Whose|Whom|Those|Then|Till|Else)\b.*"
    assert not re.findall(begin, path.read_text())


NAMED_FILES = [*MOJO_FILES, *PYTHON_FILES, *PAGES, *sorted(DOCS.rglob("*.json"))]


@pytest.mark.parametrize("path", NAMED_FILES, ids=name_of)
def test_no_machine_is_named(path):
    found = re.findall(r"(?<![\w.])/(?:work|root|home)/\w+", path.read_text())
    assert not found


MOST_LINES = 600
MOST_ARGUMENTS = 10

SIZED_FILES = [
    *MOJO_FILES,
    *sorted((ROOT / "tests/mojo").rglob("*.mojo")),
    *PYTHON_FILES,
]


def test_files_are_short():
    lengths = {name_of(p): len(p.read_text().splitlines()) for p in SIZED_FILES}
    long = {name for name, length in lengths.items() if length > MOST_LINES}
    assert not long, f"above {MOST_LINES} lines: divide them"


THINGS = (
    "GPUs ranks hosts processes experts replicas layers groups tokens choices tables "
    "rows columns elements values scales tensors cores configurations regions"
).split()


def plain_counts(path: Path) -> Iterator[str]:
    """Yields what would print `1 ranks`, unless the number is a constant."""
    for text in ast.walk(ast.parse(path.read_text())):
        parts = text.values if isinstance(text, ast.JoinedStr) else []
        for given, behind in zip(parts, parts[1:]):
            if isinstance(given, ast.FormattedValue):
                said, after = ast.unparse(given.value), getattr(behind, "value", "")
                thing = re.match(r" (?:local |logical |GPU |NVIDIA )?(\w+)", str(after))
                is_known = re.search(r"\b_?[A-Z][A-Z0-9_]+$|\bupper\(\)$", said)
                if thing and thing[1] in THINGS and not is_known:
                    yield f"{name_of(path)}:{given.lineno}: {said}{thing[0]}"


def test_numbers_agree_with_what_they_count():
    """`counted` says `1 rank` and `2 ranks`. Fails if a text has `{n} ranks`."""
    assert [counted(1, "GPU"), counted(2, "process")] == ["1 GPU", "2 processes"]
    core = [path for path in PYTHON_FILES if path.is_relative_to(ROOT / "max_ep")]
    assert not [text for path in core for text in plain_counts(path)]


def parts_of(text: str, start: int) -> tuple[list[str], int]:
    """Splits a bracket at its commas; returns the parts and where it ends."""
    parts, depth, i = [""], 0, start
    while True:
        if text[i] in "[({":
            depth += 1
        elif text[i] in "])}":
            depth -= 1
        if depth == 0:
            return [part.strip() for part in parts], i + 1
        if text[i] == "," and depth == 1:
            parts.append("")
        elif i > start:
            parts[-1] += text[i]
        i += 1


def mojo_names(text: str) -> Iterator[tuple[str, list[str]]]:
    """Lists parameters and arguments of each function, without `self`."""
    text = re.sub(r"#.*", "", re.sub(r'""".*?"""', "", text, flags=re.S))
    text = re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', text)
    for found in re.finditer(r"^\s*def (\w+)\s*(?=[\[(])", text, re.M):
        parts, end = parts_of(text, found.end())
        if text[found.end()] == "[":
            end += len(text[end:]) - len(text[end:].lstrip())
            parts += parts_of(text, end)[0]
        words = [p.partition(":")[0].split() for p in parts]
        names = [of[-1] for of in words if of and of not in (["*"], ["/"], ["//"])]
        yield found[1], [name for name in names if name != "self"]


def test_mojo_functions_are_narrow():
    """Python's are ruff's to see."""
    wide: dict[str, list[str]] = {}
    for path in (path for path in SIZED_FILES if path.suffix == ".mojo"):
        if re.search(r"(^|/|_)(api|kernels)(/|\.)", name_of(path)):
            continue
        for function, names in mojo_names(path.read_text()):
            # `Group` is the one struct that takes all of them, by keyword; an op's
            # `execute` takes what the graph gives.
            is_group = (path.name, function) == ("layout.mojo", "__init__")
            may_be_wide = is_group or function == "execute"
            if len(names) > MOST_ARGUMENTS and not may_be_wide:
                wide.setdefault(name_of(path), []).append(function)
    assert not wide, f"above {MOST_ARGUMENTS}: what travels together is one struct"


def test_errors_name_what_can_be_installed():
    """No index has this package, so no text recommends an extra of it; commands for
    what is missing stand in `install.py`, with the versions of `pyproject.toml`."""
    project = (ROOT / "pyproject.toml").read_text()
    commands = [text for name, text in vars(install).items() if type(text) is str]
    commands = [text for text in commands if "pip install " in text]
    assert len(commands) >= 5
    for command in commands:
        for requirement in shlex.split(command.partition("install ")[2]):
            assert f'"{requirement}"' in project
    for path in [*MOJO_FILES, *PYTHON_FILES, *PAGES]:
        text = path.read_text()
        assert not re.search(r"max[_-]ep" + r"\[\w", text), name_of(path)
        if path.is_relative_to(ROOT / "max_ep"):
            for command in commands:
                text = text.replace(command, "")
            assert "pip install" not in text, name_of(path)
