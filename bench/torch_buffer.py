# SPDX-License-Identifier: Apache-2.0
"""Times of ``Buffer`` on GPUs, beside NCCL: ``python -m bench.torch_buffer``.

One process a rank, each with a GPU. Host costs are those of eager calls, beside one
kernel of torch. A layer is dispatch and combine in a captured graph, with experts that
change nothing; its result is compared. NCCL's layer is two ``all_to_all_single`` with
the sizes known, a gather before and a weighted sum after, captured as well.
Each figure is the median of the samples, then the maximum over ranks, in us.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from max_ep import launch
from max_ep.torch import Buffer

HIDDEN, N_EXPERTS, TOP_K = 7168, 256, 8
TOKENS = (1, 8, 32, 128, 512, 4096)
SAMPLES = 40
REPLAYS = 10
HOST_CALLS = 200


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path, help="write the rows here, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = (options.ranks, f"{folder}/store", tuple(options.tokens))
        found = launch(member, options.ranks, given, timeout_s=280)
    rows = []
    for same in zip(*found):
        slowest = {
            name: max(row[name] for row in same)
            for name in same[0]
            if name.endswith(("_us", "_s"))
        }
        rows.append(same[0] | slowest)
        print(json.dumps(rows[-1]))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


def member(rank: int, n_ranks: int, store: str, tokens: tuple[int, ...]) -> list[dict]:
    """Measures; returns a row for each number of tokens."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=n_ranks
    )
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True)
    rows = []
    for n_tokens in tokens:
        row: dict[str, Any] = {"ranks": n_ranks, "tokens": n_tokens}
        row |= measure(buffer, n_tokens)
        rows.append(row)
        print(f"rank {rank}: {json.dumps(row)}", flush=True)
    buffer.destroy()
    dist.destroy_process_group()
    return rows


def measure(buffer: Buffer, n_tokens: int) -> dict[str, float]:
    """Checks and measures one number of tokens."""
    torch.manual_seed(buffer.rank)
    cap = max(128, n_tokens)
    x = torch.randn(n_tokens, HIDDEN, device="cuda").bfloat16()
    ids = torch.rand(n_tokens, N_EXPERTS, device="cuda").topk(TOP_K, -1).indices
    weights = torch.rand(n_tokens, TOP_K, device="cuda").softmax(-1)
    out = torch.empty_like(x)
    want = x.float() * weights.sum(1, keepdim=True)

    def dispatch() -> Any:
        return buffer.low_latency_dispatch(x, ids, cap, N_EXPERTS, use_fp8=False)

    def combine(found: Any) -> torch.Tensor:
        return buffer.low_latency_combine(found[0], ids, weights, found[2], out=out)[0]

    def split() -> torch.Tensor:
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, cap, N_EXPERTS, use_fp8=False, return_recv_hook=True
        )
        hook()
        y, _, hook = buffer.low_latency_combine(
            rows, ids, weights, handle, return_recv_hook=True, out=out
        )
        hook()
        return y

    def layer() -> torch.Tensor:
        return combine(dispatch())

    row = {}
    begin = time.perf_counter()
    layer()
    torch.cuda.synchronize()
    row["first_call_s"] = round(time.perf_counter() - begin, 2)
    row |= host_costs(dispatch, combine, out, x) if n_tokens <= 128 else {}
    for name, one in (("layer_us", layer), ("split_us", split)):
        row[name] = replayed(one, want)
    row["nccl_us"] = replayed(nccl_layer(buffer, x, ids, weights, out), want)
    buffer.check()
    return row


def host_costs(
    dispatch: Callable[[], Any],
    combine: Callable[[Any], Any],
    out: torch.Tensor,
    x: torch.Tensor,
) -> dict[str, float]:
    """Times calls on the host, where no queue is full."""
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter_ns()
        result = call()
        times.setdefault(name, []).append((time.perf_counter_ns() - begin) / 1000)
        return result

    for i in range(HOST_CALLS):
        found = timed("host_dispatch_us", dispatch)
        timed("host_combine_us", partial(combine, found))
        timed("host_torch_add_us", lambda: out.add_(x))
        if i % 20 == 0:
            torch.cuda.synchronize()
    return {name: round(statistics.median(t), 2) for name, t in times.items()}


def replayed(layer: Callable[[], torch.Tensor], want: torch.Tensor) -> float:
    """Captures a layer, compares its result, and times its replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = layer()
    for _ in range(3):
        y.zero_()
        graph.replay()
        torch.testing.assert_close(y.float(), want, rtol=2**-6, atol=2**-6)
    times = []
    for _ in range(SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # ranks meet here
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / REPLAYS)
    torch.testing.assert_close(y.float(), want, rtol=2**-6, atol=2**-6)
    return round(statistics.median(times), 2)


def nccl_layer(
    buffer: Buffer,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> Callable[[], torch.Tensor]:
    """Makes the layer of two `all_to_all_single`; a row for each choice."""
    n_ranks = buffer.group_size
    owners = (ids // (N_EXPERTS // n_ranks)).flatten()
    order = owners.argsort(stable=True)
    tokens = order // TOP_K
    sent = torch.bincount(owners, minlength=n_ranks)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    n_sent, n_received = sent.tolist(), received.tolist()
    arrived = x.new_empty((sum(n_received), HIDDEN))
    back = x.new_empty((len(order), HIDDEN))
    factors = weights.flatten()[order, None]

    def layer() -> torch.Tensor:
        dist.all_to_all_single(arrived, x[tokens], n_received, n_sent)
        dist.all_to_all_single(back, arrived, n_sent, n_received)
        sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return out.copy_(sums.index_add_(0, tokens, back.float() * factors))

    return layer


if __name__ == "__main__":
    main()
