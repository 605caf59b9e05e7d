# SPDX-License-Identifier: Apache-2.0
"""Waits of each rank for each peer, and received rows: saved, printed, drawn.

The numbers come from ``EPBatchManager.ep_watch`` and ``ep_received``, which a graph
puts among its outputs; ``graphs/who_waits.py`` shows how.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from . import install
from .limits import is_integer
from .npz import read_npz
from .plural import counted

_LINE, BAR = 80, 40  # characters of a line, and of the longest bar
_MOST_ROWS = 2**31 - 1  # of an expert in a run: counts are int32
_MOST_BARS = 32  # of a histogram in text; neighbours are put together


@dataclass
class Statistics:
    """Measurements of some runs of one layer, of all ranks."""

    dispatch_ns: np.ndarray
    """int64 ``[n_runs, n_ranks, n_ranks]``: how long rank ``[:, i, :]`` waited for what
    rank ``[:, :, j]`` dispatched, from the begin of its own watch; -1: it timed out."""
    combine_ns: np.ndarray
    """The same, for rows or sums that come back."""
    received: np.ndarray
    """int32 ``[n_runs, n_ranks, n_local_experts]``: rows of each expert."""
    n_experts: int
    """Experts of the group; the last ranks may have fewer than ``n_local_experts``."""

    def __post_init__(self) -> None:
        for name in ("dispatch_ns", "combine_ns", "received"):
            array = np.asarray(getattr(self, name))
            if array.dtype.kind not in "iu":
                raise ValueError(
                    f"{name} is of dtype {array.dtype}, it must be integers"
                )
            setattr(self, name, array)
        shape = self.received.shape
        if len(shape) != 3 or 0 in shape:
            raise ValueError(
                f"received has shape {list(shape)}, it must be [n_runs, n_ranks, "
                "n_local_experts], all 1 or more; np.stack puts runs together"
            )
        n_runs, n_ranks, n_local_experts = shape
        if not is_integer(self.n_experts):
            raise ValueError(f"n_experts={self.n_experts!r} must be an integer")
        self.n_experts = int(self.n_experts)
        if not n_ranks <= self.n_experts <= n_ranks * n_local_experts:
            raise ValueError(
                f"n_experts={self.n_experts}, but received has {n_local_experts} on "
                f"each of {counted(n_ranks, 'rank')}"
            )
        if not 0 <= self.received.min() <= self.received.max() <= _MOST_ROWS:
            raise ValueError(
                f"received has numbers in [{self.received.min()}, "
                f"{self.received.max()}]; rows of an expert are in [0, {_MOST_ROWS}]"
            )
        for name in ("dispatch_ns", "combine_ns"):
            shape = getattr(self, name).shape
            if shape != (n_runs, n_ranks, n_ranks):
                raise ValueError(
                    f"{name} has shape {list(shape)}, and received "
                    f"[{n_runs}, {n_ranks}, {n_local_experts}]; of so many runs and "
                    f"ranks it must be [{n_runs}, {n_ranks}, {n_ranks}]"
                )

    def save(self, path: str | Path) -> None:
        """Writes a file that ``max-ep stats`` reads."""
        with open(path, "wb") as file:
            np.savez(file, **vars(self))

    @staticmethod
    def load(path: str | Path) -> Statistics:
        """Reads what :meth:`save` wrote. Raises a ``ValueError`` for other files."""
        names = [field.name for field in fields(Statistics)]
        return read_npz(path, Statistics, "max_ep.stats.Statistics.save", *names)

    def text(self) -> str:
        """Returns medians of the waits, and the histogram of received rows."""
        lines = []
        for name, ns in (("dispatch", self.dispatch_ns), ("combine", self.combine_ns)):
            lines += _table(name, ns) + [""]
        return "\n".join(lines + _histogram(self.rows_of_experts()))

    def rows_of_experts(self) -> np.ndarray:
        """Returns the rows of each expert in all runs, ``[n_experts]``."""
        return self.received.sum(axis=0).ravel()[: self.n_experts]

    def plot(self, path: str | Path) -> None:
        """Draws the same, with matplotlib."""
        figure = new_figure(12, 3.6)
        axes = figure.subplots(1, 3)
        ranks = range(self.received.shape[1])
        for axis, name in zip(axes, ("dispatch", "combine")):
            waits = _median_us(getattr(self, f"{name}_ns"))
            image = axis.imshow(waits, vmin=0)
            axis.set(title=f"{name}: median wait, us", xticks=ranks, yticks=ranks)
            axis.set(xlabel="for rank", ylabel="rank")
            figure.colorbar(image, ax=axis)
        rows = self.rows_of_experts()
        axes[2].bar(np.arange(len(rows)), rows, width=1)
        axes[2].set(title="rows received", xlabel="expert")
        figure.savefig(path)


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of matplotlib, which may be missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError(f"a plot needs matplotlib; {install.MATPLOTLIB}") from None
    return Figure(figsize=(width, height), layout="constrained")


def _median_us(ns: np.ndarray) -> np.ndarray:
    """Returns medians over runs in microseconds; NaN if each wait timed out."""
    medians = np.ma.median(np.ma.masked_less(ns, 0), axis=0) / 1e3
    return np.ma.filled(medians, np.nan)


def _table(name: str, ns: np.ndarray) -> list[str]:
    """Writes the medians, with as many ranks side by side as a line can have."""
    lines = [f"{name}: median wait in us of a rank (line) for a rank (column)"]
    cells = [[f"{us:.1f}" for us in waits] for waits in _median_us(ns)]
    width = 2 + max(len(cell) for waits in cells for cell in waits)
    n_columns = (_LINE - 8) // width
    for first in range(0, len(cells), n_columns):
        shown = range(len(cells))[first : first + n_columns]
        lines.append(" " * 8 + "".join(f"{rank:>{width}}" for rank in shown))
        for rank, waits in enumerate(cells):
            of_rank = "".join(f"{waits[src]:>{width}}" for src in shown)
            lines.append(f"{rank:>8}{of_rank}")
    if n_timed_out := int((ns < 0).sum()):
        lines.append(f"{n_timed_out} waits timed out and are not counted")
    return lines


def _histogram(rows: np.ndarray) -> list[str]:
    n_each, most = -(-len(rows) // _MOST_BARS), max(1, int(rows.max()))
    lines = [
        f"received: {counted(rows.sum(), 'row')}, {counted(len(rows), 'expert')}, the "
        f"fullest has {rows.max() / max(rows.mean(), 1e-9):.1f} times the mean"
    ]
    for first in range(0, len(rows), n_each):
        few = rows[first : first + n_each]
        last = first + len(few) - 1
        name = f"{first}" if last == first else f"{first}-{last}"
        # Several experts share a bar, which shows the fullest: a mean would hide it.
        bar = "#" * round(BAR * few.max() / most)
        lines.append(f"{name:>8}{few.max():>10} {bar}")
    return lines
