# SPDX-License-Identifier: Apache-2.0
"""The engines' own classes, unchanged, over our `deep_ep`: `make test-engines`."""

from pathlib import Path

import pytest

from max_ep import launch
from tests.children import slow
from tests.torch.engines import folder
from tests.torch.engines.member import ENGINES, member

pytestmark = pytest.mark.usefixtures("all_cores")

PACKAGES = dict(megatron="megatron/core", nemo="nemo_automodel")
"""Folders whose names are not those of the tests."""


@pytest.mark.parametrize(
    "place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu(2))]
)
@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=slow)])
@pytest.mark.parametrize("name", ENGINES)
def test_engine(
    name: str,
    n_ranks: int,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward, and where it trains backward, are those of a plain layer."""
    if not (folder() / PACKAGES.get(name, name)).exists():
        pytest.skip(f"{name} is not in {folder()}")
    if place == "cpu":
        monkeypatch.setenv("MAX_EP_TORCH_DEVICE", "cpu")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # Ranks compile what an engine compiles at different times.
    monkeypatch.setenv("MAX_EP_TIMEOUT_S", "600")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    arguments = n_ranks, str(tmp_path / "store"), name
    outcomes = launch(member, n_ranks, arguments, timeout_s=900)
    for rank, error in enumerate(outcomes):
        assert not error, f"rank {rank}:\n{error}"
