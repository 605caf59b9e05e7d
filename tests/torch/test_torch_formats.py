# SPDX-License-Identifier: Apache-2.0
"""MXFP8, NVFP4, MXFP4 and FP8 from PyTorch: quantized by dispatch, or before."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from max_ep import launch
from max_ep import quantize as oracle
from max_ep.torch import quantize
from tests.children import slow
from tests.torch import torch_formats

pytestmark = pytest.mark.usefixtures("all_cores")

ORACLE: dict[str, Any] = dict(
    fp8=oracle.quantize_blockwise_fp8,
    mxfp8=oracle.quantize_mxfp8,
    nvfp4=oracle.quantize_nvfp4,
    mxfp4=oracle.quantize_mxfp4,
)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("name", ORACLE)
def test_quantize_is_the_oracles(name: str) -> None:
    """Bit by bit, of large and small numbers, zeros, infinities and NaN."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(64, 512, generator=draw)
    x *= torch.exp2(torch.randint(-30, 30, x.shape, generator=draw).float())
    x[3], x[4], x[5, :100] = 0, -0.0, 1e-40
    if name != "fp8":  # whose tokens are finite
        x[6, 3], x[7, 40], x[8, 70] = float("nan"), float("inf"), -float("inf")
        x[9] = 3e38
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        values, scales = quantize(given, name)
        want, want_scales = ORACLE[name](given.float().numpy())
        assert np.array_equal(values.view(torch.uint8).numpy(), want)
        bits = scales if name == "fp8" else scales.view(torch.uint8)
        assert np.array_equal(bits.numpy(), want_scales)


@pytest.mark.parametrize(
    "place",
    [pytest.param("cpu", marks=slow), pytest.param("gpu", marks=pytest.mark.gpu(1))],
)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "mxfp4", "fp8"])
def test_all_interfaces(
    name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and scales arrive with the bits of the oracle; the layer is a plain one."""
    if place == "cpu":
        monkeypatch.setenv("MAX_EP_TORCH_DEVICE", "cpu")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = 2, str(tmp_path / "store"), name
    outcomes = launch(torch_formats.member, 2, arguments, timeout_s=900)
    assert not any(outcomes), "\n".join(outcomes)
