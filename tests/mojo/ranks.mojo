# SPDX-License-Identifier: Apache-2.0
"""Tensors, and the memory of all ranks of a group, as Mojo programs make them."""
from layout import Coord, row_major, TileTensor
from max.gpu.host import DeviceContext
from max_ep import EPLocalSyncCounters
from max_ep.protocol.layout import Group
from max_ep.launch.setup import init, N_SETUP_WORDS, place_in_setup
from std.memory.alloc import unsafe_alloc

comptime VectorLayout = type_of(row_major(Coord(Int64(0))))
comptime MatrixLayout = type_of(row_major(Coord(Int64(0), Int64(0))))
comptime Vector[dtype: DType] = TileTensor[dtype, VectorLayout, MutUntrackedOrigin]
comptime Matrix[dtype: DType] = TileTensor[dtype, MatrixLayout, MutUntrackedOrigin]


def _filled[
    dtype: DType
](n: Int, value: Int) -> Pointer[Scalar[dtype], MutUntrackedOrigin]:
    var p = unsafe_alloc[Scalar[dtype]](max(1, n), alignment=64)
    for i in range(n):
        p[unsafe_offset=i] = Scalar[dtype](value)
    return p


def vector[dtype: DType](n: Int, value: Int = 0) -> Vector[dtype]:
    return {_filled[dtype](n, value), row_major(Coord(Int64(n)))}


def tensor[dtype: DType](n: Int, m: Int, value: Int = 0) -> Matrix[dtype]:
    return {_filled[dtype](n * m, value), row_major(Coord(Int64(n), Int64(m)))}


def set_up[
    target: StaticString
](
    group: Group,
    rank: Int,
    region: Int,
    counters: Vector[DType.int32],
    spare_counters: Vector[DType.int32],
    ctx: DeviceContext,
) raises -> Vector[DType.uint64]:
    """Puts a rank's memory in its first state; returns where its buffers are."""
    var setup = vector[DType.int64](N_SETUP_WORDS)
    setup.ptr[unsafe_offset=place_in_setup("region")] = Int64(region)
    setup.ptr[unsafe_offset=place_in_setup("rank")] = Int64(rank)
    setup.ptr[unsafe_offset=place_in_setup("readmitted")] = -1
    var words = group.words()
    for i in range(len(words)):
        var place = place_in_setup("n_experts") + i
        setup.ptr[unsafe_offset=place] = Int64(words[i])
    var buffers = vector[DType.uint64](6)
    var my_rank = vector[DType.int32](1)
    init[target](buffers, my_rank, counters, spare_counters, setup, ctx)
    return buffers


struct Ranks:
    """Counters and addresses of all ranks, on the CPU."""

    var counters: List[Vector[DType.int32]]
    """Counters of each rank."""
    var ptrs: List[Vector[DType.uint64]]
    """[send, recv, counts] of dispatch, then of combine; one address a rank."""

    def __init__(out self, group: Group) raises:
        self.counters = []
        self.ptrs = []
        for _ in range(6):
            self.ptrs.append(vector[DType.uint64](group.n_ranks))
        var n_words = EPLocalSyncCounters[0].total_size(group)
        for rank in range(group.n_ranks):
            self.counters.append(vector[DType.int32](n_words))
            var buffers = set_up["cpu"](
                group,
                rank,
                Int(vector[DType.uint8](group.region_bytes()).ptr),
                self.counters[rank],
                vector[DType.int32](n_words),
                DeviceContext(api="cpu"),
            )
            for i in range(6):
                self.ptrs[i].ptr[unsafe_offset=rank] = buffers.ptr[unsafe_offset=i]
