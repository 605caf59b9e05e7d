# SPDX-License-Identifier: Apache-2.0
"""Ranks on several hosts: which rank is on which, and how they are reached.

What processes of different hosts must know of each other goes through the store of
``torch.distributed``, which ``torchrun`` starts.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from ..limits import LINK_VARIABLE, START_TIMEOUT_S, link_of_environment
from ..memory.shmem import ShmemMemory, StoreGroup, join
from ..memory.wires import WiredMemory, Wires
from ..shmem_parts import check_installed


def refuse_hosts(what: str, instead: str) -> NoReturn:
    """Raises the error of what ranks on several hosts cannot have."""
    text = f"max_ep: {what} with ranks on several hosts; {instead}"
    raise NotImplementedError(f"{text} (docs/several_hosts.md#from-pytorch)")


def name_of_host(rank: int, n_ranks: int) -> str:
    """Names the kernel that a rank's process runs on, and the host that tests have it
    stand for."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as text:
        boot = text.read().strip()
    name = f"{socket.gethostname()} {boot}"
    per_host, _ = link_of_environment(n_ranks, 1)
    return name if per_host == n_ranks else f"{rank // per_host} of {name}"


def ranks_per_host(names: Sequence[str]) -> int:
    """Returns how many ranks each host has; raises unless all have as many, and those
    of a host are numbered one after another."""
    hosts = [*dict.fromkeys(names)]
    n = len(names) // len(hosts)
    if [*names] != [host for host in hosts for _ in range(n)]:
        places = ", ".join(f"{rank}: {hosts.index(x)}" for rank, x in enumerate(names))
        raise ValueError(
            "max_ep: each host must have as many ranks as the others, numbered one "
            f"after another, as torchrun does; hosts of the ranks are {places}"
        )
    return n


class GroupStore:
    """The store of a group, for the processes of one buffer."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        of_group = dist.distributed_c10d._get_process_group_store(group)
        self._store = dist.PrefixStore(f"max_ep/{name}", of_group)

    def set(self, key: str, value: bytes) -> None:
        with self._asking():
            self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        with self._asking():
            return self._store.get(key) if self._store.check([key]) else None

    @contextlib.contextmanager
    def _asking(self) -> Any:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"max_ep: the store of the group does not answer: {error}. The process "
                "that has it, that of rank 0 or its torchrun, has ended"
            ) from error


class Hosts(Protocol):
    """What a rank has if other hosts have ranks, too."""

    ranks_per_host: int

    def allocate(self, name: str, n_bytes: int, same: str, sizes: Any) -> Any:
        """Returns a block of each rank, which a queue or SHMEM reaches."""

    def close(self) -> None: ...


class CpuHosts:
    """CPU ranks, which a link reaches."""

    def __init__(
        self, store: GroupStore, rank: int, n_ranks: int, n: int, timeout_s: float
    ) -> None:
        """Connects all ranks, ``n`` of each host."""
        self.ranks_per_host = n
        first_host = os.environ.get("MASTER_ADDR") or "127.0.0.1"
        self._wires = Wires(store, rank, n_ranks, n, timeout_s, first_host)

    def allocate(self, name: str, n_bytes: int, same: str, sizes: Any) -> WiredMemory:
        _, seed = link_of_environment(self._wires.n_ranks, 1)
        return WiredMemory(self._wires, name, n_bytes, same, seed, sizes)

    def close(self) -> None:
        self._wires.close()


class GpuHosts:
    """GPU ranks, which NVSHMEM reaches: by puts, and those of this host by mapped
    memory. Processes join by its unique id, through the store."""

    def __init__(
        self,
        store: GroupStore,
        rank: int,
        n_ranks: int,
        n: int,
        timeout_s: float,
        device: int,
    ) -> None:
        """Joins all ranks, ``n`` of each host; ``device`` is this rank's GPU."""
        self.ranks_per_host, self._timeout_s = n, timeout_s
        self._start_s = max(timeout_s, START_TIMEOUT_S)
        self._group = StoreGroup(store, rank, n_ranks, self._start_s, device, n)
        join(self._group)

    def allocate(self, name: str, n_bytes: int, same: str, sizes: Any) -> ShmemMemory:
        group, times = self._group, (self._timeout_s, self._start_s)
        of_rank = 1, group.rank, group.size, n_bytes, same
        return ShmemMemory(*of_rank, *times, group)

    def close(self) -> None:
        """NVSHMEM is left when the process ends."""


def check_hosts(
    device: torch.device, group: Any, masks: bool, shares_gpu: bool = False
) -> None:
    """Refuses what ranks on several hosts cannot have."""
    if device.type == "cpu" and not os.environ.get(LINK_VARIABLE):
        refuse_hosts("CPU tensors", f"for tests set {LINK_VARIABLE}=RANKS_OF_A_HOST:1")
    if group is None:
        refuse_hosts("comm=", "pass group=, whose store the processes meet in")
    if masks:
        refuse_hosts("enable_shrink", "leave it out")
    if shares_gpu:
        refuse_hosts("ranks that share a GPU", "start a process for each GPU")
    if device.type == "cuda":
        check_installed(by_store=True)


def join_hosts(
    device: torch.device,
    store: GroupStore,
    rank: int,
    n_ranks: int,
    n: int,
    timeout_s: float,
) -> Hosts:
    """Reaches the ranks of other hosts, each host having ``n``."""
    of_ranks = store, rank, n_ranks, n, timeout_s
    if device.type == "cpu":
        return CpuHosts(*of_ranks)
    return GpuHosts(*of_ranks, device.index)
