# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory with the kernels of one configuration, on one rank.

A channel has regions that are used in turn, so that what one has received stays valid
while another is used. All ranks open the same channels in the same order.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof
from dataclasses import replace
from typing import Any

import torch

from ..memory.board import Board
from ..memory.gpu_shared import GpuSharedMemory
from ..memory.symmetric_memory import SharedMemory
from .events import EventHandle, EventOverlap
from .library import Library, Settings, build_all, load
from .tables import n_table_words

SEND, RECEIVE, BOTH = 1, 2, 3
"""Which part of dispatch or combine a launch does; see ``max_ep_c/api.mojo``."""

_REGION_BYTES, _N_WORDS, _FAILURE_WORD, _N_FAILURE_WORDS = range(4)
_TEXT_BYTES = 4000
_CHECK_EVERY_S = 0.1
_EIGHT, _FIVE = struct.Struct("8q"), struct.Struct("5q")
_IN_WORDS_OF_TORCH = (
    (" Restart the group, or call EPCommInitializer.reset() if all its ranks are in "
     "one process.", " Call Buffer.reset() in every process, or restart the group."),
    ("EPCommInitializer.reset()", "Buffer.reset() in every process"),
    (" (or restart the group, where each rank is a process of its own)", ""),
    ("EPConfig.timeout_s", "Buffer's timeout_s"),
    ("EPConfig.max_tokens_per_rank", "num_max_dispatch_tokens_per_rank"),
)  # fmt: skip


class Region:
    """One region: counters, addresses of all ranks, and the calls of the library."""

    def __init__(
        self, library: Library, comm: Communicator, address: int, n_words: int
    ) -> None:
        """Clears this rank's part."""
        self.library = library
        self.comm = comm
        device = comm.device
        self.counters = torch.zeros(n_words, dtype=torch.int32, device=device)
        first = library.size(_FAILURE_WORD)
        self._record = self.counters[first : first + library.size(_N_FAILURE_WORDS)]
        if comm.is_gpu:
            torch.cuda.synchronize(device)  # the library clears on a stream of its own
        self.handle = library.open(
            device.index or 0,
            comm.rank,
            max(1, int(comm.timeout_s * 1000)),
            address,
            self.counters.data_ptr(),
        )
        if not self.handle:
            raise RuntimeError("max_ep: a region cannot be opened; see above")
        self._dispatch, self._combine = library.dispatch, library.combine
        self._arguments = ctypes.create_string_buffer(_EIGHT.size)
        self._next_check = 0.0

    def connect(self, addresses: list[int]) -> None:
        """Takes where every rank's part is."""
        regions = (ctypes.c_uint64 * len(addresses))(*addresses)
        self.library.connect(self.handle, addressof(regions))

    def dispatch(self, form: int, *arguments: int) -> None:
        """Launches on the current stream, with the fields of ``DispatchArguments``."""
        self._before()
        place = self._arguments
        _EIGHT.pack_into(place, 0, *arguments)
        if self._dispatch(self.handle, self.comm.stream(), form, addressof(place)):
            self._raise()

    def combine(self, form: int, *arguments: int) -> None:
        """Likewise, with the fields of ``CombineArguments``."""
        self._before()
        place = self._arguments
        _FIVE.pack_into(place, 0, *arguments)
        if self._combine(self.handle, self.comm.stream(), form, addressof(place)):
            self._raise()

    def watch(self, is_combine: bool, waits_ns: torch.Tensor) -> None:
        """Adds how long each peer is waited for, in ns, to ``int64 [n_ranks]``."""
        waits = torch.empty_like(waits_ns)
        stream, place = self.comm.stream(), waits.data_ptr()
        if self.library.watch(self.handle, stream, is_combine, place):
            self._raise()
        waits_ns += waits.clamp_(min=0)

    def _before(self) -> None:
        """Raises if the communicator has failed; looks at a GPU now and then."""
        if self.comm.failure:
            raise RuntimeError(self.comm.failure)
        if self.comm.is_gpu and time.monotonic() > self._next_check:
            if not self.comm.is_capturing():
                self.check()

    def check(self) -> None:
        """Raises if a launch on a GPU has failed; does not wait for launches."""
        if not self.comm.is_gpu or not self.handle:
            return
        self._next_check = time.monotonic() + _CHECK_EVERY_S
        with torch.cuda.stream(self.comm.side_stream):
            record = self._record.cpu()
        if record[0] != 0:
            self._raise_text(self.library.failure, record.data_ptr())

    def _raise(self) -> None:
        self._raise_text(self.library.last_error)

    def _raise_text(self, ask: Callable[..., int], *arguments: int) -> None:
        """Raises what the library says, in the words of who calls from torch."""
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        ask(self.handle, *arguments, addressof(buffer), _TEXT_BYTES)
        text = buffer.value.decode()
        for theirs, ours in _IN_WORDS_OF_TORCH:
            text = text.replace(theirs, ours)
        self.comm.failure = text
        raise RuntimeError(text)

    def clear(self) -> None:
        """Puts this rank before the first launch; no rank may be in one."""
        if self.library.clear(self.handle):
            self._raise()

    def close(self) -> None:
        """Frees the handle."""
        if self.handle:
            self.library.close(self.handle)
            self.handle = 0


class Channel:
    """The regions of one configuration."""

    def __init__(self, comm: Communicator, settings: Settings, n_regions: int) -> None:
        """Builds the library if there is none, and joins the other ranks."""
        self.settings = settings
        self.n_local = settings.experts // settings.ranks
        capacity = settings.ranks * settings.tokens
        self.rows_shape = (self.n_local, capacity, settings.hidden)
        sizes = (settings.ranks, settings.tokens)
        self.n_table_words = n_table_words(self.n_local, *sizes)
        # Whose rows the region can send back, and whether a graph captured that.
        self.latest: tuple[Any, bool] = (None, False)
        self.was_captured = False
        library = load(settings)
        n_bytes, n_words = library.size(_REGION_BYTES), library.size(_N_WORDS)
        self.memory = comm.allocate(n_regions * n_bytes)
        self.regions: list[Region] = []
        try:
            (mine,) = self.memory.local_addresses()
            for i in range(n_regions):
                self.regions.append(Region(library, comm, mine + i * n_bytes, n_words))
            bases = self.memory.connect(comm.timeout_s)
            for i, region in enumerate(self.regions):
                region.connect([base + i * n_bytes for base in bases])
        except BaseException:
            self.close()
            raise
        self._n_taken = 0

    def next_region(self) -> Region:
        """Returns the region whose turn it is."""
        self._n_taken += 1
        return self.regions[self._n_taken % len(self.regions)]

    def close(self) -> None:
        """Gives the memory back."""
        for region in self.regions:
            region.close()
        self.memory.close()


class TorchSymmetricMemory:
    """The same through ``torch.distributed._symmetric_memory``, where it is wished."""

    def __init__(self, group: Any, n_bytes: int, device: int) -> None:
        """Allocates this rank's block."""
        import torch.distributed._symmetric_memory as symmetric

        self._group = group
        self._symmetric = symmetric
        self._block = symmetric.empty(
            n_bytes, dtype=torch.uint8, device=f"cuda:{device}"
        )

    def local_addresses(self) -> list[int]:
        """Returns the address of this rank's block."""
        return [self._block.data_ptr()]

    def connect(self, timeout_s: float) -> list[int]:
        """Returns the address of every rank's block; torch's own time-out applies."""
        found = self._symmetric.rendezvous(self._block, self._group.group_name)
        self._rendezvous = found
        return list(found.buffer_ptrs)

    def close(self) -> None:
        """Gives the memory back."""
        self._rendezvous = self._block = None


class Communicator:
    """What a rank knows of its group, and the channels it has opened."""

    def __init__(
        self, board: Board, device: torch.device, group: Any, memory: str
    ) -> None:
        """Takes the board of the group, this rank's device, and the kind of memory."""
        self.board = board
        self.rank, self.n_ranks = board.rank, board.n_ranks
        self.timeout_s = board.timeout_s
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.failure = ""
        self.channels: dict[Settings, Channel] = {}
        self._group = group
        self._memory = memory
        self.side_stream = torch.cuda.Stream(device) if self.is_gpu else None
        self.comm_stream = torch.cuda.Stream(device) if self.is_gpu else None
        self._caller: Any = None  # whose results are allocated on another stream
        self.target, own = "cpu", f"CPU {self.rank}"
        if self.is_gpu:
            about = torch.cuda.get_device_properties(device)
            own = str(getattr(about, "uuid", device.index))
            # Kernels use what only this architecture has.
            suffix = "a" if about.major >= 9 else ""
            self.target = f"sm_{about.major}{about.minor}{suffix}"
        devices = board.exchange("Buffer()", own)
        self.shares_gpu = len(set(devices)) < self.n_ranks

    def stream(self) -> int:
        """Returns the current stream, as kernels take it."""
        if not self.is_gpu:
            return -1
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def is_capturing(self) -> bool:
        """Returns whether a graph captures the current stream."""
        return self.is_gpu and torch.cuda.is_current_stream_capturing()

    @contextmanager
    def allocating(self, on_comm_stream: bool) -> Iterator[None]:
        """Makes the stream of asynchronous work the current one, to allocate there."""
        if not (self.is_gpu and on_comm_stream):
            yield
            return
        self._caller = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.stream(self.comm_stream):
                yield
        finally:
            self._caller = None

    def run(
        self,
        work: Callable[[], Any],
        tensors: Sequence[torch.Tensor | None],
        async_finish: bool,
        previous_event: EventOverlap | None = None,
    ) -> EventOverlap:
        """Does work on the current stream, or on one of its own if asynchronous.

        Args:
            work: Launches; on CPU it has ended when it returns.
            tensors: What it uses; the allocator hears of both streams.
            async_finish: Whether the current stream goes on without waiting.
            previous_event: What the work waits for; None: all of the current stream.
        """
        if not (self.is_gpu and async_finish):
            if previous_event is not None:
                previous_event.current_stream_wait()
            work()
            return EventOverlap()
        caller = self._caller or torch.cuda.current_stream(self.device)
        if previous_event is None:
            self.comm_stream.wait_stream(caller)
        used = tuple(tensor for tensor in tensors if tensor is not None)
        with torch.cuda.stream(self.comm_stream):
            if previous_event is not None:
                previous_event.current_stream_wait()
            work()
            for tensor in used:
                tensor.record_stream(self.comm_stream)
                tensor.record_stream(caller)
            return EventOverlap(EventHandle(), used)

    def allocate(self, n_bytes: int) -> Any:
        """Allocates symmetric memory."""
        if not self.is_gpu:
            about = f"{self.board.n_exchanges}-{len(self.channels)}"
            name = f"{self.board.name}-{about}"
            return SharedMemory(name, self.rank, self.n_ranks, 1, n_bytes, "")
        if self._memory == "symm":
            return TorchSymmetricMemory(self._group, n_bytes, self.device.index)
        return GpuSharedMemory(self.board, n_bytes, self.device.index)

    def settings(self, **fields: Any) -> Settings:
        """Returns a configuration of this group."""
        return Settings(
            target=self.target,
            ranks=self.n_ranks,
            shares_gpu=self.shares_gpu,
            **fields,
        )

    def open(self, wanted: Sequence[Settings], n_regions: int) -> list[Channel]:
        """Returns channels; opens those that are new, with all other ranks."""
        new = [settings for settings in wanted if settings not in self.channels]
        if new:
            if self.is_capturing():
                raise RuntimeError(
                    "max_ep: the first call with new sizes builds kernels and "
                    "allocates memory; make it once before the capture"
                )
            if self.failure:
                raise RuntimeError(self.failure)
            about = [" ".join(replace(s, target="").defines()) for s in new]
            self.board.exchange("the first " + "; ".join(about).replace("-D ", ""))
            build_all(new)
            for settings in new:
                self.channels[settings] = Channel(self, settings, n_regions)
        return [self.channels[settings] for settings in wanted]

    def check(self) -> None:
        """Waits for the device, and raises if a launch has failed."""
        if self.failure:
            raise RuntimeError(self.failure)
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
        for channel in self.channels.values():
            for region in channel.regions:
                region.check()

    def reset(self) -> None:
        """Puts all channels of this rank before the first launch."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
        for channel in self.channels.values():
            channel.latest = (None, False)
            for region in channel.regions:
                region.clear()
        self.failure = ""

    def close(self) -> None:
        """Gives all memory back."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
        for channel in self.channels.values():
            channel.close()
        self.channels = {}
        self.board.close()
