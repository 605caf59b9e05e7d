# SPDX-License-Identifier: Apache-2.0
"""What tests of PyTorch share."""

import pytest


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu(1))])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors are."""
    if request.param == "cpu":
        monkeypatch.setenv("MAX_EP_TORCH_DEVICE", "cpu")
    return request.param
