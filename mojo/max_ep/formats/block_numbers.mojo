# SPDX-License-Identifier: Apache-2.0
"""BlockNumbers: the values and scales of a format that has a scale for each block."""
from std.memory import bitcast
from std.sys import size_of

from .casts import one_nan_e4m3fn, one_zero_e2m1fn, to_e2m1fn, to_e4m3fn, WIDTH


@fieldwise_init
struct BlockScale(TrivialRegisterPassable):
    """The scale of a block."""

    var bits: UInt32
    """On the wire."""
    var factor: Float32
    """Multiplies the elements, before they are rounded."""


trait BlockNumbers:
    """The numbers of a block-scaled format.

    amax   = largest magnitude of the block, at least `least`
    scale  = scale_of(amax)
    values = values_of(x * scale.factor)
    """

    comptime name: StaticString
    """As ops take it."""
    comptime block: Int
    """Elements that share a scale; see `checked_block`."""
    comptime value_type: DType
    """A type of 8 bits; or float4_e2m1fn, the first of two in a byte's lower half."""
    comptime value_bits: Int = 4 if Self.value_type == DType.float4_e2m1fn else 8
    comptime scale_type: DType
    """An unsigned integer of the scale's size: uint32 or uint8."""
    comptime magnitude_type: DType = DType.uint32
    comptime least: Scalar[Self.magnitude_type] = 0

    @staticmethod
    @always_inline
    def known_values(bits: UInt32) -> UInt32:
        """Replaces, in four bytes of values, those that `values_of` does not make, of
        which there must be some (`unused_words.mojo`): NaN has one form, and 0 of 4 bits
        no sign."""
        comptime if Self.value_type == DType.float8_e4m3fn:
            return one_nan_e4m3fn(bits)
        elif Self.value_type == DType.float4_e2m1fn:
            return one_zero_e2m1fn(bits)
        else:
            comptime assert False, _needs_own["known_values", Self.value_type]

    @staticmethod
    def known_scales(bits: UInt32) -> UInt32:
        """The same for four bytes of scales, and `scale_of`."""
        ...

    @staticmethod
    @always_inline
    def magnitude(x: SIMD[DType.float32, WIDTH]) -> SIMD[Self.magnitude_type, WIDTH]:
        """Takes magnitudes, as numbers that compare as they do: the bits of float32, of
        which those of a NaN are largest."""
        return rebind[SIMD[Self.magnitude_type, WIDTH]](
            bitcast[DType.uint32](x) & 0x7FFF_FFFF
        )

    @staticmethod
    def scale_of(amax: Scalar[Self.magnitude_type]) -> BlockScale:
        ...

    @staticmethod
    @always_inline
    def values_of(
        x: SIMD[DType.float32, WIDTH]
    ) -> SIMD[DType.uint8, 2 * Self.value_bits]:
        """Rounds elements to `value_type`, and packs them. Must not begin with an
        addition, which would be fused with the multiplication that made `x`."""
        comptime Values = SIMD[DType.uint8, 2 * Self.value_bits]
        comptime if Self.value_type == DType.float8_e4m3fn:
            return rebind[Values](to_e4m3fn(x))
        elif Self.value_type == DType.float4_e2m1fn:
            return rebind[Values](to_e2m1fn(x))
        else:
            comptime assert False, _needs_own["values_of", Self.value_type]


comptime _needs_own[member: StaticString, value_type: DType] = String(
    t"max_ep: values of {value_type} need a `{member}` of their own"
)


def checked_block[Numbers: BlockNumbers]() -> Int:
    """Returns the format's block, which GPU lanes must be able to share."""
    comptime block = Numbers.block
    comptime value_bits = Numbers.value_bits
    comptime n_bytes = size_of[Scalar[Numbers.scale_type]]()
    comptime assert size_of[Scalar[Numbers.value_type]]() == 1, String(
        t"max_ep: values of {Numbers.value_type} have neither 8 bits nor 4"
    )
    comptime assert n_bytes == 1 or n_bytes == 4, String(
        t"max_ep: scales of {Numbers.scale_type} have neither 1 byte nor 4"
    )
    # Scales of 32 lanes fill one to four times 16 bytes (`TokenFormat.scale_vectors`).
    comptime lane_elements = 128 // value_bits
    comptime fewest = max(16, lane_elements * n_bytes // 2)
    comptime most = 2 * lane_elements * n_bytes
    comptime assert fewest <= block <= most and block & (block - 1) == 0, String(
        t"max_ep: a block of {block} elements; with values of {value_bits} bits and "
        t"scales of {n_bytes} bytes it must be a power of two in [{fewest}, {most}]"
    )
    return block
