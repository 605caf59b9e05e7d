# SPDX-License-Identifier: Apache-2.0
"""What processes of `test_torch_elastic.py` do with an ``ElasticBuffer``, on CPU or GPU
tensors, against what a plain layer and loops say.
"""

import traceback
from typing import Any

import torch
import torch.distributed as dist

from max_ep.torch import ElasticBuffer
from tests.torch.elastic_case import CAP, Case, E, H, K
from tests.torch.torch_member import open_group


def layers(buffer: ElasticBuffer) -> None:
    """Plain and expanded, with and without the host's wait, aligned or not."""
    for i, (kind, align, synced, expands) in enumerate(
        [
            *((kind, 1, True, False) for kind in ("drawn", "none", "first", "one")),
            *((kind, 1, False, False) for kind in ("drawn", "first", "none")),
            *((kind, 4, True, True) for kind in ("drawn", "none", "first")),
            *((kind, 4, False, True) for kind in ("drawn", "first", "one")),
            ("drawn", 4, True, False),
        ]
    ):
        case = Case(buffer, i, kind)
        how = dict(expert_alignment=align, do_cpu_sync=synced, do_expand=expands)
        stats = torch.ones(E // buffer.num_ranks, dtype=torch.int32).to(case.device)
        stats_of = dict(cumulative_local_expert_recv_stats=stats)
        rows, ids, weights, handle, event = case.dispatch(**how, **stats_of)
        assert event.event is None
        n_local, n_ranks = E // buffer.num_ranks, buffer.num_ranks
        if synced:
            wanted, counts = case.expanded(align)
            n_rows = sum(-(-n // align) * align for n in counts)
            n_rows = n_rows if expands else len(case.plain())
            assert len(handle.num_recv_tokens_per_expert_list) == n_local
            assert handle.num_recv_tokens == len(case.plain())
        else:
            n_rows = n_ranks * CAP
            if expands:
                n_rows = n_rows * min(K, n_local) + (align - 1) * n_local
                n_rows = -(-n_rows // align) * align
        assert rows.shape == (n_rows, H)
        (case.check_expanded if expands else case.check_plain)(
            rows, ids, weights, handle
        )
        assert (stats - 1).tolist() == case.expanded(1)[1]
        made = case.run_experts(rows, ids, weights, handle)
        y, none, event = buffer.combine(made, handle)
        case.check_result(y)
        assert none is None and event.event is None
        y, back, _ = buffer.combine(made, handle, topk_weights=weights)
        case.check_result(y)
        want = torch.where(case.ids >= 0, case.weights, 0)
        assert torch.equal(back, want)


def handles(buffer: ElasticBuffer) -> None:
    """Several are alive, and are used in any order; with copies of their tensors."""
    cases = [Case(buffer, seed, "drawn") for seed in range(20, 25)]
    done = []
    for i, case in enumerate(cases):
        how = dict(do_cpu_sync=i % 2 == 0, do_expand=i > 2, expert_alignment=4)
        done.append(case.dispatch(**how))
    for i in (3, 0, 4, 2, 1, 1, 3):
        case, (rows, ids, weights, handle, _) = cases[i], done[i]
        handle.topk_idx = handle.topk_idx.clone()
        kept = handle.psum_num_recv_tokens_per_expert.clone()
        handle.psum_num_recv_tokens_per_expert = kept
        made = case.run_experts(rows, ids, weights, handle)
        case.check_result(buffer.combine(made, handle)[0])
        again, new_ids, new_weights, same, _ = buffer.dispatch(
            case.x, handle=handle, num_sms=handle.num_sms, do_cpu_sync=False
        )
        assert same is handle and new_weights is None
        check = case.check_expanded if handle.do_expand else case.check_plain
        check(again, new_ids, None, handle)
        if i == 4:
            sent = dict(topk_weights=case.weights, handle=handle)
            check(*buffer.dispatch(case.x, **sent)[:4])
    _check_num_sms(buffer, cases[0])


def _check_num_sms(buffer: ElasticBuffer, case: Case) -> None:
    """The library learns how many multiprocessors a call may use, 0: all; not fewer
    than fill most of a link."""
    for asked, used in ((8, 64), (0, 0), (72, 72)):
        rows, ids, weights, handle, _ = case.dispatch(num_sms=asked)
        region = handle._routing.region
        assert region._n_sms == used
        assert handle.num_sms == (asked or buffer._comm.most_sms)
        made = case.run_experts(rows, ids, weights, handle)
        case.check_result(buffer.combine(made, handle, num_sms=66)[0])
        assert region._n_sms == 66


def sizes(buffer: ElasticBuffer) -> None:
    """The most tokens vary from call to call, without kernels of their own; so do the
    tokens. Two buffers at once."""
    other = ElasticBuffer(buffer.group, num_max_tokens_per_rank=CAP)
    Case(buffer, 40).dispatch(num_max_tokens_per_rank=CAP)
    n_channels = len(buffer._channels.opened)
    for seed, most in enumerate((CAP, 12, CAP, 11)):
        for of in (buffer, other):
            case = Case(of, 41 + seed, "one" if most < 12 else "drawn")
            case.x, case.ids, case.weights = (
                t[:most] for t in (case.x, case.ids, case.weights)
            )
            case.all_ids = [t[:most] for t in case.all_ids]
            how = dict(num_max_tokens_per_rank=most, do_cpu_sync=False)
            rows, ids, weights, handle, _ = case.dispatch(**how)
            assert rows.shape == (buffer.num_ranks * most, H)
            case.check_plain(rows, ids, weights, handle)
            made = case.run_experts(rows, ids, weights, handle)
            case.check_result(of.combine(made, handle)[0])
    assert len(buffer._channels.opened) == n_channels
    other.destroy()


def biases(buffer: ElasticBuffer) -> None:
    """Are added in float32: a sum that is rounded first would lose the small part."""
    for expands in (False, True):
        case = Case(buffer, 51)
        how = dict(do_expand=expands, expert_alignment=4)
        rows, ids, weights, handle, _ = case.dispatch(**how)
        made = case.run_experts(rows, ids, weights, handle)
        one = torch.full_like(case.x, 2.0**-9)
        two = torch.full_like(case.x, 256.0)
        for bias in (two, (one, two), (two, one)):
            y, *_ = buffer.combine(made, handle, bias=bias)
            given = bias if isinstance(bias, tuple) else (bias,)
            case.check_result(y, case.want() + sum(b.float() for b in given))


def roundings(buffer: ElasticBuffer) -> None:
    """Sums of rows by expert have the bits of plain rows that hold the rounded sums of
    each rank: also the sum of the token's own rank is rounded."""
    case = Case(buffer, 61)
    rows, *_, handle, _ = case.dispatch(do_expand=True, do_cpu_sync=True)
    draw = torch.Generator().manual_seed(case.rank)
    made = torch.randn(rows.shape, generator=draw).bfloat16().to(case.device)
    y, *_ = buffer.combine(made, handle)
    rows, *_, plain, _ = case.dispatch(do_cpu_sync=True)
    sums = torch.zeros(rows.shape, device=case.device)
    for i, (_, _, *of_choices) in enumerate(handle.recv_src_metadata.tolist()):
        for row in of_choices:
            if row >= 0:
                sums[i] += made[row].float()
    assert torch.equal(buffer.combine(sums.bfloat16(), plain)[0], y)


def pairs(buffer: ElasticBuffer) -> None:
    """FP8 with scales, as given: float32 by row, UE8M0 words of any strides; they come
    by row or in columns."""
    n = 3
    for i, (dtype, expands) in enumerate(
        [(torch.float32, False), (torch.int32, True), (torch.float32, True)]
    ):
        case = Case(buffer, 60 + i)
        all_bytes = [x.view(torch.uint8)[:, :H].contiguous() for x in case.all_x]
        all_scales = [
            torch.arange(len(x) * n, dtype=torch.int32).view(n, -1).t() + 7 * src
            for src, x in enumerate(case.all_x)
        ]
        x = all_bytes[case.rank].to(case.device).view(torch.float8_e4m3fn)
        scales = all_scales[case.rank].to(case.device)
        given = scales.view(torch.float32) if dtype == torch.float32 else scales
        for in_columns in (False, True):
            case.x = (x, given)
            how = dict(do_expand=expands, do_zero_padding=expands, expert_alignment=4)
            how |= dict(use_tma_aligned_col_major_sf=in_columns)
            (rows, got), ids, weights, handle, _ = case.dispatch(**how)
            assert rows.dtype == torch.float8_e4m3fn and got.dtype == dtype
            assert got.shape == (len(rows), n)
            n_places = -(-len(rows) // 4) * 4
            if len(rows):
                assert got.stride() == ((1, n_places) if in_columns else (n, 1))
            places = dict(enumerate(case.plain()))
            if expands:
                places = case.expanded(4)[0]
            for row in range(len(rows)):
                own = rows[row].view(torch.uint8).cpu()
                words = got[row].view(torch.int32).tolist()
                if row in places:
                    src, token, *_ = places[row]
                    assert torch.equal(own, all_bytes[src][token])
                    assert words == all_scales[src][token].tolist()
                elif expands:
                    assert not own.any() and not any(words) and weights[row] == 0
            made = torch.ones(rows.shape, device=case.device).bfloat16()
            y, *_ = buffer.combine(made, handle)
            ranks = case.ids.div(case.n_local, rounding_mode="floor")
            n_of = [(ranks == rank).sum(1) for rank in range(case.n_ranks)]
            counts = torch.stack(n_of, 1)
            counts = counts if expands else (counts > 0)
            assert torch.equal(y.float(), counts.sum(1)[:, None].expand(y.shape) * 1.0)


def trained(buffer: ElasticBuffer) -> None:
    """Forward of two layers, then backward, as torchtitan does: gradients are those of
    the plain layer."""

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weights: Any, ids: Any, expands: bool) -> Any:
            rows, row_ids, row_weights, ctx.handle, event = buffer.dispatch(
                x, ids, weights, num_experts=E, do_expand=expands,
                expert_alignment=4, async_with_compute_stream=True,
            )  # fmt: skip
            assert event.event is not None
            event.current_stream_wait()
            return rows, row_weights, row_ids, ctx.handle

        @staticmethod
        def backward(ctx: Any, rows: Any, weights: Any, *_: Any) -> Any:
            x, weights, event = buffer.combine(
                rows.contiguous(), ctx.handle, weights,
                async_with_compute_stream=True,
            )  # fmt: skip
            event.current_stream_wait()
            return x, weights, None, None

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Any, handle: Any) -> Any:
            ctx.handle = handle
            return buffer.combine(rows, handle=handle)[0]

        @staticmethod
        def backward(ctx: Any, y: Any) -> Any:
            handle = ctx.handle
            how = dict(num_sms=handle.num_sms, do_cpu_sync=False)
            rows, *_ = buffer.dispatch(y.contiguous(), handle=handle, **how)
            return rows, None

    for expands in (False, True):
        cases, outs = [Case(buffer, 70), Case(buffer, 71)], []
        for case in cases:
            case.x.requires_grad_()
            case.weights.requires_grad_()
            given = case.x, case.weights, case.ids, expands
            rows, weights, ids, handle = Dispatch.apply(*given)
            if ids is None:
                made = rows * weights.unsqueeze(1).bfloat16()
            else:
                here = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
                made = rows * here.bfloat16()
            outs.append(Combine.apply(made, handle))
        for case, y in zip(cases, outs):
            is_id = case.ids >= 0
            factors = torch.where(is_id, case.weights, 0).sum(1, keepdim=True)
            case.check_result(y.detach(), (case.x.float() * factors).detach())
            # All gradients of a result are 1.
            y.backward(torch.ones_like(y))
            assert torch.equal(case.x.grad.float(), factors.expand(y.shape).detach())
            sums = case.x.detach().float().sum(1, keepdim=True).bfloat16().float()
            want = torch.where(is_id, sums, 0)
            torch.testing.assert_close(case.weights.grad, want, rtol=0.02, atol=4)


def unrounded(buffer: ElasticBuffer) -> None:
    """Without several reductions the sum of a rank's rows is not rounded."""
    other = ElasticBuffer(
        buffer.group, num_max_tokens_per_rank=CAP, allow_multiple_reduction=False
    )
    case = Case(other, 3, "first")
    rows, _, _, handle, _ = case.dispatch(do_expand=True, expert_alignment=4)
    made = torch.full_like(rows, 2.0**-9)
    ends = handle.psum_num_recv_tokens_per_expert
    if case.rank == 0:
        made[: ends[0]] = 1
    y, *_ = other.combine(made, handle, bias=torch.full_like(case.x, -1.0))
    local = min(K, case.n_local)
    # The ranks of the first experts; on one rank all three.
    assert torch.equal(y, torch.full_like(y, (K - 1) * 2.0**-9)), (local, y)
    other.destroy()


def captured(buffer: ElasticBuffer) -> None:
    """Layers without the host's wait, two in flight, replayed with other routing. CPU
    ranks run them again. Eager calls go on between replays."""
    is_gpu = buffer._comm.is_gpu
    for expands in (False, True):
        cases = [Case(buffer, 90), Case(buffer, 91)]
        given = [[t.clone() for t in (c.x, c.ids, c.weights)] for c in cases]
        how = dict(num_experts=E, do_cpu_sync=False, do_expand=expands)
        how |= dict(expert_alignment=4)

        def layers(given: Any = given, how: Any = how) -> list[torch.Tensor]:
            outs = []
            for rows, ids, weights, handle, _ in [
                buffer.dispatch(*one, **how) for one in given
            ]:
                factors = weights[:, None]
                if ids is not None:
                    factors = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
                made = (rows.float() * factors).bfloat16()
                outs.append(buffer.combine(made, handle)[0])
            return outs

        outs = layers()
        graph = None
        if is_gpu:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                outs = layers()
        for seed in range(92, 95):
            eager = Case(buffer, seed)
            rows, ids, weights, handle, _ = eager.dispatch(
                expert_alignment=4, do_expand=expands
            )
            for case, one in zip(cases, given):
                draw = torch.Generator().manual_seed(seed + 1000 * buffer.rank_idx)
                n = len(case.x)
                ids_of = torch.rand(n, E, generator=draw).topk(K, -1).indices
                one[1].copy_(ids_of)
                one[0].mul_(-1)
            if graph is None:
                outs = layers()
            else:
                graph.replay()
            for one, y in zip(given, outs):
                want = one[0].float() * one[2].sum(1, keepdim=True)
                eager.check_result(y, want)
            made = eager.run_experts(rows, ids, weights, handle)
            eager.check_result(buffer.combine(made, handle)[0])


def refusals(buffer: ElasticBuffer) -> None:
    """Wrong calls say what to do, before anything is sent."""
    case = Case(buffer, 80)
    rows, ids, weights, handle, _ = case.dispatch()
    no_sizes = ElasticBuffer(buffer.group)
    for words, call in {
        "needs a handle, or topk_idx": lambda: buffer.dispatch(case.x),
        "raise that on all ranks": lambda: (
            case.dispatch(num_max_tokens_per_rank=len(case.x) - 1)
            if len(case.x) > 1
            else refused("raise that on all ranks")
        ),
        "neither here nor": lambda: no_sizes.dispatch(case.x, case.ids, num_experts=E),
        "is that of the handle": lambda: case.dispatch(handle=handle),
        "its sizes are known": lambda: buffer.dispatch(
            case.x, handle=handle, do_cpu_sync=True
        ),
        "num_experts=16": lambda: buffer.dispatch(
            case.x, handle=handle, num_experts=2 * E
        ),
        "is a tuple of 1": lambda: buffer.dispatch((case.x,), case.ids),
        "pass what ElasticBuffer.dispatch": lambda: buffer.combine(rows, (1, 2)),
        "ids must be in": lambda: (
            buffer.dispatch(
                torch.zeros(1, H).bfloat16(), torch.tensor([[E]]), num_experts=E
            )
            if not buffer._comm.is_gpu  # nobody looks at them there
            else refused("ids must be in")
        ),
        "add them up": lambda: buffer.combine(rows, handle, bias=(case.x,) * 3),
        "engram_fetch: tables": lambda: buffer.engram_fetch(case.x),
    }.items():
        try:
            call()
        except (ValueError, TypeError, NotImplementedError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"nothing refused: {words}")
    no_sizes.destroy()
    made = case.run_experts(rows, ids, weights, handle)
    case.check_result(buffer.combine(made, handle)[0])


def refused(words: str) -> None:
    raise ValueError(words)


SCENARIOS = (
    layers,
    handles,
    sizes,
    biases,
    roundings,
    pairs,
    trained,
    unrounded,
    captured,
    refusals,
)


def member(rank: int, n_ranks: int, store: str, names: list[str]) -> dict[str, str]:
    """Runs scenarios; returns what went wrong."""
    open_group(rank, n_ranks, store)
    buffer = ElasticBuffer(
        dist.group.WORLD,
        num_max_tokens_per_rank=CAP,
        hidden=H,
        num_topk=K,
        timeout_s=500,
    )
    errors = {}
    for scenario in SCENARIOS:
        if names and scenario.__name__ not in names:
            continue
        try:
            scenario(buffer)
        except Exception:
            errors[scenario.__name__] = traceback.format_exc()
            break
    buffer.destroy()
    dist.destroy_process_group()
    return errors
