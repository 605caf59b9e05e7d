# SPDX-License-Identifier: Apache-2.0
"""How ranks are connected, and what test programs of DeepEP start with.

Without a GPU the ranks are on the CPU.
"""

from __future__ import annotations

import os
import random

import torch
import torch.distributed as dist

from max_ep.torch import get_logical_domain_size, get_physical_domain_size

__all__ = [
    "dist_print",
    "get_global_seed",
    "get_local_seed",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "init_dist",
    "init_seed",
]

_seeds = {"global": 0, "local": 0}
_is_first = {"on host": False}


def init_seed(global_seed: int) -> None:
    """Seeds the generators of this rank; each rank has its own numbers."""
    _seeds.update({"global": global_seed, "local": global_seed + dist.get_rank()})
    torch.manual_seed(_seeds["local"])
    random.seed(_seeds["local"])


def get_local_seed() -> int:
    """Returns the seed of this rank."""
    return _seeds["local"]


def get_global_seed() -> int:
    """Returns what :func:`init_seed` was given."""
    return _seeds["global"]


def init_dist(
    local_rank: int, num_local_ranks: int, seed: int = 0
) -> tuple[int, int, dist.ProcessGroup]:
    """Joins the processes of ``torch.multiprocessing.spawn``, on the port
    ``MASTER_PORT``; returns the rank, the number of ranks, and their group.

    ``WORLD_SIZE`` and ``RANK`` count hosts. New tensors are bfloat16, on the GPU.
    """
    n_hosts, host = int(os.getenv("WORLD_SIZE", 1)), int(os.getenv("RANK", 0))
    address, port = (
        os.getenv("MASTER_ADDR", "127.0.0.1"),
        os.getenv("MASTER_PORT", 8361),
    )
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.set_device(local_rank)
        torch.set_default_device("cuda")
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=n_hosts * num_local_ranks,
        rank=host * num_local_ranks + local_rank,
    )
    torch.set_default_dtype(torch.bfloat16)
    _is_first["on host"] = local_rank == 0
    init_seed(seed)
    ranks = list(range(dist.get_world_size()))
    return dist.get_rank(), dist.get_world_size(), dist.new_group(ranks)


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints a line, and waits for all ranks; ``once_in_node``: the first rank's."""
    if _is_first["on host"] or not once_in_node:
        print(s, flush=True)
    dist.barrier()
