# SPDX-License-Identifier: Apache-2.0
"""What a matmul of groups reads and writes."""

comptime In[dtype: DType] = Pointer[Scalar[dtype], ImmUntrackedOrigin]
comptime Out[dtype: DType] = Pointer[Scalar[dtype], MutUntrackedOrigin]
comptime Bf16In = In[DType.bfloat16]
comptime Bf16Out = Out[DType.bfloat16]


@fieldwise_init
struct GroupedProduct[dtype: DType](TrivialRegisterPassable):
    """`y[r] = x[r] @ weights[expert_ids[g]].T` for every row `r` of a group `g`.

    Group `g` has the rows `[row_offsets[g], row_offsets[g + 1])`. Rows behind the
    last group stay untouched. Products and sums are float32.
    """

    var y: Out[Self.dtype]
    """`[n_rows][n]`."""
    var x: In[Self.dtype]
    """`[n_rows][k]`; 16-byte aligned on GPUs."""
    var weights: In[Self.dtype]
    """`[n_experts][n][k]`; 16-byte aligned on GPUs."""
    var row_offsets: In[DType.uint32]
    """`[n_groups + 1]`."""
    var expert_ids: In[DType.int32]
    """`[n_groups]`."""
    var n_groups: Int
    """Number of groups."""
    var n_rows: Int
    """Rows that `x` and `y` have room for."""
    var n_experts: Int
    """Number of weights."""
    var n: Int
    """Columns of `y`."""
    var k: Int
    """Columns of `x`."""
