# SPDX-License-Identifier: Apache-2.0
"""What a matmul of groups reads and writes."""
from extensibility import InputTensor, OutputTensor
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.sys import size_of

comptime In[dtype: DType] = Pointer[Scalar[dtype], ImmUntrackedOrigin]
comptime Out[dtype: DType] = Pointer[Scalar[dtype], MutUntrackedOrigin]
comptime Bf16In = In[DType.bfloat16]
comptime Bf16Out = Out[DType.bfloat16]
comptime LANE = 8
"""Elements in bfloat16 that a lane loads at once, 16 bytes."""


trait KernelArgument(DevicePassable, TrivialRegisterPassable):
    """A struct whose bytes on the host are those on the device."""

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type in MAX's errors about kernel arguments."""
        return "max_ep_experts.KernelArgument"


@fieldwise_init
struct GroupedProduct[dtype: DType](KernelArgument):
    """`y[r] = x[r] @ weights[expert_ids[g]].T` for every row `r` of a group `g`.

    Group `g` has the rows `[row_offsets[g], row_offsets[g + 1])`. Rows behind the
    last group stay untouched. Or all rows are one group, of weight 0. Products and sums
    are float32.

    With SwiGLU a weight has `n / 2` rows of gate, then as many of up, and `y` has
    `n / 2` columns: `silu(x[r] @ gate.T) * (x[r] @ up.T)`.
    """

    var y: Out[Self.dtype]
    """`[n_rows][n]`, with SwiGLU `[n_rows][n / 2]`."""
    var x: In[Self.dtype]
    """`[n_rows][k]`, or tokens that rows are gathered from; 16-byte aligned on GPUs."""
    var weights: In[Self.dtype]
    """`[n_experts][n][k]`; 16-byte aligned on GPUs."""
    var row_offsets: In[DType.uint32]
    """`[n_groups + 1]`."""
    var expert_ids: In[DType.int32]
    """`[n_groups]`."""
    var n_groups: Int
    var n_rows: Int
    """Rows of `y`, used or not."""
    var n_experts: Int
    var n: Int
    var k: Int
    var one_group: Int
    """1 if all rows are one group; then there are no offsets and ids. A `Bool` here makes
    the kernels' pointers generic."""

    @always_inline
    def begin(self, group: Int) -> UInt32:
        """Returns a group's first row, which need not exist."""
        if self.one_group == 1:
            return UInt32(group * self.n_rows)
        return self.row_offsets[unsafe_offset=group]

    @always_inline
    def expert(self, group: Int) -> UInt32:
        """Returns whose weight a group has; there need be none."""
        if self.one_group == 1:
            return 0
        return UInt32(self.expert_ids[unsafe_offset=group])

    @always_inline
    def size(self, group: Int) -> UInt32:
        """Returns how many rows of a group can be computed.

        The offsets of a failed dispatch are undefined: rows behind `n_rows` do not
        count, and a group of an unknown expert has none.
        """
        var begin = self.begin(group)
        var end = min(self.begin(group + 1), UInt32(self.n_rows))
        var is_known = self.expert(group) < UInt32(self.n_experts)
        return end - begin if begin < end and is_known else 0


def product_of[
    dtype: DType
](
    y: OutputTensor[rank=2, ...],
    x: InputTensor[rank=2, ...],
    weights: InputTensor[dtype=x.dtype, rank=3, ...],
    row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
    expert_ids: InputTensor[dtype=DType.int32, rank=1, ...],
) raises -> GroupedProduct[dtype]:
    """Describes the product of an op's tensors, whose bytes are seen as of a dtype."""
    if row_offsets.dim_size(0) != expert_ids.dim_size(0) + 1:
        raise Error(
            t"max_ep: row_offsets have {row_offsets.dim_size(0)} elements and"
            t" expert_ids {expert_ids.dim_size(0)}; pass one offset more than experts"
        )
    comptime per_element = size_of[Scalar[dtype]]() // size_of[Scalar[x.dtype]]()
    return GroupedProduct[dtype](
        y={unsafe_from_address = Int(y.unsafe_ptr())},
        x={unsafe_from_address = Int(x.unsafe_ptr())},
        weights={unsafe_from_address = Int(weights.unsafe_ptr())},
        row_offsets={unsafe_from_address = Int(row_offsets.unsafe_ptr())},
        expert_ids={unsafe_from_address = Int(expert_ids.unsafe_ptr())},
        one_group=0,
        n_groups=row_offsets.dim_size(0) - 1,
        n_rows=y.dim_size(0),
        n_experts=weights.dim_size(0),
        n=weights.dim_size(1),
        k=weights.dim_size(2) // per_element,
    )
