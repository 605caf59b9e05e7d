# SPDX-License-Identifier: Apache-2.0
"""NCCL through torch, one process a GPU.

Two ways of moving the tokens of an MoE layer:

- ``all_gather``: all-gather of every token to every rank, reduce-scatter
  (average) of what the ranks hold for each token. Nobody filters or sorts.
- ``all_to_all``: one row for each (token, rank) that has an expert of it: a
  gather kernel packs them, ``all_to_all_single`` sends them, the same back, and
  one kernel adds each token's rows with the weights of their ranks. The sizes
  of the messages are known in advance, which no router would give the host.

Neither sorts rows by expert, and FP8 tokens are given already quantized: both
do less than dispatch and combine. Chains and timing are those of
``bench.peer_graphs``; an FP8 chain returns rows that do not depend on what
was dispatched.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from max_ep import reference

from . import cases
from .cases import Case
from .peer_graphs import summary


class _AllGather:
    """A layer of ``all_gather``; ``x`` is ``[n_tokens, hidden]`` bfloat16."""

    def __init__(self, case: Case, rank: int, x: Any, wire: Any) -> None:
        import torch

        n = case.config.n_ranks
        self.x, self._wire = x, wire
        like = x if wire is None else wire
        self._everything = torch.empty(
            (n * case.n_tokens, like.shape[1]), dtype=like.dtype, device=like.device
        )
        # What the ranks hold for each token: the tokens as they came; for FP8
        # other rows, as those cannot be reduced.
        self._rows = (
            self._everything
            if wire is None
            else torch.cat([x * 0 + (r + 1) for r in range(n)])
        )

    def run(self) -> None:
        import torch.distributed as dist

        sent = self.x if self._wire is None else self._wire
        dist.all_gather_into_tensor(self._everything, sent)
        dist.reduce_scatter_tensor(self.x, self._rows, op=dist.ReduceOp.AVG)


class _AllToAll:
    """A layer of ``all_to_all``; ``x`` is ``[n_tokens, hidden]`` bfloat16."""

    def __init__(self, case: Case, rank: int, x: Any, wire: Any) -> None:
        import torch

        shape, n = case.config.shape, case.config.n_ranks
        ids = cases.expert_ids(shape, case.routing, n, case.n_tokens)
        rows = cases.rows_between(shape, ids, "dedup")
        self._sent, self._received = rows[rank].tolist(), rows[:, rank].tolist()
        n_local = reference.n_local_experts(shape.n_experts, n)
        rank_of = ids[rank] // n_local
        hits = np.stack([(rank_of == dst).sum(axis=1) for dst in range(n)])
        token_of_row = np.concatenate([np.flatnonzero(row) for row in hits])
        # Where each token's row of each rank is; past the last: there is none.
        n_sent = len(token_of_row)
        place = np.full((case.n_tokens, n), n_sent)
        place.T[hits > 0] = np.arange(n_sent)
        like = x if wire is None else wire
        device = x.device

        def buffer(n_rows: int, columns: int, dtype: Any) -> Any:
            return torch.zeros((n_rows, columns), dtype=dtype, device=device)

        hidden = shape.hidden_size
        self.x, self._wire = x, wire
        self._token_of_row = torch.from_numpy(token_of_row).to(device)
        self._place = torch.from_numpy(place).to(device)
        self._weights = (
            torch.from_numpy((hits.T / shape.top_k).astype(np.float32))
            .to(device)
            .to(torch.bfloat16)
        )
        self._packed = buffer(n_sent, like.shape[1], like.dtype)
        self._arrived = buffer(sum(self._received), like.shape[1], like.dtype)
        self._rows = (
            self._arrived
            if wire is None
            else buffer(sum(self._received), hidden, torch.bfloat16) + (rank + 1)
        )
        self._back = buffer(n_sent + 1, hidden, torch.bfloat16)

    def run(self) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.functional import embedding_bag

        sent = self.x if self._wire is None else self._wire
        torch.index_select(sent, 0, self._token_of_row, out=self._packed)
        dist.all_to_all_single(self._arrived, self._packed, self._received, self._sent)
        dist.all_to_all_single(self._back[:-1], self._rows, self._sent, self._received)
        sums = embedding_bag(
            self._place, self._back, per_sample_weights=self._weights, mode="sum"
        )
        self.x.copy_(sums)


LAYERS: dict[str, Any] = {"all_gather": _AllGather, "all_to_all": _AllToAll}


def run_rank(
    rank: int, n_ranks: int, port: int, todo: list[Case], options: Any
) -> None:
    """Measures cases as one of ``n_ranks`` processes; rank 0 writes the results."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", rank=rank, world_size=n_ranks, device_id=device
    )
    for case in todo:
        try:
            result = _measure(case, rank, device, options)
        except Exception as e:
            result = {"error": f"{type(e).__name__}: {e}"[:500]}
        if rank == 0:
            options.write(case, result)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def _measure(case: Case, rank: int, device: Any, options: Any) -> dict:
    import torch

    from .checks import CheckError, from_bits

    shape, n = case.config.shape, case.config.n_ranks
    layers = case.config.n_layers
    bits = cases.tokens(shape, n, case.n_tokens)[rank]
    given = from_bits(bits, device)
    wire = None
    if case.config.dtype == "fp8":
        columns = cases.row_bytes(shape, "fp8")[0]
        wire = torch.zeros((case.n_tokens, columns), dtype=torch.uint8, device=device)
    layer = LAYERS[case.form](case, rank, given.clone(), wire)

    def check() -> None:
        layer.x.copy_(given)
        layer.run()
        torch.cuda.synchronize()
        if wire is None:
            error = (layer.x.float() - given.float()).abs().max().item()
            if not error <= 0.05 * given.float().abs().max().item():
                raise CheckError(f"{case.name} rank {rank}: off by {error}")

    def chain() -> None:
        for _ in range(layers):
            layer.run()

    check()
    eager = summary("eager_us", "eager_p95", _sample(chain, options.samples), layers)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        chain()

    def replay() -> None:
        for _ in range(options.replays):
            graph.replay()

    seconds = _sample(replay, options.samples)
    check()
    return summary("us", "p95", seconds, layers * options.replays) | eager


def _sample(run: Callable[[], object], n_samples: int) -> list[float]:
    """Times ``run`` from the first process's begin to the last one's end.

    All clocks are the host's monotonic one, so they can be compared.
    """
    import torch
    import torch.distributed as dist

    n_warm_ups = max(3, n_samples // 6)
    spans = torch.zeros((n_samples, 2), dtype=torch.float64)
    flag = torch.zeros(1)
    gc.collect()
    gc.disable()
    for i in range(-n_warm_ups, n_samples):
        torch.cuda.synchronize()
        dist.all_reduce(flag)  # on the host (gloo): a barrier
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if i >= 0:
            spans[i, 0], spans[i, 1] = begin, time.perf_counter()
    gc.enable()
    gathered = [torch.empty_like(spans) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, spans)
    everyone = torch.stack(gathered)
    return (everyone[:, :, 1].amax(0) - everyone[:, :, 0].amin(0)).tolist()


def run(todo: list[Case], options: Any) -> None:
    """Starts one process a GPU and waits for them."""
    import socket

    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    n_ranks = todo[0].config.n_ranks
    mp.spawn(run_rank, (n_ranks, port, todo, options), nprocs=n_ranks)
