# SPDX-License-Identifier: Apache-2.0
"""Times a layer of ``ElasticBuffer``, plain rows, on few multiprocessors, and matmuls
beside it.

    torchrun --nproc-per-node N -m bench.num_sms [TOKENS]
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from max_ep.torch import ElasticBuffer

_HIDDEN, _EXPERTS, _TOP_K = 7168, 256, 8
_NUMBERS = (4, 8, 16, 24, 32, 64, 0)
_BESIDE_MATMULS = 24
_LAYERS, _REPLAYS, _SAMPLES = 4, 4, 30
_TOLERANCE = 2.0**-7


def _captured_us(run: Callable[[], Any]) -> tuple[float, Any]:
    """Captures a function; returns what the slowest rank takes, and its last result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    times = []
    for _ in range(_SAMPLES):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        us = torch.tensor([1e3 * begin.elapsed_time(end) / _REPLAYS / _LAYERS])
        dist.all_reduce(us, dist.ReduceOp.MAX)
        times.append(us.item())
    return statistics.median(times), result


def main() -> None:
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    n_tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo")
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(n_tokens, _HIDDEN, generator=draw).bfloat16().cuda()
    ids = torch.rand(n_tokens, _EXPERTS, generator=draw).topk(_TOP_K).indices.cuda()
    weights = torch.rand(n_tokens, _TOP_K, generator=draw).cuda()
    sizes = dict(num_max_tokens_per_rank=n_tokens, hidden=_HIDDEN, num_topk=_TOP_K)
    buffer = ElasticBuffer(dist.group.WORLD, **sizes)
    ranks = torch.arange(n_ranks, device="cuda")
    goes_to = ((ids // (_EXPERTS // n_ranks)).unsqueeze(2) == ranks).any(1)
    n_sent = int(goes_to.sum() - goes_to[:, rank].sum())
    wanted = x.float() * goes_to.sum(1, keepdim=True)

    def layers(num_sms: int) -> torch.Tensor:
        # Fewer than calls can ask for, too.
        with buffer._comm._using_sms(num_sms):
            for _ in range(_LAYERS):
                how = dict(num_experts=_EXPERTS, do_cpu_sync=False)
                rows, _, _, handle, _ = buffer.dispatch(x, ids, weights, **how)
                result = buffer.combine(rows, handle)[0]
        return result

    def say(text: str) -> None:
        if rank == 0:
            print(f"{n_ranks} GPUs, {n_tokens} tokens, {text}", flush=True)

    for num_sms in _NUMBERS:
        us, result = _captured_us(partial(layers, num_sms))
        off = (result.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
        if not off.max() < _TOLERANCE:
            raise SystemExit(f"{num_sms} multiprocessors: wrong result, {off.max()}")
        gb_s = 2 * n_sent * 2 * _HIDDEN / us / 1e3
        say(f"multiprocessors {num_sms or 'all'}: {us:.1f} us, {gb_s:.0f} GB/s")

    factors = torch.randn(2, 4096, 4096, device="cuda", dtype=torch.bfloat16)

    def matmuls(n: int) -> None:
        for _ in range(n):
            torch.mm(*factors)

    alone, _ = _captured_us(lambda: layers(_BESIDE_MATMULS))
    of_one = _captured_us(lambda: matmuls(_LAYERS))[0]
    n = max(1, round(alone / of_one))
    of_matmuls, _ = _captured_us(lambda: matmuls(n * _LAYERS))
    other = torch.cuda.Stream()

    def both() -> None:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            matmuls(n * _LAYERS)
        layers(_BESIDE_MATMULS)
        torch.cuda.current_stream().wait_stream(other)

    together, _ = _captured_us(both)
    ratio = together / max(alone, of_matmuls)
    say(
        f"{_BESIDE_MATMULS} multiprocessors: {alone:.1f} us, matmuls {of_matmuls:.1f}, "
        f"together {together:.1f}: {ratio:.2f} times the longer"
    )
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
