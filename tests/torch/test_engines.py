# SPDX-License-Identifier: Apache-2.0
"""The engines' own classes, unchanged, over our `deep_ep`: `make test-engines`."""

from pathlib import Path

import pytest

from max_ep import launch
from tests.torch import engines

pytestmark = pytest.mark.usefixtures("all_cores")


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("name", engines.ENGINES)
def test_engine(
    name: str, n_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, and where it trains backward, are those of a plain layer."""
    monkeypatch.setenv("MAX_EP_TORCH_DEVICE", "cpu")
    arguments = n_ranks, str(tmp_path / "store"), name
    outcomes = launch(engines.member, n_ranks, arguments, timeout_s=900)
    for rank, error in enumerate(outcomes):
        assert not error, f"rank {rank}:\n{error}"
