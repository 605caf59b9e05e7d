# SPDX-License-Identifier: Apache-2.0
"""How the processes of a group meet: what all must have alike, and a communicator."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..extension import sources_hash
from ..limits import LINK_VARIABLE, checked_timeout_s, timeout_s_of_environment
from ..memory.answering import answer_for
from ..plural import counted
from ..processes.meeting import differing
from .board import Board, SharedNotes, StoredNotes
from .communicator import Communicator, refuse
from .hosts import (
    GroupStore,
    check_hosts,
    join_hosts,
    name_of_host,
    ranks_per_host,
)


def gatherer(group: Any, comm: Any) -> Callable[[Any], list[Any]]:
    """Returns a function that gathers an object of every rank, in their order."""

    def gather(thing: Any) -> list[Any]:
        if group is None:
            return comm.allgather(thing)
        things: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(things, thing, group=group)
        return things

    return gather


def join(
    group: Any,
    comm: Any,
    device: torch.device | str | None,
    timeout_s: float | None,
    masks: bool,
    **facts: Any,
) -> Communicator:
    """Joins the other ranks; all processes of the group call it with the same facts."""
    check_group(group, comm)
    if group is None:
        rank, n_ranks = comm.Get_rank(), comm.Get_size()
    else:
        rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    where = checked_device(device)
    if timeout_s is None:
        timeout_s = timeout_s_of_environment()
    timeout_s = checked_timeout_s(timeout_s)
    mine = dict(device=where.type, **facts, sources_hash=sources_hash())
    if link := os.environ.get(LINK_VARIABLE):
        mine[LINK_VARIABLE] = link
    same = ", ".join(f"{name}={value}" for name, value in mine.items())
    places = name_of_host(rank, n_ranks), name_of_device(where, rank)
    all_ = gatherer(group, comm)((*places, uuid.uuid4().hex[:12], same))
    for peer, (*_, theirs) in enumerate(all_):
        if theirs != same:
            other, own = differing(theirs, same)
            raise ValueError(
                f"max_ep: rank {peer} has {other}, this rank ({rank}) {own}; "
                "pass the same on all ranks"
            )
    hosts_of, devices, (name, *_), _ = zip(*all_)
    of_board = f"torch-{name}", rank, n_ranks, timeout_s
    per_host, hosts = ranks_per_host(hosts_of), None
    shares_gpu = len(set(devices)) < n_ranks
    if per_host < n_ranks:
        check_hosts(where, group, masks, shares_gpu)
        store = GroupStore(group, of_board[0])
        hosts = join_hosts(where, store, rank, n_ranks, per_host, timeout_s)
        board = Board(*of_board, StoredNotes(store, rank))
    else:
        board = Board(*of_board, SharedNotes(*of_board))
    joined = Communicator(board, where, group, masks, shares_gpu, hosts)
    answer_for(joined)
    return joined


def check_group(group: Any, comm: Any) -> None:
    """Refuses what is no group of processes."""
    if group is None and comm is None:
        refuse(
            "group",
            "is None; call dist.init_process_group and pass dist.group.WORLD, or comm=",
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        refuse(
            "group",
            f"is a {type(group).__name__}, and no torch.distributed group that this "
            "process is in; pass dist.group.WORLD or one of dist.new_group",
        )
    if group is None and not hasattr(comm, "Get_rank"):
        what = f"is a {type(comm).__name__}, and no communicator of mpi4py; pass group="
        refuse("comm", what)


def name_of_device(device: torch.device, rank: int) -> str:
    """Names a rank's device as all processes do: two may have the same GPU."""
    if device.type == "cpu":
        return f"CPU {rank}"
    about = torch.cuda.get_device_properties(device)
    return str(getattr(about, "uuid", device.index))


def checked_device(wanted: torch.device | str | None) -> torch.device:
    """Returns the device of the tensors; None: the current GPU, or the CPU."""
    name, has_gpu = "device", torch.cuda.is_available()
    if wanted is None:
        name, default = "MAX_EP_TORCH_DEVICE", "cuda" if has_gpu else "cpu"
        wanted = os.environ.get(name) or default
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError):
        refuse(name, f"={wanted!r} is no device; pass 'cpu', 'cuda' or 'cuda:N'")
    if device.type not in ("cpu", "cuda"):
        refuse(name, f"={wanted!r} is not a CPU or an NVIDIA GPU")
    if device.type == "cuda" and not has_gpu:
        refuse(name, f"={wanted!r}, and torch finds no GPU; pass 'cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        n = torch.cuda.device_count()
        refuse(
            name, f"={wanted!r}, and torch finds {counted(n, 'GPU')}, numbered from 0"
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 9:
            refuse(
                name, f"={wanted!r} is sm_{major}{minor}; kernels need sm_90 or newer"
            )
    return device
