# SPDX-License-Identifier: Apache-2.0
"""What all tests share: one MAX session, their order, and the marker `gpu(n)`."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "gpu(n): needs n GPUs; skipped where there are fewer"
    )


LONGEST = (
    "test_programs test_serve test_round_trip test_gather test_errors test_processes "
    "test_fuzz test_stats test_soak"
).split()
"""Files that take minutes: first, so that no process waits for another at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first; skips tests that want more GPUs than there are."""
    items.sort(
        key=lambda item: (
            LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)
        )
    )
    marked = [(item, item.get_closest_marker("gpu")) for item in items]
    marked = [(item, marker) for item, marker in marked if marker]
    if not marked:
        return
    from max.driver import accelerator_count

    n_there = accelerator_count()
    for item, marker in marked:
        n_wanted = marker.args[0] if marker.args else 1
        if n_there < n_wanted:
            item.add_marker(
                pytest.mark.skip(
                    reason=f"needs {n_wanted} GPUs, this machine has {n_there}"
                )
            )


@pytest.fixture(scope="session")
def session():
    """The process's one CPU session; a second would not share its compiler."""
    from max.driver import CPU
    from max.engine import InferenceSession

    return InferenceSession(devices=[CPU()])


@pytest.fixture(scope="module")
def gpu_session():
    """A session with all GPUs of the machine."""
    from max.driver import CPU, Accelerator, accelerator_count
    from max.engine import InferenceSession

    gpus = [Accelerator(i) for i in range(accelerator_count())]
    return InferenceSession(devices=[CPU(), *gpus])


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory, session) -> str:
    """The compiled graphs of ranks in processes of their own."""
    import processes

    path = tmp_path_factory.mktemp("graphs") / "processes.mef"
    processes.compile_graphs(path, session)
    return str(path)
