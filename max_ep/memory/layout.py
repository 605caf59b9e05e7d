# SPDX-License-Identifier: Apache-2.0
"""Asks Mojo for sizes; the formulas are in ``layout.mojo`` only.

``layout_query.mojo`` runs once for each configuration. The answers are kept beside the
precompiled package, under the hash of the sources.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace

from ..cache import cache_dir, kept
from ..extension import run_mojo, sources_hash


@functools.cache
def region_sizes(*question: str | int) -> SimpleNamespace:
    """Returns the sizes that ``layout_query.mojo`` prints, by the names that it gives
    them; ``EPConfig.sizes`` asks."""
    words = [str(word) for word in question]

    def ask(path: Path) -> None:
        path.write_text(run_mojo("run", "-I", ".", "layout_query.mojo", *words))

    answer = kept(cache_dir() / sources_hash() / f"layout-{'-'.join(words)}.txt", ask)
    lines = (line.split() for line in answer.read_text().splitlines())
    return SimpleNamespace(**{name: int(value) for name, value in lines})
