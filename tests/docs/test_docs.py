# SPDX-License-Identifier: Apache-2.0
"""The documents: links, paths, names, commands, error texts, and the site."""

import ast
import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from tests.children import ROOT, printed

import max_ep
from bench import report
from max_ep.bench import runs
from max_ep.bench.systems import DELIVERS
from max_ep import limits
from max_ep.config import EPConfig
from max_ep.formats import BY_NAME, TokenFormat
from max_ep.plural import counted
from max_ep.torch import Buffer, ElasticBuffer, normal_layout
from max_ep.torch.communicator import FEWEST_SMS

DOCS = ROOT / "docs"
MOJO_FILES = sorted((ROOT / "mojo").rglob("*.mojo"))
PYTHON_FILES = sorted(
    path
    for folder in ("max_ep", "graphs", "bench", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("graphs/*.md")])
GUIDE = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    pattern = rf"^```(?:{language})\n(.*?)^```"
    return re.findall(pattern, path.read_text(), re.S | re.M)


def anchors_of(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    kept = [re.sub(r"[^\w\- ]", "", title.lower()).strip() for title in titles]
    return {title.replace(" ", "-") for title in kept}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links(path):
    """Each relative link finds a file, and each anchor a heading."""
    wrong = []
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        target, _, anchor = link.partition("#")
        page = (path.parent / target).resolve() if target else path
        if not page.exists() or (anchor and anchor not in anchors_of(page)):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_paths_exist(path):
    named = re.findall(
        r"(?<![\w/])((?:mojo|max_ep|graphs|tests|bench|docs|\.ci)/[\w./-]*\w)",
        path.read_text(),
    )
    assert not [p for p in named if not (ROOT / p).exists()]


def test_site_builds_without_warnings(tmp_path):
    """What `make docs` does."""
    command = sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path
    printed(*command, cwd=ROOT, NO_MKDOCS_2_WARNING="1")
    for page in DOCS.glob("*.md"):
        assert page.stem in ("index", *(p.name for p in tmp_path.iterdir()))


def test_public_names_are_on_the_api_page():
    """A name that users import has its docstring there."""
    page = (DOCS / "api.md").read_text()
    shown = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)", page, re.M)}
    own = {name for name, home in max_ep._HOME_OF.items() if home.startswith(".")}
    torch_names = re.search(
        r"__all__ = (\[.*?\])",
        (ROOT / "max_ep/torch/__init__.py").read_text(),
        re.DOTALL,
    )
    assert own and torch_names
    assert own | set(ast.literal_eval(torch_names[1])) <= shown


def test_names_of_the_guide_are_on_the_api_page():
    """What a page calls by its module, or all of the module."""
    shown = set(re.findall(r"^::: (\S+)", (DOCS / "api.md").read_text(), re.M))
    last = {name.rpartition(".")[2] for name in shown}
    for page in GUIDE:
        if not page.stem.startswith(("adding", "upstream", "CONTRIB")):  # developers'
            for name in re.findall(r"`(max_ep(?:\.\w+)+)", page.read_text()):
                home, _, own = name.rpartition(".")
                assert own in last or {name, home} & shown, (name_of(page), name)


@pytest.mark.parametrize("page, most", [("README.md", 180), ("docs/performance.md", 120)])
def test_pages_are_short(page, most):
    assert len((ROOT / page).read_text().splitlines()) <= most


def test_what_systems_deliver_is_said():
    """Beside the tables that have a column of it."""
    for page in (ROOT / "README.md", DOCS / "performance.md"):
        _, _, said = page.read_text().partition("*Delivers*")
        assert all(f"`{kind}`: " in said[:400] for kind in DELIVERS), name_of(page)


def test_who_in_the_readme_is_the_guides():
    """So is the site's home page, which includes the README's parts."""
    (shown,) = blocks(ROOT / "README.md", "text")
    assert f"$ max-ep who 28346\n{shown}" in (DOCS / "troubleshooting.md").read_text()
    parts = re.findall(r'^--8<-- "README.md:(\w+)"$', (DOCS / "index.md").read_text(), re.M)
    assert parts == ["who", "speed", "example"]


MOST_LETTERS_OF_A_LINE = 150


@pytest.mark.parametrize("path", GUIDE, ids=name_of)
def test_lines_are_short(path):
    """But for tables, code, and what a program writes."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    text = re.sub(r"^<!-- made by .*?^<!-- end -->", "", text, flags=re.S | re.M)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    assert not [line for line in lines if len(line) > MOST_LETTERS_OF_A_LINE]


MOST_LINES_OF_A_DECISION = 60


def test_decisions_are_short():
    decisions = sorted((DOCS / "decisions").glob("*.md"))
    assert len(decisions) > 15
    for path in decisions:
        lines = path.read_text().splitlines()
        assert len(lines) <= MOST_LINES_OF_A_DECISION, name_of(path)
    linked = re.findall(r"\(decisions/([^)]+)\)", (DOCS / "index.md").read_text())
    assert linked == [path.name for path in decisions]  # in the order of their numbers


def test_readme_commands_are_run():
    """By CI, by a target that it makes, or by a test."""
    commands = "".join(blocks(ROOT / "README.md", "sh|console")).splitlines()
    run = (ROOT / ".ci/run").read_text() + (ROOT / "Makefile").read_text()
    run = run.replace("$(PIP)", "pip install").replace("$(BIN)/", "")
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    commands = [" ".join(line.partition("#")[0].split()) for line in commands]
    commands = [command for command in commands if command]
    assert len(commands) >= 3
    for command in commands:
        assert command in run or f'"{command}"' in tests, f"nothing runs `{command}`"


def test_every_field_of_ours_is_in_the_guide():
    """docs/from_max.md lists what EPConfig has beyond MAX's."""
    from max.nn.comm.ep import EPConfig as MaxEPConfig

    text = (DOCS / "from_max.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.M)
    theirs = {field.name for field in fields(MaxEPConfig)}
    ours = {f.name: f for f in fields(EPConfig) if f.name not in theirs}
    assert {name for name, _ in listed} == set(ours)
    for name, default in listed:
        have = ours[name].default
        assert name == "partial_dtype" or default == repr(have).replace("'", '"')


def test_formats_have_their_names():
    text = (DOCS / "formats.md").read_text()
    assert re.findall(r"^\| [^|]+ \| `(\w+)` \| ", text, re.M)[: len(BY_NAME)] == [*BY_NAME]


def test_environment_variables_are_listed():
    listed = set(re.findall(r"`(MAX_EP_\w+)`", (DOCS / "install.md").read_text()))
    files = (ROOT / "max_ep").rglob("*.py")
    named = {x for f in files for x in re.findall(r'"(MAX_EP_\w+)"', f.read_text())}
    assert listed == named - {"MAX_EP_SHMEM_MODULES"}  # which max_ep sets


def sources() -> str:
    files = [*MOJO_FILES, *PYTHON_FILES]
    return "\n".join(path.read_text() for path in files if path != Path(__file__))


@pytest.mark.parametrize(
    "page", ["protocol.md", "memory_model.md", "troubleshooting.md"]
)
def test_names_are_in_the_sources(page):
    """What stands in backquotes and looks like a name of ours."""
    text = (DOCS / page).read_text()
    named = set(re.findall(r"`(_?[A-Za-z][A-Za-z0-9]*_[A-Za-z0-9_]+)`", text))
    assert len(named) > 2
    assert named <= set(re.findall(r"\w+", sources()))


def test_numbers_beside_a_name_are_the_constants():
    """Where a page says `NAME` (64), so do the sources."""
    values: dict[str, set[str]] = {}
    for name, value in re.findall(
        r"^(?:comptime )?(_?[A-Z][A-Z0-9_]+)(?:: \w+)? = ([\d_]+)$", sources(), re.M
    ):
        values.setdefault(name, set()).add(value.replace("_", ""))
    n_compared = 0
    for path in GUIDE:
        if path.name.startswith(
            ("performance", "measure")
        ):  # of the commit that was measured
            continue
        text = path.read_text()
        for name, number in re.findall(r"`(_?[A-Z][A-Z0-9_]+)` \((\d+)\)", text):
            assert values.get(name) == {number}, (name_of(path), name, number)
            n_compared += 1
    assert n_compared >= 2


def test_numbers_without_a_name_are_the_constants():
    """Limits and times in pages for users."""
    default_s = inspect.signature(max_ep.launch).parameters["timeout_s"].default
    said = {
        "concepts.md": [
            f"`timeout_s={default_s:.0f}`",
            f"most tokens of a rank | {limits.MAX_OF_ENTRY} |",
            f"on GPUs | {limits.MAX_OF_ENTRY}; {limits.MAX_GPU_PAIRS} | "
            f"{limits.MAX_EXPERTS}; {limits.MAX_GPU_PAIRS} |",
            f"`start_timeout_s` ({limits.START_TIMEOUT_S:.0f} s)",
        ],
        "troubleshooting.md": [f"`timeout_s`, {default_s:.0f} s by default"],
        "fault_tolerance.md": [f"within {limits.START_TIMEOUT_S:.0f} s"],
        "pytorch.md": [
            f"at most {limits.MAX_GPU_PAIRS} on GPUs",
            f"{limits.MAX_OF_ENTRY}, normal {normal_layout.MOST_TOKENS}",
            f"fewer than {FEWEST_SMS} are taken as {FEWEST_SMS}",
        ],
        "elastic.md": [f"fewer than {FEWEST_SMS} are taken as {FEWEST_SMS}"],
        "performance-notes.md": [f"fewer than {FEWEST_SMS} gets {FEWEST_SMS}"],
    }
    for page, words in said.items():
        text = (DOCS / page).read_text()
        assert not [word for word in words if word not in text], page
    for method in (Buffer.set_num_sms, ElasticBuffer.dispatch):
        text = " ".join(method.__doc__.split())
        assert re.search(rf"ewer than {FEWEST_SMS} are taken as {FEWEST_SMS}\b", text)


def test_bytes_in_the_notes_are_those_of_the_benchmark():
    peers = dict(sums="with sums", rows="with rows", max="with MAX's EP")
    text = " ".join((DOCS / "performance-notes.md").read_text().split())
    for row in runs.load(report.DATA)["gpu"]:
        size = row["ranks"], row["tokens"], row["dtype"], row["routing"], row["form"]
        is_shape = row["shape"] == "h7168_e256_k8"
        if is_shape and size == (4, 128, "bfloat16", "uniform", "fused"):
            if words := peers.pop(row["peer"], None):
                assert f"{row['wire_bytes'] / 1e6:.1f} MB {words}" in text
    assert not peers


def cells_of(path: Path) -> list[list[str]]:
    rows = re.findall(r"^\|(.*)\|$", path.read_text(), re.M)
    return [[cell.strip(" *") for cell in row.split("|")] for row in rows]


def test_times_in_the_readme_are_those_of_the_performance_pages():
    """Each time of the README's table is in a row of the measurements or of the notes."""
    head, *rows = cells_of(ROOT / "README.md")
    assert head[:3] == ["machine", "system", "delivers"]
    pages = DOCS / "measurements.md", DOCS / "performance-notes.md"
    measured = [row[2:8] for page in pages for row in cells_of(page)]
    times = [row[3:] for row in rows[1:] if row[2:3] and row[2] in ("experts", "ranks", "all")]
    assert len(times) == 13

    def is_measured(cells: list[str]) -> bool:
        return any(all(x in ("", y) for x, y in zip(cells, row)) for row in measured)

    assert not [row for row in times if not any(row) or not is_measured(row)]


def newest_of(n_gpus: int, gpu: str) -> dict[tuple, dict]:
    """The newest row of each peer, format, routing and number of tokens."""
    data = runs.load(report.DATA)
    found = {}
    for row in data["gpu"]:
        run = data["runs"][row["run"]]
        is_machine = row["ranks"] == n_gpus and gpu in run["gpu"]
        form = dict(nccl="all_gather", elastic="plain").get(row["peer"], "fused")
        is_form = row["form"] == form
        if is_machine and is_form and row["shape"] == "h7168_e256_k8":
            of = "peer dtype routing tokens".split()
            found[tuple(row[name] for name in of)] = row
    return found


@pytest.mark.parametrize(
    "n_gpus, gpu, peers, tokens",
    [
        (2, "H200", "sums rows max buffer_sums elastic trtllm nccl", (1, 8, 32, 128)),
        (2, "H200", "buffer_sums elastic trtllm nccl", (1, 8, 32, 128, 512, 4096)),
        (4, "H200", "sums rows max buffer_sums elastic nccl", (1, 8, 32, 128)),
        (4, "H200", "sums buffer_sums elastic nccl", (1, 8, 32, 128, 512)),
    ],
)
def test_times_of_a_machine_in_the_readme_are_of_one_run(n_gpus, gpu, peers, tokens):
    newest = newest_of(n_gpus, gpu)
    cases = [(peer, n) for peer in peers.split() for n in tokens]
    of = {newest[peer, "bfloat16", "uniform", n]["run"] for peer, n in cases}
    assert len(of) == 1


def test_ratios_are_those_of_the_benchmark():
    """In the README what sums save; in the notes FP8 and Zipf routing."""
    newest = newest_of(4, "H200")

    def us(n: int, peer="sums", dtype="bfloat16", routing="uniform", of=newest) -> float:
        return of[peer, dtype, routing, n]["us"]

    fp8 = [f"{us(n, dtype='fp8') / us(n):.2f}" for n in (128, 512, 4096)]
    zipf = [f"{us(n, routing='zipf') / us(n):.2f}" for n in (32, 128, 512, 4096)]
    saved = [round(100 * (1 - us(n) / us(n, "rows"))) for n in (128, 4096)]
    notes = " ".join((DOCS / "performance-notes.md").read_text().split())
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"takes {fp8[0]}, {fp8[1]} and {fp8[2]} of the time of bfloat16" in notes
    assert f"takes {', '.join(zipf[:3])} and {zipf[3]} times at 32, 128, 512" in notes
    two, sizes = newest_of(2, "H200"), (32, 128, 512, 4096)
    zipf = [f"{us(n, routing='zipf', of=two) / us(n, of=two):.2f}" for n in sizes]
    assert f"takes {', '.join(zipf[:3])} and {zipf[3]} times the uniform time" in notes
    said = "saves {} % of the time at 128 tokens and {} % at 4096"
    assert said.format(*saved) in readme


def test_memory_in_the_readme_is_what_a_rank_takes():
    from max.nn.comm.ep.ep_config import NUM_GROUPS, estimate_ep_memory_usage

    bfloat16 = max_ep.config.DType.bfloat16
    sizes = dict(hidden_size=7168, top_k=8, n_experts=256, max_tokens_per_rank=128)
    sizes |= dict(n_gpus_per_node=4, n_nodes=1)
    dtypes = dict(dispatch_dtype=bfloat16, combine_dtype=bfloat16)
    given = dtypes | sizes | dict(target="gpu", protocol="by_rank")
    sums, rows = (
        EPConfig(**given, combine_mode=mode).estimate_memory_usage() / 2**20
        for mode in ("sums", "rows")
    )
    theirs = NUM_GROUPS * estimate_ep_memory_usage(**dtypes, **sizes) / 2**20
    said = (
        f"needs {sums:.0f} MiB (`sums`) or {rows:.0f} MiB (`rows`) of symmetric "
        f"memory; MAX's EP needs {theirs:.0f} MiB"
    )
    assert said in " ".join((ROOT / "README.md").read_text().split())


def recipe(heading: str) -> set[str]:
    """What a table of the recipe names in its first column."""
    text = (DOCS / "adding_a_format.md").read_text()
    table = text[text.index(f"| {heading} |") :].partition("\n\n")[0]
    cells = "".join(line.split("|")[1] for line in table.splitlines()[2:])
    return set(re.findall(r"`(\w+)`", cells))


def test_recipe_of_a_format_names_what_the_traits_want():
    source = (ROOT / "mojo/max_ep/protocol/token_format.mojo").read_text()
    trait = source[source.index("\ntrait TokenFormat") :]
    trait = trait[: trait.index("\n\n\n")]
    wanted = set(re.findall(r"^    comptime (\w+): [^=\n]+$", trait, re.M))
    for member in re.split(r"^    (?=@staticmethod)", trait, flags=re.M)[1:]:
        if member.rstrip().endswith("..."):  # no body: each format has its own
            wanted.add(re.search(r"def (\w+)", member)[1])
    assert recipe("member") == wanted
    source = (ROOT / "mojo/max_ep/formats/block_numbers.mojo").read_text()
    trait = source[source.index("\ntrait BlockNumbers") :]
    trait = trait[: trait.index("\n\n\n")]
    members = set(re.findall(r"^    (?:comptime|def) (\w+)", trait, re.M))
    assert recipe("member of `BlockNumbers`") == members - {"value_bits"}
    assert recipe("field") == {field.name for field in fields(TokenFormat)}


def test_tests_that_pages_name_exist():
    text = "\n".join(path.read_text() for path in GUIDE)
    names = set(re.findall(r"`(test_\w+)`", text))
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert len(names) > 10
    assert not [name for name in names if f"def {name}(" not in tests]


def test_every_test_file_owns_a_claim():
    text = (DOCS / "claims.md").read_text()
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    assert files.keys() == set(re.findall(r"`(test_\w+\.py)`", text))
    # A name is of the file before it, in its row.
    of_rows = re.split(r"\n|`(test_\w+\.py)`", text)
    owners = zip(of_rows[1::2], of_rows[2::2])
    named = {(file, x) for file, of in owners if file for x in re.findall(NAME, of)}
    assert len(named) > 90
    assert not [x for x in named if f"def {x[1]}(" not in files[x[0]].read_text()]


NAME = r"`(test_\w+)`"


def test_programs_to_copy_are_listed():
    """graphs/README.md has each program of its folder."""
    programs = {path.name for path in (ROOT / "graphs").glob("*.py")}
    listed = re.findall(r"^\| `(\w+\.py)`", (ROOT / "graphs/README.md").read_text(), re.M)
    assert programs - {"__init__.py"} == set(listed)


def test_where_gpu_ranks_wait_is_listed():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (row,) = re.findall(r"^\| where a GPU rank waits \| (.*)", text, re.M)
    wait = {f.name for f in MOJO_FILES if "give_up_if_late" in f.read_text()}
    assert wait == set(re.findall(r"(\w+\.mojo)`", row))


def test_what_only_test_all_runs_is_listed():
    """A test that is skipped in `make test` has a row that says why."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (`test_.*?) \| ", text, re.M)
    listed = re.findall(r"`(test_\w+\.py)`", " ".join(rows))
    files = {path.name: path for path in (ROOT / "tests").rglob("*.py")}
    is_slow = re.compile(r"^from tests\.children import .*\b(slow|ALL_CASES)\b", re.M)
    using = {name for name, path in files.items() if is_slow.search(path.read_text())}
    # What helpers leave out, these files run.
    of_helpers = {"faults.py": "test_faults.py", "scenarios.py": "test_processes.py"}
    of_helpers |= dict.fromkeys(("torch_member.py", "torch_misuse.py"), "test_torch.py")
    of_helpers["generations.py"] = "test_processes.py"
    of_helpers["process_graphs.py"] = "test_processes.py"
    of_helpers["kernels.py"] = "test_codegen_resources.py"
    of_helpers["emulated_world.py"] = "test_emulated.py"
    assert set(listed) == {of_helpers.get(name, name) for name in using}


def quoted_errors() -> list[str]:
    """The first cells of the tables of errors."""
    text = (DOCS / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| error says .*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    return re.findall(r"^\| (.+?) \|", "".join(tables), re.M)


def test_quoted_errors_are_those_of_the_sources():
    """Each quotation's parts stand in one file, in that order; there strings that stand
    one after another are one."""
    files = [*(ROOT / "max_ep").rglob("*.py"), *MOJO_FILES]
    joints, quoted = re.compile(r'["\']\s*[ft]?["\']'), quoted_errors()
    sources = [joints.sub("", path.read_text()) for path in files]
    counts = re.compile(r"\{counted\(([^{}]+), '([\w ]+)'\)\}")
    sources = [
        counts.sub(lambda of: f"{{{of[1]}}}{counted(2, of[2])[1:]}", text)
        for text in sources
    ]
    assert len(quoted) >= 35
    for quotation in quoted:
        parts = (re.escape(part.strip()) for part in quotation.split("…"))
        pattern = re.compile(r"[^\n]{0,200}?".join(parts))
        assert any(map(pattern.search, sources)), quotation
