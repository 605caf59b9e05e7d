# SPDX-License-Identifier: Apache-2.0
"""What tests of PyTorch share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from max_ep.torch import channel, channels, library


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu(1))])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors are."""
    if request.param == "cpu":
        monkeypatch.setenv("MAX_EP_TORCH_DEVICE", "cpu")
    return request.param


@pytest.fixture
def launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Callable[..., int]]]:
    """A group of this process, and functions that do nothing in the place of the
    kernels'; a test may replace them before it opens a buffer."""
    sizes = SimpleNamespace(
        region_bytes=1 << 20,
        counters_words=64,
        failure_word=0,
        n_failure_words=8,
        masked_word=16,
    )
    functions = {name: lambda *_: 0 for name in library._FUNCTIONS}
    functions |= dict(open=lambda *_: 1, sizes=sizes)
    monkeypatch.setattr(channel, "load", lambda _: SimpleNamespace(**functions))
    monkeypatch.setattr(channels, "build_all", lambda _: None)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        yield functions
    finally:
        dist.destroy_process_group()
