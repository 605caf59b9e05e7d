# SPDX-License-Identifier: Apache-2.0
"""``Member``: what ``Buffer`` and ``ElasticBuffer`` are to the other ranks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo

from ..waits import Waits
from .channels import Channels
from .joining import gatherer, join


class Member:
    """One rank of a group, from the moment that all have joined until it leaves."""

    def __init__(
        self,
        group: Any,
        comm: Any,
        device: torch.device | str | None,
        timeout_s: float | None,
        explicitly_destroy: bool,
        masks: bool = False,
        **same: Any,
    ) -> None:
        """Joins the other ranks, which all pass the ``same``."""
        self._comm = join(group, comm, device, timeout_s, masks, **same)
        self._gather = gatherer(group, comm)
        self._channels = Channels(self._comm)
        self.group = group
        self.explicitly_destroy = explicitly_destroy
        # Graphics memory of a process that ends by exit() is given back in order.
        self._finish = weakref.finalize(self, Channels.close, self._channels)
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
        """Makes the memory usable again after an error; all ranks call it."""
        self._channels.reset(self._gather)

    def destroy(self) -> None:
        """Frees the memory. Calls after it raise."""
        self._finish()

    def get_comm_stream(self) -> torch.cuda.Stream | None:
        """Returns the stream of asynchronous work; None on CPU."""
        return self._comm.streams.comm


def not_compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes ``torch.compile`` leave a call alone: its graph breaks there."""
    breaking = _disable_dynamo(method)

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return breaking(*args, **options)
        return method(*args, **options)

    return call
