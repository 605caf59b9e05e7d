# SPDX-License-Identifier: Apache-2.0
"""Serves the same model with max_ep and with MAX alone, and times requests.

    python -m bench.serving --gpus 2 --size full --out FILE
    python -m bench.report --add FILE

Peers: ``max_ep``; ``max_expert_parallel`` and ``max_tensor_parallel``, MAX's own; on
one GPU MAX has only the latter. Both of MAX's have our matmuls on Hopper, without
which they do not compile (``bench/max_on_hopper.py``). The model has random weights
and eight layers of Qwen3-30B-A3B (``--size deep``: sixteen, ``full``: all 48). Before a
peer is timed it answers some prompts greedily. When all servers have stopped, these
tokens are compared with transformers', and only then are rows written.

All servers start at once. In each round one after another is timed, and the others are
idle. A row is one number of clients. Each client asks, waits for the whole answer,
streamed, and asks again; the first request of each is not counted. Time to first token
and time between tokens are medians over requests, of tokens that have a text;
throughput is all generated tokens over wall time. A step is what the server's log says
of each decoding of one token for all clients, or for more than seven of eight: the
median and the quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from graphs.serve.checkpoint import make_checkpoint
from graphs.serve.server import POOL_VARIABLE, Server
from max_ep.serve_command import CAPTURED_DECODE, CUSTOM_ARCHITECTURES, device_flags

from . import runs
from .report import serving_table

_ON_HOPPER = ("--custom-architectures", "bench.max_on_hopper")
PEERS = ("max_ep", "max_expert_parallel", "max_tensor_parallel")
_PROMPT_WORDS = 64
_N_TOKENS = 64
_REQUESTS = 4
_EVERY_BATCH = {"MAX_SERVE_SCHEDULER_STATS_LOG_INTERVAL_S": "0"}
"""Lets a server log each batch."""
_STEP = re.compile(
    r"(?:Completed|Executed) TG batch with (\d+) reqs .*?Execution: ([\d.]+)(ms|us|s)\b"
)
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def peer_flags(peer: str, n_gpus: int, *, is_captured: bool) -> list[str]:
    """Returns the flags of ``max serve`` for a peer."""
    how = CUSTOM_ARCHITECTURES if peer == "max_ep" else _ON_HOPPER
    flags = [*device_flags(n_gpus, 0), *how]
    if peer == "max_tensor_parallel":
        devices = "gpu:" + ",".join(str(i) for i in range(n_gpus))
        flags = ["--devices", devices, "--quantization-encoding", "bfloat16", *how]
    return [*flags, CAPTURED_DECODE] if is_captured else flags


def _seed(client: int, request: int) -> int:
    return 1000 * client + request


def _prompt(seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(str(draw.randint(0, 999)) for _ in range(_PROMPT_WORDS))


def _ask(server: Server, seed: int) -> tuple[float, float, int]:
    """Times one request: first token, between tokens, and how many had a text."""
    begin = last = time.perf_counter()
    first, n = 0.0, 0
    for _ in server.stream(_prompt(seed), _N_TOKENS):
        last = time.perf_counter()
        first = first or last - begin
        n += 1
    return first, (last - begin - first) / max(1, n - 1), n


def _check_silent(server: Server, seed: int) -> None:
    """Raises if an answer without a text has not all of its tokens, either.

    The end of an answer has no text, and requests ignore it: a model of random
    weights may say nothing else.
    """
    answer = server.complete(_prompt(seed), _N_TOKENS, return_token_ids=True)
    n = len(answer["token_ids"])
    if n != _N_TOKENS:
        raise RuntimeError(f"{server.log.stem}: an answer of {n} tokens")


def steps_of(log: str, n_clients: int) -> list[float]:
    """Finds the steps that decode a token of nearly each request; milliseconds."""
    return [
        float(time_) * _MS[suffix]
        for n, time_, suffix in _STEP.findall(log)
        if int(n) > n_clients * 7 // 8
    ]


def measure(server: Server, n_clients: int) -> tuple[list, float, list[float]]:
    """Lets clients ask for a while.

    Returns what :func:`_ask` says of each request, how long all took, seconds, and
    what :func:`steps_of` finds.
    """

    def client(number: int) -> list[tuple[float, float, int]]:
        return [_ask(server, _seed(number, i)) for i in range(_REQUESTS)]

    with ThreadPoolExecutor(n_clients) as pool:
        list(pool.map(lambda number: _ask(server, -number), range(n_clients)))
        n_before = server.log.stat().st_size
        begin = time.perf_counter()
        answers = [a for each in pool.map(client, range(n_clients)) for a in each]
        wall_s = time.perf_counter() - begin
    with server.log.open("rb") as log:
        log.seek(n_before)
        said = log.read().decode(errors="replace")
    for index, (_, _, n) in enumerate(answers):
        if n < 2:
            number, i = divmod(index, _REQUESTS)
            _check_silent(server, _seed(number, i))
    return answers, wall_s, steps_of(said, n_clients)


def row_of(peer: str, n_clients: int, rounds: list[tuple]) -> dict:
    """Sums up what :func:`measure` says of all rounds."""
    answers = [answer for answers, _, _ in rounds for answer in answers]
    heard = [answer for answer in answers if answer[2] > 1]
    steps = [step for _, _, steps in rounds for step in steps]
    if len(steps) < 2:
        raise RuntimeError(f"{peer}: no steps of {n_clients} requests in its log")
    tokens_per_s = len(answers) * _N_TOKENS / sum(wall_s for _, wall_s, _ in rounds)
    return {
        "peer": peer,
        "clients": n_clients,
        "first_ms": round(1e3 * statistics.median(a[0] for a in heard), 3),
        "between_ms": round(1e3 * statistics.median(a[1] for a in heard), 3),
        "tokens_per_s": round(tokens_per_s),
        "step_ms": [round(q, 4) for q in statistics.quantiles(steps, n=4)],
        "steps": len(steps),
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", default="large")
    parser.add_argument("--model", type=Path, help="a checkpoint that is there")
    parser.add_argument(
        "--flags", nargs=argparse.REMAINDER, default=[], help="last: for max serve"
    )
    parser.add_argument("--mefs", type=Path, help="PEER folders, precompiled graphs")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, help="a file for `bench.report --add`")
    parser.add_argument("--launched", action="store_true", help="no captured graphs")
    parser.add_argument("--unchecked", action="store_true", help="for profiles")
    args = parser.parse_args()
    model = args.model or Path(tempfile.mkdtemp()) / "model"
    if not model.exists():
        make_checkpoint(model, args.size, "bfloat16")
    limits = ["--max-length", "512", "--max-batch-size", str(max(args.clients))]
    # What requests need is little; the pools of all servers fit the GPU.
    limits += "--max-batch-input-tokens 4096 --device-memory-utilization 0.85".split()
    env = {POOL_VARIABLE: str(int(93 / len(args.peers))), **_EVERY_BATCH}
    with contextlib.ExitStack() as all_servers:
        servers = {}
        for peer in args.peers:
            of_peer = peer_flags(peer, args.gpus, is_captured=not args.launched)
            flags = [*limits, *of_peer, *args.flags]
            if args.mefs:
                flags += ["--precompiled-mefs", str(args.mefs / peer)]
            log = args.logs / f"serving_{peer}.log"
            servers[peer] = all_servers.enter_context(Server(model, flags, log, env))
        for peer, server in servers.items():
            print(f"{peer}: ready, {server.wait_until_ready(1200):.0f} s", flush=True)
        answers = {
            peer: _tests().ask_greedily(server, model, 8, 16)
            for peer, server in servers.items()
            if not args.unchecked
        }
        found = {(peer, n): [] for peer in servers for n in args.clients}
        for _ in range(args.rounds):
            for (peer, n_clients), rounds in found.items():
                rounds.append(measure(servers[peer], n_clients))
                print(row_of(peer, n_clients, rounds[-1:]), flush=True)
    _check(answers, model)
    rows = [row_of(*which, rounds) for which, rounds in found.items()]
    commit = runs.commit()
    print("\n".join(serving_table([{**row, "run": commit} for row in rows])))
    if args.out:
        run = runs.about("bench.serving", **runs.gpus(args.gpus))
        runs.save(args.out, "serving", commit, run, rows)


def _tests() -> Any:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    import serving

    return serving


def _check(answers: dict[str, list[Any]], model: Path) -> None:
    """Compares what peers answered with transformers; prints a tally of each."""
    if not answers:
        return
    tests = _tests()
    reference = tests.Reference(model, in_bfloat16=True, counts_ties=False)
    wrong = []
    for peer, of_peer in answers.items():
        reference.tally = tests.Tally()
        try:
            for asked, served, _ in of_peer:
                reference.check(asked, served, tests.TOLERANCES["bfloat16"])
        except AssertionError as error:
            wrong.append(f"{peer}: {error}")
        print(f"{peer}: {reference.tally}", flush=True)
    if wrong:
        raise SystemExit("wrong tokens, so no table; " + "; ".join(wrong))


if __name__ == "__main__":
    main()
