# SPDX-License-Identifier: Apache-2.0
"""Programs over `deep_ep`: the calls of vLLM, SGLang and Megatron-core.

The engines are not installed: each class stands for one of theirs and makes its calls
with its arguments. Experts double their rows.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.children import ROOT
from tests.torch.torch_member import CAP, E, H, open_group, tokens_of, want_doubled

sys.path.append(str(ROOT / "integrations/deep_ep"))

import deep_ep
from deep_ep.utils import EventHandle, EventOverlap

from max_ep.torch import dequantize


def layout_of(buffer: Any, ids: Any, **how: Any) -> tuple[dict[str, Any], Any]:
    """What a normal dispatch is given of a layout, and its event."""
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank")
    names += ("num_tokens_per_expert", "is_token_in_rank")
    *layout, event = buffer.get_dispatch_layout(topk_idx=ids, num_experts=E, **how)
    return dict(zip(names, layout)), event


def doubled(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What experts make of rows of a normal dispatch."""
    return (rows.float() * 2 * weights.sum(1, keepdim=True)).bfloat16()


def nvl_hint(group: Any) -> int:
    config = deep_ep.Buffer.get_dispatch_config(group.size())
    return config.get_nvl_buffer_size_hint(2 * H, group.size())


Batch = tuple[torch.Tensor, ...]
"""Tokens, ids and weights of a micro-batch."""


class LikeVllm:
    """`DeepEPLLPrepareAndFinalize` of vLLM 0.33.0 with its manager's buffer."""

    def __init__(self, group: Any) -> None:
        n = group.size()
        sizes = dict(num_max_dispatch_tokens_per_rank=CAP, hidden=H)
        sizes |= dict(num_ranks=n, num_experts=E)
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(**sizes)
        self.buffer = deep_ep.Buffer(
            group=group,
            num_nvl_bytes=1 << 30,
            num_rdma_bytes=hint,
            low_latency_mode=True,
            num_qps_per_rank=E // n,
            allow_nvlink_for_low_latency_mode=True,
            allow_mnnvl=False,
            enable_shrink=False,
            explicitly_destroy=True,
        )

    def run(self, batches: list[Batch]) -> list[torch.Tensor]:
        """Two micro-batches in flight."""
        buffer, max_tokens, n_experts, sent = self.buffer, CAP, E, []
        for x, topk_ids, _ in batches:
            rows, counts, handle, _, hook = buffer.low_latency_dispatch(
                x,
                topk_ids,
                max_tokens,
                n_experts,
                use_fp8=True,
                round_scale=False,
                use_ue8m0=False,
                async_finish=False,
                return_recv_hook=True,
            )
            sent.append((rows, handle, hook))
        outs, hooks = [], []
        for (x, topk_ids, topk_weights), (rows, handle, hook) in zip(batches, sent):
            hook()
            output = torch.empty_like(x)
            rows = dequantize(*rows).bfloat16() * 2  # the experts
            _, _, hook = buffer.low_latency_combine(
                rows,
                topk_ids,
                topk_weights,
                handle,
                async_finish=False,
                zero_copy=False,
                return_recv_hook=True,
                out=output,
            )
            outs.append(output)
            hooks.append(hook)
        for hook in hooks:
            hook()
        return outs


class LikeSglang:
    """`_DeepEPDispatcherImplLowLatency` of SGLang 0.5.23 and `DeepEPBuffer`."""

    def __init__(self, group: Any, return_recv_hook: bool) -> None:
        nvl_bytes = rdma_bytes = 0
        n, of_kind = group.size(), deep_ep.Buffer
        for config in (of_kind.get_dispatch_config(n), of_kind.get_combine_config(n)):
            nvl = config.get_nvl_buffer_size_hint(2 * H, n)
            rdma = config.get_rdma_buffer_size_hint(2 * H, n)
            nvl_bytes, rdma_bytes = max(nvl, nvl_bytes), max(rdma, rdma_bytes)
        hint = of_kind.get_low_latency_rdma_size_hint(CAP, H, n, E)
        how = dict(low_latency_mode=True, allow_mnnvl=True)
        how |= dict(num_qps_per_rank=max(deep_ep.Buffer.num_sms, E // n))
        self.buffer = of_kind(group, nvl_bytes, max(hint, rdma_bytes), **how)
        self.buffer.clean_low_latency_buffer(CAP, H, E)
        self.how = dict(async_finish=not return_recv_hook)
        self.how |= dict(return_recv_hook=return_recv_hook)

    def wait(self, event: Any, hook: Any) -> None:
        hook() if self.how["return_recv_hook"] else event.current_stream_wait()

    def run(self, batches: list[Batch]) -> list[torch.Tensor]:
        outs = []
        for x, ids, weights in batches:
            rows, masked_m, handle, event, hook = self.buffer.low_latency_dispatch(
                x, ids.to(torch.int64), CAP, E, use_fp8=False, **self.how
            )
            self.wait(event, hook)
            assert masked_m.dtype == torch.int32 and len(masked_m) == len(rows)
            given = dict(x=rows * 2, topk_idx=ids, topk_weights=weights, handle=handle)
            y, event, hook = self.buffer.low_latency_combine(**given, **self.how)
            self.wait(event, hook)
            outs.append(y)
        return outs


class LikeSglangAuto:
    """SGLang's mode `auto`: one Buffer, prefill by normal calls, then decode."""

    def __init__(self, group: Any) -> None:
        self.decode = LikeSglang(group, True)
        self.buffer = self.decode.buffer

    def run(self, batches: list[Batch]) -> list[torch.Tensor]:
        (x, ids, weights), *others = batches
        how = dict(async_finish=True, allocate_on_comm_stream=True)
        before = self.buffer.capture()
        layout, before = layout_of(self.buffer, ids, previous_event=before, **how)
        given = dict(topk_idx=ids, topk_weights=weights, expert_alignment=128)
        given |= dict(config=None, previous_event=before)
        rows, _, row_weights, counts, handle, event = self.buffer.dispatch(
            x, **layout, **given, **how
        )
        event.current_stream_wait()
        assert all(n % 128 == 0 for n in counts)
        made = doubled(rows, row_weights)
        how |= dict(config=None, previous_event=self.buffer.capture())
        y, _, event = self.buffer.combine(made, handle, **how)
        event.current_stream_wait()
        self.buffer.clean_low_latency_buffer(CAP, H, E)
        return [y, *self.decode.run(others)]


class LikeVllmPrefill:
    """`DeepEPHTPrepareAndFinalize` of vLLM 0.33.0: two micro-batches in flight."""

    def __init__(self, group: Any) -> None:
        self.buffer = deep_ep.Buffer(group=group, num_nvl_bytes=nvl_hint(group))

    def run(self, batches: list[Batch]) -> list[torch.Tensor]:
        n, buffer = self.buffer.group_size, self.buffer
        later = dict(previous_event=None, allocate_on_comm_stream=False)
        sent = []
        for x, ids, weights in batches:
            layout, _ = layout_of(buffer, ids, async_finish=False, **later)
            how = dict(expert_alignment=1, config=buffer.get_dispatch_config(n))
            how |= dict(topk_idx=ids, topk_weights=weights, async_finish=True)
            sent.append(buffer.dispatch(x=x, handle=None, **layout, **how, **later))
        outs = []
        for rows, row_ids, row_weights, counts, handle, event in sent:
            event.current_stream_wait()
            assert sum(counts) == int((row_ids >= 0).sum())
            how = dict(topk_weights=None, config=buffer.get_combine_config(n))
            how |= dict(x=doubled(rows, row_weights), async_finish=True)
            y, _, event = buffer.combine(handle=handle, **how, **later)
            event.current_stream_wait()
            outs.append(y)
        return outs


def later() -> dict[str, Any]:
    """What Megatron-core passes to each call."""
    event = EventOverlap(EventHandle())
    how = dict(async_finish=True, allocate_on_comm_stream=True)
    return dict(how, previous_event=event)


class FusedDispatch(torch.autograd.Function):
    """A class of Megatron-core's `fused_a2a.py`, as the next one."""

    @staticmethod
    def forward(ctx: Any, x: Any, ids: Any, weights: Any, program: Any):
        buffer = program.buffer
        layout, event = layout_of(buffer, ids, **later())
        how = dict(later(), topk_idx=ids, topk_weights=weights, previous_event=event)
        rows, row_ids, row_weights, counts, handle, event = buffer.dispatch(
            x, **layout, **how
        )
        event.current_stream_wait()
        ctx.program, ctx.handle = program, handle
        return rows, row_ids, row_weights, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx: Any, rows: Any, _: Any, weights: Any, *__: Any):
        buffer, handle = ctx.program.buffer, ctx.handle
        grad, grad_weights, event = buffer.combine(
            rows.contiguous(), handle, topk_weights=weights.float(), **later()
        )
        event.current_stream_wait()
        return grad, None, grad_weights, None


class FusedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, handle: Any, program: Any):
        y, _, event = program.buffer.combine(rows, handle=handle, **later())
        event.current_stream_wait()
        ctx.program, ctx.handle = program, handle
        return y

    @staticmethod
    def backward(ctx: Any, y: torch.Tensor):
        buffer, handle = ctx.program.buffer, ctx.handle
        rows, *_, event = buffer.dispatch(y.contiguous(), handle=handle, **later())
        event.current_stream_wait()
        return rows, None, None


class LikeMegatron:
    """A pipeline of training: two micro-batches forward, then both backward. Between
    them a wider layer has the Buffer replaced, as in Megatron's `get_buffer`."""

    def __init__(self, group: Any) -> None:
        deep_ep.Buffer.set_num_sms(24)
        self.open(group)

    def open(self, group: Any) -> None:
        self.buffer = deep_ep.Buffer(group, nvl_hint(group), 0)

    def run(self, batches: list[Batch]) -> list[torch.Tensor]:
        outs = []
        given = [
            (x.clone().requires_grad_(), ids, weights.clone().requires_grad_())
            for x, ids, weights in batches
        ]
        for one in given:
            rows, ids, weights, counts, handle = FusedDispatch.apply(*one, self)
            assert len(counts) == E // self.buffer.group_size
            made = doubled(rows, weights.masked_fill(ids < 0, 0))
            outs.append(FusedCombine.apply(made, handle, self))
        self.open(self.buffer.group)
        for y, (x, ids, weights) in zip(outs, given):
            y.float().sum().backward()
            alike = dict(rtol=2**-5, atol=2**-5)
            sums = weights.masked_fill(ids < 0, 0).sum(1, keepdim=True)
            want = (2 * sums).expand(x.shape).detach()
            torch.testing.assert_close(x.grad.float(), want, **alike)
            want = (2 * x.detach().float()).sum(1, keepdim=True).expand(ids.shape)
            want = want.masked_fill(ids < 0, 0)
            torch.testing.assert_close(weights.grad, want, **alike)
        return [y.detach() for y in outs]


def member(rank: int, n_ranks: int, store: str) -> None:
    open_group(rank, n_ranks, store)
    group = dist.group.WORLD
    for program in (
        LikeVllm(group),
        LikeSglang(group, True),
        LikeSglang(group, False),
        LikeSglangAuto(group),
        LikeVllmPrefill(group),
        LikeMegatron(group),
    ):
        device = program.buffer._comm.device
        batches = [tuple(t.to(device) for t in tokens_of(rank, g)) for g in (0, 1)]
        for _ in range(2):
            with torch.inference_mode(not isinstance(program, LikeMegatron)):
                outs = program.run(batches)
            for given, y in zip(batches, outs):
                want = want_doubled(*given)
                torch.testing.assert_close(y.float(), want, rtol=2**-3, atol=2**-3)
        program.buffer.destroy()
    dist.destroy_process_group()
