# SPDX-License-Identifier: Apache-2.0
"""Encodes a token with a warp, several steps at once. A step is 16 bytes per lane."""
from max.gpu import WARP_SIZE

from ..protocol.flags import store_relaxed_sys_16
from ..protocol.layout import MESSAGE_ALIGN
from ..protocol.token_format import LaneBytes, LaneWire, TokenFormat
from .schedule import vector_of_lane
from .warp import ACCESSES_IN_FLIGHT, avoid_sentinel, bytes_at, store16

comptime ENCODED_IN_FLIGHT = 48
"""Elements that fit into the registers with scales (tests/codegen/test_codegen.py)."""


def steps_in_flight[token_fmt_type: TokenFormat]() -> Int:
    """Counts the steps that a lane encodes at once, in registers."""
    return (
        ENCODED_IN_FLIGHT
        // token_fmt_type.lane_elements if token_fmt_type.scale_vectors
        > 0 else ACCESSES_IN_FLIGHT
    )


struct EncodedSteps[Format: TokenFormat, in_flight: Int]:
    """Some steps of an encoded token, as a lane of a warp holds them."""

    var wire: Array[LaneWire, Self.in_flight]

    @always_inline
    def __init__(out self):
        self.wire = {fill = LaneWire(0, 0)}

    @always_inline
    def encode[
        input_type: DType, //, is_scaled: Bool
    ](
        mut self,
        elements: Array[SIMD[input_type, Self.Format.lane_elements], Self.in_flight],
        input_scale: Float32,
        lane: Int,
    ):
        comptime for i in range(Self.in_flight):
            self.wire[i] = Self.Format.encode_lane[input_type, is_scaled](
                elements[i], input_scale, lane
            )

    @always_inline
    def store[is_inline: Bool](self, to: UInt64, first: Int, end: Int, lane: Int):
        """Writes them to a message, up to a step, with one warp."""

        @always_inline
        @__parameter
        def store[flip: UInt32](offset: Int, bytes: LaneBytes):
            var p = bytes_at(to).unsafe_offset(offset)
            comptime if is_inline:
                store_relaxed_sys_16(p, avoid_sentinel[flip](bytes))
            else:
                store16(p, bytes)

        comptime for i in range(Self.in_flight):
            var step = first + i
            var vector, is_in_chunk = vector_of_lane[Self.Format](step, end, lane)
            if is_in_chunk:
                store[Self.Format.values_flip](
                    vector * MESSAGE_ALIGN, self.wire[i].values
                )
                comptime n = Self.Format.scale_vectors
                comptime if n > 0:
                    # Lane `j` of 32 has the j-th 16 bytes of their scales.
                    var of_lanes = step
                    var j = lane
                    comptime if WARP_SIZE > 32:
                        of_lanes = vector // 32
                        j = lane % 32
                    var has_scales = j == 0
                    var of_token = of_lanes
                    comptime if n > 1:
                        of_token = of_lanes * n + j
                        has_scales = j < n and of_token < Self.Format.n_scale_vectors
                    if has_scales:
                        store[Self.Format.scales_flip](
                            Self.Format.value_bytes + of_token * MESSAGE_ALIGN,
                            self.wire[i].scales,
                        )
