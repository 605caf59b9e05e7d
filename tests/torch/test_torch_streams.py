# SPDX-License-Identifier: Apache-2.0
"""Streams of a rank, and numbers that its host reads, without a GPU."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from max_ep.torch import EventOverlap, sums
from max_ep.torch.counts import read_numbers
from max_ep.torch.streams import Streams, When
from tests.errors import raises


class Stream:
    """A stream that writes down what it waits for."""

    current: Stream
    log: list[str] = []

    def __init__(self, name: str, number: int, is_captured: bool = False) -> None:
        self.name, self.cuda_stream, self.is_captured = name, number, is_captured

    def wait_stream(self, other: Stream) -> None:
        Stream.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Streams of a GPU that is not there."""

    @contextlib.contextmanager
    def use(stream: Stream) -> Any:
        before, Stream.current = Stream.current, stream
        yield
        Stream.current = before

    raw = "_cuda_getCurrentRawStream"
    cuda_stream = lambda index: Stream.current.cuda_stream  # noqa: E731
    monkeypatch.setattr(torch._C, raw, cuda_stream, raising=False)
    is_captured = lambda: Stream.current.is_captured  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_captured)
    made = Streams(torch.device("cpu", 0))
    made.is_gpu, made.comm = True, Stream("comm", 9)
    Stream.log, Stream.current = [], Stream("A", 0)
    return made


def test_launches_are_in_one_order(streams: Streams) -> None:
    """A call on another stream waits for the launches on that of the call before."""
    a, b = Stream.current, Stream("B", 5)
    for Stream.current in (a, a, b, b, a):
        assert streams.current() == Stream.current.cuda_stream
    assert Stream.log == ["B waits for A", "A waits for B"]
    # What a graph captures waits for nothing before the capture, nor is it waited for.
    Stream.log, Stream.current = [], Stream("C", 7, is_captured=True)
    streams.current()
    fork = Stream("D", 8, is_captured=True)
    Stream.current = fork
    streams.current()
    Stream.current = a
    streams.current()
    assert Stream.log == ["D waits for C"]


def test_asynchronous_work_waits(streams: Streams) -> None:
    """For the caller's stream, where results are allocated, and for the event."""
    event: Any = EventOverlap()
    event.current_stream_wait = lambda: Stream.log.append(
        f"{Stream.current.name} waits for the event"
    )
    used: list[Any] = []
    tensor: Any = SimpleNamespace(record_stream=lambda stream: used.append(stream.name))
    ran: list[str] = []

    def work() -> None:
        ran.append(Stream.current.name)

    streams.run(work, [tensor, None], When(None, True))
    assert Stream.log == ["comm waits for A"]
    Stream.log = []
    streams.run(work, [tensor], When(event, True))
    assert Stream.log == ["comm waits for A", "comm waits for the event"]
    Stream.log = []
    there = When(event, True, True)
    with streams.allocating(there):
        streams.run(work, [tensor], there)
    assert Stream.log == ["comm waits for the event"]
    assert ran == ["comm"] * 3 and used == ["comm", "A"] * 3
    Stream.log = []
    streams.run(work, [tensor], When(event))
    assert Stream.log == ["A waits for the event"] and ran[-1] == "A"


class Event:
    """What a GPU that is not there has reached."""

    has_come = False

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        self.has_come = True


@pytest.mark.parametrize("late", [0, 1])
def test_the_host_reads_numbers_while_a_launch_goes_on(late: int) -> None:
    """Fails if the host waits for the end of a launch, or takes words that are not all
    there; or if a launch writes to words that another one still uses."""
    streams = Streams(torch.device("cpu"))
    numbers = streams.numbers(2)
    assert streams.numbers(2) is numbers  # a launch on the CPU has ended
    numbers.event = event = Event()  # type: ignore[assignment]
    other = streams.numbers(2)
    assert other is not numbers
    numbers.words[1 - late] = (2, 5)[1 - late]
    given = late, (2, 5)[late]
    writes = threading.Timer(0.1, numbers.words.__setitem__, given)
    writes.start()
    assert numbers.read().tolist() == [2, 5]
    assert not event.has_come
    writes.join()
    other.words[:] = torch.tensor([3, 4])
    assert other.read().tolist() == [3, 4]
    event.has_come = True
    assert streams.numbers(2) is numbers and numbers.words.tolist() == [-1, -1]
    with raises(RuntimeError, "a launch has ended without its numbers"):
        numbers.read()


def test_who_polls_numbers_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a look at the launch sleeps: ``time.sleep(0)`` takes 75 us of Python
    3.11 to 3.13, where a layer of few tokens takes ten."""
    slept: list[float] = []
    monkeypatch.setattr("max_ep.torch.streams.time.sleep", slept.append)
    numbers = Streams(torch.device("cpu")).numbers(2)

    class LookedAt(Event):
        n_looks = 0

        def query(self) -> bool:
            self.n_looks += 1
            if self.n_looks == 3:
                numbers.words[:] = torch.tensor([2, 5])
            return False

    numbers.event = LookedAt()  # type: ignore[assignment]
    assert numbers.read().tolist() == [2, 5] and not slept


def test_a_number_of_rows_is_not_used_after_a_failure() -> None:
    """Fails if only what a launch made is read, and not whether it has failed: it makes
    no rows then."""

    def check_regions() -> None:
        assert event.has_come
        raise RuntimeError("rank 1 did not come")

    comm: Any = SimpleNamespace(check_regions=check_regions)
    numbers = Streams(torch.device("cpu")).numbers(2)
    numbers.event = event = Event()  # type: ignore[assignment]
    numbers.words[:] = torch.tensor([2, 5])
    assert sums.ends_in(numbers, comm).tolist() == [2, 5] and not event.has_come
    numbers.words.zero_()
    with raises(RuntimeError, "rank 1 did not come"):
        sums.ends_in(numbers, comm)
    numbers.words[0] = -1  # a count that has not come
    with raises(RuntimeError, "rank 1 did not come"):
        read_numbers(numbers, comm)


def test_hook_after_a_wait_runs_once() -> None:
    """Fails if a later wait calls it again."""
    calls: list[int] = []
    event = EventOverlap()
    event.register_hook_after_wait(lambda: calls.append(1))
    event.current_stream_wait()
    event.current_stream_wait()
    assert calls == [1]
