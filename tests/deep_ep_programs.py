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
    return (
        (x.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2).bfloat16()
    )


class LikeVllm:
    """`DeepEPLLPrepareAndFinalize` of vLLM 0.33.0 with its manager's buffer."""

    def __init__(self, group: Any) -> None:
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank=CAP,
            hidden=H,
            num_ranks=group.size(),
            num_experts=E,
        )
        self.buffer = deep_ep.Buffer(
            group=group,
            num_nvl_bytes=0,
            num_rdma_bytes=hint,
            low_latency_mode=True,
            num_qps_per_rank=E // group.size(),
            allow_nvlink_for_low_latency_mode=True,
            allow_mnnvl=False,
            explicitly_destroy=True,
            enable_shrink=False,
        )
        self.handles: list[Any] = [None, None]

    def prepare_async(self, x: torch.Tensor, ids: torch.Tensor, ubatch: int) -> Any:
        found = self.buffer.low_latency_dispatch(
            x,
            ids,
            CAP,
            E,
            use_fp8=True,
            round_scale=False,
            use_ue8m0=False,
            async_finish=False,
            return_recv_hook=True,
        )
        rows, counts, self.handles[ubatch], _, hook = found
        return hook, lambda: (cast_back(*rows), counts)

    def finalize_async(
        self, out: torch.Tensor, y: torch.Tensor, ids: Any, weights: Any, ubatch: int
    ) -> Any:
        _, _, hook = self.buffer.low_latency_combine(
            y,
            ids,
            weights,
            self.handles[ubatch],
            async_finish=False,
            zero_copy=False,
            return_recv_hook=True,
            out=out,
        )
        return hook

    def run(self, batches: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        """Two micro-batches in flight."""
        pending = [self.prepare_async(x, i, u) for u, (x, i, _) in enumerate(batches)]
        outs, hooks = [], []
        for ubatch, (hook, receiver) in enumerate(pending):
            hook()
            x, ids, weights = batches[ubatch]
            outs.append(torch.empty_like(x))
            given = (outs[-1], receiver()[0] * 2, ids, weights, ubatch)
            hooks.append(self.finalize_async(*given))
        for hook in hooks:
            hook()
        return outs


class LikeSglang:
    """`_DeepEPDispatcherImplLowLatency` of SGLang 0.5.23 and `DeepEPBuffer`."""

    def __init__(self, group: Any, return_recv_hook: bool) -> None:
        nvl_bytes = rdma_bytes = 0
        for config in (
            deep_ep.Buffer.get_dispatch_config(group.size()),
            deep_ep.Buffer.get_combine_config(group.size()),
        ):
            nvl = config.get_nvl_buffer_size_hint(2 * H, group.size())
            rdma = config.get_rdma_buffer_size_hint(2 * H, group.size())
            nvl_bytes, rdma_bytes = max(nvl, nvl_bytes), max(rdma, rdma_bytes)
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(CAP, H, group.size(), E)
        self.buffer = deep_ep.Buffer(
            group,
            nvl_bytes,
            max(hint, rdma_bytes),
            low_latency_mode=True,
            num_qps_per_rank=max(deep_ep.Buffer.num_sms, E // group.size()),
            allow_mnnvl=True,
        )
        self.buffer.clean_low_latency_buffer(CAP, H, E)
        self.return_recv_hook = return_recv_hook

    def wait(self, event: Any, hook: Any) -> None:
        hook() if self.return_recv_hook else event.current_stream_wait()

    def run(self, batches: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        outs = []
        for x, ids, weights in batches:
            rows, masked_m, handle, event, hook = self.buffer.low_latency_dispatch(
                x,
                ids.to(torch.int64),
                CAP,
                E,
                use_fp8=False,
                async_finish=not self.return_recv_hook,
                return_recv_hook=self.return_recv_hook,
            )
            self.wait(event, hook)
            assert masked_m.dtype == torch.int32 and len(masked_m) == len(rows)
            y, event, hook = self.buffer.low_latency_combine(
                x=rows * 2,
                topk_idx=ids,
                topk_weights=weights,
                handle=handle,
                async_finish=not self.return_recv_hook,
                return_recv_hook=self.return_recv_hook,
            )
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

    def run(self, batches: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        outs = []
        later = dict(async_finish=True, allocate_on_comm_stream=True)
        for x, ids, weights in batches:
            event = EventOverlap(EventHandle())
            layout = self.buffer.get_dispatch_layout(
                ids, E, previous_event=event, **later
            )
            per_rank, per_rdma_rank, per_expert, in_rank, event = layout
            rows, _, row_weights, counts, handle, event = self.buffer.dispatch(
                x,
                topk_idx=ids,
                topk_weights=weights,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_rdma_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                previous_event=event,
                **later,
            )
            event.current_stream_wait()
            assert len(counts) == E // self.buffer.group_size
            made = (rows.float() * 2 * row_weights.sum(1, keepdim=True)).bfloat16()
            event = EventOverlap(EventHandle())
            y, _, event = self.buffer.combine(
                made, handle=handle, previous_event=event, **later
            )
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
