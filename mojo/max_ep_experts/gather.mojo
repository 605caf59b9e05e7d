# SPDX-License-Identifier: Apache-2.0
"""The first product of experts on Hopper, of rows that its kernel gathers.

TMA of Hopper copies adjacent rows only. So two warps copy them, 16 bytes a lane, to the
places that TMA would choose: of a row of 128 bytes the 16 bytes `c` go to `c ^ row % 8`.
"""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu import WARP_SIZE
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from std.sys import llvm_intrinsic
from std.utils import StaticTuple

from .copies import arrive_when_gathered, gather_16
from .hopper import launch_only_on_hopper, TileProduct
from .product import GroupedProduct, In, product_of
from .ring import Ring, ROW_BYTES
from .tile import K_STEP
from .tiles import BlockTile, BM
from .wgmma import Bf16Product

comptime _LANES_OF_ROW = 8
"""Lanes that copy a row of a stage."""
comptime _ROWS: UInt32 = 4
"""Rows that a warp copies at once."""
comptime _PASSES = Int(BM // (2 * _ROWS))
"""How often the two warps do that for the longest tile."""
comptime _TOGETHER = 4
"""Passes that are left out together, if a tile is shorter."""


@always_inline
def _of_eight[lane: Int](value: UInt32) -> UInt32:
    """Returns the value of one of the eight lanes that copy a row."""
    comptime width_of_8 = Int32((WARP_SIZE - _LANES_OF_ROW) << 8 | WARP_SIZE - 1)
    return llvm_intrinsic["llvm.nvvm.shfl.sync.idx.i32", UInt32](
        Int32(-1), value, Int32(lane), width_of_8
    )


@fieldwise_init
struct GatheredSwiglu(TileProduct):
    """SwiGLU in bfloat16; row `r` of the product is of token `token_of_row[r]`."""

    comptime Product = Bf16Product[True, gathers=True]
    comptime swiglu = True
    comptime chunks = Self.Product.chunks
    comptime may_be_narrow = True
    comptime n_gathering = 2 * WARP_SIZE

    var product: GroupedProduct[DType.bfloat16]
    """What is multiplied; `x` is the tokens, `[n_tokens][k]`."""
    var token_of_row: In[DType.int32]
    """`[n_rows]`."""
    var n_tokens: Int
    """Rows of `x`."""

    @always_inline
    def grouped(self) -> GroupedProduct[DType.bfloat16]:
        return self.product

    @always_inline
    def n_rows_of_x(self) -> Int:
        return self.n_tokens

    @always_inline
    def consume(self, var ring: Ring, warpgroup: UInt32):
        Self.Product(self.product).consume(ring, warpgroup)

    @always_inline
    def gather(self, var ring: Ring, thread: UInt32):
        var next = ring.next_tile()
        while True:
            var tile = next.take()
            if tile.n_rows == 0:
                # Copies before, of the same stage, have arrived.
                ring.await_empty()
                # ORDER: RELEASE; this thread is one of those that the barrier counts.
                _ = ring.full()[].arrive()
                return
            self._gather_tile(ring, tile, thread)

    @always_inline
    def _gather_tile(self, mut ring: Ring, tile: BlockTile, thread: UInt32):
        """Copies the rows of a tile, with one thread of two warps. What is behind them
        stays as it is: no result depends on it."""
        var which, lane = divmod(thread, UInt32(WARP_SIZE))
        var in_pass, chunk = divmod(lane, UInt32(_LANES_OF_ROW))
        var first = which * _ROWS
        # A lane finds the row of every eighth pass, and hands it to the seven others.
        comptime n_found = (_PASSES - 1) // _LANES_OF_ROW + 1
        var found = StaticTuple[UInt32, n_found](fill=0)
        comptime for i in range(n_found):
            var of_lane = UInt32(i * _LANES_OF_ROW) + chunk
            found[i] = self._begin_of(tile, 2 * _ROWS * of_lane + first + in_pass)
        var source = self.product.x.unsafe_offset(Int(8 * chunk))
        var place = 16 * (chunk ^ (first + in_pass))
        var n_left = Int32(tile.n_rows) - Int32(first + in_pass)
        for _ in range(UInt32(self.product.k // K_STEP)):
            ring.await_empty()
            var to = UInt32(Int(ring.rows(first + in_pass))) + place
            comptime for first_pass in range(0, _PASSES, _TOGETHER):
                if 2 * _ROWS * UInt32(first_pass) < tile.n_rows:
                    var begins = StaticTuple[UInt32, _TOGETHER](fill=0)
                    comptime for j in range(_TOGETHER):
                        comptime i = first_pass + j
                        begins[j] = _of_eight[i % _LANES_OF_ROW](
                            found[i // _LANES_OF_ROW]
                        )
                    comptime for j in range(_TOGETHER):
                        comptime rows = 2 * Int(_ROWS) * (first_pass + j)
                        # With one token, all blocks would read the line of one row.
                        if Int32(rows) < n_left:
                            gather_16(
                                to + UInt32(rows * ROW_BYTES),
                                source.unsafe_offset(8 * Int(begins[j])),
                            )
            arrive_when_gathered(ring)
            source = source.unsafe_offset(K_STEP)
            ring.step()

    @always_inline
    def _begin_of(self, tile: BlockTile, row: UInt32) -> UInt32:
        """Returns where the token of a row begins, in 16 bytes; behind the last row that
        of the last one."""
        var at = Int(tile.begin + min(row, tile.n_rows - 1))
        var token = UInt32(self.token_of_row[unsafe_offset=at])
        # Like the offsets, those of a failed router reach nothing.
        return min(token, UInt32(self.n_tokens - 1)) * UInt32(self.product.k // 8)


@extensibility.register("max_ep.grouped_gate_up_gathered")
struct GroupedGateUpGathered:
    """As `grouped_gate_up`, of tokens: row `r` is of token `token_of_row[r]`."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        tokens: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        weights: InputTensor[dtype=DType.bfloat16, rank=3, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        expert_ids: InputTensor[dtype=DType.int32, rank=1, ...],
        token_of_row: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert is_gpu[target](), "max_ep: this op is for GPUs"
        var gathered = GatheredSwiglu(
            product_of[DType.bfloat16](y, tokens, weights, row_offsets, expert_ids),
            {unsafe_from_address = Int(token_of_row.unsafe_ptr())},
            tokens.dim_size(0),
        )
        launch_only_on_hopper("grouped_gate_up_gathered", gathered, ctx)
