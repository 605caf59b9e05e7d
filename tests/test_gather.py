# SPDX-License-Identifier: Apache-2.0
"""`AllGatherTokenDispatcher`: tokens to everybody, experts on all, sums back."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import to_buffer, to_numpy
from max.driver import Accelerator
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType, ops

from max_ep import AllGatherTokenDispatcher, blockwise_fp8_quant_config
from max_ep.reference import bfloat16_to_float32, float32_to_bfloat16

# No other size is `TOP_K`, nor a number of ranks: one is not taken for another.
N_RANKS, N_EXPERTS, TOP_K, HIDDEN, TOKENS = 3, 7, 5, 40, 6
CPU, BF16 = DeviceRef.CPU(), DType.bfloat16

PLACES = {
    "cpu": dict(n_gpus_per_node=N_RANKS, target="cpu"),
    "one_gpu": dict(n_gpus_per_node=N_RANKS, target="gpu", ranks_per_gpu=N_RANKS),
    "two_gpus": dict(n_gpus_per_node=2, target="gpu"),
    "four_gpus": dict(n_gpus_per_node=4, target="gpu"),
}
_N_GPUS = {"cpu": 0, "one_gpu": 1, "two_gpus": 2, "four_gpus": 4}


def local_experts(rank: int, n_ranks: int, tokens, probs, ids):
    """Builds what a rank's experts return for all tokens: expert e gives e + 1 x."""

    def number(value: float, dtype: DType):
        array = np.array([value], dtype.to_numpy())
        there = ops.constant(array, dtype, ids.device)
        return ops.broadcast_to(there, list(ids.shape))

    n_local = -(-N_EXPERTS // n_ranks)
    first, end = rank * n_local, min((rank + 1) * n_local, N_EXPERTS)
    is_here = ops.logical_and(
        ids >= number(first, DType.int32), ids < number(end, DType.int32)
    )
    factor = ops.cast(ids, DType.float32) + number(1, DType.float32)
    weights = ops.where(is_here, probs * factor, number(0, DType.float32))
    total = ops.sum(weights, axis=1)
    rows = ops.cast(tokens, DType.float32) * total
    return ops.cast(rows, BF16)


def add_layer(place, module=None):
    """Builds a layer at a place."""
    dispatcher = AllGatherTokenDispatcher(HIDDEN, TOP_K, TOKENS, **PLACES[place])
    config = dispatcher.config
    n_ranks = config.n_ranks
    types = []
    for rank in range(n_ranks):
        device = config.device(rank)
        types += [
            TensorType(BF16, [f"t{rank}", HIDDEN], device),
            TensorType(DType.float32, [f"t{rank}", TOP_K], device),
            TensorType(DType.int32, [f"t{rank}", TOP_K], device),
        ]
    declared = [*types, *dispatcher.input_types()]
    with Graph(f"gather_{place}", input_types=declared, module=module) as graph:
        dispatcher.fetch_buffers(graph.inputs[len(types) :])
        values = [v.tensor for v in graph.inputs[: len(types)]]
        tokens, all_probs = dispatcher.token_dispatch(
            values[0::3], values[1::3], values[2::3]
        )
        x, per_expert, p = dispatcher.dispatch_postprocess(tokens, all_probs)
        assert per_expert is None
        chosen = dispatcher.routing_map
        rows = [
            local_experts(r, n_ranks, x[r], p[r], chosen[r]) for r in range(n_ranks)
        ]
        results = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        gathered = *tokens, *all_probs, *chosen
        graph.output(*gathered, *results, *dispatcher.n_gathered)
    return dispatcher, graph


def of_cpu(n_ranks: int, **changes: object) -> AllGatherTokenDispatcher:
    sizes = dict(top_k=TOP_K, max_tokens_per_rank=TOKENS) | changes
    where = dict(n_gpus_per_node=n_ranks, target="cpu")
    return AllGatherTokenDispatcher(HIDDEN, **(sizes | where))


def add_scatter(module: Module) -> AllGatherTokenDispatcher:
    """Adds a graph that sums, over ranks r, 2 to the r times the tokens."""
    dispatcher = of_cpu(N_RANKS)
    types = [TensorType(BF16, [TOKENS, HIDDEN], CPU)]
    types += dispatcher.input_types()
    with Graph("scatter", input_types=types, module=module) as graph:
        dispatcher.fetch_buffers(graph.inputs[1:])
        hidden = [graph.inputs[0].tensor] * N_RANKS
        zeros = ops.constant(np.zeros((TOKENS, TOP_K), np.float32), device=CPU)
        ids = ops.constant(np.zeros((TOKENS, TOP_K), np.int32), device=CPU)
        tokens, _ = dispatcher.token_dispatch(
            hidden, [zeros] * N_RANKS, [ids] * N_RANKS
        )
        factors = [np.full(1, 2.0**rank, np.float32) for rank in range(N_RANKS)]
        factors = [ops.cast(ops.constant(f, device=CPU), BF16) for f in factors]
        rows = [t * factor for t, factor in zip(tokens, factors)]
        graph.output(*dispatcher.token_combine(rows))
    return dispatcher


def add_graphs(module: Module) -> SimpleNamespace:
    """Adds all graphs of this file that need no GPU."""
    return SimpleNamespace(
        layer=add_layer("cpu", module)[0], scatter=add_scatter(module)
    )


@pytest.fixture(scope="module")
def on_cpu(one_module: SimpleNamespace) -> SimpleNamespace:
    """Those graphs, compiled."""
    added = vars(one_module.added[__name__])
    return SimpleNamespace(models=one_module.models, **added)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(place, id=place, marks=[pytest.mark.gpu(n_gpus)] if n_gpus else [])
        for place, n_gpus in _N_GPUS.items()
    ],
)
def layer(request) -> Iterator[SimpleNamespace]:
    """A compiled layer, with its memory."""
    place = request.param
    session = request.getfixturevalue("gpu_session" if _N_GPUS[place] else "session")
    if place == "cpu":
        on_cpu = request.getfixturevalue("on_cpu")
        dispatcher = on_cpu.layer
        model = on_cpu.models["gather_cpu"]
    else:
        dispatcher, graph = add_layer(place)
        model = session.load(graph)
    config = dispatcher.config
    comm = dispatcher.initializer()
    comm.ep_init(session)
    yield SimpleNamespace(
        model=model,
        comm=comm,
        dispatcher=dispatcher,
        n_ranks=config.n_ranks,
        devices=[
            None if config.target == "cpu" else Accelerator(config.device(r).id)
            for r in range(config.n_ranks)
        ],
    )
    comm.close()


def run(layer: SimpleNamespace, counts: list[int], seed: int) -> SimpleNamespace:
    rng = np.random.default_rng(seed)
    given = SimpleNamespace(tokens=[], probs=[], ids=[])
    inputs = []
    n_ranks = layer.n_ranks
    for n, device in zip(counts, layer.devices):
        x = float32_to_bfloat16(rng.normal(size=(n, HIDDEN)).astype(np.float32))
        p = rng.random((n, TOP_K)).astype(np.float32)
        ids = np.array(
            [rng.permutation(N_EXPERTS)[:TOP_K] for _ in range(n)], np.int32
        ).reshape(n, TOP_K)
        ids[rng.random(ids.shape) < 0.2] = -1
        given.tokens.append(x)
        given.probs.append(p)
        given.ids.append(ids)
        inputs += [to_buffer(a, device) for a in (x, p, ids)]
    inputs += layer.comm.model_inputs()
    outputs = [to_numpy(o) for o in layer.model.execute(*inputs)]
    layer.comm.check()
    tokens, probs, ids, results, n_gathered = (
        outputs[i : i + n_ranks] for i in range(0, 5 * n_ranks, n_ranks)
    )
    assert np.array_equal(n_gathered, [[sum(counts)]] * n_ranks)
    return SimpleNamespace(
        given=given, tokens=tokens, probs=probs, ids=ids, results=results
    )


COUNTS = [[TOKENS] * 4, [2, 5, 1, 4], [0, TOKENS, 3, 0], [0, 0, 0, 0]]
"""Tokens of each rank, of as many as there are."""


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_everything_is_gathered_in_rank_order(layer, counts):
    counts = counts[: layer.n_ranks]
    ran = run(layer, counts, sum(counts))
    n, total = sum(counts), layer.n_ranks * TOKENS
    assert layer.dispatcher.global_tokens == total
    for rank in range(layer.n_ranks):
        assert ran.tokens[rank].shape == (total, HIDDEN)
        np.testing.assert_array_equal(
            ran.tokens[rank][:n], np.concatenate(ran.given.tokens)
        )
        for got, want, none in (
            (ran.probs[rank], ran.given.probs, 0),
            (ran.ids[rank], ran.given.ids, -1),
        ):
            assert got.shape == (total, TOP_K)
            np.testing.assert_array_equal(got[:n], np.concatenate(want))
            assert (got[n:] == none).all()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_results_are_those_of_a_dense_layer(layer, counts):
    """In torch, on one rank; twice, for what the first run left must not matter."""
    counts = counts[: layer.n_ranks]
    for seed in (1, 2):
        ran = run(layer, counts, seed)
        for rank, n in enumerate(counts):
            x = torch.from_numpy(bfloat16_to_float32(ran.given.tokens[rank])).double()
            ids = torch.from_numpy(ran.given.ids[rank]).double()
            probs = torch.from_numpy(ran.given.probs[rank]).double()
            weights = torch.where(ids >= 0, probs * (ids + 1), 0.0).sum(dim=1)
            want = x * weights.reshape(n, 1)
            got = torch.from_numpy(bfloat16_to_float32(ran.results[rank])).double()
            # The parts and their sum, each rounded to bfloat16 once.
            bound = 2.0**-7 * want.abs() + 1e-6
            assert got.shape == want.shape
            assert ((got - want).abs() <= bound).all()


def test_reduce_scatter_rounds_once(session, on_cpu):
    """Powers of two of a token: its parts are exact, and so is all but the last."""
    rng = np.random.default_rng(3)
    x = float32_to_bfloat16(rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32))
    with on_cpu.scatter.initializer() as comm:
        comm.ep_init(session)
        inputs = [to_buffer(x, None), *comm.model_inputs()]
        want = float32_to_bfloat16(bfloat16_to_float32(x) * np.float32(7))
        for result in on_cpu.models["scatter"].execute(*inputs):
            np.testing.assert_array_equal(to_numpy(result), want)


def test_each_local_rank_has_a_value():
    dispatcher = of_cpu(2)
    types = [TensorType(BF16, ["t", HIDDEN], CPU)]
    types += dispatcher.input_types()
    with Graph("never_compiled", input_types=types) as graph:
        dispatcher.fetch_buffers(graph.inputs[1:])
        x = graph.inputs[0].tensor
        with pytest.raises(ValueError, match="hidden_states has 1 tensors.*2 local"):
            dispatcher.token_dispatch([x], [x, x], [x, x])
        with pytest.raises(ValueError, match="probs has 1 tensors.*2 local"):
            dispatcher.token_dispatch([x, x], [x], [x, x])
        with pytest.raises(TypeError, match="probs.*bfloat16.*float32"):
            dispatcher.token_dispatch([x, x], [x, x], [x, x])
        with pytest.raises(TypeError, match="hidden_states is one Tensor.*2 local"):
            dispatcher.token_dispatch(x, [x, x], [x, x])
        for early in (
            lambda: dispatcher.token_combine([x, x]),
            lambda: dispatcher.routing_map,
            lambda: dispatcher.n_gathered,
        ):
            with pytest.raises(ValueError, match="before token_dispatch; call that"):
                early()


def test_values_that_do_not_fit():
    """They are refused while the graph is built: kernels would read beyond them."""
    dispatcher = of_cpu(1)
    n_rows = dispatcher.global_tokens
    types = [
        TensorType(dtype, shape, CPU)
        for dtype, shape in (
            (BF16, ["t", HIDDEN]),
            (DType.float32, ["t", TOP_K]),
            (DType.int32, ["t", TOP_K]),
            (DType.int32, [n_rows - 1, TOP_K]),
            (DType.int32, ["t", TOP_K - 1]),
            (BF16, [n_rows, HIDDEN]),
            (BF16, [n_rows - 1, HIDDEN]),
        )
    ]
    n_given = len(types)
    types += dispatcher.input_types()
    with Graph("never_compiled", input_types=types) as graph:
        dispatcher.fetch_buffers(graph.inputs[n_given:])
        x, p, ids, others, fewer, rows, cut = (
            value.tensor for value in graph.inputs[:n_given]
        )
        with pytest.raises(TypeError, match="hidden_states.*float32.*bfloat16"):
            dispatcher.token_dispatch([p], [p], [ids])
        with pytest.raises(ValueError, match="routing_map"):
            dispatcher.token_dispatch([x], [p], [fewer])
        with pytest.raises(ValueError, match=f"routing_map has {n_rows - 1}"):
            dispatcher.token_dispatch([rows], [p], [others])
        dispatcher.token_dispatch([x], [p], [ids])
        with pytest.raises(ValueError, match=f"hidden_states.*{n_rows}"):
            dispatcher.token_combine([cut])
        dispatcher.token_combine([rows])
        # What was gathered is of the buffers before.
        dispatcher.fetch_buffers(graph.inputs[n_given:])
        for name in ("routing_map", "n_gathered"):
            with pytest.raises(ValueError, match="before token_dispatch; call that"):
                getattr(dispatcher, name)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(top_k=0), "top_k=0"),
        (dict(n_ranks=40), "40 ranks.*32"),
        (dict(dtype=DType.int8), "dtype"),
    ],
)
def test_bad_sizes(changes, words):
    with pytest.raises(ValueError, match=words):
        of_cpu(**(dict(n_ranks=2) | changes))


AS_FP8 = dict(
    dispatch_dtype=DType.float8_e4m3fn,
    dispatch_quant_config=blockwise_fp8_quant_config(),
    hidden_size=128,
)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(protocol="by_expert", combine_mode="rows"), "pass 'by_rank', 'sums'"),
        (dict(combine_mode="rows"), "'rows'.*'sums'"),
        (dict(n_experts=4), "n_experts=4.*pass 2"),
        (dict(top_k=1), "top_k=1.*pass 2"),
        (dict(router_top_k=0), "router_top_k=0.*1 or more"),
        (dict(fused_shared_expert=True), "fused_shared_expert=True.*False"),
        (dict(output_layout="padded"), "'padded'.*'packed'"),
        (AS_FP8, "float8_e4m3fn.*'by_rank', 'sums', and bfloat16 or float32"),
    ],
)
def test_configs_that_are_no_all_gather(changes, words):
    dispatcher = of_cpu(2)
    with pytest.raises(ValueError, match=words):
        replace(dispatcher.config, **changes)
