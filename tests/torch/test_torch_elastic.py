# SPDX-License-Identifier: Apache-2.0
"""From PyTorch: DeepEP V2's ElasticBuffer, one process a rank, against plain loops.

What a launch of processes does is in `torch_elastic.py`. `make test` runs one layer, in
`test_torch.py`, and in the emulator the GPU kernels of plain and expanded rows.
"""

from pathlib import Path

import pytest

from max_ep import launch
from tests.children import slow
from tests.torch import torch_elastic

pytestmark = pytest.mark.usefixtures("all_cores")


@pytest.mark.parametrize(
    "place",
    [pytest.param("cpu", marks=slow), pytest.param("gpu", marks=pytest.mark.gpu(1))],
    indirect=True,
)
@pytest.mark.parametrize("n_ranks", [2, *(pytest.param(n, marks=slow) for n in (1, 4))])
def test_scenarios(place: str, n_ranks: int, tmp_path: Path) -> None:
    names = [x.__name__ for x in torch_elastic.SCENARIOS]
    arguments = n_ranks, str(tmp_path / "store"), names
    outcomes = launch(torch_elastic.member, n_ranks, arguments, timeout_s=900)
    for rank, errors in enumerate(outcomes):
        for name, error in errors.items():
            raise AssertionError(f"rank {rank}, {name}:\n{error}")
