# SPDX-License-Identifier: Apache-2.0
"""Times eager layers whose host waits for sizes, beside those whose host does not.

    torchrun --nproc-per-node N -m bench.torch_sync [TOKENS...]

A layer is dispatch and combine, back to back, by the host's clock from all GPUs idle to
all GPUs idle. Both must return the same bits.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from max_ep.torch import Buffer, ElasticBuffer

from .torch_host import EXPERTS, drawn, meet

_LAYERS, _SAMPLES = 10, 30

Layer = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Returns rows, and the result of combine."""


def _pairs(n_tokens: int, device: torch.device) -> Iterator[tuple[str, Layer, Layer]]:
    """Yields an interface: with the host's wait, and without."""
    x, ids, weights = drawn(n_tokens, device)
    group = dist.group.WORLD

    buffer = Buffer(group, device=device)
    layout = buffer.get_dispatch_layout(ids, EXPERTS)
    names = "num_tokens_per_rank", "", "num_tokens_per_expert", "is_token_in_rank"
    given = {name: one for name, one in zip(names, layout) if name}
    given |= dict(topk_idx=ids, topk_weights=weights)
    worst = n_tokens * dist.get_world_size()
    normal = partial(_normal, buffer, x, given)
    yield "normal", normal, partial(normal, num_worst_tokens=worst)
    buffer.destroy()
    for expands in (False, True):
        elastic = ElasticBuffer(group, num_max_tokens_per_rank=n_tokens, device=device)
        layer = partial(_elastic, elastic, x, ids, weights, expands)
        name = "elastic, expanded" if expands else "elastic, plain"
        yield name, layer, partial(layer, do_cpu_sync=False)
        elastic.destroy()


def _normal(buffer: Buffer, x: Any, given: Any, **how: Any) -> Any:
    rows, *_, handle, _ = buffer.dispatch(x, **given, **how)
    return rows, buffer.combine(rows, handle)[0]


def _elastic(
    buffer: ElasticBuffer, x: Any, ids: Any, weights: Any, expands: bool, **how: Any
) -> Any:
    how |= dict(num_experts=EXPERTS, do_expand=expands)
    rows, *_, handle, _ = buffer.dispatch(x, ids, weights, **how)
    return rows, buffer.combine(rows, handle)[0]


def _us(layer: Layer) -> float:
    """Returns the median time of a layer on the slowest rank."""
    times = []
    for _ in range(3 + _SAMPLES):
        meet()
        begin = time.perf_counter()
        for _ in range(_LAYERS):
            layer()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        us = torch.tensor([1e6 * (time.perf_counter() - begin) / _LAYERS])
        dist.all_reduce(us, dist.ReduceOp.MAX)
        times.append(us.item())
    return statistics.median(times[3:])


def _check(synced: Layer, worst: Layer) -> None:
    rows, sums = synced()
    more_rows, same_sums = worst()
    same_rows = more_rows[: len(rows)]
    if not torch.equal(sums, same_sums):
        raise SystemExit("the sums differ")
    if not torch.equal(rows, same_rows):
        raise SystemExit("the rows differ")


def main() -> None:
    device, is_gpu = torch.device("cpu"), torch.cuda.is_available()
    os.environ.setdefault("MAX_EP_TIMEOUT_S", "120")
    if is_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    who = torch.cuda.get_device_name() if is_gpu else "CPU"
    for n_tokens in [int(n) for n in sys.argv[1:]] or [4096]:
        for name, synced, worst in _pairs(n_tokens, device):
            _check(synced, worst)
            line = f"{dist.get_world_size()} ranks, {who}, {n_tokens} tokens, {name}: "
            line += f"waits {_us(synced):.0f} us, does not {_us(worst):.0f} us"
            if dist.get_rank() == 0:
                print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
