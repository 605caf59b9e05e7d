# SPDX-License-Identifier: Apache-2.0
"""Layers from torch, one process a GPU: NCCL's, and ``max_ep.torch.Buffer``.

Two ways of moving the tokens of an MoE layer by NCCL:

- ``all_gather``: all-gather of every token to every rank, reduce-scatter
  (average) of what the ranks hold for each token. Nobody filters or sorts.
- ``all_to_all``: one row for each (token, rank) that has an expert of it: a
  gather kernel packs them, ``all_to_all_single`` sends them, the same back, and
  one kernel adds each token's rows with the weights of their ranks. The sizes
  of the messages are known in advance, which no router would give the host.

Neither sorts rows by expert: both do less than dispatch and combine. A layer of
``Buffer`` is ``low_latency_dispatch`` and ``low_latency_combine``: ``split`` with
receive hooks, ``fused`` without. Tokens are bfloat16. Chains and timing are those of
``bench.peer_graphs``.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import embedding_bag

from max_ep import reference
from max_ep.torch import Buffer

from . import cases
from .cases import Case
from .checks import CheckError, from_bits
from .peer_graphs import summary
from .processes import write


class _AllGather:
    """A layer of ``all_gather``; ``x`` is ``[n_tokens, hidden]`` bfloat16."""

    def __init__(self, case: Case, rank: int, x: Any) -> None:
        self.x = x
        self._all = x.new_empty((case.config.n_ranks * case.n_tokens, x.shape[1]))

    def run(self) -> None:
        dist.all_gather_into_tensor(self._all, self.x)
        dist.reduce_scatter_tensor(self.x, self._all, op=dist.ReduceOp.AVG)


class _AllToAll:
    """A layer of ``all_to_all``; ``x`` is ``[n_tokens, hidden]`` bfloat16."""

    def __init__(self, case: Case, rank: int, x: Any) -> None:
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
        weights = torch.from_numpy((hits.T / shape.top_k).astype(np.float32))
        self.x = x
        self._token_of_row = torch.from_numpy(token_of_row).to(x.device)
        self._place = torch.from_numpy(place).to(x.device)
        self.weights = weights.to(x.device, torch.bfloat16)
        self._packed = x.new_zeros((n_sent, x.shape[1]))
        self._arrived = x.new_zeros((sum(self._received), x.shape[1]))
        self._back = x.new_zeros((n_sent + 1, x.shape[1]))

    def run(self) -> None:
        torch.index_select(self.x, 0, self._token_of_row, out=self._packed)
        there, back = self._received, self._sent
        dist.all_to_all_single(self._arrived, self._packed, there, back)
        dist.all_to_all_single(self._back[:-1], self._arrived, back, there)
        sums = embedding_bag(
            self._place, self._back, per_sample_weights=self.weights, mode="sum"
        )
        self.x.copy_(sums)


class _Buffer:
    """A layer of ``buffer``, without the tokens."""

    def __init__(self, case: Case, rank: int, x: Any) -> None:
        config, n = case.config, case.config.n_ranks
        sizes = config.shape, n, case.n_tokens
        ids = cases.expert_ids(config.shape, case.routing, n, case.n_tokens)[rank]
        weights = cases.router_weights(*sizes)[rank]
        self.x = x
        self._ids = torch.from_numpy(ids).long().to(x.device)
        self.weights = torch.from_numpy(weights).to(x.device)
        self._most = config.max_tokens, config.shape.n_experts
        self._how = dict(return_recv_hook=case.form == "split")
        self.buffer = Buffer(dist.group.WORLD, low_latency_mode=True)

    def run(self) -> None:
        rows, _, handle, _, receive = self.buffer.low_latency_dispatch(
            self.x, self._ids, *self._most, use_fp8=False, **self._how
        )
        if receive is not None:
            receive()
        *_, receive = self.buffer.low_latency_combine(
            rows, self._ids, self.weights, handle, out=self.x, **self._how
        )
        if receive is not None:
            receive()


LAYERS: dict[tuple[str, str], Any] = {
    ("nccl", "all_gather"): _AllGather,
    ("nccl", "all_to_all"): _AllToAll,
    ("buffer", "fused"): _Buffer,
    ("buffer", "split"): _Buffer,
}


def run_rank(
    rank: int, port: int, todo: list[Case], options: Any, results: Path
) -> None:
    """Measures cases as one of several processes; rank 0 writes the results."""
    n_ranks = todo[0].config.n_ranks
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

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
            write(results, case, result)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def _measure(case: Case, rank: int, device: Any, options: Any) -> dict:
    shape, n = case.config.shape, case.config.n_ranks
    layers = case.config.n_layers
    bits = cases.tokens(shape, n, case.n_tokens)[rank]
    given = from_bits(bits, device)
    layer = LAYERS[case.config.peer, case.form](case, rank, given.clone())

    def check() -> None:
        # With half of the weights, where there are weights: tokens must not stay.
        factor = 0.5 if hasattr(layer, "weights") else 1.0
        layer.x.copy_(given)
        if factor != 1:
            layer.weights.mul_(factor)
        layer.run()
        if factor != 1:
            layer.weights.div_(factor)
        torch.cuda.synchronize()
        error = (layer.x.float() - factor * given.float()).abs().max().item()
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
    if isinstance(layer, _Buffer):
        layer.buffer.check()
        layer.buffer.destroy()
    return summary("us", "p95", seconds, layers * options.replays) | eager


def _sample(run: Callable[[], object], n_samples: int) -> list[float]:
    """Times ``run`` from the first process's begin to the last one's end; all have the
    host's monotonic clock."""
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


def run(todo: list[Case], options: Any, results: Path) -> None:
    """Starts one process a GPU and waits for them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = port, todo, options, results
    mp.spawn(run_rank, given, nprocs=todo[0].config.n_ranks)
