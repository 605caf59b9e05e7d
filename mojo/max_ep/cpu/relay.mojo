# SPDX-License-Identifier: Apache-2.0
"""What a CPU rank relays for ranks of other hosts (0037): their tokens to the ranks of its
own host, and one sum of all these ranks back.

Each rank relays for those that have its place on other hosts.
"""
from ..formats.quantized_sums import QuantizedSums
from ..protocol.arguments import CombinedTokens
from ..protocol.counters import rank_elsewhere
from ..protocol.entries import expert_of_entry
from ..protocol.flags import (
    count_of,
    flag_at,
    flag_word,
    generation_of,
    message_flag,
    publish,
)
from ..protocol.layout import Group, SOURCE_INFO_BYTES
from ..protocol.token_format import BytePointer, LocalRows
from ..work.cpu_copy import copy_bytes, for_each_chunk
from .rank import CpuRank
from .terms import columns_at_once, own_terms, Terms


@always_inline
def owner_of[
    group: Group, //
](src_rank: Int, token_idx: Int, k: Int, rank: CpuRank[group]) -> Int:
    """Finds whose a choice of another host is, in its entry here; -1: nobody's."""
    var choice = group.choice(token_idx, k)
    var entry = flag_at(rank.recv_buf(), group.entry_offset(src_rank, choice))[]
    if generation_of(entry) != rank.generation:
        return -1
    return expert_of_entry(entry) // group.n_local_experts()


def relay_tokens[group: Group, //](rank: CpuRank[group]):
    """Copies tokens that this rank got for its host to the ranks whose they are, each with
    a flag."""
    comptime msg_bytes = group.dispatch_msg_bytes

    def relay_some(begin: Int, end: Int) {imm}:
        for i in range(begin, end):
            var src_rank, token_idx = divmod(i, group.max_tokens_per_rank)
            var n = rank.count_from(src_rank, group.dispatch_n_tokens_offset(src_rank))
            if not rank.relays_for(src_rank) or token_idx >= n:
                continue
            var offset = group.token_offset(src_rank, token_idx)
            for owner in range(group.n_ranks):
                if not rank.is_mate(owner):
                    continue
                var is_owner = False
                for k in range(group.top_k):
                    is_owner |= owner_of(src_rank, token_idx, k, rank) == owner
                if is_owner:
                    # I1: only this rank writes what that source sends to its host.
                    var to = rank.recv_bufs[owner].unsafe_offset(offset)
                    copy_bytes(
                        dest=to,
                        src=rank.recv_buf().unsafe_offset(offset),
                        count=msg_bytes - SOURCE_INFO_BYTES,
                        is_streaming=False,
                    )
                    # I2: after the token.
                    publish(message_flag(to, msg_bytes), rank.generation, 0)

    for_each_chunk(group.expert_capacity(), msg_bytes, relay_some)


def await_relayed[group: Group, //](rank: CpuRank[group]) raises:
    """Waits for the tokens that other ranks of this host relay."""
    for src_rank in range(group.n_ranks):
        if not rank.is_far(src_rank) or rank.relays_for(src_rank):
            continue
        var through = rank.relay_to(src_rank, rank.my_rank)
        var n = rank.count_from(src_rank, group.dispatch_n_tokens_offset(src_rank))
        for token_idx in range(n):
            var is_here = False
            for k in range(group.top_k):
                is_here |= owner_of(src_rank, token_idx, k, rank) == rank.my_rank
            if is_here:
                var token = rank.recv_buf().unsafe_offset(
                    group.token_offset(src_rank, token_idx)
                )
                rank.await_flag(message_flag(token, group.dispatch_msg_bytes), through)


def add_for_hosts[
    group: Group, //, dtype: DType, partial_dtype: DType
](expert_rows: LocalRows, combined: CombinedTokens[dtype], rank: CpuRank[group]) raises:
    """Adds this host's sums of tokens of other hosts that this rank answers: its rows, then
    the others' sums in order of rank. All others of this rank are sent: nobody waits for
    one that waits."""
    comptime msg_bytes = group.combine_msg_bytes
    comptime Sums = QuantizedSums[max(group.partial_block, 32), group.hidden_size]
    comptime is_quantized = group.partial_block > 0
    comptime sum_dtype = DType.float32 if is_quantized else partial_dtype
    comptime width = columns_at_once[group.hidden_size]
    for i in range(group.expert_capacity()):
        var src_rank, token_idx = divmod(i, group.max_tokens_per_rank)
        for owner in range(group.n_ranks):
            if _adds_from(src_rank, owner, token_idx, rank):
                var flag = message_flag(
                    _gathered(src_rank, owner, token_idx, rank), msg_bytes
                )
                rank.await_flag(flag, owner)

    def add_some(begin: Int, end: Int) {imm}:
        var before_quantized = List[Float32](
            length=group.hidden_size if is_quantized else 0, fill=0
        )
        for i in range(begin, end):
            var src_rank, token_idx = divmod(i, group.max_tokens_per_rank)
            if not rank.relays_for(src_rank):
                continue
            var source = group.relative_rank(rank.my_rank, src_rank)
            var own = own_terms[dtype](
                expert_rows, combined.router_weights, source, token_idx, rank
            )
            var received = Terms[partial_dtype, group.n_ranks]()
            var n_found = own.n
            for owner in range(group.n_ranks):
                if _adds_from(src_rank, owner, token_idx, rank):
                    var partial_sum = _gathered(src_rank, owner, token_idx, rank)
                    received.append(partial_sum, 1)
                    n_found += count_of(message_flag(partial_sum, msg_bytes)[])
            if n_found == 0:
                continue
            var message = rank.recv_buf().unsafe_offset(
                group.staged_partial_offset(src_rank, token_idx)
            )
            var sums = message.unsafe_bitcast[Scalar[sum_dtype]]()
            comptime if is_quantized:
                sums = type_of(sums)(
                    unsafe_from_address=Int(before_quantized.unsafe_ptr())
                )
            for column in range(0, group.hidden_size, width):
                var acc = own.add_to[width](0, column)
                comptime if is_quantized:
                    for j in range(received.n):
                        var row = BytePointer(unsafe_from_address=received.rows[j])
                        acc = Sums.add(acc, row, column)
                else:
                    acc = received.add_to[width](acc, column)
                sums.unsafe_store(column, acc.cast[sum_dtype]())
            comptime if is_quantized:
                Sums.encode(message, before_quantized)
            message_flag(message, msg_bytes)[] = flag_word(rank.generation, n_found)

    for_each_chunk(group.expert_capacity(), 2 * msg_bytes, add_some)


def _adds_from[
    group: Group, //
](src_rank: Int, owner: Int, token_idx: Int, rank: CpuRank[group]) -> Bool:
    """Returns whether this rank adds another one's sum of a token of another host."""
    if not rank.relays_for(src_rank) or not rank.is_mate(owner):
        return False
    var source = group.relative_rank(rank.my_rank, src_rank)
    if token_idx >= Int(rank.counters.received_tokens()[unsafe_offset=source]):
        return False
    var rows = rank.counters.received_rows(source)
    for k in range(group.top_k):
        var row = rows[unsafe_offset=group.choice(token_idx, k)]
        if row < 0 and rank_elsewhere(row) == owner:
            return True
    return False


def _gathered[
    group: Group, //
](src_rank: Int, owner: Int, token_idx: Int, rank: CpuRank[group]) -> BytePointer:
    """Locates another rank's sum, where this one adds it."""
    return rank.recv_buf().unsafe_offset(
        group.gathered_partial_offset(src_rank, owner, token_idx, rank.ranks_per_host())
    )
