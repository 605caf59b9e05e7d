# SPDX-License-Identifier: Apache-2.0
"""Groups and formats of the kernel variants that the programs `codegen*.mojo` compile.

A large model, on eight GPUs unless said otherwise.
"""
from max_ep.formats.block_scaled import BlockScaledTokenFormat
from max_ep.formats.blockwise_fp8 import BlockwiseFP8TokenFormat
from max_ep.formats.mxfp4 import MXFP4
from max_ep.formats.mxfp8 import MXFP8
from max_ep.formats.nvfp4 import NVFP4
from max_ep.formats.plain import BF16TokenFormat, Float32TokenFormat
from max_ep.formats.scale_layouts import InTiles, RowByRow
from max_ep.layout import Addressing, combine_msg_bytes, Group
from max_ep.token_format import TokenFormat

comptime HIDDEN = 7168
comptime TOP_K = 8
comptime N_EXPERTS = 256
comptime N_RANKS = 8
comptime FEW = 128
"""A rank sends so few tokens that all are inline-flag tokens."""
comptime MANY = 4096
"""A rank may send more than that, in chunks that have flags."""
comptime BF16 = BF16TokenFormat[HIDDEN, TOP_K]
comptime F32 = Float32TokenFormat[HIDDEN, TOP_K]
comptime FP8 = BlockwiseFP8TokenFormat[HIDDEN, TOP_K]
comptime MXFP8_ROWS = BlockScaledTokenFormat[MXFP8, RowByRow, HIDDEN, TOP_K]
comptime MXFP8_TILES = BlockScaledTokenFormat[MXFP8, InTiles, HIDDEN, TOP_K]
comptime MXFP4_ROWS = BlockScaledTokenFormat[MXFP4, RowByRow, HIDDEN, TOP_K]
comptime NVFP4_ROWS = BlockScaledTokenFormat[NVFP4, RowByRow, HIDDEN, TOP_K]
comptime NVFP4_TILES = BlockScaledTokenFormat[NVFP4, InTiles, HIDDEN, TOP_K]
comptime BY_EXPERT = Addressing.BY_EXPERT
comptime BY_RANK = Addressing.BY_RANK
comptime ANY = 0
"""Rows, of any addressing."""
comptime ROWS = 1
comptime SUMS = 2


def dispatch_group[
    Format: TokenFormat
](
    addressing: Addressing,
    returns: Int = ROWS,
    max_tokens: Int = FEW,
    *,
    n_ranks: Int = N_RANKS,
    n_experts: Int = N_EXPERTS,
    is_padded: Bool = False,
    fused_shared_expert: Bool = False,
    shares_gpu: Bool = True,
    wide_ids: Bool = False,
) -> Group:
    """Describes the group of a dispatch."""
    return Group(
        n_experts=n_experts,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens,
        top_k=Format.top_k,
        hidden_size=Format.hidden_size,
        dispatch_msg_bytes=Format.msg_bytes,
        addressing=addressing,
        has_sums=returns == SUMS,
        is_padded=is_padded,
        fused_shared_expert=fused_shared_expert,
        shares_gpu=shares_gpu,
        wide_ids=wide_ids,
    )


def combine_group[
    sent_dtype: DType
](
    returns: Int = ANY,
    max_tokens: Int = FEW,
    *,
    n_ranks: Int = N_RANKS,
    top_k: Int = TOP_K,
    fused_shared_expert: Bool = False,
    shares_gpu: Bool = True,
    partial_block: Int = 0,
) -> Group:
    """Describes the group of a combine: by rank, or of any addressing."""
    return Group(
        n_experts=N_EXPERTS,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens,
        top_k=top_k,
        hidden_size=HIDDEN,
        combine_msg_bytes=combine_msg_bytes[sent_dtype](HIDDEN, partial_block),
        addressing=Addressing.ANY if returns == ANY else BY_RANK,
        has_sums=returns == SUMS,
        fused_shared_expert=fused_shared_expert,
        shares_gpu=shares_gpu,
        partial_block=partial_block,
    )


def on_hosts(n_hosts: Int, group: Group) -> Group:
    """Spreads a group over hosts, which SHMEM connects if they are several."""
    var spread = group
    spread.n_ranks_per_node = group.n_ranks // n_hosts
    spread.use_shmem = n_hosts > 1
    return spread


def that_drops(group: Group) -> Group:
    """Makes the ranks of a group drop rows that do not fit."""
    var dropping = group
    dropping.drops_rows = True
    return dropping


def that_masks(group: Group) -> Group:
    """Makes the ranks of a group mask a peer that is late."""
    var masking = group
    masking.masks = True
    return masking
