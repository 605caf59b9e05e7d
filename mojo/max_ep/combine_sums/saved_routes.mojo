# SPDX-License-Identifier: Apache-2.0
"""What dispatch has noted of a token for reduced combine, as the lanes know it.

Which notes a warp reads first does not depend on what launches before have left, if
tokens are few: so they are on their way while the launch reads its header.
"""
from ..counters import EPLocalSyncCounters, NO_ROW
from ..layout import Group


@fieldwise_init
struct SavedRoutes(TrivialRegisterPassable):
    """The notes of a token; lane `k` has those of choice `k`."""

    var n_tokens: Int32
    """Tokens of its source: if it is not one of them, the rest means nothing."""
    var row: Int32
    """As in `EPLocalSyncCounters.received_rows`."""
    var weight: Float32
    """Its router weight, if it has a row here."""

    @staticmethod
    @always_inline
    def of[
        group: Group
    ](
        counters: EPLocalSyncCounters, source: Int, token_idx: Int, lane: Int
    ) -> Self:
        """Reads the notes of a token, all at once."""
        var saved = Self(
            counters.received_tokens(group)[unsafe_offset=source], NO_ROW, 0
        )
        if lane < group.top_k and token_idx < group.max_tokens_per_rank:
            var choice = group.choice(token_idx, lane)
            saved.row = counters.received_rows(group, source)[
                unsafe_offset=choice
            ]
            saved.weight = counters.received_weights(group, source)[
                unsafe_offset=choice
            ]
        return saved
