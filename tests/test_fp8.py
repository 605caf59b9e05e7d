# SPDX-License-Identifier: Apache-2.0
"""Dequantization in a graph, against the oracle's, whose own test asks torch.

What dispatch delivers goes through it in ``graphs/moe_layer.py --fp8``.
"""

import numpy as np
import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType

from max_ep import dequantize_blockwise_fp8
from max_ep.reference import dequantize_blockwise_fp8 as oracle

CPU_DEVICE = DeviceRef.CPU()
HIDDEN = 256
PADDED = (3, 5)
"""Local experts, and rows of each."""


def types(rows: list, scales: list) -> list[TensorType]:
    return [
        TensorType(DType.uint8, rows, CPU_DEVICE),
        TensorType(DType.float32, scales, CPU_DEVICE),
    ]


def add_graphs(module: Module) -> None:
    """Adds both layouts."""
    of_both = [
        *types(["n_rows", HIDDEN], [HIDDEN // 128, "n_rows"]),
        *types([*PADDED, HIDDEN], [PADDED[0], HIDDEN // 128, PADDED[1]]),
    ]
    with Graph("dequantize", input_types=of_both, module=module) as graph:
        packed, scales, padded, more = (value.tensor for value in graph.inputs)
        graph.output(
            dequantize_blockwise_fp8(packed, scales),
            dequantize_blockwise_fp8(padded, more),
        )


def test_rows_are_the_oracles(one_module):
    """All 256 values, NaN among them, in both layouts; no rows, too."""
    model = one_module.models["dequantize"]
    rng = np.random.default_rng(0)
    padded = rng.integers(0, 256, (*PADDED, HIDDEN), np.uint8)
    more = rng.standard_normal((PADDED[0], PADDED[1], 2)).astype(np.float32)
    for n_rows in (0, 1, 7):
        packed = np.tile(np.arange(256, dtype=np.uint8), (n_rows, 1))
        scales = rng.standard_normal((n_rows, 2)).astype(np.float32)
        got, got_padded = model.execute(
            packed,
            np.ascontiguousarray(scales.T),
            padded,
            np.ascontiguousarray(more.transpose(0, 2, 1)),
        )
        np.testing.assert_array_equal(got.to_numpy(), oracle(packed, scales))
        want = [oracle(rows, of_rows) for rows, of_rows in zip(padded, more)]
        np.testing.assert_array_equal(got_padded.to_numpy(), np.stack(want))


@pytest.mark.parametrize(
    ("dtypes", "rows", "scales", "error", "says"),
    [
        (("float32", "float32"), ["n", 256], [2, "n"], TypeError, "rows are .*float32"),
        (("uint8", "bfloat16"), ["n", 256], [2, "n"], TypeError, "scales are .*bfloat"),
        (("uint8", "float32"), ["n", 256], ["n", 2], ValueError, r"hidden / 128, n_ro"),
        (("uint8", "float32"), ["n", "k"], [2, "n"], ValueError, r"hidden / 128, n_ro"),
        (("uint8", "float32"), ["n", 64], [0, "n"], ValueError, r"hidden / 128, n_ro"),
        (("uint8", "float32"), ["n", 200], [1, "n"], ValueError, r"a multiple of 128"),
        (("uint8", "float32"), [256], [2], ValueError, r"hidden / 128, n_ro"),
        (("uint8", "float32"), [3, 5, 256], [2, 5], ValueError, r"hidden / 128, n_ro"),
    ],
)
def test_refusals(dtypes, rows, scales, error, says):
    given = [
        TensorType(DType[dtype], shape, CPU_DEVICE)
        for dtype, shape in zip(dtypes, (rows, scales))
    ]
    with Graph("refused", input_types=given) as graph:
        with pytest.raises(error, match=says):
            dequantize_blockwise_fp8(*(value.tensor for value in graph.inputs))


def test_rows_of_gpus_are_float8():
    """As far as a graph goes that is not run."""
    gpu = DeviceRef.GPU(0)
    given = [
        TensorType(DType.float8_e4m3fn, ["n_rows", HIDDEN], gpu),
        TensorType(DType.float32, [HIDDEN // 128, "n_rows"], gpu),
    ]
    with Graph("of_gpu", input_types=given) as graph:
        rows = dequantize_blockwise_fp8(*(value.tensor for value in graph.inputs))
        graph.output(rows)
    assert (rows.dtype, rows.device) == (DType.float32, gpu)
    assert list(rows.shape) == list(given[0].shape)
