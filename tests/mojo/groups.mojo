# SPDX-License-Identifier: Apache-2.0
"""Groups of the kernel variants that the programs `codegen*.mojo` compile."""
from max_ep.layout import (
    addressing_of,
    Group,
    message_bytes,
    plain_token_bytes,
    returns_of,
)
from max_ep.token_format import TokenFormat
from std.sys import size_of

comptime NUM_THREADS = 512
"""Threads of a block, the default of `Group`."""
comptime EXPERT_SLOTS = 1
"""By expert, rows: a number as `Group.protocol` gives it."""
comptime RANK_SLOTS = 2
"""By rank, rows."""
comptime RANK_SLOTS_REDUCED = 3
"""By rank, sums."""
comptime GATHER_REDUCED = 5
"""To all, sums."""


def is_reduced_protocol(protocol: Int) -> Bool:
    """Returns whether combine sends partial sums."""
    return protocol == RANK_SLOTS_REDUCED or protocol == GATHER_REDUCED


def dispatch_group[
    Format: TokenFormat,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    protocol: Int,
    n_sms: Int = 0,
    is_padded: Bool = False,
    fused_shared_expert: Bool = False,
    shares_gpu: Bool = True,
    n_gpus_per_node: Int = n_ranks,
    use_shmem: Bool = False,
]() -> Group:
    """Describes the group of a dispatch."""
    return Group(
        n_experts=n_experts,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens_per_rank,
        top_k=Format.top_k,
        hidden_size=Format.hidden_size,
        dispatch_msg_bytes=Format.msg_bytes,
        addressing=addressing_of(protocol),
        returns=returns_of(protocol),
        is_padded=is_padded,
        fused_shared_expert=fused_shared_expert,
        shares_gpu=shares_gpu,
        n_ranks_per_node=n_gpus_per_node,
        use_shmem=use_shmem,
        num_threads=NUM_THREADS,
        n_sms=n_sms,
    )


def combine_group[
    combine_dtype: DType,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    n_gpus_per_node: Int,
    use_shmem: Bool,
    protocol: Int,
    partial_dtype: DType,
    n_sms: Int,
    fused_shared_expert: Bool = False,
    shares_gpu: Bool = True,
]() -> Group:
    """Describes the group of a combine. Rows go back alike for each addressing.
    """
    comptime has_sums = is_reduced_protocol(protocol)
    comptime sent_dtype = partial_dtype if has_sums else combine_dtype
    return Group(
        n_experts=n_experts,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens_per_rank,
        top_k=top_k,
        hidden_size=hidden_size,
        combine_msg_bytes=message_bytes(
            plain_token_bytes(hidden_size, size_of[Scalar[sent_dtype]]())
        ),
        addressing=addressing_of(protocol if has_sums else 0),
        returns=returns_of(protocol if has_sums else 0),
        fused_shared_expert=fused_shared_expert,
        shares_gpu=shares_gpu,
        n_ranks_per_node=n_gpus_per_node,
        use_shmem=use_shmem,
        num_threads=NUM_THREADS,
        n_sms=n_sms,
    )
