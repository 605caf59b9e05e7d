# SPDX-License-Identifier: Apache-2.0
"""Counts that go ahead of rows, so that the host knows them while rows move.

They are the rows of a small dispatch, one for each rank, which the kernel puts into
memory of the host.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .calls import Call
from .channel import BOTH, Channel
from .channels import Channels
from .communicator import Communicator
from .library import round_up
from .streams import Numbers


class Counts:
    """Counts that the ranks of a group send each other, through channels by their
    number."""

    def __init__(self, channels: Channels) -> None:
        self._comm = channels.comm
        self._channels = channels
        self._found: dict[int, Channel] = {}
        # What kernels write, and nobody reads: one place for all, as launches have an
        # order.
        self._unread = torch.empty(
            8 * self._comm.n_ranks, dtype=torch.int64, device=self._comm.device
        )

    def forget(self) -> None:
        """Forgets channels, which a reset may close."""
        self._found.clear()

    def open(self, n: int, call: Call) -> None:
        """Opens the channel for ``n`` counts of each rank, which a call needs."""
        if n not in self._found:
            wanted = [call.counts(n)]
            (self._found[n],) = self._channels.open(wanted, 1, call)

    def send(self, counts: torch.Tensor) -> Callable[[], list[int]]:
        """Sends each rank its row of ``int32 [n_ranks, n]``; returns what waits for
        those of all ranks for this one, and adds them up. Call it once."""
        comm, n = self._comm, counts.shape[1]
        n_ranks, n_words = comm.n_ranks, round_up(n, 4)
        if n != n_words or counts.data_ptr() % 16 != 0:  # rows are of whole 16 bytes
            padded = counts.new_zeros((n_ranks, n_words))
            padded[:, :n] = counts
            counts = padded
        numbers = comm.streams.numbers(n_ranks * n_words)
        channel, ids = self._found[n], comm.rank_numbers.data_ptr()
        unread = self._unread.data_ptr()
        ends, src_info, chosen, local = (unread + i * 16 * n_ranks for i in range(4))
        channel.regions[0].dispatch(
            BOTH,
            counts.data_ptr(),
            ids,
            n_ranks,
            numbers.address,
            0,  # no scales
            ends,
            0,
            src_info,
            n_ranks,
            channel.no_weights.data_ptr(),
            channel.unread_weights.data_ptr(),
            chosen,
            local,
            0,
            0,
            ids,  # which are not copied
        )
        comm.streams.launched(numbers)

        def read() -> list[int]:
            found = read_numbers(numbers, comm).reshape(n_ranks, n_words)
            return found[:, :n].sum(0).tolist()

        return read


def read_numbers(numbers: Numbers, comm: Communicator) -> np.ndarray:
    """Waits until a launch has written its numbers; raises what has failed if it ends
    without them."""
    try:
        return numbers.read()
    except RuntimeError:
        comm.check_regions()
        raise


def new_counts(ids: torch.Tensor, n_experts: int) -> torch.Tensor:
    """Allocates what ``count_choices`` fills: one more than experts, for the others."""
    return ids.new_empty(n_experts + 1, dtype=torch.int32)


def count_choices(
    ids: torch.Tensor, counts: torch.Tensor, one: torch.Tensor
) -> torch.Tensor:
    """Counts ``int64 [tokens, top_k]`` by expert; returns int32 ``[n_experts]``.
    ``one``: int32 ``[1]``. Of an id that is none and not -1 it is not said where it is
    counted: dispatch fails then."""
    places = torch.remainder(ids, len(counts)).flatten()  # -1 is the last
    counts.zero_().scatter_add_(0, places, one.expand(len(places)))
    return counts[:-1]
