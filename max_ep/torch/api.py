# SPDX-License-Identifier: Apache-2.0
"""``Buffer``: DeepEP's legacy interface, one process a rank."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ..limits import checked_int, is_integer
from ..waits import Waits
from .communicator import Communicator, Masks, refuse
from .compiled import BUFFERS
from .joining import gatherer, join
from .low_latency_api import LowLatency
from .normal_api import Normal
from .streams import Config, EventHandle, EventOverlap

_KEYS = itertools.count()


class Buffer(LowLatency, Normal):
    """Dispatch and combine of one rank, with the names of DeepEP's ``Buffer``.

    Memory is allocated, and kernels are built, by the first call with new sizes; all
    ranks make it at the same time. All ranks make the same calls in the same order.

    Example:
        >>> buffer = Buffer(dist.group.WORLD, low_latency_mode=True)
        >>> rows, counts, handle, *_ = buffer.low_latency_dispatch(x, ids, 128, 256)
        >>> y, *_ = buffer.low_latency_combine(experts(rows), ids, weights, handle)
    """

    num_sms: int = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        use_fabric: bool = False,
        timeout_s: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Joins the other ranks. All processes of the group call it.

        Both modes always work. Arguments that are not listed are ignored.

        Args:
            group: The ranks; it carries names and addresses, no data.
            num_nvl_bytes: On GPUs a hint for how many tokens the normal calls hold
                memory at first.
            explicitly_destroy: Whether only :meth:`destroy` frees the memory.
            enable_shrink: Whether the low-latency calls mask a rank that is late, and
                go on without it (docs/fault_tolerance.md).
            comm: Of mpi4py, instead of ``group``.
            timeout_s: How long a rank waits for another, at most a day; None:
                ``MAX_EP_TIMEOUT_S``, or 30.
            device: Of the tensors; None: ``MAX_EP_TORCH_DEVICE``, or the current GPU,
                or the CPU if there is none.

        Raises:
            NotImplementedError: For ranks on several hosts.
            TimeoutError: If a rank does not come; names it.
        """
        num_nvl_bytes = checked_int("max_ep: num_nvl_bytes", num_nvl_bytes, 0, None)
        same = dict(num_nvl_bytes=num_nvl_bytes, enable_shrink=bool(enable_shrink))
        self._comm = join(group, comm, device, timeout_s, enable_shrink, **same)
        self._gather = gatherer(group, comm)
        self.group = group
        self.rank, self.group_size = self._comm.rank, self._comm.n_ranks
        self.explicitly_destroy = explicitly_destroy
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self._low_latency_channels = {}
        # For `compiled.py`: it knows this buffer by a name, and a tensor that calls
        # change keeps them in order.
        self._key = str(next(_KEYS))
        with torch.inference_mode(False):
            self._order = torch.zeros(1, dtype=torch.int32, device=self._comm.device)
        self._handles = {}
        BUFFERS[self._key] = self
        # Graphics memory of a process that ends by exit() is given back in order.
        self._finish = weakref.finalize(self, Communicator.close, self._comm)
        self._finish.atexit = not explicitly_destroy

    def check(self) -> None:
        """Waits for this rank's device, and raises if a launch has failed.

        On CPU calls raise by themselves. On GPUs a kernel cannot: it records what went
        wrong, results become NaN, and a later call raises, or this one.
        """
        self._comm.check()

    def who_waits(self) -> Waits:
        """Says whom this rank waits for, for another thread, while a call hangs.

        ``max-ep who`` shows all ranks of the machine.
        """
        return self._comm.who_waits()

    def reset(self) -> None:
        """Makes the memory usable again after an error; all ranks call it.

        Handles of low-latency calls end with it.
        """
        comm = self._comm
        if comm.has_ended:
            comm.raise_failure()
        comm.streams.synchronize()  # who is here writes to no rank any more
        names = [settings.name() for settings in comm.channels]
        all_ = self._gather((comm.board.n_exchanges, self._cap, names))
        self._cap = max(cap for _, cap, _ in all_)
        opened = set(names).intersection(*(theirs for *_, theirs in all_))
        comm.reset(max(n for n, *_ in all_), opened)
        self._low_latency_channels.clear()
        self._handles.clear()
        self._gather(None)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Says which ranks are masked: 1 for each, into int32 ``[n_ranks]``."""
        masks, comm = self._masks(), self._comm
        comm.check_tensor("mask_status", mask_status, torch.int32, (comm.n_ranks,))
        mask_status.copy_(masks.read())

    def low_latency_update_mask_buffer(
        self, rank_to_mask: int, mask: bool = False
    ) -> None:
        """Masks a rank, or waits for it again from the next call on.

        A rank that has missed calls is masked again: only :meth:`Buffer.reset`, in all
        processes, takes it in.
        """
        masks, comm = self._masks(), self._comm
        if not is_integer(rank_to_mask) or rank_to_mask not in comm.others:
            what = f"={rank_to_mask!r} is not another rank of the group"
            refuse("rank_to_mask", f"{what}, one of {comm.others}")
        masks.set([rank_to_mask], int(mask))

    def low_latency_clean_mask_buffer(self) -> None:
        """Waits for all ranks again from the next call on."""
        self._masks().set(range(self._comm.n_ranks), 0)

    def _masks(self) -> Masks:
        if self._comm.masks is None:
            refuse("enable_shrink", "is not set: this Buffer masks no ranks")
        return self._comm.masks

    def destroy(self) -> None:
        """Frees the memory. Calls after it raise."""
        self._finish()

    def is_available(self) -> bool:
        """Returns whether the buffer can be used."""
        return not self._comm.failure

    def get_comm_stream(self) -> torch.cuda.Stream | None:
        """Returns the stream of ``async_finish``; None on CPU."""
        return self._comm.streams.comm

    @staticmethod
    def capture() -> EventOverlap:
        """Records an event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Takes an even number, and ignores it."""
        n = checked_int("max_ep: new_num_sms", new_num_sms, 0)
        if n % 2 != 0:
            refuse("new_num_sms", f"={n} is odd; pass an even number")
        Buffer.num_sms = n

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns True: kernels are compiled for the GPU that is there."""
        return True

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Returns a configuration; it changes nothing."""
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """Returns a tensor of shape ``[0]``, which callers may clear; no part of a
        region, for it holds flags that only kernels may write.

        Raises:
            NotImplementedError: If a size or an offset is asked for.
        """
        if size is not None or offset != 0:
            raise NotImplementedError(
                "max_ep: get_local_buffer_tensor(size, offset); combine takes rows "
                "from any tensor, and get_next_low_latency_combine_buffer returns one "
                "for zero_copy"
            )
        if not isinstance(dtype, torch.dtype):
            refuse("dtype", f"={dtype!r} must be one of torch, such as torch.bfloat16")
        return torch.empty(0, dtype=dtype, device=self._comm.device)
