# SPDX-License-Identifier: Apache-2.0
"""What calls from PyTorch cost the host: functions of Python, operations of torch, and
waits. The kernels do nothing.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from max_ep.torch import (
    Buffer,
    ElasticBuffer,
    channel,
    elastic,
    normal,
    normal_layout,
    streams,
)
from tests.errors import raises


def calls_of(work: Callable[[], None]) -> int:
    """Counts the functions of Python that are called."""
    events = []
    gc.collect()  # so that nothing is collected meanwhile
    sys.setprofile(lambda _, event, __: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
    return events.count("call")


def test_an_eager_layer_makes_few_calls(launches: dict[str, Any]) -> None:
    """Calls of Python are most of what a layer of few tokens costs the host."""
    buffer = Buffer(dist.group.WORLD, device="cpu")
    elastic = ElasticBuffer(dist.group.WORLD, None, 0, 1, device="cpu")
    x, ids = torch.zeros(1, 512).bfloat16(), torch.zeros(1, 2, dtype=torch.int64)
    weights = torch.ones(1, 2)

    def low_latency() -> None:
        rows, _, handle, *_ = buffer.low_latency_dispatch(x, ids, 1, 8, use_fp8=False)
        buffer.low_latency_combine(rows, ids, weights, handle)

    def of_elastic(expands: bool) -> None:
        how = dict(num_experts=8, do_cpu_sync=False, do_expand=expands)
        rows, *_, handle, _ = elastic.dispatch(x, ids, weights, **how)
        elastic.combine(rows, handle)

    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(ids, 8)

    def of_normal() -> None:
        given = dict(num_tokens_per_rank=per_rank, is_token_in_rank=mask)
        given |= dict(num_tokens_per_expert=per_expert, topk_idx=ids)
        given |= dict(topk_weights=weights, num_worst_tokens=1)
        rows, *_, handle, _ = buffer.dispatch(x, **given)
        buffer.combine(rows, handle)

    *_, handle, _ = elastic.dispatch(x, ids, num_experts=8, do_cpu_sync=False)

    def again() -> None:
        rows, *_ = elastic.dispatch(x, handle=handle)
        elastic.combine(rows, handle)

    for layer, most in (
        (low_latency, 31),
        (lambda: of_elastic(False), 40),
        (lambda: of_elastic(True), 40),
        (again, 36),
        (of_normal, 120),
    ):
        layer()  # opens the channel
        assert 10 < calls_of(layer) <= most
    # What was checked is known by all that was checked.
    with raises(ValueError, "x has 2 rows"):
        elastic.dispatch(torch.zeros(2, 512).bfloat16(), handle=handle)
    with raises(ValueError, "num_sms=0.0"):
        elastic.dispatch(x, handle=handle, num_sms=0.0)
    with raises(ValueError, "x has rows of 8 bytes"):
        elastic.dispatch(x[:, :4].contiguous(), handle=handle)
    buffer.destroy()
    elastic.destroy()


class Kernels(TorchDispatchMode):
    """Counts the operations of torch that a GPU would have a kernel or a copy for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), options: Any = None
    ) -> Any:
        name = str(operation)
        if not operation.is_view and "empty" not in name:
            self.names.append(name)
        return operation(*args, **options or {})


def test_a_layer_makes_few_operations_of_torch(
    launches: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs the host as much as a launch of ours. CPU has no copies of numbers to
    the host, so they are left out; so are checks of ids, which GPUs do not make."""
    for module in (elastic, normal, normal_layout):
        monkeypatch.setattr(module, "check_ids", lambda *_: None)
    launches["dispatch"] = lambda arguments: write_ends(arguments, 3)
    buffer = Buffer(dist.group.WORLD, device="cpu")
    of_v2 = ElasticBuffer(dist.group.WORLD, None, 0, 4, device="cpu")
    x, ids = torch.zeros(3, 512).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    weights = torch.ones(3, 2)
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(ids, 8)
    layout = per_rank, None, mask, per_expert

    def of_normal(with_ids: bool, **how: Any) -> None:
        sent = (ids, weights) if with_ids else ()
        rows, *_, handle, _ = buffer.dispatch(x, None, *layout, *sent, **how)
        buffer.combine(rows, handle)

    def of_elastic(**how: Any) -> None:
        rows, *_, handle, _ = of_v2.dispatch(x, ids, weights, num_experts=8, **how)
        of_v2.combine(rows, handle)

    *_, handle, _ = buffer.dispatch(x, None, *layout, num_worst_tokens=3)
    *_, of_rows, _ = of_v2.dispatch(x, ids, num_experts=8, do_cpu_sync=False)
    worst, no_wait = dict(num_worst_tokens=3), dict(do_cpu_sync=False)
    for name, most, call in (
        ("layout", 7, lambda: buffer.get_dispatch_layout(ids, 8)),
        ("normal, worst", 2, lambda: of_normal(True, **worst)),
        ("normal", 2, lambda: of_normal(True)),
        ("normal, no ids, worst", 1, lambda: of_normal(False, **worst)),
        ("normal, no ids", 1, lambda: of_normal(False)),
        ("normal, a handle", 0, lambda: buffer.dispatch(x, handle=handle)),
        ("plain", 0, lambda: of_elastic(**no_wait)),
        ("plain, waits", 0, lambda: of_elastic()),
        ("plain, a handle", 0, lambda: of_v2.dispatch(x, handle=of_rows)),
        ("expanded", 0, lambda: of_elastic(do_expand=True, **no_wait)),
        ("expanded, waits", 3, lambda: of_elastic(do_expand=True)),
    ):
        call()  # opens the channel
        with Kernels() as kernels:
            call()
        assert len(kernels.names) <= most, f"{name}: {kernels.names}"
    buffer.destroy()
    of_v2.destroy()


def write_ends(arguments: bytes, n_rows: int, n_counts: int = 8) -> int:
    """Does what a dispatch does of one rank, whose rows are so many; counts of experts,
    or of ranks, are those of a call."""
    fields = struct.unpack("19q", arguments)
    form, n_tokens, rows, ends = fields[2], fields[5], fields[6], fields[8]
    if form == channel.SEND:
        return 0
    ctypes.c_int32.from_address(ends).value = n_rows
    if n_tokens == 1:  # counts that go ahead
        ctypes.memmove(rows, fields[3], 4 * n_counts)
    return 0


def test_rows_go_before_the_host_waits_for_their_number(
    launches: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the GPU has nothing to do while ranks tell each other their counts, or
    while the host allocates as many rows as come; if they tell each other what the
    device knows, or if the host waits for rows where words before them have their
    number."""
    done: list[str] = []
    n_counts = 8

    def dispatch(arguments: bytes) -> int:
        form = struct.unpack("19q", arguments)[2]
        done.append(("send", "receive", "both")[form - 1])
        return write_ends(arguments, 2, n_counts)

    launches["dispatch"] = dispatch
    buffer = Buffer(dist.group.WORLD, device="cpu")
    elastic = ElasticBuffer(dist.group.WORLD, None, 0, 4, device="cpu")
    x, ids = torch.zeros(3, 512).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    ids[0] = -1
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, 8)

    def normal() -> Any:
        layout = per_rank, None, is_in_rank, per_expert
        return buffer.dispatch(x, None, *layout)

    def plain() -> Any:
        with torch.inference_mode():
            rows, *rest, handle, event = elastic.dispatch(x, ids, num_experts=8)
        # What only the host has read.
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == [2]
        return rows, *rest, handle, event

    def expanded() -> Any:
        return elastic.dispatch(x, ids, num_experts=8, do_expand=True)

    def in_columns() -> Any:
        nonlocal n_counts
        n_counts = 4  # one, and what makes 16 bytes of it
        pair = torch.zeros(3, 512).to(torch.float8_e4m3fn), torch.ones(3, 4)
        how = dict(num_experts=8, use_tma_aligned_col_major_sf=True)
        (rows, scales), *rest = elastic.dispatch(pair, ids, **how)
        assert scales.shape == (2, 4) and scales.stride() == (1, 4)
        return rows, *rest

    def normal_with_ids() -> Any:
        layout = per_rank, None, is_in_rank, per_expert
        return buffer.dispatch(x, None, *layout, ids, torch.ones(3, 2))

    def noted(of: Any, name: str) -> None:
        function = getattr(of, name)

        def call(*given: Any) -> Any:
            done.append(name)
            return function(*given)

        monkeypatch.setattr(of, name, call)

    noted(streams.Numbers, "read")
    for one in (buffer, elastic):
        noted(one._comm, "exchange")
    for call, wanted, n_rows in (
        (normal, "exchange both both read read", 2),
        (normal_with_ids, "exchange both both read read", 2),
        (plain, "exchange both read", 2),
        (expanded, "both exchange send read receive", 4),
        (in_columns, "both exchange send read receive", 2),
    ):
        call()  # opens the channel
        done.clear()
        rows, *_ = call()
        assert " ".join(done) == wanted
        assert rows.shape == (n_rows, 512) and not rows.requires_grad
    buffer.destroy()
    elastic.destroy()


def test_ends_that_only_the_host_has_are_captured(
    launches: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture takes no copy from the host, and writes nothing before a replay."""
    launches["dispatch"] = lambda arguments: write_ends(arguments, 2)
    buffer = ElasticBuffer(dist.group.WORLD, None, 0, 4, device="cpu")
    x, ids = torch.zeros(3, 512).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    handle = buffer.dispatch(x, ids, num_experts=8)[3]
    with monkeypatch.context() as patched:
        patched.setattr(buffer._comm.streams, "is_capturing", lambda: True)
        patched.setattr(torch, "from_numpy", None)
        captured = handle.psum_num_recv_tokens_per_scaleup_rank
        assert captured.tolist() == [2]
    captured.zero_()  # no replay has written them
    assert handle._routing.ends.tolist() == [2]
    buffer.destroy()


def test_rows_without_a_place_end_the_calls(
    launches: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a rank that has sent, and cannot allocate what comes, goes on: the next
    dispatch of the others would wait for its rows."""
    launches["dispatch"] = lambda arguments: write_ends(arguments, 2)
    buffer = ElasticBuffer(dist.group.WORLD, None, 0, 4, device="cpu")
    x, ids = torch.zeros(3, 512).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    how = dict(num_experts=8, do_expand=True)
    buffer.dispatch(x, ids, **how)

    def outputs(*_: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(elastic, "outputs", outputs)
        with raises(MemoryError, "no memory"):
            buffer.dispatch(x, ids, **how)
    with raises(RuntimeError, "no memory. Call Buffer.reset() in every process"):
        buffer.dispatch(x, ids, **how)
    buffer.destroy()
