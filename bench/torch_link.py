# SPDX-License-Identifier: Apache-2.0
"""Times low-latency layers from PyTorch, replayed from a captured graph.

    torchrun --nproc-per-node 2 -m bench.torch_link [TOKENS...]
    MAX_EP_LINK=1:0 torchrun --nproc-per-node 2 -m bench.torch_link [TOKENS...]

With the variable each rank stands for a host (docs/several_hosts.md). A graph is
replayed twice in a row, and the second time is taken, so ranks meet in the first. Both
modes of combine are timed, on the slowest rank.
"""

from __future__ import annotations

import os
import statistics
import sys

import torch
import torch.distributed as dist

from max_ep.torch import Buffer

from .torch_host import EXPERTS, drawn, meet

_LAYERS, _SAMPLES = 20, 30
_FEW = 128
"""Calls of so many tokens share their memory, which is for no more."""


def _us(buffer: Buffer, n_tokens: int, most: int) -> float:
    """Returns the median time of a layer on the slowest rank."""
    device = torch.device("cuda", torch.cuda.current_device())
    x, ids, weights = drawn(n_tokens, device)

    def layer() -> torch.Tensor:
        given = x, ids, most, EXPERTS
        rows, _, handle, *_ = buffer.low_latency_dispatch(*given, use_fp8=False)
        return buffer.low_latency_combine(rows, ids, weights, handle)[0]

    for _ in range(4):
        layer()
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAYERS):
            result = layer()
    times = []
    for _ in range(3 + _SAMPLES):
        meet()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        us = torch.tensor([1e3 * begin.elapsed_time(end) / _LAYERS])
        dist.all_reduce(us, dist.ReduceOp.MAX)
        times.append(us.item())
    buffer.check()
    # Each expert returns what it got.
    wanted = x.float() * weights.sum(1, keepdim=True)
    error = (result.float() - wanted).abs().max() / wanted.abs().max()
    if not error < 0.01:
        raise SystemExit(f"{n_tokens} tokens: a relative error of {error:.1e}")
    return statistics.median(times[3:])


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    sizes = [int(n) for n in sys.argv[1:]] or [1, 8, 128, 512, 4096]
    for mode in ("sums", "rows"):
        how = dict(low_latency_mode=True, combine_mode=mode, timeout_s=60)
        buffer = Buffer(dist.group.WORLD, **how)
        for n_tokens in sizes:
            most = _FEW if n_tokens <= _FEW else max(sizes)
            us = _us(buffer, n_tokens, most)
            torch.cuda.empty_cache()  # a graph's memory: rows have places for all
            if dist.get_rank() == 0:
                print(f"{mode}, {n_tokens} tokens: {us:.1f} us", flush=True)
        buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
