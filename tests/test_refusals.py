# SPDX-License-Identifier: Apache-2.0
"""Bad configurations and graphs are refused while they are made; nothing runs here."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from cases import BF16, CASES, F32
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from max.nn.quant_config import QuantFormat

from max_ep import (
    EPBatchManager,
    blockwise_fp8_quant_config,
    call_distributed_ep_combine,
    call_ep_combine,
    call_ep_combine_async,
    call_ep_combine_wait,
    call_ep_dispatch,
    call_ep_dispatch_async,
    call_ep_dispatch_wait,
)
from max_ep.graph.checks import refuse_if_in_turn

CPU, GPU = DeviceRef.CPU(), DeviceRef.GPU(0)
TWO = CASES["two_ranks"]  # 5 experts, top_k 3, hidden 80, 7 tokens, bfloat16
SUMS_TWO = dataclasses.replace(TWO, protocol="by_rank", combine_mode="sums")
SUMS = SUMS_TWO.config()
ROWS = TWO.max_rows
FP8 = dataclasses.replace(CASES["fp8"], n_ranks=1)  # hidden 256


@contextlib.contextmanager
def raises(error: type[Exception], words: str) -> Iterator[pytest.ExceptionInfo]:
    """Expects an error whose text has all the words; `; ` stands between them."""
    with pytest.raises(error) as caught:
        yield caught
    text = str(caught.value)
    missing = [word for word in words.split("; ") if word not in text]
    assert not missing, f"the error does not say {missing}; it says: {text}"


# --------------------------------------------------------------------- EPConfig


def refused(table: str) -> pytest.MarkDecorator:
    """Runs a test with each line of a table: arguments, `|`, words of the error."""
    rows = [line.rsplit(" | ", 1) for line in table.strip().splitlines()]
    return pytest.mark.parametrize("arguments, words", rows)


def arguments_of(text: str) -> dict:
    return eval(f"dict({text})", globals())


INT8, F16, FP8_E4M3 = DType.int8, DType.float16, DType.float8_e4m3fn
QUANT = blockwise_fp8_quant_config()
NVFP4 = dataclasses.replace(QUANT, format=QuantFormat.NVFP4)


NARROW_BLOCKS, BF16_SCALES = (
    dataclasses.replace(
        QUANT, input_scale=dataclasses.replace(QUANT.input_scale, **changes)
    )
    for changes in (dict(block_size=(1, 64)), dict(dtype=BF16))
)


# The last five are fields of MAX's EPConfig that ask for what there is not.
BAD_CONFIGS = """
hidden_size=81 | 81; 162 bytes; multiple of 16
hidden_size=4, dispatch_dtype=F32 | hidden_size=4; combine_dtype; multiple of 8
hidden_size=0 | hidden_size=0; >= 1
hidden_size=80.0 | hidden_size=80.0; integer
max_tokens_per_rank=np.int64(7) | max_tokens_per_rank=; Python's type int, not int64
top_k=33, n_experts=64 | top_k=33; 32
top_k=6 | top_k=6; n_experts=5
top_k=0 | top_k=0; >= 1
n_experts=0 | n_experts=0
max_tokens_per_rank=-1 | max_tokens_per_rank=-1
n_gpus_per_node=129 | 129; 128
n_nodes=0 | n_nodes=0
node_id=1 | node_id=1; n_nodes=1
node_id="0" | node_id='0'; integer
timeout_s=0 | timeout_s=0; above 0
timeout_s="5" | timeout_s='5'; number of seconds
target="tpu" | 'tpu'; 'cpu'; 'gpu'
protocol="by_node" | 'by_node'; 'auto'; 'by_rank'; 'by_expert'
protocol="by_rank", target="gpu", n_nodes=2 | target='gpu'; n_nodes=2; by_expert
combine_mode="tokens" | 'tokens'; 'rows'; 'sums'
combine_mode="sums" | combine_mode='sums'; protocol='by_expert'; 'by_rank'
**AS_SUMS, partial_dtype=F16 | partial_dtype; float16; bfloat16 or float32
partial_dtype=F32 | partial_dtype=DType.float32; combine_mode='rows'; leave it out
**PARTIALS_OF_84 | hidden_size=84; partial_dtype; 168 bytes; multiple of 8
n_sms=-1 | n_sms=-1; >= 0
combine_dtype=F16 | combine_dtype; float16; bfloat16 or float32
dispatch_dtype=INT8 | dispatch_dtype; int8; bfloat16; float32; float8_e4m3fn
dispatch_dtype="bfloat16" | dispatch_dtype='bfloat16'; str; DType.bfloat16
dispatch_dtype=FP8_E4M3 | dispatch_quant_config; blockwise_fp8_quant_config()
dispatch_quant_config=QUANT | dispatch_quant_config; bfloat16; pass None
output_layout="ragged" | 'ragged'; 'packed'; 'padded'
**PADDED, fused_shared_expert=True | fused_shared_expert; output_layout='packed'; add it
**OF_FP8, hidden_size=80 | hidden_size=80; 128; FP8; pad
**OF_FP8, hidden_size=192 | hidden_size=192; 128; FP8; pad
**OF_FP8, hidden_size=8 | hidden_size=8; 128; FP8; pad
**OF_FP8 | dict(dispatch_quant_config=NVFP4) | NVFP4; BLOCKSCALED_FP8
**OF_FP8 | dict(dispatch_quant_config=NARROW_BLOCKS) | (1, 64); (1, 128)
**OF_FP8 | dict(dispatch_quant_config=BF16_SCALES) | bfloat16; float32
nvfp4_dyn_global_scales=True | nvfp4_dyn_global_scales
fuse_ffn_combine_send=True | fuse_ffn_combine_send
fused_moe_ready=True | fused_moe_ready
use_allreduce=True | use_allreduce; all-reduce
eplb_enabled=True | eplb_enabled; load balancing
"""
PADDED = dict(output_layout="padded")
AS_SUMS = dict(combine_mode="sums", protocol="auto")
OF_FP8 = dict(dispatch_dtype=FP8_E4M3, dispatch_quant_config=QUANT)
OF_F32 = dict(dispatch_dtype=F32, combine_dtype=F32)
PARTIALS_OF_84 = AS_SUMS | OF_F32 | dict(hidden_size=84, partial_dtype=BF16)


@refused(BAD_CONFIGS)
def test_config_refuses(arguments, words):
    """`TWO`'s configuration, with what is changed in it."""
    with raises(ValueError, words):
        TWO.config(**arguments_of(arguments))


@refused("""
n_experts=65535, protocol="by_rank" | 65535; by_expert
max_tokens_per_rank=65535, protocol="by_rank" | 65535; by_expert
n_experts=3840, target="gpu" | 2 GPU ranks; 3840
""")
def test_largest_sizes(arguments, words):
    """What an entry can hold, and the experts that a block can count."""
    most = arguments_of(arguments)
    TWO.config(**most)
    field, n = next(iter(most.items()))
    with raises(ValueError, f"{field}={n + 1}; {words}"):
        TWO.config(**(most | {field: n + 1}))


def test_auto_is_by_rank_where_that_works(monkeypatch):
    for changes, protocol in (
        (dict(combine_mode="sums"), "by_rank"),
        ({}, "by_rank"),
        (dict(target="gpu", n_nodes=2), "by_expert"),
        (dict(max_tokens_per_rank=65536), "by_expert"),
    ):
        assert TWO.config(protocol="auto", **changes).protocol == protocol
    monkeypatch.setattr("max_ep.config.accelerator_api", lambda: "hip")
    assert TWO.config(protocol="auto", target="gpu").protocol == "by_expert"
    assert TWO.config(protocol="auto").protocol == "by_rank"
    with raises(ValueError, "by_rank; AMD; by_expert"):
        TWO.config(protocol="by_rank", target="gpu")


# --------------------------------------------------------- while a graph is built


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
def building(config=None, name="never_compiled", module=None, **types):
    """Starts a graph with the EP inputs and inputs of these types, by their names."""
    types = GOOD_TYPES | types
    manager = EPBatchManager(config or TWO.config())
    declared = [*types.values(), *manager.input_types()]
    with Graph(name, input_types=declared, module=module) as graph:
        manager.fetch_buffers(graph.inputs[len(types) :])
        values = [value.tensor for value in graph.inputs[: len(types)]]
        yield manager, SimpleNamespace(**dict(zip(types, values)))


def send_all(manager: EPBatchManager, x: SimpleNamespace) -> None:
    weights = x.weights if manager.config.combines_sums else None
    for rank in range(manager.config.n_gpus_per_node):
        manager.ep_dispatch_async(x.tokens, x.ids, rank, None, weights)


def dispatch_all(manager: EPBatchManager, x: SimpleNamespace) -> list:
    send_all(manager, x)
    n = manager.config.n_gpus_per_node
    return [manager.ep_dispatch_wait(rank) for rank in range(n)]


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
        dispatch_all(manager, x)
        for rank in range(2):
            manager.ep_combine_async(x.rows, rank)
        for rank in range(2):
            manager.ep_combine_wait(x.weights, rank)
        text = str(Graph.current)
    assert text.count("n_experts=") == 8
    assert text.count(word) == (8 if is_said else 0)


BAD_DISPATCH = """
tokens=tensor(F32, "t", 80) | input_tokens; float32; bfloat16
tokens=tensor(BF16, "t", 64) | input_tokens; 64; 80
tokens=tensor(BF16, "t", 1, 80) | input_tokens; [t, 1, 80]; [any, 80]
tokens=tensor(BF16, "t", 80, device=GPU) | input_tokens; gpu:0; .to(DeviceRef.CPU())
tokens=tensor(BF16, 8, 80), ids=ids_of(8, 3) | 8 tokens; max_tokens_per_rank; 7
tokens=tensor(BF16, 4, 80), ids=ids_of(5, 3) | input_tokens; 4; topk_ids; 5
ids=tensor(DType.int64, "t", 3) | topk_ids; int64; int32; cast
ids=ids_of("t", 4) | topk_ids; [t, 4]; [any, 3]
ids=ids_of("t", 3, device=GPU) | topk_ids; gpu:0; cpu:0
"""


def error_of(words: str) -> type[Exception]:
    """A `TypeError` for a wrong element type, a `ValueError` for all else."""
    return TypeError if re.search(r"(float|int)(16|32|64)", words) else ValueError


@pytest.mark.parametrize("form", ["async", "all"])
@refused(BAD_DISPATCH)
def test_dispatch_refuses(arguments, words, form):
    with building(**arguments_of(arguments)) as (manager, x):
        with raises(error_of(words), words):
            if form == "async":
                manager.ep_dispatch_async(x.tokens, x.ids, 0)
            else:
                manager.ep_dispatch_all([x.tokens] * 2, [x.ids] * 2, [0, 1])


def test_fp8_rows_are_not_combined_as_they_are():
    """A cast would do for other dtypes; here it would leave the scales out."""
    types = dict(tokens=tensor(BF16, "t", 256), ids=ids_of("t", FP8.top_k))
    with building(FP8.config(), **types) as (manager, x):
        rows, *_ = manager.ep_dispatch(x.tokens, x.ids, 0)
        with raises(TypeError, "uint8; FP8; dequantize_blockwise_fp8; scales"):
            manager.ep_combine_async(rows, 0)


def test_fp8_dispatch_takes_bfloat16_and_float32_only():
    for dtype in (BF16, F32):
        with building(FP8.config(), tokens=tensor(dtype, "t", 256)) as (m, x):
            m.ep_dispatch_async(x.tokens, x.ids, 0)
    tokens = tensor(DType.uint8, "t", 256)
    with building(FP8.config(), tokens=tokens) as (manager, x):
        with raises(TypeError, "input_tokens; uint8; bfloat16; float32"):
            manager.ep_dispatch_async(x.tokens, x.ids, 0)


@refused("""
scales=tensor(F32, 2) | [2]; [1]; [n_experts=5]
scales=tensor(F32, "n") | [n]; [1]; [n_experts=5]
scales=tensor(F32, 5, 1) | [5, 1]
scales=tensor(BF16, 5) | bfloat16; float32
config=TWO.config(fused_shared_expert=True) | fused_shared_expert; before
config=TWO.config(protocol="by_rank") | by_rank; by_expert
""")
def test_input_scales_that_do_not_fit(arguments, words):
    given = dict(scales=tensor(F32, 1)) | arguments_of(arguments)
    with building(**given) as (manager, x):
        with raises(error_of(words), f"input_scales; {words}"):
            manager.ep_dispatch_async(x.tokens, x.ids, 0, x.scales)


def test_router_weights_are_given_once():
    """To dispatch if combine returns sums, to combine otherwise."""
    bad = dict(short=tensor(F32, "t", 2), narrow=tensor(BF16, "t", 3))
    with building(SUMS, **bad) as (manager, x):
        all_ranks = [x.tokens] * 2, [x.ids] * 2, [0, 1]
        words = "dispatch; combine_mode='sums'; needs router weights"
        with raises(ValueError, words):
            manager.ep_dispatch_async(x.tokens, x.ids, 0)
        with raises(ValueError, words):
            manager.ep_dispatch_all(*all_ranks)
        with raises(ValueError, "router_weights; [t, 2]; [any, 3]"):
            manager.ep_dispatch_async(x.tokens, x.ids, 0, router_weight=x.short)
        with raises(ValueError, "input_scales; router_weights; by name"):
            manager.ep_dispatch_all(*all_ranks, [x.weights] * 2)
        with raises(ValueError, "router_weights; 1 tensors; 2 local ranks"):
            manager.ep_dispatch_all(*all_ranks, router_weights=[x.weights])
        manager.ep_dispatch_all(*all_ranks, router_weights=[x.narrow] * 2)
        words = "combine; combine_mode='sums'; takes no router weights"
        with raises(ValueError, f"{words}; dispatch takes them"):
            for rank in range(2):
                manager.ep_combine_async(x.rows, rank)
            manager.ep_combine_wait(x.weights, 0)
    with building() as (manager, x):
        words = "dispatch; combine_mode='rows'; takes no router weights"
        with raises(ValueError, f"{words}; combine takes them"):
            manager.ep_dispatch_async(x.tokens, x.ids, 0, router_weight=x.weights)
        dispatch_all(manager, x)
        with raises(ValueError, "combine; 'rows'; needs router weights"):
            manager.ep_combine_all([x.rows] * 2, None, [0, 1])


def test_sums_combine_wait_needs_the_expert_rows():
    for layout, wanted in (("packed", "[any, 80]"), ("padded", "[3, 14, 80]")):
        config = dataclasses.replace(SUMS, output_layout=layout)
        with building(config, short=tensor(BF16, 3, 4, 80)) as (manager, x):
            pointers = manager._pointers(1)[1:]
            given = (manager.atomic_counters[0][0], *pointers)
            given += config, x.tokens.shape[0], None
            with raises(TypeError, "input_tokens; NoneType; graph value"):
                call_ep_combine_wait(*given, None)
            with raises(ValueError, f"input_tokens; [3, 4, 80]; {wanted}"):
                call_ep_combine_wait(*given, x.short)


def test_combine_wait_needs_rows_of_the_combine_dtype():
    config = TWO.config(fused_shared_expert=True)
    with building(config, short=tensor(F32, "t", 80)) as (manager, x):
        given = (manager.atomic_counters[0][0], *manager._pointers(1)[1:])
        given += config, x.tokens.shape[0], x.weights
        with raises(TypeError, "input_tokens; float32; bfloat16"):
            call_ep_combine_wait(*given, x.short)


def test_not_graph_values():
    with building() as (manager, x):
        with raises(TypeError, "input_tokens; ndarray; graph value"):
            manager.ep_dispatch_async(np.zeros((4, 80)), x.ids, 0)
        with raises(TypeError, "topk_ids; list; graph value"):
            manager.ep_dispatch_async(x.tokens, [[0, 1, 2]], 0)


BAD_COMBINE = """
rows=tensor(F32, ROWS, 80) | input_tokens; float32; bfloat16
rows=tensor(BF16, ROWS, 40) | input_tokens; 40; 80
rows=tensor(BF16, 5, 80) | input_tokens; 5 rows; 42
rows=tensor(BF16, ROWS, 80, device=GPU) | input_tokens; gpu:0; cpu:0
weights=tensor(F16, "t", 3) | router_weights; float16; bfloat16 or DType.float32
weights=tensor(F32, "t", 2) | router_weights; [t, 2]; [any, 3]
weights=tensor(F32, "t", 3, device=GPU) | router_weights; gpu:0; cpu:0
weights=tensor(F32, 8, 3) | router_weights; 8 tokens; 7
**FOUR_TOKENS, weights=tensor(F32, 5, 3) | router_weights; 5; 4
"""
FOUR_TOKENS = dict(tokens=tensor(BF16, 4, 80), ids=ids_of(4, 3))


@pytest.mark.parametrize("form", ["split", "all"])
@refused(BAD_COMBINE)
def test_combine_refuses(arguments, words, form):
    with building(**arguments_of(arguments)) as (manager, x):
        dispatch_all(manager, x)
        with raises(error_of(words), words):
            if form == "all":
                manager.ep_combine_all([x.rows] * 2, [x.weights] * 2, [0, 1])
            for rank in range(2):
                manager.ep_combine_async(x.rows, rank)
            manager.ep_combine_wait(x.weights, 0)


@pytest.mark.parametrize(
    "shape", [[ROWS, 80], [3, 13, 80], [2, 14, 80], [42, 80]], ids=str
)
def test_padded_combine_takes_padded_rows(shape):
    """The rows of packed dispatch are no padded rows, nor are too few rows."""
    config = TWO.config(output_layout="padded")
    with building(config, rows=tensor(BF16, *shape)) as (manager, x):
        dispatch_all(manager, x)
        with raises(ValueError, f"input_tokens; {shape}; [3, 14, 80]"):
            manager.ep_combine_async(x.rows, 0)


# ------------------------------------------------------------- order of the calls


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


def test_no_such_device():
    with building() as (manager, x):
        for device_id in (2, -1):
            with raises(ValueError, f"device_id={device_id}; [0, n_gpus_per_node=2)"):
                manager.ep_dispatch_async(x.tokens, x.ids, device_id)
            with raises(ValueError, f"device_id={device_id}"):
                manager.ep_dispatch_wait(device_id)
            with raises(ValueError, f"device_id={device_id}; n_gpus_per_node=2"):
                manager.config.device(device_id)
        for device_ids in ([0], [0, 0], [1, 2]):
            with raises(ValueError, f"device_ids={device_ids}; all 2 ranks"):
                manager.ep_dispatch_all([x.tokens] * 2, [x.ids] * 2, device_ids)


def test_all_forms_need_a_tensor_a_rank():
    with building(scales=tensor(F32, 1)) as (manager, x):
        with raises(ValueError, "topk_ids; 1 tensors; 2 local ranks"):
            manager.ep_dispatch_all([x.tokens] * 2, [x.ids], [0, 1])
        with raises(ValueError, "input_scales; 1 tensors; 2 local ranks"):
            manager.ep_dispatch_all([x.tokens] * 2, [x.ids] * 2, [0, 1], [x.scales])
        with raises(TypeError, "input_tokens; one TensorValue; pass a list"):
            manager.ep_dispatch_all(x.tokens, [x.ids] * 2, [0, 1])


def test_rows_of_one_rank_are_counted():
    """Neither the first tensor of a dispatch nor what all ranks got."""
    with building() as (manager, x):
        dispatched = dispatch_all(manager, x)
        with raises(TypeError, "TensorValue; tuple of a rank"):
            manager.ep_received(dispatched[0][0])
        with raises(TypeError, "is a list; tuple of a rank; ep_dispatch_all"):
            manager.ep_received(dispatched)
        assert manager.ep_received(dispatched[0]).shape == [3]


def test_waits_follow_all_sends_and_sends_all_waits():
    with building() as (manager, x):
        with raises(ValueError, "ep_dispatch_wait; device 1; ep_dispatch_async"):
            manager.ep_dispatch_wait(1)
        manager.ep_dispatch_async(x.tokens, x.ids, 0)
        words = "devices [1]; one after another; of every device first"
        with raises(ValueError, f"ep_dispatch_wait on device 0; {words}"):
            manager.ep_dispatch_wait(0)
        manager.ep_dispatch_async(x.tokens, x.ids, 1)
        manager.ep_dispatch_wait(0)
        with raises(ValueError, "ep_dispatch_wait on device 0 without"):
            manager.ep_dispatch_wait(0)
        words = "ep_dispatch_wait on devices [1]; second EPBatchManager"
        with raises(ValueError, f"ep_dispatch_async on device 0 again; {words}"):
            manager.ep_dispatch_async(x.tokens, x.ids, 0)


def test_combine_without_dispatch():
    with building() as (manager, x):
        words = "device 0; without a dispatch"
        with raises(ValueError, f"{words}; ep_dispatch_wait"):
            manager.ep_combine_async(x.rows, 0)
        with raises(ValueError, words):
            manager.ep_combine_all([x.rows] * 2, [x.weights] * 2, [0, 1])
        send_all(manager, x)  # not waited for: there are no rows yet
        with raises(ValueError, "device 1; without a dispatch"):
            manager.ep_combine_async(x.rows, 1)


def test_combine_wait_in_the_wrong_order():
    with building() as (manager, x):
        rows = dispatch_all(manager, x)
        with raises(ValueError, "ep_combine_wait; ep_combine_async before"):
            manager.ep_combine_wait(x.weights, 0)
        manager.ep_combine_async(rows[0][0], 0)
        with raises(ValueError, "ep_combine_wait on device 0; devices [1]"):
            manager.ep_combine_wait(x.weights, 0)


def test_a_dispatch_is_not_received_between_async_and_wait_of_sums():
    with building(SUMS) as (manager, x):
        dispatch_all(manager, x)
        for rank in range(2):
            manager.ep_combine_async(x.rows, rank)
        send_all(manager, x)
        words = "ep_dispatch_wait on device 0; ep_combine_wait first"
        with raises(ValueError, words):
            manager.ep_dispatch_wait(0)
        for rank in range(2):
            manager.ep_combine_wait(None, rank)
        manager.ep_dispatch_wait(0)


def test_a_second_graph_starts_anew():
    """What was built in one graph does not count in the next."""
    with building() as (manager, x):
        dispatch_all(manager, x)
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
    refuse_if_in_turn(TWO.config(target="gpu"), "ep_dispatch", "ep_dispatch_all")
    config = TWO.config(target="gpu", ranks_per_gpu=2)
    with raises(ValueError, "ep_dispatch_all; ranks_per_gpu=2; ranks_per_gpu=1"):
        refuse_if_in_turn(config, "ep_dispatch", "ep_dispatch_all")
    with building() as (manager, x):
        config, counter = manager.config, manager.atomic_counters[0][0]
        pointers = manager._pointers(0)
        reason = "one after another; n_gpus_per_node=2; n_nodes=2"
        with raises(ValueError, f"ep_dispatch_all; ep_dispatch_async; {reason}"):
            manager.ep_dispatch(x.tokens, x.ids, 0)
        dispatch_all(manager, x)
        with raises(ValueError, f"ep_combine_all; ep_combine_async; {reason}"):
            manager.ep_combine(x.rows, x.weights, 0)
        with raises(ValueError, f"call_ep_dispatch_async; {reason}"):
            call_ep_dispatch(x.tokens, x.ids, counter, *pointers, config)
        rows = x.rows, manager._src_info[0], counter, *pointers
        with raises(ValueError, f"call_ep_combine_async; {reason}"):
            call_ep_combine(*rows, config, x.tokens.shape[0], x.weights)


def test_low_level_forms_check_their_buffers():
    bad = dict(
        bad_pointers=tensor(DType.uint64, 3),
        bad_dtype=tensor(DType.int64, 2),
        src_info=ids_of(5, 2),
        counter=ids_of(TWO.config().sizes().counters_words),
    )
    with building(**bad) as (manager, x):
        config, counter = manager.config, manager.atomic_counters[0][0]
        send, recv, counts = manager._pointers(0)
        given, n = (x.tokens, x.ids), x.tokens.shape[0]
        with raises(TypeError, "atomic_counter; TensorValue; BufferValue"):
            call_ep_dispatch_async(*given, x.counter, send, recv, counts, config)
        with raises(ValueError, "recv_buf_ptrs; [3]; [2]"):
            wrong = counter, send, x.bad_pointers, counts
            call_ep_dispatch_async(*given, *wrong, config)
        with raises(TypeError, "recv_count_ptrs; int64; uint64"):
            call_ep_dispatch_wait(counter, recv, x.bad_dtype, config)
        with raises(ValueError, "num_tokens; all-reduce"):
            call_ep_dispatch_wait(counter, recv, counts, config, num_tokens=n)
        with raises(ValueError, f"src_info; 5; {ROWS}"):
            pointers = send, recv, counts
            call_ep_combine_async(x.rows, x.src_info, counter, *pointers, config)
        with raises(ValueError, "send_buf_ptrs; [3]; [2]"):
            rows = [x.rows] * 2, [x.src_info] * 2, manager.atomic_counters[0]
            wrong = x.bad_pointers, recv, counts
            more = [n] * 2, [x.weights] * 2
            call_distributed_ep_combine(*rows, *wrong, config, *more)
        with raises(TypeError, "router_weights; int32; float32"):
            call_ep_combine_wait(counter, recv, counts, config, n, x.ids, x.rows)
