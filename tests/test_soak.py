# SPDX-License-Identifier: Apache-2.0
"""Thousands of generations, and two groups at once, in processes.

`MAX_EP_SOAK=10000` runs as many of every protocol.
"""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
import soak

from max_ep import launch

pytestmark = pytest.mark.usefixtures("all_cores")


def test_thousands_of_generations(graphs: str, tmp_path: Path) -> None:
    """Every row and sum of each is the oracle's; counts change, ranks are late."""
    n_right = launch(
        soak.soak, processes.N_RANKS, (graphs, str(tmp_path)), timeout_s=600
    )
    assert n_right == [soak.N_GENERATIONS] * processes.N_RANKS


def test_two_groups_at_once(graphs: str, tmp_path: Path) -> None:
    n_right = launch(
        soak.two_groups, processes.N_RANKS, (graphs, str(tmp_path)), timeout_s=120
    )
    assert n_right == [soak.N_OF_TWO_GROUPS] * processes.N_RANKS
