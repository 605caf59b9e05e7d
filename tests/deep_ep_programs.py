# SPDX-License-Identifier: Apache-2.0
"""Programs over `deep_ep`: the calls of vLLM, SGLang and Megatron-core.

The engines are not installed: each class stands for one of theirs and makes its calls
with its arguments. Experts double their rows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch_member import CAP, E, H, open_group, tokens_of, want_doubled

sys.path.append(str(Path(__file__).resolve().parent.parent / "integrations/deep_ep"))

import deep_ep
from deep_ep.utils import EventHandle, EventOverlap


def cast_back(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """FP8 and its scales, or their packed exponents, as bfloat16."""
    if scales.dtype == torch.int:
        exponents = scales.contiguous().view(torch.uint8).to(torch.int)
        scales = (exponents << 23).view(torch.float)
    wide = x.float().unflatten(-1, (-1, 128)) * scales[..., None]
    return wide.flatten(-2).bfloat16()


Batch = tuple[torch.Tensor, ...]
"""Tokens, ids and weights of a micro-batch."""


class LikeVllm:
    """`DeepEPLLPrepareAndFinalize` of vLLM 0.33.0 with its manager's buffer."""

    def __init__(self, group: Any) -> None:
        n = group.size()
        sizes = dict(num_max_dispatch_tokens_per_rank=CAP, hidden=H)
        sizes |= dict(num_ranks=n, num_experts=E)
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(**sizes)
        how = dict(low_latency_mode=True, num_qps_per_rank=E // n, allow_mnnvl=False)
        how |= dict(allow_nvlink_for_low_latency_mode=True, enable_shrink=False)
        self.buffer = deep_ep.Buffer(
            group=group,
            num_nvl_bytes=0,
            num_rdma_bytes=hint,
            explicitly_destroy=True,
            **how,
        )

    def run(self, batches: list[Batch]) -> list[torch.Tensor]:
        """Two micro-batches in flight."""
        how = dict(async_finish=False, return_recv_hook=True)
        of_fp8 = dict(use_fp8=True, round_scale=False, use_ue8m0=False)
        sent = [
            self.buffer.low_latency_dispatch(x, ids, CAP, E, **of_fp8, **how)
            for x, ids, _ in batches
        ]
        outs, hooks = [], []
        for (x, ids, weights), (rows, _, handle, _, hook) in zip(batches, sent):
            hook()
            outs.append(torch.empty_like(x))
            given = cast_back(*rows) * 2, ids, weights, handle
            to = dict(zero_copy=False, out=outs[-1])
            hooks.append(self.buffer.low_latency_combine(*given, **how, **to)[2])
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


class LikeMegatron:
    """`fused_a2a.py` of Megatron-core: asynchronous, allocated on the other stream."""

    def __init__(self, group: Any) -> None:
        config = deep_ep.Buffer.get_dispatch_config(group.size())
        hint = config.get_nvl_buffer_size_hint(2 * H, group.size())
        deep_ep.Buffer.set_num_sms(24)
        self.buffer = deep_ep.Buffer(group, hint, 0)

    def run(self, batches: list[Batch]) -> list[torch.Tensor]:
        outs = []
        later = dict(async_finish=True, allocate_on_comm_stream=True)
        for x, ids, weights in batches:
            how = dict(later, previous_event=EventOverlap(EventHandle()))
            per_rank, per_rdma_rank, per_expert, in_rank, event = (
                self.buffer.get_dispatch_layout(ids, E, **how)
            )
            how = dict(later, previous_event=event, topk_idx=ids, topk_weights=weights)
            how |= dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank)
            how |= dict(num_tokens_per_rdma_rank=per_rdma_rank)
            rows, _, row_weights, counts, handle, event = self.buffer.dispatch(
                x, num_tokens_per_expert=per_expert, **how
            )
            event.current_stream_wait()
            assert len(counts) == E // self.buffer.group_size
            made = (rows.float() * 2 * row_weights.sum(1, keepdim=True)).bfloat16()
            how = dict(later, previous_event=EventOverlap(EventHandle()))
            y, _, event = self.buffer.combine(made, handle=handle, **how)
            event.current_stream_wait()
            outs.append(y)
        return outs


def member(rank: int, n_ranks: int, store: str) -> None:
    open_group(rank, n_ranks, store)
    group = dist.group.WORLD
    for program in (
        LikeVllm(group),
        LikeSglang(group, True),
        LikeSglang(group, False),
        LikeMegatron(group),
    ):
        device = program.buffer._comm.device
        batches = [tuple(t.to(device) for t in tokens_of(rank, g)) for g in (0, 1)]
        for _ in range(2):
            for given, y in zip(batches, program.run(batches)):
                want = want_doubled(*given)
                torch.testing.assert_close(y.float(), want, rtol=2**-3, atol=2**-3)
        program.buffer.destroy()
    dist.destroy_process_group()
