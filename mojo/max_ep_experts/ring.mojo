# SPDX-License-Identifier: Apache-2.0
"""The ring in shared memory between a block's producer thread and its consumers.

A stage holds 64 elements of k of a tile: of up to 160 rows of `x`, then of up to 256 rows
of a weight. The first stage of a tile also says which tile it is. Barriers of two
parities say that a stage is full, or that all who read it are done.
"""
from layout.tma_async import SharedMemBarrier
from max.gpu import WARP_SIZE, thread_idx
from max.gpu.memory import fence_mbarrier_init
from std.sys import size_of

from .groups import Smem
from .tile import K_STEP
from .tiles import BlockTile, BM, BN

comptime N_STAGES = 4
comptime MAX_GROUPS = 2048
"""Groups whose counts fit in each of the two tables."""
comptime ROW_BYTES = K_STEP * 2
"""Bytes of a row of a stage: what a swizzle spans."""
comptime _ALIGNMENT = 1024
"""Bytes after which a swizzle repeats."""
comptime _STAGE_BYTES = Int(BM + BN) * ROW_BYTES
comptime _FULL = N_STAGES * _STAGE_BYTES
comptime _EMPTY = _FULL + 8 * N_STAGES
comptime _TILES = _EMPTY + 8 * N_STAGES
comptime _NEXT = _TILES + size_of[BlockTile]() * N_STAGES
comptime _TABLES = _NEXT + NextTile.BYTES
comptime RING_BYTES = _ALIGNMENT + _TABLES + 2 * 4 * (MAX_GROUPS + 1)
comptime _N_READERS = 2 * 8
"""Warps of both blocks that read a stage."""


@fieldwise_init
struct NextTile(TrivialRegisterPassable):
    """The next tile, which one thread finds while another loads the tile before."""

    comptime BYTES = 16 + (size_of[BlockTile]() + 7) // 8 * 8

    var base: UInt32
    """Address in shared memory."""
    var parity: UInt32
    """Parity of the number of tiles before."""

    @always_inline
    def given(self) -> Smem[SharedMemBarrier]:
        """Returns the barrier that completes when the tile is there."""
        return {unsafe_from_address = Int(self.base)}

    @always_inline
    def taken(self) -> Smem[SharedMemBarrier]:
        """Returns the barrier that completes when the tile was read."""
        return {unsafe_from_address = Int(self.base + 8)}

    @always_inline
    def tile(self) -> Smem[BlockTile]:
        return {unsafe_from_address = Int(self.base + 16)}

    @always_inline
    def give(mut self, tile: BlockTile):
        """Writes a tile when the one before was read."""
        # ORDER: both barriers are ACQUIRE and RELEASE in the block. `given` makes the tile
        # visible to who takes it; `taken` says that it may be overwritten.
        self.taken()[].wait(self.parity ^ 1)
        self.tile()[] = tile
        _ = self.given()[].arrive()
        self.parity ^= 1

    @always_inline
    def take(mut self) -> BlockTile:
        """Reads the tile when it is there."""
        # ORDER: as in `give`.
        self.given()[].wait(self.parity)
        var tile = self.tile()[]
        _ = self.taken()[].arrive()
        self.parity ^= 1
        return tile


@fieldwise_init
struct Ring(TrivialRegisterPassable):
    """Where the ring is, and a thread's place in it."""

    var base: UInt32
    """Address in shared memory."""
    var stage: UInt32
    var parity: UInt32
    """Parity of the thread's round."""

    @staticmethod
    @always_inline
    def at(memory: Smem[UInt8]) -> Self:
        """Returns the ring in `RING_BYTES` of memory, at its first stage."""
        var aligned = (Int(memory) + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        return Self(UInt32(aligned), 0, 0)

    @always_inline
    def place[T: AnyType](self, offset: UInt32) -> Smem[T]:
        return Smem[T](unsafe_from_address=Int(self.base + offset))

    @always_inline
    def rows(self, row: UInt32) -> Smem[BFloat16]:
        """Returns a row of the stage: 0 is the first of `x`, `BM` of the weight."""
        return self.place[BFloat16](
            self.stage * UInt32(_STAGE_BYTES) + row * UInt32(ROW_BYTES)
        )

    @always_inline
    def full(self) -> Smem[SharedMemBarrier]:
        """Returns the barrier that completes when the stage is loaded."""
        return self.place[SharedMemBarrier](UInt32(_FULL) + 8 * self.stage)

    @always_inline
    def empty(self, stage: UInt32) -> Smem[SharedMemBarrier]:
        """Returns the barrier that completes when all have read a stage."""
        return self.place[SharedMemBarrier](UInt32(_EMPTY) + 8 * stage)

    @always_inline
    def tile(self) -> Smem[BlockTile]:
        """Returns the tile that begins with the stage."""
        return self.place[BlockTile](
            UInt32(_TILES) + UInt32(size_of[BlockTile]()) * self.stage
        )

    @always_inline
    def next_tile(self) -> NextTile:
        return NextTile(self.base + UInt32(_NEXT), 0)

    @always_inline
    def table(self, i: Int) -> Smem[UInt32]:
        """Returns the first or the second table of `MAX_GROUPS + 1` counts."""
        return self.place[UInt32](UInt32(_TABLES + i * 4 * (MAX_GROUPS + 1)))

    @always_inline
    def initialize[n_gathering: Int](self):
        """Initializes the barriers, with one thread.

        `n_gathering` threads load beside the producer.
        """
        comptime for stage in range(N_STAGES):
            Self(self.base, UInt32(stage), 0).full()[].init(Int32(1 + n_gathering))
            self.empty(UInt32(stage))[].init(Int32(_N_READERS))
        self.next_tile().given()[].init(Int32(1))
        self.next_tile().taken()[].init(Int32(1 + n_gathering))
        # ORDER: makes the barriers visible to the async proxy and to the other block; a
        # sync of the cluster follows.
        fence_mbarrier_init()

    @always_inline
    def step(mut self):
        self.stage += 1
        if self.stage == UInt32(N_STAGES):
            self.stage = 0
            self.parity ^= 1

    @always_inline
    def await_full(self):
        # ORDER: ACQUIRE, block scope; pairs with what TMA and the producers have arrived.
        self.full()[].wait(self.parity)

    @always_inline
    def await_empty(self):
        """Waits until the stage may be written, in both blocks."""
        # ORDER: ACQUIRE, cluster scope; pairs with `release` of all readers of both blocks.
        self.empty(self.stage)[].wait(self.parity ^ 1)

    @always_inline
    def release(self, stage: UInt32):
        """Says to both producers that write a stage that this warp has read it."""
        # ORDER: RELEASE, cluster scope; pairs with `await_empty`. The warp's `wgmma` that
        # read the stage is done.
        var lane = UInt32(thread_idx.x) % UInt32(WARP_SIZE)
        if lane < 2:
            self.empty(stage)[].arrive_cluster(lane)
