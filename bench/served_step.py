# SPDX-License-Identifier: Apache-2.0
"""Times the steps of a served model's decoder, kernel by kernel, without a server.

    python -m bench.served_step --peer ours

On one GPU, in this process: the model of ``bench.serving``, prompts of one length in
one batch, steps that replay captured graphs, as a server with
``--device-graph-capture`` does. Prints for each number of clients how long a step
takes by the host's clock, which is noisy, for how long the GPU is at work, and what
the kernels of a step take (CUPTI, through torch), the longest first. A kernel that
begins before the one in front of it has ended, and waits for it, counts that time,
too; in the GPU's time it counts once.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from max.pipelines.lib.auto_model import AutoModel

from graphs.serve.checkpoint import make_checkpoint

_ARCHITECTURES = {"ours": "max_ep.serve", "max": "bench.max_as_it_is"}
_PROMPT_TOKENS = 128
_WARM_STEPS, _TIMED_STEPS, _PROFILED_STEPS = 8, 48, 8
_NAME = 60
_PAUSE_US = 5


def load(peer: str, model: Path, max_clients: int) -> AutoModel:
    """Loads a peer's model, compiled and with its graphs captured."""
    return AutoModel(
        str(model),
        max_batch_size=max_clients,
        devices="gpu:0",
        device_graph_capture=True,
        custom_architectures=[_ARCHITECTURES[peer]],
        quantization_encoding="bfloat16",
        max_length=512,
        enable_chunked_prefill=True,
        max_batch_input_tokens=max_clients * _PROMPT_TOKENS,
        device_memory_utilization=0.5,
    )


def at_work_us(intervals: Iterable[tuple[float, float]]) -> float:
    """Sums up when some kernel runs, or the next one is about to.

    Args:
        intervals: Begin and end of each kernel in microseconds.

    Returns:
        Microseconds, with pauses of up to ``_PAUSE_US``: longer ones are the host's.
    """
    total, last = 0.0, -float("inf")
    for begin, end in sorted(intervals):
        if begin > last + _PAUSE_US:
            last = begin
        total += max(0.0, end - last)
        last = max(last, end)
    return total


def table(events: Iterable[tuple[str, float]], n_steps: int, n_kernels: int) -> str:
    """Sums up kernels.

    Args:
        events: Name and microseconds of each kernel that ran.
        n_steps: Steps in which they ran.
        n_kernels: Rows of the table.

    Returns:
        Markdown: of a step, how many ran and for how long, and of each name likewise.
    """
    found = defaultdict(list)
    for name, us in events:
        found[name].append(us)
    all_us = [us for each in found.values() for us in each]
    rows = [("all", all_us)]
    rows += sorted(found.items(), key=lambda item: -sum(item[1]))[:n_kernels]
    lines = [
        "| kernel | a step, us | times | one, us |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {name[:_NAME]} | {sum(each) / n_steps:.1f} | {len(each) / n_steps:.1f} "
        f"| {sum(each) / len(each):.2f} |"
        for name, each in rows
    ]
    return "\n".join(lines)


def decode(model: AutoModel, n_clients: int, n_kernels: int) -> str:
    """Decodes a batch for some steps, and says what they took."""
    from torch.profiler import ProfilerActivity, profile

    prompts = [
        [(7 * i + 13 * j) % 500 + 5 for j in range(_PROMPT_TOKENS)]
        for i in range(n_clients)
    ]
    n_steps = _WARM_STEPS + _TIMED_STEPS + _PROFILED_STEPS + 1  # one is prefill
    with model.generate_iter(
        prompts, max_new_tokens=n_steps + 1, ignore_eos=True
    ) as batch:
        for _ in range(_WARM_STEPS + 1):
            batch.step()
        times_ms = []
        for _ in range(_TIMED_STEPS):
            begin = time.perf_counter()
            batch.step()
            times_ms.append(1e3 * (time.perf_counter() - begin))
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(_PROFILED_STEPS):
                batch.step()
    on_gpu = [
        event
        for event in profiler.profiler.kineto_results.events()
        if event.device_index() == 0
    ]
    events = [(event.name(), event.duration_ns() / 1e3) for event in on_gpu]
    at_work = at_work_us(
        (event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3)
        for event in on_gpu
    )
    return (
        f"{n_clients} clients, a step {statistics.median(times_ms):.3f} ms by the "
        f"host, the GPU at work for {at_work / _PROFILED_STEPS:.1f} us\n\n"
        f"{table(events, _PROFILED_STEPS, n_kernels)}\n"
    )


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", choices=_ARCHITECTURES, default="ours")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--size", default="small")
    parser.add_argument("--model", type=Path, help="a checkpoint that is there")
    parser.add_argument("--kernels", type=int, default=16, help="rows of a table")
    args = parser.parse_args()
    folder = args.model or Path(tempfile.mkdtemp()) / "model"
    if not folder.exists():
        make_checkpoint(folder, args.size, "bfloat16")
    model = load(args.peer, folder, max(args.clients))
    for n_clients in args.clients:
        print(f"{args.peer}: {decode(model, n_clients, args.kernels)}", flush=True)
    model.close()


if __name__ == "__main__":
    main()
