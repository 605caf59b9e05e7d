# SPDX-License-Identifier: Apache-2.0
"""What a Mojo program sees of padded rows and of a fused shared expert.

Two ranks, one expert, so rank 1 holds none. Checks what a graph cannot show:
that rows behind the counts stay as they were, errors of calls that
`EPBatchManager` would not build, and what the digest of `src_info` tells apart. Prints OK, or raises.
"""
from layout import Coord, row_major, TileTensor
from max.gpu.host import DeviceContext
from max_ep import (
    BlockwiseFP8TokenFormat,
    ep_combine_async_kernel_api,
    ep_combine_wait_kernel_api,
    ep_dispatch_async_kernel_api,
    ep_dispatch_wait_kernel_api,
    EPLocalSyncCounters,
    Float32TokenFormat,
)
from max_ep.cpu.plan import hash_src_info
from max_ep.flags import next_generation
from max_ep.formats.blockwise_fp8 import ScaledRows
from max_ep.formats.plain import PlainRows
from max_ep.layout import (
    Addressing,
    Group,
    message_bytes,
    plain_token_bytes,
    Returns,
)
from max_ep.setup import init, N_SETUP_WORDS
from max_ep.token_format import SharedRows
from std.memory.alloc import unsafe_alloc
from std.testing import assert_equal, assert_true

comptime HIDDEN = 128
comptime MAX_TOKENS = 3
comptime N_RANKS = 2
comptime CAPACITY = N_RANKS * MAX_TOKENS
comptime SIZES = Group(
    n_experts=1,
    n_ranks=N_RANKS,
    max_tokens_per_rank=MAX_TOKENS,
    top_k=1,
)
comptime N_WORDS = EPLocalSyncCounters[1].total_size(SIZES)
comptime UNTOUCHED = 77


def tensor[
    dtype: DType
](n: Int, m: Int) -> TileTensor[
    dtype, type_of(row_major(Coord(Int64(0), Int64(0)))), MutUntrackedOrigin
]:
    var p = unsafe_alloc[Scalar[dtype]](max(1, n * m), alignment=64)
    for i in range(n * m):
        p[unsafe_offset=i] = UNTOUCHED
    return {p, row_major(Coord(Int64(n), Int64(m)))}


def vector[
    dtype: DType
](n: Int, value: Int = 0) -> TileTensor[
    dtype, type_of(row_major(Coord(Int64(0)))), MutUntrackedOrigin
]:
    var p = unsafe_alloc[Scalar[dtype]](n, alignment=64)
    for i in range(n):
        p[unsafe_offset=i] = Scalar[dtype](value)
    return {p, row_major(Coord(Int64(n)))}


struct Ranks:
    """Counters and addresses of both ranks."""

    comptime Words = type_of(vector[DType.int32](1))
    comptime Pointers = type_of(vector[DType.uint64](1))
    var counters: List[Self.Words]
    """Counters of each rank."""
    var ptrs: List[Self.Pointers]
    """[send, recv, counts] of dispatch, then of combine."""

    def __init__(
        out self,
        dispatch_msg: Int,
        combine_msg: Int,
        addressing: Addressing = Addressing.BY_EXPERT,
    ) raises:
        var group = Group(
            n_experts=1,
            n_ranks=N_RANKS,
            max_tokens_per_rank=MAX_TOKENS,
            top_k=1,
            dispatch_msg_bytes=dispatch_msg,
            combine_msg_bytes=combine_msg,
            addressing=addressing,
            returns=Returns.ROWS,
        )
        self.counters = []
        self.ptrs = []
        for _ in range(6):
            self.ptrs.append(vector[DType.uint64](N_RANKS))
        for rank in range(N_RANKS):
            self.counters.append(vector[DType.int32](N_WORDS))
            var region = vector[DType.uint8](group.region_bytes())
            var setup = vector[DType.int64](N_SETUP_WORDS)
            var words = [
                Int(region.ptr),
                rank,
                0,
                0,
                1,
                N_RANKS,
                MAX_TOKENS,
                1,
                dispatch_msg,
                combine_msg,
                group.protocol(),
            ]
            for i in range(N_SETUP_WORDS):
                setup.ptr[unsafe_offset=i] = Int64(words[i])
            var device_ptrs = vector[DType.uint64](6)
            init["cpu"](
                device_ptrs,
                vector[DType.int32](1),
                self.counters[rank],
                vector[DType.int32](N_WORDS),
                setup,
                DeviceContext(api="cpu"),
            )
            for i in range(6):
                self.ptrs[i].ptr[unsafe_offset=rank] = device_ptrs.ptr[
                    unsafe_offset=i
                ]


def check_padded_rows_behind_the_counts() raises:
    """Rank 0 sends 2 tokens, rank 1 sends 1: three rows of six."""
    var ctx = DeviceContext(api="cpu")
    comptime Format = BlockwiseFP8TokenFormat[HIDDEN, 1]
    var combine_msg = message_bytes(plain_token_bytes(HIDDEN, 4))
    var group = Ranks(Format.msg_bytes, combine_msg)
    for rank in range(N_RANKS):
        var n = 2 - rank
        var tokens = tensor[DType.float32](n, HIDDEN)
        for i in range(n * HIDDEN):
            tokens.ptr[unsafe_offset=i] = Float32(rank + 1)
        var ids = tensor[DType.int32](n, 1)
        for i in range(n):
            ids.ptr[unsafe_offset=i] = 0
        ep_dispatch_async_kernel_api[Format, 1, MAX_TOKENS, N_RANKS, 1, "cpu"](
            group.counters[rank],
            tokens,
            ids,
            group.ptrs[0],
            group.ptrs[1],
            group.ptrs[2],
            ctx,
        )
    for rank in range(N_RANKS):
        var tokens = tensor[DType.uint8](CAPACITY, HIDDEN)
        var scales = tensor[DType.float32](1, CAPACITY)
        var recv_counts = vector[DType.int32](1, UNTOUCHED)
        var recv_ranges = tensor[DType.int32](N_RANKS, 2)
        var src_info = tensor[DType.int32](CAPACITY, 2)
        ep_dispatch_wait_kernel_api[
            Format,
            1,
            MAX_TOKENS,
            N_RANKS,
            1,
            "cpu",
            output_layout="padded",
        ](
            ScaledRows(tokens.ptr, scales.ptr, CAPACITY),
            recv_counts,
            recv_ranges,
            src_info,
            group.counters[rank],
            group.ptrs[1],
            group.ptrs[2],
            ctx,
        )
        # Rank 1 has a place for an expert, but none.
        var n = 3 if rank == 0 else 0
        assert_equal(Int(recv_counts.ptr[]), n)
        var ranges = [0, 2, 2, 1] if rank == 0 else [0, 0, 0, 0]
        for i in range(4):
            assert_equal(Int(recv_ranges.ptr[unsafe_offset=i]), ranges[i])
        for row in range(CAPACITY):
            var is_there = row < n
            assert_equal(
                tokens.ptr[unsafe_offset=row * HIDDEN] != UNTOUCHED, is_there
            )
            assert_equal(
                tokens.ptr[unsafe_offset=row * HIDDEN + HIDDEN - 1]
                != UNTOUCHED,
                is_there,
            )
            assert_equal(scales.ptr[unsafe_offset=row] != UNTOUCHED, is_there)
            for i in range(2 * row, 2 * row + 2):
                assert_equal(
                    src_info.ptr[unsafe_offset=i] != UNTOUCHED, is_there
                )


comptime Shared = Float32TokenFormat[HIDDEN, 1]


def send[
    addressing: Addressing = Addressing.BY_EXPERT
](group: Ranks, rank: Int, n: Int) raises:
    var ids = tensor[DType.int32](n, 1)
    for i in range(n):
        ids.ptr[unsafe_offset=i] = 0
    ep_dispatch_async_kernel_api[
        Shared,
        1,
        MAX_TOKENS,
        N_RANKS,
        1,
        "cpu",
        fused_shared_expert=True,
        addressing=addressing,
    ](
        group.counters[rank],
        tensor[DType.float32](n, HIDDEN),
        ids,
        group.ptrs[0],
        group.ptrs[1],
        group.ptrs[2],
        DeviceContext(api="cpu"),
    )


def receive[
    addressing: Addressing = Addressing.BY_EXPERT
](
    group: Ranks,
    rank: Int,
    src_info: type_of(tensor[DType.int32](1, 1)),
) raises:
    ep_dispatch_wait_kernel_api[
        Shared,
        1,
        MAX_TOKENS,
        N_RANKS,
        1,
        "cpu",
        fused_shared_expert=True,
        addressing=addressing,
    ](
        PlainRows(
            tensor[DType.float32](
                CAPACITY + MAX_TOKENS, HIDDEN
            ).ptr.unsafe_bitcast[UInt8]()
        ),
        vector[DType.uint32](3),
        vector[DType.int32](2),
        src_info,
        group.counters[rank],
        group.ptrs[1],
        group.ptrs[2],
        DeviceContext(api="cpu"),
    )


def send_back(
    group: Ranks,
    rank: Int,
    src_info: type_of(tensor[DType.int32](1, 1)),
) raises:
    ep_combine_async_kernel_api[
        DType.float32, HIDDEN, 1, 1, MAX_TOKENS, N_RANKS, 1, "cpu"
    ](
        group.counters[rank],
        tensor[DType.float32](CAPACITY + MAX_TOKENS, HIDDEN),
        src_info,
        group.ptrs[3],
        group.ptrs[4],
        group.ptrs[5],
        DeviceContext(api="cpu"),
    )


def check_shared_expert() raises:
    """The rank without experts still has to read its own send buffer."""
    var msg = message_bytes(plain_token_bytes(HIDDEN, 4))
    var group = Ranks(msg, msg)
    var src_info = [
        tensor[DType.int32](CAPACITY + MAX_TOKENS, 2),
        tensor[DType.int32](CAPACITY + MAX_TOKENS, 2),
    ]

    # No rows are sent back, and none awaited: the sum would be zeros.
    var said = String()
    try:
        send_back(group, 0, src_info[0])
    except error:
        said = String(error)
    assert_true("nothing was dispatched to this rank" in said, said)

    # Rank 1 waits for nobody's rows, but for its own tokens.
    try:
        receive(group, 1, src_info[1])
    except error:
        said = String(error)
    assert_true("before its dispatch_async" in said, said)

    send(group, 0, 1)
    send(group, 1, 2)
    try:
        send(group, 1, 2)
    except error:
        said = String(error)
    assert_true("before its dispatch_wait" in said or "has read" in said, said)

    for rank in range(N_RANKS):
        receive(group, rank, src_info[rank])
    for i in range(4):
        assert_equal(Int(src_info[1].ptr[unsafe_offset=i]), [0, -1, 1, -1][i])
    assert_equal(Int(src_info[1].ptr[unsafe_offset=4]), UNTOUCHED)

    # With nothing sent since, rank 1 may not send twice either: rank 0 has
    # read, and only its own wait is missing.
    send(group, 1, 2)
    send(group, 0, 1)
    receive(group, 0, src_info[0])
    try:
        send(group, 1, 2)
    except error:
        said = String(error)
    assert_true("before its dispatch_wait" in said, said)
    receive(group, 1, src_info[1])

    # Two tokens, but one row: what stands behind it is not read.
    for rank in range(N_RANKS):
        send_back(group, rank, src_info[rank])
    var one_row = tensor[DType.float32](1, HIDDEN)
    try:
        ep_combine_wait_kernel_api[
            DType.float32,
            HIDDEN,
            1,
            1,
            MAX_TOKENS,
            N_RANKS,
            1,
            "cpu",
            fused_shared_expert=True,
        ](
            tensor[DType.float32](2, HIDDEN),
            group.counters[1],
            tensor[DType.float32](2, 1),
            group.ptrs[4],
            group.ptrs[5],
            DeviceContext(api="cpu"),
            SharedRows(one_row.ptr.unsafe_bitcast[UInt8](), 1),
        )
    except error:
        said = String(error)
    assert_true("2 tokens" in said and "holds 1 rows" in said, said)


def check_shared_expert_by_rank() raises:
    """As above; the own tokens stand in the recv buffer."""
    var msg = message_bytes(plain_token_bytes(HIDDEN, 4))
    var group = Ranks(msg, msg, Addressing.BY_RANK)
    var src_info = tensor[DType.int32](CAPACITY + MAX_TOKENS, 2)
    send[Addressing.BY_RANK](group, 1, 2)
    send[Addressing.BY_RANK](group, 0, 1)
    receive[Addressing.BY_RANK](group, 0, src_info)
    var said = String()
    try:
        send[Addressing.BY_RANK](group, 1, 2)
    except error:
        said = String(error)
    assert_true("before its dispatch_wait" in said, said)


def check_digest_of_src_info() raises:
    """Combine sees that rows have changed places, or numbers within a row."""
    var counters = EPLocalSyncCounters[1](vector[DType.int32](N_WORDS).ptr)
    counters.set_pair_rows(0, 0, 2)
    counters.set_pair_rows(1, 2, 1)
    var src_info = tensor[DType.int32](3, 2)
    var numbers = src_info.ptr
    for i in range(6):
        numbers[unsafe_offset=i] = Int32(i)
    var digest = hash_src_info(numbers, N_RANKS, counters)
    for i in range(6):
        for j in range(i):
            numbers[unsafe_offset=i] = Int32(j)
            numbers[unsafe_offset=j] = Int32(i)
            var other = hash_src_info(numbers, N_RANKS, counters)
            assert_true(other != digest, String(i, " and ", j))
            numbers[unsafe_offset=i] = Int32(i)
            numbers[unsafe_offset=j] = Int32(j)
    assert_equal(hash_src_info(numbers, N_RANKS, counters), digest)


def check_two_dispatches_are_kept() raises:
    """One may be sent before the one before it is combined, also where it wraps.
    """
    var counters = EPLocalSyncCounters[1](vector[DType.int32](N_WORDS).ptr)
    for first in [UInt32(1), UInt32(2), UInt32.MAX]:
        var second = next_generation(first)
        counters.set_n_tokens(first, 1)
        counters.set_n_tokens(second, 2)
        for choice in range(MAX_TOKENS):
            counters.choices(first, SIZES)[unsafe_offset=choice] = 1
            counters.slots(SIZES)[unsafe_offset=choice] = 3
            counters.choices(second, SIZES)[unsafe_offset=choice] = 2
        assert_equal(counters.n_tokens(first), 1)
        assert_equal(counters.n_tokens(second), 2)
        for choice in range(MAX_TOKENS):
            var kept = counters.choices(first, SIZES)
            assert_equal(kept[unsafe_offset=choice], 1)
            kept = counters.choices(second, SIZES)
            assert_equal(kept[unsafe_offset=choice], 2)


def main() raises:
    """Runs all."""
    check_two_dispatches_are_kept()
    check_padded_rows_behind_the_counts()
    check_shared_expert()
    check_shared_expert_by_rank()
    check_digest_of_src_info()
    print("OK")
