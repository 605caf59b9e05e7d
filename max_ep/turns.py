# SPDX-License-Identifier: Apache-2.0
"""Which rank may send and which may wait, while a graph is built.

Ranks that run one after another must all send before one of them waits, and all
wait before one sends again.
"""

from __future__ import annotations

from collections.abc import Iterable


class Turns:
    """Watches that every wait follows its sends, while a graph is built."""

    def __init__(self, phase: str, n_local_ranks: int, in_turn: bool) -> None:
        """Begins with nothing sent.

        Args:
            phase: ``"dispatch"`` or ``"combine"``.
            n_local_ranks: Ranks of this process.
            in_turn: Whether they run one after another.
        """
        self._phase = phase
        self._in_turn = in_turn
        self._sent = [0] * n_local_ranks
        self._waited = [0] * n_local_ranks

    def check_send(self, device_id: int, op: str) -> None:
        """Refuses an op that writes what has not been waited for."""
        unread = [
            rank
            for rank in self._others(device_id)
            if self._waited[rank] < self._sent[device_id]
        ]
        if unread:
            raise ValueError(
                f"{op} on device {device_id} again, before "
                f"ep_{self._phase}_wait on devices {unread}: the buffers still "
                "hold what was sent last. Wait on every device first, or use a "
                "second EPBatchManager with buffers of its own"
            )

    def send(self, device_id: int) -> None:
        """Checks and notes a rank's send."""
        self.check_send(device_id, f"ep_{self._phase}_async")
        self._sent[device_id] += 1

    def check_wait(self, device_id: int, op: str) -> None:
        """Refuses an op that waits for what no op before it sends."""
        if self._sent[device_id] <= self._waited[device_id]:
            raise ValueError(
                f"{op} on device {device_id} without "
                f"ep_{self._phase}_async before it; call that first"
            )
        late = [
            rank
            for rank in self._others(device_id)
            if self._sent[rank] <= self._waited[device_id]
        ]
        if late:
            raise ValueError(
                f"{op} on device {device_id} before "
                f"ep_{self._phase}_async on devices {late}: the ranks of this "
                "process run one after another, so their sends would never "
                f"come. Call ep_{self._phase}_async of every device first"
            )

    def wait(self, device_id: int) -> None:
        """Checks and notes a rank's wait."""
        self.check_wait(device_id, f"ep_{self._phase}_wait")
        self._waited[device_id] += 1

    def is_under_way(self, device_id: int) -> bool:
        """Tells whether a rank has sent and not waited."""
        return self._sent[device_id] > self._waited[device_id]

    def _others(self, device_id: int) -> Iterable[int]:
        return range(len(self._sent)) if self._in_turn else [device_id]
