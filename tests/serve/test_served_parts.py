# SPDX-License-Identifier: Apache-2.0
"""What a served model is made of, without requests: weights as its decoder wants them,
ops of its graph, and what ends it. `test_serve.py` asks it for tokens."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from max.driver import CPU
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from safetensors.torch import load_file, save_file

from graphs.serve.checkpoint import (
    BLOCKWISE_FP8,
    make_checkpoint,
    quantize_matrices,
)
from graphs.serve.run import LIMITS
from graphs.serve.server import Server
from max_ep.checkpoint import Stored, check_config, described, read_tensors
from max_ep.cli.serve import CUSTOM_ARCHITECTURES, device_flags
from max_ep.limits import BALANCE_VARIABLE
from max_ep.serve import hopper, model, weights
from max_ep.serve.settings import PLACEMENT_VARIABLE
from tests.children import WHERE_WE_IMPORT, ran, slow
from tests.oracle.cases import CASES
from tests.serve.serving import (
    READY_S,
    placement_of,
    widened,
)
from tests.serve.serving_configs import PUBLISHED

IMPORTS_ONCE = {"MODULAR_MAX_ALLOCATOR": "system"}
"""With its other allocator MAX's command starts Python, and imports all, anew."""


def read(folder, monkeypatch, device, **fields) -> dict:
    """Reads for our decoder whatever a file has."""

    def here(name: str) -> str:
        return name.removeprefix("model.").replace("_scale_inv", "_scale")

    tensors = read_tensors(folder).items()
    stored = {name: Stored(tensor, here(name)) for name, tensor in tensors}
    monkeypatch.setattr(weights, "stored_in", lambda *_: stored)
    sizes = dict(hidden_size=256, moe_intermediate_size=128, num_experts=16)
    config = PUBLISHED["Qwen3-30B-A3B"] | sizes | fields
    decoder = described(check_config(config))
    monkeypatch.setattr(weights, "decoder_of", lambda _: decoder)
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


ONE_LAYER = dict(dispatch=1, combine=1)
TWO_LAYERS = dict(dispatch=2, combine=2)
IN_PLACE = dict(routed_swiglu=2)
PLACED = dict.fromkeys(("dispatch", "combine", "softmax_top_k", "balance_ids"), 4)
CLAMPED = dict(dispatch=4, combine=4, softmax_top_k=4)
CLAMPED_ON_ONE = dict(dispatch=2, combine=2, softmax_top_k=2)
FOUR = dict(dispatch=4, combine=4)
CONSTANTS = set(
    "mo.constant.external mo.chain.create rmo.mo.transfer rmo.concat rmo.slice".split()
)
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
        # With heads of zeros; on one GPU, too, it has a group.
        pytest.param("one_gpu", "deepseek_4_heads", ONE_LAYER, marks=slow),
        pytest.param("two_gpus", "deepseek_24_heads_fp8", TWO_LAYERS, marks=slow),
        # Two layers on two GPUs, with replicas of busy experts.
        pytest.param("two_gpus", "tiny", PLACED, marks=slow),
        # The router is an op of ours.
        pytest.param("one_gpu", "tiny", TWO_LAYERS | dict(softmax_top_k=2), marks=slow),
        pytest.param(
            "one_gpu", "tiny_wide", IN_PLACE | dict(softmax_top_k=2), marks=slow
        ),
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
        pytest.param("two_gpus", "glm4_tiny", TWO_LAYERS, marks=slow),
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
        for x in "dispatch combine softmax balance routed sort add_rows".split()
    )
    assert {op: n for op, n in ops.items() if op.startswith(of_ours)} == {
        f"max_ep.{name}": n for name, n in wanted.items()
    }
    assert not [op for op in ops if op.startswith(("ep.dispatch", "ep.combine"))]
    is_in_place = "routed_swiglu" in wanted
    assert (f"max_ep.grouped_matmul{fp8}" in ops) == (not is_in_place)
    # One op on GPUs for heads that are normalized and wholly rotated.
    has_one = "gpu" in where and size.startswith(("tiny", "hyv3", "laguna"))
    assert ("max_ep.norm_rope_store" in ops) == has_one
    # Two sums and their norms a layer of our decoder; before the first there is no sum.
    n_layers = 3 if size.startswith(("laguna", "qwen2")) else 2
    is_ours = "gpu" in where and not size.startswith("deepseek")
    n_gpus = 1 + where.startswith("two")
    n_norms = sum(ops.get(f"max_ep.add_norm{end}", 0) for end in ("", "_linear"))
    assert n_norms == is_ours * (2 * n_layers - 1) * n_gpus
    # MAX moves, cuts and joins constants once, as it loads a model.
    line = next(x for x in done.stdout.splitlines() if x.startswith("early: "))
    early = {*json.loads(line.removeprefix("early: "))}
    assert bool(early) == ("max_ep.add_norm_linear" in ops)
    assert early <= CONSTANTS
    # Gate and up of gpt-oss have biases between.
    is_swiglu = "gpt_oss" not in size and not is_in_place
    assert ("max_ep.gpu_linear" in ops) == ("gpu" in where)
    of_gpu = f"max_ep.grouped_gate_up{fp8}"
    assert (of_gpu in ops) == ("gpu" in where and is_swiglu)
    # All of MAX's parts agree on heads: those of zeros included.
    n_heads = [16] * size.startswith("deepseek")
    if size == "deepseek_24_heads":
        n_heads = [32]
    line = next(x for x in done.stdout.splitlines() if x.startswith("latent: "))
    assert json.loads(line.removeprefix("latent: ")) == n_heads


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


@slow
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
