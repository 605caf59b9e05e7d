# SPDX-License-Identifier: Apache-2.0
"""What processes of `test_torch.py` do wrong: each call raises clearly or works, and
the next one works."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_member import (
    CAP,
    E,
    H,
    check_low_latency,
    doubled,
    open_buffer,
    open_group,
    tokens_of,
    want_doubled,
)

from max_ep.torch import Buffer


def given(buffer: Buffer, generation: int = 0) -> list[torch.Tensor]:
    return [t.to(buffer._comm.device) for t in tokens_of(buffer.rank, generation)]


def dispatch(buffer: Buffer, **options: Any) -> Any:
    x, ids, _ = given(buffer)
    return buffer.low_latency_dispatch(x, ids, CAP, E, use_fp8=False, **options)


def combine(buffer: Buffer, rows: Any, handle: Any, **options: Any) -> Any:
    _, ids, weights = given(buffer)
    return buffer.low_latency_combine(rows, ids, weights, handle, **options)


def layout_of(buffer: Buffer, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(ids, E)
    return dict(
        num_tokens_per_rank=per_rank,
        is_token_in_rank=mask,
        num_tokens_per_expert=per_expert,
    )


def check_works(buffer: Buffer) -> None:
    for generation in range(2):  # both regions
        check_low_latency(buffer, generation, "bf16", bool(generation))


def hooks(buffer: Buffer) -> None:
    """Called twice, too late, or never."""
    rows, _, handle, _, hook = dispatch(buffer, return_recv_hook=True)
    with pytest.raises(ValueError, match="handle has no rows yet: call the hook"):
        combine(buffer, rows, handle)
    hook()
    hook()
    y, _, combine_hook = combine(buffer, rows, handle, return_recv_hook=True)
    combine_hook()
    want = y.clone()
    combine_hook()
    hook()
    assert torch.equal(y, want)
    check_works(buffer)
    for _ in range(3):  # the rows are not wanted
        dispatch(buffer, return_recv_hook=True)
    check_works(buffer)
    combine(buffer, *dispatch(buffer)[::2][:2], return_recv_hook=True)
    check_works(buffer)
    hook()
    combine_hook()
    check_works(buffer)


def handles(buffer: Buffer) -> None:
    """Old ones and those of another Buffer are refused."""
    first = dispatch(buffer)
    rows, _, second, *_ = dispatch(buffer)
    combine(buffer, rows, first[2])
    dispatch(buffer)
    with pytest.raises(ValueError, match="handle is too old: 2 later dispatches"):
        combine(buffer, rows, first[2])
    buffer.clean_low_latency_buffer(CAP, H, E)  # cleans nothing that a handle needs
    combine(buffer, rows, second)
    x, ids, _ = given(buffer)
    layout = layout_of(buffer, ids)
    received, *_, of_normal, _ = buffer.dispatch(x, **layout)
    other = open_buffer()
    for where, normal, low_latency, said in (
        (other, of_normal, second, "handle is of another Buffer"),
        (buffer, second, of_normal, "handle is not one that"),
    ):
        for call in (
            lambda b=where, h=normal: b.combine(received, h),
            lambda b=where, h=normal: b.dispatch(x, handle=h),
            lambda b=where, h=low_latency: combine(b, rows, h),
        ):
            with pytest.raises(ValueError, match=said):
                call()
    other.destroy()
    buffer.reset()
    with pytest.raises(ValueError, match="handle is too old: .* or reset()"):
        combine(buffer, rows, second)
    buffer.combine(received, of_normal)
    check_works(buffer)


def other_tokens(buffer: Buffer) -> None:
    """A handle of tokens without scales sends others with scales."""
    x, ids, weights = given(buffer)
    layout = dict(layout_of(buffer, ids), topk_idx=ids, topk_weights=weights)
    rows, *_, handle, _ = buffer.dispatch(x, **layout)
    scales = torch.rand(len(x), H, device=x.device)[:, : H // 128]
    again, received = buffer.dispatch((x * 2, scales), handle=handle)[0]
    assert torch.equal(again, rows * 2)
    assert received.shape == (len(rows), H // 128) and received.is_contiguous()
    sums = buffer.combine(rows, handle, topk_weights=received)[1]
    n = layout["is_token_in_rank"].sum(1, keepdim=True)
    torch.testing.assert_close(sums, scales * n)
    assert sums.is_contiguous()


def arguments(buffer: Buffer) -> None:
    """Of normal calls: refused before other ranks are waited for."""
    x, ids, weights = given(buffer)
    layout = layout_of(buffer, ids)
    with_ids = dict(layout, topk_idx=ids, topk_weights=weights)
    too_many = dict(layout, num_tokens_per_expert=ids.new_zeros(E + 3).int())
    for text, options in (
        ("expert_alignment=0 must be", dict(layout, expert_alignment=0)),
        ("expert_alignment=1.5 must be", dict(layout, expert_alignment=1.5)),
        ("topk_weights are sent with", dict(layout, topk_weights=weights)),
        ("num_worst_tokens=-9", dict(with_ids, num_worst_tokens=-9)),
        *((("has 11 experts", too_many),) if buffer.group_size > 1 else ()),
    ):
        with pytest.raises(ValueError, match=text):
            buffer.dispatch(x, **options)
    for n in (0, -1, 70000, 2.0, None):
        with pytest.raises(ValueError, match="must be an integer from 1 to 65535"):
            buffer.low_latency_dispatch(x, ids, n, E, use_fp8=False)
    for bad in (None, [x]):
        with pytest.raises(TypeError, match="x .*must be"):
            buffer.dispatch(bad, **layout)
        with pytest.raises(TypeError, match="x .*must be"):
            buffer.low_latency_dispatch(bad, ids, CAP, E)
    if not buffer._comm.is_gpu:  # whose kernels would end the process
        for expert in (-2, E):
            with pytest.raises(ValueError, match="topk_idx must be in"):
                buffer.get_dispatch_layout(torch.full((2, 3), expert), E)
    none = torch.full_like(ids, -1)
    nothing = buffer.dispatch(x, **dict(layout_of(buffer, none), topk_idx=none,
                                        topk_weights=weights))  # fmt: skip
    assert nothing[0].shape == (0, H) and sum(nothing[3]) == 0
    assert not buffer.combine(nothing[0], nothing[4])[0].any()
    check_works(buffer)


def kept(buffer: Buffer) -> None:
    """The allocator hears of all that asynchronous calls are given."""
    used: list[int] = []
    comm = buffer._comm
    run = comm.run

    def remember(work: Any, tensors: Any, *rest: Any) -> Any:
        used[:] = [t.data_ptr() for t in tensors if t is not None]
        return run(work, tensors, *rest)

    def check(*arguments: Any) -> None:
        for i, tensor in enumerate(arguments):
            assert tensor.data_ptr() in used, f"argument {i}"

    comm.run = remember
    x, ids, weights = (t[:2].contiguous() for t in given(buffer, (4 - buffer.rank) % 4))
    stats = torch.zeros(E // buffer.group_size, dtype=torch.int32, device=x.device)
    waits = torch.zeros(buffer.group_size, dtype=torch.int64, device=x.device)
    rows, counts, handle, *_ = buffer.low_latency_dispatch(
        x, ids, CAP, E, stats, waits, False, async_finish=True
    )
    check(x, ids, stats, waits, rows, handle.tables)
    y = buffer.low_latency_combine(
        rows,
        ids,
        weights,
        handle,
        async_finish=True,
        combine_wait_recv_cost_stats=waits,
    )[0]
    check(rows, weights, waits, y, handle.tables)
    layout = layout_of(buffer, ids)
    scales = torch.rand(len(x), H // 128, device=x.device)
    sent = (x, scales)
    with_ids = dict(layout, topk_idx=ids, topk_weights=weights)
    got, recv_ids, recv_weights, _, handle, _ = buffer.dispatch(sent, **with_ids)
    inside = [handle.ids, handle.ranges, handle.src_info]
    check(*sent, ids, weights, layout["is_token_in_rank"], got[0], *inside)
    check(recv_ids, recv_weights)
    made = got[0] * 2
    bias = (torch.rand_like(x), torch.rand_like(x))
    y = buffer.combine(made, handle, topk_weights=recv_weights, bias=bias)[0]
    check(made, recv_weights, *bias, y, *inside)
    del comm.run


def late_once(buffer: Buffer) -> None:
    """Rank 1 misses one call of each kind; after `reset` all have the same memory."""
    if buffer.group_size == 1:
        return
    x, ids, _ = given(buffer)
    layout = layout_of(buffer, ids)
    low_latency = lambda: (dispatch(buffer), buffer.check())  # noqa: E731
    usual = lambda: buffer.dispatch(x, **layout)  # noqa: E731
    for miss in (low_latency, usual):
        if buffer.rank != 1:
            with pytest.raises((RuntimeError, TimeoutError), match="rank 1") as caught:
                miss()
            assert "Buffer.reset() in every process" in str(caught.value)
            for again in (low_latency, usual):
                with pytest.raises(RuntimeError, match=r"Buffer.reset\(\) in every"):
                    again()
            buffer._cap = 1 << 14  # as if the missing one had come in the end
        buffer.reset()
        assert buffer._cap == 1 << 14
        buffer._cap = 0
        check_works(buffer)
        usual()


def no_memory(buffer: Buffer) -> None:
    """The last rank has no memory for a new size; it says so, and the rest names it."""
    other = open_buffer()
    comm = other._comm
    is_last = other.rank == other.group_size - 1
    allocate = comm.allocate

    def fail(n_bytes: int) -> Any:
        raise MemoryError(f"max_ep: no space for {n_bytes} bytes")

    if is_last:
        comm.allocate = fail
    error = MemoryError if is_last else (TimeoutError, RuntimeError)
    with pytest.raises(error, match="no space" if is_last else "waited"):
        dispatch(other)
    comm.allocate = allocate
    with pytest.raises(RuntimeError, match=r"Buffer.reset\(\) in every process"):
        dispatch(other)
    other.reset()
    check_works(other)
    other.destroy()


def ended_calls(buffer: Buffer, hook: Any, received: Any) -> list[Callable[[], Any]]:
    """All that a Buffer can be asked for."""
    x, ids, weights = (t.to(received[0].device) for t in tokens_of(buffer.rank, 0))
    rows, _, handle, *_ = received
    n, mask = torch.zeros(buffer.group_size), torch.zeros(len(x), buffer.group_size)
    of_experts = torch.zeros(E, dtype=torch.int32, device=x.device)
    layout = (n.int().to(x.device), None, mask.bool().to(x.device), of_experts)
    return [
        lambda: buffer.low_latency_dispatch(x, ids, CAP, E, use_fp8=False),
        lambda: buffer.low_latency_dispatch(x, ids, CAP + 1, E, use_fp8=False),
        lambda: buffer.low_latency_combine(rows, ids, weights, handle),
        lambda: buffer.get_dispatch_layout(ids, E),
        lambda: buffer.dispatch(x, None, *layout),
        lambda: buffer.dispatch(x, None, *layout, num_worst_tokens=CAP * len(n)),
        buffer.check,
        buffer.reset,
        hook,
    ]


def ended(buffer: Buffer) -> None:
    """After `destroy`, and in a forked process, calls raise; nothing else happens."""
    for ends in ("fork", "destroy"):
        other = open_buffer()
        received = dispatch(other)
        waits = torch.zeros(other.group_size, dtype=torch.int64)
        *_, hook = dispatch(
            other,
            return_recv_hook=True,
            dispatch_wait_recv_cost_stats=waits.to(received[0].device),
        )
        calls = ended_calls(other, hook, received)
        if ends == "destroy":
            other.destroy()
            other.destroy()
        elif child := (0 if other._comm.is_gpu else os.fork()):
            assert os.waitpid(child, 0)[1] == 0
            hook()
            check_works(other)
            other.destroy()
            continue
        elif other._comm.is_gpu:
            continue  # a forked process has no CUDA
        text = "was destroyed" if ends == "destroy" else "process that was forked"
        failed = []
        for i, call in enumerate(calls):
            try:
                call()
                failed.append((i, "nothing was raised"))
            except RuntimeError as error:
                if text not in str(error):
                    failed.append((i, str(error)))
        assert not other.is_available()
        other.destroy()
        if ends == "fork":
            print(failed or "", flush=True)
            os._exit(len(failed))
        assert not failed, failed
    check_works(buffer)


def member(rank: int, n_ranks: int, store: str) -> None:
    open_group(rank, n_ranks, store)
    buffer = open_buffer()
    for scenario in (
        hooks,
        handles,
        other_tokens,
        arguments,
        kept,
        late_once,
        no_memory,
        ended,
    ):
        scenario(buffer)
        given_ = given(buffer)
        got = doubled(buffer, *given_).float()
        torch.testing.assert_close(got, want_doubled(*given_), rtol=2**-7, atol=2**-7)
    buffer.destroy()
    dist.destroy_process_group()
