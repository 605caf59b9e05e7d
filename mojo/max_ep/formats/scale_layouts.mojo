# SPDX-License-Identifier: Apache-2.0
"""Where the scales of dispatched rows are placed: by row, transposed, or in tiles.

On the wire a token's scales follow its values. A format is compiled for one layout.
"""
from std.math import ceildiv
from std.sys import size_of

from ..protocol.kernel_argument import MutPointer
from ..protocol.token_format import BytePointer, OutputRows, OutputTensors


trait ScaledRows(OutputRows):
    """Output tensors of values and scales."""

    comptime have_row_scales: Bool = False
    """Whether each row has a scale of its own, too."""

    def place[
        scale_type: DType, n: Int, //, n_blocks: Int
    ](self, row: Int, first: Int, scales: SIMD[scale_type, n]):
        """Puts the bits of some of a row's `n_blocks` scales where they belong.

        `first`: the block that the first is of, a multiple of `n`. Scales behind the last
        block are left out.
        """
        ...

    @always_inline
    def place_row_scale(self, row: Int, scale: Float32):
        """Puts the scale of a whole row where it belongs."""
        pass


@fieldwise_init
struct WithRowScales[Rows: ScaledRows](ScaledRows):
    """Scales of blocks where `Rows` has them, and one of each row."""

    var rows: Self.Rows
    var row_scales: MutPointer[Float32]
    """Scales of rows, `[n_rows_max]`."""

    comptime have_row_scales = True
    comptime depend_on_expert = Self.Rows.depend_on_expert

    @staticmethod
    def of(outputs: OutputTensors) -> Self:
        """`probs` is for all-gathers otherwise."""
        return {Self.Rows.of(outputs), outputs.probs}

    @always_inline
    def of_expert(self, local_expert: Int, first_row: Int) -> Self:
        return {self.rows.of_expert(local_expert, first_row), self.row_scales}

    @always_inline
    def values(self) -> BytePointer:
        return self.rows.values()

    @always_inline
    def place[
        scale_type: DType, n: Int, //, n_blocks: Int
    ](self, row: Int, first: Int, scales: SIMD[scale_type, n]):
        self.rows.place[n_blocks](row, first, scales)

    @always_inline
    def place_row_scale(self, row: Int, scale: Float32):
        self.row_scales[unsafe_offset=row] = scale


@fieldwise_init
struct TransposedRows[packed: Bool = False](ScaledRows):
    """Transposed scales, as FP8 matmuls read them: `[n_panels][n_blocks][rows_per_panel]`.

    `packed`: the exponents of float32 scales that are powers of two, four in a word, as
    bytes `[n_panels][n_blocks / 4][rows_per_panel][4]`. DeepEP calls it UE8M0.
    """

    var tokens: BytePointer
    var scales: BytePointer
    var rows_per_panel: Int
    """Rows whose scales stand together: all of them where rows are packed,
    those of one expert where they are padded."""

    @staticmethod
    def of(outputs: OutputTensors) -> Self:
        return {outputs.tokens, outputs.scales, outputs.scales_columns}

    @always_inline
    def values(self) -> BytePointer:
        return self.tokens

    @always_inline
    def place[
        scale_type: DType, n: Int, //, n_blocks: Int
    ](self, row: Int, first: Int, scales: SIMD[scale_type, n]):
        comptime assert (
            not Self.packed or scale_type == DType.uint32 and n_blocks % 4 == 0
        )
        comptime per_word = 4 if Self.packed else 1
        var to = self.scales.unsafe_bitcast[Scalar[scale_type]]()
        var panel, row_in_panel = divmod(row, self.rows_per_panel)
        var start = panel * (n_blocks // per_word) * self.rows_per_panel + row_in_panel
        comptime for i in range(n):
            if n == 1 or first + i < n_blocks:
                comptime if Self.packed:
                    var word, byte = divmod(first + i, per_word)
                    var at = start + word * self.rows_per_panel
                    var exponent = (scales[i] >> 23).cast[DType.uint8]()
                    self.scales[unsafe_offset=per_word * at + byte] = exponent
                else:
                    to[
                        unsafe_offset=start + (first + i) * self.rows_per_panel
                    ] = scales[i]


@fieldwise_init
struct RowByRow(ScaledRows):
    """Scales: `[n_rows_max][n_blocks]`."""

    var tokens: BytePointer
    var scales: BytePointer

    @staticmethod
    def of(outputs: OutputTensors) -> Self:
        return {outputs.tokens, outputs.scales}

    @always_inline
    def values(self) -> BytePointer:
        return self.tokens

    @always_inline
    def place[
        scale_type: DType, n: Int, //, n_blocks: Int
    ](self, row: Int, first: Int, scales: SIMD[scale_type, n]):
        var to = self.scales.unsafe_bitcast[Scalar[scale_type]]()
        var at = row * n_blocks + first
        comptime if n_blocks % n == 0:
            to.unsafe_store[alignment=n * size_of[Scalar[scale_type]]()](at, scales)
        else:
            comptime for i in range(n):
                if first + i < n_blocks:
                    to[unsafe_offset=at + i] = scales[i]


@fieldwise_init
struct InTiles(ScaledRows):
    """Scales of one byte in tiles of 128 rows and 4 blocks, as MAX's block-scaled
    matmuls read them.

    Scales: `[n_tiles][ceildiv(n_blocks, 4)][32][4][4]`. Each expert begins with a
    tile of its own: local expert `e`, whose rows begin at `first_row`, with tile
    `first_row // 128 + e`. Row `r` of a tile is at `[r % 32][r // 32]`. Scales of
    blocks that there are not are 0; those of such rows are left as they are.
    """

    var tokens: BytePointer
    var scales: BytePointer
    var shift: Int
    """From a row to its place in the tiles: the same for all rows of an expert."""

    comptime depend_on_expert = True

    @staticmethod
    def of(outputs: OutputTensors) -> Self:
        return {outputs.tokens, outputs.scales, 0}

    @always_inline
    def of_expert(self, local_expert: Int, first_row: Int) -> Self:
        return {self.tokens, self.scales, 128 * local_expert - first_row % 128}

    @always_inline
    def values(self) -> BytePointer:
        return self.tokens

    @always_inline
    def place[
        scale_type: DType, n: Int, //, n_blocks: Int
    ](self, row: Int, first: Int, scales: SIMD[scale_type, n]):
        comptime assert size_of[Scalar[scale_type]]() == 1, "tiles hold bytes"
        var to = self.scales.unsafe_bitcast[Scalar[scale_type]]()
        var tile, row_in_tile = divmod(row + self.shift, 128)
        var inner = row_in_tile % 32 * 4 + row_in_tile // 32
        var start = (tile * ceildiv(n_blocks, 4) * 128 + inner) * 4
        comptime for i in range(0, n, 4):
            if first + i < n_blocks:
                var four = SIMD[scale_type, 4](0)
                comptime for j in range(4):
                    if first + i + j < n_blocks:
                        four[j] = scales[i + j]
                to.unsafe_store[alignment=4](start + (first + i) * 128, four)
