# SPDX-License-Identifier: Apache-2.0
"""A layer whose experts are all on one device: choices sorted, rows added up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from max.driver import CPU, Accelerator
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, Module, TensorType

from max_ep.experts import (
    add_rows,
    grouped_gate_up,
    grouped_matmul,
    routed_swiglu,
    sort_choices,
)
from tests.errors import raises, refused
from tests.harness import to_buffer, to_numpy
from tests.oracle.drawn import narrow, widen

HIDDEN = 64
LAYERS = {"few": (7, 3), "usual": (128, 8), "many": (300, 10)}
"""Experts, and those of a token; more rows than are loaded at once."""
DTYPES = {"cpu": DType.float32, "gpu": DType.bfloat16}
ON_BOTH = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu(1))]


def choices_graph(kind: str, **where: Module) -> Graph:
    """Builds a sort and a sum for each of the layers."""
    device = DeviceRef.CPU() if kind == "cpu" else DeviceRef.GPU()
    types = []
    for name, (_, top_k) in LAYERS.items():
        choices = ["n_tokens", top_k]
        types += [
            TensorType(DType.int32, choices, device),
            TensorType(DTYPES[kind], [f"n_rows_{name}", HIDDEN], device),
            TensorType(DType.float32, choices, device),
        ]
    with Graph("choices", input_types=types, **where) as graph:
        values = iter([value.tensor for value in graph.inputs])
        results = []
        for n_experts, _ in LAYERS.values():
            ids, rows, weights = next(values), next(values), next(values)
            found = sort_choices(ids, n_experts)
            results += [*found, add_rows(rows, found[-1], weights)]
        graph.output(*results)
    return graph


N_EXPERTS, MOE_DIM, TOP_K = 5, 8, 2
"""Sizes of the layer."""


def add_graphs(module: Module) -> None:
    choices_graph("cpu", module=module)
    f32, cpu = DType.float32, DeviceRef.CPU()
    types = [
        TensorType(f32, ["n_tokens", HIDDEN], cpu),
        TensorType(DType.int32, ["n_tokens", TOP_K], cpu),
        TensorType(f32, ["n_tokens", TOP_K], cpu),
        TensorType(f32, [N_EXPERTS, 2 * MOE_DIM, HIDDEN], cpu),
        TensorType(f32, [N_EXPERTS, HIDDEN, MOE_DIM], cpu),
    ]
    Graph("routed_layer", routed_swiglu, types, module=module)
    types = [
        TensorType(f32, [2, 8], cpu),
        TensorType(f32, [1, 4, 8], cpu),
        TensorType(DType.uint32, ["n_offsets"], cpu),
        TensorType(DType.int32, ["n_groups"], cpu),
    ]
    Graph("open_sizes", grouped_matmul, types, module=module)


@pytest.fixture(scope="module", params=ON_BOTH)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def run(request, kind) -> Callable:
    """Sorts and adds up."""
    if kind == "cpu":
        there, model = CPU(), request.getfixturevalue("one_module").models["choices"]
    else:
        there = Accelerator()
        model = InferenceSession(devices=[CPU(), there]).load(choices_graph(kind))

    def run(given: list[np.ndarray]) -> list[np.ndarray]:
        given = [
            narrow(x, DTYPES[kind]) if i % 3 == 1 else x for i, x in enumerate(given)
        ]
        buffers = [to_buffer(x, there) for x in given]
        return [widen(to_numpy(buffer)) for buffer in model.execute(*buffers)]

    return run


def draw_ids(how: str, shape: tuple[int, int], n_experts: int) -> np.ndarray:
    rng = np.random.default_rng(shape[0])
    if how == "one expert":
        return np.full(shape, n_experts - 1, np.int32)
    if how == "skewed":
        ids = rng.zipf(1.3, shape) % n_experts
        return ids.astype(np.int32)
    # Some of no expert.
    ids = rng.integers(-1, n_experts + 1, shape).astype(np.int32)
    wrong = [-1, -2, n_experts, 2**31 - 1, -(2**31)]
    return np.where(rng.random(shape) < 0.1, rng.choice(wrong, shape), ids).astype(
        np.int32
    )


def check_sorted(ids: np.ndarray, n_experts: int, found: list[np.ndarray]) -> None:
    offsets, experts, token_of_row, row_of_choice = found
    flat = ids.ravel()
    experts_of = np.where((flat >= 0) & (flat < n_experts), flat, n_experts)
    order = np.argsort(experts_of, kind="stable")
    ends = np.searchsorted(experts_of[order], np.arange(n_experts + 1))
    np.testing.assert_array_equal(offsets, ends)
    np.testing.assert_array_equal(experts, np.arange(n_experts))
    np.testing.assert_array_equal(token_of_row, order // ids.shape[1])
    wanted = np.full(len(flat), -1)
    wanted[order[: ends[-1]]] = np.arange(ends[-1])
    np.testing.assert_array_equal(row_of_choice.ravel(), wanted)


def added_up(
    rows: np.ndarray, row_of_choice: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Adds in order, rounding after each weighted row, as `fma` does."""
    sums = np.zeros((len(weights), HIDDEN), np.float32)
    for of_choice, weight in zip(row_of_choice.T, weights.T.astype(np.float64)):
        is_there = of_choice >= 0
        more = weight[is_there, None] * rows[of_choice[is_there]] + sums[is_there]
        sums[is_there] = more.astype(np.float32)
    return sums


@pytest.mark.parametrize("how", ["some wrong", "skewed", "one expert"])
@pytest.mark.parametrize("n_tokens", [0, 1, 2, 63, 64, 65, 515, 4100])
def test_choices_are_sorted_and_rows_added(run, kind, how, n_tokens):
    """Bit for bit; 64 times 8 ids are what a warp loads at once."""
    rng = np.random.default_rng(n_tokens)
    given = []
    for n_experts, top_k in LAYERS.values():
        rows = rng.standard_normal((n_tokens * top_k, HIDDEN)).astype(np.float32)
        weights = rng.random((n_tokens, top_k)).astype(np.float32)
        ids = draw_ids(how, (n_tokens, top_k), n_experts)
        given += [ids, widen(narrow(rows, DType.bfloat16)), weights]
    results = run(given)
    for i, (n_experts, _) in enumerate(LAYERS.values()):
        ids, rows, weights = given[3 * i : 3 * i + 3]
        *found, sums = results[5 * i : 5 * i + 5]
        check_sorted(ids, n_experts, found)
        wanted = added_up(rows, found[-1], weights)
        wanted = widen(narrow(wanted, DType.bfloat16)) if kind == "gpu" else wanted
        np.testing.assert_array_equal(sums, wanted)


def test_a_layer_on_one_device(one_module):
    """On the CPU, where rows are gathered before the product."""
    n_tokens, rng = 9, np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    x, weights = draw(n_tokens, HIDDEN), draw(n_tokens, TOP_K)
    gate_up = draw(N_EXPERTS, 2 * MOE_DIM, HIDDEN)
    down = draw(N_EXPERTS, HIDDEN, MOE_DIM)
    ids = rng.integers(-1, N_EXPERTS, (n_tokens, TOP_K)).astype(np.int32)
    layer = one_module.models["routed_layer"]
    (y,) = layer.execute(x, ids, weights, gate_up, down)
    wanted = np.zeros_like(x)
    for token, k in np.argwhere(ids >= 0):
        gate, up = np.split(gate_up[ids[token, k]] @ x[token], 2)
        row = down[ids[token, k]] @ (gate / (1 + np.exp(-gate)) * up)
        wanted[token] += weights[token, k] * row
    np.testing.assert_allclose(y.to_numpy(), wanted, rtol=1e-4, atol=1e-4)


def test_the_op_sees_sizes_that_the_graph_does_not(one_module):
    model = one_module.models["open_sizes"]
    rows, weight = np.ones((2, 8), np.float32), np.ones((1, 4, 8), np.float32)
    offsets, ids = np.array([0, 2], np.uint32), np.zeros(2, np.int32)
    (made,) = model.execute(rows, weight, offsets, ids[:1])
    np.testing.assert_array_equal(made.to_numpy(), np.full((2, 4), 8))
    with raises(Exception, "have 2 elements and expert_ids 2"):
        model.execute(rows, weight, offsets, ids)


I32, I64, F32, BF16 = DType.int32, DType.int64, DType.float32, DType.bfloat16


@refused("""
sort_choices, [(I64, [4, 2])], 8 | topk_ids are DType.int64
add_rows, [(BF16, [8, 64]), (I64, [4, 2]), (F32, [4, 2])] | row_of_choice (DType.int64)
add_rows, [(BF16, [8, 64]), (I32, [4, 2]), (BF16, [4, 2])] | weights (DType.bfloat16)
add_rows, [(BF16, [8, 60]), (I32, [4, 2]), (F32, [4, 2])] | have 60 elements
add_rows, [(BF16, [8, 64]), (I32, [4, 2]), (F32, [4, 3])] | for each of 2 choices
gate_up, [8, 64], [2, 256, 64], I64 | token_of_row is DType.int64
gate_up, [8, 64], [2, 128, 64], I32 | is [2, 128, 64]; n in multiples of 256
gate_up, [8, 64], [3000, 256, 64], I32 | up to 2048 experts
""")
def test_refusals(arguments, words):
    def gate_up(rows, weights, dtype):
        n_experts = weights[0]
        return grouped_gate_up, [
            (BF16, rows),
            (BF16, weights),
            (DType.uint32, [n_experts + 1]),
            (I32, [n_experts]),
            (dtype, [16]),
        ]

    names = dict(globals(), gate_up=gate_up)
    op, given, *more = eval(f"({arguments},)", names)
    if op is gate_up:
        op, given, *more = gate_up(given, *more)
    types = [TensorType(dtype, shape, DeviceRef.GPU(0)) for dtype, shape in given]
    with raises((TypeError, ValueError), words):
        Graph("refused", lambda *values: op(*values, *more), types)
