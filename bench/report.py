# SPDX-License-Identifier: Apache-2.0
"""Makes docs/performance.md and its plots of docs/performance.json.

    python -m bench.report              # writes the page and the plots
    python -m bench.report --add FILE   # first takes the runs of FILE into the JSON

``bench.gpu_round_trip``, ``bench.cpu_round_trip`` and ``bench.serving`` write such
files, see ``bench/runs.py``.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from .cases import SHAPES, Shape
from .runs import ROOT, dump, load, merge

DATA = ROOT / "docs/performance.json"
PAGE = ROOT / "docs/performance.md"

PEERS = {
    "sums": "max_ep by_rank, sums",
    "rows": "max_ep by_rank, rows",
    "by_expert": "max_ep by_expert, rows",
    "sums_masks": "max_ep by_rank, sums, on_timeout mask",
    "rows_masks": "max_ep by_rank, rows, on_timeout mask",
    "sums_mxfp8": "max_ep by_rank, sums in MXFP8",
    "given": "max_ep by_rank, tokens quantized already",
    "packed": "max_ep by_rank, packed scales",
    "all_gather": "max_ep AllGatherTokenDispatcher",
    "max": "MAX EP",
    "max_layer": "MAX, no expert parallelism",
    "nccl": "NCCL through torch",
    "buffer": "max_ep Buffer, from torch",
}
FORMS = {
    "fused": "",
    "split": ", async + wait",
    "work": ", async + work + wait",
    "fused_work": ", work + fused",
    "dispatch": ", dispatch alone",
    "all_gather": ", all-gather + reduce-scatter",
    "all_to_all": ", all-to-all, one row a (token, rank)",
}
RIVALS = {
    **dict.fromkeys(("sums", "rows", "by_expert"), ("max", "max_layer")),
    "all_gather": ("nccl",),
}
"""Whose times are divided by whose, within a run and a form."""
SERVING_PEERS = {
    "max_ep": "max_ep",
    "max_expert_parallel": "MAX, expert parallel",
    "max_tensor_parallel": "MAX, tensor parallel",
    "transformers": "transformers, grouped_mm",
}
NUMBERS = {1: "One", 2: "Two", 4: "Four", 8: "Eight"}

INTRO = """\
# Performance

`python -m bench.report` makes this page from [performance.json](performance.json). \
What bounds each size, what was tried, and other systems are in \
[performance-notes.md](performance-notes.md).

Times are medians in µs of one layer: one dispatch and the combine of what the \
experts return, without matmul and router. "Captured" replays a graph, "eager" runs \
it op by op. A commit names the run; [runs](#runs) has its machine, date and command. \
p95 is in the JSON.
"""

METHOD = """\
## Method

- A chain of layers is one graph; a layer's result is the next layer's input. A chain \
has 64 layers up to 128 tokens a rank, 24 up to 1024 and 12 above. Time runs from all \
GPUs idle to all GPUs idle, divided by the layers. One process drives all GPUs.
- A captured sample is eight replays without a pause, or one replay where the run \
says so.
- Experts return their input; with FP8 dispatch each expert of a rank returns one \
given bfloat16 row. Combine is bfloat16.
- `max_tokens_per_rank` is 128, 512, 1024, 4096 or 8192: the least that holds the \
tokens.
- max_ep and MAX deliver rows sorted by expert and return weighted sums. NCCL does \
less: its all-gather neither filters, sorts nor weighs; its all-to-all does not sort \
and knows all message sizes in advance.
- Uniform routing draws a token's experts evenly. With Zipf routing expert `e` is \
`1 / (e + 1)` as likely as expert 0.
- Wire GB/s: bytes that cross a link, of the busiest rank in its busier direction, \
dispatch and combine together, over the time of a layer. Headers and flags are not \
counted.
- Before and after timing the results of the timed graph are compared bit for bit with \
exact arithmetic. What max_ep dispatches is compared with the oracle in tests/.
"""


# -------------------------------------------------------------------------- tables


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


def series(rows: list[dict]) -> dict[tuple[str, str, str], dict[int, dict]]:
    """Sorts rows by peer, form and run, and each by tokens."""
    found: dict[tuple[str, str, str], dict[int, dict]] = {}
    for row in rows:
        name = (row["peer"], row["form"], row["run"])
        found.setdefault(name, {})[row["tokens"]] = row
    order = list(PEERS), list(FORMS)
    return dict(
        sorted(found.items(), key=lambda s: [o.index(n) for o, n in zip(order, s[0])])
    )


def _group_lines(rows: list[dict], *, is_main: bool) -> list[list[str]]:
    sizes = sorted({row["tokens"] for row in rows})
    lines = []

    def add(name: str, run: str, values: Iterable[float | None], mode: str) -> None:
        cells = [number(value) for value in values]
        if any(cells):
            lines.append([name, mode, *cells, run])

    found = series(rows)
    for (peer, form, run), of_size in found.items():
        name = PEERS[peer] + FORMS[form]
        at = [of_size.get(n, {}) for n in sizes]
        add(name, run, [row.get("us") for row in at], "captured")
        if is_main and form == "fused":
            add(name, run, [row.get("eager_us") for row in at], "eager")
        if is_main and (peer, form) == ("sums", "fused") and rows[0]["ranks"] > 1:
            speeds = [r["wire_bytes"] / r["us"] / 1e3 if r else None for r in at]
            add(name, run, speeds, "wire GB/s")
        for rival in RIVALS.get(peer, ()) if form in ("fused", "all_gather") else ():
            theirs = found.get((rival, form, run), {})
            both = [(theirs.get(n), of_size.get(n)) for n in sizes]
            ratios = [f"{a['us'] / b['us']:.2f}" if a and b else "" for a, b in both]
            if any(ratios):
                lines.append([f"{PEERS[rival]} / {name}", "ratio", *ratios, run])
    return lines


def _gpu_sections(data: dict) -> list[str]:
    groups: dict[tuple, list[dict]] = {}
    for row in data["gpu"]:
        gpu = data["runs"][row["run"]]["gpu"]
        what = list(SHAPES).index(row["shape"]), row["routing"], row["dtype"]
        groups.setdefault((row["ranks"], gpu, *what), []).append(row)
    lines, last = [], None
    for (ranks, gpu, _, routing, dtype), rows in sorted(groups.items()):
        shape = rows[0]["shape"]
        if (gpu, ranks) != last:
            last = (gpu, ranks)
            lines += [f"## {machine(gpu, ranks)}", ""]
            if picture := plot_path(gpu, ranks, rows):
                lines += [f"![µs a layer by tokens a rank]({picture})", ""]
        lines += [
            f"### {_sizes(SHAPES[shape])}, {dtype} dispatch, {routing} routing",
            "",
        ]
        sizes = sorted({row["tokens"] for row in rows})
        columns = ["tokens a rank", "", *map(str, sizes), "commit"]
        lines += table(columns, _group_lines(rows, is_main=_is_main(rows[0])), 2)
    return lines


def _sizes(shape: Shape) -> str:
    experts = f"top-{shape.top_k} of {shape.n_experts} experts"
    return f"hidden {shape.hidden_size}, {experts} ({shape.model})"


def _is_main(row: dict) -> bool:
    what = row["shape"], row["dtype"], row["routing"]
    return what == ("h7168_e256_k8", "bfloat16", "uniform")


def machine(gpu: str, n: int) -> str:
    """Names GPUs: ``Two H200s``."""
    return f"{NUMBERS[n]} {gpu.split()[1]}{'s' * (n > 1)}"


def serving_tables(rows: list[dict]) -> list[str]:
    """Lays out rows of ``bench.serving``: prompts, then clients."""

    def name_of(row: dict) -> str:
        return SERVING_PEERS[row["peer"]] + ", FP8 checkpoint" * ("dtype" in row)

    def spread(row: dict, name: str) -> str:
        if name not in row:  # transformers is no server
            return ""
        low, median, high = row[name]
        return f"{median:.2f} ({low:.2f} to {high:.2f})"

    columns = ["server", "prompt, tokens", "cold, ms (quartiles)", "cached, ms"]
    columns += ["execution by the log, ms", "commit"]
    cells = [
        [name_of(row), str(row["prompt"])]
        + [spread(row, f"{name}_ms") for name in ("cold", "cached", "execution")]
        + [row["run"]]
        for row in rows
        if "prompt" in row
    ]
    of_prompts = table(columns, cells) if cells else []
    columns = ["server", "clients", "a step, ms (quartiles)", "first token, ms"]
    columns += ["between tokens, ms", "tokens/s", "commit"]
    cells = []
    for row in rows:
        if "clients" not in row:
            continue
        cells.append([name_of(row), str(row["clients"])])
        cells[-1].append(spread(row, "step_ms"))
        for name, n_digits in (("first_ms", 1), ("between_ms", 2)):
            theirs = row.get(f"foreign_{name}")
            foreign = f"; {theirs:.{n_digits}f}" if theirs else ""
            cells[-1].append(f"{row[name]:.{n_digits}f}{foreign}")
        cells[-1] += [f"{row['tokens_per_s']:.0f}", row["run"]]
    return [*of_prompts, *table(columns, cells)]


def _serving_sections(data: dict) -> list[str]:
    groups: dict[tuple, list[dict]] = {}
    for row in data["serving"]:
        run = data["runs"][row["run"]]
        key = run["gpu"], run["n_gpus"], run["layers"]
        groups.setdefault(key, []).append(row)
    lines = [
        "## Serving",
        "",
        "`max serve` of Qwen3-30B-A3B's sizes: hidden 2048, top-8 of 128 experts, "
        "random weights, bfloat16, decode through captured graphs. Each client sends "
        "some 130 tokens and takes 64. A step decodes one token for all clients. On "
        "several GPUs max_ep spreads experts and replicates attention. MAX's servers "
        "have max_ep's matmuls, without which they do not compile on Hopper. Greedy "
        "tokens of each server are compared with those of transformers. After a "
        "semicolon: what `max benchmark` measures.",
        "",
    ]
    for (gpu, n, n_layers), rows in groups.items():
        lines += [f"### {machine(gpu, n)}, {n_layers} layers", ""]
        lines += serving_tables(rows)
    return lines


def cpu_table(rows: list[dict]) -> list[str]:
    """Lays out rows of ``bench.cpu_round_trip``."""
    names = {"by_expert": "by_expert", "by_rank": "by_rank"}
    names |= {"memcpy_1": "memcpy, 1 thread", "memcpy_all": "memcpy, all cores"}
    columns = ["tokens a rank", "dispatch", "MB", *names.values(), "commit"]
    cells = [
        [str(row["tokens"]), row["wire"], f"{row['mb']:.1f}"]
        + [f"{row[f'{n}_ms']:.2f} ({row[f'{n}_p95_ms']:.2f})" for n in names]
        + [row["run"]]
        for row in rows
    ]
    return table(columns, cells, 2)


def _cpu_section(data: dict) -> list[str]:
    return [
        "## CPU",
        "",
        "ms of a round trip of four ranks in one process, median (p95): hidden 2048, "
        "top-8 of 64 experts, uniform routing, all columns sampled in turn. MB: one "
        "row for each choice, there and back. memcpy copies as many bytes.",
        "",
        *cpu_table(data["cpu"]),
    ]


def _runs_section(data: dict) -> list[str]:
    lines = [
        "## Runs",
        "",
        "Check out the commit to repeat a run. In commands up to a7c011e, "
        "`ours_reduced` is by_rank with sums, `ours_by_rank` is by_rank with rows, and "
        "`ours` is by_expert.",
        "",
    ]
    for name, run in data["runs"].items():
        where = run.get("cpu") or f"{run['n_gpus']} x {run['gpu']}, driver "
        where += "" if "cpu" in run else run["driver"]
        samples = f", {run['samples']} samples" if "samples" in run else ""
        replays = (
            f", {run['replays']} replays in each" if run.get("replays", 1) > 1 else ""
        )
        note = f" {run['note']}" if "note" in run else ""
        about = f"{where}, MAX {run['max']}, {run['date']}{samples}{replays}."
        lines.append(f"- **{name}**: {about}{note} `{run['command']}`")
    return [*lines, ""]


def page(data: dict) -> str:
    """Makes the page of runs and rows."""
    lines = [INTRO, *_gpu_sections(data), *_serving_sections(data)]
    lines += [*_cpu_section(data), METHOD, *_runs_section(data)]
    return "\n".join(lines).rstrip("\n") + "\n"


# --------------------------------------------------------------------------- plots

# At most five lines a plot.
PLOTTED = {
    ("sums", "fused"): "C0-o",
    ("rows", "fused"): "C1-o",
    ("by_expert", "fused"): "C2-o",
    ("max", "fused"): "C3--s",
    ("nccl", "all_gather"): "C4:^",
}


def plot_path(gpu: str, ranks: int, rows: list[dict]) -> str:
    """Names the plot of a machine; none where there are less than three sizes."""
    has_peers = {row["peer"] for row in rows} >= {"sums", "max"}
    if ranks == 1 or not has_peers or not _is_main(rows[0]):
        return ""
    return f"images/{machine(gpu, ranks).lower().replace(' ', '_')}.png"


def plots(data: dict) -> list[Path]:
    """Draws captured times over tokens, one picture a machine; log axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[tuple[str, int], list[dict]] = {}
    for row in filter(_is_main, data["gpu"]):
        gpu = data["runs"][row["run"]]["gpu"]
        groups.setdefault((gpu, row["ranks"]), []).append(row)
    written = []
    for (gpu, ranks), rows in groups.items():
        if not (name := plot_path(gpu, ranks, rows)):
            continue
        figure, axis = pyplot.subplots(figsize=(6.4, 4))
        for (peer, form), style in PLOTTED.items():
            points = {
                row["tokens"]: row["us"]
                for row in reversed(rows)
                if (row["peer"], row["form"]) == (peer, form)
            }
            if points:
                sizes = sorted(points)
                label = PEERS[peer].removeprefix("max_ep ")
                axis.plot(sizes, [points[n] for n in sizes], style, label=label)
        axis.set(xscale="log", yscale="log", title=machine(gpu, ranks) + ", bfloat16")
        axis.set(xlabel="tokens a rank", ylabel="µs, dispatch + combine, captured")
        sizes = sorted({row["tokens"] for row in rows})
        axis.set_xticks(sizes, labels=map(str, sizes), minor=False)
        axis.set_xticks([], minor=True)
        axis.set_yticks([10, 30, 100, 300, 1000], ["10", "30", "100", "300", "1000"])
        axis.set_yticks([], minor=True)
        axis.grid(visible=True, alpha=0.3)
        axis.legend()
        figure.tight_layout()
        path = PAGE.parent / name
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=100, metadata={"Software": None})
        pyplot.close(figure)
        written.append(path)
    return written


def main() -> None:
    """Writes the page and the plots."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--add", nargs="+", type=Path, default=[])
    options = parser.parse_args()
    data = load(DATA)
    for path in options.add:
        data = merge(data, load(path))
    DATA.write_text(dump(data))
    PAGE.write_text(page(data))
    for path in (DATA, PAGE, *plots(data)):
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
