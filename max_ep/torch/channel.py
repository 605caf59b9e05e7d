# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory with the kernels of one configuration, on one rank.

A channel alternates between its regions, so received data stays valid while another
region is used. All ranks open the same channels in the same order.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import time
from collections.abc import Callable
from ctypes import addressof
from typing import Any

import torch

from ..memory.gpu_shared import reader
from ..waits import RankWait, Words, at_address, cpu_wait, gpu_wait
from .communicator import Communicator
from .library import Settings, load, text_of
from .quantized import FORMATS
from .tables import n_table_words, row_major

SEND, RECEIVE, BOTH = 1, 2, 3
"""Which parts of dispatch or combine a call does; see ``max_ep_c/api.mojo``."""

_DISPATCH, _COMBINE = struct.Struct("19q"), struct.Struct("12q")
_N_DISPATCH = 16
_NONE = (0,) * _N_DISPATCH


class Region:
    """One region: counters, addresses of all ranks, and the calls of the library."""

    @torch.inference_mode(False)  # later calls change `counters` in any mode
    def __init__(
        self, library: Any, comm: Communicator, settings: Settings, address: int
    ) -> None:
        """Clears this rank's part."""
        self.library = library
        self.comm = comm
        self.settings = settings
        self._address = address
        device = comm.device
        sizes, words = library.sizes, dict(dtype=torch.int32, device=device)
        self.counters = torch.zeros(sizes.counters_words, **words)
        self._record = self.counters[sizes.failure_word :][: sizes.n_failure_words]
        self.failed = self._record[:1]
        """Not 0: a launch has failed."""
        self.masked = self.counters[sizes.masked_word :][: comm.n_ranks]
        if comm.is_gpu:
            torch.cuda.synchronize(device)  # the library clears on a stream of its own
        timeout_ms, counters = max(1, int(comm.timeout_s * 1000)), self.counters
        self.handle = library.open(
            comm.index, comm.rank, timeout_ms, address, counters.data_ptr()
        )
        if not self.handle:
            raise RuntimeError("max_ep: a region cannot be opened; see above")
        self._n_sms = 0  # as the library knows it
        self._queue = 0
        self.use: object = None  # identifies the last dispatch
        # Whether a CUDA graph captured that, or any before: replays dispatch, too.
        self.is_captured = self.was_captured = False
        # The hook of a call that has only sent, and whether that was a dispatch.
        self.hook: Callable[[], None] | None = None
        self.hook_is_of_dispatch = False

    def connect(self, addresses: list[int], queue: int) -> None:
        """Stores the address of every rank's part, 0 for those of other hosts, to which
        what is in the queue goes; 0: there is none."""
        regions = (ctypes.c_uint64 * len(addresses))(*addresses)
        self.library.connect(self.handle, addressof(regions))
        self._queue = queue
        self._use_queue()

    def _use_queue(self) -> None:
        if self._queue:
            at = self.counters.data_ptr() + 4 * self.library.sizes.link_word
            ctypes.c_uint64.from_address(at).value = self._queue

    def dispatch(self, form: int, *arguments: int) -> None:
        """Launches on the current stream, with the fields of ``DispatchArguments``
        behind ``form``; 0 for the last ones that are not given."""
        if len(arguments) != _N_DISPATCH:
            arguments += _NONE[len(arguments) :]
        self._launch(self.library.dispatch, _DISPATCH.pack, form, arguments)

    def combine(self, form: int, *arguments: int) -> None:
        """Launches a combine, with the fields of ``CombineArguments``, likewise."""
        arguments += _NONE[len(arguments) : 9]
        self._launch(self.library.combine, _COMBINE.pack, form, arguments)

    def watch(self, is_combine: bool, waits_ns: torch.Tensor) -> None:
        """Adds how long each peer is waited for, in ns, to ``int64 [n_ranks]``."""
        self.comm.raise_failure()
        waits = torch.empty_like(waits_ns)
        stream = self.comm.streams.current()
        if self.library.watch(self.handle, stream, is_combine, waits.data_ptr()):
            self._raise()
        waits_ns += waits.clamp_(min=0)

    def _launch(
        self,
        function: Callable[[bytes], int],
        pack: Callable[..., bytes],
        form: int,
        arguments: tuple[int, ...],
    ) -> None:
        """Raises if the communicator has failed; looks at a GPU now and then."""
        comm = self.comm
        # In one launch blocks could wait for those of a rank that have no place to run.
        if form == BOTH and comm.shares_gpu:
            self._launch(function, pack, SEND, arguments)
            form = RECEIVE
        if comm.n_sms != self._n_sms:
            self._n_sms = comm.n_sms
            self.library.use_sms(self.handle, self._n_sms)
        if comm.failure:
            comm.raise_failure()
        if comm.is_gpu and time.monotonic() > comm.next_check:
            if not comm.streams.is_capturing():
                comm.check_regions()
        if function(pack(self.handle, comm.streams.current(), form, *arguments)):
            self._raise()

    def check(self) -> None:
        """Raises if a launch on a GPU has failed; does not wait for launches."""
        if not self.comm.is_gpu or not self.handle:
            return
        with torch.cuda.stream(self.comm.streams.side):
            record = self._record.cpu()
        if record[0] != 0:
            self.library.failure(self.handle, record.data_ptr())
            self._raise()

    def who_waits(self) -> RankWait:
        """Says whom this rank waits for in this region, also while a launch hangs."""
        comm, sizes = self.comm, self.library.sizes
        read = functools.partial(reader, comm.index) if comm.is_gpu else at_address
        words = Words(read(self.counters.data_ptr()), read(self._address))
        if comm.is_gpu:
            return gpu_wait(sizes, comm.rank, words)
        return cpu_wait(sizes, comm.rank, words, time.monotonic_ns())

    def _raise(self) -> None:
        """Raises what the library's last call that failed says."""
        text = text_of(functools.partial(self.library.last_error, self.handle))
        if "timed out" in text:
            text += self.comm.other_calls()
        self.comm.failure = text
        self.comm.raise_failure()

    def clear(self) -> None:
        """Puts this rank before the first launch; no rank may be in one."""
        self.use = self.hook = None
        self.is_captured = self.was_captured = False
        if self._queue:  # what was staged for other hosts, too
            ctypes.memset(self._address, 0, self.library.sizes.region_bytes)
        if self.library.clear(self.handle):
            self._raise()
        self._use_queue()

    def close(self) -> None:
        if self.handle:
            self.library.close(self.handle)
            self.handle = 0


class Channel:
    def __init__(self, comm: Communicator, settings: Settings, n_regions: int) -> None:
        """Builds the library if there is none, and joins the other ranks."""
        self.comm, self.settings = comm, settings
        self.n_local = settings.experts // settings.ranks
        capacity = settings.ranks * settings.tokens
        self.rows_shape = (self.n_local, capacity, settings.hidden)
        if settings.rows == "padded":
            self._lay_out_padded(capacity)
        sizes = (settings.ranks, settings.tokens)
        self.n_table_words = n_table_words(self.n_local, *sizes)
        library = load(settings)
        sizes = library.sizes
        n_bytes = sizes.region_bytes
        self.memory = comm.allocate(n_regions * n_bytes, settings.facts(), sizes)
        self.regions: list[Region] = []
        try:
            (mine,) = self.memory.local_addresses()
            for i in range(n_regions):
                at = mine + i * n_bytes
                self.regions.append(Region(library, comm, settings, at))
            absent = comm.masks.absent if comm.masks else ()
            bases = self.memory.connect(comm.timeout_s, absent)
            queue = self.memory.queue if comm.hosts else 0
            for i, region in enumerate(self.regions):
                region.connect([base and base + i * n_bytes for base in bases], queue)
                for rank in absent:
                    region.masked[rank] = 1
            comm.regions += self.regions
            self.is_open = True
        except BaseException:
            self.close()
            raise
        self.n_taken = 0
        if settings.rows != "padded":
            self._prepare_given()

    @torch.inference_mode(False)  # later calls read them in any mode
    def _prepare_given(self) -> None:
        """Makes what calls of plain and expanded rows need, and a capture must not."""
        settings, n = self.settings, len(self.regions)
        is_split = self.comm.is_gpu and n > 1
        captured = self.regions[n // 2 :] if is_split else self.regions
        self.turns = self.regions[: n // 2] if is_split else captured, captured
        """Regions of eager calls, and of captured ones."""
        how = dict(dtype=torch.float32, device=self.comm.device)
        n_choices = settings.tokens * settings.top_k
        self.no_weights = torch.zeros(n_choices, **how)
        """Router weights of a dispatch that has none."""
        n_rows = settings.ranks * n_choices + (self.n_local + 1) * settings.alignment
        self.unread_weights = torch.empty(n_rows, **how)
        """Where they go."""

    def _lay_out_padded(self, capacity: int) -> None:
        """Says what a low-latency dispatch allocates for rows, and for scales."""
        settings, n_local = self.settings, self.n_local
        base = settings.format.removesuffix("_forwarded")
        wire = FORMATS.get("fp8" if base == "fp8_power_of_two" else base)
        columns = settings.hidden // (wire.per_byte if wire else 1)
        self.rows_layout = row_major(n_local, capacity, columns)
        self.rows_dtype = wire.values if wire else torch.bfloat16
        self.scales_dtype = wire and wire.scales
        self.has_columns = self.scales_dtype == torch.float32
        """Whether scales are by column, and not by row."""
        if wire:
            n = settings.hidden // wire.block
            if settings.packed_scales:
                n, self.scales_dtype = n // 4, torch.int32
            shape = (n, capacity) if self.has_columns else (capacity, n)
            self.scales_layout = row_major(n_local, *shape)

    def next_region(self) -> Region:
        return self.regions[(self.n_taken + 1) % len(self.regions)]

    def take(self, region: Region) -> None:
        """Begins another use of a region, the next one."""
        if self.comm.latest is not self.settings:
            self.comm.say(self.settings)
            self.comm.latest = self.settings
        self.n_taken += 1
        region.use = object()

    def clear(self) -> None:
        """Puts all regions of this rank before the first launch."""
        self.n_taken = 0  # this rank may have missed calls
        for region in self.regions:
            region.clear()

    def close(self) -> None:
        self.is_open = False
        for region in self.regions:
            if region in self.comm.regions:
                self.comm.regions.remove(region)
            region.close()
        self.memory.close()
