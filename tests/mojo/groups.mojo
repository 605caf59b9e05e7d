# SPDX-License-Identifier: Apache-2.0
"""The kernel variants that the programs `codegen*.mojo` compile: of a large model, on
eight GPUs unless said otherwise.
"""
from max_ep.combine_rows.kernel import CombineRows
from max_ep.combine_sums.kernel import CombineSums
from max_ep.dispatch_by_expert.kernel import DispatchByExpert
from max_ep.dispatch_by_rank.kernel import DispatchByRank
from max_ep.formats.plain import PlainTokenFormat
from max_ep.formats.table import FormatOf
from max_ep.protocol.addressing import Addressing
from max_ep.protocol.layout import Group
from max_ep.protocol.message_sizes import combine_msg_bytes
from max_ep.protocol.token_format import TokenFormat

comptime HIDDEN = 7168
comptime TOP_K = 8
comptime N_EXPERTS = 256
comptime N_RANKS = 8
comptime FEW = 128
"""A rank sends so few tokens that all are inline-flag tokens."""
comptime MANY = 4096
"""A rank may send more than that, in chunks that have flags."""
comptime Named[name: StaticString, scales: StaticString = "transposed"] = FormatOf[
    name, HIDDEN, TOP_K, scales=scales
]
comptime BF16 = Named["bfloat16"]
comptime F32 = Named["float32"]
comptime FP8 = Named["fp8"]
comptime ROWS = 1
comptime SUMS = 2

comptime ByExpert[
    Format: TokenFormat,
    max_tokens: Int = FEW,
    padded: Bool = False,
    shared: Bool = False,
    n_ranks: Int = N_RANKS,
    n_hosts: Int = 1,
    oversubscribed: Bool = False,
] = DispatchByExpert[
    Group(
        n_experts=N_EXPERTS,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens,
        top_k=Format.top_k,
        hidden_size=Format.hidden_size,
        dispatch_msg_bytes=Format.msg_bytes,
        addressing=Addressing.BY_EXPERT,
        has_sums=False,
        is_padded=padded,
        fused_shared_expert=shared,
        shares_gpu=oversubscribed,
        n_mapped=n_ranks // n_hosts,
    ),
    Format,
    DType.bfloat16,
]
"""A dispatch by expert; SHMEM connects several hosts."""

comptime ByRank[
    Format: TokenFormat,
    returns: Int = ROWS,
    max_tokens: Int = FEW,
    padded: Bool = False,
    shared: Bool = False,
    oversubscribed: Bool = False,
    n_experts: Int = N_EXPERTS,
    n_ranks: Int = N_RANKS,
    addressing: Addressing = Addressing.BY_RANK,
    wide_ids: Bool = False,
    masks: Bool = False,
    drops: Bool = False,
    n_hosts: Int = 1,
] = DispatchByRank[
    Group(
        n_experts=n_experts,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens,
        top_k=Format.top_k,
        hidden_size=Format.hidden_size,
        dispatch_msg_bytes=Format.msg_bytes,
        addressing=addressing,
        has_sums=returns == SUMS,
        is_padded=padded,
        fused_shared_expert=shared,
        shares_gpu=oversubscribed,
        wide_ids=wide_ids,
        masks=masks,
        drops_rows=drops,
        n_mapped=n_ranks // n_hosts,
    ),
    Format,
    DType.bfloat16,
]
"""A dispatch by rank."""

comptime AllGather[
    n_ranks: Int, max_tokens: Int, oversubscribed: Bool = False
] = ByRank[
    PlainTokenFormat[DType.bfloat16, HIDDEN, n_ranks, TOP_K],
    SUMS,
    max_tokens,
    oversubscribed=oversubscribed,
    n_experts=n_ranks,
    n_ranks=n_ranks,
    addressing=Addressing.TO_ALL,
]
"""Each rank is an expert."""

comptime RowsBack[
    dtype: DType = DType.bfloat16,
    by_rank: Bool = False,
    max_tokens: Int = FEW,
    shared: Bool = False,
    keeps_rows: Bool = False,
    top_k: Int = TOP_K,
    n_ranks: Int = N_RANKS,
    n_hosts: Int = 1,
    masks: Bool = False,
    oversubscribed: Bool = False,
] = CombineRows[
    Group(
        n_experts=N_EXPERTS,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens,
        top_k=top_k,
        hidden_size=HIDDEN,
        combine_msg_bytes=combine_msg_bytes[dtype](HIDDEN),
        addressing=Addressing.BY_RANK if by_rank else Addressing.BY_EXPERT,
        fused_shared_expert=shared,
        shares_gpu=oversubscribed,
        n_mapped=n_ranks // n_hosts,
        masks=masks,
    ),
    dtype,
    keeps_rows,
]
"""A combine of rows."""

comptime SumsBack[
    partial: DType,
    max_tokens: Int = FEW,
    shared: Bool = False,
    oversubscribed: Bool = False,
    block: Int = 0,
    n_ranks: Int = N_RANKS,
    masks: Bool = False,
    drops: Bool = False,
    n_hosts: Int = 1,
] = CombineSums[
    Group(
        n_experts=N_EXPERTS,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        combine_msg_bytes=combine_msg_bytes[partial](HIDDEN, block),
        addressing=Addressing.BY_RANK,
        has_sums=True,
        fused_shared_expert=shared,
        shares_gpu=oversubscribed,
        partial_block=block,
        masks=masks,
        drops_rows=drops,
        n_mapped=n_ranks // n_hosts,
    ),
    DType.bfloat16,
    partial,
]
"""A combine of sums, quantized in blocks if there is a size of them."""
