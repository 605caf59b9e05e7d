# SPDX-License-Identifier: Apache-2.0
"""Numbers of things in texts for users."""

from typing import SupportsInt


def counted(n: SupportsInt, noun: str) -> str:
    """Returns ``1 rank``, or ``2 ranks``."""
    adds_es = noun.endswith(("s", "ch"))  # processes, launches
    return f"{n} {noun}" if n == 1 else f"{n} {noun}{'es' if adds_es else 's'}"
