# SPDX-License-Identifier: Apache-2.0
"""Groups of the kernel variants that the programs `codegen*.mojo` compile."""
from max_ep.layout import Addressing, combine_msg_bytes, Group, Returns
from max_ep.token_format import TokenFormat


def dispatch_group[
    Format: TokenFormat,
    n_experts: Int,
    n_ranks: Int,
    max_tokens: Int,
    addressing: Addressing,
    returns: Returns = Returns.ROWS,
    *,
    padded: Bool = False,
    shared: Bool = False,
    shares_gpu: Bool = True,
    n_ranks_per_node: Int = n_ranks,
]() -> Group:
    """Describes a group of dispatch; ranks of several nodes use SHMEM."""
    return Group(
        n_experts=n_experts,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens,
        top_k=Format.top_k,
        hidden_size=Format.hidden_size,
        dispatch_msg_bytes=Format.msg_bytes,
        addressing=addressing,
        returns=returns,
        is_padded=padded,
        fused_shared_expert=shared,
        shares_gpu=shares_gpu,
        n_ranks_per_node=n_ranks_per_node,
        use_shmem=n_ranks_per_node < n_ranks,
    )


def combine_group[
    dtype: DType,
    hidden: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens: Int,
    *,
    addressing: Addressing = Addressing.ANY,
    returns: Returns = Returns.ANY,
    shared: Bool = False,
    shares_gpu: Bool = True,
    n_ranks_per_node: Int = n_ranks,
]() -> Group:
    """Describes a group of combine; `dtype` is what it sends."""
    return Group(
        n_experts=n_experts,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens,
        top_k=top_k,
        hidden_size=hidden,
        combine_msg_bytes=combine_msg_bytes[dtype](hidden),
        addressing=addressing,
        returns=returns,
        fused_shared_expert=shared,
        shares_gpu=shares_gpu,
        n_ranks_per_node=n_ranks_per_node,
        use_shmem=n_ranks_per_node < n_ranks,
    )
