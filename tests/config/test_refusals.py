# SPDX-License-Identifier: Apache-2.0
"""Bad graphs are refused while they are built; nothing runs here."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np  # noqa: F401, for the tables
import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from max.nn.comm.ep import EPConfig as MaxConfig

from max_ep import *  # noqa: F403, for the tables
from max_ep import (
    EPBatchManager,
    EPCommInitializer,
    EPConfig,
    call_distributed_ep_combine,
    call_distributed_ep_dispatch,
)
from max_ep.graph.checks import refuse_if_in_turn
from tests.config.test_config import F16, TWO  # noqa: F401, for the tables
from tests.errors import arguments_of, raises, refused
from tests.harness import graph_of
from tests.oracle.cases import BF16, CASES, F32

CPU, GPU = DeviceRef.CPU(), DeviceRef.GPU(0)
SUMS = dataclasses.replace(TWO, protocol="by_rank", combine_mode="sums").config()
ROWS = TWO.max_rows
FP8 = dataclasses.replace(CASES["fp8"], n_ranks=1)  # hidden 256


def tensor(dtype: DType, *shape: int | str, device: DeviceRef = CPU) -> TensorType:
    return TensorType(dtype, list(shape), device)


def ids_of(*shape: int | str, device: DeviceRef = CPU) -> TensorType:
    return tensor(DType.int32, *shape, device=device)


GOOD_TYPES = dict(
    tokens=tensor(BF16, "t", 80),
    ids=ids_of("t", 3),
    weights=tensor(F32, "t", 3),
    rows=tensor(BF16, ROWS, 80),
)


@contextlib.contextmanager
def building(
    config: EPConfig | None = None, **types: TensorType
) -> Iterator[tuple[EPBatchManager, SimpleNamespace]]:
    """Starts a graph with the EP inputs and inputs of these types, by their names."""
    types = GOOD_TYPES | types
    manager = EPBatchManager(config or TWO.config())
    with graph_of(manager, "never_compiled", [*types.values()]) as (_, values):
        yield manager, SimpleNamespace(**dict(zip(types, values)))


class Calls:
    """What the tables below call: short names for a manager's steps."""

    def __init__(self, m: EPBatchManager, x: SimpleNamespace) -> None:
        self.m, self.x, self.c = m, x, m.config
        self.counter, self.to = m.atomic_counters[0][0], m._pointers(0)
        self.send_p, self.recv, self.counts = self.to
        self.info = ids_of(5, 2)
        self.all = [x.tokens] * 2, [x.ids] * 2, [0, 1]
        self.n = x.tokens.shape[0]
        # What `call_ep_combine_wait` takes.
        self.back = (self.counter, *m._pointers(1)[1:], m.config, self.n)

    def send(self, rank: int) -> None:
        weights = self.x.weights if self.c.combines_sums else None
        self.m.ep_dispatch_async(self.x.tokens, self.x.ids, rank, None, weights)

    def wait(self, rank: int) -> tuple:
        return self.m.ep_dispatch_wait(rank)

    def back_to(self, rank: int) -> None:
        self.m.ep_combine_async(self.x.rows, rank)

    def sum_up(self, rank: int) -> None:
        weights = None if self.c.combines_sums else self.x.weights
        self.m.ep_combine_wait(weights, rank)

    def sends(self) -> None:
        for rank in range(self.c.n_gpus_per_node):
            self.send(rank)

    def dispatch(self) -> list:
        self.sends()
        return [self.wait(rank) for rank in range(self.c.n_gpus_per_node)]

    def backs(self) -> None:
        for rank in range(2):
            self.back_to(rank)


def error_of(words: str) -> type[Exception]:
    """A `TypeError` for a wrong element type or kind, a `ValueError` for all else."""
    kinds = (
        r"(float|int)(16|32|64)|graph value|Tensor|BufferValue|tuple of|NoneType|uint8;"
    )
    return TypeError if re.search(kinds, words) else ValueError


def check_last(code: str, words: str, manager: EPBatchManager, x) -> None:
    """Runs some steps, of which the last one must be refused."""
    calls = Calls(manager, x)
    known = {n: getattr(calls, n) for n in dir(calls) if n[0] != "_"} | globals()
    *before, last = code.split("; ")
    for step in before:
        exec(step, known)
    with raises(error_of(words), words):
        exec(last, known)


@pytest.mark.parametrize(
    "changes, word, is_said",
    [
        (dict(n_sms=3), "n_sms=3", True),
        (dict(ranks_per_gpu=1), "shares_gpu", False),
        (dict(ranks_per_gpu=2), "shares_gpu", True),
    ],
)
def test_ops_get_what_the_config_says(changes, word, is_said):
    with building(dataclasses.replace(TWO.config(), **changes)) as (manager, x):
        calls = Calls(manager, x)
        calls.dispatch()
        calls.backs()
        for rank in range(2):
            calls.sum_up(rank)
        text = str(Graph.current)
    assert text.count("n_experts=") == 8
    assert text.count(word) == (8 if is_said else 0)


@pytest.mark.parametrize(
    "step", ["m.ep_dispatch_async(x.tokens, x.ids, 0)", "m.ep_dispatch_all(*all)"]
)
@refused("""
tokens=tensor(F32, "t", 80) | input_tokens; float32; bfloat16
tokens=tensor(BF16, "t", 64) | input_tokens; 64; 80
tokens=tensor(BF16, "t", 1, 80) | input_tokens; [t, 1, 80]; [any, 80]
tokens=tensor(BF16, "t", 80, device=GPU) | input_tokens; gpu:0; .to(DeviceRef.CPU())
tokens=tensor(BF16, 8, 80), ids=ids_of(8, 3) | 8 tokens; max_tokens_per_rank; 7
tokens=tensor(BF16, 4, 80), ids=ids_of(5, 3) | input_tokens; 4; topk_ids; 5
ids=tensor(DType.int64, "t", 3) | topk_ids; int64; int32; cast
ids=ids_of("t", 4) | topk_ids; [t, 4]; [any, 3]
ids=ids_of("t", 3, device=GPU) | topk_ids; gpu:0; cpu:0
""")
def test_dispatch_refuses(arguments, words, step):
    with building(**arguments_of(arguments, globals())) as (manager, x):
        check_last(step, words, manager, x)


@refused("""
scales=tensor(F32, 2) | [2]; [1]; [n_experts=5]
scales=tensor(F32, "n") | [n]; [1]; [n_experts=5]
scales=tensor(F32, 5, 1) | [5, 1]
scales=tensor(BF16, 5) | bfloat16; float32
config=TWO.config(fused_shared_expert=True) | fused_shared_expert; before
config=TWO.config(protocol="by_rank") | by_rank; by_expert
""")
def test_input_scales_that_do_not_fit(arguments, words):
    given = dict(scales=tensor(F32, 1)) | arguments_of(arguments, globals())
    with building(**given) as (manager, x):
        step = "m.ep_dispatch_async(x.tokens, x.ids, 0, x.scales)"
        check_last(step, f"input_scales; {words}", manager, x)


FOUR_TOKENS = dict(tokens=tensor(BF16, 4, 80), ids=ids_of(4, 3))


@pytest.mark.parametrize("form", ["split", "all"])
@refused("""
rows=tensor(F32, ROWS, 80) | input_tokens; float32; bfloat16
rows=tensor(BF16, ROWS, 40) | input_tokens; 40; 80
rows=tensor(BF16, 5, 80) | input_tokens; 5 rows; 42
rows=tensor(BF16, ROWS, 80, device=GPU) | input_tokens; gpu:0; cpu:0
weights=tensor(F16, "t", 3) | router_weights; float16; bfloat16 or DType.float32
weights=tensor(F32, "t", 2) | router_weights; [t, 2]; [any, 3]
weights=tensor(F32, "t", 3, device=GPU) | router_weights; gpu:0; cpu:0
weights=tensor(F32, 8, 3) | router_weights; 8 tokens; 7
**FOUR_TOKENS, weights=tensor(F32, 5, 3) | router_weights; 5; 4
""")
def test_combine_refuses(arguments, words, form):
    with building(**arguments_of(arguments, globals())) as (manager, x):
        calls = Calls(manager, x)
        calls.dispatch()
        with raises(error_of(words), words):
            if form == "all":
                manager.ep_combine_all([x.rows] * 2, [x.weights] * 2, [0, 1])
            calls.backs()
            calls.sum_up(0)


MORE_TYPES = dict(
    bad_pointers=tensor(DType.uint64, 3),
    bad_dtype=tensor(DType.int64, 2),
    five=ids_of(5, 2),
    words=ids_of(TWO.config().sizes().counters_words),
    scales=tensor(F32, 1),
    short=tensor(F32, "t", 2),
    narrow=tensor(BF16, "t", 3),
    flat=tensor(F32, "t", 80),
    cube=tensor(BF16, 3, 4, 80),
    blocks=tensor(BF16, 3, 13, 80),
)
EXPERT_FUSED = TWO.config(fused_shared_expert=True)
PADDED_ROWS = TWO.config(output_layout="padded")
PADDED_SUMS = dataclasses.replace(SUMS, output_layout="padded")

# A config, steps of which the last one is refused, and words of the error.
ORDERS = """
ROWS_OF | wait(1) | ep_dispatch_wait; device 1; ep_dispatch_async
ROWS_OF | send(0); wait(0) | ep_dispatch_wait on device 0; devices [1]; \
one after another; of every device first
ROWS_OF | sends(); wait(0); wait(0) | ep_dispatch_wait on device 0 without
ROWS_OF | sends(); wait(0); send(0) | ep_dispatch_async on device 0 again; \
ep_dispatch_wait on devices [1]; second EPBatchManager
ROWS_OF | back_to(0) | device 0; without a dispatch; ep_dispatch_wait
ROWS_OF | m.ep_combine_all([x.rows] * 2, [x.weights] * 2, [0, 1]) | device 0; \
without a dispatch
ROWS_OF | sends(); back_to(1) | device 1; without a dispatch
ROWS_OF | dispatch(); sum_up(0) | ep_combine_wait; ep_combine_async before
ROWS_OF | dispatch(); back_to(0); sum_up(0) | ep_combine_wait on device 0; devices [1]
SUMS | dispatch(); backs(); sends(); wait(0) | ep_dispatch_wait on device 0; \
ep_combine_wait first
SUMS | m.ep_dispatch_async(x.tokens, x.ids, 0) | dispatch; combine_mode='sums'; \
needs router weights
SUMS | m.ep_dispatch_all(*all) | dispatch; combine_mode='sums'; needs router weights
SUMS | m.ep_dispatch_async(x.tokens, x.ids, 0, router_weight=x.short) | \
router_weights; [t, 2]; [any, 3]
SUMS | m.ep_dispatch_all(*all, [x.weights] * 2) | input_scales; router_weights; by name
SUMS | m.ep_dispatch_all(*all, router_weights=[x.weights]) | router_weights; \
1 tensor; 2 local ranks
SUMS | m.ep_dispatch_all(*all, router_weights=[x.narrow] * 2); backs(); \
m.ep_combine_wait(x.weights, 0) | combine; combine_mode='sums'; \
takes no router weights; dispatch takes them
ROWS_OF | m.ep_dispatch_async(x.tokens, x.ids, 0, router_weight=x.weights) | \
dispatch; combine_mode='rows'; takes no router weights; combine takes them
ROWS_OF | dispatch(); m.ep_combine_all([x.rows] * 2, None, [0, 1]) | combine; 'rows'; \
needs router weights
SUMS | call_ep_combine_wait(*back, None, None) | input_tokens; NoneType; graph value
SUMS | call_ep_combine_wait(*back, None, x.cube) | input_tokens; [3, 4, 80]; [any, 80]
PADDED_SUMS | call_ep_combine_wait(*back, None, x.cube) | input_tokens; [3, 4, 80]; \
[3, 14, 80]
EXPERT_FUSED | call_ep_combine_wait(*back, x.weights, x.flat) | input_tokens; float32; \
bfloat16
ROWS_OF | m.ep_dispatch_async(np.zeros((4, 80)), x.ids, 0) | input_tokens; ndarray; \
graph value
ROWS_OF | m.ep_dispatch_async(x.tokens, x.weights, 0) | topk_ids; float32; \
ids of the experts; weights where they belong
ROWS_OF | m.ep_dispatch_async(x.tokens, [[0, 1, 2]], 0) | topk_ids; list; graph value
ROWS_OF | send(2) | device_id=2; [0, n_gpus_per_node=2)
ROWS_OF | wait(-1) | device_id=-1
ROWS_OF | m.ep_dispatch_all(*all[:2], [0]) | device_ids=[0]; all 2 ranks
ROWS_OF | m.ep_dispatch_all(*all[:2], [0, 0]) | device_ids=[0, 0]; all 2 ranks
ROWS_OF | m.ep_dispatch_all(all[0], [x.ids], [0, 1]) | topk_ids; 1 tensor; \
2 local ranks
ROWS_OF | m.ep_dispatch_all(*all, [x.scales]) | input_scales; 1 tensor; 2 local ranks
ROWS_OF | m.ep_dispatch_all(x.tokens, *all[1:]) | input_tokens; one TensorValue; \
pass a list
ROWS_OF | m.ep_received(dispatch()[0][0]) | TensorValue; tuple of a rank
ROWS_OF | m.ep_received(dispatch()) | is a list; tuple of a rank; ep_dispatch_all
ROWS_OF | m.ep_received(()) | tuple of a rank; ep_dispatch_all
ROWS_OF | m.ep_received(dispatch()[0][:1]) | tuple of a rank; ep_dispatch_all
ROWS_OF | m.fetch_buffers(None) | fetch_buffers; NoneType; graph inputs
ROWS_OF | softmax_top_k(None, 2) | logits; NoneType; graph value
ROWS_OF | balance_ids(None, None) | topk_ids; NoneType; graph value
ROWS_OF | m.ep_dispatch(x.tokens, x.ids, 0) | ep_dispatch_all; ep_dispatch_async; \
one after another; n_gpus_per_node=2; n_nodes=2
ROWS_OF | dispatch(); m.ep_combine(x.rows, x.weights, 0) | ep_combine_all; \
ep_combine_async; one after another; n_gpus_per_node=2; n_nodes=2
ROWS_OF | call_ep_dispatch(x.tokens, x.ids, counter, *to, c) | call_ep_dispatch_async; \
one after another; n_gpus_per_node=2; n_nodes=2
ROWS_OF | dispatch(); \
call_ep_combine(x.rows, m._src_info[0], counter, *to, c, n, x.weights) | \
call_ep_combine_async; one after another; n_gpus_per_node=2; n_nodes=2
ROWS_OF | call_ep_dispatch_async(x.tokens, x.ids, x.words, *to, c) | atomic_counter; \
TensorValue; BufferValue
ROWS_OF | call_ep_dispatch_async(x.tokens, x.ids, counter, send_p, x.bad_pointers, \
counts, c) | recv_buf_ptrs; [3]; [2]
ROWS_OF | call_ep_dispatch_wait(counter, recv, x.bad_dtype, c) | recv_count_ptrs; \
int64; uint64
ROWS_OF | call_ep_dispatch_wait(counter, recv, counts, c, num_tokens=n) | num_tokens; \
all-reduce
ROWS_OF | call_ep_combine_async(x.rows, x.five, counter, *to, c) | src_info; 5; 42
ROWS_OF | call_distributed_ep_combine([x.rows] * 2, [x.five] * 2, \
m.atomic_counters[0], x.bad_pointers, recv, counts, c, [n] * 2, [x.weights] * 2) | \
send_buf_ptrs; [3]; [2]
ROWS_OF | call_ep_combine_wait(counter, recv, counts, c, n, x.ids, x.rows) | \
router_weights; int32; float32
PADDED_ROWS | dispatch(); back_to(0) | input_tokens; [42, 80]; [3, 14, 80]
PADDED_ROWS | dispatch(); m.ep_combine_async(x.blocks, 0) | [3, 13, 80]; [3, 14, 80]
"""
ROWS_OF = TWO.config()
_ORDERS = [line.split(" | ", 2) for line in ORDERS.strip().splitlines()]


@pytest.mark.parametrize("config, steps, words", _ORDERS)
def test_what_must_not_be_called(config, steps, words):
    with building(globals()[config], **MORE_TYPES) as (manager, x):
        check_last(steps, words, manager, x)


def test_fp8_is_made_of_bfloat16_and_float32_and_not_combined_as_it_is():
    """A cast would do for other dtypes; here it would leave the scales out."""
    for dtype in (BF16, F32, DType.uint8):
        given = dict(tokens=tensor(dtype, "t", 256), ids=ids_of("t", FP8.top_k))
        with building(FP8.config(), **given) as (manager, x):
            if dtype == DType.uint8:
                with raises(TypeError, "input_tokens; uint8; bfloat16; float32"):
                    manager.ep_dispatch(x.tokens, x.ids, 0)
                continue
            rows, *_ = manager.ep_dispatch(x.tokens, x.ids, 0)
            with raises(TypeError, "uint8; FP8; max_ep.dequantize; scales"):
                manager.ep_combine_async(rows, 0)


@pytest.mark.parametrize("made", [EPBatchManager, EPCommInitializer])
def test_what_is_no_config(made):
    """Such as MAX's own, if one of two imports was left as it was."""
    with raises(
        TypeError, f"{made.__name__} takes a max_ep.EPConfig; a max.nn.comm.ep"
    ):
        made(MaxConfig.__new__(MaxConfig))
    with raises(TypeError, "takes a max_ep.EPConfig; NoneType"):
        made(None)


def test_manager_before_fetch_buffers():
    manager = EPBatchManager(TWO.config())
    with building() as (_, x):
        for call in (
            lambda: manager.ep_dispatch_async(x.tokens, x.ids, 0),
            lambda: manager.ep_dispatch_wait(0),
            lambda: manager.ep_dispatch_all([x.tokens] * 2, [x.ids] * 2, [0, 1]),
            lambda: manager.ep_combine_async(x.rows, 0),
            lambda: manager.ep_combine_wait(x.weights, 0),
        ):
            with raises(ValueError, "input_types(); fetch_buffers()"):
                call()


def test_buffers_of_another_group():
    """Buffers are of the declared number, order and group."""
    three = EPBatchManager(CASES["uneven_7_on_3"].config())
    with building() as (manager, x):
        mine = list(Graph.current.inputs)[len(GOOD_TYPES) :]
        assert len(mine) == len(manager.input_types()) == 10
        for values in (mine[:-1], [*mine, mine[-1]], list(Graph.current.inputs)):
            with raises(ValueError, f"{len(values)} values; declares 10"):
                manager.fetch_buffers(values)
        with raises(TypeError, "EP input 0; BufferValue; in the order"):
            manager.fetch_buffers(mine[::-1])
        with raises(ValueError, "10 values; declares 12"):
            three.fetch_buffers(mine)
        # The same number of ranks, but other experts.
        other = EPBatchManager(CASES["top_32"].config())
        other.fetch_buffers(mine)
        n, m = (m.config.sizes().counters_words for m in (manager, other))
        with raises(ValueError, f"atomic_counter; [{n}]; [{m}]"):
            other.ep_dispatch_async(x.tokens, x.ids, 0)


@pytest.mark.parametrize("in_turn", [True, False])
def test_distributed_builders_add_all_ranks(in_turn):
    """Ranks that run in turn all send before one waits; others have fused ops."""
    config = TWO.config() if in_turn else TWO.config(n_gpus_per_node=1, n_nodes=2)
    with building(config) as (m, x):
        counters, n = m.atomic_counters[0], config.n_gpus_per_node
        given = [x.tokens] * n, [x.ids] * n, counters
        outputs = call_distributed_ep_dispatch(*given, *m._pointers(0), config)
        rows, *_, source = map(list, zip(*outputs))
        sums = [x.tokens.shape[0]] * n, [x.weights] * n
        where = *m._pointers(1), config
        results = call_distributed_ep_combine(rows, source, counters, *where, *sums)
        added = re.findall(r'op = "(\w+)"', str(Graph.current))
    assert [list(y.shape) for y in results] == [list(x.tokens.shape)] * n
    forms = ["async"] * 2 + ["wait"] * 2
    split = [f"{phase}_{form}" for phase in ("dispatch", "combine") for form in forms]
    assert added == (split if in_turn else ["dispatch", "combine"])


def test_a_second_graph_starts_anew():
    """What was built in one graph does not count in the next."""
    with building() as (manager, x):
        Calls(manager, x).dispatch()
    # Its buffers can be read while no graph is being built.
    assert len(manager.recv_buf_ptrs) == 2
    declared = [*GOOD_TYPES.values(), *manager.input_types()]
    with Graph("second", input_types=declared) as graph:
        tokens, ids, weights, rows = (value.tensor for value in graph.inputs[:4])
        with raises(ValueError, "another graph; 'second'; fetch_buffers()"):
            manager.ep_dispatch_all([tokens] * 2, [ids] * 2, [0, 1])
        manager.fetch_buffers(graph.inputs[len(GOOD_TYPES) :])
        with raises(ValueError, "without a dispatch"):
            manager.ep_combine_async(rows, 0)
        with raises(ValueError, "without ep_combine_async"):
            manager.ep_combine_wait(weights, 0)
        for rank in range(2):
            manager.ep_dispatch_async(tokens, ids, rank)


def test_fused_forms_of_ranks_in_turn_name_the_form_to_use():
    refuse_if_in_turn(TWO.config(target="gpu"), "dispatch")
    config = TWO.config(target="gpu", ranks_per_gpu=2)
    words = "ep_dispatch_all; ep_dispatch_async (or call_ep; ranks_per_gpu=2; ranks_p"
    with raises(ValueError, f"{words}er_gpu=1"):
        refuse_if_in_turn(config, "dispatch")
