# SPDX-License-Identifier: Apache-2.0
"""A model served by MAX with max_ep: the same tokens as Hugging Face transformers.

On CPU four ranks share it; on GPUs a rank is a GPU. The served model has random
weights, so its answers have no meaning, but every bit of it is compared.
"""

import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from max.driver import CPU
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from openai import APIStatusError, BadRequestError
from safetensors.torch import load_file, save_file

from graphs.serve import run
from graphs.serve.checkpoint import (
    BLOCKWISE_FP8,
    DEEPSEEK_SIZES,
    OTHER_SIZES,
    SIZES,
    make_checkpoint,
    quantize_matrices,
)
from graphs.serve.run import LIMITS
from graphs.serve.server import POOL_VARIABLE, Server
from max_ep.balance import Placement, plan
from max_ep.checkpoint import Stored, check_config, read_tensors
from max_ep.cli.serve import CAPTURED_DECODE, CUSTOM_ARCHITECTURES, device_flags
from max_ep.limits import BALANCE_VARIABLE
from max_ep.serve import hopper, model, weights
from max_ep.serve.settings import PLACEMENT_VARIABLE
from tests.children import ALL_CASES, WHERE_WE_IMPORT, ran, slow
from tests.oracle.cases import CASES
from tests.serve.serving import (
    MORE_TOKEN,
    NOISES,
    TOLERANCES,
    Reference,
    ask_greedily,
    prompts,
    store_uncommonly,
    widened,
    write_widened,
)
from tests.serve.serving_configs import PUBLISHED

READY_S = 900

COMPILED = os.environ.get("MAX_EP_COMPILED")
"""A folder with graphs by ``max warm-cache``, such as ``small_2``: size and GPUs."""


def placement_of(size: str, n_ranks: int) -> Placement:
    """Gives the busy experts of a model replicas, a quarter more."""
    n_layers, top_k = 2, 8
    if size in DEEPSEEK_SIZES:
        sizes = DEEPSEEK_SIZES[size]
        n, n_layers = sizes["n_routed_experts"], sizes["num_hidden_layers"] - 1
    else:
        n, top_k = (SIZES[size][f"num_experts{x}"] for x in ("", "_per_tok"))
    counts = np.outer(1 + np.arange(n_layers), 1000 / np.arange(1, n + 1))
    return plan(counts, n_ranks, n // 4, top_k=top_k)


IMPORTS_ONCE = {"MODULAR_MAX_ALLOCATOR": "system"}
"""With its other allocator MAX's command starts Python, and imports all, anew."""

FP8 = "fp8"
"""Among the flags of a server: its checkpoint is in blockwise FP8."""

UNCOMMON = "tiny_uncommon"
"""A size whose fields MAX's own model does not read; its files are uncommon, too."""

# GPUs, ranks of the CPU, size of the model, flags.
WHERE = {
    "one_gpu": (1, 0, "small"),
    "one_gpu_minimax": (1, 0, "minimax_small"),
    "two_gpus_minimax": (2, 0, "minimax_small"),
    "one_gpu_captured": (1, 0, "small", CAPTURED_DECODE),
    "two_gpus": (2, 0, "small"),
    "two_gpus_captured": (2, 0, "small", CAPTURED_DECODE),
    "four_gpus": (4, 0, "small"),
    "two_gpus_placed": (2, 0, "small", PLACEMENT_VARIABLE),
    "two_gpus_balanced": (2, 0, "small", BALANCE_VARIABLE),
    "two_gpus_balanced_captured": (2, 0, "small", BALANCE_VARIABLE, CAPTURED_DECODE),
    "two_gpus_balanced_fp8": (2, 0, "small", BALANCE_VARIABLE, FP8),
    "one_gpu_fp8": (1, 0, "small", FP8),
    "two_gpus_fp8": (2, 0, "small", FP8),
    "two_gpus_deepseek_fp8": (2, 0, "deepseek", FP8),
    "two_gpus_deepseek": (2, 0, "deepseek"),
    "two_gpus_deepseek_placed": (2, 0, "deepseek", PLACEMENT_VARIABLE),
}

if ALL_CASES:
    WHERE["four_ranks_of_the_cpu"] = (0, 4, UNCOMMON)
    WHERE["four_ranks_of_the_cpu_plain"] = (0, 4, "tiny")
    WHERE["four_ranks_of_the_cpu_fp8"] = (0, 4, "tiny", FP8)
    WHERE["four_ranks_of_the_cpu_placed"] = (0, 4, "tiny", PLACEMENT_VARIABLE)
    WHERE["four_ranks_of_the_cpu_balanced"] = (0, 4, "tiny", BALANCE_VARIABLE)
    for size in OTHER_SIZES:
        if size.endswith("small"):
            WHERE[f"one_gpu_{size}"] = (1, 0, size)
            WHERE[f"two_gpus_{size}"] = (2, 0, size)
    # MAX's compiler takes two minutes for it, and once it wanted more than 17 GB.
    for n in (1, 2, 4):
        WHERE[f"{n}_ranks_of_the_cpu_minimax"] = (0, n, "minimax_tiny")

LOAD_S = {"float32": 0, "bfloat16": 60}
"""For how long requests come at once; one round of them at least."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(where, id=name, marks=[pytest.mark.gpu(where[0])] * bool(where[0]))
        for name, where in WHERE.items()
    ],
)
def served(request, tmp_path_factory):
    n_gpus, n_cpu_ranks, size, *more = request.param
    folder = tmp_path_factory.mktemp("served")
    dtype = "bfloat16" if n_gpus else "float32"
    model = reference = folder / "model"
    if size == UNCOMMON:
        make_checkpoint(reference, size, "float16")
        model = store_uncommonly(reference, folder / "uncommon")
    else:
        make_checkpoint(model, size, "float8" if FP8 in more else dtype)
    if FP8 in more:
        more.remove(FP8)
        reference = write_widened(model, folder / "widened")
    command = ("max-ep", "serve")
    flags = ["--gpus", "0", "--ranks", str(n_cpu_ranks), *LIMITS, *more]
    if n_gpus:  # `max-ep serve` would capture all; the reference needs room, too
        command = ("max", "serve", "--model-path")
        flags = [*LIMITS, *device_flags(n_gpus, 0), *CUSTOM_ARCHITECTURES, *more]
        flags += ["--device-memory-utilization", "0.2"]
    is_balanced = BALANCE_VARIABLE in more
    placed = "_placed" * (PLACEMENT_VARIABLE in more) + "_balanced" * is_balanced
    if n_gpus and COMPILED:
        flags += ["--precompiled-mefs", f"{COMPILED}/{size}_{n_gpus}{placed}"]
    variables = {POOL_VARIABLE: "30"}
    if is_balanced:  # a look a second: experts move while it is asked
        flags.remove(BALANCE_VARIABLE)
        variables[BALANCE_VARIABLE] = "1"
    if PLACEMENT_VARIABLE in flags:  # three of the 16 experts have replicas
        flags.remove(PLACEMENT_VARIABLE)
        variables[PLACEMENT_VARIABLE] = str(folder / "placement.npz")
        placement_of(size, n_gpus or n_cpu_ranks).save(folder / "placement.npz")
    server = Server(model, flags, folder / "server.log", variables, command=command)
    try:
        server.wait_until_ready(READY_S, print)
        noises = NOISES if dtype == "bfloat16" else ()
        flips_often = size in (*DEEPSEEK_SIZES, *OTHER_SIZES)
        yield SimpleNamespace(
            server=server,
            flags=flags,
            model=model,
            dtype=dtype,
            is_balanced=is_balanced,
            # MAX's server returns none on GPUs, nor of a model with thinking tokens.
            has_logprobs=dtype == "float32" and size in SIZES,
            tolerance=TOLERANCES[dtype],
            reference=Reference(reference, dtype == "bfloat16", noises=noises),
            # One of so many tokens may be what only a model with noise chooses: where
            # a rounding decides between experts.
            per_noise=20 if flips_often else 500,
        )
    finally:
        server.stop()
        print(server.log_end(200))


def test_greedy_tokens_are_those_of_transformers(served):
    reference = served.reference
    answers = ask_greedily(served.server, served.model, 20, 32, served.has_logprobs)
    for asked, tokens, logprobs in answers:
        reference.check(asked, tokens, served.tolerance, logprobs)
    tally = reference.tally
    print(tally)
    assert tally.n_tokens == 20 * 32
    if served.dtype == "float32":
        assert tally.n_ties == 0
    else:
        # About as many as transformers has in bfloat16 (12, where 11 were served).
        assert tally.n_ties <= 2 * tally.n_ties_bfloat16
        # With as much noise as there may be, 3 in 60 of DeepSeek's are.
        assert tally.n_by_noise <= 1 + tally.n_tokens // served.per_noise


def test_tokens_that_the_model_does_not_have_are_refused(served):
    """The server goes on. Without the check MAX's gather fails, and with it the
    server."""
    n = served.reference.tokenizer.vocab_size
    wanted = served.server.complete([5, n - 1], 3)
    for ids in ([5, n], [-1], [10**6, 5], [2**70]):
        with pytest.raises(BadRequestError, match=rf"{max(ids, key=abs)}.*\[0, {n}\)"):
            served.server.complete(ids, 3)
    if served.model != served.reference.folder:
        with pytest.raises(BadRequestError, match=rf"the token id {n};"):
            served.server.complete(f"A rank {MORE_TOKEN}", 3)
        with pytest.raises(APIStatusError):
            list(served.server.chat(MORE_TOKEN, 3))
    assert served.server.complete([5, n - 1], 3) == wanted


def test_the_log_says_who_serves(served):
    line = (
        r"max_ep: \d ranks? on [CG]PU, protocol \w+, \d+ tokens a rank, "
        r"[\d.]+ MiB of symmetric memory each, time-out 30 s"
    )
    alone = "max_ep: all experts on one GPU; they gather their tokens"
    assert re.search(f"{line}|{alone}", served.server.log.read_text())


def test_the_program_talks_with_it(served, monkeypatch, capsys):
    """`make serve`, with the server of these tests, which it would start."""
    if served.flags != ["--gpus", "0", "--ranks", "4", *LIMITS]:
        pytest.skip("it starts another server")
    started = []

    @contextmanager
    def started_before(*where: object, command: Sequence[str]) -> Iterator[Server]:
        started.append((where[1], command))
        yield served.server

    monkeypatch.setattr(run, "Server", started_before)
    run.main()
    assert started == [(served.flags, ("max-ep", "serve"))]
    said = capsys.readouterr().out
    assert f"> {run._QUESTION}" in said and said.endswith("stopped\n")


def test_many_at_once_some_cancelled(served):
    """Answers are those given one by one; on GPUs, but for ties of the reference. There
    batches differ in size, and so do roundings."""
    server, tokenizer = served.server, served.reference.tokenizer
    # On the CPU few: there a step takes long.
    texts = prompts(16 if served.dtype == "float32" else 64, seed=1)
    asked = [tokenizer(text).input_ids for text in texts]
    random.seed(2)
    n_tokens = [random.randint(1, 48) for _ in asked]

    def ask(prompt: list[int], n: int) -> list[int]:
        return server.complete(prompt, n, return_token_ids=True)["token_ids"]

    alone = [ask(p, n) for p, n in zip(asked, n_tokens)]
    stop = threading.Event()

    def leave_midway() -> int:
        n = 0
        while not stop.is_set():
            answer = server.chat(random.choice(texts), 200)
            for _, _piece in zip(range(3), answer):
                pass
            answer.close()
            n += 1
        return n

    rounds = []
    begin = time.monotonic()
    with ThreadPoolExecutor(72) as pool:
        leavers = [pool.submit(leave_midway) for _ in range(8)]
        try:
            while not rounds or time.monotonic() - begin < LOAD_S[served.dtype]:
                rounds.append(list(pool.map(ask, asked, n_tokens)))
        finally:
            stop.set()
        assert sum(leaver.result() for leaver in leavers) >= 8
    print(f"{len(rounds)} rounds of {len(asked)} requests")
    for prompt, one_by_one, *answers in zip(asked, alone, *rounds):
        for answer in {tuple(answer) for answer in answers} - {tuple(one_by_one)}:
            assert served.dtype != "float32" and len(answer) == len(one_by_one)
            served.reference.check(prompt, list(answer), served.tolerance)
    tally = served.reference.tally
    print(tally)
    assert tally.n_by_noise <= 1 + tally.n_tokens // served.per_noise


def test_experts_move_while_it_is_asked(served):
    """If they are balanced, and only then. Texts of one word keep few experts busy."""
    server, begin = served.server, time.monotonic()
    asked = served.reference.tokenizer("expert " * 30).input_ids
    answers = set()

    def has_moved() -> bool:
        return "max_ep: moved" in server.log.read_text(errors="replace")

    while served.is_balanced and not has_moved():
        assert time.monotonic() - begin < 120, server.log_end()
        answer = server.complete(asked, 16, return_token_ids=True)
        answers.add(tuple(answer["token_ids"]))
    for answer in answers:
        served.reference.check(asked, list(answer), served.tolerance)
    assert has_moved() == served.is_balanced


def read(folder, monkeypatch, device, **fields) -> dict:
    """Reads for our decoder whatever a file has."""

    def here(name: str) -> str:
        return name.removeprefix("model.").replace("_scale_inv", "_scale")

    tensors = read_tensors(folder).items()
    stored = {name: Stored(tensor, here(name)) for name, tensor in tensors}
    monkeypatch.setattr(weights, "stored_in", lambda *_: stored)
    sizes = dict(hidden_size=256, moe_intermediate_size=128, num_experts=16)
    config = PUBLISHED["Qwen3-30B-A3B"] | sizes | fields
    monkeypatch.setattr(weights, "config_of", lambda _: check_config(config))
    encoding = "float32" if device == "cpu" else "bfloat16"
    specs = [SimpleNamespace(device_type=device)]
    flags = SimpleNamespace(device_specs=specs, quantization_encoding=encoding)
    return weights.decoder_weights(SimpleNamespace(model=flags))


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("scales", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_matrices_are_widened(tmp_path, monkeypatch, device, scales):
    """With their scales, also where the last blocks are smaller; on a GPU experts'
    stay. Other weights are cast."""
    dense, expert = "self_attn.q_proj.weight", "mlp.experts.3.up_proj.weight"
    original = torch.randn(300, 200, dtype=torch.bfloat16)
    original[128:] *= 100
    path = tmp_path / "model.safetensors"
    names = [f"model.layers.0.{name}" for name in (dense, expert)]
    save_file({name: original.clone() for name in names}, path)
    quantize_matrices(tmp_path)
    stored = load_file(path) | {"model.norm.weight": original[0].clone()}
    for name in names:
        stored[f"{name}_scale_inv"] = stored[f"{name}_scale_inv"].to(scales)
    save_file(stored, path)
    now = read(tmp_path, monkeypatch, device, quantization_config=BLOCKWISE_FP8)
    encoding = "float32" if device == "cpu" else "bfloat16"
    wanted = widened(tmp_path)[f"model.layers.0.{dense}"].to(getattr(torch, encoding))
    if scales == torch.float32:
        near = original.abs() / 12 + 0.02
        assert ((wanted - original).abs() <= near).all()
    kept = [f"{expert}_scale"] if device == "gpu" else []
    assert now.pop("norm.weight").dtype == getattr(DType, encoding)
    assert set(now) == {f"layers.0.{name}" for name in (dense, expert, *kept)}
    assert torch.equal(torch.from_dlpack(now[f"layers.0.{dense}"]), wanted)
    dtype = now[f"layers.0.{expert}"].dtype
    assert dtype == (DType.float8_e4m3fn if kept else DType.float32)
    for name in kept:
        assert now[f"layers.0.{name}"].dtype == DType.float32
        factors = stored[f"{names[1]}_scale_inv"].float()
        assert torch.equal(torch.from_dlpack(now[f"layers.0.{name}"]), factors)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_come_in_the_dtype_of_the_model(tmp_path, monkeypatch, device, dtype):
    """Rounded once; a router's bias is float32 in all."""
    drawn = (torch.randn(3, 5) / 7).to(dtype)
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    stored = {"model.norm.weight": drawn, bias: drawn[0].clone()}
    save_file(stored, tmp_path / "model.safetensors")
    now = read(tmp_path, monkeypatch, device)
    wanted = drawn.to(torch.float32 if device == "cpu" else torch.bfloat16)
    assert torch.equal(torch.from_dlpack(now["norm.weight"]), wanted)
    (of_router,) = (value for name, value in now.items() if "bias" in name)
    assert torch.equal(torch.from_dlpack(of_router), drawn[0].float())


def test_a_failed_launch_ends_the_next_step(monkeypatch):
    """A replayed step begins as any other: with its inputs."""

    class MaxsModel:
        def prepare_initial_token_inputs(self, batches: list) -> list:
            return batches

    class Served(model.ExpertParallelModel, MaxsModel):
        pass

    def fail() -> None:
        raise RuntimeError("rank 1 did not come")

    served = Served()
    assert served.prepare_initial_token_inputs([7]) == [7]
    served.ep_comm_initializer = SimpleNamespace(check=lambda: None)
    assert served.prepare_initial_token_inputs([7]) == [7]
    served.ep_comm_initializer.check = fail
    assert served.prepare_initial_token_inputs([7]) == [7]  # asked not long ago
    monkeypatch.setattr(model, "_CHECK_EVERY_S", 0)
    with pytest.raises(RuntimeError, match="did not come"):
        served.prepare_initial_token_inputs([7])


TWO_LAYERS = dict(dispatch=2, combine=2)
IN_PLACE = dict(sort_choices=2, add_rows=2)
PLACED = dict.fromkeys(("dispatch", "combine", "softmax_top_k", "balance_ids"), 4)
CLAMPED = dict(dispatch=4, combine=4, softmax_top_k=4)
CLAMPED_ON_ONE = dict(dispatch=2, combine=2, softmax_top_k=2)
FOUR = dict(dispatch=4, combine=4)
ON_TWO = [
    ("gpt_oss_tiny", True),
    ("qwen2_tiny", True),
    ("olmoe_tiny", True),
    ("mixtral_tiny", True),
    ("laguna_tiny", False),
    ("minimax_tiny", False),
]
"""Sizes with two layers of experts, and whether the router has a softmax."""
SPLIT_ON_TWO_RANKS = dict(dispatch=8, combine=8)  # async and wait


@pytest.mark.parametrize(
    "where, size, wanted",
    [
        # One of the two layers has experts, and each GPU dispatches and combines.
        pytest.param(
            "two_gpus", "deepseek_tiny", TWO_LAYERS | dict(balance_ids=2), marks=slow
        ),
        # Two layers on two GPUs, with replicas of busy experts.
        ("two_gpus", "tiny", PLACED),
        # The router is an op of ours.
        pytest.param("one_gpu", "tiny", TWO_LAYERS | dict(softmax_top_k=2), marks=slow),
        ("one_gpu", "tiny_wide", IN_PLACE | dict(softmax_top_k=2)),
        pytest.param(
            "one_gpu", "tiny_wide_fp8", TWO_LAYERS | dict(softmax_top_k=2), marks=slow
        ),
        # The routers' biases are bfloat16 in the checkpoint, float32 in the graph.
        pytest.param("one_gpu", "minimax_tiny", TWO_LAYERS, marks=slow),
        ("two_ranks_of_the_cpu", "minimax_tiny", SPLIT_ON_TWO_RANKS),
        pytest.param("two_gpus", "hyv3_tiny", TWO_LAYERS, marks=slow),
        # Weights of experts are inputs.
        pytest.param("two_gpus", "tiny_wide_balanced", PLACED, marks=slow),
        pytest.param("two_gpus", "tiny_wide_balanced_fp8", PLACED, marks=slow),
        # What no Qwen3 has, on a GPU and on two.
        pytest.param("one_gpu", "laguna_tiny", TWO_LAYERS, marks=slow),
        ("two_gpus", "glm4_tiny", TWO_LAYERS),
        *(
            pytest.param("two_gpus", size, CLAMPED if is_softmax else FOUR, marks=slow)
            for size, is_softmax in ON_TWO
        ),
        pytest.param("one_gpu", "gpt_oss_tiny", CLAMPED_ON_ONE, marks=slow),
        # As published: the shared expert in FP8, too.
        pytest.param("two_gpus", "deepseek_tiny_fp8", TWO_LAYERS, marks=slow),
    ],
)
def test_graph_has_our_ops(tmp_path, where, size, wanted):
    """Each architecture has our dispatch and combine, or on one GPU experts that gather
    their tokens; nothing is compiled."""
    dtype = "bfloat16" if "gpu" in where else "float32"
    fp8 = "_fp8" if "fp8" in size else ""
    size, is_balanced, _ = size.removesuffix("_fp8").partition("_balanced")
    make_checkpoint(tmp_path / "model", size, "float8" if fp8 else dtype)
    folders = tmp_path / "model", tmp_path / "mefs"
    command = sys.executable, "-m", "tests.serve.served_graph", where, *folders
    how = dict(HF_HUB_OFFLINE="1", PYTHONPATH=WHERE_WE_IMPORT, **IMPORTS_ONCE)
    if is_balanced:
        how[BALANCE_VARIABLE] = "60"
    elif "balance_ids" in wanted:
        how[PLACEMENT_VARIABLE] = str(tmp_path / "placement.npz")
        placement_of(size, 2).save(tmp_path / "placement.npz")
    done = ran(*command, timeout=READY_S, **how)
    line = next((x for x in done.stdout.splitlines() if x.startswith("ops: ")), None)
    assert line, done.stdout[-2000:] + done.stderr[-2000:]
    ops = json.loads(line.removeprefix("ops: "))
    of_ours = tuple(
        f"max_ep.{x}"
        for x in ("dispatch", "combine", "softmax", "balance", "sort", "add")
    )
    assert {op: n for op, n in ops.items() if op.startswith(of_ours)} == {
        f"max_ep.{name}": n for name, n in wanted.items()
    }
    assert not [op for op in ops if op.startswith(("ep.dispatch", "ep.combine"))]
    assert f"max_ep.grouped_matmul{fp8}" in ops
    # One op on GPUs for heads that are normalized and wholly rotated.
    has_one = "gpu" in where and size.startswith(("tiny", "hyv3", "laguna"))
    assert ("max_ep.norm_rope_store" in ops) == has_one
    first = "_gathered" if "sort_choices" in wanted else fp8
    is_swiglu = "gpt_oss" not in size  # gate and up of it have biases between
    assert ("max_ep.gpu_linear" in ops) == ("gpu" in where)
    of_gpu = f"max_ep.grouped_gate_up{first}"
    assert (of_gpu in ops) == ("gpu" in where and is_swiglu)


def test_shared_experts_outside_of_dispatch_are_added(monkeypatch):
    """Where MAX's decoder for several GPUs runs our layers."""
    monkeypatch.setattr(hopper, "through_experts", lambda _manager, xs, *_: list(xs))
    types = [TensorType(DType.float32, ["n_tokens", 64], DeviceRef.CPU())]
    shard = SimpleNamespace(gate=lambda x: (x, x), num_experts_per_token=4)
    shard.has_shared_experts, shard.shared_experts = True, lambda x: x * 3
    n_added = []
    for fused in (False, True):
        config = SimpleNamespace(fused_shared_expert=fused)
        shard.ep_batch_manager = shard._ep_batch_manager = SimpleNamespace(
            config=config
        )
        with Graph("layer", input_types=types) as graph:
            graph.output(*hopper.forward_layers([shard], [graph.inputs[0].tensor]))
        n_added.append(str(graph).count(".add("))
    assert n_added[0] == n_added[1] + 1


def test_what_by_expert_costs_is_logged_before_memory_is_asked_for(caplog, monkeypatch):
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(model.EPCommInitializer, "ep_init", fail)
    session = SimpleNamespace(devices=[CPU()])
    for n_tokens in (65535, 65536):
        sizes = dict(protocol="by_expert", max_tokens_per_rank=n_tokens)
        config = CASES["two_ranks"].config(**sizes)
        with pytest.raises(MemoryError):
            model.ServingInitializer(config).ep_init(session)
        words = "by_expert': max_tokens_per_rank=65536 is above 65535"
        assert (words in caplog.text) == (n_tokens > 65535)
    assert "lower --max-batch-input-tokens" in caplog.text


def test_a_group_that_cannot_run_ends_the_server_before_weights_are_read(tmp_path):
    """What else the memory plan refuses, `test_serve_plan.py` has."""
    make_checkpoint(tmp_path / "model")
    flags = [*LIMITS, *device_flags(0, 4), *CUSTOM_ARCHITECTURES, "--ep-size", "3"]
    with Server(tmp_path / "model", flags, tmp_path / "log", IMPORTS_ONCE) as server:
        with pytest.raises(RuntimeError, match="before it was ready"):
            server.wait_until_ready(READY_S)
        log = server.log_end(2000)
    assert "16 experts cannot be loaded on --ep-size 3 ranks" in log
    assert "Building model" not in log
