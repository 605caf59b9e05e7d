# SPDX-License-Identifier: Apache-2.0
"""What stands in MAX's modules while a model is built, of that on Hopper what shows."""

import re
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType, TensorValue, ops
from max.graph.graph import default_custom_extensions
from max.nn import linear as max_linear
from max.nn.activation import GatedActivation
from max.nn.comm import ep as comm_ep
from max.nn.kernels import (
    grouped_matmul_ragged,
    mla_prefill_decode_graph,
    moe_router_group_limited,
)
from max.nn.moe import expert_parallel
from max.nn.moe import moe as max_moe

from max_ep import EPBatchManager, extension_path
from max_ep.serve import hopper, settings
from max_ep.serve.hopper import forward_layers
from max_ep.serve.model import ExpertParallelModel, ServingInitializer
from max_ep.serve.replaced import EVERYWHERE, OF_A_MODEL, absent, home_of, replaced
from max_ep.serve.settings import gathers, rank_bytes
from tests.oracle.cases import Case
from tests.serve.described import qwen3

ORIGINALS = {
    "grouped_matmul_ragged": grouped_matmul_ragged,
    "linear": max_linear.linear,
    "__matmul__": TensorValue.__matmul__,
    "mla_prefill_decode_graph": mla_prefill_decode_graph,
    "moe_router_group_limited": moe_router_group_limited,
}


def add_graphs(module: Module) -> list:
    """Adds a matmul of whole tiles, by a product that is quickly compiled. MAX's matmul
    on CPU takes two minutes."""
    cpu = DeviceRef.CPU()
    types = [
        TensorType(DType.float32, ["n_rows", 8], cpu),
        TensorType(DType.float32, [4, 8], cpu),
    ]
    given = []

    def multiply(x: TensorValue, other: TensorValue) -> TensorValue:
        given.append(x)
        columns = ops.unsqueeze(x, 1) * ops.unsqueeze(other.T, 0)
        return ops.squeeze(ops.sum(columns, 2), 2)

    with (
        pytest.MonkeyPatch.context() as patch,
        Graph("whole_tiles", input_types=types, module=module) as graph,
    ):
        patch.setattr(hopper.ops, "matmul", multiply)
        x, weight = (value.tensor for value in graph.inputs)
        product = hopper.product_of_whole_tiles(x, weight.T)
        graph.output(product, ops.shape_to_tensor(given[0].shape))
    add_whole_sizes(module)
    add_said_lengths(module)
    return list(product.shape)


def add_whole_sizes(module: Module) -> None:
    cpu = DeviceRef.CPU()
    types = [
        TensorType(DType.float32, ["n_rows", 44], cpu),
        TensorType(DType.float32, [2, 17, 44], cpu),
        TensorType(DType.uint32, [3], cpu),
        TensorType(DType.int32, [2], cpu),
    ]
    with Graph("whole_sizes", input_types=types, module=module) as graph:
        values = [value.tensor for value in graph.inputs]
        graph.output(hopper.product_of_whole_sizes(*values))
    more = [TensorType(DType.float32, [2, 44, 17], cpu)]
    both = [types[0], TensorType(DType.float32, [2, 34, 44], cpu)]
    types = both + more + types[2:]
    with Graph("whole_swiglu", input_types=types, module=module) as graph:
        values = [value.tensor for value in graph.inputs]
        rows, of_expert = values[0], values[1][1]
        graph.output(
            hopper.swiglu_of_whole_sizes(*values),
            hopper.linear_of_whole_sizes(rows, of_expert),
        )


def test_zeros_fill_up_gate_and_up(added, one_module):
    """Each by itself; fails if a part of one counts for the other."""
    rng = np.random.default_rng(1)
    sizes = (5, 44), (2, 34, 44), (2, 44, 17)
    x, gate_up, down = (rng.integers(-3, 3, n).astype(np.float32) for n in sizes)
    groups = np.array([0, 2, 5], np.uint32), np.array([1, 0], np.int32)
    model = one_module.models["whole_swiglu"]
    found, product = (y.to_numpy() for y in model.execute(x, gate_up, down, *groups))
    np.testing.assert_allclose(product, x @ gate_up[1].T, rtol=1e-5)
    wanted = []
    for expert, rows in ((1, x[:2]), (0, x[2:])):
        gate, up = rows @ gate_up[expert, :17].T, rows @ gate_up[expert, 17:].T
        wanted.append(gate / (1 + np.exp(-gate)) * up @ down[expert].T)
    assert found.shape == (5, 44)
    np.testing.assert_allclose(found, np.concatenate(wanted), rtol=1e-4, atol=1e-3)


@dataclass
class Cache:
    """What of MAX's cache says how long prompts are."""

    max_prompt_length: TensorValue


def said_length(longest, architecture, dtype=DType.bfloat16):
    """Returns how long latent attention hears that the longest prompt is."""
    query = SimpleNamespace(device=DeviceRef.GPU(0), dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "accelerator_architecture_name", lambda: architecture)
        patch.setattr(
            hopper,
            "mla_prefill_decode_graph",
            lambda kv_collection, q: kv_collection.max_prompt_length,
        )
        return hopper.latent_attention_anywhere(kv_collection=Cache(longest), q=query)


def add_said_lengths(module: Module) -> None:
    types = [TensorType(DType.uint32, [1], DeviceRef.CPU())]
    with Graph("said_length", input_types=types, module=module) as graph:
        longest = graph.inputs[0].tensor
        assert said_length(longest, "sm_100a") is longest
        assert said_length(longest, "sm_90a", DType.float32) is longest
        graph.output(said_length(longest, "sm_90a"))


def test_short_prompts_are_not_decoded(one_module):
    model = one_module.models["said_length"]
    said = {1: 1, 2: 9, 3: 9, 8: 9, 9: 9, 10: 10, 4096: 4096}
    for longest, wanted in said.items():
        (got,) = model.execute(np.array([longest], np.uint32))
        assert got.to_numpy().tolist() == [wanted]


def test_zeros_fill_up_sizes(added, one_module):
    """GPU kernels do not take these; the kernel here is that of the CPU."""
    rng = np.random.default_rng(0)
    x, weights = (
        rng.integers(-9, 9, sizes).astype(np.float32)
        for sizes in ((5, 44), (2, 17, 44))
    )
    offsets, ids = np.array([0, 2, 5], np.uint32), np.array([1, 0], np.int32)
    model = one_module.models["whole_sizes"]
    result = model.execute(x, weights, offsets, ids)[0].to_numpy()
    assert result.shape == (5, 17)
    np.testing.assert_array_equal(result[:2], x[:2] @ weights[1].T)
    np.testing.assert_array_equal(result[2:], x[2:] @ weights[0].T)


def test_rows_behind_a_whole_tile_are_left_out(added, one_module):
    assert added == ["n_rows", 4]
    model = one_module.models["whole_tiles"]
    rng = np.random.default_rng(0)
    for n_rows in (1, 2, 63, 127, 128, 129, 300):
        # Small integers: sums are exact.
        x, weight = (
            rng.integers(-9, 9, (n, 8)).astype(np.float32) for n in (n_rows, 4)
        )
        result, multiplied = (out.to_numpy() for out in model.execute(x, weight))
        np.testing.assert_array_equal(result, x @ weight.T)
        n_filled = multiplied[0]
        assert n_rows <= n_filled < n_rows + hopper.TILE_ROWS
        assert n_filled % hopper.TILE_ROWS == 0


@pytest.mark.parametrize(
    ("device", "architecture", "dtype", "is_wrong"),
    [
        (DeviceRef.GPU(0), "sm_90", DType.bfloat16, True),
        (DeviceRef.GPU(0), "sm_90a", DType.bfloat16, True),
        (DeviceRef.GPU(0), "sm_90a", DType.float32, False),
        (DeviceRef.GPU(0), "sm_80", DType.bfloat16, False),
        (DeviceRef.GPU(0), "sm_100a", DType.bfloat16, False),
        (DeviceRef.CPU(), "sm_90a", DType.bfloat16, False),
    ],
)
def test_only_what_is_wrong_is_replaced(
    monkeypatch, device, architecture, dtype, is_wrong
):
    """A layer's matmul, one of sizes ours does not take, and one of an own weight."""
    monkeypatch.setattr(hopper, "accelerator_architecture_name", lambda: architecture)
    types = [
        TensorType(dtype, ["n_rows", 64], device),
        TensorType(dtype, [32, 64], device),
    ]
    layer = max_linear.Linear(64, 32, dtype, device)
    narrow = max_linear.Linear(64, 24, dtype, device)
    for multiply, has_op in (
        (lambda x, _: layer(x), True),
        (lambda x, _: narrow(x), False),
        (lambda x, weight: x @ weight.T, False),
    ):
        with Graph("product", input_types=types) as graph:
            with replaced():
                x, weight = (value.tensor for value in graph.inputs)
                graph.output(multiply(x, weight))
        assert ("max_ep.gpu_linear" in str(graph)) == (is_wrong and has_op)
        assert ("concat" in str(graph)) == (is_wrong and not has_op)


class Experts(max_moe.MoE):
    """A layer of MAX without router, whose weights are inputs of the graph."""

    gate_up_proj = down_proj = None

    def __init__(self, gate_up, down, **options):
        usual = dict(activation=GatedActivation(), interleaved_gate_up=False)
        weights = dict(gate_up_proj=gate_up, down_proj=down)
        vars(self).update(usual | options | weights)


def experts_graph(dtype=DType.bfloat16, moe_dim=64, **options) -> str:
    gpu, cpu = DeviceRef.GPU(0), DeviceRef.CPU()
    types = [
        TensorType(dtype, [3, 2 * moe_dim, 64], gpu),
        TensorType(dtype, [3, 64, moe_dim], gpu),
        TensorType(DType.uint32, [], cpu),
        TensorType(dtype, ["n_rows", 64], gpu),
        TensorType(DType.uint32, [4], gpu),
        TensorType(DType.int32, [3], gpu),
        TensorType(DType.uint32, [2], cpu),
    ]
    with Graph("experts", input_types=types) as graph:
        with replaced():
            gate_up, down, n_rows, *dispatched = (v.tensor for v in graph.inputs)
            layer = Experts(gate_up, down, moe_dim=moe_dim, **options)
            rows = hopper.experts_anywhere(layer, dispatched, dispatched[0], n_rows)
            graph.output(rows)
    return str(graph)


@pytest.mark.parametrize(
    ("architecture", "options", "ops"),
    [
        ("sm_90a", {}, ["max_ep.grouped_gate_up", "max_ep.grouped_matmul"]),
        ("sm_90a", dict(interleaved_gate_up=True), 2 * ["max_ep.grouped_matmul"]),
        (
            "sm_90a",
            dict(moe_dim=44),
            ["max_ep.grouped_gate_up", "max_ep.grouped_matmul"],
        ),
        ("sm_90a", dict(moe_dim=40), 2 * ["max_ep.grouped_matmul"]),
        (
            "sm_90a",
            dict(activation=GatedActivation("gelu_tanh")),
            2 * ["max_ep.grouped_matmul"],
        ),
        ("sm_90a", dict(dtype=DType.float32), []),
        ("sm_100a", {}, []),
    ],
)
def test_experts_are_swiglu_in_two_matmuls(monkeypatch, architecture, options, ops):
    """Others, and layers with another activation, run as in MAX."""
    monkeypatch.setattr(hopper, "accelerator_architecture_name", lambda: architecture)
    found = re.findall(r"max_ep\.grouped_\w+", experts_graph(**options))
    assert found == ops


@pytest.mark.parametrize("k, op", [(64, True), (50, True), (40, False)])
def test_columns_that_max_does_not_take_are_filled_up(monkeypatch, k, op):
    """Its matmul does not compile where ``k`` is no multiple of 8."""
    monkeypatch.setattr(hopper, "accelerator_architecture_name", lambda: "sm_90a")
    gpu, bf16 = DeviceRef.GPU(0), DType.bfloat16
    types = [TensorType(bf16, ["n", k], gpu), TensorType(bf16, [17 * 16, k], gpu)]
    with Graph("linear", input_types=types) as graph:
        graph.output(hopper.linear_anywhere(*(x.tensor for x in graph.inputs)))
    assert ("max_ep.gpu_linear" in str(graph)) == op


@pytest.mark.parametrize(
    "moe_dim, is_hopper, change, wanted",
    [
        (128, True, {}, True),
        (64, True, {}, False),
        (128, False, {}, False),
        (128, True, dict(n_gpus_per_node=2), False),
        (128, True, dict(target="cpu"), False),
        (128, True, dict(dispatch_dtype=DType.float32), False),
        (128, True, dict(combine_dtype=DType.float32), False),
        (128, True, dict(fused_shared_expert=True), False),
    ],
)
def test_experts_gather_their_tokens_on_one_gpu(
    monkeypatch, moe_dim, is_hopper, change, wanted
):
    """They need no symmetric memory, and rows are stored behind each product."""
    monkeypatch.setattr(settings, "is_hopper", lambda: is_hopper)
    model = qwen3(moe_intermediate_size=moe_dim)
    config = Case("one_gpu", 1, 16, 4, 64, 10).config(**(dict(target="gpu") | change))
    assert gathers(config, model) == wanted
    clamped = replace(model, moe=replace(model.moe, is_clamped=True))
    assert not gathers(config, clamped)
    in_place = 0, 40 * (2 * (64 + moe_dim) + 8)
    assert (rank_bytes(config, model) == in_place) == wanted


def test_what_stands_while_a_model_is_built(monkeypatch):
    """Ours in MAX's modules, wherever an architecture has them; the ops in reach of
    subgraphs, and nothing after."""
    assert len(EVERYWHERE) == 6
    for place, ours in EVERYWHERE.items():
        home, name = home_of(place)
        assert getattr(home, name) is ORIGINALS[name]
        with replaced():
            assert getattr(home, name) is ours
        assert getattr(home, name) is ORIGINALS[name]
    theirs = SimpleNamespace(
        EPBatchManager=comm_ep.EPBatchManager,
        EPConfig=comm_ep.EPConfig,
        EPCommInitializer=comm_ep.EPCommInitializer,
        forward_moe_sharded_layers=expert_parallel.forward_moe_sharded_layers,
        MoE=None,  # another one
    )
    before = dict(vars(theirs))
    monkeypatch.setitem(sys.modules, "max.pipelines.architectures.new.model", theirs)

    class MaxsModel:
        def load_model(self, session: None) -> tuple:
            return dict(vars(theirs)), default_custom_extensions()

    class Model(ExpertParallelModel, MaxsModel):
        pipeline_config = SimpleNamespace(
            model=SimpleNamespace(device_specs=[SimpleNamespace(device_type="cpu")])
        )

    model = Model()
    seen, extensions = model.load_model(None)
    assert seen == dict(
        EPBatchManager=EPBatchManager,
        EPConfig=model._group,
        EPCommInitializer=ServingInitializer,
        forward_moe_sharded_layers=forward_layers,
        MoE=None,
    )
    assert set(extensions) == {extension_path(), extension_path("max_ep_experts")}
    assert vars(theirs) == before
    assert default_custom_extensions() == ()


def test_names_that_another_version_of_max_lacks(monkeypatch):
    """This one has all; of another the first start says which are missing."""
    assert absent() == []
    monkeypatch.delattr(max_moe, "grouped_matmul_ragged")
    monkeypatch.setattr("max_ep.serve.replaced.OF_A_MODEL", (*OF_A_MODEL, "max.ep:X"))
    wanted = ["max.nn.moe.moe:grouped_matmul_ragged", "max.ep:X"]
    assert absent() == wanted
    with pytest.raises(RuntimeError, match=f"lacks {', '.join(wanted)}, which max_ep"):
        with replaced():
            pass
