# SPDX-License-Identifier: Apache-2.0
"""The matmuls for GPUs, as far as it shows without one.

What it computes is compared with torch in tests/test_experts_gpu.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from max_ep import experts
from max_ep.extension import run_mojo
from max_ep.serve import hopper

PROGRAM = Path(__file__).resolve().parent / "mojo" / "codegen_experts.mojo"
BODIES = ((1, 8), (1, 2), (4, 2), (8, 2))
"""Tokens in eights, and loads of a row of weights that are under way at once."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assembly")
    printed = run_mojo("run", "-I", ".", str(PROGRAM), str(folder))
    (folder / "printed").write_text(printed)
    return folder


def test_python_refuses_what_the_kernel_cannot_take(folder: Path) -> None:
    taken = (folder / "printed").read_text().split()
    # Rows of a whole tile are as many where Python puts zeros behind them.
    wanted = [experts.GPU_COLUMNS, experts.GPU_K_STEP, hopper.TILE_ROWS]
    assert [int(n) for n in taken] == wanted


def test_hopper_assembly(folder: Path) -> None:
    kernels = [path.read_text() for path in folder.glob("*.s")]
    assert len(kernels) == 2
    for text in kernels:
        # Each load: two rows of weights, and a token a tile.
        loads = re.findall(r"ld\.global\.nc\.v4\.b32", text)
        assert len(loads) == sum(n * (2 + tiles) for tiles, n in BODIES)
        products = re.findall(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32", text)
        assert len(products) == sum(2 * n * tiles for tiles, n in BODIES)
        assert ".local" not in text


@pytest.mark.parametrize(
    ("dtype", "n", "k", "error", "says"),
    [
        (DType.float32, 32, 64, TypeError, "takes bfloat16"),
        (DType.bfloat16, 24, 64, ValueError, r"are \[2, 24, 64\]"),
        (DType.bfloat16, 32, 96, ValueError, r"are \[2, 32, 96\]"),
    ],
)
def test_refusals(dtype: DType, n: int, k: int, error: type, says: str) -> None:
    gpu = DeviceRef.GPU(0)
    types = [
        TensorType(dtype, ["n_rows", k], gpu),
        TensorType(dtype, [2, n, k], gpu),
        TensorType(DType.uint32, [3], gpu),
        TensorType(DType.int32, [2], gpu),
    ]
    with Graph("refused", input_types=types) as graph:
        with pytest.raises(error, match=says):
            experts.grouped_matmul(*(value.tensor for value in graph.inputs))


@pytest.mark.parametrize(
    ("dtypes", "n", "k", "error", "says"),
    [
        ([DType.float32] * 2, 32, 64, TypeError, "linear takes bfloat16.*MAX's linear"),
        ([DType.bfloat16, DType.float32], 32, 64, TypeError, "weights DType.float32"),
        ([DType.bfloat16] * 2, 24, 64, ValueError, r"are \[24, 64\]"),
        (
            [DType.bfloat16] * 2,
            32,
            128,
            ValueError,
            r"64 columns, weights \[32, 128\] need 128",
        ),
    ],
)
def test_refusals_of_linear(
    dtypes: list[DType], n: int, k: int, error: type, says: str
) -> None:
    gpu = DeviceRef.GPU(0)
    types = [
        TensorType(dtypes[0], ["n_rows", 64], gpu),
        TensorType(dtypes[1], [n, k], gpu),
    ]
    with Graph("refused", input_types=types) as graph:
        with pytest.raises(error, match=says):
            experts.linear(*(value.tensor for value in graph.inputs))
