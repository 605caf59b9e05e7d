# SPDX-License-Identifier: Apache-2.0
"""Cells and tables in Markdown, and names in them, for ``bench.report``."""

from __future__ import annotations

from collections.abc import Iterable

SERVING_PEERS = {
    "max_ep": "max_ep",
    "max_expert_parallel": "MAX, expert parallel",
    "max_tensor_parallel": "MAX, tensor parallel",
    "transformers": "transformers, grouped_mm",
}
NUMBERS = {1: "One", 2: "Two", 4: "Four", 8: "Eight"}


def number(value: float | None) -> str:
    """Formats with three digits, or two after the point."""
    if value is None:
        return ""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def table(columns: list[str], rows: Iterable[list[str]], n_text: int = 1) -> list[str]:
    """Lays out Markdown; columns after the first ``n_text`` are numbers."""
    line = "|---" * n_text + "|---:" * (len(columns) - n_text) + "|"
    body = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(columns)} |", line, *body, ""]


def machine(gpu: str, n: int) -> str:
    """Names GPUs: ``Two H200s``."""
    return f"{NUMBERS[n]} {gpu.split()[1]}{'s' * (n > 1)}"
