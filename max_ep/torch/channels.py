# SPDX-License-Identifier: Apache-2.0
"""The channels of a rank: all ranks open the same, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .calls import Call
from .channel import Channel
from .communicator import Communicator
from .library import Settings, build_all


class Channels:
    """What a communicator has opened, by the settings."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.opened: dict[Settings, Channel] = {}
        self.cap = 0
        """Tokens of a rank that calls with exchanged sizes have memory for."""

    def open(
        self, wanted: Sequence[Settings], n_regions: int, call: Call
    ) -> list[Channel]:
        """Returns channels; opens those that are new, with all other ranks. ``call``
        needs them."""
        new = [settings for settings in wanted if settings not in self.opened]
        if new:
            comm = self.comm
            if comm.streams.is_capturing():
                raise RuntimeError(
                    "max_ep: the first call with new sizes builds kernels and "
                    "allocates memory; make it once before the capture"
                )
            if comm.masks:
                comm.masks.give_up()
            if new[0].rows == "padded":
                comm.say(new[0])
            named = (f"{call.method}({settings.facts()})" for settings in new)
            comm.exchange("the first " + "; ".join(named))
            try:
                _build(new, call)
                for settings in new:
                    self.opened[settings] = Channel(comm, settings, n_regions)
            except BaseException as error:  # other ranks may have what this one lacks
                comm.fail(error)
                raise
        return [self.opened[settings] for settings in wanted]

    def reset(self, gather: Callable[[Any], list[Any]]) -> None:
        """Puts all ranks before the first launch; channels stay that all ranks have.

        ``gather`` returns an object of every rank.
        """
        comm = self.comm
        if comm.has_ended:
            comm.raise_failure()
        comm.streams.synchronize()  # who is here writes to no rank any more
        if comm.hosts:
            for channel in self.opened.values():
                channel.memory.settle(comm.timeout_s)
        names = [settings.name() for settings in self.opened]
        all_ = gather((comm.board.n_exchanges, self.cap, names))
        # A rank may have missed exchanges.
        comm.board.n_exchanges = max(n for n, *_ in all_)
        self.cap = max(cap for _, cap, _ in all_)
        stay = set(names).intersection(*(theirs for *_, theirs in all_))
        for settings, channel in list(self.opened.items()):
            if settings.name() in stay:
                channel.clear()
            else:
                self.opened.pop(settings).close()
        comm.failure, comm.latest = "", None
        gather(None)

    def close(self) -> None:
        """Frees the memory; calls raise from then on."""
        comm = self.comm
        if comm.has_ended:
            return
        comm.end("max_ep: this buffer was destroyed")
        comm.streams.synchronize()
        for channel in self.opened.values():
            channel.close()
        self.opened = {}
        if comm.hosts:
            comm.hosts.close()
        comm.board.close()


def _build(new: Sequence[Settings], call: Call) -> None:
    """Says, where nothing can be compiled, what compiles it elsewhere."""
    try:
        build_all(new)
    except Exception as error:
        raise RuntimeError(
            f"{error}\n`{call.command()}` compiles what this call needs ahead, into "
            "MAX_EP_CACHE_DIR (docs/pytorch.md#the-first-call)"
        ) from error
