# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory with the kernels of one configuration, on one rank.

A channel alternates between its regions, so received data stays valid while another
region is used. All ranks open the same channels in the same order.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof
from dataclasses import fields, replace
from typing import Any

import torch

from ..memory.board import Board
from ..memory.gpu_shared import GpuSharedMemory, GpuWords
from ..memory.symmetric_memory import SharedMemory
from ..who import CpuWords, Facts, RankWait, Waits, cpu_wait, gpu_wait
from .events import EventHandle, EventOverlap
from .library import Library, Settings, build_all, load
from .tables import allocator, dense, n_table_words

SEND, RECEIVE, BOTH = 1, 2, 3
"""Which part of dispatch or combine a launch does; see ``max_ep_c/api.mojo``."""

BLOCK = 128
"""Elements of a row that share an FP8 scale."""

_REGION_BYTES, _N_WORDS, _FAILURE_WORD, _N_FAILURE_WORDS, _MASKED_WORD = range(5)
_FACTS = 5  # the first of them
_TEXT_BYTES = 4000
_CHECK_EVERY_S = 0.1
_RESET = "Call Buffer.reset() in every process, or restart the group."
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
        self._address = address
        device = comm.device
        self.counters = torch.zeros(n_words, dtype=torch.int32, device=device)
        first = library.size(_FAILURE_WORD)
        self._record = self.counters[first : first + library.size(_N_FAILURE_WORDS)]
        first = library.size(_MASKED_WORD)
        self.masked = self.counters[first : first + comm.n_ranks]
        if comm.is_gpu:
            torch.cuda.synchronize(device)  # the library clears on a stream of its own
        self.handle = library.open(
            comm.index,
            comm.rank,
            max(1, int(comm.timeout_s * 1000)),
            address,
            self.counters.data_ptr(),
        )
        if not self.handle:
            raise RuntimeError("max_ep: a region cannot be opened; see above")
        self.turn: object = None  # of the last dispatch
        # Of a call that has only sent, and whether that was a dispatch.
        self.hook: Callable[[], None] | None = None
        self.hook_is_of_dispatch = False

    def connect(self, addresses: list[int]) -> None:
        """Stores the address of every rank's part."""
        regions = (ctypes.c_uint64 * len(addresses))(*addresses)
        self.library.connect(self.handle, addressof(regions))

    def dispatch(self, form: int, *arguments: int) -> None:
        """Launches on the current stream, with the fields of ``DispatchArguments``."""
        self._launch(self.library.dispatch, form, _EIGHT.pack(*arguments))

    def combine(self, form: int, *arguments: int) -> None:
        """Launches a combine, with the fields of ``CombineArguments``."""
        self._launch(self.library.combine, form, _FIVE.pack(*arguments))

    def watch(self, is_combine: bool, waits_ns: torch.Tensor) -> None:
        """Adds how long each peer is waited for, in ns, to ``int64 [n_ranks]``."""
        waits = torch.empty_like(waits_ns)
        self._launch(self.library.watch, is_combine, waits.data_ptr())
        waits_ns += waits.clamp_(min=0)

    def _launch(
        self, function: Callable[..., int], what: int, given: bytes | int
    ) -> None:
        """Raises if the communicator has failed; looks at a GPU now and then."""
        comm = self.comm
        if comm.failure:
            comm.raise_failure()
        if comm.is_gpu and time.monotonic() > comm.next_check:
            if not comm.is_capturing():
                comm.check_regions()
        if function(self.handle, comm.stream(), what, given):
            self._raise()

    def check(self) -> None:
        """Raises if a launch on a GPU has failed; does not wait for launches."""
        if not self.comm.is_gpu or not self.handle:
            return
        with torch.cuda.stream(self.comm.side_stream):
            record = self._record.cpu()
        if record[0] != 0:
            self._raise_text(self.library.failure, record.data_ptr())

    def facts(self) -> Facts:
        """Returns what a reader of the region must know."""
        size = self.library.size
        return Facts(*(size(_FACTS + i) for i in range(len(fields(Facts)))))

    def who_waits(self) -> RankWait:
        """Says whom this rank waits for in this region, also while a launch hangs."""
        comm, facts = self.comm, self.facts()
        if comm.is_gpu:
            place = comm.device.index, self.counters.data_ptr(), self._address
            with GpuWords(*place) as words:
                return gpu_wait(facts, comm.rank, words)
        counters, string_at = self.counters.data_ptr(), ctypes.string_at
        words = CpuWords(
            lambda at, n_bytes: string_at(counters + at, n_bytes),
            lambda at, n_bytes: string_at(self._address + at, n_bytes),
        )
        return cpu_wait(facts, comm.rank, words, time.monotonic_ns())

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
        self.turn = self.hook = None
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
        self.rows_layout = dense(self.n_local, capacity, settings.hidden)
        self.scales_layout = dense(self.n_local, settings.hidden // BLOCK, capacity)
        self.rows_shape = self.rows_layout[0]
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
            bases = self.memory.connect(comm.timeout_s, comm.absent)
            for rank in comm.absent:
                bases[rank] = comm.scratch(n_regions * n_bytes)
            for i, region in enumerate(self.regions):
                region.connect([base + i * n_bytes for base in bases])
                for rank in comm.absent:
                    region.masked[rank] = 1
        except BaseException:
            self.close()
            raise
        self._n_taken = 0

    def next_region(self) -> Region:
        """Returns the next region."""
        return self.regions[(self._n_taken + 1) % len(self.regions)]

    def take(self, region: Region) -> object:
        """Marks a region as used; returns an object that identifies this use."""
        self._n_taken += 1
        region.turn = object()
        return region.turn

    def clear(self) -> None:
        """Puts all regions of this rank before the first launch."""
        self.latest = (None, False)
        self._n_taken = 0  # this rank may have missed calls
        for region in self.regions:
            region.clear()

    def close(self) -> None:
        """Gives the memory back."""
        for region in self.regions:
            region.close()
        self.memory.close()


class TorchSymmetricMemory:
    """Symmetric memory of ``torch.distributed._symmetric_memory``."""

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

    def connect(self, timeout_s: float, absent: Collection[int] = ()) -> list[int]:
        """Returns the address of every rank's block; torch's own time-out applies."""
        if absent:
            raise NotImplementedError('max_ep: enable_shrink needs memory="vmm"')
        found = self._symmetric.rendezvous(self._block, self._group.group_name)
        self._rendezvous = found
        return list(found.buffer_ptrs)

    def close(self) -> None:
        """Gives the memory back."""
        self._rendezvous = self._block = None


class Communicator:
    """The group of a rank, and the channels that it has opened."""

    def __init__(
        self,
        board: Board,
        device: torch.device,
        group: Any,
        memory: str,
        masks: bool = False,
    ) -> None:
        """Takes the board of the group, this rank's device, and the kind of memory.

        ``masks``: whether the others go on without a rank that is late.
        """
        self.board = board
        self.masks = masks
        self.absent: set[int] = set()  # ranks that did not come when a channel opened
        self._masked: torch.Tensor | None = None  # of the region used last
        self._scratch: list[torch.Tensor] = []
        self.rank, self.n_ranks = board.rank, board.n_ranks
        self.timeout_s = board.timeout_s
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.index = device.index or 0
        self.empty = allocator(device)
        self.failure = ""  # what calls raise
        self.has_ended = False  # so that reset() cannot help
        self.next_check = 0.0
        self.channels: dict[Settings, Channel] = {}
        self._group = group
        self._memory = memory
        self.side_stream = torch.cuda.Stream(device) if self.is_gpu else None
        self.comm_stream = torch.cuda.Stream(device) if self.is_gpu else None
        self._caller: Any = None  # whose results are allocated on another stream
        self._last_stream: tuple[int, Any] = (-1, None)
        self.target, own = "cpu", f"CPU {self.rank}"
        if self.is_gpu:
            about = torch.cuda.get_device_properties(device)
            own = str(getattr(about, "uuid", device.index))
            # Kernels use what only this architecture has.
            suffix = "a" if about.major >= 9 else ""
            self.target = f"sm_{about.major}{about.minor}{suffix}"
        devices = board.exchange("Buffer()", own)
        self.shares_gpu = len(set(devices)) < self.n_ranks
        _ALIVE.add(self)

    def raise_failure(self) -> None:
        """Raises what has failed, until :meth:`reset`."""
        if self.failure:
            raise RuntimeError(self.failure)

    def end(self, why: str) -> None:
        """Makes later calls raise; the memory is freed."""
        self.failure, self.has_ended = why, True

    def exchange(self, what: str, note: Any = None) -> list[Any]:
        """Returns every rank's note; after a time-out calls raise.

        If ranks mask, one that does not come is absent from then on.
        """
        self.raise_failure()
        try:
            return self.board.exchange(what, note, self.absent if self.masks else None)
        except TimeoutError as error:
            self.failure = f"{error}. {_RESET}"
            raise TimeoutError(self.failure) from None

    def stream(self) -> int:
        """Returns the current stream, as kernels take it.

        Launches are in the order of the calls, on whatever streams: those of a region
        share its counters, and all ranks need one order.
        """
        if not self.is_gpu:
            return -1
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        if stream != self._last_stream[0]:
            before = self._last_stream[1]
            current = torch.cuda.current_stream(self.device)
            # A captured launch is none yet, and a capture begins when all have ended.
            if before and _is_captured(before) == _is_captured(current):
                current.wait_stream(before)
            self._last_stream = (stream, current)
        return stream

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
        self.raise_failure()
        if not (self.is_gpu and async_finish):
            if previous_event is not None:
                previous_event.current_stream_wait()
            work()
            return EventOverlap()
        caller = self._caller or torch.cuda.current_stream(self.device)
        # Results that are allocated on the caller's stream may lie where something
        # lay that the stream still uses.
        if previous_event is None or self._caller is None:
            self.comm_stream.wait_stream(caller)
        used = tuple(tensor for tensor in tensors if tensor is not None)
        with torch.cuda.stream(self.comm_stream):
            if previous_event is not None:
                previous_event.current_stream_wait()
            work()
            event = EventHandle()
        self.keep(used, self.comm_stream, caller)
        return EventOverlap(event, used)

    def keep(self, tensors: Sequence[torch.Tensor | None], *streams: Any) -> None:
        """Records for the allocator which streams use tensors; none: the current."""
        for stream in streams or (torch.cuda.current_stream(self.device),):
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(stream)

    def allocate(self, n_bytes: int) -> Any:
        """Allocates symmetric memory."""
        about = f"{self.board.n_exchanges}-{len(self.channels)}"
        place = f"{self.board.name}-{about}", self.rank, self.n_ranks
        if not self.is_gpu:
            return SharedMemory(*place, 1, n_bytes, "")
        if self._memory == "symm":
            return TorchSymmetricMemory(self._group, n_bytes, self.index)
        return GpuSharedMemory(*place, n_bytes, "", self.index)

    def settings(self, **fields: Any) -> Settings:
        """Returns a configuration of this group."""
        return Settings(
            target=self.target,
            ranks=self.n_ranks,
            shares_gpu=self.shares_gpu,
            **fields,
        )

    def scratch(self, n_bytes: int) -> int:
        """Returns the address of memory for what is written to absent ranks."""
        self._scratch.append(
            torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        )
        return self._scratch[-1].data_ptr()

    def _masks(self) -> list[torch.Tensor]:
        """Returns the masks of all regions."""
        return [
            region.masked
            for settings, channel in self.channels.items()
            if settings.masks
            for region in channel.regions
        ]

    def share_mask(self, region: Region) -> None:
        """Takes over, before a dispatch, whom the region used last has masked."""
        last, self._masked = self._masked, region.masked
        if last is not None and last is not region.masked:
            torch.maximum(region.masked, last, out=region.masked)

    def masked(self) -> torch.Tensor:
        """Returns which ranks are masked, as a new ``int32 [n_ranks]``."""
        found = torch.zeros(self.n_ranks, dtype=torch.int32, device=self.device)
        self.stream()  # what is read comes after the launches
        for mask in self._masks():
            torch.maximum(found, mask, out=found)
        for rank in self.absent:
            found[rank] = 1
        return found

    def set_mask(self, ranks: Collection[int], value: int) -> None:
        """Masks ranks, or waits for them again."""
        self.stream()
        for mask in self._masks():
            for rank in ranks:
                mask[rank] = value
        self.absent -= set() if value else set(ranks)

    def open(self, wanted: Sequence[Settings], n_regions: int) -> list[Channel]:
        """Returns channels; opens those that are new, with all other ranks."""
        new = [settings for settings in wanted if settings not in self.channels]
        if new:
            if self.is_capturing():
                raise RuntimeError(
                    "max_ep: the first call with new sizes builds kernels and "
                    "allocates memory; make it once before the capture"
                )
            if self.masks:
                dead = self.masked().nonzero().flatten().tolist()
                self.absent.update(rank for rank in dead if rank != self.rank)
            about = [" ".join(replace(s, target="").defines()) for s in new]
            self.exchange("the first " + "; ".join(about).replace("-D ", ""))
            try:
                build_all(new)
                for settings in new:
                    self.channels[settings] = Channel(self, settings, n_regions)
            except BaseException as error:  # other ranks may have what this one lacks
                what = str(error) or type(error).__name__
                self.failure = self.failure or f"{what}. {_RESET}"
                raise
        return [self.channels[settings] for settings in wanted]

    def check(self) -> None:
        """Waits for the device, and raises if a launch has failed."""
        self.raise_failure()
        self.synchronize()
        self.check_regions()

    def who_waits(self) -> Waits:
        """Says whom this rank waits for, in the region where it does."""
        self.raise_failure()
        found = [RankWait(self.rank)]
        for channel in list(self.channels.values()):
            found += [region.who_waits() for region in channel.regions]
        latest = max(found, key=lambda w: (bool(w.missing), w.is_running, w.generation))
        return Waits(self.board.name, [latest])

    def check_regions(self) -> None:
        """Raises if a launch has failed; does not wait for launches."""
        self.next_check = time.monotonic() + _CHECK_EVERY_S
        for channel in self.channels.values():
            for region in channel.regions:
                region.check()

    def synchronize(self) -> None:
        """Waits for this rank's launches."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def reset(self, n_exchanges: int, names: set[str]) -> None:
        """Puts this rank before the first launch.

        Args:
            n_exchanges: The most that any rank has begun.
            names: Settings of channels that all ranks have opened.
        """
        self.board.skip_to(n_exchanges)
        for settings, channel in list(self.channels.items()):
            if settings.name() in names:
                channel.clear()
            else:
                self.channels.pop(settings).close()
        self.failure = ""

    def close(self) -> None:
        """Gives all memory back."""
        if self.has_ended:
            return
        self.end("max_ep: this Buffer was destroyed")
        self.synchronize()
        for channel in self.channels.values():
            channel.close()
        self.channels = {}
        self.board.close()


_ALIVE: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Ends what a forked process has inherited; the memory stays with its parent."""
    for comm in list(_ALIVE):
        comm.end("max_ep: this Buffer is of the process that was forked; make one here")


os.register_at_fork(after_in_child=_leave_to_parent)


def _is_captured(stream: torch.cuda.Stream) -> bool:
    """Returns whether a graph captures a stream."""
    if stream.cuda_stream == 0:
        return False  # the default stream: nor may one ask during a capture
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
