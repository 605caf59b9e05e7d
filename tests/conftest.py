# SPDX-License-Identifier: Apache-2.0
"""What all tests share: one MAX session, their order, and the marker `gpu(n)`."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.children import compiled_mojo

# Tests compile on all cores at once, beside whatever else the machine does.
os.environ.setdefault("MAX_EP_COMPILE_TIMEOUT_S", "3600")

ALL_CORES = os.sched_getaffinity(0)
"""Cores of the whole test run."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        take_share_of_cores(**config.workerinput)


def take_share_of_cores(workerid: str, workercount: int, **_: Any) -> None:
    """Gives one of several processes, and those it starts, cores of its own. MAX starts
    a worker thread a core, and those that have nothing to do spin: with two processes
    on two cores a compilation took twice its CPU time."""
    cores = sorted(ALL_CORES)
    mine = cores[int(workerid.removeprefix("gw")) % len(cores) :: workercount]
    os.sched_setaffinity(0, mine)


collect_ignore = [] if "MAX_EP_ENGINES" in os.environ else ["torch/test_engines.py"]
"""`make test-engines` installs the engines that these need."""

LONGEST = (
    "test_round_trip test_processes test_torch test_emulated test_emulated_given "
    "test_codegen test_mojo test_link test_emulated_experts test_served_parts "
    "test_doc_blocks test_house_rules test_model test_bench test_serve_command "
    "test_bench_serving test_command_line test_serve"
).split()
"""Files that take many seconds: first, so that no process waits for another at the
end."""

TOGETHER = [
    ["test_codegen", "test_codegen_resources"],
    ["test_emulated", "test_emulated_failures", "test_mutations"],
    ["test_emulated_experts", "test_experts"],
    ["test_processes", "test_errors", "test_faults", "test_hosts"],
]
"""Files that one process runs, for they read the same kernels, or run the same
graphs."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives a file, or its group of files, to one of several processes."""
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def group_of(file: str) -> str:
        if "\ndef add_graphs(" in (config.rootpath / file).read_text():
            return "one module"  # its graphs are compiled with those of others
        return next((g[0] for g in TOGETHER if Path(file).stem in g), file)

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(super()._split_scope(nodeid))

    return ByGroup(config, log)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Puts the longest files first; skips tests that want more GPUs than there are. One
    of several processes leaves them out: half of all tests, and each is reported."""
    ranks = {stem: i for i, stem in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(LONGEST)))
    marked = [(item, item.get_closest_marker("gpu")) for item in items]
    marked = [(item, marker) for item, marker in marked if marker]
    if not marked:
        return
    from max.driver import accelerator_count

    n_there, left_out = accelerator_count(), set()
    for item, marker in marked:
        n_wanted = marker.args[0] if marker.args else 1
        if n_there < n_wanted and hasattr(config, "workerinput"):
            left_out.add(item)
        elif n_there < n_wanted:
            item.add_marker(
                pytest.mark.skip(
                    reason=f"needs {n_wanted} GPUs, this machine has {n_there}"
                )
            )
    items[:] = [item for item in items if item not in left_out]


def is_skipped(item: pytest.Item) -> bool:
    marks = [*item.iter_markers("skipif")]
    return bool(item.get_closest_marker("skip")) or any(x.args[0] for x in marks)


@pytest.fixture(scope="session", autouse=True)
def compiled_layout_query() -> Iterator[None]:
    """Compiles `layout_query.mojo` once, if it is asked. Users' programs have it
    compiled for each new configuration, as those have that tests start; tests ask about
    hundreds."""
    extension = sys.modules.get("max_ep.extension")
    if extension is None:  # tests of this run that ask import it
        yield
        return
    run_mojo = extension.run_mojo
    program = compiled_mojo("layout_query.mojo")

    def answer(*args: str) -> str:
        is_asked = args[:4] == ("run", "-I", ".", "layout_query.mojo")
        return program(*args[4:]) if is_asked else run_mojo(*args)

    extension.run_mojo = answer
    yield
    extension.run_mojo = run_mojo


@pytest.fixture
def all_cores() -> Iterator[None]:
    """Lets the processes that a test starts have all cores."""
    share = os.sched_getaffinity(0)
    os.sched_setaffinity(0, ALL_CORES)
    yield
    os.sched_setaffinity(0, share)


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """Runs the command `max-ep` in this process, which need not import MAX again.
    Returns what it prints; if it ends with another status than 0, its error."""

    def run(*words: object, status: int = 0) -> str:
        from max_ep.cli import main

        capsys.readouterr()
        assert main(list(map(str, words))) == status
        out, error = capsys.readouterr()
        return error if status else out

    return run


@pytest.fixture(scope="session")
def session():
    """The process's one CPU session; a second would not share its compiler."""
    from max.driver import CPU
    from max.engine import InferenceSession

    return InferenceSession(devices=[CPU()])


@pytest.fixture(scope="session")
def one_module(request, session) -> Iterator[SimpleNamespace]:
    """All graphs of the files of this run that have `add_graphs`, compiled together.

    A compilation costs much in any case, and an op that is in several graphs is
    compiled once. What `add_graphs` returns is `added`; its groups are set up.
    """
    from max.graph import Module

    from max_ep import extension_path
    from max_ep.experts import PACKAGE
    from max_ep.memory.setup_graph import SETUP_GRAPH, setup_graph, setup_model
    from tests.harness import Groups, selected
    from tests.oracle.cases import CASES

    module, any_config = Module(), CASES["two_ranks"].config()
    setup_graph(any_config, module)
    items = [item for item in request.session.items if not is_skipped(item)]
    files = dict.fromkeys(item.module for item in items)
    for item in items:
        params = getattr(item, "callspec", SimpleNamespace(params={})).params
        selected.update((item.originalname, *item.fixturenames, params.get("name")))
    added = {
        file.__name__: file.add_graphs(module)
        for file in files
        if hasattr(file, "add_graphs")
    }
    packages = [extension_path(), extension_path(PACKAGE)]
    compiled = session.compile(module, custom_extensions=packages)
    models = session.init_all(compiled)
    setup_model(session, any_config, models[SETUP_GRAPH])
    of_files = [x for made in added.values() for x in getattr(made, "values", list)()]
    groups = [x for x in [*added.values(), *of_files] if isinstance(x, Groups)]
    for made in groups:
        made.start(session, models[made.name])
    yield SimpleNamespace(models=models, added=added)
    for made in groups:
        made.close()


@pytest.fixture(scope="module")
def added(request, one_module):
    """What `add_graphs` of a test's file has returned."""
    return one_module.added[request.module.__name__]


@pytest.fixture(scope="module")
def gpu_session():
    from max.driver import CPU, Accelerator, accelerator_count
    from max.engine import InferenceSession

    gpus = [Accelerator(i) for i in range(accelerator_count())]
    return InferenceSession(devices=[CPU(), *gpus])


@pytest.fixture(scope="session")
def graphs(request, tmp_path_factory: pytest.TempPathFactory, session) -> str:
    """The graphs of ranks in processes of their own, in one file: those of the files of
    this run that have `add_process_graphs`, compiled together."""
    from max.graph import Module

    from max_ep import extension_path
    from max_ep.memory.setup_graph import SETUP_GRAPH, setup_graph, setup_model
    from tests.oracle.cases import CASES

    module, any_config = Module(), CASES["two_ranks"].config()
    setup_graph(any_config, module)
    files = [item.module for item in request.session.items if not is_skipped(item)]
    for add in {getattr(x, "add_process_graphs", None): None for x in files}:
        if add is not None:
            add(module)
    path = tmp_path_factory.mktemp("graphs") / "processes.mef"
    compiled = session.compile(module, custom_extensions=[extension_path()])
    compiled.export_mef(path)
    setup_model(session, any_config, session.init_all(compiled)[SETUP_GRAPH])
    return str(path)


@pytest.fixture(scope="session")
def groups(graphs: str) -> Iterator[dict]:
    """The same ranks in one process, in turn; a group of each protocol."""
    from tests.processes.generations import PHASED
    from tests.processes.in_turn import Group
    from tests.processes.processes import Engine

    engine = Engine(graphs)
    made = {name: Group(engine, case) for name, case in PHASED.items()}
    yield made
    for group in made.values():
        group.comm.close()


@pytest.fixture
def it(request: pytest.FixtureRequest) -> Any:
    """One of the compiled kernels: `protocol name`."""
    from tests.codegen.kernels import compile_kernels

    protocol, name = request.param.split()
    return compile_kernels(protocol)[name]
