# SPDX-License-Identifier: Apache-2.0
"""What a launcher makes sure of before it starts a kernel."""
from layout import TileTensor
from max.gpu.host.info import is_cpu, is_gpu

from .counters import EPLocalSyncCounters
from .layout import Group, MAX_RANKS, MAX_TOP_K
from .transport import PeerBuffers

comptime _NEXT = (
    " Before the next run call EPCommInitializer.reset() (or restart the group,"
    " where each rank is a process of its own)."
)


def check_config[
    n_experts: Int,
    n_ranks: Int,
    hidden_size: Int,
    hidden_multiple: Int,
    top_k: Int,
    target: StaticString,
]():
    """Refuses, at compile time, what the kernels cannot do."""
    comptime assert (
        is_cpu[target]() or is_gpu[target]()
    ), "max_ep: expert_slots has kernels for targets 'cpu' and 'gpu'"
    comptime assert (
        1 <= n_ranks and n_ranks <= MAX_RANKS
    ), "max_ep: n_ranks must be in [1, MAX_RANKS]"
    comptime assert (
        1 <= top_k and top_k <= MAX_TOP_K and top_k <= n_experts
    ), "max_ep: top_k must be in [1, min(MAX_TOP_K, n_experts)]"
    comptime assert (
        hidden_size % hidden_multiple == 0
    ), "max_ep: hidden_size must be a multiple of 16 bytes, of 128 for FP8"


@always_inline
def imm[
    dtype: DType
](tensor: TileTensor[dtype, ...]) -> Pointer[Scalar[dtype], ImmUntrackedOrigin]:
    """Takes a tensor's address for reading."""
    return Pointer[Scalar[dtype], ImmUntrackedOrigin](
        unsafe_from_address=Int(tensor.ptr)
    )


@always_inline
def mut_[
    dtype: DType
](tensor: TileTensor[dtype, ...]) -> Pointer[Scalar[dtype], MutUntrackedOrigin]:
    """Takes a tensor's address for writing."""
    return Pointer[Scalar[dtype], MutUntrackedOrigin](
        unsafe_from_address=Int(tensor.ptr)
    )


def counters_of[
    n_experts: Int, target: StaticString
](
    op: StaticString,
    atomic_counters: TileTensor[DType.int32, ...],
    group: Group,
) raises -> EPLocalSyncCounters[n_experts]:
    """Finds this rank's local words.

    On GPU the words are out of reach here, and the kernels look at them.
    """
    var counters = EPLocalSyncCounters[n_experts](mut_(atomic_counters))
    var has_capacity = Int(atomic_counters.dim[0]()) >= counters.total_size(
        group
    )
    comptime if is_gpu[target]():
        if has_capacity:
            return counters
    if not has_capacity or not counters.is_initialized():
        raise Error(
            "max_ep: ",
            op,
            ": these atomic_counters are not initialized; pass the",
            " model_inputs() of an EPCommInitializer after its ep_init().",
        )
    if not counters.matches_layout(group):
        raise Error(
            "max_ep: ",
            op,
            " on rank ",
            counters.my_rank(),
            (
                ": the symmetric memory belongs to another EPConfig than the"
                " graph;"
            ),
            " pass the model_inputs() of an EPCommInitializer with the same.",
        )
    return counters


def peer_buffers[
    n_ranks: Int, n_mapped: Int = n_ranks
](
    op: StaticString, what: StaticString, ptrs: TileTensor[DType.uint64, ...]
) raises -> PeerBuffers[n_ranks]:
    """Finds the same buffer on every rank."""
    if Int(ptrs.dim[0]()) != n_ranks:
        raise Error(
            "max_ep: ",
            op,
            ": ",
            what,
            " holds ",
            Int(ptrs.dim[0]()),
            " addresses for ",
            n_ranks,
            " ranks.",
        )
    var buffers = PeerBuffers[n_ranks](mut_(ptrs))
    var first_rank = 0
    comptime if n_mapped != n_ranks:
        first_rank = buffers.first_mapped()
    if not buffers.are_mapped(first_rank, n_mapped):
        raise Error(
            "max_ep: ",
            op,
            (
                ": the symmetric memory of these inputs was freed"
                " (EPCommInitializer.close); run before close(), or with the"
                " model_inputs() of a new ep_init()."
            ),
        )
    return buffers


def check_size(
    op: StaticString, what: StaticString, size: Int, wanted: Int
) raises:
    """Compares a size of a tensor with what it must be."""
    if size != wanted:
        raise Error(
            "max_ep: ",
            op,
            ": ",
            what,
            " are ",
            size,
            ", not ",
            wanted,
            ".",
            _NEXT,
        )


def check_n_tokens[
    n_experts: Int, //, target: StaticString
](
    op: StaticString,
    counters: EPLocalSyncCounters[n_experts],
    n_tokens: Int,
    max_tokens_per_rank: Int,
) raises:
    """Refuses more tokens than the buffers hold."""
    if n_tokens > max_tokens_per_rank:
        var place = String(op)
        comptime if is_cpu[target]():
            place += String(" on rank ", counters.my_rank())
        raise Error(
            "max_ep: ",
            place,
            ": ",
            n_tokens,
            " tokens given, EPConfig.max_tokens_per_rank is ",
            max_tokens_per_rank,
            ". Send fewer at a time, or raise it.",
            _NEXT,
        )


def check_shared_rows[
    n_experts: Int, //, target: StaticString
](
    op: StaticString,
    counters: EPLocalSyncCounters[n_experts],
    n_rows: Int,
    n_tokens: Int,
) raises:
    """Refuses expert rows that cannot hold a shared expert's."""
    if n_rows < n_tokens:
        var place = String(op)
        comptime if is_cpu[target]():
            place += String(" on rank ", counters.my_rank())
        raise Error(
            "max_ep: ",
            place,
            ": ",
            n_tokens,
            " tokens, but input_tokens holds ",
            n_rows,
            " rows; the shared expert's come first there.",
        )


@always_inline
def p2p_buffers[
    n_ranks: Int, //, T: AnyType, p2p_world_size: Int
](buffers: PeerBuffers[n_ranks]) -> Array[
    Pointer[T, MutUntrackedOrigin], p2p_world_size
]:
    """Makes kernel arguments of the buffers that pointers reach."""
    var first_rank = buffers.first_mapped()
    var result = Array[Pointer[T, MutUntrackedOrigin], p2p_world_size](
        fill=buffers[first_rank].unsafe_bitcast[T]()
    )
    for i in range(p2p_world_size):
        result[i] = buffers[first_rank + i].unsafe_bitcast[T]()
    return result^
