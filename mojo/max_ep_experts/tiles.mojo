# SPDX-License-Identifier: Apache-2.0
"""Which tiles of a product a cluster of two blocks computes, and in which order."""
from std.math import ceildiv

from .groups import group_of, Smem
from .product import GroupedProduct

comptime BM: UInt32 = 160
"""Most rows of a block's tile."""
comptime BN: UInt32 = 256
"""Most columns of a block's tile."""


@fieldwise_init
struct BlockTile(TrivialRegisterPassable):
    """A block's part of a tile of its cluster."""

    var begin: UInt32
    var n_rows: UInt32
    """Rows, a chunk; 0 behind the last tile."""
    var expert: UInt32
    var column: UInt32
    var n_columns: UInt32
    """Columns, `BN` or half as many."""
    var shares_weight: Bool
    """Whether both blocks have the same part of the weight, or else the same rows."""


@fieldwise_init
struct Chunks(TrivialRegisterPassable):
    """How a group's rows are divided: into few chunks of one size, the last shorter."""

    var most: UInt32
    """Most rows of a chunk, up to `BM`."""
    var step: UInt32
    """Divides the size of chunks, and `most`."""

    @always_inline
    def count(self, n_rows: UInt32) -> UInt32:
        """Returns how many chunks so many rows are."""
        return ceildiv(n_rows, self.most)

    @always_inline
    def n_pairs(self, n_rows: UInt32) -> UInt32:
        return self.count(n_rows) // 2

    @always_inline
    def n_odd(self, n_rows: UInt32) -> UInt32:
        """Returns how many chunks, one or none, are not in a pair."""
        return self.count(n_rows) % 2

    @always_inline
    def size(self, n_rows: UInt32) -> UInt32:
        """Returns the rows of each chunk of so many rows, `> 0`, but for the last."""
        return ceildiv(ceildiv(n_rows, self.count(n_rows)), self.step) * self.step


struct Schedule(Copyable):
    """The tiles of a cluster, one after another.

    A tile is a pair of chunks and `BN` columns, or an odd chunk and twice as many. The
    order of all tiles is by group, pairs before the odd chunk, then by columns. In each
    wave the clusters take the next `n_clusters` tiles, so a weight is loaded by all at
    about the same time. Odd tiles may have few rows, so clusters take them in rotation.

    If few tiles would leave clusters without one, tiles are narrow: they have half of
    the columns, and all chunks are odd.
    """

    var product: GroupedProduct[DType.bfloat16]
    var chunks: Chunks
    var pairs: Smem[UInt32]
    """Pairs before each group, `[n_groups + 1]`."""
    var odds: Smem[UInt32]
    """Odd chunks before each group, `[n_groups + 1]`."""
    var narrow: Bool
    var cluster: UInt32
    var n_clusters: UInt32
    var first: UInt32
    """First tile of the next wave."""
    var first_odd: UInt32
    """Odd tiles before it."""

    @always_inline
    def __init__(
        out self,
        product: GroupedProduct[DType.bfloat16],
        chunks: Chunks,
        pairs: Smem[UInt32],
        odds: Smem[UInt32],
        cluster: UInt32,
        n_clusters: UInt32,
        may_be_narrow: Bool = True,
    ):
        """Begins; tiles are narrow if narrow ones, twice as many, fit one wave."""
        self.product = product
        self.chunks = chunks
        self.pairs = pairs
        self.odds = odds
        self.narrow = False
        self.cluster = cluster
        self.n_clusters = n_clusters
        self.first = 0
        self.first_odd = 0
        var n_narrow = 2 * self.tiles_before(product.n_groups)
        self.narrow = may_be_narrow and n_narrow <= n_clusters

    @always_inline
    def n_columns(self) -> UInt32:
        """Returns how often `BN` columns go into a weight."""
        return UInt32(self.product.n) // BN

    @always_inline
    def pair_tiles_before(self, group: Int) -> UInt32:
        if self.narrow:
            return 0
        return self.pairs[unsafe_offset=group] * self.n_columns()

    @always_inline
    def odd_tiles_before(self, group: Int) -> UInt32:
        var odds = self.odds[unsafe_offset=group]
        if self.narrow:
            return (odds + 2 * self.pairs[unsafe_offset=group]) * self.n_columns()
        return odds * ceildiv(self.n_columns(), 2)

    @always_inline
    def tiles_before(self, group: Int) -> UInt32:
        return self.pair_tiles_before(group) + self.odd_tiles_before(group)

    @always_inline
    def odd_tiles_of(self, n: UInt32) -> UInt32:
        """Returns how many of the first `n` tiles are odd."""
        if self.narrow:
            return n

        @always_inline
        def before(group: Int) {imm} -> UInt32:
            return self.tiles_before(group)

        var group = group_of(n, self.product.n_groups, before)
        var rest = n - self.tiles_before(group)
        var n_pairs = self.chunks.n_pairs(self.product.size(group))
        var n_pair_tiles = n_pairs * self.n_columns()
        var odds = rest - n_pair_tiles if rest > n_pair_tiles else 0
        return self.odd_tiles_before(group) + odds

    @always_inline
    def next(mut self, rank: UInt32) -> BlockTile:
        """Returns a block's part of the next tile."""
        var n_groups = self.product.n_groups
        var left = self.tiles_before(n_groups) - self.first
        var n_tiles = min(left, self.n_clusters)
        var odd_end = self.odd_tiles_of(self.first + n_tiles)
        var n_odd_tiles = odd_end - self.first_odd
        # The rotation goes on with the cluster behind that of the last odd tile.
        var rotated = self.cluster + self.n_clusters - self.first_odd % self.n_clusters
        var item = rotated % self.n_clusters
        var pair = self.first - self.first_odd + item - n_odd_tiles
        var odd = self.first_odd + item
        self.first += n_tiles
        self.first_odd = odd_end
        if item < n_odd_tiles:
            return self.of_odd(odd, rank)
        if item < n_tiles:
            return self.of_pair(pair, rank)
        return BlockTile(0, 0, 0, 0, 0, False)

    @always_inline
    def of_pair(self, item: UInt32, rank: UInt32) -> BlockTile:
        """Returns a chunk of the `item`-th tile of a pair; the pairs of a column are
        adjacent."""

        @always_inline
        def before(group: Int) {imm} -> UInt32:
            return self.pair_tiles_before(group)

        var group = group_of(item, self.product.n_groups, before)
        var column, pair = divmod(
            item - before(group), self.chunks.n_pairs(self.product.size(group))
        )
        return self.tile(group, 2 * pair + rank, column * BN, True)

    @always_inline
    def of_odd(self, item: UInt32, rank: UInt32) -> BlockTile:
        """Returns a block's columns of the `item`-th tile of an odd chunk."""

        @always_inline
        def before(group: Int) {imm} -> UInt32:
            return self.odd_tiles_before(group)

        var group = group_of(item, self.product.n_groups, before)
        var n_chunks = self.chunks.count(self.product.size(group))
        var of_group = item - before(group)
        if self.narrow:
            var column, chunk = divmod(of_group, n_chunks)
            return self.tile(group, chunk, (2 * column + rank) * (BN // 2), False)
        # If the number of columns is odd, too, both blocks compute the last one.
        var column = min(2 * of_group + rank, self.n_columns() - 1)
        return self.tile(group, n_chunks - 1, column * BN, False)

    @always_inline
    def tile(
        self, group: Int, chunk: UInt32, column: UInt32, shares_weight: Bool
    ) -> BlockTile:
        """Returns the tile of a chunk of rows and columns from `column` on."""
        var n_rows = self.product.size(group)
        var size = self.chunks.size(n_rows)
        var first = chunk * size
        return BlockTile(
            self.product.begin(group) + first,
            min(n_rows - first, size),
            self.product.expert(group),
            column,
            BN // 2 if self.narrow else BN,
            shares_weight,
        )
