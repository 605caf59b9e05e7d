# SPDX-License-Identifier: Apache-2.0
"""What the calls of a rank share: the group, its device, and what has failed."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from ..limits import MAX_EXPERTS, TOKEN_ALIGN_BYTES, checked_int
from ..memory.gpu_shared import GpuSharedMemory
from ..memory.symmetric_memory import SharedMemory
from ..plural import counted
from ..processes.meeting import differing
from ..waits import RankWait, Waits
from .board import Board
from .hosts import Hosts
from .library import Settings
from .streams import Streams
from .tables import allocator

_CHECK_EVERY_S = 0.1
_NOTHING = contextlib.nullcontext()
FEWEST_SMS = 64
"""The fewest multiprocessors that a launch is given: with fewer the links of a GPU are
not used well (docs/performance-notes.md, Few multiprocessors)."""
RESET = "Call Buffer.reset() in every process, or restart the group."


def refuse(name: str, what: str) -> NoReturn:
    """Raises the error of a wrong argument."""
    raise ValueError(f"max_ep: {name}{'' if what[0] == '=' else ' '}{what}")


def check_start(name: str, tensor: torch.Tensor) -> None:
    """Raises unless kernels can move the rows of a tensor from where they begin."""
    address = tensor.data_ptr()
    if not address:
        check_memory(name, tensor)
    if address % TOKEN_ALIGN_BYTES != 0:
        what = f"begins {counted(address % TOKEN_ALIGN_BYTES, 'byte')} behind whole 16"
        refuse(name, f"{what}, and kernels move 16 at once; pass .clone()")


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raises if a tensor has elements and no memory: kernels would read address 0."""
    if tensor.numel() > 0 and not tensor.data_ptr():
        what = "has no memory: its storage was freed (resize_(0)), or it stands for "
        refuse(name, f"{what}others; pass a plain tensor, as .to_local() returns")


_SBO = (
    "combine sends when it is called, not while experts still compute; leave it out "
    "(SGLang: no --enable-single-batch-overlap)"
)
_NVFP4 = (
    "scales of a fork of DeepEP are in an order of its own; leave it out (vLLM: "
    'VLLM_DEEPEPLL_NVFP4_DISPATCH=0), or pass format="nvfp4", whose scales are by row'
)
_OF_FORKS = {
    "x_global_scale": _NVFP4,
    "use_nvfp4": _NVFP4,
    "overlap": _SBO,
    "packed_recv_count": _SBO,
    "comp_signal": _SBO,
    "block_m": _SBO,
    "threshold": _SBO,
    "num_sms": _SBO,
    "src_signals": _SBO,
    "src_signal_expect_value": _SBO,
    "x_ori": "combine adds up rows of experts only; leave it out, and add tokens of "
    "identity experts to its result",
}
"""Arguments that only forks of DeepEP have: why we do not, and what to do."""


def refuse_arguments(call: str, given: Mapping[str, Any]) -> None:
    """Raises for arguments that DeepEP does not have, unless they ask for nothing: None
    and False, or what belongs to ``overlap=False``."""
    for name, value in given.items():
        if name not in _OF_FORKS:
            raise TypeError(f"max_ep: {call} has no argument {name!r}; leave it out")
        is_asked = value is not None and value is not False
        if is_asked and (_OF_FORKS[name] is not _SBO or given.get("overlap", True)):
            raise NotImplementedError(f"max_ep: {call}({name}=...): {_OF_FORKS[name]}")


class Region(Protocol):
    """What a communicator asks of the regions that are in use (``channel.py``)."""

    settings: Settings
    masked: torch.Tensor

    def check(self) -> None: ...

    def who_waits(self) -> RankWait: ...


class Communicator:
    """The group of a rank, its device, and whether it has failed."""

    def __init__(
        self,
        board: Board,
        device: torch.device,
        group: Any,
        masks: bool,
        shares_gpu: bool,
        hosts: Hosts | None = None,
    ) -> None:
        """``masks``: whether the others go on without a rank that is late;
        ``shares_gpu``: whether some ranks have the same device; ``hosts``: how ranks of
        other hosts are reached, if there are some."""
        self.board, self.hosts = board, hosts
        self.rank, self.n_ranks = board.rank, board.n_ranks
        self.others = [r for r in range(self.n_ranks) if r != self.rank]
        self.timeout_s = board.timeout_s
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.index = device.index or 0
        self.empty = allocator(device)
        self.failure = ""  # what calls raise
        self.has_ended = False  # so that reset() cannot help
        self.next_check = 0.0
        self.n_sms = 0  # most multiprocessors of a launch; 0: all
        self.regions: list[Region] = []
        self.latest: Settings | None = None  # of low-latency calls, as others know
        ranks = group and tuple(dist.get_process_group_ranks(group))
        self.group_and_device = (ranks or object(), device)
        self.streams = Streams(device)
        self._make_constants()
        self.masks = Masks(self) if masks else None
        self.target, self.shares_gpu = "cpu", shares_gpu
        self.most_sms = FEWEST_SMS
        """Multiprocessors of this rank's GPU; on CPU a number above 0."""
        if self.is_gpu:
            about = torch.cuda.get_device_properties(device)
            # Kernels use what only this architecture has.
            self.target = f"sm_{about.major}{about.minor}a"
            self.most_sms = about.multi_processor_count
        self.n_hosts = n = self.n_ranks // hosts.ranks_per_host if hosts else 1
        self.for_calls = dict(target=self.target, ranks=self.n_ranks, hosts=n)
        """What all calls have alike (``calls.py``)."""
        board.exchange("Buffer()")
        _ALIVE.add(self)

    @torch.inference_mode(False)  # calls read them in any mode
    def _make_constants(self) -> None:
        """Makes what kernels of torch read, before any stream needs it."""
        ids = dict(dtype=torch.int64, device=self.device)
        self.rank_numbers = torch.arange(self.n_ranks, **ids)
        self.none = torch.full((), -1, **ids)
        self.one = torch.ones(1, dtype=torch.int32, device=self.device)
        self.streams.synchronize()

    def __reduce__(self) -> NoReturn:
        """Refuses to be pickled or copied, and with it buffers and handles."""
        raise TypeError(
            "max_ep: a Buffer, an ElasticBuffer and their handles belong to this "
            "process, and cannot be pickled or deep-copied; keep the object itself, "
            "or make a buffer there"
        )

    def raise_failure(self) -> None:
        """Raises what has failed, until :meth:`reset`."""
        if self.failure:
            raise RuntimeError(self.failure)

    def check_current_gpu(self) -> None:
        """Raises unless ``empty`` allocates on this rank's GPU."""
        if self.is_gpu and torch._C._cuda_getDevice() != self.index:
            refuse("the current GPU", f"is not that of this buffer, {self.device}")

    def using_sms(self, n: int) -> contextlib.AbstractContextManager[None]:
        """Lets launches use at most so many multiprocessors, or :data:`FEWEST_SMS` if
        that is more; 0: all."""
        return self._using_sms(max(n, FEWEST_SMS)) if n else _NOTHING

    @contextlib.contextmanager
    def _using_sms(self, n: int) -> Iterator[None]:
        self.n_sms = n
        try:
            yield
        finally:
            self.n_sms = 0

    def check_handle(
        self, handle: Any, kind: type, maker: str, of_group: bool = False
    ) -> None:
        """Raises unless a handle is of this communicator, which has not failed; if
        ``of_group``, or of another with the same ranks."""
        self.raise_failure()
        if not isinstance(handle, kind):
            what = "" if of_group else "; items of its tuple are not enough"
            refuse("handle", f"is not one that {maker} returned{what}")
        if handle.comm is not self:
            if not of_group:
                refuse("handle", "is of another Buffer")
            if handle.comm.group_and_device != self.group_and_device:
                refuse("handle", "is of a Buffer of other ranks")

    def check_experts(self, num_experts: int, most: int = MAX_EXPERTS) -> int:
        """Returns a number of experts; raises unless all ranks have as many."""
        num_experts = checked_int("max_ep: num_experts", num_experts, 1, most)
        if num_experts % self.n_ranks != 0:
            what = f"={num_experts} is no multiple of {self.n_ranks}, the ranks"
            refuse("num_experts", what)
        return num_experts

    def check_tensor(
        self,
        name: str,
        tensor: torch.Tensor,
        dtype: torch.dtype | None,
        shape: tuple[int | None, ...],
        any_strides: bool = False,
    ) -> None:
        """Raises unless a tensor has this dtype and shape; None: any."""
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise TypeError(f"max_ep: {name} must be a tensor, got {kind}")
        if dtype is not None and tensor.dtype != dtype:
            raise TypeError(f"max_ep: {name} must be {dtype}, got {tensor.dtype}")
        if tensor.device != self.device:
            where = f"is on {tensor.device}, this buffer on {self.device}"
            refuse(name, f"{where} (its argument device=)")
        found = tensor.shape
        if found != shape and not _fits(found, shape):
            wanted = ", ".join("any" if n is None else str(n) for n in shape)
            refuse(name, f"must be [{wanted}], got {list(found)}")
        if not any_strides and not tensor.is_contiguous():
            refuse(name, "is not contiguous; pass .contiguous()")
        if not tensor.data_ptr():
            check_memory(name, tensor)

    def fail(self, error: BaseException) -> None:
        """Makes later calls raise until :meth:`reset`: other ranks have gone on."""
        what = str(error) or type(error).__name__
        self.failure = self.failure or f"{what}. {RESET}"

    def end(self, why: str) -> None:
        """Makes later calls raise; the memory is freed."""
        self.failure, self.has_ended = why, True

    def exchange(self, what: str, note: Any = None) -> list[Any]:
        """Returns every rank's note. Of one that does not come: if ranks mask, it is
        absent from then on, and otherwise calls raise."""
        self.raise_failure()
        absent = self.masks.absent if self.masks else None
        try:
            return self.board.exchange(what, note, absent)
        except TimeoutError as error:
            self.failure = f"{error}.{self.other_calls()} {RESET}"
            raise TimeoutError(self.failure) from None

    def say(self, settings: Settings) -> None:
        """Lets the others know of a low-latency call, before it can wait for them."""
        self.raise_failure()
        self.board.say(settings.facts())

    def other_calls(self) -> str:
        """Names the first rank whose last low-latency call had other sizes than this
        rank's: no wait for it is met."""
        mine = self.board.said(self.rank)
        for peer in range(self.n_ranks):
            theirs = self.board.said(peer)
            if mine and theirs and theirs != mine:
                other, own = differing(theirs, mine)
                return (
                    f" Rank {peer}'s last low_latency_dispatch had {other}, this rank's"
                    f" ({self.rank}) {own}: pass the same on all ranks."
                )
        return ""

    def allocate(self, n_bytes: int, same: str, sizes: Any) -> Any:
        name = f"{self.board.name}-{self.board.n_exchanges}-{len(self.regions)}"
        if self.hosts:
            return self.hosts.allocate(name, n_bytes, same, sizes)
        if not self.is_gpu:
            return SharedMemory(name, self.rank, self.n_ranks, 1, n_bytes, same)
        return GpuSharedMemory(name, self.rank, self.n_ranks, n_bytes, same, self.index)

    def check(self) -> None:
        """Waits for the device, and raises if a launch has failed."""
        self.raise_failure()
        self.streams.synchronize()
        self.check_regions()

    def who_waits(self) -> Waits:
        """Says whom this rank waits for, in the region where it does."""
        self.raise_failure()
        found = [region.who_waits() for region in list(self.regions)]
        found.append(RankWait(self.rank))
        latest = max(found, key=lambda w: (bool(w.missing), w.is_running, w.generation))
        return Waits(self.board.name, [latest])

    def check_regions(self) -> None:
        """Raises if a launch has failed; does not wait for launches."""
        self.next_check = time.monotonic() + _CHECK_EVERY_S
        for region in self.regions:
            region.check()


def _fits(found: torch.Size, shape: tuple[int | None, ...]) -> bool:
    if len(found) != len(shape):
        return False
    for n, wanted in zip(found, shape):  # a generator takes twice the time
        if wanted is not None and wanted != n:
            return False
    return True


class Masks:
    """Which ranks are masked (``enable_shrink``), in all regions; kernels mask, in
    theirs, a rank that is late."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.absent: set[int] = set()  # ranks that did not come when a channel opened
        self._latest: torch.Tensor | None = None  # of the region used last

    def _of_regions(self) -> list[torch.Tensor]:
        """Returns the masks, after the launches so far."""
        self._comm.streams.current()
        regions = self._comm.regions
        return [region.masked for region in regions if region.settings.masks]

    def share(self, region: Region) -> None:
        """Takes over, before a dispatch, whom the region used last has masked."""
        last, self._latest = self._latest, region.masked
        if last is not None and last is not region.masked:
            torch.maximum(region.masked, last, out=region.masked)

    def read(self) -> torch.Tensor:
        """Returns which ranks are masked, as a new ``int32 [n_ranks]``."""
        comm = self._comm
        found = torch.zeros(comm.n_ranks, dtype=torch.int32, device=comm.device)
        for mask in self._of_regions():
            torch.maximum(found, mask, out=found)
        for rank in self.absent:
            found[rank] = 1
        return found

    def set(self, ranks: Collection[int], value: int) -> None:
        """Masks ranks, or waits for them again."""
        for mask in self._of_regions():
            for rank in ranks:  # one by one: no index is copied to a GPU
                mask[rank] = value
        self.absent -= set() if value else set(ranks)

    def give_up(self) -> None:
        """Makes masked ranks absent: channels open without them."""
        masked = self.read().nonzero().flatten().tolist()
        self.absent.update(rank for rank in masked if rank != self._comm.rank)


_ALIVE: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Ends what a forked process has inherited; the memory stays with its parent."""
    for comm in list(_ALIVE):
        comm.end("max_ep: this buffer is of the process that was forked; make one here")


os.register_at_fork(after_in_child=_leave_to_parent)
