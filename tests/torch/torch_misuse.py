# SPDX-License-Identifier: Apache-2.0
"""What processes of `test_torch.py` do wrong: each call raises clearly or works, and
the next one works."""

import os
import struct
from typing import Any

import pytest
import torch
import torch.distributed as dist
from max.dtype import DType

from max_ep import EPConfig
from max_ep.torch import Buffer, ElasticBuffer
from max_ep.torch.low_latency import CAP as MOST
from tests.children import ALL_CASES
from tests.errors import raises
from tests.torch.torch_member import (
    CAP,
    COMPILE_S,
    N_NORMAL,
    TIMEOUT_S,
    E,
    H,
    K,
    builds_more,
    check_low_latency,
    doubled,
    doubled_normal,
    given_to,
    layout_of,
    open_buffer,
    open_group,
    want_doubled,
)
from tests.torch.torch_wrong_calls import wrong_calls


def dispatch(buffer: Buffer, **options: Any) -> Any:
    x, ids, _ = given_to(buffer)
    return buffer.low_latency_dispatch(x, ids, CAP, E, use_fp8=False, **options)


def combine(buffer: Buffer, rows: Any, handle: Any, **options: Any) -> Any:
    _, ids, weights = given_to(buffer)
    return buffer.low_latency_combine(rows, ids, weights, handle, **options)


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


def other_choices(buffer: Buffer) -> None:
    """Combine with other ids than those of its dispatch adds what they say, or raises.
    Fails if the dispatch's are used in silence."""
    x, ids, weights = given_to(buffer, (4 - buffer.rank) % 4)  # on no rank none
    ids[1:3, 1] = ids[1:3, 0]  # twice the same
    sizes = CAP, E
    rows, _, handle, *_ = buffer.low_latency_dispatch(x, ids, *sizes, use_fp8=False)

    def sums(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return buffer.low_latency_combine(rows, ids, weights, handle)[0]

    y = sums(ids, weights)
    assert torch.equal(sums(ids.clone(), weights), y)
    turned = [t[:, [2, 0, 1]].contiguous() for t in (ids, weights)]
    assert torch.equal(sums(*turned), y)
    fewer, lighter = ids.clone(), weights.clone()
    fewer[::2, 2], lighter[::2, 2] = -1, 0
    assert torch.equal(sums(fewer, weights), sums(ids, lighter))
    token = int((ids[:, 0] >= 0).nonzero()[0])
    other = ids.clone()
    other[token, 0] = next(e for e in range(E) if e not in ids[token])
    said = f"topk_idx has {other[token, 0]} for token {token}, k 0; {ids[token, 0]}"
    with raises(ValueError, said):
        sums(other, weights)
    ids[0, 0] = -1
    with raises(ValueError, "topk_idx was written to since the dispatch"):
        sums(ids, weights)


def handles(buffer: Buffer) -> None:
    """Old ones are refused, and low-latency ones of another Buffer."""
    first = dispatch(buffer)
    rows, _, second, *_ = dispatch(buffer)
    combine(buffer, rows, first[2])
    dispatch(buffer)
    with pytest.raises(ValueError, match="handle is too old: 2 later dispatches"):
        combine(buffer, rows, first[2])
    buffer.clean_low_latency_buffer(CAP, H, E)  # cleans nothing that a handle needs
    combine(buffer, rows, second)
    x, ids, weights = given_to(buffer)
    layout, has_more = layout_of(buffer, ids), builds_more(buffer)
    if not has_more:
        layout |= dict(topk_idx=ids, topk_weights=weights)
    received, *_, of_normal, _ = buffer.dispatch(x, **layout)
    other = open_buffer()
    # Normal handles are of the ranks, and their items are enough.
    y = buffer.combine(received, of_normal)[0]
    copied = tuple(t if t is None else t.clone() for t in of_normal)
    for handle in (of_normal, copied) if has_more else ():
        assert torch.equal(other.combine(received, handle)[0], y)
        assert torch.equal(other.dispatch(x, handle=handle)[0], received)
    alone = [dist.new_group([r]) for r in range(buffer.group_size)][buffer.rank]
    refused = [
        (combine, other, second, "handle is of another Buffer"),
        (combine, buffer, of_normal, "handle is not one that"),
        (combine, buffer, tuple(second), "items of its tuple are not enough"),
    ]
    normal = [(buffer, second, "handle is not one that")]
    normal += [(buffer, tuple(second), "handle has not the items of one")]
    if buffer.group_size > 1:
        normal += [(open_buffer(alone), of_normal, "handle is of a Buffer of other")]
    for case in normal:
        refused += [(lambda b, rows, h: b.combine(rows, h), *case)]
        refused += [(lambda b, rows, h: b.dispatch(x, handle=h), *case)]
    for call, where, handle, said in refused:
        with pytest.raises(ValueError, match=said):
            call(where, received if call is not combine else rows, handle)
    other.destroy()
    buffer.reset()
    with pytest.raises(ValueError, match="handle is too old: .* or reset()"):
        combine(buffer, rows, second)
    if has_more:
        buffer.combine(received, of_normal)
    check_works(buffer)


def other_tokens(buffer: Buffer) -> None:
    """A handle of tokens without scales sends others with scales."""
    x, ids, weights = given_to(buffer)
    layout = dict(layout_of(buffer, ids), topk_idx=ids, topk_weights=weights)
    rows, *_, handle, _ = buffer.dispatch(x, **layout)
    scales = torch.rand(len(x), H, device=x.device)[:, :3]  # as many as one likes
    again, received = buffer.dispatch((x * 2, scales), handle=handle)[0]
    assert torch.equal(again, rows * 2)
    assert received.shape == (len(rows), 3) and received.is_contiguous()
    sums = buffer.combine(rows, handle, topk_weights=received)[1]
    n = layout["is_token_in_rank"].sum(1, keepdim=True)
    torch.testing.assert_close(sums, scales * n)
    assert sums.is_contiguous()


def other_ranks(buffer: Buffer) -> None:
    """Tokens go where the mask says, also where no expert of theirs is; ids and weights
    go along. Fails if ids alone say where they go."""
    x, ids, weights = given_to(buffer)
    layout = layout_of(buffer, ids)
    mask = layout["is_token_in_rank"].clone()
    mask[:2], mask[2:4] = True, False
    layout |= dict(is_token_in_rank=mask, topk_idx=ids, topk_weights=weights)
    scales = torch.rand(len(x), 3, device=x.device)
    n_ranks, rank = buffer.group_size, buffer.rank
    first, n_local = rank * E // n_ranks, E // n_ranks
    all_: list[Any] = [None] * n_ranks
    sent = tuple(t.cpu() for t in (x, ids, weights, scales, mask))
    dist.all_gather_object(all_, sent)
    want = [torch.cat([one[i][one[4][:, rank]] for one in all_]) for i in range(4)]
    want[1] = want[1] - first
    want[1][(want[1] < 0) | (want[1] >= n_local)] = -1
    want[2][want[1] < 0] = 0
    for given in (x, (x, scales)):
        for worst in (0, CAP * n_ranks):
            how = dict(num_worst_tokens=worst)
            rows, *got, _, handle, _ = buffer.dispatch(given, **layout, **how)
            if given is not x:
                rows, found = rows
                assert torch.equal(found[: len(want[0])].cpu(), want[3])
            n = len(want[0])
            for one, wanted in zip((rows, *got), want):
                assert len(one) == (worst or n)
                assert torch.equal(one[:n].cpu(), wanted)
            assert bool((got[0][n:] == -1).all()) and not got[1][n:].any()
            y = buffer.combine(rows, handle)[0]
            of_ranks = mask.sum(1, keepdim=True)
            assert torch.equal(y, (x.float() * of_ranks).bfloat16())


def modes(buffer: Buffer) -> None:
    """What is made in inference mode is changed outside it; a handle of a compiled
    dispatch is combined outside that."""
    with torch.inference_mode():
        other = open_buffer(use_fabric=True)  # which is ignored
        rows, _, handle, *_ = dispatch(other)
        to = other.get_next_low_latency_combine_buffer(handle)
    to.copy_(rows)
    nothing = dict(overlap=False, num_sms=3, x_ori=None)  # is asked for
    y = combine(other, rows, handle, zero_copy=True, **nothing)[0]
    rows, _, handle, *_ = torch.compile(dispatch, backend="aot_eager")(other)
    assert torch.equal(combine(other, rows, handle)[0], y)
    other.reset()
    with pytest.raises(ValueError, match="another Buffer, or reset"):
        combine(other, rows, handle)
    other.destroy()


def defaults(buffer: Buffer) -> None:
    """Calls take neither the default device nor the default dtype for what they need
    themselves: DeepEP's programs set "cuda" and bfloat16."""
    x, ids, weights = given = given_to(buffer)
    few = x[:16], ids[:16]
    n_ranks = layout_of(buffer, few[1])["is_token_in_rank"].sum(1, keepdim=True)
    want, most = want_doubled(*given), dict(num_max_tokens_per_rank=N_NORMAL)
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            other = open_buffer()
            elastic = ElasticBuffer(buffer.group, **most, timeout_s=COMPILE_S)
            results = [doubled(other, *given), doubled_normal(other, *given)]
            layout = layout_of(other, few[1])
            if not builds_more(other):
                layout |= dict(topk_idx=few[1], topk_weights=weights[:16])
            rows, *_, handle, _ = other.dispatch(few[0], **layout)
            sums = [other.combine(rows, handle)[0]]
            rows, *_, handle, _ = elastic.dispatch(*few, num_experts=E)
            sums.append(elastic.combine(rows, handle)[0])
    finally:
        torch.set_default_dtype(torch.float32)
    for y in results:
        torch.testing.assert_close(y.float(), want, rtol=0.03, atol=0.03)
    for y in sums:
        assert torch.equal(y, (few[0].float() * n_ranks).bfloat16())
    other.destroy()
    elastic.destroy()


def no_tokens(buffer: Buffer) -> None:
    """A rank without tokens takes the kernels of the others, whether ids are those of
    the layout or copies. Fails if empty tensors are taken for each other."""
    x, ids, weights = (
        t[: 5 * (buffer.rank > 0)].clone()
        for t in given_to(buffer, (4 - buffer.rank) % 4)
    )
    layout = dict(layout_of(buffer, ids), num_worst_tokens=5 * buffer.group_size)
    for same in (ids, *[ids.clone()] * builds_more(buffer)):
        rows, _, row_weights, _, handle, _ = buffer.dispatch(
            x, **layout, topk_idx=same, topk_weights=weights
        )
        y = rows.float() * 2 * row_weights.sum(1, keepdim=True)
        got = buffer.combine(y.bfloat16(), handle)[0].float()
        want = want_doubled(x, ids, weights)
        torch.testing.assert_close(got, want, rtol=0.03, atol=0.03)


# Normal calls `d` and low-latency calls `l`, refused before others are waited for.
REFUSED = """
d(x, **layout, expert_alignment=0) | expert_alignment=0 must be
d(x, **layout, expert_alignment=1.5) | expert_alignment=1.5 must be
d(x, **layout, topk_idx=ids[:, :0], topk_weights=w[:, :0]) | has 0 columns; 1 to 32
d(x, **layout, topk_idx=ids.repeat(1, 11), topk_weights=w.repeat(1, 11)) | has 33
d(x, **dict(layout, num_tokens_per_expert=ids[0, :0].int())) | has 0 experts
d(x, **layout, topk_weights=w) | topk_weights are sent with
d(x, **with_ids, num_worst_tokens=-9) | num_worst_tokens=-9
d(None, **layout) | x; must be
d([x], **layout) | x; must be
d(x) | needs a handle
l(None, ids, CAP, E) | x; must be
l([x], ids, CAP, E) | x; must be
l(x.float(), ids, CAP, E) | x must be torch.bf
l(x, ids.int(), CAP, E) | topk_idx must be
l(x, ids[:, 0], CAP, E) | topk_idx must be
l(x[:, :0], ids, CAP, E) | x has 0 columns
l(x, ids, 1, E) | x has
l(x, ids, CAP, E, x, use_fp8=False) | stats
l(x, ids, CAP, E, None, ids, use_fp8=False) | stats
l(x, ids, CAP, E, async_finish=True, return_recv_hook=True) | exclude each other
l(x, ids, 0, E) | must be an integer from 1 to 65535
l(x, ids, -1, E) | must be an integer from 1 to 65535
l(x, ids, 70000, E) | must be an integer from 1 to 65535
l(x, ids, 2.0, E) | must be an integer from 1 to 65535
l(x, ids, None, E) | must be an integer from 1 to 65535
l(x, ids, True, E) | num_max_dispatch_tokens_per_rank=True must be; not bool
l(x, ids, torch.tensor(CAP), E) | must be an integer from 1 to 65535, not Tensor
l(x, ids, [CAP], E) | must be an integer from 1 to 65535, not list
l(x, ids, float(CAP), E, use_fp8=False) | must be an integer from 1 to 65535, not float
l(x, ids, CAP, float(E), use_fp8=False) | num_experts=8.0 must be an integer; not float
buffer.get_dispatch_layout(ids, float(E)) | num_experts=8.0 must be an integer
buffer.get_low_latency_rdma_size_hint(x, H, 2, E) | num_max_dispatch; not Tensor
buffer.get_low_latency_rdma_size_hint(CAP, H, 2**61, E) | num_ranks; from 1 to 128
Buffer(buffer.group, num_nvl_bytes=1e9) | num_nvl_bytes=1000000000.0 must be
Buffer(buffer.group, timeout_s=float("inf")) | timeout_s=inf must be seconds
c(x, ids, ids.float(), (1, 2)) | handle
buffer.low_latency_query_mask_buffer(x) | masks
buffer.get_local_buffer_tensor(x.dtype, x.shape) | get_local_buffer_tensor(size
Buffer(buffer.group, timeout_s=0) | timeout_s=0 must be seconds
"""


def arguments(buffer: Buffer) -> None:
    x, ids, weights = given_to(buffer, (4 - buffer.rank) % 4)  # on no rank none
    layout = layout_of(buffer, ids)
    known = dict(globals(), buffer=buffer, x=x, ids=ids, w=weights, layout=layout)
    with_ids = dict(layout, topk_idx=ids, topk_weights=weights)
    known |= dict(with_ids=with_ids, d=buffer.dispatch)
    known |= dict(l=buffer.low_latency_dispatch, c=buffer.low_latency_combine)
    for line in REFUSED.strip().splitlines():
        code, words = line.split(" | ")
        with raises((TypeError, ValueError, NotImplementedError), words):
            eval(code, known)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAX_EP_TIMEOUT_S", "soon")
        with raises(ValueError, "MAX_EP_TIMEOUT_S='soon' must be seconds"):
            Buffer(buffer.group)
    if buffer.group_size > 1:
        too_many = dict(layout, num_tokens_per_expert=ids.new_zeros(E + 3).int())
        with raises(ValueError, "has 11 experts"):
            buffer.dispatch(x, **too_many)
    if not buffer._comm.is_gpu:  # whose kernels would end the process
        for expert in (-2, E, 2**40):
            said = f"topk_idx has {expert} for token 0, k 0; ids must be in [-1, 8)"
            with raises(ValueError, said):
                buffer.get_dispatch_layout(torch.full((2, 3), expert), E)
    is_gpu = buffer._comm.is_gpu
    for wrong, expert in (
        (E, "8"),
        (-7, "-2 or less" if is_gpu else "-7"),
        (2**40, "2147483647 or more" if is_gpu else "1099511627776"),
        (-(2**31) + 3, "-2 or less" if is_gpu else "-2147483645"),
    ):
        said = f"topk_idx were dropped; expert {expert}. Ids; in [-1, num_experts)"
        with raises(RuntimeError, said + "; Call Buffer.reset()"):
            ids_ = torch.full_like(ids, wrong)
            buffer.low_latency_dispatch(x, ids_, CAP, E, use_fp8=False)
            buffer.check()
        buffer.reset()
    none = torch.full_like(ids, -1)
    of_none = dict(layout_of(buffer, none), topk_idx=none, topk_weights=weights)
    nothing = buffer.dispatch(x, **of_none)
    assert nothing[0].shape == (0, H) and sum(nothing[3]) == 0
    assert not buffer.combine(nothing[0], nothing[4])[0].any()
    check_works(buffer)


def kept(buffer: Buffer) -> None:
    """The allocator hears of all that asynchronous calls are given."""
    used: list[int] = []
    streams = buffer._comm.streams
    run = streams.run

    def remember(work: Any, tensors: Any, *rest: Any) -> Any:
        used[:] = [t.data_ptr() for t in tensors if t is not None]
        return run(work, tensors, *rest)

    def check(*arguments: Any) -> None:
        for i, tensor in enumerate(arguments):
            assert tensor.data_ptr() in used, f"argument {i}"

    streams.run = remember
    x, ids, weights = (
        t[:2].contiguous() for t in given_to(buffer, (4 - buffer.rank) % 4)
    )
    stats = torch.zeros(E // buffer.group_size, dtype=torch.int32, device=x.device)
    waits = torch.zeros(buffer.group_size, dtype=torch.int64, device=x.device)
    rows, counts, handle, *_ = buffer.low_latency_dispatch(
        x, ids, CAP, E, stats, waits, False, async_finish=True
    )
    check(x, ids, stats, waits, rows, handle.tables)
    how = dict(async_finish=True, combine_wait_recv_cost_stats=waits)
    y = buffer.low_latency_combine(rows, ids, weights, handle, **how)[0]
    check(rows, weights, waits, y, handle.tables)
    layout = layout_of(buffer, ids)
    has_more = builds_more(buffer)
    sent = (x, torch.rand(len(x), 3, device=x.device)) if has_more else (x,)
    with_ids = dict(layout, topk_idx=ids, topk_weights=weights)
    given = sent if has_more else x
    got, recv_ids, recv_weights, _, handle, _ = buffer.dispatch(given, **with_ids)
    inside = [one for one in handle.tensors() if one is not None]
    rows = got[0] if has_more else got
    check(*sent, ids, weights, layout["is_token_in_rank"], rows, *inside)
    check(recv_ids, recv_weights)
    made = rows * 2
    bias = (torch.rand_like(x), torch.rand_like(x))
    back = dict(topk_weights=recv_weights) if has_more else {}
    y = buffer.combine(made, handle, **back, bias=bias)[0]
    check(made, *back.values(), *bias, y, *inside)
    del streams.run


def facts(buffer: Buffer) -> None:
    """The library says of its memory what EPConfig says; it knows three forms."""
    if buffer._comm.is_gpu:
        return
    # EPConfig knows no sums whose weights come with combine; rows have a library of
    # their own.
    how = dict(combine_mode="rows") if ALL_CASES else {}
    buffer = Buffer(buffer.group, timeout_s=COMPILE_S, **how)
    dispatch(buffer)
    (channel,) = (
        c for c in buffer._channels.opened.values() if c.settings.tokens == CAP
    )
    region = channel.regions[0]
    sizes = dict(hidden_size=H, top_k=K, n_experts=E, max_tokens_per_rank=CAP)
    sizes |= dict(n_gpus_per_node=1, n_nodes=buffer.group_size)
    how = dict(target="cpu", protocol="by_rank", output_layout="padded")
    config = EPConfig(DType.bfloat16, DType.bfloat16, **sizes, **how)
    if ALL_CASES:
        assert region.library.sizes == config.sizes()
    # What a GPU records of an id has 32 bits.
    for id, words in (
        (99, "99."),
        (2**31 - 1, "2147483647 or more."),
        (-2, "-2 or le"),
    ):
        record = torch.tensor([1, 0, -1, id, 0, 0, 1, 2], dtype=torch.int32)
        region.library.failure(region.handle, record.data_ptr())
        with raises(RuntimeError, f"token 1, k 2: expert {words}"):
            region._raise()
        buffer._comm.failure = ""
    for function, form in ((region.library.dispatch, 4), (region.library.combine, 0)):
        assert function(struct.pack("3q", region.handle, -1, form)) == 1
    buffer.destroy()


def late(buffer: Buffer) -> None:
    """Rank 1 misses one call of each kind; after `reset` all have the same memory."""
    if buffer.group_size == 1:
        return
    buffer = open_buffer(timeout_s=TIMEOUT_S)
    check_works(buffer)
    x, ids, weights = given_to(buffer)
    layout = dict(layout_of(buffer, ids), topk_idx=ids, topk_weights=weights)
    low_latency = lambda: (dispatch(buffer), buffer.check())  # noqa: E731
    usual = lambda: buffer.dispatch(x, **layout)  # noqa: E731
    for miss, words in (
        (low_latency, "timed out after 3000 ms; from rank 1; than Buffer's timeout_s"),
        (usual, "rank 1; Buffer.reset() in every process"),
    ):
        if buffer.rank != 1:
            with raises((RuntimeError, TimeoutError), words) as caught:
                miss()
            assert "EPConfig" not in str(caught.value)
            failure = buffer._comm.failure
            for again in (low_latency, usual):
                with raises(RuntimeError, "Buffer.reset() in every"):
                    again()
            assert buffer._comm.failure is failure  # no second time-out
            buffer._channels.cap = 1 << 14  # as if the missing one had come in the end
        buffer.reset()
        assert buffer._channels.cap == 1 << 14
        buffer._channels.cap = 0
        check_works(buffer)
        usual()
    buffer.destroy()


def caps(buffer: Buffer) -> None:
    """Rank 1 passes another cap than the others: both caps are named, also where no
    rank has anything to build, and waits in a kernel."""
    if buffer.group_size == 1:
        return
    is_one = buffer.rank == 1
    for name, given in (("enable_shrink", is_one), ("num_nvl_bytes", 64 * is_one)):
        with raises(ValueError, f"has {name}=; pass the same on all ranks") as caught:
            Buffer(buffer.group, timeout_s=COMPILE_S, **{name: given})
        assert str(caught.value).count(f"{name}=") == 2
    buffer = open_buffer(timeout_s=TIMEOUT_S)
    dispatch(buffer)
    x, ids, _ = given_to(buffer)
    for _ in range(1 + ALL_CASES):
        cap = CAP + 1 if buffer.rank == 1 else CAP
        words = f"{MOST}={CAP + 1}; {MOST}={CAP}; pass the same on all ranks; reset()"
        with raises((RuntimeError, TimeoutError), words):
            buffer.low_latency_dispatch(x, ids, cap, E, use_fp8=False)
            buffer.check()
        buffer.reset()
        check_works(buffer)
        if ALL_CASES:  # which builds a library
            buffer.low_latency_dispatch(x, ids, CAP + 1, E, use_fp8=False)
    buffer.destroy()


def no_memory(buffer: Buffer) -> None:
    """The last rank has no memory for a new size; it says so, and the rest names it."""
    other = open_buffer(timeout_s=TIMEOUT_S)
    comm = other._comm
    is_last = other.rank == other.group_size - 1
    allocate = comm.allocate

    def fail(n_bytes: int, *_: Any) -> Any:
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


# After `destroy`, and in a forked process.
ENDED = """
low_latency_dispatch(x, ids, CAP, E, use_fp8=False)
low_latency_dispatch(x, ids, CAP + 1, E, use_fp8=False)
low_latency_combine(rows, ids, weights, handle)
get_dispatch_layout(ids, E)
dispatch(x, **layout)
dispatch(x, **layout, num_worst_tokens=CAP * len(layout["num_tokens_per_rank"]))
check()
reset()
"""


def ended(buffer: Buffer) -> None:
    """Calls raise; nothing else happens."""
    x, ids, weights = given_to(buffer)
    other = open_buffer()
    rows, _, handle, *_ = dispatch(other)
    waits = torch.zeros(other.group_size, dtype=torch.int64, device=x.device)
    how = dict(return_recv_hook=True, dispatch_wait_recv_cost_stats=waits)
    *_, hook = dispatch(other, **how)
    known = dict(globals(), x=x, ids=ids, weights=weights, rows=rows, handle=handle)
    known["layout"] = layout_of(other, ids)
    calls = [f"other.{call}" for call in ENDED.strip().splitlines()] + ["hook()"]

    def wrong_calls(words: str) -> list[str]:
        wrong = [] if not other.is_available() else ["is_available"]
        for call in calls:
            try:
                eval(call, known, dict(other=other, hook=hook))
                wrong.append(call)
            except RuntimeError as error:
                wrong += [] if words in str(error) else [f"{call}: {error}"]
        return wrong

    if not other._comm.is_gpu:  # a forked process has no CUDA
        child = os.fork()
        if child == 0:
            wrong = wrong_calls("process that was forked")
            print(wrong or "", flush=True)
            os._exit(len(wrong))
        assert os.waitpid(child, 0)[1] == 0
    hook()
    check_works(other)
    *_, hook = dispatch(other, **how)
    other.destroy()
    other.destroy()
    wrong = wrong_calls("was destroyed")
    assert not wrong, wrong
    check_works(buffer)


def member(rank: int, n_ranks: int, store: str) -> None:
    open_group(rank, n_ranks, store)
    buffer = open_buffer()
    more = (other_tokens, other_ranks) if builds_more(buffer) else ()
    scenarios = (
        hooks,
        other_choices,
        handles,
        *more,
        modes,
        defaults,
        no_tokens,
        arguments,
        wrong_calls,
        kept,
        facts,
        late,
        caps,
        no_memory,
        ended,
    )
    for scenario in scenarios:
        scenario(buffer)
        given = given_to(buffer)
        got = doubled(buffer, *given).float()
        torch.testing.assert_close(got, want_doubled(*given), rtol=2**-7, atol=2**-7)
    buffer.destroy()
    dist.destroy_process_group()
