# SPDX-License-Identifier: Apache-2.0
"""An op on one rank, before its tensors: which group, which counters, whose buffers.

All of it is checked before the first send.
"""
from layout import TileTensor
from max.gpu.host.info import is_cpu, is_gpu

from .counters import (
    Counters,
    COUNTERS_MAGIC,
    local_sync_counters_words,
    wanted_word,
    Word,
)
from .failures import Caller, Failure, GRAPH, NEXT, what_failed
from .flags import FlagPointer
from .kernel_argument import ImmPointer, KernelArgument, MutPointer, unused
from .layout import Group, MAX_RANKS, MAX_TOP_K, N_GROUP_WORDS
from .peer_words import Buf
from .token_format import BytePointer, TokenFormat
from .transport import PeerBuffers


@fieldwise_init
struct Form(TrivialRegisterPassable):
    """Which part of a phase a launch does: one of three."""

    var sends: Bool
    var receives: Bool

    comptime ASYNC = Self(True, False)
    comptime WAIT = Self(False, True)
    comptime FUSED = Self(True, True)
    """Both in one launch; all ranks must run at the same time."""

    @staticmethod
    def of(op: StaticString) -> Self:
        return Self(not op.endswith("_wait"), not op.endswith("_async"))


def imm[dtype: DType](tensor: TileTensor[dtype, ...]) -> ImmPointer[Scalar[dtype]]:
    return ImmPointer[Scalar[dtype]](unsafe_from_address=Int(tensor.ptr))


def mut_[dtype: DType](tensor: TileTensor[dtype, ...]) -> MutPointer[Scalar[dtype]]:
    return MutPointer[Scalar[dtype]](unsafe_from_address=Int(tensor.ptr))


def mapped_buffers[
    group: Group, T: AnyType
](buffers: PeerBuffers) -> Array[MutPointer[T], group.n_mapped]:
    # Without a mapped rank, the last possible one: the bounds of the table hold.
    comptime last = group.n_ranks - group.n_mapped
    var first_rank = 0
    while first_rank < last and buffers.addresses[unsafe_offset=first_rank] == 0:
        first_rank += 1
    var result = Array[MutPointer[T], group.n_mapped](
        fill=buffers[first_rank].unsafe_bitcast[T]()
    )
    for i in range(group.n_mapped):
        result[i] = buffers[first_rank + i].unsafe_bitcast[T]()
    return result^


@fieldwise_init
struct Buffers[group: Group](Copyable, KernelArgument):
    """The group's buffers that a kernel can access."""

    var recv_bufs: Array[BytePointer, Self.group.n_mapped]
    """Recv buffers of the ranks that are mapped, of dispatch or of combine."""
    var counts: Array[FlagPointer, Self.group.n_mapped]
    """Counts buffers of the same ranks."""
    var counters: Counters[Self.group]
    """Words of this rank alone."""


# -------------------------------------------------------------------------- checks


def check_group[group: Group, target: StaticString, hidden_multiple: Int]():
    comptime assert (
        is_cpu[target]() or is_gpu[target]()
    ), "max_ep: there are kernels for targets 'cpu' and 'gpu'"
    comptime assert (
        group.n_experts > 0 and group.max_tokens_per_rank > 0 and group.hidden_size > 0
    ), "max_ep: n_experts, max_tokens_per_rank and hidden_size must be above 0"
    comptime assert (
        1 <= group.n_ranks and group.n_ranks <= MAX_RANKS
    ), "max_ep: n_ranks must be in [1, MAX_RANKS]"
    comptime assert (
        group.n_mapped <= group.n_ranks
    ), "max_ep: a node has more ranks than the group"
    comptime assert (
        1 <= group.top_k and group.top_k <= MAX_TOP_K
    ), "max_ep: top_k must be in [1, MAX_TOP_K]"
    comptime assert group.hidden_size % hidden_multiple == 0, String(
        "max_ep: hidden_size must be a multiple of ", hidden_multiple
    )
    comptime assert not (
        group.is_linked() and group.sends_to_all()
    ), "max_ep: all-gathers are for one host"
    comptime assert not (
        is_gpu[target]() and group.masks and group.spans_hosts()
    ), "max_ep: GPU ranks that mask are of one host"
    comptime assert (
        group.is_by_rank() or not group.has_sums
    ), "max_ep: sums need by rank"
    comptime assert not group.relays or (
        group.is_linked()
        and group.has_sums
        and not (group.masks or group.drops_rows)
        and group.n_experts_on(group.n_ranks - 1) > 0
    ), (
        "max_ep: ranks relay sums by rank over several hosts, if each has an expert,"
        " and neither mask nor drop rows"
    )
    comptime assert not group.late_weights or (
        group.has_sums and not (group.masks or group.drops_rows or group.shares_gpu)
    ), "max_ep: only sums get weights at combine, of ranks with a GPU each"


def check_dispatch[
    group: Group, Format: TokenFormat, target: StaticString, has_input_scales: Bool
]():
    check_group[group, target, Format.hidden_multiple]()
    comptime assert not group.is_by_rank() or not has_input_scales, (
        "max_ep: input_scales needs dispatch by expert: by rank, a token is encoded"
        " once for all its experts"
    )
    comptime assert not (
        group.fused_shared_expert and has_input_scales
    ), "max_ep: fused_shared_expert takes no input scales"
    comptime assert not (
        group.is_padded and group.fused_shared_expert
    ), "max_ep: fused_shared_expert needs packed rows"
    comptime has_metadata = Format.router_top_k > 0
    comptime is_each_rank_an_expert = (
        group.n_experts == group.n_ranks and group.top_k == group.n_ranks
    )
    comptime assert has_metadata == group.chooses_ranks() and (
        not has_metadata or (group.has_sums and is_each_rank_an_expert)
    ), (
        "max_ep: where a token chooses ranks, as in an all-gather, it takes routing"
        " metadata along, and combine returns sums; each rank is an expert"
    )


def check_size(op: StaticString, what: String, size: Int, wanted: Int) raises:
    if size != wanted:
        raise Error(t"max_ep: {op}: {what} are {size}, not {wanted}.", NEXT)


def check_shape(
    op: StaticString,
    what: StaticString,
    tensor: TileTensor,
    n_rows: Int,
    n_columns: Int,
) raises:
    var sizes = (Int(tensor.dim[0]()), Int(tensor.dim[1]()))
    if sizes[0] != n_rows:
        check_size(op, String("rows of ", what), sizes[0], n_rows)
    if sizes[1] != n_columns:
        check_size(op, String("columns of ", what), sizes[1], n_columns)


@fieldwise_init
struct Call[group: Group](TrivialRegisterPassable):
    """An op on one rank: its name, its counters, and the buffers of all ranks."""

    var op: StaticString
    var counters: Counters[Self.group]
    var send_bufs: PeerBuffers
    """Every rank's send buffer; an op that only receives does not use them."""
    var recv_bufs: PeerBuffers
    var counts: PeerBuffers
    var caller: Caller

    @staticmethod
    def of[
        target: StaticString, checks_places: Bool = True
    ](
        op: StaticString,
        atomic_counters: TileTensor[DType.int32, ...],
        recv_ptrs: TileTensor[DType.uint64, ...],
        recv_count_ptrs: TileTensor[DType.uint64, ...],
    ) raises -> Self:
        """Checks counters and buffers; raises if they belong to another group. An op that
        sends also sets `send_bufs`."""
        var call = Self.of_counters[target](op, atomic_counters)
        call.recv_bufs = peer_buffers[Self.group](op, "recv_ptrs", recv_ptrs)
        call.counts = peer_buffers[Self.group](op, "recv_count_ptrs", recv_count_ptrs)
        call.send_bufs = call.recv_bufs
        comptime if checks_places:
            call._check_places()
        return call

    def _check_places(self) raises:
        """Checks that both buffers of each rank are of this op's direction: dispatch or
        combine."""
        comptime is_combine = Self.group.is_combine()
        comptime recv = Buf.COMBINE_RECV if is_combine else Buf.DISPATCH_RECV
        comptime counts = Buf.COMBINE_COUNTS if is_combine else Buf.DISPATCH_COUNTS
        comptime wanted = Self.group.buffer_offset(counts) - Self.group.buffer_offset(
            recv
        )
        for rank in range(Self.group.n_ranks):
            var recv_address = self.recv_bufs.addresses[unsafe_offset=rank]
            var found = self.counts.addresses[unsafe_offset=rank] - recv_address
            if recv_address != 0 and found != UInt64(wanted):
                raise Error(
                    t"max_ep: {self.op}: recv_ptrs and recv_count_ptrs of rank {rank}"
                    t" are not those of this op; pass the model_inputs() of an"
                    t" EPCommInitializer in their order."
                )

    @staticmethod
    def of_counters[
        target: StaticString
    ](op: StaticString, atomic_counters: TileTensor[DType.int32, ...]) raises -> Self:
        """The same for an op that reads only counters."""
        # On a GPU the kernels check what they hold.
        var counters = Counters[Self.group](mut_(atomic_counters))
        var n_words = Int(atomic_counters.dim[0]())
        if n_words < local_sync_counters_words(Self.group) or (
            is_cpu[target]() and counters.at(Word.MAGIC)[] != COUNTERS_MAGIC
        ):
            raise Error(
                t"max_ep: {op}: these atomic_counters are not initialized; pass the"
                t" model_inputs() of an EPCommInitializer after its ep_init()."
            )
        comptime if is_cpu[target]():
            for i in range(Word.GROUP, Word.GROUP + N_GROUP_WORDS):
                var found = counters.at(i)[]
                var wanted = wanted_word(i, found, Self.group)
                if found != wanted:
                    raise Error(
                        t"max_ep: {op} on rank {counters.my_rank()}: ",
                        what_failed(
                            Failure.WRONG_COUNTERS, -1, i, Int(found), Int(wanted)
                        ),
                    )
        var none = unused[PeerBuffers]()
        return Self(op, counters, none, none, none, GRAPH)

    def buffers(self) -> Buffers[Self.group]:
        return {
            mapped_buffers[Self.group, UInt8](self.recv_bufs),
            mapped_buffers[Self.group, UInt64](self.counts),
            self.counters,
        }

    def place[target: StaticString](self) -> String:
        """Names the op, and on CPU the rank: on a GPU it is out of reach."""
        comptime if is_cpu[target]():
            return String(self.op, " on rank ", self.counters.my_rank())
        return String(self.op)

    def check_n_tokens[target: StaticString](self, n_tokens: Int) raises:
        comptime most = Self.group.max_tokens_per_rank
        if n_tokens > most:
            raise Error(
                t"max_ep: {self.place[target]()}: {n_tokens}",
                t" tokens given, EPConfig.max_tokens_per_rank is {most}. Send",
                t" fewer at a time, or raise it.",
                NEXT,
            )


def peer_buffers[
    group: Group
](
    op: StaticString, what: StaticString, ptrs: TileTensor[DType.uint64, ...]
) raises -> PeerBuffers:
    comptime n_ranks = group.n_ranks
    var n = Int(ptrs.dim[0]())
    if n != n_ranks:
        raise Error(t"max_ep: {op}: {what} holds {n} addresses for {n_ranks} ranks.")
    var buffers = PeerBuffers(mut_(ptrs))
    var n_mapped = 0
    for rank in range(n_ranks):
        n_mapped += Int(buffers.addresses[unsafe_offset=rank] != 0)
    if n_mapped < group.n_mapped:
        raise Error(
            t"max_ep: {op}: the symmetric memory of these inputs was freed"
            t" (EPCommInitializer.close); run before close(), or with the"
            t" model_inputs() of a new ep_init()."
        )
    return buffers
