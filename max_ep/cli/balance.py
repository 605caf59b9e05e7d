# SPDX-License-Identifier: Apache-2.0
"""The command ``max-ep balance``: plans a placement, and shows what it would change."""

from __future__ import annotations

import argparse
import os
import shlex
import textwrap
from collections.abc import Sequence
from functools import partial

import numpy as np

from ..balance import Placement, default_replicas, plan, unbalanced
from ..plural import counted
from ..stats import BAR, Statistics, new_figure
from .plan import in_options
from .stats import draw

_OPTIONS = {"n_replicas": "--replicas", "top_k": "--top-k", "n_hosts": "--hosts"}
_OPTIONS["max_replicas"] = "--max-replicas"
"""Arguments of ``plan``, as the command line calls them."""


def run_balance(options: argparse.Namespace) -> None:
    measured = map(os.path.abspath, options.files)
    if options.out is not None and os.path.abspath(options.out) in measured:
        raise ValueError(
            f"--out {shlex.quote(options.out)} is one of the measurements; name another"
        )
    counts, n_ranks = _counts_of(options.files)
    n_layers, n_experts = counts.shape
    if options.current is not None:
        before = Placement.load(options.current)
        if (*before.phy2log.shape, before.n_ranks) != (*counts.shape, n_ranks):
            raise ValueError(
                f"{options.current} is for {counted(len(before.phy2log), 'layer')}, "
                f"{counted(before.phy2log.shape[1], 'expert')} and "
                f"{counted(before.n_ranks, 'rank')}, the statistics for {n_layers}, "
                f"{n_experts} and {n_ranks}; if they were measured without replicas, "
                "omit --current"
            )
        n_replicas = n_experts - before.n_logical
        counts = before.logical_counts(counts)
    else:
        before = unbalanced(n_layers, n_experts, n_ranks)
        n_replicas = options.replicas
    try:
        if n_replicas is None:
            n_replicas = default_replicas(n_experts, n_ranks, options.max_replicas)
        after = plan(
            counts,
            n_ranks,
            n_replicas,
            top_k=options.top_k,
            n_hosts=options.hosts,
            max_replicas=options.max_replicas,
            old=None if options.current is None else before,
        )
    except ValueError as error:
        raise ValueError(in_options(str(error), _OPTIONS)) from None
    print(text(counts, before, after))
    if options.out is not None:
        try:
            after.save(options.out)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(
                f"--out {shlex.quote(options.out)} cannot be written: {reason}"
            ) from error
        print(f"\n{options.out}")
    draw(partial(plot, counts, before, after), options.plot)


def _counts_of(files: Sequence[str]) -> tuple[np.ndarray, int]:
    """Reads rows of experts, ``[n_layers, n_experts]``, and the number of ranks."""
    layers = [Statistics.load(file) for file in files]
    sizes = {(layer.n_experts, layer.received.shape[1]) for layer in layers}
    if len(sizes) > 1:
        raise ValueError(f"the files differ in (experts, ranks): {sorted(sizes)}")
    return np.stack([x.rows_of_experts() for x in layers]), sizes.pop()[1]


def text(counts: np.ndarray, before: Placement, after: Placement) -> str:
    """Returns both placements' imbalance, and of the worst layer rows and replicas."""
    n_physical, logcnt = after.phy2log.shape[1], after.logcnt
    pairs = np.stack([before.imbalance(counts), after.imbalance(counts)], 1)
    lines = [
        f"{counted(after.n_logical, 'expert')} on {counted(after.n_ranks, 'rank')}, "
        f"{counted(n_physical - after.n_logical, 'replica')} more: {after.n_local} a "
        f"rank, at most {logcnt.max()} of one",
        "",
        "predicted rows of the busiest rank, times the mean",
        f"{'layer':>8}{'before':>10}{'after':>10}",
    ]
    lines += [f"{i:>8}{x:>10.2f}{y:>10.2f}" for i, (x, y) in enumerate(pairs)]
    if before.phy2log.shape == after.phy2log.shape:
        lines[3] += f"{'experts to move':>18}"
        n_moved = (before.phy2log != after.phy2log).sum(1)
        lines[4:] = [f"{line}{n:>18}" for line, n in zip(lines[4:], n_moved)]
    worst = int(pairs[:, 0].argmax())
    rows = np.stack([p.rank_loads(counts)[worst] for p in (before, after)], 1)
    lines += ["", f"layer {worst}", f"{'rank':>8}{'before':>10}{'after':>10}"]
    for rank, (was, will_be) in enumerate(rows):
        bar = "#" * round(BAR * will_be / max(1, rows.max()))
        lines.append(f"{rank:>8}{was:>10.0f}{will_be:>10.0f} {bar}")
    most = np.argsort(-logcnt[worst], kind="stable")[: (logcnt[worst] > 1).sum()]
    named = ", ".join(f"{e} ({logcnt[worst, e]})" for e in most) or "none"
    about = f"experts with replicas (how many): {named}"
    return "\n".join([*lines, *textwrap.wrap(about, 80)])


def plot(counts: np.ndarray, before: Placement, after: Placement, path: str) -> None:
    """Draws the imbalance of each layer, and the rows of each rank of the worst."""
    figure = new_figure(9, 3.6)
    axes = figure.subplots(1, 2)
    worst = int(before.imbalance(counts).argmax())
    for i, (name, placement) in enumerate((("before", before), ("after", after))):
        values = placement.imbalance(counts), placement.rank_loads(counts)[worst]
        for axis, of_axis in zip(axes, values):
            places = np.arange(len(of_axis)) + 0.4 * i
            axis.bar(places, of_axis, width=0.4, label=name)
    axes[0].set(title="busiest rank, times the mean", xlabel="layer")
    axes[1].set(title=f"rows of each rank, layer {worst}", xlabel="rank")
    axes[0].legend()
    figure.savefig(path)
