# SPDX-License-Identifier: Apache-2.0
"""`AllGatherTokenDispatcher`: tokens to everybody, experts on all, sums back."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from max.driver import Accelerator
from max.dtype import DType
from max.graph import DeviceRef, Module, TensorType

from max_ep import AllGatherTokenDispatcher, blockwise_fp8_quant_config
from tests.cpu import gathering
from tests.errors import raises, refused
from tests.harness import graph_of, to_numpy
from tests.oracle.cases import Case
from tests.oracle.drawn import make_inputs

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


def of_cpu(n_ranks: int, **changes: object) -> AllGatherTokenDispatcher:
    sizes = dict(top_k=TOP_K, max_tokens_per_rank=TOKENS) | changes
    where = dict(n_gpus_per_node=n_ranks, target="cpu")
    return AllGatherTokenDispatcher(HIDDEN, **(sizes | where))


def dispatcher_at(place: str) -> AllGatherTokenDispatcher:
    return AllGatherTokenDispatcher(HIDDEN, TOP_K, TOKENS, **PLACES[place])


def add_graphs(module: Module) -> None:
    gathering.add_layer("gather_cpu", dispatcher_at("cpu"), module)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(place, id=place, marks=[pytest.mark.gpu(n_gpus)] if n_gpus else [])
        for place, n_gpus in _N_GPUS.items()
    ],
)
def layer(request) -> Iterator[SimpleNamespace]:
    place = request.param
    dispatcher, is_cpu = dispatcher_at(place), place == "cpu"
    session = request.getfixturevalue("session" if is_cpu else "gpu_session")
    if is_cpu:
        model = request.getfixturevalue("one_module").models["gather_cpu"]
    else:
        model = session.load(gathering.add_layer(f"gather_{place}", dispatcher))
    with dispatcher.initializer() as comm:
        comm.ep_init(session)
        yield SimpleNamespace(model=model, comm=comm, dispatcher=dispatcher)


COUNTS = [[TOKENS] * 4, [2, 5, 1, 4], [0, TOKENS, 3, 0], [0, 0, 0, 0]]
"""Tokens of each rank, of as many as there are."""


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_everything_is_gathered_and_added_up(layer, counts):
    """Twice, for what the first run left must not matter."""
    config = layer.dispatcher.config
    n, is_cpu = config.n_ranks, config.target == "cpu"
    assert layer.dispatcher.global_tokens == n * TOKENS
    for seed in (1, 2):
        case = Case(f"gather/{seed}", n, N_EXPERTS, TOP_K, HIDDEN, TOKENS)
        given, inputs = make_inputs(case, "masked", counts=counts[:n]), []
        for rank in range(n):
            gpu = None if is_cpu else Accelerator(config.device(rank).id)
            inputs += gathering.inputs_of(given, rank, gpu)
        outputs = layer.model.execute(*inputs, *layer.comm.model_inputs())
        layer.comm.check()
        arrays = list(map(to_numpy, outputs))
        for rank in range(n):
            gathering.check(f"rank {rank}, {seed}", arrays[rank::n], given, rank)


# In a group of one rank or of two; what each call must not be given.
CALLS = """
two.token_dispatch([x], [x, x], [x, x]) | hidden_states has 1 tensor; 2 local
two.token_dispatch([x, x], [x], [x, x]) | probs has 1 tensor; 2 local
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
    with graph_of(dispatcher, "never_compiled", [*given.values()]) as (graph, values):
        x = dict(zip(given, values))
        if of in ("sent", "again"):
            dispatcher.token_dispatch([x["x"]], [x["p"]], [x["ids"]])
        if of == "again":
            dispatcher.token_combine([x["rows"]])
            dispatcher.fetch_buffers(graph.inputs[len(given) :])
        with raises((TypeError, ValueError), words):
            eval(arguments, x | {of: dispatcher})


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
changed(router_top_k=-1) | router_top_k=-1
changed(fused_shared_expert=True) | fused_shared_expert=True; False
changed(output_layout="padded") | 'padded'; 'packed'
changed(**AS_FP8) | is_quantized=True; pass False
""")
def test_configs_that_are_no_all_gather(arguments, words):
    changed = functools.partial(replace, of_cpu(2).config)
    with raises(ValueError, words):
        eval(arguments, globals(), dict(changed=changed))
