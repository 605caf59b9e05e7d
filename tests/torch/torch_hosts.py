# SPDX-License-Identifier: Apache-2.0
"""What processes of `test_torch_hosts.py` do: ranks of two hosts."""

import functools
import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from max_ep.memory import wires
from max_ep.torch import ElasticBuffer, joining
from tests.torch import torch_member
from tests.torch.torch_member import check_low_latency, low_latency, open_buffer

KILLED = 2


def calls(timeout_s: float) -> None:
    """Low-latency calls, after each of some a reset."""
    buffer = open_buffer(timeout_s=timeout_s)
    for generation in range(4):
        check_low_latency(buffer, generation, "bf16", False)
        buffer.reset()
    low_latency(buffer, ["bf16"])
    buffer.destroy()
    elastic = ElasticBuffer(dist.group.WORLD, timeout_s=timeout_s)
    assert elastic.get_physical_domain_size() == (2, elastic.num_ranks // 2)
    elastic.destroy()


def on_a_shared_gpu(
    member: Callable[..., Any], rank: int, n_ranks: int, *given: Any
) -> Any:
    """Is a member whose GPU another rank has, too: the driver lets one kernel after
    another spin. Buffers refuse that, for it is slow."""
    joining.name_of_device = lambda _, rank: f"the GPU of rank {rank}"
    return member(rank, n_ranks, *given)


def member(rank: int, n_ranks: int, store: str, fault: str = "") -> None:
    """Makes calls; with a fault goes on until something is wrong."""
    torch_member.open_group(rank, n_ranks, store)
    if fault == "no fences":
        wires.WiredLink = functools.partial(wires.WiredLink, keeps_fences=False)
    if not fault:
        calls(60)
        return
    buffer = open_buffer(timeout_s=5)
    check_low_latency(buffer, 0, "bf16", False)
    if fault == "killed" and rank == KILLED:
        delay_s = random.Random(n_ranks).random()
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for generation in range(1000):
        check_low_latency(buffer, generation, "bf16", generation % 2 == 0)
