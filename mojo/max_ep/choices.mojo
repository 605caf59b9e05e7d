# SPDX-License-Identifier: Apache-2.0
"""Ids and probabilities of tokens as messages of their own, and back.

For `AllGatherTokenDispatcher`: a rank's choices become rows of float32 that a
dispatch gathers, in one launch; what it gathered becomes a routing map and
probabilities, in another. Ids are exact below 2**24.
"""
from max.gpu import block_dim, global_idx, grid_dim
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from max.gpu.primitives.grid_controls import PDLLevel, pdl_launch_attributes
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv

from .rank_slots.device_steps import await_launch_before

comptime _NUM_THREADS = 256
comptime _MAX_BLOCKS = 128


trait ItemWork(DevicePassable, TrivialRegisterPassable):
    """Work that falls into items, each of which one thread can do."""

    def n_items(self) -> Int:
        """Counts what `do` can be asked for.

        Returns:
            Items.
        """
        ...

    def do(self, item: Int):
        """Does one item.

        Args:
            item: Which, in `[0, n_items())`.
        """
        ...


@fieldwise_init
struct PackedChoices(ItemWork):
    """A rank's choices, and what dispatch needs to send them to everybody."""

    var ids: Pointer[Int32, ImmUntrackedOrigin]
    """`[n_tokens][top_k]`."""
    var probs: Pointer[Float32, ImmUntrackedOrigin]
    """`[n_tokens][top_k]`."""
    var messages: Pointer[Float32, MutUntrackedOrigin]
    """Result, `[n_tokens][n_columns]`: ids, probabilities, zeros."""
    var ranks: Pointer[Int32, MutUntrackedOrigin]
    """Result, `[n_tokens][n_ranks]`: every rank."""
    var ones: Pointer[Float32, MutUntrackedOrigin]
    """Result, `[n_tokens][n_ranks]`: a weight of 1 for each."""
    var n_tokens: Int
    """Tokens of this rank."""
    var top_k: Int
    """Choices of a token."""
    var n_columns: Int
    """Elements of a message, `2 * top_k` or more."""
    var n_ranks: Int
    """Ranks of the group."""

    comptime device_type: AnyType = Self
    """A kernel gets it as it is."""

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type in error messages about kernel arguments.

        Returns:
            The name.
        """
        return "PackedChoices"

    @always_inline
    def n_items(self) -> Int:
        """Counts what `do` can be asked for.

        Returns:
            Items.
        """
        return self.n_tokens * max(self.n_columns, self.n_ranks)

    @always_inline
    def do(self, item: Int):
        """Writes one column of a token.

        Args:
            item: Which, in `[0, n_items())`.
        """
        var width = max(self.n_columns, self.n_ranks)
        var token = item // width
        var column = item % width
        if column < self.n_columns:
            var value: Float32 = 0
            if column < self.top_k:
                var choice = token * self.top_k + column
                value = self.ids[unsafe_offset=choice].cast[DType.float32]()
            elif column < 2 * self.top_k:
                value = self.probs[
                    unsafe_offset=token * self.top_k + column - self.top_k
                ]
            self.messages[unsafe_offset=token * self.n_columns + column] = value
        if column < self.n_ranks:
            var place = token * self.n_ranks + column
            self.ranks[unsafe_offset=place] = Int32(column)
            self.ones[unsafe_offset=place] = 1


@fieldwise_init
struct UnpackedChoices(ItemWork):
    """Gathered messages, and what they say."""

    var rows: Pointer[Float32, ImmUntrackedOrigin]
    """`[n_rows][n_columns]`."""
    var row_offsets: Pointer[UInt32, ImmUntrackedOrigin]
    """`[2]`: 0, and how many rows there are."""
    var ids: Pointer[Int32, MutUntrackedOrigin]
    """Result, `[n_rows][top_k]`; behind the last row, -1."""
    var probs: Pointer[Float32, MutUntrackedOrigin]
    """Result, `[n_rows][top_k]`; behind the last row, 0."""
    var n_gathered: Pointer[Int32, MutUntrackedOrigin]
    """Result, `[1]`: rows that there are."""
    var n_rows: Int
    """Rows of the tensors."""
    var top_k: Int
    """Choices of a token."""
    var n_columns: Int
    """Elements of a message."""

    comptime device_type: AnyType = Self
    """A kernel gets it as it is."""

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type in error messages about kernel arguments.

        Returns:
            The name.
        """
        return "UnpackedChoices"

    @always_inline
    def n_items(self) -> Int:
        """Counts what `do` can be asked for.

        Returns:
            Items.
        """
        return max(1, self.n_rows * self.top_k)

    @always_inline
    def do(self, item: Int):
        """Reads one choice.

        Args:
            item: Which, in `[0, n_items())`.
        """
        var n_there = Int(self.row_offsets[unsafe_offset=1])
        if item == 0:
            self.n_gathered[] = Int32(n_there)
        var row = item // self.top_k
        if row >= self.n_rows:
            return
        var id: Int32 = -1
        var prob: Float32 = 0
        if row < n_there:
            var choice = row * self.n_columns + item % self.top_k
            id = self.rows[unsafe_offset=choice].cast[DType.int32]()
            prob = self.rows[unsafe_offset=choice + self.top_k]
        self.ids[unsafe_offset=item] = id
        self.probs[unsafe_offset=item] = prob


def items_kernel[work_type: ItemWork](work: work_type):
    """Does all items.

    Launch: any grid, any block.

    Parameters:
        work_type: Kind of work.

    Args:
        work: What to do.
    """
    await_launch_before()
    for item in range(
        Int(global_idx.x), work.n_items(), Int(grid_dim.x * block_dim.x)
    ):
        work.do(item)


def do_items[
    work_type: ItemWork, //, target: StaticString
](work: work_type, context: DeviceContext) raises:
    """Does all items, on the device of the tensors.

    Parameters:
        work_type: Kind of work.
        target: Device kind, such as `cpu`.

    Args:
        work: What to do.
        context: The device.

    Raises:
        If the launch fails.
    """
    comptime if is_gpu[target]():
        var n_blocks = ceildiv(work.n_items(), _NUM_THREADS)
        var function = context.compile_function[items_kernel[work_type]]()
        context.enqueue_function(
            function,
            work,
            grid_dim=max(1, min(_MAX_BLOCKS, n_blocks)),
            block_dim=_NUM_THREADS,
            attributes=pdl_launch_attributes(PDLLevel.ON),
        )
    else:
        for item in range(work.n_items()):
            work.do(item)
