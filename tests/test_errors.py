# SPDX-License-Identifier: Apache-2.0
"""Bad input gets an error that says what was given and what is needed."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cases import (
    BF16,
    CASES,
    F32,
    Inputs,
    expected,
    expected_dispatch,
    make_inputs,
)
from harness import (
    Received,
    assert_dispatched,
    assert_round_trip,
    assert_same_bits,
    take_outputs,
    to_buffer,
    to_numpy,
)
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, Module, TensorType
from max.nn.quant_config import QuantFormat
from processes import names_of

from max_ep import (
    EPBatchManager,
    EPCommInitializer,
    EPConfig,
    blockwise_fp8_quant_config,
    call_distributed_ep_combine,
    call_ep_combine,
    call_ep_combine_async,
    call_ep_combine_wait,
    call_ep_dispatch,
    call_ep_dispatch_async,
    call_ep_dispatch_wait,
    estimate_ep_memory_usage,
)
from max_ep.graph.checks import refuse_if_in_turn

CPU, GPU = DeviceRef.CPU(), DeviceRef.GPU(0)
TWO = CASES["two_ranks"]  # 5 experts, top_k 3, hidden 80, 7 tokens, bfloat16
FP8 = dataclasses.replace(CASES["fp8"], n_ranks=1)  # hidden 256


@contextlib.contextmanager
def raises(error: type[Exception], *words: str) -> Iterator[pytest.ExceptionInfo]:
    """Expects an error whose text has all the words."""
    with pytest.raises(error) as caught:
        yield caught
    text = str(caught.value)
    missing = [word for word in words if word not in text]
    assert not missing, f"the error does not say {missing}; it says: {text}"


# --------------------------------------------------------------------- EPConfig

# What is changed in TWO's config, and words of the error.
BAD_CONFIGS = {
    "hidden_bytes": (dict(hidden_size=81), ["81", "162 bytes", "multiple of 16"]),
    "hidden_bytes_combine": (
        dict(hidden_size=4, dispatch_dtype=F32),
        ["hidden_size=4", "combine_dtype", "multiple of 8"],
    ),
    "hidden_zero": (dict(hidden_size=0), ["hidden_size=0", ">= 1"]),
    "hidden_float": (dict(hidden_size=80.0), ["hidden_size=80.0", "integer"]),
    "tokens_of_numpy": (
        dict(max_tokens_per_rank=np.int64(7)),
        ["max_tokens_per_rank=", "is a int64", "Python's type int"],
    ),
    "top_k_33": (dict(top_k=33, n_experts=64), ["top_k=33", "32"]),
    "top_k_above_experts": (dict(top_k=6), ["top_k=6", "n_experts=5"]),
    "top_k_zero": (dict(top_k=0), ["top_k=0", ">= 1"]),
    "experts_zero": (dict(n_experts=0), ["n_experts=0"]),
    "tokens_negative": (
        dict(max_tokens_per_rank=-1),
        ["max_tokens_per_rank=-1"],
    ),
    "ranks_129": (dict(n_gpus_per_node=129), ["129", "128"]),
    "nodes_zero": (dict(n_nodes=0), ["n_nodes=0"]),
    "node_id": (dict(node_id=1), ["node_id=1", "n_nodes=1"]),
    "node_id_text": (dict(node_id="0"), ["node_id='0'", "integer"]),
    "timeout": (dict(timeout_s=0), ["timeout_s=0", "above 0"]),
    "timeout_text": (dict(timeout_s="5"), ["timeout_s='5'", "number of seconds"]),
    "target": (dict(target="tpu"), ["'tpu'", "'cpu'", "'gpu'"]),
    "protocol": (
        dict(protocol="rank_slots"),
        ["'rank_slots'", "'auto'", "'by_rank'", "'by_expert'"],
    ),
    "combine_mode": (
        dict(combine_mode="reduced"),
        ["'reduced'", "'rows'", "'sums'"],
    ),
    "sums_by_expert": (
        dict(combine_mode="sums", protocol="by_expert"),
        ["combine_mode='sums'", "protocol='by_expert'", "'by_rank'"],
    ),
    "negative_n_sms": (dict(n_sms=-1), ["n_sms=-1", ">= 0"]),
    "partial_dtype": (
        dict(combine_mode="sums", protocol="auto", partial_dtype=DType.float16),
        ["partial_dtype", "float16", "bfloat16 or float32"],
    ),
    "partial_dtype_of_rows": (
        dict(partial_dtype=F32),
        ["partial_dtype=DType.float32", "combine_mode='rows'", "pass None"],
    ),
    "partial_bytes": (
        dict(
            hidden_size=84,
            dispatch_dtype=F32,
            combine_dtype=F32,
            combine_mode="sums",
            protocol="auto",
            partial_dtype=BF16,
        ),
        ["hidden_size=84", "partial_dtype", "168 bytes", "multiple of 8"],
    ),
    "combine_dtype": (
        dict(combine_dtype=DType.float16),
        ["combine_dtype", "float16", "bfloat16 or float32"],
    ),
    "dispatch_dtype": (
        dict(dispatch_dtype=DType.int8),
        ["dispatch_dtype", "int8", "bfloat16", "float32", "float8_e4m3fn"],
    ),
    "dispatch_dtype_text": (
        dict(dispatch_dtype="bfloat16"),
        ["dispatch_dtype='bfloat16'", "str", "DType.bfloat16"],
    ),
    "quant_missing": (
        dict(dispatch_dtype=DType.float8_e4m3fn, hidden_size=256),
        ["dispatch_quant_config", "blockwise_fp8_quant_config()"],
    ),
    "quant_not_needed": (
        dict(dispatch_quant_config=blockwise_fp8_quant_config()),
        ["dispatch_quant_config", "bfloat16", "pass None"],
    ),
    "output_layout": (
        dict(output_layout="ragged"),
        ["'ragged'", "'packed'", "'padded'"],
    ),
    "shared_and_padded": (
        dict(fused_shared_expert=True, output_layout="padded"),
        ["fused_shared_expert", "output_layout='packed'", "add it"],
    ),
    # Fields of MAX's EPConfig that ask for what there is not.
    "nvfp4": (dict(nvfp4_dyn_global_scales=True), ["nvfp4_dyn_global_scales"]),
    "fused_send": (dict(fuse_ffn_combine_send=True), ["fuse_ffn_combine_send"]),
    "fused_moe": (dict(fused_moe_ready=True), ["fused_moe_ready"]),
    "allreduce": (dict(use_allreduce=True), ["use_allreduce", "all-reduce"]),
    "eplb": (dict(eplb_enabled=True), ["eplb_enabled", "load balancing"]),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_config_refuses(name: str) -> None:
    changes, words = BAD_CONFIGS[name]
    with raises(ValueError, *words):
        TWO.config(**changes)


@pytest.mark.parametrize("hidden_size", [80, 192, 8])
def test_fp8_needs_whole_blocks(hidden_size: int) -> None:
    with raises(ValueError, f"hidden_size={hidden_size}", "128", "FP8", "pad"):
        FP8.config(hidden_size=hidden_size)


@pytest.mark.parametrize(
    "part, change, words",
    [
        ("format", QuantFormat.NVFP4, ["NVFP4", "BLOCKSCALED_FP8"]),
        ("block_size", (1, 64), ["(1, 64)", "(1, 128)"]),
        ("dtype", BF16, ["bfloat16", "float32"]),
    ],
)
def test_other_quant_configs_are_refused(
    part: str, change: object, words: list[str]
) -> None:
    quant = blockwise_fp8_quant_config()
    if part == "format":
        quant = dataclasses.replace(quant, format=change)
    else:
        scale = dataclasses.replace(quant.input_scale, **{part: change})
        quant = dataclasses.replace(quant, input_scale=scale)
    with raises(ValueError, "dispatch_quant_config", *words):
        FP8.config(dispatch_quant_config=quant)


def test_memory_estimate_refuses_what_config_does() -> None:
    sizes = dict(
        hidden_size=80,
        dispatch_dtype=BF16,
        combine_dtype=BF16,
        max_tokens_per_rank=7,
        n_experts=5,
        n_nodes=1,
        n_gpus_per_node=2,
        top_k=3,
    )
    assert estimate_ep_memory_usage(**sizes) > 0
    with raises(ValueError, "use_allreduce"):
        estimate_ep_memory_usage(**sizes, use_allreduce=True)
    with raises(ValueError, "dispatch_element_dtype", "float4_e2m1fn"):
        estimate_ep_memory_usage(**sizes, dispatch_element_dtype=DType.float4_e2m1fn)


def test_device_of_a_rank_there_is_not() -> None:
    for device_id in (-1, 2):
        with raises(ValueError, f"device_id={device_id}", "n_gpus_per_node=2"):
            TWO.config().device(device_id)


# --------------------------------------------------------- while a graph is built


def tensor(dtype: DType, *shape: int | str, device: DeviceRef = CPU) -> TensorType:
    return TensorType(dtype, list(shape), device)


GOOD_TYPES = dict(
    tokens=tensor(BF16, "t", 80),
    ids=tensor(DType.int32, "t", 3),
    weights=tensor(F32, "t", 3),
    rows=tensor(BF16, TWO.max_rows, 80),
)


@contextlib.contextmanager
def building(
    config: EPConfig | None = None,
    name: str = "never_compiled",
    module: Module | None = None,
    **types: TensorType,
) -> Iterator[tuple]:
    """Starts a graph with the EP inputs and inputs of these types.

    Yields:
        A manager that has its buffers, and the inputs by name.
    """
    types = GOOD_TYPES | types
    manager = EPBatchManager(config or TWO.config())
    declared = [*types.values(), *manager.input_types()]
    with Graph(name, input_types=declared, module=module) as graph:
        manager.fetch_buffers(graph.inputs[len(types) :])
        values = [value.tensor for value in graph.inputs[: len(types)]]
        yield manager, SimpleNamespace(**dict(zip(types, values)))


def send_all(manager: EPBatchManager, x: SimpleNamespace) -> None:
    for rank in range(manager.config.n_gpus_per_node):
        manager.ep_dispatch_async(x.tokens, x.ids, rank)


def dispatch_all(manager: EPBatchManager, x: SimpleNamespace) -> list:
    send_all(manager, x)
    n = manager.config.n_gpus_per_node
    return [manager.ep_dispatch_wait(rank) for rank in range(n)]


def test_ops_are_told_n_sms() -> None:
    with building(dataclasses.replace(TWO.config(), n_sms=3)) as (manager, x):
        dispatch_all(manager, x)
        text = str(Graph.current)
    n_ops = text.count("max_ep.dispatch")
    assert n_ops == 4 and text.count("n_sms = 3") == n_ops


@pytest.mark.parametrize("ranks_per_gpu", [1, 2])
def test_waits_are_told_whether_ranks_share_a_gpu(ranks_per_gpu: int) -> None:
    config = dataclasses.replace(TWO.config(), ranks_per_gpu=ranks_per_gpu)
    with building(config) as (manager, x):
        dispatch_all(manager, x)
        for rank in range(2):
            manager.ep_combine_async(x.rows, rank)
        for rank in range(2):
            manager.ep_combine_wait(x.weights, rank)
        text = str(Graph.current)
    told = "true" if ranks_per_gpu > 1 else "false"
    assert text.count("shares_gpu = ") == text.count(f"shares_gpu = {told}") == 4


# Input types that do not fit dispatch, the error, and what it must say.
BAD_DISPATCH = {
    "tokens_dtype": (
        dict(tokens=tensor(F32, "t", 80)),
        TypeError,
        ["input_tokens", "float32", "bfloat16"],
    ),
    "tokens_hidden": (
        dict(tokens=tensor(BF16, "t", 64)),
        ValueError,
        ["input_tokens", "64", "80"],
    ),
    "tokens_rank": (
        dict(tokens=tensor(BF16, "t", 1, 80)),
        ValueError,
        ["input_tokens", "[t, 1, 80]", "[any, 80]"],
    ),
    "tokens_device": (
        dict(tokens=tensor(BF16, "t", 80, device=GPU)),
        ValueError,
        ["input_tokens", "gpu:0", "cpu:0", ".to(DeviceRef.CPU())"],
    ),
    "tokens_too_many": (
        dict(tokens=tensor(BF16, 8, 80), ids=tensor(DType.int32, 8, 3)),
        ValueError,
        ["8 tokens", "max_tokens_per_rank", "7"],
    ),
    "ids_dtype": (
        dict(ids=tensor(DType.int64, "t", 3)),
        TypeError,
        ["topk_ids", "int64", "int32", "cast"],
    ),
    "ids_top_k": (
        dict(ids=tensor(DType.int32, "t", 4)),
        ValueError,
        ["topk_ids", "[t, 4]", "[any, 3]"],
    ),
    "ids_device": (
        dict(ids=tensor(DType.int32, "t", 3, device=GPU)),
        ValueError,
        ["topk_ids", "gpu:0", "cpu:0"],
    ),
    "ids_rows": (
        dict(tokens=tensor(BF16, 4, 80), ids=tensor(DType.int32, 5, 3)),
        ValueError,
        ["input_tokens", "4", "topk_ids", "5"],
    ),
}


def test_fp8_rows_are_not_combined_as_they_are() -> None:
    """A cast would do for other dtypes; here it would leave the scales out."""
    config, k = FP8.config(), FP8.top_k
    types = dict(tokens=tensor(BF16, "t", 256), ids=tensor(DType.int32, "t", k))
    with building(config, **types) as (manager, x):
        rows, *_ = manager.ep_dispatch(x.tokens, x.ids, 0)
        with raises(TypeError, "uint8", "FP8", "dequantize_blockwise_fp8", "scales"):
            manager.ep_combine_async(rows, 0)


@pytest.mark.parametrize("form", ["async", "all"])
@pytest.mark.parametrize("name", BAD_DISPATCH)
def test_dispatch_refuses(name: str, form: str) -> None:
    types, error, words = BAD_DISPATCH[name]
    with building(**types) as (manager, x), raises(error, *words):
        if form == "async":
            manager.ep_dispatch_async(x.tokens, x.ids, 0)
        else:
            manager.ep_dispatch_all([x.tokens] * 2, [x.ids] * 2, [0, 1])


def test_fp8_dispatch_takes_bfloat16_and_float32_only() -> None:
    for dtype in (BF16, F32):
        with building(FP8.config(), tokens=tensor(dtype, "t", 256)) as (m, x):
            m.ep_dispatch_async(x.tokens, x.ids, 0)
    tokens = tensor(DType.uint8, "t", 256)
    with building(FP8.config(), tokens=tokens) as (manager, x):
        with raises(TypeError, "input_tokens", "uint8", "bfloat16", "float32"):
            manager.ep_dispatch_async(x.tokens, x.ids, 0)


@pytest.mark.parametrize(
    "scales, error, words",
    [
        (tensor(F32, 2), ValueError, ["[2]", "[1]", "[n_experts=5]"]),
        (tensor(F32, "n"), ValueError, ["[n]", "[1]", "[n_experts=5]"]),
        (tensor(F32, 5, 1), ValueError, ["[5, 1]"]),
        (tensor(BF16, 5), TypeError, ["bfloat16", "float32"]),
    ],
)
def test_input_scales_that_do_not_fit(
    scales: TensorType, error: type[Exception], words: list[str]
) -> None:
    with building(scales=scales) as (manager, x):
        with raises(error, "input_scales", *words):
            manager.ep_dispatch_async(x.tokens, x.ids, 0, x.scales)


def test_input_scales_with_a_fused_shared_expert() -> None:
    config = TWO.config(fused_shared_expert=True)
    with building(config, scales=tensor(F32, 1)) as (manager, x):
        with raises(ValueError, "input_scales", "fused_shared_expert", "before"):
            manager.ep_dispatch_async(x.tokens, x.ids, 0, x.scales)


def test_input_scales_by_rank() -> None:
    config = TWO.config(protocol="by_rank")
    with building(config, scales=tensor(F32, 1)) as (manager, x):
        with raises(ValueError, "input_scales", "by_rank", "by_expert"):
            manager.ep_dispatch_async(x.tokens, x.ids, 0, x.scales)


@pytest.mark.parametrize("field", ["n_experts", "max_tokens_per_rank"])
def test_what_entries_cannot_hold(field: str) -> None:
    TWO.config(**{"protocol": "by_rank", field: 65535})
    with raises(ValueError, f"{field}=65536", "65535", "by_expert"):
        TWO.config(**{"protocol": "by_rank", field: 65536})


def test_more_experts_than_a_block_can_count() -> None:
    TWO.config(target="gpu", n_experts=3840)
    with raises(ValueError, "n_experts=3841", "2 GPU ranks", "3840"):
        TWO.config(target="gpu", n_experts=3841)


def test_by_rank_on_several_hosts() -> None:
    with raises(ValueError, "by_rank", "target='gpu'", "n_nodes=2", "by_expert"):
        TWO.config(protocol="by_rank", target="gpu", n_nodes=2)


SUMS = TWO.config(combine_mode="sums", protocol="auto")


def test_auto_is_by_rank_where_that_works() -> None:
    assert SUMS.protocol == "by_rank"
    assert TWO.config(protocol="auto").protocol == "by_rank"
    hosts = TWO.config(protocol="auto", target="gpu", n_nodes=2)
    assert hosts.protocol == "by_expert"
    many = TWO.config(protocol="auto", max_tokens_per_rank=65536)
    assert many.protocol == "by_expert"


def test_by_rank_on_amd_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("max_ep.config.accelerator_api", lambda: "hip")
    assert TWO.config(protocol="auto", target="gpu").protocol == "by_expert"
    with raises(ValueError, "by_rank", "AMD", "by_expert"):
        TWO.config(protocol="by_rank", target="gpu")
    assert TWO.config(protocol="auto").protocol == "by_rank"


def test_router_weights_are_given_once() -> None:
    """To dispatch if combine sends sums, to combine otherwise."""
    bad = dict(short=tensor(F32, "t", 2), narrow=tensor(BF16, "t", 3))
    with building(SUMS, **bad) as (manager, x):
        words = ["dispatch", "combine_mode='sums'", "needs router weights"]
        with raises(ValueError, *words):
            manager.ep_dispatch_async(x.tokens, x.ids, 0)
        with raises(ValueError, *words):
            manager.ep_dispatch_all([x.tokens] * 2, [x.ids] * 2, [0, 1])
        with raises(ValueError, "router_weights", "[t, 2]", "[any, 3]"):
            manager.ep_dispatch_async(x.tokens, x.ids, 0, router_weight=x.short)
        with raises(ValueError, "input_scales", "router_weights", "by name"):
            manager.ep_dispatch_all(
                [x.tokens] * 2, [x.ids] * 2, [0, 1], [x.weights] * 2
            )
        with raises(ValueError, "router_weights", "1 tensors", "2 local ranks"):
            manager.ep_dispatch_all(
                [x.tokens] * 2, [x.ids] * 2, [0, 1], router_weights=[x.weights]
            )
        # Those of a bfloat16 router are widened.
        manager.ep_dispatch_all(
            [x.tokens] * 2, [x.ids] * 2, [0, 1], router_weights=[x.narrow] * 2
        )
        words = ["combine", "combine_mode='sums'", "takes no router weights"]
        with raises(ValueError, *words, "dispatch takes them"):
            for rank in range(2):
                manager.ep_combine_async(x.rows, rank)
            manager.ep_combine_wait(x.weights, 0)
    with building() as (manager, x):
        words = ["dispatch", "combine_mode='rows'", "takes no router weights"]
        with raises(ValueError, *words, "combine takes them"):
            manager.ep_dispatch_async(x.tokens, x.ids, 0, router_weight=x.weights)
        dispatch_all(manager, x)
        with raises(ValueError, "combine", "'rows'", "needs router weights"):
            manager.ep_combine_all([x.rows] * 2, None, [0, 1])


def test_sums_combine_wait_needs_the_expert_rows() -> None:
    for is_padded in (False, True):
        layout = "padded" if is_padded else "packed"
        config = dataclasses.replace(SUMS, output_layout=layout)
        with building(config, short=tensor(BF16, 3, 4, 80)) as (manager, x):
            counter = manager.atomic_counters[0][0]
            pointers = [manager.recv_buf_ptrs[1], manager.recv_count_ptrs[1]]
            more = [config, x.tokens.shape[0], None]
            with raises(ValueError, "combine_mode='sums'", "needs input_tokens"):
                call_ep_combine_wait(counter, *pointers, *more)
            wanted = "[3, 14, 80]" if is_padded else "[any, 80]"
            with raises(ValueError, "input_tokens", "[3, 4, 80]", wanted):
                call_ep_combine_wait(counter, *pointers, *more, x.short)


def test_not_graph_values() -> None:
    """Arrays, as one would pass to `execute`, are told from graph values."""
    with building() as (manager, x):
        with raises(TypeError, "input_tokens", "ndarray", "graph value"):
            manager.ep_dispatch_async(np.zeros((4, 80)), x.ids, 0)
        with raises(TypeError, "topk_ids", "list", "graph value"):
            manager.ep_dispatch_async(x.tokens, [[0, 1, 2]], 0)


# Input types that do not fit combine.
BAD_COMBINE = {
    "rows_dtype": (
        dict(rows=tensor(F32, TWO.max_rows, 80)),
        TypeError,
        ["input_tokens", "float32", "bfloat16"],
    ),
    "rows_hidden": (
        dict(rows=tensor(BF16, TWO.max_rows, 40)),
        ValueError,
        ["input_tokens", "40", "80"],
    ),
    "rows_cut": (
        dict(rows=tensor(BF16, 5, 80)),
        ValueError,
        ["input_tokens", "5 rows", str(TWO.max_rows)],
    ),
    "rows_device": (
        dict(rows=tensor(BF16, TWO.max_rows, 80, device=GPU)),
        ValueError,
        ["input_tokens", "gpu:0", "cpu:0"],
    ),
    "weights_dtype": (
        dict(weights=tensor(DType.float16, "t", 3)),
        TypeError,
        ["router_weights", "float16", "bfloat16 or DType.float32"],
    ),
    "weights_top_k": (
        dict(weights=tensor(F32, "t", 2)),
        ValueError,
        ["router_weights", "[t, 2]", "[any, 3]"],
    ),
    "weights_device": (
        dict(weights=tensor(F32, "t", 3, device=GPU)),
        ValueError,
        ["router_weights", "gpu:0", "cpu:0"],
    ),
    "weights_too_many": (
        dict(weights=tensor(F32, 8, 3)),
        ValueError,
        ["router_weights", "8 tokens", "7"],
    ),
    "weights_rows": (
        dict(
            tokens=tensor(BF16, 4, 80),
            ids=tensor(DType.int32, 4, 3),
            weights=tensor(F32, 5, 3),
        ),
        ValueError,
        ["router_weights", "5", "4"],
    ),
}


@pytest.mark.parametrize("form", ["halves", "all"])
@pytest.mark.parametrize("name", BAD_COMBINE)
def test_combine_refuses(name: str, form: str) -> None:
    types, error, words = BAD_COMBINE[name]
    with building(**types) as (manager, x):
        dispatch_all(manager, x)
        with raises(error, *words):
            if form == "all":
                manager.ep_combine_all([x.rows] * 2, [x.weights] * 2, [0, 1])
            for rank in range(2):
                manager.ep_combine_async(x.rows, rank)
            manager.ep_combine_wait(x.weights, 0)


def test_padded_combine_takes_padded_rows() -> None:
    """The rows of packed dispatch, or rows cut short, are not those."""
    config = TWO.config(output_layout="padded")
    for shape in ([TWO.max_rows, 80], [3, 13, 80], [2, 14, 80], [42, 80]):
        with building(config, rows=tensor(BF16, *shape)) as (manager, x):
            dispatch_all(manager, x)
            words = ["input_tokens", str(shape), "[3, 14, 80]"]
            with raises(ValueError, *words):
                manager.ep_combine_async(x.rows, 0)


def test_combine_wait_needs_the_shared_rows() -> None:
    """Whose rows are added must be said, and only where they are."""
    for is_fused in (True, False):
        config = TWO.config(fused_shared_expert=is_fused)
        with building(config, short=tensor(F32, "t", 80)) as (manager, x):
            counter = manager.atomic_counters[0][0]
            pointers = [manager.recv_buf_ptrs[1], manager.recv_count_ptrs[1]]
            more = [config, x.tokens.shape[0], x.weights]
            word = "needs" if is_fused else "takes no"
            rows = None if is_fused else x.rows
            with raises(ValueError, f"fused_shared_expert={is_fused}", word):
                call_ep_combine_wait(counter, *pointers, *more, rows)
            if is_fused:
                with raises(TypeError, "input_tokens", "float32", "bfloat16"):
                    call_ep_combine_wait(counter, *pointers, *more, x.short)


# ------------------------------------------------------------- order of the calls


def test_manager_before_fetch_buffers() -> None:
    manager = EPBatchManager(TWO.config())
    with building() as (_, x):
        for call in (
            lambda: manager.ep_dispatch_async(x.tokens, x.ids, 0),
            lambda: manager.ep_dispatch_wait(0),
            lambda: manager.ep_dispatch_all([x.tokens] * 2, [x.ids] * 2, [0, 1]),
            lambda: manager.ep_combine_async(x.rows, 0),
            lambda: manager.ep_combine_wait(x.weights, 0),
        ):
            with raises(ValueError, "input_types()", "fetch_buffers()"):
                call()


def test_fetch_buffers_of_other_values() -> None:
    with building() as (manager, x):
        good = list(Graph.current.inputs)[len(GOOD_TYPES) :]
        n = len(good)
        assert n == len(manager.input_types())
        for values in (good[:-1], [*good, good[-1]], list(Graph.current.inputs)):
            with raises(ValueError, f"{len(values)} values", f"declares {n}"):
                manager.fetch_buffers(values)
        with raises(TypeError, "EP input 0", "BufferValue", "in the order"):
            manager.fetch_buffers(good[::-1])


def test_buffers_of_another_group() -> None:
    """Inputs declared for one group do not serve another."""
    three = EPBatchManager(CASES["uneven_7_on_3"].config())
    with building() as (manager, x):
        mine = list(Graph.current.inputs)[len(GOOD_TYPES) :]
        with raises(ValueError, "10 values", "declares 12"):
            three.fetch_buffers(mine)
        # The same number of ranks, but other experts.
        other = EPBatchManager(CASES["top_32"].config())
        other.fetch_buffers(mine)
        words = [m.config.sizes().counters_words for m in (manager, other)]
        with raises(ValueError, "atomic_counter", *(f"[{n}]" for n in words)):
            other.ep_dispatch_async(x.tokens, x.ids, 0)


def test_no_such_device() -> None:
    with building() as (manager, x):
        for device_id in (2, -1):
            with raises(ValueError, f"device_id={device_id}", "[0, n_gpus_per_node=2)"):
                manager.ep_dispatch_async(x.tokens, x.ids, device_id)
            with raises(ValueError, f"device_id={device_id}"):
                manager.ep_dispatch_wait(device_id)
        for device_ids in ([0], [0, 0], [1, 2]):
            with raises(ValueError, f"device_ids={device_ids}", "all 2 ranks"):
                manager.ep_dispatch_all([x.tokens] * 2, [x.ids] * 2, device_ids)


def test_all_forms_need_a_tensor_a_rank() -> None:
    scales = tensor(F32, 1)
    with building(scales=scales) as (manager, x):
        with raises(ValueError, "topk_ids", "1 tensors", "2 local ranks"):
            manager.ep_dispatch_all([x.tokens] * 2, [x.ids], [0, 1])
        with raises(ValueError, "input_scales", "1 tensors", "2 local ranks"):
            manager.ep_dispatch_all([x.tokens] * 2, [x.ids] * 2, [0, 1], [x.scales])
        with raises(TypeError, "input_tokens", "one TensorValue", "pass a list"):
            manager.ep_dispatch_all(x.tokens, [x.ids] * 2, [0, 1])


def test_rows_of_one_rank_are_counted() -> None:
    """Neither the first tensor of a dispatch nor what all ranks got."""
    with building() as (manager, x):
        dispatched = dispatch_all(manager, x)
        with raises(TypeError, "TensorValue", "tuple of a rank"):
            manager.ep_received(dispatched[0][0])
        with raises(TypeError, "is a list", "tuple of a rank", "ep_dispatch_all"):
            manager.ep_received(dispatched)
        assert manager.ep_received(dispatched[0]).shape == [3]


def test_wait_before_async() -> None:
    with building() as (manager, x):
        with raises(ValueError, "ep_dispatch_wait", "device 1", "ep_dispatch_async"):
            manager.ep_dispatch_wait(1)


def test_wait_before_all_sends() -> None:
    with building() as (manager, x):
        manager.ep_dispatch_async(x.tokens, x.ids, 0)
        with raises(
            ValueError,
            "ep_dispatch_wait on device 0",
            "devices [1]",
            "one after another",
            "of every device first",
        ):
            manager.ep_dispatch_wait(0)


def test_wait_twice() -> None:
    with building() as (manager, x):
        dispatch_all(manager, x)
        with raises(ValueError, "ep_dispatch_wait on device 0 without"):
            manager.ep_dispatch_wait(0)


def test_async_twice() -> None:
    with building() as (manager, x):
        send_all(manager, x)
        manager.ep_dispatch_wait(0)
        with raises(
            ValueError,
            "ep_dispatch_async on device 0 again",
            "ep_dispatch_wait on devices [1]",
            "second EPBatchManager",
        ):
            manager.ep_dispatch_async(x.tokens, x.ids, 0)


def test_combine_without_dispatch() -> None:
    with building() as (manager, x):
        with raises(ValueError, "device 0", "without a dispatch", "ep_dispatch_wait"):
            manager.ep_combine_async(x.rows, 0)
        with raises(ValueError, "device 0", "without a dispatch"):
            manager.ep_combine_all([x.rows] * 2, [x.weights] * 2, [0, 1])
        send_all(manager, x)  # not waited for: there are no rows yet
        with raises(ValueError, "device 1", "without a dispatch"):
            manager.ep_combine_async(x.rows, 1)


def test_combine_wait_in_the_wrong_order() -> None:
    with building() as (manager, x):
        rows = dispatch_all(manager, x)
        with raises(ValueError, "ep_combine_wait", "ep_combine_async before"):
            manager.ep_combine_wait(x.weights, 0)
        manager.ep_combine_async(rows[0][0], 0)
        with raises(ValueError, "ep_combine_wait on device 0", "devices [1]"):
            manager.ep_combine_wait(x.weights, 0)


def test_a_second_graph_starts_anew() -> None:
    """What was built in one graph does not count in the next."""
    with building() as (manager, x):
        dispatch_all(manager, x)
    # While none is being built, its buffers are there to be looked at.
    assert len(manager.recv_buf_ptrs) == 2
    declared = [*GOOD_TYPES.values(), *manager.input_types()]
    with Graph("second", input_types=declared) as graph:
        n = len(GOOD_TYPES)
        tokens, ids = (value.tensor for value in graph.inputs[:2])
        with raises(ValueError, "another graph", "'second'", "fetch_buffers()"):
            manager.ep_dispatch_all([tokens] * 2, [ids] * 2, [0, 1])
        manager.fetch_buffers(graph.inputs[n:])
        rows, weights = graph.inputs[3].tensor, graph.inputs[2].tensor
        with raises(ValueError, "without a dispatch"):
            manager.ep_combine_async(rows, 0)
        with raises(ValueError, "without ep_combine_async"):
            manager.ep_combine_wait(weights, 0)
        for rank in range(2):
            manager.ep_dispatch_async(
                graph.inputs[0].tensor, graph.inputs[1].tensor, rank
            )


def test_fused_forms_of_ranks_that_share_a_gpu() -> None:
    refuse_if_in_turn(TWO.config(target="gpu"), "ep_dispatch", "ep_dispatch_all")
    config = TWO.config(target="gpu", ranks_per_gpu=2)
    with raises(ValueError, "ep_dispatch_all", "ranks_per_gpu=2", "ranks_per_gpu=1"):
        refuse_if_in_turn(config, "ep_dispatch", "ep_dispatch_all")


def test_fused_forms_of_ranks_in_turn_name_the_form_to_use() -> None:
    with building() as (manager, x):
        reason = ["one after another", "n_gpus_per_node=2", "n_nodes=2"]
        with raises(ValueError, "ep_dispatch_all", "ep_dispatch_async", *reason):
            manager.ep_dispatch(x.tokens, x.ids, 0)
        dispatch_all(manager, x)
        with raises(ValueError, "ep_combine_all", "ep_combine_async", *reason):
            manager.ep_combine(x.rows, x.weights, 0)
        counter = manager.atomic_counters[0][0]
        pointers = [
            manager.send_buf_ptrs[0],
            manager.recv_buf_ptrs[0],
            manager.recv_count_ptrs[0],
        ]
        with raises(ValueError, "call_ep_dispatch_async", *reason):
            call_ep_dispatch(x.tokens, x.ids, counter, *pointers, manager.config)
        with raises(ValueError, "call_ep_combine_async", *reason):
            call_ep_combine(
                x.rows,
                manager._src_info[0],
                counter,
                *pointers,
                manager.config,
                x.tokens.shape[0],
                x.weights,
            )


def test_low_level_forms_check_their_buffers() -> None:
    bad = dict(
        bad_pointers=tensor(DType.uint64, 3),
        bad_dtype=tensor(DType.int64, 2),
        src_info=tensor(DType.int32, 5, 2),
        counter=tensor(DType.int32, TWO.config().sizes().counters_words),
    )
    with building(**bad) as (manager, x):
        config = manager.config
        counter = manager.atomic_counters[0][0]
        send, recv, counts = (
            p[0]
            for p in (
                manager.send_buf_ptrs,
                manager.recv_buf_ptrs,
                manager.recv_count_ptrs,
            )
        )
        with raises(TypeError, "atomic_counter", "TensorValue", "BufferValue"):
            call_ep_dispatch_async(
                x.tokens, x.ids, x.counter, send, recv, counts, config
            )
        with raises(ValueError, "recv_buf_ptrs", "[3]", "[2]"):
            call_ep_dispatch_async(
                x.tokens, x.ids, counter, send, x.bad_pointers, counts, config
            )
        with raises(TypeError, "recv_count_ptrs", "int64", "uint64"):
            call_ep_dispatch_wait(counter, recv, x.bad_dtype, config)
        with raises(ValueError, "num_tokens", "all-reduce"):
            call_ep_dispatch_wait(
                counter, recv, counts, config, num_tokens=x.tokens.shape[0]
            )
        with raises(ValueError, "src_info", "5", str(TWO.max_rows)):
            call_ep_combine_async(
                x.rows, x.src_info, counter, send, recv, counts, config
            )
        with raises(ValueError, "send_buf_ptrs", "[3]", "[2]"):
            call_distributed_ep_combine(
                [x.rows] * 2,
                [x.src_info] * 2,
                manager.atomic_counters[0],
                x.bad_pointers,
                recv,
                counts,
                config,
                [x.tokens.shape[0]] * 2,
                [x.weights] * 2,
            )
        with raises(TypeError, "router_weights", "int32", "float32"):
            call_ep_combine_wait(counter, recv, counts, config, x.ids.shape[0], x.ids)


# -------------------------------------------------------------------- initializer


def test_model_inputs_need_memory(session) -> None:
    comm = EPCommInitializer(TWO.config())
    with raises(RuntimeError, "ep_init(session) first"):
        comm.model_inputs()
    for call in (comm.reset, comm.check):
        with raises(RuntimeError, "before ep_init", "ep_init(session) first"):
            call()
    comm.close()  # nothing to free; harmless
    comm.ep_init(session)
    assert len(comm.model_inputs()) == 10
    with raises(RuntimeError, "ep_init", "before", "close() first"):
        comm.ep_init(session)
    comm.close()
    comm.close()
    with raises(RuntimeError, "ep_init(session) first", "close()"):
        comm.model_inputs()
    with raises(RuntimeError, "before ep_init"):
        comm.reset()


def test_gpus_that_are_missing_are_named(session, monkeypatch) -> None:
    """Before anything is compiled: MAX's compiler would only say that it failed."""
    monkeypatch.setattr("max_ep.memory.initializer.accelerator_count", lambda: 0)
    with raises(ValueError, "needs 2 GPUs", "shows 0", "target='cpu'"):
        EPCommInitializer(TWO.config(target="gpu")).ep_init(session)


def test_eplb_placement_is_refused() -> None:
    with raises(ValueError, "EPLB"):
        EPCommInitializer(TWO.config()).set_eplb_placement([], [])


def test_several_processes_need_a_node_id(session, monkeypatch) -> None:
    monkeypatch.delenv("MAX_EP_NODE_ID", raising=False)
    config = TWO.config(n_gpus_per_node=1, n_nodes=2)
    with raises(ValueError, "node_id is -1", "n_nodes=2", "MAX_EP_NODE_ID"):
        EPCommInitializer(config).ep_init(session)
    for text in ("2", "-1", "one", ""):
        monkeypatch.setenv("MAX_EP_NODE_ID", text)
        with raises(ValueError, f"MAX_EP_NODE_ID={text} must be in [0, n_nodes=2)"):
            EPCommInitializer(config).ep_init(session)


_FP8 = dict(
    dispatch_dtype=DType.float8_e4m3fn,
    dispatch_quant_config=blockwise_fp8_quant_config(),
    hidden_size=256,
)
_SUMS = dict(protocol="by_rank", combine_mode="sums")


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ({}, dict(dispatch_dtype=F32, combine_dtype=F32)),
        ({}, dict(combine_dtype=F32)),
        ({}, dict(hidden_size=96)),
        ({}, dict(top_k=2)),
        ({}, dict(n_experts=6)),
        ({}, dict(max_tokens_per_rank=8)),
        ({}, dict(n_nodes=4)),
        ({}, dict(n_gpus_per_node=2)),
        ({}, dict(protocol="by_rank")),
        (dict(protocol="by_rank"), _SUMS),
        (_SUMS, _SUMS | dict(partial_dtype=F32)),
        (_FP8, dict(hidden_size=256)),
        (_FP8, _FP8 | dict(fp8_power_of_two_scales=True)),
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_processes_agree_on_all_that_matters(ours: dict, theirs: dict) -> None:
    """Fails if a field is not compared: a peer would read what is not there."""
    group = dict(n_gpus_per_node=1, n_nodes=2)
    ours, theirs = (
        EPCommInitializer(TWO.config(**(group | changes)))._fingerprint()
        for changes in (ours, theirs)
    )
    assert ours != theirs


def test_a_set_up_that_fails_leaves_nothing(session, monkeypatch) -> None:
    config = TWO.config(n_gpus_per_node=1, n_nodes=2, node_id=0)
    comm = EPCommInitializer(config, group="fails")
    comm._model = SimpleNamespace()  # the set-up graph, which does not run
    monkeypatch.setattr(comm, "_prepare_ranks", lambda **_: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            comm.ep_init(session)
        assert names_of("fails") == []


# ------------------------------------------------------------------- at run time


def build_loose(module: Module) -> None:
    """Adds a round trip of `TWO` whose tokens, ids and weights may differ in rows."""
    types = []
    for rank in range(TWO.n_ranks):
        types += [
            tensor(BF16, f"t{rank}", TWO.hidden_size),
            tensor(DType.int32, f"i{rank}", TWO.top_k),
            tensor(F32, f"w{rank}", TWO.top_k),
        ]
    manager = EPBatchManager(TWO.config())
    declared = [*types, *manager.input_types()]
    with Graph("loose", input_types=declared, module=module) as graph:
        n = len(types)
        manager.fetch_buffers(graph.inputs[n:])
        values = [value.tensor for value in graph.inputs[:n]]
        ranks = [
            SimpleNamespace(
                tokens=values[i],
                ids=values[i + 1],
                weights=values[i + 2],
            )
            for i in range(0, n, 3)
        ]
        for rank, x in enumerate(ranks):
            manager.ep_dispatch_async(x.tokens, x.ids, rank)
        got = [manager.ep_dispatch_wait(rank) for rank in range(2)]
        for rank in range(2):
            manager.ep_combine_async(got[rank][0], rank)
        # The results of rank 0 have as many rows as its tokens, those of
        # rank 1 as many as its weights.
        results = [
            manager.ep_combine_wait(ranks[0].weights, 0),
            call_ep_combine_wait(
                manager.atomic_counters[0][1],
                manager.recv_buf_ptrs[1],
                manager.recv_count_ptrs[1],
                manager.config,
                ranks[1].weights.shape[0],
                ranks[1].weights,
            ),
        ]
        built = [
            [*got[rank], manager._src_info[rank], results[rank]] for rank in range(2)
        ]
        graph.output(*(value for rank in built for value in rank))


def build_receive(module: Module) -> None:
    """Adds the waits of dispatch only: what has arrived before an error."""
    manager = EPBatchManager(TWO.config())
    types = manager.input_types()
    with Graph("receive", input_types=types, module=module) as graph:
        manager.fetch_buffers(graph.inputs)
        outputs = [
            call_ep_dispatch_wait(
                counter,
                manager.recv_buf_ptrs[0],
                manager.recv_count_ptrs[0],
                manager.config,
            )
            for counter in manager.atomic_counters[0]
        ]
        graph.output(*(value for rank in outputs for value in rank))


def build_halves(module: Module) -> None:
    """Adds the three graphs of `Halves`."""
    for name in ("send", "dispatch", "receive"):
        manager = EPBatchManager(SUMS)
        types = []
        for rank in range(2):
            types += (
                [tensor(BF16, f"r{rank}", 80), tensor(DType.int32, f"n{rank}", 1)]
                if name == "receive"
                else [
                    tensor(BF16, f"t{rank}", 80),
                    tensor(DType.int32, f"t{rank}", 3),
                    tensor(F32, f"w{rank}", 3),
                ]
            )
        declared = [*types, *manager.input_types()]
        with Graph(f"reduced_{name}", input_types=declared, module=module) as graph:
            values = [value.tensor for value in graph.inputs[: len(types)]]
            manager.fetch_buffers(graph.inputs[len(types) :])
            if name == "receive":
                outputs = [
                    call_ep_combine_wait(
                        counter,
                        manager.recv_buf_ptrs[1],
                        manager.recv_count_ptrs[1],
                        SUMS,
                        n.shape[0],
                        None,
                        rows,
                    )
                    for counter, rows, n in zip(
                        manager.atomic_counters[0], values[::2], values[1::2]
                    )
                ]
            else:
                rows = manager.ep_dispatch_all(
                    values[::3], values[1::3], [0, 1], router_weights=values[2::3]
                )
                outputs = [r[0] for r in rows]
            if name == "send":
                for rank in range(2):
                    manager.ep_combine_async(outputs[rank], rank)
            graph.output(*outputs)


def build_open(module: Module) -> None:
    """Adds dispatch of tokens and of ids whose number of columns is left open."""
    for what, types in (
        ("input_tokens", dict(tokens=tensor(BF16, "t", "h"))),
        ("topk_ids", dict(ids=tensor(DType.int32, "t", "k"))),
    ):
        with building(name=f"open_{what}", module=module, **types) as (manager, x):
            dispatched = dispatch_all(manager, x)
            Graph.current.output(*(d[1] for d in dispatched))


def add_graphs(module: Module) -> None:
    """Adds all graphs of this file that run."""
    build_loose(module)
    build_receive(module)
    build_halves(module)
    build_open(module)


@pytest.fixture(scope="module")
def models(one_module: SimpleNamespace) -> dict[str, Model]:
    return one_module.models


@pytest.mark.parametrize("what", ["input_tokens", "topk_ids"])
def test_sizes_that_must_not_be_open(session, models, what: str) -> None:
    """A symbolic hidden size or top_k is refused when it differs.

    The kernels take both from the config, so a tensor with fewer columns would
    be read beyond its end.
    """
    needed = "80" if what == "input_tokens" else "3"
    arrays = [
        np.zeros((4, 40 if what == "input_tokens" else 80), np.uint16),
        np.tile(np.arange(1 if what == "topk_ids" else 3, dtype=np.int32), (4, 1)),
        np.zeros((4, 3), np.float32),
        np.zeros((TWO.max_rows, 80), np.uint16),
    ]
    inputs = [to_buffer(array) for array in arrays]
    with EPCommInitializer(TWO.config()) as comm:
        comm.ep_init(session)
        with raises(ValueError, what, needed) as caught:
            models[f"open_{what}"].execute(*inputs, *comm.model_inputs())
        comm.reset()
    assert "dropped" not in str(caught.value), "it read beyond the ids"


class Loose:
    """A round trip of `TWO` whose tokens, ids and weights may differ in rows.

    `receive` runs the waits of dispatch only: it shows what has arrived after
    a run that ended with an error.
    """

    def __init__(self, session: InferenceSession, models: dict[str, Model]) -> None:
        self._model, self._receive = models["loose"], models["receive"]
        self.comm = EPCommInitializer(TWO.config())
        self.comm.ep_init(session)

    def run(self, given: Inputs, buffers: list[Buffer] | None = None) -> list:
        inputs = []
        for x in zip(given.tokens, given.ids, given.weights):
            inputs += [to_buffer(array) for array in x]
        buffers = self.comm.model_inputs() if buffers is None else buffers
        return take_outputs(TWO, iter(self._model.execute(*inputs, *buffers)))

    def receive(self) -> list[Received]:
        outputs = iter(self._receive.execute(*self.comm.model_inputs()))
        received = []
        for _ in range(TWO.n_ranks):
            rows, offsets, ids, info = (to_numpy(next(outputs)) for _ in range(4))
            none = np.zeros(0)
            received.append(Received(rows, None, offsets, ids, none, info, none))
        return received

    def check_next_run(self) -> None:
        """After `reset` the same buffers are as good as new."""
        self.comm.reset()
        for routing in ("full", "uniform"):
            given = make_inputs(TWO, routing)
            got = self.run(given)
            assert_round_trip(f"after reset, {routing}", got, expected(TWO, given))


@pytest.fixture(scope="module")
def compiled(session, models: dict[str, Model]) -> Iterator[Loose]:
    loose = Loose(session, models)
    yield loose
    loose.comm.close()


@pytest.fixture
def loose(compiled: Loose) -> Iterator[Loose]:
    """`Loose`, usable again after a test whatever happened in it."""
    yield compiled
    compiled.comm.reset()


@pytest.fixture
def given() -> Inputs:
    return make_inputs(TWO, "full")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("bad_id", [5, -2, 2**31 - 1, -(2**31)])
def test_an_id_out_of_range(
    loose: Loose, given: Inputs, rank: int, bad_id: int
) -> None:
    given.ids[rank][2, 1] = bad_id
    given.ids[rank][4, 0] = bad_id
    with raises(
        ValueError,
        "dispatch_async",
        f"rank {rank}",
        "token 2",
        "k 1",
        f"expert {bad_id}",
        "[-1, 5)",
        "2 of 21",
        "reset()",
    ):
        loose.run(given)
    loose.check_next_run()


def test_an_id_out_of_range_harms_no_other_token(loose: Loose, given: Inputs) -> None:
    """All other choices arrive, as if the bad ones had been -1."""
    given.ids[1][[0, 3, 6], [2, 0, 1]] = [5, -7, 1_000_000]
    with raises(ValueError, "rank 1", "token 0", "k 2", "3 of 21"):
        loose.run(given)
    got = loose.receive()
    given.ids[1][[0, 3, 6], [2, 0, 1]] = -1
    assert_dispatched("after bad ids", got, expected_dispatch(TWO, given))
    loose.check_next_run()


def test_the_run_after_a_failed_one_names_reset(loose: Loose, given: Inputs) -> None:
    """Nobody has read what rank 0 sent before it failed, so it may not send.

    I3: no slot is written before its last reader is done with it.
    """
    given.ids[0][0, 0] = 5
    with raises(ValueError, "rank 0"):
        loose.run(given)
    with raises(ValueError, "dispatch_async on rank 0", "has read", "reset()"):
        loose.run(make_inputs(TWO, "uniform"))
    loose.check_next_run()


def test_an_expert_named_too_often(loose: Loose, given: Inputs) -> None:
    given.ids[0][:] = 4
    with raises(ValueError, "rank 0", "14 of 21", "token 2", "expert 4", "distinct"):
        loose.run(given)
    loose.check_next_run()


@pytest.mark.parametrize("rank", [0, 1])
def test_too_many_tokens_at_run_time(loose: Loose, rank: int) -> None:
    counts = [7, 7]
    counts[rank] = 8
    with raises(
        ValueError,
        "dispatch_async",
        f"rank {rank}",
        "8 tokens",
        "max_tokens_per_rank is 7",
        "reset()",
    ):
        loose.run(make_inputs(TWO, "uniform", counts=counts))
    loose.check_next_run()


def test_ids_of_other_tokens(loose: Loose, given: Inputs) -> None:
    given.ids[1] = given.ids[1][:5]
    with raises(ValueError, "dispatch_async", "rows", "topk_ids", "5", "7"):
        loose.run(given)
    loose.check_next_run()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("n_rows", [6, 3, 0])
def test_weights_of_other_tokens(
    loose: Loose, given: Inputs, n_rows: int, rank: int
) -> None:
    given.weights[rank] = given.weights[rank][:n_rows]
    words = ["combine_wait", "router_weights", f"{n_rows}"]
    if rank == 1:  # how many tokens there were is not known, but their rows are
        words += ["21 rows came back", f"only {3 * n_rows}"]
    with raises(ValueError, *words):
        loose.run(given)
    loose.check_next_run()


def test_ops_of_an_error_are_named_once(loose: Loose, given: Inputs) -> None:
    """The first line that is ours begins with the library's name."""
    given.ids[0][0, 0] = 5
    with pytest.raises(ValueError) as caught:
        loose.run(given)
    ours = [s for s in str(caught.value).splitlines() if s.startswith("max_ep: ")]
    assert len(ours) == 1, str(caught.value)
    loose.check_next_run()


def test_counters_that_nobody_set_up(loose: Loose, given: Inputs) -> None:
    buffers = loose.comm.model_inputs()
    n_words = buffers[0].shape[0]
    for rank in range(TWO.n_ranks):
        buffers[rank] = Buffer.from_numpy(np.zeros(n_words, np.int32))
    with raises(ValueError, "atomic_counters", "not initialized", "ep_init()"):
        loose.run(given, buffers)
    loose.check_next_run()


def test_run_after_close(loose: Loose, given: Inputs, session) -> None:
    """Buffers kept from before `close` lead to an error, not to freed memory."""
    comm = EPCommInitializer(TWO.config())
    comm.ep_init(session)
    old = comm.model_inputs()
    want = expected(TWO, given)
    assert_round_trip("before close", loose.run(given, old), want)
    comm.close()
    with raises(ValueError, "symmetric memory", "freed", "close"):
        loose.run(given, old)
    comm.ep_init(session)
    with raises(ValueError, "freed"):
        loose.run(given, old)
    new = comm.model_inputs()
    assert_round_trip("after a second ep_init", loose.run(given, new), want)
    comm.close()


class Halves:
    """Combine of sums of `TWO` in three graphs: whatever goes wrong, between them.

    `send` dispatches and sends the dispatched rows back, `dispatch` only
    dispatches, `receive` adds up; its second input of each rank says by its
    rows how many tokens there are.
    """

    def __init__(self, session: InferenceSession, models: dict[str, Model]) -> None:
        self._models = models
        self.comm = EPCommInitializer(SUMS)
        self.comm.ep_init(session)

    def send(self, given: Inputs, name: str = "send") -> list[Buffer]:
        """Returns the dispatched rows, which are the expert rows."""
        ranks = zip(given.tokens, given.ids, given.weights)
        inputs = [to_buffer(array) for rank in ranks for array in rank]
        return self._models[f"reduced_{name}"].execute(
            *inputs, *self.comm.model_inputs()
        )

    def receive(self, rows: list[Buffer], n_tokens: list[int]) -> list[np.ndarray]:
        inputs = []
        for x, n in zip(rows, n_tokens):
            inputs += [x, to_buffer(np.zeros((n, 1), np.int32))]
        results = self._models["reduced_receive"].execute(
            *inputs, *self.comm.model_inputs()
        )
        return [to_numpy(result) for result in results]

    def check_next_run(self) -> None:
        """After `reset`, all is well; the test after it starts from there."""
        self.comm.reset()
        for routing in ("full", "masked", "uniform"):
            given = make_inputs(SUMS_TWO, routing)
            n_tokens = [len(t) for t in given.tokens]
            results = self.receive(self.send(given), n_tokens)
            for got, want in zip(results, expected(SUMS_TWO, given).combine):
                assert_same_bits(f"after reset, {routing}", got, want)
        self.comm.reset()


SUMS_TWO = dataclasses.replace(TWO, protocol="by_rank", combine_mode="sums")


@pytest.fixture(scope="module")
def halves(session, models: dict[str, Model]) -> Iterator[Halves]:
    halves = Halves(session, models)
    yield halves
    halves.comm.close()


@pytest.mark.parametrize("n_tokens", [[6, 7], [7, 0]])
def test_sums_combine_of_other_tokens(
    halves: Halves, given: Inputs, n_tokens: list[int]
) -> None:
    rows = halves.send(given)
    rank = 0 if n_tokens[0] < 7 else 1
    words = [f"rank {rank}", f"{n_tokens[rank]} tokens", "7 were dispatched", "reset()"]
    with raises(ValueError, "combine_wait", *words):
        halves.receive(rows, n_tokens)
    halves.check_next_run()


def test_sums_combine_of_rows_cut_short(halves: Halves, given: Inputs) -> None:
    rows = halves.send(given)
    assert rows[0].shape[0] == 42
    rows[0] = rows[0][:41, :]
    with raises(ValueError, "combine_wait on rank 0", "end at 42", "holds 41"):
        halves.receive(rows, [7, 7])
    halves.check_next_run()


def test_router_weights_of_other_tokens(halves: Halves, given: Inputs) -> None:
    given.weights[1] = given.weights[1][:5]
    with raises(ValueError, "dispatch_async", "rows of router_weights", "5", "7"):
        halves.send(given)
    halves.check_next_run()


def test_a_dispatch_between_async_and_wait_of_sums(
    halves: Halves, given: Inputs
) -> None:
    """The own rows would be looked for where those of the next dispatch are."""
    rows = halves.send(given)
    halves.send(given, "dispatch")
    with raises(
        ValueError,
        "combine_wait on rank 0",
        "combine_async answered dispatch 1",
        "last dispatch_wait was of 2",
        "before the next one",
    ):
        halves.receive(rows, [7, 7])
    halves.check_next_run()


def test_a_dispatch_is_not_received_between_async_and_wait_of_sums() -> None:
    with building(SUMS_TWO.config()) as (manager, x):
        for _ in range(2):
            for rank in range(2):
                manager.ep_dispatch_async(x.tokens, x.ids, rank, None, x.weights)
            if manager._order[1].is_under_way(0):
                break
            for rank in range(2):
                manager.ep_dispatch_wait(rank)
            for rank in range(2):
                manager.ep_combine_async(x.rows, rank)
        words = ("ep_dispatch_wait on device 0", "ep_combine_wait first")
        with raises(ValueError, *words):
            manager.ep_dispatch_wait(0)
        for rank in range(2):
            manager.ep_combine_wait(None, rank)
        manager.ep_dispatch_wait(0)


@pytest.mark.parametrize("token_idx", [0, 6])
def test_a_lost_partial_sum_is_not_summed_as_nothing(
    halves: Halves, given: Inputs, token_idx: int
) -> None:
    """The flag of one partial on rank 0 is what it was before generation 1."""
    given.ids[0][:] = [0, 3, 4]  # one row on rank 0, two on rank 1
    rows = halves.send(given)
    recv = halves.comm.model_inputs()[-3].to_numpy()[0]
    msg_bytes = SUMS.sizes().combine_msg_bytes
    partial = (1 * SUMS.max_tokens_per_rank + token_idx) * msg_bytes
    flag = ctypes.c_uint64.from_address(int(recv) + partial + msg_bytes - 16)
    assert flag.value == 1 << 32 | 2, "generation 1, two rows"
    flag.value = 0
    with raises(ValueError, "combine_wait on rank 0", "21 rows", "sums of 19"):
        halves.receive(rows, [7, 7])
    halves.check_next_run()


_OTHER_CONFIG = """
from test_errors import *
from max.driver import CPU as Host
session = InferenceSession(devices=[Host()])
loose = Loose(session, session.load_all(sys.argv[1]))
comm = EPCommInitializer(TWO.config(hidden_size=40))
comm.ep_init(session)
try:
    loose.run(make_inputs(TWO, "full"), comm.model_inputs())
except ValueError as error:
    print("refused:", error)
else:
    print("ran")
"""


def test_memory_of_another_config(one_module: SimpleNamespace) -> None:
    """`model_inputs` of smaller buffers are refused, not overrun.

    In a process of its own, for it may crash.
    """
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_CONFIG, str(one_module.path)],
        cwd=Path(__file__).parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"died of {done.returncode}: {done.stderr[-500:]}"
    assert "refused:" in done.stdout, done.stdout
    assert "belongs to another EPConfig" in done.stdout


def environment() -> dict[str, str]:
    """An environment in which a child process imports what this one does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def test_the_set_up_graph_is_loaded_once_a_session(
    session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading takes seconds; one graph prepares groups of all sizes."""
    loaded = []
    load = session.load
    monkeypatch.setattr(session, "load", lambda g: loaded.append(g) or load(g))
    for name in ("one_rank", "fp8"):
        with EPCommInitializer(CASES[name].config()) as comm:
            comm.ep_init(session)
    assert len(loaded) <= 1
