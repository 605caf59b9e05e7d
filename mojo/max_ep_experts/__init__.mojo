# SPDX-License-Identifier: Apache-2.0
"""Matmuls of experts and dense layers where MAX has none, or a wrong one.

On the CPU in any float type, on Hopper in bfloat16. Nothing here knows expert
parallelism. Why not MAX's: docs/decisions/0006-cpu-ranks.md and
docs/decisions/0016-matmuls-on-hopper.md.

    product         what a matmul of groups reads and writes
    cpu             the ops on the CPU
    tile            a warp's tile of a product on a GPU
    grouped_matmul  groups of rows, each with its weight, on a GPU
    linear          few rows and one weight, on a GPU
    ops, linear_op  the MAX ops
"""
