# SPDX-License-Identifier: Apache-2.0
"""Times layers from PyTorch: one process a GPU, each with a captured graph.

Chains and clock are those of ``peer_graphs.py``; a sample is the time of the rank that
took longest.
"""

from __future__ import annotations

import importlib
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

from .cases import Case
from .clock import Clock, back_to_back, from_idle, summary
from .runs import write
from .systems import BY_PEER, System

LAYERS = {
    ("nccl", "all_gather"): "torch_layers.AllGather",
    ("nccl", "all_to_all"): "torch_layers.AllToAll",
    ("buffer", "fused"): "torch_layers.LowLatency",
    ("buffer", "split"): "torch_layers.LowLatency",
    ("buffer_sums", "fused"): "torch_layers.LowLatencySums",
    ("buffer_sums", "split"): "torch_layers.LowLatencySums",
    ("elastic", "plain"): "torch_layers.Elastic",
    ("elastic", "expanded"): "torch_layers.Elastic",
    ("deepep_v1", "fused"): "other_layers.DeepEPV1",
    ("deepep_v2", "plain"): "other_layers.DeepEPV2",
    ("deepep_v2", "expanded"): "other_layers.DeepEPV2",
    ("trtllm", "fused"): "other_layers.OneSided",
    ("nccl_ep", "fused"): "other_layers.NcclEP",
}
"""Module and class of each peer and form."""

OTHER_INTERFACE = "installed, but its interface is not that"
"""Part of what is said of a version that this package does not know."""

_AHEAD_S = 500e-6
"""So long before its begin the ranks agree when a sample begins."""


class FailedError(Exception):
    """What failed on some rank, in words."""


def layers_of(case: Case) -> type:
    """Returns the class of a case's layers."""
    module, _, name = LAYERS[case.config.peer, case.form].partition(".")
    return getattr(importlib.import_module(f".{module}", __package__), name)


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
        except FailedError as e:
            result = {"error": str(e)[:500]}
        except Exception as e:
            result = {"error": f"{type(e).__name__}: {e}"[:500]}
        if rank == 0:
            write(results, case, result)
        torch.cuda.empty_cache()
        if OTHER_INTERFACE in result.get("error", ""):
            break  # it is that of all sizes
    dist.destroy_process_group()


def _measure(case: Case, rank: int, device: torch.device, options: Any) -> dict:
    """Checks and times a case: median and p95 in µs a layer, see ``GraphPeer``."""
    system, n_layers = BY_PEER[case.config.peer], case.config.n_layers
    layers = _together(lambda: layers_of(case)(case, rank, device), system)
    _together(layers.check_dispatch, system)
    _together(lambda: layers.check_sums(layers.run()), system)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layers.run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        sums = layers.run()

    def check() -> None:
        layers.check_sums(sums)

    for old in sums:  # old results must not pass
        old.zero_()
    graph.replay()
    _together(check)
    clock, n = Clock([torch.cuda.current_stream()]), options.samples
    idle = from_idle(clock, graph.replay, n, _meet)
    steady = back_to_back(clock, graph.replay, options.replays, n, _meet)
    _together(check)
    _together(layers.check_dispatch)
    del graph
    layers.close()
    times = summary(_slowest(idle), n_layers, "idle_")
    return summary(_slowest(steady), n_layers * options.replays) | times


def _together(do: Callable[[], Any], system: System | None = None) -> Any:
    """Does something on all ranks. If it fails on one, it fails on all: none waits for
    one that stopped."""
    made, error = None, ""
    try:
        made = do()
    except Exception as e:
        error = in_words(e, system)
    errors = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if any(errors):
        raise FailedError(next(filter(None, errors)))
    return made


def in_words(error: Exception, system: System | None) -> str:
    """Says what failed, and whether the interface of another library is why."""
    text = f"{type(error).__name__}: {error}"
    if not system or not system.tried or not _is_of_interface(error):
        return text
    return (
        f"{system.package} {system.version()} is {OTHER_INTERFACE} of {system.tried}, "
        f"which this calls: {text}"
    )


def _is_of_interface(error: Exception) -> bool:
    """Returns whether a library lacks a name; False if it does not load at all."""
    if isinstance(error, ModuleNotFoundError):
        return "." in (error.name or "")  # the package itself is there
    if isinstance(error, ImportError):
        return "cannot import name" in str(error)
    return isinstance(error, (AttributeError, TypeError))


def _meet() -> None:
    """Waits for this rank's GPU, and then until all ranks may begin. Processes of one
    host have one monotonic clock."""
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))  # on the host (gloo): a barrier
    begin = torch.tensor([time.perf_counter() + _AHEAD_S], dtype=torch.float64)
    dist.broadcast(begin, 0)
    while time.perf_counter() < begin.item():
        pass


def _slowest(seconds: np.ndarray) -> np.ndarray:
    """Returns each sample's time on the rank that took longest."""
    own = torch.from_numpy(np.ascontiguousarray(seconds))
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return torch.cat(gathered, dim=1).amax(dim=1).numpy()


def run(todo: list[Case], options: Any, results: Path) -> None:
    """Starts one process a GPU and waits for them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = port, todo, options, results
    mp.spawn(run_rank, given, nprocs=todo[0].config.n_ranks)
