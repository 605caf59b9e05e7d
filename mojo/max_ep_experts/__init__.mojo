# SPDX-License-Identifier: Apache-2.0
"""Matmuls of experts and dense layers where MAX has none, or a wrong one, and a pass
in front of attention.

On the CPU in any float type, on Hopper in bfloat16 and blockwise FP8. Nothing here knows expert
parallelism. Why not MAX's: docs/decisions/0006-cpu-ranks.md and
docs/decisions/0016-matmuls-on-hopper.md, of few tokens 0035-products-of-few-tokens.md.

    product         what a matmul of groups reads and writes
    cpu             the ops on the CPU
    groups          how a kernel finds the work of a group
    tiles           tiles of clusters of two blocks on Hopper, and their order
    ring            the stages in shared memory between producer and consumers
    copies          how rows and weights get there
    hopper          the kernel of groups of rows, each with its weight, on Hopper
    wgmma, fp8      what it multiplies, in bfloat16 and in blockwise FP8
    gather          the same in bfloat16, of tokens that it gathers
    choices         sorts a router's choices, and adds up rows of a token
    tile            a warp's tile of a product on a GPU
    grouped_matmul  the same groups, of sizes that hopper does not take
    launch          which of them multiplies groups
    linear          some rows and one weight, on a GPU
    few_rows        few tokens on Hopper: one or two and a weight, or experts of up to four
    norm            a sum and its norm, on a GPU
    norm_product    the same for one or two tokens, and a product of the norm
    overlap         how a kernel begins before the previous one has ended
    routed          the MAX op of a layer of experts on one GPU
    heads           what stands between a product and attention, on the CPU, too
    ops             the MAX ops of groups; other ops stand beside their kernels
    linear_op       the MAX op of linear
"""
