# SPDX-License-Identifier: Apache-2.0
"""`AllGatherTokenDispatcher`: tokens to everybody, experts on all, sums back."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from errors import raises, refused
from harness import to_buffer, to_numpy
from max.driver import Accelerator
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType, ops

from max_ep import (
    AllGatherTokenDispatcher,
    EPCommInitializer,
    blockwise_fp8_quant_config,
)
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


def add_graphs(module: Module) -> AllGatherTokenDispatcher:
    return add_layer("cpu", module)[0]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(place, id=place, marks=[pytest.mark.gpu(n_gpus)] if n_gpus else [])
        for place, n_gpus in _N_GPUS.items()
    ],
)
def layer(request) -> Iterator[SimpleNamespace]:
    place = request.param
    session = request.getfixturevalue("gpu_session" if _N_GPUS[place] else "session")
    if place == "cpu":
        one_module = request.getfixturevalue("one_module")
        dispatcher = one_module.added[__name__]
        model = one_module.models["gather_cpu"]
    else:
        dispatcher, graph = add_layer(place)
        model = session.load(graph)
    config = dispatcher.config
    comm = dispatcher.initializer()
    comm.ep_init(session)
    ranks, is_cpu = range(config.n_ranks), config.target == "cpu"
    gpus = [None if is_cpu else Accelerator(config.device(r).id) for r in ranks]
    n_ranks = config.n_ranks
    made = dict(model=model, comm=comm, dispatcher=dispatcher, n_ranks=n_ranks)
    yield SimpleNamespace(**made, devices=gpus)
    comm.close()


def run(layer: SimpleNamespace, counts: list[int], seed: int) -> SimpleNamespace:
    rng = np.random.default_rng(seed)
    given = SimpleNamespace(tokens=[], probs=[], ids=[])
    inputs = []
    n_ranks = layer.n_ranks
    for n, device in zip(counts, layer.devices):
        x = float32_to_bfloat16(rng.normal(size=(n, HIDDEN)).astype(np.float32))
        p = rng.random((n, TOP_K)).astype(np.float32)
        ids = rng.permuted(
            np.tile(np.arange(N_EXPERTS, dtype=np.int32), (n, 1)), axis=1
        )
        ids = ids[:, :TOP_K]
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
def test_a_layer_is_the_dense_one(layer, counts):
    """Everything is gathered in rank order, and results are those of torch on one rank.
    Twice, for what the first run left must not matter."""
    counts = counts[: layer.n_ranks]
    n_all, total = sum(counts), layer.n_ranks * TOKENS
    assert layer.dispatcher.global_tokens == total
    for seed in (1, 2):
        ran = run(layer, counts, seed)
        for rank, n in enumerate(counts):
            for got, want, width, none in (
                (ran.tokens[rank], ran.given.tokens, HIDDEN, None),
                (ran.probs[rank], ran.given.probs, TOP_K, 0),
                (ran.ids[rank], ran.given.ids, TOP_K, -1),
            ):
                assert got.shape == (total, width)
                np.testing.assert_array_equal(got[:n_all], np.concatenate(want))
                assert none is None or (got[n_all:] == none).all()
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


# In a group of one rank or of two; what each call must not be given.
CALLS = """
two.token_dispatch([x], [x, x], [x, x]) | hidden_states has 1 tensors; 2 local
two.token_dispatch([x, x], [x], [x, x]) | probs has 1 tensors; 2 local
two.token_dispatch([x, x], [x, x], [x, x]) | probs; bfloat16; float32
two.token_dispatch(x, [x, x], [x, x]) | hidden_states is one Tensor; 2 local
two.token_combine([x, x]) | before token_dispatch; call that
two.routing_map | before token_dispatch; call that
two.n_gathered | before token_dispatch; call that
one.token_dispatch([p], [p], [ids]) | hidden_states; float32; bfloat16
one.token_dispatch([x], [p], [fewer]) | routing_map
one.token_dispatch([rows], [p], [others]) | routing_map has 5
sent.token_combine([rows[:5]]) | hidden_states; 6
again.routing_map | before token_dispatch; call that
again.n_gathered | before token_dispatch; call that
"""


@refused(CALLS)
def test_what_does_not_fit_is_refused(arguments, words):
    """While the graph is built: kernels would read beyond it. `sent` has dispatched;
    `again` has other buffers since."""
    of, n_ranks = arguments.partition(".")[0], 2 if arguments[:3] == "two" else 1
    dispatcher = of_cpu(n_ranks)
    given = dict(
        x=TensorType(BF16, ["t", HIDDEN], CPU),
        p=TensorType(DType.float32, ["t", TOP_K], CPU),
        ids=TensorType(DType.int32, ["t", TOP_K], CPU),
        others=TensorType(DType.int32, [TOKENS - 1, TOP_K], CPU),
        fewer=TensorType(DType.int32, ["t", TOP_K - 1], CPU),
        rows=TensorType(BF16, [TOKENS, HIDDEN], CPU),
    )
    types = [*given.values(), *dispatcher.input_types()]
    with Graph("never_compiled", input_types=types) as graph:
        dispatcher.fetch_buffers(graph.inputs[len(given) :])
        x = {name: v.tensor for name, v in zip(given, graph.inputs)}
        if of in ("sent", "again"):
            dispatcher.token_dispatch([x["x"]], [x["p"]], [x["ids"]])
        if of == "again":
            dispatcher.token_combine([x["rows"]])
            dispatcher.fetch_buffers(graph.inputs[len(given) :])
        with raises((TypeError, ValueError), words):
            eval(arguments, x | {of: dispatcher})


def test_processes_agree_on_top_k():
    """Fails if what the router chose is not compared: it would be read by another
    stride."""
    configs = [of_cpu(1, n_nodes=2, node_id=0, top_k=k).config for k in (5, 6)]
    assert len({EPCommInitializer(c)._fingerprint() for c in configs}) == 2


AS_FP8 = dict(
    dispatch_dtype=DType.float8_e4m3fn,
    dispatch_quant_config=blockwise_fp8_quant_config(),
    hidden_size=128,
)


@refused("""
of_cpu(2, top_k=0) | top_k=0
of_cpu(40) | 40 ranks; 32
of_cpu(2, dtype=DType.int8) | dtype
changed(protocol="by_expert", combine_mode="rows") | protocol='by_expert'; 'by_rank'
changed(combine_mode="rows") | 'rows'; 'sums'
changed(n_experts=4) | n_experts=4; pass 2
changed(top_k=1) | top_k=1; pass 2
changed(router_top_k=0) | router_top_k=0; 1 or more
changed(fused_shared_expert=True) | fused_shared_expert=True; False
changed(output_layout="padded") | 'padded'; 'packed'
changed(**AS_FP8) | is_quantized=True; pass False
""")
def test_configs_that_are_no_all_gather(arguments, words):
    changed = functools.partial(replace, of_cpu(2).config)
    with raises(ValueError, words):
        eval(arguments, globals(), dict(changed=changed))
