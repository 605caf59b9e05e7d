# SPDX-License-Identifier: Apache-2.0
"""Checks the order of EP ops while a graph is built.

Ranks that run one after another must all send before one of them waits, and all
wait before one sends again.
"""

from __future__ import annotations

from collections.abc import Iterable


class OpOrder:
    """The ops of one direction so far: every wait must follow its sends."""

    def __init__(self, phase: str, n_local_ranks: int, in_turn: bool) -> None:
        """Begins with nothing sent; ``in_turn``: ranks run one after another."""
        self._phase = phase
        self._in_turn = in_turn
        self._sent = [0] * n_local_ranks
        self._waited = [0] * n_local_ranks

    def send(self, device_id: int) -> None:
        """Counts a rank's send; refuses it before the wait for the previous one."""
        ranks, sent = self._others(device_id), self._sent[device_id]
        if unread := [rank for rank in ranks if self._waited[rank] < sent]:
            raise ValueError(
                f"ep_{self._phase}_async on device {device_id} again, before "
                f"ep_{self._phase}_wait on devices {unread}: the buffers still "
                "hold what was sent last. Wait on every device first, or use a "
                "second EPBatchManager with buffers of its own"
            )
        self._sent[device_id] += 1

    def check_wait(self, device_id: int, op: str) -> None:
        """Refuses a wait before its send."""
        ranks, waited = self._others(device_id), self._waited[device_id]
        if self._sent[device_id] <= waited:
            raise ValueError(
                f"{op} on device {device_id} without "
                f"ep_{self._phase}_async before it; call that first"
            )
        if late := [rank for rank in ranks if self._sent[rank] <= waited]:
            raise ValueError(
                f"{op} on device {device_id} before "
                f"ep_{self._phase}_async on devices {late}: the ranks of this "
                "process run one after another, so their sends would never "
                f"come. Call ep_{self._phase}_async of every device first"
            )

    def wait(self, device_id: int) -> None:
        """Checks and counts a rank's wait."""
        self.check_wait(device_id, f"ep_{self._phase}_wait")
        self._waited[device_id] += 1

    def is_under_way(self, device_id: int) -> bool:
        return self._sent[device_id] > self._waited[device_id]

    def _others(self, device_id: int) -> Iterable[int]:
        return range(len(self._sent)) if self._in_turn else [device_id]
