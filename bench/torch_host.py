# SPDX-License-Identifier: Apache-2.0
"""Times what an eager layer from PyTorch costs the host: dispatch and combine.

    torchrun --nproc-per-node N -m bench.torch_host [TOKENS...]

Of each interface, on the slowest rank: for how long a layer keeps the host, least and
median; the same without the library, with a function that does nothing in its place;
and how long the GPU takes for a layer that is enqueued before. CPU ranks show only the
second.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from max_ep.bench.clock import Clock, back_to_back
from max_ep.torch import Buffer, ElasticBuffer, EPHandle
from max_ep.torch.tables import allocator

_HIDDEN, EXPERTS, _TOP_K = 7168, 256, 8
_LAYERS = 20
"""So many make a sample. Many more would fill the queue of launches, and wait there."""
_SAMPLES = 200


def drawn(
    n_tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draws this rank's tokens, their experts and router weights."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(n_tokens, _HIDDEN, generator=draw).bfloat16().to(device)
    ids = torch.rand(n_tokens, EXPERTS, generator=draw).topk(_TOP_K).indices
    weights = torch.rand(n_tokens, _TOP_K, generator=draw).to(device)
    return x, ids.to(device), weights


def _layers(n_tokens: int, device: torch.device) -> Iterator[tuple[str, partial[None]]]:
    """Yields the name of an interface, and a function that runs a layer."""
    x, ids, weights = drawn(n_tokens, device)
    group = dist.group.WORLD

    buffer = Buffer(group, device=device)
    yield "low latency", partial(_low_latency, buffer, x, ids, weights)
    buffer.destroy()
    sizes = dict(num_max_tokens_per_rank=n_tokens, device=device)
    for expands in (False, True):
        elastic = ElasticBuffer(group, **sizes)
        how = dict(num_experts=EXPERTS, do_cpu_sync=False, do_expand=expands)
        form = "expanded" if expands else "plain"
        yield f"elastic, {form}", partial(_new, elastic, x, ids, weights, how)
        handle = elastic.dispatch(x, ids, weights, **how)[3]
        yield f"elastic, {form}, with a handle", partial(_again, elastic, x, handle)
        elastic.destroy()


def _low_latency(buffer: Buffer, x: Any, ids: Any, weights: Any) -> None:
    given = x, ids, len(x), EXPERTS
    rows, _, handle, *_ = buffer.low_latency_dispatch(*given, use_fp8=False)
    buffer.low_latency_combine(rows, ids, weights, handle)


def _new(elastic: ElasticBuffer, x: Any, ids: Any, weights: Any, how: Any) -> None:
    rows, _, _, handle, _ = elastic.dispatch(x, ids, weights, **how)
    elastic.combine(rows, handle)


def _again(elastic: ElasticBuffer, x: Any, handle: EPHandle) -> None:
    rows, *_ = elastic.dispatch(x, handle=handle)
    elastic.combine(rows, handle)


def _of_group(us: float) -> float:
    """Returns the time of the slowest rank."""
    slowest = torch.tensor([us])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def meet() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def _host_us(layer: Callable[[], None]) -> str:
    """Says for how long a layer keeps the host: least, and median."""
    for _ in range(_LAYERS):
        layer()
    times = []
    gc.collect()
    gc.disable()
    for _ in range(_SAMPLES):
        meet()
        begin = time.perf_counter()
        for _ in range(_LAYERS):
            layer()
        times.append(time.perf_counter() - begin)
    gc.enable()
    least, median = min(times), statistics.median(times)
    return " ".join(f"{_of_group(1e6 * t / _LAYERS):5.1f}" for t in (least, median))


def _gpu_us(layer: Callable[[], None]) -> float:
    clock = Clock([torch.cuda.current_stream()])
    seconds = back_to_back(clock, layer, _LAYERS, _SAMPLES // 4, meet)
    return _of_group(1e6 * statistics.median(seconds[:, 0]) / _LAYERS)


@contextmanager
def _no_kernels(layer: partial[None]) -> Iterator[None]:
    """Puts, into the libraries that a layer uses, what does nothing."""
    regions = layer.args[0]._comm.regions
    libraries = list(
        {id(region.library): region.library for region in regions}.values()
    )
    theirs = [(one.dispatch, one.combine) for one in libraries]
    for one in libraries:
        one.dispatch, one.combine = _nothing(one.dispatch), _nothing(one.combine)
    try:
        yield
    finally:
        for one, (dispatch, combine) in zip(libraries, theirs):
            one.dispatch, one.combine = dispatch, combine


def _nothing(function: Any) -> Any:
    """Returns a function of the same arguments that does nothing."""
    nothing = ctypes.CDLL(None)["labs"]
    nothing.argtypes, nothing.restype = function.argtypes, None
    return nothing


def main() -> None:
    device, is_gpu = torch.device("cpu"), torch.cuda.is_available()
    os.environ.setdefault("MAX_EP_TIMEOUT_S", "120")
    if is_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    who = torch.cuda.get_device_name() if is_gpu else "CPU"
    allocate = partial(allocator(device), (128, _HIDDEN), (_HIDDEN, 1), torch.bfloat16)
    say(f"{dist.get_world_size()} ranks, {who}; microseconds a layer")
    say(f"an allocation: {_host_us(allocate)}", flush=True)
    for n_tokens in [int(n) for n in sys.argv[1:]] or [1, 128]:
        for name, layer in _layers(n_tokens, device):
            layer()
            line = f"{n_tokens:4} tokens, {name:32}"
            if is_gpu:
                line += f" host {_host_us(layer)},"
            with _no_kernels(layer):
                line += f" without the library {_host_us(layer)}"
            if is_gpu:
                line += f", GPU {_gpu_us(layer):7.1f}"
            say(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
