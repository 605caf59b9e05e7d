# SPDX-License-Identifier: Apache-2.0
"""`encode_e4m3fn` against Mojo's own cast, over all of float32's range.

Prints OK, or raises. Run by `checks.mojo`.
"""
from max_ep.formats.casts import encode_e4m3fn
from std.memory import bitcast
from std.testing import assert_true

comptime WIDTH = 16
comptime STEP = 101


def main() raises:
    """Compares every `STEP`-th bit pattern, NaN aside."""
    var n_compared = 0
    for start in range(0, 1 << 32, WIDTH * STEP):
        var bits = SIMD[DType.uint32, WIDTH](0)
        comptime for lane in range(WIDTH):
            bits[lane] = UInt32((start + lane * STEP) & 0xFFFF_FFFF)
        var x = bitcast[DType.float32](bits)
        var found = encode_e4m3fn(x)
        comptime for lane in range(WIDTH):
            var wanted = bitcast[DType.uint8](x[lane].cast[DType.float8_e4m3fn]())
            if x[lane] == x[lane]:
                n_compared += 1
                if found[lane] != wanted:
                    raise Error(x[lane], ": ", found[lane], ", not ", wanted)
            elif found[lane] & 0x7F != 0x7F:
                raise Error("NaN gives ", found[lane])
    assert_true(n_compared > 40_000_000)
    print("OK")
