# SPDX-License-Identifier: Apache-2.0
"""The matmuls for GPUs, as far as it shows without one.

What it computes is compared with torch in tests/test_experts_gpu.py.
"""

import re
from pathlib import Path

import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from max_ep import experts
from max_ep.extension import run_mojo
from max_ep.serve import hopper

PROGRAM = Path(__file__).resolve().parent / "mojo" / "codegen_experts.mojo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assembly")
    printed = run_mojo("run", "-I", ".", str(PROGRAM), str(folder))
    (folder / "printed").write_text(printed)
    return folder


def test_python_refuses_what_the_kernel_cannot_take(folder):
    taken = (folder / "printed").read_text().split()
    # Rows of a whole tile are as many where Python puts zeros behind them.
    wanted = [experts.GPU_COLUMNS, experts.GPU_K_STEP, hopper.TILE_ROWS]
    assert [int(n) for n in taken] == wanted


def test_hopper_assembly(folder):
    """Loads of 16 bytes, `mma`, and no spills."""
    kernels = [path.read_text() for path in folder.glob("*.s")]
    assert len(kernels) == 2
    for text in kernels:
        loads = re.findall(r"ld\.global\.nc(?:\.\w+)*?((?:\.v\d)?\.b\d+) ", text)
        wide = [width for width in loads if width == ".v4.b32"]
        assert len(wide) > 20 and set(loads) <= {".v4.b32", ".b32"}
        assert "mma.sync.aligned.m16n8k16.row.col.f32" in text
        assert ".local" not in text


BF16, F32 = DType.bfloat16, DType.float32


@pytest.mark.parametrize(
    ("op", "dtypes", "weights", "error", "says"),
    [
        ("grouped_matmul", [F32, F32], [2, 32, 64], TypeError, "takes bfloat16"),
        ("grouped_matmul", [BF16, BF16], [2, 24, 64], ValueError, r"are \[2, 24, 64\]"),
        ("grouped_matmul", [BF16, BF16], [2, 32, 96], ValueError, r"are \[2, 32, 96\]"),
        ("linear", [F32, F32], [32, 64], TypeError, "linear takes.*MAX's linear"),
        ("linear", [BF16, F32], [32, 64], TypeError, "weights DType.float32"),
        ("linear", [BF16, BF16], [24, 64], ValueError, r"are \[24, 64\]"),
        ("linear", [BF16, BF16], [32, 128], ValueError, r"64 columns.*need 128"),
    ],
)
def test_refusals(op, dtypes, weights, error, says):
    gpu = DeviceRef.GPU(0)
    types = [
        TensorType(dtypes[0], ["n_rows", 64], gpu),
        TensorType(dtypes[1], weights, gpu),
    ]
    if op == "grouped_matmul":
        types += [TensorType(DType.uint32, [3], gpu), TensorType(DType.int32, [2], gpu)]
    with Graph("refused", input_types=types) as graph:
        with pytest.raises(error, match=says):
            getattr(experts, op)(*(value.tensor for value in graph.inputs))
