# SPDX-License-Identifier: Apache-2.0
"""Encodes a token with a warp, several steps at once. A step is 16 bytes per lane."""
from ..token_format import LaneBytes, TokenFormat
from .warp import ACCESSES_IN_FLIGHT

comptime ENCODED_IN_FLIGHT = 48
"""Elements that fit into the registers with scales (tests/test_codegen.py)."""


@always_inline
def steps_in_flight[token_fmt_type: TokenFormat]() -> Int:
    """Counts the steps of a token that a lane encodes at once, in registers."""
    return (
        ENCODED_IN_FLIGHT
        // token_fmt_type.lane_elements if token_fmt_type.scale_vectors
        > 0 else ACCESSES_IN_FLIGHT
    )


@always_inline
def encode_steps[
    in_flight: Int, //, input_type: DType, token_fmt_type: TokenFormat, is_scaled: Bool
](
    elements: Array[SIMD[input_type, token_fmt_type.lane_elements], in_flight],
    mut values: Array[LaneBytes, in_flight],
    mut scales: Array[LaneBytes, in_flight],
    input_scale: Float32,
    lane: Int,
):
    """Encodes some steps of a token."""
    comptime for i in range(in_flight):
        var wire = token_fmt_type.encode_lane[input_type, is_scaled](
            elements[i], input_scale, lane
        )
        values[i] = wire.values
        scales[i] = wire.scales
