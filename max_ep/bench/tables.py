# SPDX-License-Identifier: Apache-2.0
"""Cells and tables in Markdown, and names in them, for ``bench.report``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

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


def draw(series: dict[str, dict[int, float]], title: str, path: Path) -> Path:
    """Draws µs a layer over tokens, a line for each system; log axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7.5, 4.5))
    for name, points in series.items():
        if points:
            style = "-o" if name.startswith("max_ep") else "--s"
            axis.plot(
                sorted(points), [points[n] for n in sorted(points)], style, label=name
            )
    axis.set(xscale="log", yscale="log", title=title)
    axis.set(xlabel="tokens per rank", ylabel="µs, dispatch + combine")
    axis.grid(visible=True, alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
    return path
