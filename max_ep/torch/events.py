# SPDX-License-Identifier: Apache-2.0
"""DeepEP's helper classes: events, and sizes of buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


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

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        """Takes an event, and tensors that must live until it is waited for."""
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Makes the current stream wait."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: Any) -> None:
        self.current_stream_wait()


@dataclass
class Config:
    """DeepEP's performance knobs. They are kept, and change nothing here: kernels
    have a block on each multiprocessor."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns about what a rank of 4096 tokens takes: rows out, and rows back.

        Buffers grow by themselves.
        """
        return 2 * num_ranks * 4096 * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns 0: all ranks are on one host."""
        return 0
