# SPDX-License-Identifier: Apache-2.0
"""Compiles a kernel of `kernels.mojo` with the names of MAX's `ep_comm`, and without
what has a default. Takes a folder, see `emitting.mojo`. Run by tests/test_mojo.py;
`seeds_gpu.mojo` has all kernels with MAX's lists alone.
"""
from emitting import emit
from layout import Coord, row_major, TileTensor
from max_ep import BF16TokenFormat, EPLocalSyncCounters, TokenFormat
from max_ep.flags import FlagPointer
from max_ep.kernels import dispatch_async_kernel
from max_ep.token_format import BytePointer

comptime BF16 = DType.bfloat16
comptime HIDDEN = 7168
comptime TOP_K = 8
comptime N_EXPERTS = 256
comptime N_RANKS = 8
comptime MAX_TOKENS = 128
comptime N_SMS = 132
comptime N_THREADS = 512
comptime Format: TokenFormat = BF16TokenFormat[HIDDEN, TOP_K]
comptime MatrixLayout = type_of(row_major(Coord(Int64(0), Int64(0))))


# fmt: off
comptime with_defaults = dispatch_async_kernel[
    BF16, N_THREADS, MatrixLayout, MatrixLayout, N_SMS, N_EXPERTS, N_RANKS,
    MAX_TOKENS, N_RANKS, Format,
]
# fmt: on


def call_as_max_does(
    input_tokens: TileTensor[BF16, MatrixLayout, ImmUntrackedOrigin],
    topk_ids: TileTensor[DType.int32, MatrixLayout, ImmUntrackedOrigin],
    send_buf_p: BytePointer,
    recv_buf_ptrs: Array[BytePointer, N_RANKS],
    recv_count_ptrs: Array[FlagPointer, N_RANKS],
    ep_counters: EPLocalSyncCounters[N_EXPERTS],
    my_rank: Int32,
):
    """Names the arguments as MAX does, in MAX's order."""
    dispatch_async_kernel[
        input_type=BF16,
        num_threads=N_THREADS,
        input_tokens_layout=MatrixLayout,
        topk_ids_layout=MatrixLayout,
        n_sms=N_SMS,
        n_experts=N_EXPERTS,
        n_ranks=N_RANKS,
        max_tokens_per_rank=MAX_TOKENS,
        p2p_world_size=N_RANKS,
        token_fmt_type=Format,
        input_scales_wrapper=None,
        use_shmem=True,
    ](
        input_tokens=input_tokens,
        topk_ids=topk_ids,
        send_buf_p=send_buf_p,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
        ep_counters=ep_counters,
        my_rank=my_rank,
    )


def main() raises:
    """Compiles the kernels."""
    emit[call_as_max_does, links=False]("dispatch_async.by_name")
    emit[with_defaults, links=False]("dispatch_async.defaults")
