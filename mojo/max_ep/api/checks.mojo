# SPDX-License-Identifier: Apache-2.0
"""What the launchers check of their arguments, beyond `launch_checks.mojo`.

Sizes of the tensors that dispatch and combine are given, which raise, and what a
protocol or a format cannot do, which is refused when an op is compiled.
"""
from layout import TileTensor
from max.gpu.host.info import is_gpu

from ..counters import EPLocalSyncCounters
from ..launch_checks import check_n_tokens, check_size, mut_
from ..layout import EXPERT_SLOTS, GATHER_REDUCED, Group, is_reduced_protocol
from ..row_tables import RowTables
from ..token_format import RouterWeights, TokenFormat


@always_inline
def n_mapped_ranks[
    target: StaticString, use_shmem: Bool, n_gpus_per_node: Int, n_ranks: Int
]() -> Int:
    """Counts the ranks whose buffers must be mapped here.

    Parameters:
        target: The device kind.
        use_shmem: Whether peers are reached through the SHMEM library.
        n_gpus_per_node: Ranks that one process drives.
        n_ranks: Ranks of the group.

    Returns:
        In `[1, n_ranks]`.
    """
    return n_gpus_per_node if is_gpu[target]() and use_shmem else n_ranks


def check_metadata[
    token_fmt_type: TokenFormat, n_experts: Int, n_ranks: Int, protocol: Int
]():
    """Refuses an all-gather that is none, when an op is compiled.

    Parameters:
        token_fmt_type: Wire format of a token.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        protocol: The wire protocol.
    """
    comptime has_metadata = token_fmt_type.router_top_k > 0
    comptime is_each_rank_an_expert = (
        n_experts == n_ranks and token_fmt_type.top_k == n_ranks
    )
    comptime assert has_metadata == (protocol == GATHER_REDUCED) and (
        is_each_rank_an_expert or not has_metadata
    ), (
        "max_ep: tokens carry choices where each goes to every rank: with"
        " gather_reduced, and each rank as an expert"
    )


def n_given_choices[token_fmt_type: TokenFormat]() -> Int:
    """Counts the choices of a token that dispatch is given.

    Parameters:
        token_fmt_type: Wire format of a token.

    Returns:
        Columns of `topk_ids`.
    """
    comptime router_top_k = token_fmt_type.router_top_k
    return router_top_k if router_top_k > 0 else token_fmt_type.top_k


def check_protocol[
    protocol: Int,
    target: StaticString,
    is_scaled: Bool,
]():
    """Refuses what `rank_slots` cannot do, when an op is compiled.

    Parameters:
        protocol: The wire protocol.
        target: The device kind.
        is_scaled: Whether there are input scales.
    """
    comptime assert (
        EXPERT_SLOTS <= protocol and protocol <= GATHER_REDUCED
    ), "max_ep: the protocol must be what protocol_of returns"
    comptime assert (
        protocol == EXPERT_SLOTS or not is_scaled
    ), "max_ep: only expert_slots encodes a token for each expert, with scales"


def check_tokens[
    n_experts: Int,
    //,
    target: StaticString,
    hidden_size: Int,
    top_k: Int,
    max_tokens: Int,
](
    op: StaticString,
    counters: EPLocalSyncCounters[n_experts],
    input_tokens: TileTensor,
    topk_ids: TileTensor[DType.int32, ...],
) raises:
    """Checks what is sent by dispatch; raises if it does not fit.

    Parameters:
        n_experts: Experts of the group.
        target: The device kind.
        hidden_size: Elements of a token.
        top_k: Choices of a token, from `n_given_choices`.
        max_tokens: Tokens one rank may send.

    Args:
        op: Who asks.
        counters: This rank's local words.
        input_tokens: `[n_tokens, hidden_size]`.
        topk_ids: `[n_tokens, top_k]`.

    Raises:
        If a size does not fit.
    """
    var n_tokens = Int(input_tokens.dim[0]())
    check_n_tokens[target](op, counters, n_tokens, max_tokens)
    check_size(op, "rows of topk_ids", Int(topk_ids.dim[0]()), n_tokens)
    check_size(op, "columns of topk_ids", Int(topk_ids.dim[1]()), top_k)
    check_size(
        op, "columns of input_tokens", Int(input_tokens.dim[1]()), hidden_size
    )


def check_dispatch_weights[
    protocol: Int, top_k: Int
](op: StaticString, router_weights: RouterWeights, n_tokens: Int) raises:
    """Checks the weights that travel with tokens; raises if they do not fit.

    Parameters:
        protocol: The wire protocol; only a reduced one sends weights.
        top_k: Choices of a token, from `n_given_choices`.

    Args:
        op: Who asks.
        router_weights: Weight of each choice.
        n_tokens: Tokens that are sent.

    Raises:
        If a size does not fit.
    """
    comptime if is_reduced_protocol(protocol):
        check_size(
            op, "rows of router_weights", router_weights.n_tokens, n_tokens
        )
        check_size(op, "columns of router_weights", router_weights.top_k, top_k)


@always_inline
def row_tables[
    group: Group,
    fused_shared_expert: Bool,
    output_layout: StaticString,
](
    op: StaticString,
    row_offsets: TileTensor,
    expert_ids: TileTensor[DType.int32, ...],
    src_info: TileTensor[DType.int32, ...],
) raises -> RowTables[group, output_layout == "padded", fused_shared_expert]:
    """Checks what dispatch delivers into; raises if it does not fit.

    Parameters:
        group: How the regions are cut.
        fused_shared_expert: Whether this rank's tokens come first.
        output_layout: `packed` or `padded`.

    Args:
        op: Who asks.
        row_offsets: As in `ep_dispatch_wait_kernel_api`.
        expert_ids: Likewise.
        src_info: Likewise.

    Returns:
        The tensors that say which row is whose.

    Raises:
        If a size does not fit.
    """
    comptime is_padded = output_layout == "padded"
    comptime assert (
        is_padded or output_layout == "packed"
    ), "max_ep: output_layout must be packed or padded"
    comptime assert not (
        is_padded and fused_shared_expert
    ), "max_ep: fused_shared_expert needs output_layout packed"
    comptime Tables = RowTables[group, is_padded, fused_shared_expert]
    comptime if is_padded:
        comptime assert row_offsets.dtype == DType.int32, "recv_counts: int32"
        comptime n_local_experts = group.n_local_experts()
        comptime n_pairs = group.pair(n_local_experts, 0)
        check_size(
            op, "recv_counts", Int(row_offsets.dim[0]()), n_local_experts
        )
        check_size(op, "recv_ranges", Int(expert_ids.dim[0]()), n_pairs)
    else:
        comptime assert row_offsets.dtype == DType.uint32, "row_offsets: uint32"
        comptime n_groups = Tables.n_groups
        check_size(op, "row_offsets", Int(row_offsets.dim[0]()), n_groups + 1)
        check_size(op, "expert_ids", Int(expert_ids.dim[0]()), n_groups)
    check_size(op, "columns of src_info", Int(src_info.dim[1]()), 2)
    return {
        mut_(row_offsets).unsafe_bitcast[UInt32](),
        mut_(expert_ids),
    }


def check_expert_rows[
    hidden_size: Int
](
    op: StaticString,
    input_tokens: TileTensor,
    src_info: TileTensor[DType.int32, ...],
) raises:
    """Checks what is sent by combine; raises if it does not fit.

    Parameters:
        hidden_size: Elements of a row.

    Args:
        op: Who asks.
        input_tokens: Expert rows, `[n_output_rows, hidden_size]`.
        src_info: `[n_output_rows, 2]`.

    Raises:
        If a size does not fit.
    """
    check_size(
        op,
        "rows of src_info",
        Int(src_info.dim[0]()),
        Int(input_tokens.dim[0]()),
    )
    check_size(op, "columns of src_info", Int(src_info.dim[1]()), 2)
    check_size(
        op, "columns of input_tokens", Int(input_tokens.dim[1]()), hidden_size
    )


def check_results[
    n_experts: Int,
    //,
    target: StaticString,
    hidden_size: Int,
    top_k: Int,
    max_tokens: Int,
    protocol: Int,
](
    op: StaticString,
    counters: EPLocalSyncCounters[n_experts],
    output_tokens: TileTensor,
    router_weights: TileTensor[DType.float32, ...],
) raises:
    """Checks what combine delivers into; raises if it does not fit.

    Parameters:
        n_experts: Experts of the group.
        target: The device kind.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        max_tokens: Tokens one rank may send.
        protocol: The wire protocol.

    Args:
        op: Who asks.
        counters: This rank's local words.
        output_tokens: `[n_tokens, hidden_size]`.
        router_weights: `[n_tokens, top_k]`; with a reduced protocol anything.

    Raises:
        If a size does not fit.
    """
    var n_tokens = Int(output_tokens.dim[0]())
    check_n_tokens[target](op, counters, n_tokens, max_tokens)
    # Reduced, the weights came with dispatch.
    comptime if not is_reduced_protocol(protocol):
        check_size(
            op, "columns of router_weights", Int(router_weights.dim[1]()), top_k
        )
        check_size(
            op, "rows of router_weights", Int(router_weights.dim[0]()), n_tokens
        )
    check_size(
        op, "columns of output_tokens", Int(output_tokens.dim[1]()), hidden_size
    )
