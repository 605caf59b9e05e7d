# SPDX-License-Identifier: Apache-2.0
"""Streams of a rank: the order of its launches, and work beside the current stream."""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..limits import checked_int, shown


class EventHandle:
    """A point on the current stream; on CPU nothing, for all calls there end."""

    def __init__(self) -> None:
        """Records the event."""
        self.event = None
        if torch.cuda.is_available():
            self.event = torch.cuda.Event()
            self.event.record()

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for it."""
        if self.event is not None:
            self.event.wait()


class EventOverlap:
    """What an asynchronous call returns; also a context that ends with the wait.

    Example:
        >>> with event:
        ...     work_that_does_not_need_the_rows()
    """

    _releases = False
    _after: Callable[[], None] | None = None

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        """Takes an event, and tensors that must live until it is waited for."""
        self.event = event
        self.extra_tensors = extra_tensors

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        """Sets what the next wait calls at its end, once."""
        self._after = hook_after_wait

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes the current stream wait; then forgets the event, if that is asked."""
        if self.event is not None:
            self.event.current_stream_wait()
        after, self._after = self._after, None
        if after is not None:
            after()
        if release_handle:
            self.event = None

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Says what the wait at the end of a context does with the event."""
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: Any) -> None:
        self.current_stream_wait(self._releases)


def check_event(event: Any) -> None:
    """Raises unless a call can wait for ``previous_event``."""
    if event is not None and not hasattr(event, "current_stream_wait"):
        raise TypeError(
            f"max_ep: previous_event is a {type(event).__name__}; pass what "
            "Buffer.capture() or an asynchronous call returned, or None"
        )


def check_flag(name: str, value: Any) -> None:
    """Raises unless a value says yes or no: text, and most other things, are true."""
    if not isinstance(value, (int, np.bool_)):
        raise ValueError(f"max_ep: {name}={shown(value)} must be True or False")


def wait_for(event: Any) -> None:
    """Makes the current stream wait for an event, if one is given."""
    check_event(event)
    if event is not None:
        event.current_stream_wait()


@dataclass
class Config:
    """DeepEP's performance knobs. ``num_sms`` bounds the multiprocessors of a call; the
    others change nothing here."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256
    asks_for_all: bool = field(default=False, kw_only=True)
    """Whether nobody chose ``num_sms``: the call then uses all multiprocessors."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns about what a rank of 4096 tokens takes: rows out, and rows back.

        Buffers grow by themselves.
        """
        n_bytes = checked_int("max_ep: hidden_bytes", hidden_bytes)
        return 2 * checked_int("max_ep: num_ranks", num_ranks) * 4096 * n_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns 0: a buffer allocates by itself."""
        return 0


class When(NamedTuple):
    """What the work of a call waits for, and on which stream it is."""

    after: EventOverlap | None = None
    """None: all of the current stream."""
    is_async: bool = False
    allocates_there: bool = False
    """Whether results are allocated on the stream of asynchronous work."""


def check_when(when: When, asynchronous: str) -> None:
    """Refuses what is no event, or no flag; ``asynchronous``: what callers name it."""
    check_event(when.after)
    check_flag(asynchronous, when.is_async or False)  # None asks for nothing
    check_flag("allocate_on_comm_stream", when.allocates_there or False)


class Numbers:
    """Words of the host that a launch writes, each once, and each at least 0. They are
    read while the launch goes on."""

    @torch.inference_mode(False)  # later calls use it in any mode
    def __init__(self, n: int, is_gpu: bool) -> None:
        where = dict(device="cpu", pin_memory=is_gpu)  # whatever the default device is
        self.words = torch.empty(n, dtype=torch.int32, **where)
        self.address = self.words.data_ptr()
        self._view = self.words.numpy()
        self._first = ctypes.c_int32.from_address(self.address)
        self.event = torch.cuda.Event() if is_gpu else None

    def clear(self) -> None:
        ctypes.memset(self.address, 0xFF, self._view.nbytes)

    def is_used(self) -> bool:
        """Returns whether the device may still use the words."""
        return self.event is not None and not self.event.query()

    def read(self) -> np.ndarray:
        """Waits until all are there; launches write them also if they fail."""
        n_polls = 0
        # To look at one word takes 0.1 us, at 256 takes 2.
        while self._first.value < 0 or self._view.min() < 0:
            n_polls += 1
            if n_polls % _POLLS_PER_LOOK:
                continue
            if not self.is_used():
                if self._view.min() >= 0:
                    break
                raise RuntimeError("max_ep: a launch has ended without its numbers")
            # Other threads may run. A sleep of 0 takes 75 us (Python 3.11 to 3.13).
            if n_polls < _POLLS_BEFORE_SLEEP:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_S)
        return self._view.copy()


_POLLS_PER_LOOK, _POLLS_BEFORE_SLEEP, _SLEEP_S = 64, 1 << 18, 1e-4
_NOTHING = nullcontext()


class Streams:
    """Where the work of a rank goes; CPU ranks have no streams, and do it at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.index = device.index or 0
        self.is_gpu = device.type == "cuda"
        self.comm = torch.cuda.Stream(device) if self.is_gpu else None
        self.side = torch.cuda.Stream(device) if self.is_gpu else None
        self._caller: Any = None  # whose results are allocated on `comm`
        self._last: tuple[int, Any] = (-1, None)
        self._numbers: dict[int, deque[Numbers]] = {}  # the oldest first

    def current(self) -> int:
        """Returns the current stream, as kernels take it; it waits for the one before:
        launches of a region share its counters, and all ranks need one order."""
        if not self.is_gpu:
            return -1
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        if stream != self._last[0]:
            before = self._last[1]
            current = torch.cuda.current_stream(self.device)
            # A captured launch is none yet, and a capture begins when all have ended.
            if before and _is_captured(before) == _is_captured(current):
                current.wait_stream(before)
            self._last = (stream, current)
        return stream

    def is_capturing(self) -> bool:
        return self.is_gpu and torch.cuda.is_current_stream_capturing()

    def numbers(self, n: int) -> Numbers:
        """Returns words for a launch to write; call ``launched`` behind it."""
        made = self._numbers.setdefault(n, deque())
        if made and not made[0].is_used():
            numbers = made.popleft()
        else:
            numbers = Numbers(n, self.is_gpu)
        made.append(numbers)  # kept also if its call fails
        numbers.clear()
        return numbers

    def launched(self, numbers: Numbers) -> None:
        """Notes that a launch which writes the words is on its way."""
        if numbers.event is not None:
            numbers.event.record(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def allocating(self, when: When) -> AbstractContextManager[None]:
        """Makes the stream of asynchronous work the current one, to allocate there, if
        that is asked and the work does not wait for all of the current stream."""
        is_asked = when.allocates_there and when.is_async and when.after is not None
        if not (self.is_gpu and is_asked):
            return _NOTHING
        return self._allocating()

    @contextmanager
    def _allocating(self) -> Iterator[None]:
        self._caller = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.stream(self.comm):
                yield
        finally:
            self._caller = None

    def run(
        self,
        work: Callable[[], Any],
        tensors: Sequence[torch.Tensor | None],
        when: When,
    ) -> EventOverlap:
        """Does work on the current stream, or on one of its own if asynchronous."""
        previous_event, is_async, _ = when
        if not (self.is_gpu and is_async):
            if previous_event is not None:
                previous_event.current_stream_wait()
            work()
            return EventOverlap()
        caller = self._caller or torch.cuda.current_stream(self.device)
        # Results that are allocated on the caller's stream may lie where something
        # lay that the stream still uses.
        if previous_event is None or self._caller is None:
            self.comm.wait_stream(caller)
        used = tuple(tensor for tensor in tensors if tensor is not None)
        with torch.cuda.stream(self.comm):
            if previous_event is not None:
                previous_event.current_stream_wait()
            work()
            event = EventHandle()
        self.keep(used, self.comm, caller)
        return EventOverlap(event, used)

    def keep(self, tensors: Sequence[torch.Tensor | None], *streams: Any) -> None:
        """Records for the allocator which streams use tensors; none: the current."""
        for stream in streams or (torch.cuda.current_stream(self.device),):
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(stream)


def _is_captured(stream: torch.cuda.Stream) -> bool:
    if stream.cuda_stream == 0:
        return False  # the default stream: nor may one ask during a capture
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
