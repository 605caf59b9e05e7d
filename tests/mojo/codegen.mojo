# SPDX-License-Identifier: Apache-2.0
"""Compiles the GPU kernels for devices that need not be there.

Takes a folder, and writes assembly to `<target>.<kernel>.<variant>.s` in it, and
what NVIDIA's assembler makes of it to `.cubin`. Prints what the assembly shows of
the sources' constants. Run by tests/test_codegen.py.
"""
from emitting import emit, emit_amd
from groups import combine_group, dispatch_group
from max_ep.combine_rows.phase import CombineRows
from max_ep.counters import (
    _COMBINE_RECEIVED,
    _COMBINE_SENT,
    _DISPATCH_RECEIVED,
    _DISPATCH_SENT,
    FAILURE_WORD,
)
from max_ep.device.encode import ENCODED_IN_FLIGHT
from max_ep.device.phase import InputScales, phase_kernel
from max_ep.device.warp import ACCESSES_IN_FLIGHT
from max_ep.dispatch_by_expert.phase import DispatchByExpert
from max_ep.formats.blockwise_fp8 import BlockwiseFP8TokenFormat
from max_ep.gpu_setup import clear_kernel
from max_ep.layout import Addressing, MAX_TOP_K
from max_ep.token_format import BF16TokenFormat, TokenFormat
from std.sys import size_of

# A large model on eight H200.
comptime HIDDEN = 7168
comptime TOP_K = 8
comptime N_EXPERTS = 256
comptime N_RANKS = 8
comptime MAX_TOKENS = 128
comptime N_SMS = 132

comptime BF16 = BF16TokenFormat[HIDDEN, TOP_K]
comptime FP8 = BlockwiseFP8TokenFormat[HIDDEN, TOP_K]


@__parameter
def scale_of[dtype: DType](expert_id: Int) -> Scalar[dtype]:
    return Scalar[dtype](expert_id)


comptime SCALES = InputScales(scale_of)

comptime Dispatch[Format: TokenFormat, padded: Bool, shared: Bool] = (
    DispatchByExpert[
        dispatch_group[
            Format,
            N_EXPERTS,
            N_RANKS,
            MAX_TOKENS,
            Addressing.BY_EXPERT,
            padded=padded,
            shared=shared,
        ](),
        Format,
        DType.bfloat16,
    ]
)

comptime dispatch_async[
    Format: TokenFormat, shared: Bool = False, scales: InputScales = None
] = phase_kernel[Dispatch[Format, False, shared], True, False, scales]

comptime dispatch_wait[
    Format: TokenFormat, padded: Bool = False, shared: Bool = False
] = phase_kernel[Dispatch[Format, padded, shared], False, True]

comptime dispatch[
    Format: TokenFormat, padded: Bool = False, shared: Bool = False
] = phase_kernel[Dispatch[Format, padded, shared], True, True]

comptime Combine[
    dtype: DType, shared: Bool = False, top_k: Int = TOP_K
] = CombineRows[
    combine_group[
        dtype,
        HIDDEN,
        top_k,
        N_EXPERTS,
        N_RANKS,
        MAX_TOKENS,
        shared=shared,
    ](),
    dtype,
]

comptime combine_async[dtype: DType] = phase_kernel[Combine[dtype], True, False]

comptime combine_wait[dtype: DType, shared: Bool = False] = phase_kernel[
    Combine[dtype, shared], False, True
]

comptime combine[
    dtype: DType, shared: Bool = False, top_k: Int = TOP_K
] = phase_kernel[Combine[dtype, shared, top_k], True, True]


def emit_both[
    Kernel: TrivialRegisterPassable, //, kernel: Kernel
](name: String) raises:
    emit[kernel](name)
    emit_amd[kernel](name)


def main() raises:
    """Compiles what the test names."""
    emit_both[dispatch_async[BF16]]("dispatch_async.bf16")
    emit_both[dispatch_async[BF16, shared=True]]("dispatch_async.bf16_shared")
    emit_both[dispatch_async[FP8]]("dispatch_async.fp8")
    emit_both[dispatch_async[FP8, scales=SCALES]]("dispatch_async.fp8_scaled")
    emit_both[dispatch_wait[BF16]]("dispatch_wait.bf16")
    emit_both[dispatch_wait[BF16, padded=True]]("dispatch_wait.bf16_padded")
    emit_both[dispatch_wait[BF16, shared=True]]("dispatch_wait.bf16_shared")
    emit_both[dispatch_wait[FP8]]("dispatch_wait.fp8")
    emit_both[dispatch_wait[FP8, padded=True]]("dispatch_wait.fp8_padded")
    emit_both[dispatch[BF16]]("dispatch.bf16")
    emit_both[dispatch[BF16, shared=True]]("dispatch.bf16_shared")
    emit_both[dispatch[FP8, padded=True]]("dispatch.fp8_padded")
    emit_both[combine_async[DType.bfloat16]]("combine_async.bf16")
    emit_both[combine_wait[DType.bfloat16]]("combine_wait.bf16")
    emit_both[combine_wait[DType.bfloat16, shared=True]](
        "combine_wait.bf16_shared"
    )
    emit_both[combine_wait[DType.float32]]("combine_wait.f32")
    emit_both[combine[DType.bfloat16]]("combine.bf16")
    emit_both[combine[DType.bfloat16, shared=True]]("combine.bf16_shared")
    emit_both[combine[DType.bfloat16, top_k=MAX_TOP_K]]("combine.bf16_many")
    emit_both[clear_kernel]("clear.any")
    print(NUM_THREADS, ACCESSES_IN_FLIGHT, ENCODED_IN_FLIGHT, TOP_K, MAX_TOP_K)
    # Where a failure's first word behind its code is, from the counters.
    print(size_of[Int32]() * (FAILURE_WORD + 1))
    print(_DISPATCH_SENT, _DISPATCH_RECEIVED, _COMBINE_SENT, _COMBINE_RECEIVED)
