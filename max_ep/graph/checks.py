# SPDX-License-Identifier: Apache-2.0
"""Checks of graph builders: dtypes, shapes, devices, and forms that can run.

Each error says what was given, what is needed, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, StaticDim, TensorValue, Value
from max.graph.ops import cast

from ..config import EPConfig
from ..formats import PLAIN_DTYPES
from . import ops


def check_value(
    value: Value,
    what: str,
    dtypes: DType | tuple[DType, ...],
    shape: list[int | None],
    device: DeviceRef | None,
) -> None:
    """Raises unless a value has this dtype, shape and device; None: any."""
    if not isinstance(value, (TensorValue, BufferValue)):
        raise TypeError(
            f"{what} is a {type(value).__name__}; pass a graph value (a "
            "TensorValue, or `.tensor` of a graph input)"
        )
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if value.dtype not in dtypes:
        raise TypeError(
            f"{what} has dtype {value.dtype}, it must be "
            f"{' or '.join(str(d) for d in dtypes)}; cast it"
        )
    given = list(value.shape)
    fits = len(given) == len(shape) and all(
        want is None or not isinstance(have, StaticDim) or int(have) == want
        for have, want in zip(given, shape)
    )
    if not fits:
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        raise ValueError(
            f"{what} has shape [{', '.join(str(d) for d in given)}], it must be "
            f"[{wanted}]"
        )
    if device is not None and value.device != device:
        ref = "CPU()" if device.is_cpu() else f"GPU({device.id})"
        raise ValueError(
            f"{what} is on {value.device}, it must be on {device}; move it with "
            f".to(DeviceRef.{ref}), or choose another EPConfig.target"
        )


def _differ(a: Dim, b: Dim) -> bool:
    """Returns whether two sizes are known and differ."""
    return isinstance(a, StaticDim) and isinstance(b, StaticDim) and a != b


def check_n_tokens(config: EPConfig, what: str, n_tokens: Dim) -> None:
    if isinstance(n_tokens, StaticDim) and int(n_tokens) > config.max_tokens_per_rank:
        raise ValueError(
            f"{what} has {int(n_tokens)} tokens, EPConfig.max_tokens_per_rank is "
            f"{config.max_tokens_per_rank}; send fewer at a time, or raise it"
        )


def check_buffers(
    config: EPConfig, counter: BufferValue, *pointers: TensorValue
) -> list[TensorValue]:
    """Checks counters and addresses; returns the latter: all kinds, or the last."""
    if not isinstance(counter, BufferValue):
        raise TypeError(
            f"atomic_counter is a {type(counter).__name__}; it must be a "
            "BufferValue: an input declared by EPBatchManager.input_types()"
        )
    words = config.sizes().counters_words
    check_value(counter, "atomic_counter", DType.int32, [words], None)
    kinds = ("send_buf_ptrs", "recv_buf_ptrs", "recv_count_ptrs")[-len(pointers) :]
    for what, value in zip(kinds, pointers):
        shape = [config.exchange_ranks]
        check_value(value, what, DType.uint64, shape, DeviceRef.CPU())
    return list(pointers)


Tokens = TensorValue | tuple[TensorValue, TensorValue]
"""Tokens of a rank, or with ``tokens_are_quantized`` their values and scales."""


def n_tokens_of(given: Tokens) -> Dim:
    """Returns how many tokens are given."""
    return (given if isinstance(given, TensorValue) else given[0]).shape[0]


def tokens_for_op(config: EPConfig, given: Tokens, device: DeviceRef) -> TensorValue:
    """Checks tokens; returns them as the ops take them, quantized ones joined."""
    is_pair = isinstance(given, (tuple, list))
    if is_pair != config.tokens_are_quantized:
        raise TypeError(
            f"input_tokens are {'a pair' if is_pair else 'one tensor'} with "
            f"tokens_are_quantized={config.tokens_are_quantized}: dispatch takes "
            "(values, scales) exactly if that is set"
        )
    if not is_pair:
        shape = [None, config.hidden_size]
        dtypes = config.token_format.token_dtypes
        check_value(given, "input_tokens", dtypes, shape, device)
        if config.nvfp4_dyn_global_scales:
            return ops.quantize_dynamic(config, given)
        return given
    values, scales = given
    shape = [None, config.row_columns]
    check_value(values, "values of input_tokens", config.output_dtype, shape, device)
    shape = [None, config.n_scales]
    check_value(scales, "scales of input_tokens", config.scales_dtype, shape, device)
    check_same_rows("values of input_tokens", values, "scales", scales)
    return ops.join_quantized(config, values, scales)


def check_send(
    config: EPConfig,
    input_tokens: TensorValue,
    topk_ids: TensorValue,
    device: DeviceRef,
) -> None:
    check_n_tokens(config, "input_tokens", input_tokens.shape[0])
    shape = [None, config.n_given_choices]
    if isinstance(topk_ids, TensorValue) and topk_ids.dtype.is_float():
        raise TypeError(
            f"topk_ids has dtype {topk_ids.dtype}, it must be {DType.int32}: pass the "
            "ids of the experts here, and the router's weights where they belong"
        )
    check_value(topk_ids, "topk_ids", DType.int32, shape, device)
    check_same_rows("input_tokens", input_tokens, "topk_ids", topk_ids)


def check_same_rows(
    what: str, value: TensorValue, other: str, other_value: TensorValue
) -> None:
    a, b = value.shape[0], other_value.shape[0]
    if _differ(a, b):
        raise ValueError(
            f"{what} has {a} rows and {other} has {b}; pass as many rows of both, "
            "one a token"
        )


def rows_for_op(
    config: EPConfig,
    input_tokens: TensorValue,
    src_info: TensorValue | None,
    device: DeviceRef,
) -> list[TensorValue]:
    """Checks expert rows, and src_info if given; returns them in two dimensions."""
    rows: list[int | None] = [None]
    if config.is_padded:
        rows = [config.n_local_experts, config.expert_capacity]
    is_tensor = isinstance(input_tokens, TensorValue)
    if config.is_quantized and is_tensor and input_tokens.dtype == config.output_dtype:
        raise TypeError(
            f"input_tokens of combine has dtype {input_tokens.dtype}, as the "
            f"{config.token_format.short_name.upper()} rows that dispatch delivers; "
            "pass what the experts made of them, in "
            f"{config.combine_dtype}. max_ep.dequantize(rows, scales, config) makes "
            "rows for experts; a cast alone leaves the scales out"
        )
    shape = [*rows, config.hidden_size]
    check_value(input_tokens, "input_tokens", config.combine_dtype, shape, device)
    values = [input_tokens]
    if src_info is not None:
        check_value(src_info, "src_info", DType.int32, [*rows, 2], device)
        have, want = input_tokens.shape[0], src_info.shape[0]
        if _differ(have, want):
            raise ValueError(
                f"input_tokens of combine has {have} rows and src_info of the dispatch "
                f"has {want}; pass the experts' rows of what dispatch delivered, all "
                f"{want}, each where it was"
            )
        values.append(src_info)
    return [v.reshape([-1, v.shape[-1]]) if config.is_padded else v for v in values]


def weights_for_op(
    config: EPConfig,
    router_weights: TensorValue | None,
    num_tokens: Dim,
    device: DeviceRef,
    phase: str,
) -> TensorValue:
    """Checks router weights; returns them as the ops take them, widened to float32.

    One direction takes them. In the other a tensor stands in their place.
    """
    used_by = "dispatch" if config.combines_sums else "combine"
    if (router_weights is not None) != (phase == used_by):
        needs, what = ("needs", "those of all tokens")
        if phase != used_by:
            needs, what = ("takes no", "None")
        raise ValueError(
            f"{phase} with combine_mode={config.combine_mode!r} {needs} router "
            f"weights: {used_by} takes them; pass {what} to {phase}, or choose another "
            "EPConfig.combine_mode"
        )
    if router_weights is None:
        return ops.placeholder(device, 1, 1)
    shape = [None, config.n_given_choices]
    check_value(router_weights, "router_weights", PLAIN_DTYPES, shape, device)
    n_rows = router_weights.shape[0]
    check_n_tokens(config, "router_weights", n_rows)
    if _differ(n_rows, num_tokens):
        raise ValueError(
            f"router_weights has {n_rows} rows, num_tokens is {num_tokens}; pass "
            "the weights of the tokens that were dispatched, a row each"
        )
    return cast(router_weights, DType.float32)


def scales_for_op(
    config: EPConfig, input_scales: TensorValue | None, device: DeviceRef
) -> TensorValue:
    """Checks input scales; returns them, or an empty tensor where there are none."""
    if input_scales is None:
        return ops.placeholder(device, 0)
    if config.tokens_are_quantized or config.nvfp4_dyn_global_scales:
        raise ValueError(
            "input_scales with tokens_are_quantized or nvfp4_dyn_global_scales: such "
            "tokens have their scales; pass None"
        )
    if config.combines_sums:
        raise ValueError(
            "input_scales are factors of experts, which combine_mode='sums' does "
            "not take; scale the tokens before dispatch. If these are the router's "
            "weights, pass them by name, as router_weight (of all ranks: "
            "router_weights)"
        )
    if config.fused_shared_expert or config.is_by_rank:
        raise ValueError(
            "input_scales are factors of experts, and with fused_shared_expert="
            f"{config.fused_shared_expert} and protocol={config.protocol!r} a token is "
            "encoded once for several experts; scale the tokens before dispatch, or "
            "pass protocol='by_expert' without a fused shared expert"
        )
    check_value(input_scales, "input_scales", DType.float32, [None], device)
    n = input_scales.shape[0]
    if not isinstance(n, StaticDim) or int(n) not in (1, config.exchange_experts):
        raise ValueError(
            f"input_scales has shape [{n}], it must be [1] or "
            f"[n_experts={config.exchange_experts}]"
        )
    return input_scales


def check_all_ranks(
    config: EPConfig, device_ids: list[int], **lists: Sequence[TensorValue] | None
) -> None:
    """Raises unless all local ranks are named, and each list has a value for each."""
    if sorted(device_ids) != list(range(config.n_gpus_per_node)):
        raise ValueError(
            f"device_ids={device_ids} must name all "
            f"{config.n_gpus_per_node} ranks of this process"
        )
    check_one_a_rank(len(device_ids), **lists)


def check_one_a_rank(n_ranks: int, **lists: Sequence[TensorValue] | None) -> None:
    """Raises unless each list has a value for each local rank."""
    for what, values in lists.items():
        if isinstance(values, TensorValue):
            raise TypeError(
                f"{what} is one TensorValue; pass a list, with a tensor for each of "
                f"the {n_ranks} local ranks"
            )
        if values is not None and len(values) != n_ranks:
            raise ValueError(
                f"{what} has {len(values)} tensors for {n_ranks} local ranks; pass "
                "one for each"
            )


def check_phase(phase: str) -> None:
    """Raises unless a word names a direction."""
    if phase not in ("dispatch", "combine"):
        raise ValueError(f"phase={phase!r}; there are 'dispatch' and 'combine'")


def refuse_if_in_turn(config: EPConfig, what: str, instead: str) -> None:
    """Raises if a rank would wait for peers that run after it."""
    if not config.runs_ranks_in_turn:
        return
    if config.target == "gpu":
        raise ValueError(
            f"{what} of one rank waits for its peers, but the ranks that share a "
            f"GPU run one after another (ranks_per_gpu={config.ranks_per_gpu}). "
            f"Use {instead}, or a GPU for each rank (ranks_per_gpu=1)"
        )
    raise ValueError(
        f"{what} of one rank waits for its peers, but the "
        f"{config.n_gpus_per_node} ranks of this process run one after "
        f"another (target='cpu', n_gpus_per_node={config.n_gpus_per_node}). "
        f"Use {instead}, or one process a rank (n_gpus_per_node=1, n_nodes="
        f"{config.n_ranks})"
    )
