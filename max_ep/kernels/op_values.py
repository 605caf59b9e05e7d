# SPDX-License-Identifier: Apache-2.0
"""What the ops take and deliver, by format, protocol and layout of an ``EPConfig``:
suffixes of their names, parameters, and the values where shapes differ.
"""

from __future__ import annotations

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Dim, StaticDim, TensorType, TensorValue, ops

from ..checks import check_value, check_weights, check_weights_come_once
from ..config import EPConfig
from ..limits import FP8_BLOCK

# The ops still have these two parameters; nothing sets them.
DISPATCH_SENDS_ALL = {"tokens_are_sent": False}
PHASES_DO_NOT_OVERLAP = {"halves_overlap": False}


def format_suffix(config: EPConfig) -> str:
    if config.n_carried:
        return ".with_choices"
    return ".fp8" if config.is_quantized else ""


def format_parameters(config: EPConfig) -> dict[str, bool | int | DType]:
    protocol = {"protocol": config.sizes().protocol}
    if config.is_quantized:
        return protocol | {"power_of_two_scales": config.fp8_power_of_two_scales}
    plain = protocol | {"dispatch_dtype": config.dispatch_dtype}
    return plain | {"n_carried": config.n_carried} if config.n_carried else plain


def recv_parameters(config: EPConfig) -> dict[str, bool | str]:
    return {
        "fused_shared_expert": config.fused_shared_expert,
        "output_layout": config.output_layout,
    }


def combine_parameters(config: EPConfig) -> dict[str, int | DType]:
    return {
        "combine_dtype": config.combine_dtype,
        "protocol": config.sizes().protocol,
        "partial_dtype": config.combine_wire_dtype,
    }


def scales_for_op(
    config: EPConfig, input_scales: TensorValue | None, device: DeviceRef
) -> TensorValue:
    """Returns the input scales, an empty tensor where there are none."""
    if input_scales is None:
        return ops.constant(np.zeros(0, np.float32), DType.float32, device)
    if config.fused_shared_expert:
        raise ValueError(
            "input_scales are factors of routed experts, and with "
            "fused_shared_expert=True a token is encoded once for all experts; "
            "scale the tokens before dispatch, or compute the shared expert "
            "beside the routed ones"
        )
    if config.combines_sums:
        raise ValueError(
            "input_scales are factors of experts, which combine_mode='sums' does "
            "not take; scale the tokens before dispatch. If these are the router's "
            "weights, pass them by name, as router_weight (of all ranks: "
            "router_weights)"
        )
    if config.is_by_rank:
        raise ValueError(
            "input_scales are factors of experts, and with protocol='by_rank' a token "
            "is encoded once for all experts of a rank; pass protocol='by_expert', or "
            "scale the tokens before dispatch"
        )
    check_value(input_scales, "input_scales", DType.float32, [None], device)
    n = input_scales.shape[0]
    if not isinstance(n, StaticDim) or int(n) not in (1, config.n_experts):
        raise ValueError(
            f"input_scales has shape [{n}], it must be [1] or "
            f"[n_experts={config.n_experts}]"
        )
    return input_scales


def weights_for_op(
    config: EPConfig,
    router_weights: TensorValue | None,
    num_tokens: Dim,
    device: DeviceRef,
    phase: str,
) -> TensorValue:
    """Returns the weights as the ops take them; a bfloat16 router's, widened.

    Where the other phase takes them: a tensor in their place that nobody reads.
    """
    check_weights_come_once(config, router_weights, phase)
    if router_weights is None:
        return ops.constant(np.zeros((1, 1), np.float32), DType.float32, device)
    check_weights(config, router_weights, num_tokens, device)
    return ops.cast(router_weights, DType.float32)


def flat_rows(config: EPConfig, value: TensorValue) -> TensorValue:
    """Returns rows as the ops of combine take them: in two dimensions."""
    return value.reshape([-1, value.shape[-1]]) if config.is_padded else value


def recv_types(config: EPConfig, device: DeviceRef) -> list[TensorType]:
    """Returns the types of what the ops of dispatch deliver.

    To the ops padded rows are rows with gaps between, so in two dimensions.
    """
    n_rows, n_local = config.n_output_rows, config.n_local_experts
    types = [TensorType(config.output_dtype, [n_rows, config.hidden_size], device)]
    if config.is_quantized:
        n_scales = config.hidden_size // FP8_BLOCK
        shape = [n_scales, n_rows]
        if config.is_padded:
            shape = [n_local * n_scales, config.expert_capacity]
        types.append(TensorType(DType.float32, shape, device))
    if config.n_carried:
        carried = [n_rows, config.n_carried]
        types += [
            TensorType(DType.int32, carried, device),
            TensorType(DType.float32, carried, device),
            TensorType(DType.int32, [1], device),
        ]
    if config.is_padded:
        types += [
            TensorType(DType.int32, [n_local], device),
            TensorType(DType.int32, [n_local * config.n_ranks, 2], device),
        ]
    else:
        n_groups = n_local + int(config.fused_shared_expert)
        types += [
            TensorType(DType.uint32, [n_groups + 1], device),
            TensorType(DType.int32, [n_groups], device),
        ]
    return [*types, TensorType(DType.int32, [n_rows, 2], device)]


def result_type(config: EPConfig, num_tokens: Dim, device: DeviceRef) -> TensorType:
    """Returns the type of what the ops of combine deliver."""
    return TensorType(config.combine_dtype, [num_tokens, config.hidden_size], device)


def recv_outputs(
    config: EPConfig, results: list[TensorValue]
) -> tuple[TensorValue, ...]:
    """Gives what the ops of dispatch deliver its shapes and order."""
    if not config.is_padded:
        return tuple(results)
    n_local = config.n_local_experts
    *tokens_and_scales, recv_counts, recv_ranges, src_info = (
        value.reshape([n_local, -1, value.shape[-1]]) if value.rank == 2 else value
        for value in results
    )
    return (*tokens_and_scales, recv_counts, src_info, recv_ranges)
