# SPDX-License-Identifier: Apache-2.0
"""Serves the same model with max_ep and with MAX alone, and times requests.

    python -m bench.serving --gpus 2 --size full --out FILE
    python -m bench.report --add FILE

Peers: ``max_ep``; ``max_ep_fp8``, which serves the same model in blockwise FP8;
``max_expert_parallel`` and ``max_tensor_parallel``, MAX's own; on one GPU MAX has only
the latter. Both of MAX's have our matmuls on Hopper, without
which they do not compile (``bench/max_on_hopper.py``). ``transformers`` is no server:
its model with grouped matmuls encodes the long prompts. The model has random weights
and eight layers of Qwen3-30B-A3B (``--size deep``: sixteen, ``full``: all 48).

All servers start at once; in each round one after another is timed, each round another
first. Servers and clients have cores of their own, and from round to round servers swap
them (``bench/cores.py``). All times are those of clients, which are other processes; a
server's log is not read, and says nothing of single batches, which costs time. Prompts
are random tokens and never repeat, but where the prefix cache is measured.

A *prefill* is a long prompt of which one token is asked: *cold* the first time,
*cached* the second. To *decode*, each client asks, waits for the whole answer,
streamed, and asks again; throughput is that of the time in which all have their second
answer or a later one. A *step* is the time between a client's tokens while all clients
receive tokens: from the latest first token to the earliest last one; each answer of all
gives one. At the end each captured graph is replayed back to back, without a host
between: its *GPU time* (``bench/graph_times.py``). Greedy tokens of all servers are
compared with those of transformers, and only then are rows written.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import count, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from graphs.serve.server import POOL_VARIABLE, Server
from max_ep.cli.serve import CAPTURED_DECODE, device_flags

from .cores import Shares, host, move
from .graph_times import LOOK_EVERY_S, VARIABLE

_FP8 = "max_ep_fp8"
PEERS = ("max_ep", _FP8, "max_expert_parallel", "max_tensor_parallel")
_PLAIN = "transformers"
_OURS = ("--custom-architectures", "bench.served_max_ep")
_ON_HOPPER = ("--custom-architectures", "bench.max_on_hopper")
_PROMPT, _ANSWER, _REQUESTS = 128, 128, 4
"""Tokens of a request that decodes, and how many each client sends."""
_LEAST_STEPS = 16
"""Fewest tokens of a client while all clients receive some."""
_PREFILLS = 4
_N_PROCESSES = 4
_VOCABULARY = range(10, 500)
_seeds = count()


def peer_flags(peer: str, n_gpus: int) -> list[str]:
    """Returns the flags of ``max serve`` for a peer."""
    how = _OURS if peer in ("max_ep", _FP8) else _ON_HOPPER
    flags = [*device_flags(n_gpus, 4), *how]
    if peer == "max_tensor_parallel":
        devices = "gpu:" + ",".join(str(i) for i in range(n_gpus))
        flags = ["--devices", devices, "--quantization-encoding", "bfloat16", *how]
    return [*flags, CAPTURED_DECODE] if n_gpus else flags


async def ask(
    port: int, model: str, n_prompt: int, n_answer: int, seed: int
) -> list[float]:
    """Asks for greedy tokens; returns when it asked, and when each token came."""
    prompt = random.Random(seed).choices(_VOCABULARY, k=n_prompt)
    fields = {"model": model, "prompt": prompt, "max_tokens": n_answer, "stream": True}
    fields |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    times = [time.perf_counter()]
    writer.write(head.encode() + body)
    async for line in reader:
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            times += [time.perf_counter()] * len(choice["token_ids"])
    writer.close()
    if len(times) != 1 + n_answer:
        raise RuntimeError(f"{len(times) - 1} of {n_answer} tokens came")
    return times


def _clients(port: int, model: str, n: tuple[int, int], of_each: list) -> list:
    """Is a process of clients; each asks with its seeds, one after another."""

    async def client(seeds: list[int]) -> list[list[float]]:
        return [await ask(port, model, *n, seed) for seed in seeds]

    async def all_clients() -> list[list[list[float]]]:
        return await asyncio.gather(*map(client, of_each))

    return asyncio.run(all_clients())


def run_clients(
    pool: ProcessPoolExecutor, server: Server, n: tuple[int, int], seeds: list
) -> list:
    """Returns the times of each client's requests."""
    parts = [part for i in range(_N_PROCESSES) if (part := seeds[i::_N_PROCESSES])]
    jobs = [pool.submit(_clients, server.port, server.model, n, p) for p in parts]
    return [times for job in jobs for times in job.result()]


def prefill(pool: ProcessPoolExecutor, server: Server, n_prompt: int) -> dict:
    """Times prompts of which one token is asked, each a second time; milliseconds."""
    twice = [seed for seed in [next(_seeds) for _ in range(_PREFILLS)] for _ in "12"]
    ((*requests,),) = run_clients(pool, server, (n_prompt, 1), [twice])
    waits = [1e3 * (came - asked) for asked, came in requests]
    return {"cold_ms": waits[::2], "cached_ms": waits[1::2]}


def prefill_in_transformers(model: Path, n_prompt: int, device: str) -> dict:
    """Times prompts in transformers with ``grouped_mm``, without a server."""
    import torch
    from transformers import AutoModelForCausalLM

    how = dict(dtype=torch.bfloat16, experts_implementation="grouped_mm")
    plain = AutoModelForCausalLM.from_pretrained(model, **how).to(device).eval()
    times = []
    for _ in range(3 + 2 * _PREFILLS):
        prompt = random.Random(next(_seeds)).choices(_VOCABULARY, k=n_prompt)
        ids = torch.tensor([prompt], device=device)
        begin = time.perf_counter()
        with torch.inference_mode():
            plain(ids, logits_to_keep=1).logits.argmax().item()
        times.append(1e3 * (time.perf_counter() - begin))
    return {"execution_ms": times[3:]}


def decode(pool: ProcessPoolExecutor, server: Server, n_clients: int) -> dict:
    """Times clients that ask at once. Rates are tokens a second, times milliseconds."""
    seeds = [[next(_seeds) for _ in range(1 + _REQUESTS)] for _ in range(n_clients)]
    clients = run_clients(pool, server, (_PROMPT, _ANSWER), seeds)
    counted = [times for requests in clients for times in requests[1:]]
    begin = max(requests[1][1] for requests in clients)
    end = min(requests[-1][-1] for requests in clients)
    if end <= begin:
        raise RuntimeError("the clients were not served at the same time")
    came = sum(begin < at <= end for times in counted for at in times[1:])
    return {
        "first_ms": [1e3 * (times[1] - times[0]) for times in counted],
        "between_ms": [1e3 * (t[-1] - t[1]) / (_ANSWER - 1) for t in counted],
        "tokens_per_s": [came / (end - begin)],
        "step_ms": [
            step for answers in zip(*clients) if (step := step_of(answers)) is not None
        ],
    }


def step_of(answers: Sequence[list[float]]) -> float | None:
    """Finds the milliseconds of a step in answers that all clients receive at once;
    None if that is too short. Times of each: when it was asked, when tokens came."""
    begin = max(times[1] for times in answers)
    end = min(times[-1] for times in answers)
    steps = []
    for times in answers:
        within = [at for at in times[1:] if begin <= at <= end]
        if len(within) < _LEAST_STEPS:
            return None
        steps.append(1e3 * (within[-1] - within[0]) / (len(within) - 1))
    return statistics.median(steps)


def time_graphs(
    pool: ProcessPoolExecutor, server: Server, n_clients: int, path: Path
) -> dict:
    """Lets a server time the captured graph of so many clients; milliseconds."""
    path.write_text("")
    try:
        time.sleep(2 * LOOK_EVERY_S)
        seeds = [[next(_seeds)] for _ in range(n_clients)]
        run_clients(pool, server, (_PROMPT, _ANSWER), seeds)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    finally:
        path.unlink()
        time.sleep(2 * LOOK_EVERY_S)
    most = max((row["requests"] for row in rows), default=0)
    rows = [row for row in rows if row["requests"] == most]
    if not rows:
        raise RuntimeError("the server has timed none")
    for name, (n, us) in sorted(rows[-1]["kernels"].items(), key=lambda kv: -kv[1][1]):
        print(f"  {us:8.2f} us in {n:4.0f} launches: {name[:110]}", flush=True)
    return {"graph_ms": [row["ms"] for row in rows]}


def row_of(peer: str, size: str, n: int, rounds: list[dict]) -> dict:
    """Sums up all rounds: quartiles, or of a few values the median."""
    row: dict[str, Any] = {"peer": peer, size: n}
    for name in dict.fromkeys(name for found in rounds for name in found):
        values = [value for found in rounds for value in found.get(name, [])]
        if not values:
            continue
        if name in ("step_ms", "cold_ms", "cached_ms", "execution_ms"):
            values *= 1 + (len(values) == 1)
            row[name] = [round(q, 4) for q in statistics.quantiles(values, n=4)]
        else:
            row[name] = round(statistics.median(values), 3)
    return row


def named(row: dict) -> dict:
    """Returns a row as it is saved: FP8 is a dtype of the peer's checkpoint."""
    return row | {"peer": "max_ep", "dtype": "float8"} if row["peer"] == _FP8 else row


def main() -> None:
    from graphs.serve.checkpoint import make_checkpoint, to_blockwise_fp8
    from max_ep.bench import runs

    from .report import serving_tables

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, required=True, help="0: the CPU")
    choices = [*PEERS, _PLAIN]
    default = [peer for peer in PEERS if peer != _FP8]
    parser.add_argument("--peers", nargs="+", default=default, choices=choices)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, default=4096, help="tokens to prefill")
    more = "the default has each server twice on each share of the cores"
    parser.add_argument("--rounds", type=int, default=0, help=more)
    parser.add_argument("--size", default="large")
    parser.add_argument("--model", type=Path, help="a checkpoint that is there")
    parser.add_argument("--mefs", type=Path, help="PEER folders, precompiled graphs")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp()))
    parser.add_argument("--out", type=Path, help="a file for `bench.report --add`")
    args = parser.parse_args()
    model = args.model or args.logs / "model"
    if not model.exists():
        make_checkpoint(model, args.size, "bfloat16" if args.gpus else "float32")
    models = dict.fromkeys(args.peers, model)
    if _FP8 in models:
        models[_FP8] = model.with_name(f"{model.name}_fp8")
        if not models[_FP8].exists():
            shutil.copytree(model, models[_FP8])
            to_blockwise_fp8(models[_FP8])
    limits = ["--max-length", "8192", "--max-batch-size", str(max(args.clients))]
    # What requests need is little; the pools of all servers fit the GPU.
    limits += "--max-batch-input-tokens 4096 --device-memory-utilization 0.85".split()
    peers = [peer for peer in args.peers if peer != _PLAIN]
    env = {POOL_VARIABLE: str(93 // max(1, len(peers)))}
    shares = Shares(os.sched_getaffinity(0), len(peers))
    found: dict[tuple[str, str, int], list[dict]] = {}

    def add(peer: str, size: str, n: int, values: dict) -> None:
        found.setdefault((peer, size, n), []).append(values)
        print(row_of(peer, size, n, [values]), flush=True)

    with contextlib.ExitStack() as stack:
        servers = {}
        for peer in peers:
            flags = [*limits, *peer_flags(peer, args.gpus)]
            if args.mefs:
                flags += ["--precompiled-mefs", str(args.mefs / peer)]
            log = args.logs / f"serving_{peer}.log"
            timed = {VARIABLE: str(args.logs / f"graphs_{peer}")}
            server = Server(models[peer], flags, log, env | timed)
            servers[peer] = stack.enter_context(server)
        for peer, server in servers.items():
            print(f"{peer}: ready, {server.wait_until_ready(1200):.0f} s", flush=True)
        greedy = _tests().ask_greedily
        answers = {peer: greedy(s, models[peer], 8, 16) for peer, s in servers.items()}
        processes = ProcessPoolExecutor(
            _N_PROCESSES,
            get_context("spawn"),
            initializer=os.sched_setaffinity,
            initargs=(0, shares.clients),
        )
        pool = stack.enter_context(processes)
        list(pool.map(time.sleep, [1] * _N_PROCESSES))  # starts all of them
        for i in range(args.rounds or 2 * len(peers)):
            for j, peer in enumerate(peers):
                move(servers[peer].session, shares.of_server(j, i))
            for j in range(len(peers)):
                peer = peers[(i + j) % len(peers)]
                add(
                    peer,
                    "prompt",
                    args.prompt,
                    prefill(pool, servers[peer], args.prompt),
                )
                for n in args.clients:
                    add(peer, "clients", n, decode(pool, servers[peer], n))
        for peer, n in product(peers if args.gpus else (), args.clients):
            path = args.logs / f"graphs_{peer}"
            try:
                add(peer, "clients", n, time_graphs(pool, servers[peer], n, path))
            except (OSError, RuntimeError) as error:  # the steps stay
                print(f"{peer}: no GPU time of {n} clients: {error}", flush=True)
    if _PLAIN in args.peers:
        device = "cuda" if args.gpus else "cpu"
        times = prefill_in_transformers(model, args.prompt, device)
        add(_PLAIN, "prompt", args.prompt, times)
    wrong, in_fp8 = [], answers.pop(_FP8, None)
    if in_fp8:
        plain = _tests().write_widened(models[_FP8], args.logs / "widened")
        wrong += _tests().wrong_answers({_FP8: in_fp8}, plain)
    if wrong := wrong + _tests().wrong_answers(answers, model):
        raise SystemExit("wrong tokens, so no table; " + "; ".join(wrong))
    rows = [named(row_of(*key, rounds)) for key, rounds in found.items()]
    commit = runs.commit()
    print("\n".join(serving_tables([{**row, "run": commit} for row in rows])))
    if args.out:
        config = json.loads((model / "config.json").read_text())
        more = {**runs.gpus(args.gpus), "layers": config["num_hidden_layers"]}
        more |= {"host": host(), "servers": len(peers), "cores": shares.of_each}
        run = runs.about("python -m bench.serving", **more)
        runs.save(args.out, "serving", commit, run, rows)


def _tests() -> Any:
    from tests.serve import serving

    return serving


if __name__ == "__main__":
    main()
