# SPDX-License-Identifier: Apache-2.0
"""NCCL through torch, one process a GPU, and the links' own speed.

Two ways of moving the tokens of an MoE layer:

- ``all_gather``: all-gather of every token to every rank, reduce-scatter
  (average) of what the ranks hold for each token. Nobody filters or sorts.
- ``all_to_all``: one row for each (token, rank) that has an expert of it: a
  gather kernel packs them, ``all_to_all_single`` sends them, the same back, and
  one kernel adds each token's rows with the weights of their ranks. The sizes
  of the messages are known in advance, which no router would tell the host.

Neither sorts rows by expert, and FP8 tokens are given already quantized: both
do less than dispatch and combine. Chains and timing are those of
``bench.gpu_graphs_max``; an FP8 chain returns rows that do not depend on what
was dispatched.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from max_ep import reference

from . import gpu_shapes, gpu_traffic
from .gpu_shapes import Case, summary
from .watched import say

FORMS = {
    "all_gather": "all-gather + reduce-scatter",
    "all_to_all": "all-to-all of one row a (token, rank), and back",
}


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
        ids = gpu_shapes.expert_ids(shape, case.routing, n, case.n_tokens)
        rows = gpu_traffic.rows_between(shape, ids, "dedup")
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


_LAYERS: dict[str, Any] = {"all_gather": _AllGather, "all_to_all": _AllToAll}


def run_rank(
    rank: int, n_ranks: int, port: int, cases: list[dict], options: dict, out: str
) -> None:
    """Measures cases as one of ``n_ranks`` processes.

    Rank 0 writes one JSON line a case and form to ``out``.
    """
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", rank=rank, world_size=n_ranks, device_id=device
    )
    for values in cases:
        case = Case.from_json(values)
        for form in FORMS:
            if f"{case.name} {form}" not in options["todo"]:
                continue
            if rank == 0:
                say({"start": f"{case.name} {form}"})
            try:
                result = _measure(case, form, rank, device, options)
            except Exception as e:
                result = {"error": f"{type(e).__name__}: {e}"[:500]}
            if rank == 0:
                row = {"case": values, "form": form, **result}
                with Path(out).open("a") as file:
                    file.write(json.dumps(row) + "\n")
                say({"done": f"{case.name} {form}"})
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def _measure(case: Case, form: str, rank: int, device: Any, options: dict) -> dict:
    import torch

    from .gpu_checks import CheckError, from_bits

    n_samples, n_replays = options["samples"], options["replays"]
    shape, n = case.config.shape, case.config.n_ranks
    bits = gpu_shapes.tokens(shape, n, case.n_tokens)[rank]
    given = from_bits(bits, device)
    wire = None
    if case.config.dtype == "fp8":
        columns = gpu_traffic.row_bytes(shape, "fp8")[0]
        wire = torch.zeros((case.n_tokens, columns), dtype=torch.uint8, device=device)
    layer = _LAYERS[form](case, rank, given.clone(), wire)

    def check() -> None:
        layer.x.copy_(given)
        layer.run()
        torch.cuda.synchronize()
        if wire is None:
            error = (layer.x.float() - given.float()).abs().max().item()
            if not error <= 0.05 * given.float().abs().max().item():
                raise CheckError(f"{case.name} {form} rank {rank}: off by {error}")

    def chain() -> None:
        for _ in range(case.config.n_layers(form)):
            layer.run()

    check()
    seconds = _sample(chain, n_samples)
    result: dict[str, Any] = {"eager": summary(seconds, case.config.n_layers(form))}
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
        for _ in range(n_replays):
            graph.replay()

    seconds = _sample(replay, n_samples)
    result["captured"] = summary(seconds, case.config.n_layers(form) * n_replays)
    check()
    return result


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


def run_cases(n_ranks: int, cases: list[dict], options: dict, out: str) -> None:
    """Starts one process a GPU and waits for them."""
    import socket

    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, (n_ranks, port, cases, options, out), nprocs=n_ranks)


# -------------------------------------------------------------------------- links


def measure_links(n_gpus: int, n_mb: int = 256, n_runs: int = 10) -> dict:
    """Measures peer copies (copy engines, through torch), in GB/s.

    Returns:
        ``one_way``: GPU 0 to GPU 1, nothing else; ``all_to_all``: all ordered
        pairs at once, GB/s that leave one GPU; ``local``: a copy within GPU 0,
        counting bytes read and bytes written. Median of ``n_runs``.
    """
    import torch

    n_bytes = n_mb * 1_000_000

    def copies(pairs: list[tuple[int, int]]) -> float:
        work = []
        for src, dst in pairs:
            with torch.cuda.device(src):
                stream = torch.cuda.Stream()
            source = torch.ones(n_bytes, dtype=torch.uint8, device=f"cuda:{src}")
            target = torch.empty(n_bytes, dtype=torch.uint8, device=f"cuda:{dst}")
            work.append((stream, source, target))
        seconds = []
        for _ in range(n_runs + 2):
            for i in range(n_gpus):
                torch.cuda.synchronize(i)
            begin = time.perf_counter()
            for stream, source, target in work:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
            for i in range(n_gpus):
                torch.cuda.synchronize(i)
            seconds.append(time.perf_counter() - begin)
        return float(np.median(seconds[2:]))

    found = {"local": 2 * n_bytes / copies([(0, 0)]) / 1e9}
    if n_gpus > 1:
        found["one_way"] = n_bytes / copies([(0, 1)]) / 1e9
        pairs = [(a, b) for a in range(n_gpus) for b in range(n_gpus) if a != b]
        found["all_to_all"] = (n_gpus - 1) * n_bytes / copies(pairs) / 1e9
    return found
