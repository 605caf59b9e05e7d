# SPDX-License-Identifier: Apache-2.0
"""Makes tables and plots of docs/performance.json: docs/performance.md has what users
ask first, docs/serving.md ratios of servers, docs/measurements.md every row.

    python -m bench.report              # writes the tables and the plots
    python -m bench.report --add FILE   # first takes the runs of FILE into the JSON

``bench.gpu_round_trip`` and ``bench.serving`` write such files, see
``max_ep/bench/runs.py``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from max_ep.bench.cases import DTYPES, SHAPES
from max_ep.bench.runs import ROOT, dump, load, merge
from max_ep.bench.tables import SERVING_PEERS, machine, number, table

from . import summary

DATA = ROOT / "docs/performance.json"
PAGE = ROOT / "docs/measurements.md"
SUMMARY = ROOT / "docs/performance.md"
SERVING = ROOT / "docs/serving.md"

PEERS = {
    "sums": "max_ep by_rank, sums",
    "rows": "max_ep by_rank, rows",
    "by_expert": "max_ep by_expert, rows",
    "sums_masks": "max_ep by_rank, sums, on_timeout mask",
    "rows_masks": "max_ep by_rank, rows, on_timeout mask",
    "sums_mxfp8": "max_ep by_rank, MXFP8 sums",
    "given": "max_ep by_rank, quantized tokens given",
    "packed": "max_ep by_rank, packed scales",
    "all_gather": "max_ep AllGatherTokenDispatcher",
    "max": "MAX EP",
    "max_layer": "MAX, no expert parallelism",
    "nccl": "NCCL through torch",
    "buffer": "max_ep Buffer with rows, from torch",
    "buffer_sums": "max_ep Buffer, from torch",
    "elastic": "max_ep ElasticBuffer, from torch",
    "deepep_v1": "DeepEP V1, low latency",
    "deepep_v2": "DeepEP V2",
    "trtllm": "TensorRT-LLM, one-sided",
    "nccl_ep": "NCCL EP, low latency",
    "experts": "max_ep",
    "grouped_mm": "torch._grouped_mm",
}
FORMS = {
    "fused": "",
    "split": ", async + wait",
    "work": ", async + work + wait",
    "fused_work": ", work + fused",
    "dispatch": ", dispatch alone",
    "plain": ", plain rows",
    "expanded": ", expanded rows",
    "all_gather": ", all-gather + reduce-scatter",
    "all_to_all": ", all-to-all",
    "gathered": ", a layer that gathers",
    "dispatched": ", a layer that dispatches",
    "products": ", both products",
    "gathered_products": ", both products, rows gathered",
}
RIVALS = {
    **dict.fromkeys(("sums", "rows", "by_expert"), ("max", "max_layer")),
    "all_gather": ("nccl",),
    "experts": ("grouped_mm",),
}
"""Peers whose times are divided by those of each peer, within a run and a form."""


# -------------------------------------------------------------------------- tables


def series(rows: list[dict]) -> dict[tuple[str, str, str], dict[int, dict]]:
    """Sorts rows by format, peer and form, and each by tokens."""
    found: dict[tuple[str, str, str], dict[int, dict]] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        name = (row["dtype"], row["peer"], row["form"])
        found.setdefault(name, {})[row["tokens"]] = row
    order = list(DTYPES), list(PEERS), list(FORMS)
    return dict(
        sorted(found.items(), key=lambda s: [o.index(n) for o, n in zip(order, s[0])])
    )


def _line(head: list[str], at: list[dict], cells: list[str]) -> list[list[str]]:
    """Returns a line of cells, and names the runs that they are of; none if empty."""
    tokens: dict[str, list[str]] = {}
    for row, cell in zip(at, cells):
        if cell:
            tokens.setdefault(row["run"], []).append(str(row["tokens"]))
    runs = "; ".join(f"{', '.join(sizes)}: {run}" for run, sizes in tokens.items())
    if len(tokens) == 1:
        (runs,) = tokens
    return [[*head, *cells, runs]] if tokens else []


def _group_lines(rows: list[dict]) -> list[list[str]]:
    sizes = sorted({row["tokens"] for row in rows})
    found, lines = series(rows), []
    for (dtype, peer, form), of_size in found.items():
        name = PEERS[peer] + FORMS[form]
        before = [] if dtype == "bfloat16" else [dtype]
        at = [of_size.get(n, {}) for n in sizes]
        values = {"captured": [row.get("us") for row in at]}
        if _is_main(rows[0]):
            values["from idle"] = [row.get("idle_us") for row in at]
        if _is_main(rows[0]) and form == "fused":
            values["eager"] = [row.get("eager_us") for row in at]
        if _is_main(rows[0]) and (peer, form) == ("sums", "fused"):
            if rows[0]["ranks"] > 1:
                speeds = [r["wire_bytes"] / r["us"] / 1e3 if r else None for r in at]
                values["wire GB/s"] = speeds
        for mode, of_mode in values.items():
            lines += _line([*before, name, mode], at, [*map(number, of_mode)])
        has_rivals = form in ("fused", "all_gather", "products")
        for rival in RIVALS.get(peer, ()) if has_rivals else ():
            theirs = found.get((dtype, rival, form), {})
            both = [(theirs.get(n), of_size.get(n)) for n in sizes]
            ratios = [
                f"{a['us'] / b['us']:.2f}" if a and b and a["run"] == b["run"] else ""
                for a, b in both
            ]
            head = [*before, f"{PEERS[rival]} / {name}", "ratio"]
            lines += _line(head, at, ratios)
    return lines


def _gpu_sections(data: dict) -> list[str]:
    groups: dict[tuple, list[dict]] = {}
    for row in data["gpu"]:
        gpu = data["runs"][row["run"]]["gpu"]
        what = list(SHAPES).index(row["shape"]), row["routing"]
        key = row["ranks"], gpu, *what, row["dtype"] != "bfloat16"
        groups.setdefault(key, []).append(row)
    lines, last = [], None
    for (ranks, gpu, _, routing, is_other), rows in sorted(groups.items()):
        if (gpu, ranks) != last:
            last = (gpu, ranks)
            lines += [f"## {machine(gpu, ranks)}", ""]
            if picture := plot_path(gpu, ranks, rows):
                lines += [f"![µs per layer by tokens per rank]({picture})", ""]
        sizes = sorted({row["tokens"] for row in rows})
        formats = "other formats" if is_other else "bfloat16"
        model = SHAPES[rows[0]["shape"]].model
        lines += [f"### {model}, {formats}, {routing} routing", ""]
        columns = ["tokens per rank", "", *map(str, sizes), "commit"]
        columns = [*["dispatch"] * is_other, *columns]
        lines += table(columns, _group_lines(rows), 2 + is_other)
    return lines


EXPERTS = """\
µs of a layer of experts behind its router, captured: top-{top_k} of {n_experts} \
random experts, hidden {hidden_size}, `moe_dim` {moe_dim} ({model}), bfloat16.

- A chain of layers is one graph. All have the same weights, and each has its own \
choices, so weights come from memory.
- A layer that gathers sorts choices, gathers rows in the first product, and adds up \
weighted rows: so one GPU serves. A layer that dispatches has dispatch, the same \
products, and combine of sums.
- Both products alone have SwiGLU between them, which takes two more kernels in torch.
- Some rows of a layer are compared with float64. A chain is compared with its layers \
run one by one, and layers that gather with those that dispatch, bit for bit.
"""


def experts_sections(data: dict) -> list[str]:
    """Lays out rows of layers of experts; nothing if there are none."""
    of_gpu: dict[str, list[dict]] = {}
    for row in data["experts"]:
        of_gpu.setdefault(data["runs"][row["run"]]["gpu"], []).append(row)
    lines: list[str] = []
    for gpu, rows in sorted(of_gpu.items()):
        about = EXPERTS.format(**vars(SHAPES[rows[0]["shape"]]))
        lines = lines or ["## Experts", "", about]
        sizes = sorted({row["tokens"] for row in rows})
        columns = ["tokens", "", *map(str, sizes), "commit"]
        lines += [f"### {machine(gpu, 1)}, experts", ""]
        lines += table(columns, _group_lines(rows), 2)
    return lines


def _shapes(data: dict) -> list[str]:
    """Lays out the sizes of the models."""
    used = {row["shape"] for row in data["gpu"]}
    shapes = [shape for name, shape in SHAPES.items() if name in used]
    return table(
        ["sizes of", "hidden", "experts"],
        [
            [s.model, str(s.hidden_size), f"top-{s.top_k} of {s.n_experts}"]
            for s in shapes
        ],
    )


def _is_main(row: dict) -> bool:
    what = row["shape"], row["dtype"], row["routing"]
    return what == ("h7168_e256_k8", "bfloat16", "uniform")


def serving_tables(rows: list[dict]) -> list[str]:
    """Lays out rows of ``bench.serving``: prompts, then clients."""

    def name_of(row: dict) -> str:
        return SERVING_PEERS[row["peer"]] + ", FP8 checkpoint" * ("dtype" in row)

    def spread(row: dict, name: str) -> str:
        if name not in row:  # transformers is no server, a CPU replays no graph
            return ""
        low, median, high = row[name]
        return f"{median:.2f} ({low:.2f} to {high:.2f})"

    columns = ["server", "prompt, tokens", "cold, ms (quartiles)", "cached, ms"]
    columns += ["the model alone, ms", "commit"]
    cells = [
        [name_of(row), str(row["prompt"])]
        + [spread(row, f"{name}_ms") for name in ("cold", "cached", "execution")]
        + [row["run"]]
        for row in rows
        if "prompt" in row
    ]
    of_prompts = table(columns, cells) if cells else []
    columns = ["server", "clients", "a step, ms (quartiles)", "GPU time of a step, ms"]
    columns += ["first token, ms", "between tokens, ms", "tokens/s", "commit"]
    cells = []
    for row in rows:
        if "clients" not in row:
            continue
        cells.append([name_of(row), str(row["clients"])])
        cells[-1] += [spread(row, "step_ms"), number(row.get("graph_ms"))]
        for name, n_digits in (("first_ms", 1), ("between_ms", 2)):
            cells[-1].append(f"{row[name]:.{n_digits}f}")
        cells[-1] += [f"{row['tokens_per_s']:.0f}", row["run"]]
    return [*of_prompts, *table(columns, cells)]


def _serving_sections(data: dict) -> list[str]:
    groups: dict[tuple, list[dict]] = {}
    for row in data["serving"]:
        run = data["runs"][row["run"]]
        key = run["gpu"], run["n_gpus"], run["layers"]
        groups.setdefault(key, []).append(row)
    lines = []
    for (gpu, n, n_layers), rows in groups.items():
        lines += [f"### {machine(gpu, n)}, {n_layers} layers", ""]
        lines += serving_tables(rows)
        for name in dict.fromkeys(row["run"] for row in rows):
            lines += _cores_of(name, data["runs"][name])
    return lines


def _cores_of(name: str, run: dict) -> list[str]:
    """Says on which cores the servers of a run were, in turn."""
    if "host" not in run:
        return []
    how = (
        f"{run['cores']} cores for each server, swapped each round, and for the clients"
    )
    if not run["cores"]:
        how = "servers and clients shared its cores"
    return [f"{name}: {run['host']}; {how}.", ""]


def _runs(data: dict) -> list[str]:
    lines = []
    for name, run in data["runs"].items():
        where = f"{run['n_gpus']} x {run['gpu']}, driver {run['driver']}"
        samples = f", {run['samples']} samples" if "samples" in run else ""
        replays = (
            f", {run['replays']} replays in each" if run.get("replays", 1) > 1 else ""
        )
        replays += f", chains of {run['chain']} layers" if "chain" in run else ""
        note = f" {run['note']}" if "note" in run else ""
        about = f"{where}, MAX {run['max']}, {run['date']}{samples}{replays}."
        lines.append(f"- **{name}**: {about}{note} `{run['command']}`")
    return [*lines, ""]


def made_of(data: dict) -> dict[str, list[str]]:
    """Makes the tables of all measurements, by their names in the page."""
    return {
        "sizes": _shapes(data),
        "gpus": _gpu_sections(data),
        "experts": experts_sections(data),
        "serving": _serving_sections(data),
        "runs": _runs(data),
    }


def page(text: str, made: dict[str, list[str]]) -> str:
    """Puts tables into a page, each between two comments."""
    for name, lines in made.items():
        begin = f"<!-- made by bench.report: {name} -->\n\n"
        before, _, rest = text.partition(begin)
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise ValueError(f"the page has no place for {name}")
        made_anew = "\n".join(lines).rstrip("\n") + "\n\n"
        text = before + begin + made_anew.lstrip("\n") + end + after
    return text


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
                for row in rows
                if (row["peer"], row["form"]) == (peer, form)
            }
            if points:
                sizes = sorted(points)
                at = [points[n] for n in sizes]
                axis.plot(sizes, at, style, label=PEERS[peer])
        axis.set(xscale="log", yscale="log", title=machine(gpu, ranks) + ", bfloat16")
        axis.set(xlabel="tokens per rank", ylabel="µs, dispatch + combine, captured")
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
    """Writes the tables and the plots."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--add", nargs="+", type=Path, default=[])
    options = parser.parse_args()
    data = load(DATA)
    for path in options.add:
        data = merge(data, load(path))
    DATA.write_text(dump(data))
    PAGE.write_text(page(PAGE.read_text(), made_of(data)))
    SUMMARY.write_text(page(SUMMARY.read_text(), summary.tables(data)))
    SERVING.write_text(page(SERVING.read_text(), {"ratios": summary.ratios(data)}))
    for path in (DATA, PAGE, SUMMARY, SERVING, *plots(data)):
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
