# SPDX-License-Identifier: Apache-2.0
"""Shows what the GPU benchmark measured: table, plot and Markdown.

Rows are those of ``bench.gpu_rows``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .gpu_rows import CASE_KEYS, save_json
from .gpu_shapes import OURS, SHAPES

PEER_NAMES = {
    "ours": "max_ep expert_slots",
    "ours_by_rank": "max_ep rank_slots",
    "ours_reduced": "max_ep reduced",
    "ours_all_gather": "max_ep AllGatherTokenDispatcher",
    "max": "MAX",
    "nccl": "NCCL",
}

METHOD = """\
- One layer is a dispatch and the combine of what the experts return; a chain of
  L layers is one graph, and a layer's sums are the next layer's tokens. L is 64
  up to 128 tokens a rank, 24 up to 512, 12 above; with a router 16 at most. Time
  is wall time from all GPUs idle to all GPUs idle, over the layers in between;
  one process drives all GPUs (NCCL: from the first process's begin to the last one's
  end). Launching the chain and noticing its end are in it.
- `captured` replays the chain as device graphs, several times without a pause, and
  divides by all of these layers; `eager` runs it op by op, once. The host launches
  a graph later on one GPU than on the other, now and then; in one replay that is
  some microseconds a layer, which no layer takes (where_time_goes.md).
- `rank_slots` sends a token once to each rank and takes the rows back one by
  one; `reduced` gives the router weights to dispatch and takes one bfloat16
  partial sum a (token, rank) back.
- `gather` sends a token to all ranks, and takes rows or partial sums back as the
  other two. Form `routed` has a router in front of each dispatch: a matmul with
  `[hidden, experts]` bfloat16, a softmax and a top-k; its experts enter dispatch
  times zero, plus the given ones. `early` is the same with `ep_send_tokens` in
  front of the router, `router` the same without dispatch and combine.
- `AllGatherTokenDispatcher` gathers tokens, the routing map and probabilities on
  every rank and adds up what the ranks return. Every layer's results are kept.
- Experts are the identity; for FP8 dispatch every expert of a rank returns one
  given bfloat16 row. Combine is bfloat16. No matmul, no router.
- `max_tokens_per_rank` is a compile-time size: 128, 512 or 4096, the least that
  holds the tokens.
- Form `split` is async and wait, with nothing between; `watched` has `ep_watch`
  between, a kernel that waits until all has come, so that the halves do not overlap.
- Form `dispatch` is a chain of dispatches alone; `combine` is the period of
  `fused` less it. `kernels` are durations on the device from CUPTI, in a run of
  its own, waiting for peers included and launch gaps not.
- NCCL does less: `all_gather` neither filters, sorts nor weighs; `all_to_all`
  sends one row a (token, rank), does not sort by expert, and knows all message
  sizes beforehand. FP8 tokens are given to it quantized.
- Wire bytes: rows that cross a link, of the busiest rank in its busier
  direction, dispatch and combine together, by the peer's own scheme (`slots`:
  one row a remote (token, choice); `dedup`: one a (token, remote rank);
  `gather`: all to all; `dedup+slots`: there and back). Logical bytes: one row a
  (token, choice), local ones
  too, mean over the ranks. Headers and flags are not counted.
- Before and after timing a chain of two layers of the same ops runs eagerly on other
  inputs, and its first layer is compared with the oracle: max_ep in order and bit
  for bit, MAX as the set of tokens of each expert. The timed chain's own result, its
  last layer's sums, is compared too: it is exact in any order of summation. A chain
  that also returned its rows would be timed with them (where_time_goes.md).
"""


# --------------------------------------------------------------------------- text


def _groups(rows: list[dict]) -> dict[tuple, list[dict]]:
    """Sorts rows into tables: ranks, shape, dtype, routing."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        key = tuple(row[k] for k in CASE_KEYS[:-1])
        groups.setdefault(key, []).append(row)
    return groups


def _series(rows: Iterable[dict]) -> dict[tuple[str, str], dict[int, dict]]:
    series: dict[tuple[str, str], dict[int, dict]] = {}
    for row in rows:
        series.setdefault((row["peer"], row["form"]), {})[row["n_tokens"]] = row
    return series


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return (
        f"{value:.2f}"
        if value < 10
        else f"{value:.1f}"
        if value < 100
        else (f"{value:.0f}")
    )


def _cell(row: dict | None, mode: str = "captured") -> str:
    if row is None:
        return ""
    if f"{mode}_us" not in row:
        return "failed" if row["error"] else ""
    return f"{_number(row[f'{mode}_us'])} ({_number(row[f'{mode}_p95_us'])})"


def best(rows: Iterable[dict], peer: str, n_tokens: int) -> float | None:
    """Returns a peer's least captured round trip in microseconds."""
    times = [
        row["captured_us"]
        for row in rows
        if row["peer"] == peer
        and row["n_tokens"] == n_tokens
        and row["form"] != "dispatch"
        and "captured_us" in row
    ]
    return min(times) if times else None


def tables(rows: list[dict]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Lays out the periods: title, columns and lines of each table."""
    made = []
    for (n_ranks, shape, dtype, routing), group in _groups(rows).items():
        sizes = sorted({row["n_tokens"] for row in group})
        uneven = {row["n_tokens"]: row for row in group}
        title = (
            f"{n_ranks} rank{'s' * (n_ranks > 1)}, {shape} "
            f"({SHAPES[shape].model}), {dtype} dispatch, {routing}"
        )
        lines = []
        for (peer, form), of_size in _series(group).items():
            name = f"{PEER_NAMES[peer]} {form}"
            for mode in ("captured", "eager"):
                cells = [_cell(of_size.get(n), mode) for n in sizes]
                if any(cells):
                    lines.append([name, mode, *cells])
            phases = [of_size.get(n, {}) for n in sizes]
            for phase in ("dispatch", "combine"):
                for prefix, what in (("", "phase"), ("kernel_", "kernels")):
                    cells = [_number(r.get(f"{prefix}{phase}_us")) for r in phases]
                    if any(cells):
                        lines.append([f"{name}: {phase}", what, *cells])
            for field, what in (("wire_gbps", "wire"), ("logical_gbps", "logical")):
                cells = [_number(r.get(field)) for r in phases]
                if any(cells):
                    lines.append([name, f"{what} GB/s", *cells])
        for peer in ("max", "nccl"):
            for ours in OURS:
                pairs = [(best(group, ours, n), best(group, peer, n)) for n in sizes]
                if any(a and b for a, b in pairs):
                    cells = [f"{b / a:.2f}x" if a and b else "" for a, b in pairs]
                    name = f"{PEER_NAMES[peer]} / {PEER_NAMES[ours]}"
                    lines.append([name, "best captured", *cells])
        lines.append(
            [
                "imbalance",
                "ranks, experts",
                *(
                    f"{uneven[n]['imbalance_ranks']:.2f}, "
                    f"{uneven[n]['imbalance_experts']:.1f}"
                    for n in sizes
                ),
            ]
        )
        columns = ["peer, form", "us a layer", *(f"{n} tokens" for n in sizes)]
        made.append((title, columns, lines))
    return made


def describe_links(links: dict) -> str:
    """Says in one line what the links were measured to do."""
    names = {
        "one_way": "one GPU to another",
        "all_to_all": "all to all, out of each GPU",
        "local": "within a GPU (read + written)",
    }
    return "; ".join(
        f"{names[key]} {links[key]:.0f} GB/s" for key in names if key in links
    )


def show(rows: list[dict]) -> None:
    """Prints the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=160)
    for title, columns, lines in tables(rows):
        table = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i < 2 else "right")
        for line in lines:
            table.add_row(*line)
        console.print(table)


def save(folder: Path, about: dict, rows: list[dict], links: dict) -> list[Path]:
    """Writes ``gpu_round_trip.md``, ``.json`` and, if it can, ``.png``.

    Returns:
        The paths written.
    """
    written = [save_json(folder, about, rows, links)]
    picture = written[0].with_suffix(".png")
    has_picture = plot(picture, about, rows)
    if has_picture:
        written.append(picture)
    path = picture.with_suffix(".md")
    path.write_text(_markdown(about, rows, links, picture.name if has_picture else ""))
    return [path, *written]


def _markdown(about: dict, rows: list[dict], links: dict, picture: str) -> str:
    lines = [
        "# Round trip on GPUs",
        "",
        f"`{about['command']}` · max_ep {about['commit']} · {about['n_gpus']} x "
        f"{about['gpu']} · driver {about['driver']} · MAX {about['max']} · torch "
        f"{about['torch']} · {about['date']} · {about['samples']} samples, "
        f"{about['replays']} replays in each",
        "",
        "Microseconds of one dispatch and combine: median, p95 in brackets.",
        "",
        METHOD,
    ]
    if links:
        lines += [f"Peer copies measured in the same run: {describe_links(links)}.", ""]
    if picture:
        lines += [f"![Round trip by tokens]({picture})", ""]
    for title, columns, body in tables(rows):
        lines += [
            f"## {title}",
            "",
            f"| {' | '.join(columns)} |",
            f"|---|---|{'---:|' * (len(columns) - 2)}",
            *(f"| {' | '.join(line)} |" for line in body),
            "",
        ]
    failed = [row for row in rows if row["error"]]
    if failed:
        lines += ["## Not measured", ""]
        for row in failed:
            case = ", ".join(str(row[k]) for k in CASE_KEYS)
            said = " ".join(row["error"].split())[:300]
            lines.append(f"- {PEER_NAMES[row['peer']]} {row['form']} ({case}): {said}")
        lines.append("")
    return "\n".join(lines)


def plot(path: Path, about: dict, rows: list[dict]) -> bool:
    """Draws captured periods over tokens; returns whether it could."""
    groups = _groups(
        [r for r in rows if "captured_us" in r and r["form"] != "dispatch"]
    )
    if not groups:
        return False
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed")
        return False
    n_columns = min(2, len(groups))
    n_lines = -(-len(groups) // n_columns)
    figure, axes = pyplot.subplots(
        n_lines, n_columns, figsize=(7 * n_columns, 4.5 * n_lines), squeeze=False
    )
    styles = {"max": "--s", "nccl": ":^"}
    for axis in axes.flat[len(groups) :]:
        axis.axis("off")
    for axis, (key, group) in zip(axes.flat, groups.items()):
        for (peer, form), of_size in _series(group).items():
            sizes = sorted(of_size)
            axis.plot(
                sizes,
                [of_size[n]["captured_us"] for n in sizes],
                styles.get(peer, "-o"),
                label=f"{PEER_NAMES[peer]} {form}",
            )
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="tokens a rank",
            ylabel="us a round trip",
            title=f"{key[0]} ranks, {key[1]}, {key[2]}, {key[3]}",
        )
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(f"{about['n_gpus']} x {about['gpu']} · max_ep {about['commit']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
