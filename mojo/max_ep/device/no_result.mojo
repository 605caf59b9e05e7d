# SPDX-License-Identifier: Apache-2.0
"""What a combine that fails leaves where it has no result."""
from max.gpu import block_idx, grid_dim, thread_idx
from std.utils.numerics import nan

from ..protocol.arguments import CombinedTokens
from ..protocol.layout import Group


@always_inline
def fill_with_nan[group: Group](combined: CombinedTokens[...]):
    """Fills a result that is not computed, with all blocks."""
    var value = nan[DType.float32]().cast[combined.dtype]()
    for i in range(
        Int(block_idx.x) * group.num_threads + Int(thread_idx.x),
        combined.n_tokens * group.hidden_size,
        Int(grid_dim.x) * group.num_threads,
    ):
        combined.tokens[unsafe_offset=i] = value
