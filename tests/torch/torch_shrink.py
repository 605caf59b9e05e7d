# SPDX-License-Identifier: Apache-2.0
"""DeepEP's shrink scenario: ranks fail, the others see them in the mask and go on."""

import time

import torch
import torch.distributed as dist

from max_ep.torch import Buffer
from tests.torch.torch_member import open_group

N_RANKS = 5
FAILS_AT = {"dispatch": 1, "combine": 2, "clean": 3}
"""The rank that is gone when the call is made for the first time."""
E, K, H, CAP = 10, 3, 128, 8


def expected(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, dead: set[int]
) -> torch.Tensor:
    """Experts are the identity; what is on a masked rank is left out. Numbers are such
    that nothing is rounded."""
    is_there = torch.ones_like(weights, dtype=torch.bool)
    for rank in dead:
        is_there &= ids // (E // N_RANKS) != rank
    return x * (weights * is_there).sum(1, keepdim=True).bfloat16()


def member(rank: int, store: str, timeout_s: float) -> list[float]:
    """A rank that fails returns. Others return how long steps took."""
    open_group(rank, N_RANKS, store)
    buffer = Buffer(
        dist.group.WORLD, low_latency_mode=True, enable_shrink=True, timeout_s=timeout_s
    )
    device = buffer._comm.device
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-32, 32, (CAP, H), generator=generator).bfloat16().to(device)
    ids = torch.rand(CAP, E, generator=generator).topk(K, -1).indices.to(device)
    weights = torch.tensor([0.5, 0.25, 2.0]).expand(CAP, K).contiguous().to(device)
    dead: set[int] = set()
    status = torch.full((N_RANKS,), 7, dtype=torch.int32, device=device)

    def has_failed(call: str) -> bool:
        if call in FAILS_AT:
            dead.add(FAILS_AT[call])
        return FAILS_AT.get(call) == rank

    def check_mask(call: str) -> None:
        buffer.low_latency_query_mask_buffer(status)
        assert set(status.nonzero().flatten().tolist()) == dead, (call, status, dead)

    def dispatch(hook: bool = False):
        return buffer.low_latency_dispatch(
            x, ids, CAP, E, use_fp8=False, return_recv_hook=hook
        )

    def step(hook: bool) -> float:
        begin = time.monotonic()
        rows, _, handle, _, receive = dispatch(hook)
        if hook:
            receive()
        y, _, receive = buffer.low_latency_combine(
            rows, ids, weights, handle, return_recv_hook=hook
        )
        if hook:
            receive()
        buffer.check()
        wanted = expected(x, ids, weights, dead)
        assert torch.equal(y, wanted), (dead, hook)
        check_mask("step")
        return time.monotonic() - begin

    if has_failed("dispatch"):
        return []
    with torch.inference_mode():  # as an engine's first call; the others are not
        rows, _, handle, *_ = dispatch()
    check_mask("dispatch")
    if has_failed("combine"):
        return []
    y, *_ = buffer.low_latency_combine(rows, ids, weights, handle)
    check_mask("combine")
    assert torch.equal(y, expected(x, ids, weights, dead))
    if has_failed("clean"):
        return []
    buffer.clean_low_latency_buffer(CAP, H, E)
    check_mask("clean")
    # It went through the dispatch's channel: none is built for it.
    assert len(set(map(id, buffer._low_latency._found.values()))) == 1
    # Nothing waits any more, in both regions.
    times = [step(hook) for hook in (False, True, False, True)]
    # A rank that is waited for again has not come back.
    buffer.low_latency_update_mask_buffer(3, False)
    dead.discard(3)
    check_mask("update")
    dead.add(3)
    times.append(step(False))
    buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True).zero_()
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_query_mask_buffer(status)
    assert not status.any()
    times.append(step(True))
    # A rank that is alive may be masked, too, if all do so.
    if rank == 4:
        return times
    buffer.low_latency_update_mask_buffer(4, True)
    dead.add(4)
    times.append(step(False))
    buffer.destroy()
    dist.destroy_process_group()
    return times
