# SPDX-License-Identifier: Apache-2.0
"""``max-ep stats``: prints and draws what ``max_ep.stats`` has saved."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

from ..stats import Statistics


def run_stats(options: argparse.Namespace) -> None:
    statistics = Statistics.load(options.file)
    print(statistics.text())
    draw(statistics.plot, options.plot)


def draw(plot: Callable[[str], None], picture: str | None) -> None:
    """Draws to the file that ``--plot`` names, if any."""
    if picture is None:
        return
    try:
        if not picture:  # matplotlib would call it ".png"
            raise ValueError("it names no file")
        if Path(picture).is_dir():  # it would write beside it
            raise ValueError("it is a folder; name a file")
        plot(picture)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"--plot {shlex.quote(picture)}: {error}") from error
    print(f"\n{picture}")
