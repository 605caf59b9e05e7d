# SPDX-License-Identifier: Apache-2.0
"""Compiles the experts' matmuls for a GPU that need not be there.

Prints what they take at a time, as `n` and `k`, whole tiles of MAX's, and `n` and groups
on Hopper. Run by tests/experts/test_experts.py.
"""
from emitting import emit
from max_ep.router.routing import ChooseExperts
from max_ep.work.for_each import work_kernel
from max_ep_experts.choices import add_kernel, sort_kernel
from max_ep_experts.few_rows import (
    chosen_down_kernel,
    chosen_gate_up_kernel,
    DOWN,
    few_rows_kernel,
    TUNING,
)
from max_ep_experts.fp8 import ScaledProduct
from max_ep_experts.gather import GatheredSwiglu
from max_ep_experts.grouped_matmul import grouped_matmul_kernel
from max_ep_experts.heads import heads_kernel
from max_ep_experts.hopper import hopper_kernel
from max_ep_experts.linear import FEW_ROWS, linear_kernel
from max_ep_experts.norm import add_norm_kernel
from max_ep_experts.norm_product import norm_product_kernel
from max_ep_experts.ring import MAX_GROUPS
from max_ep_experts.tile import COLUMNS, K_STEP
from max_ep_experts.tiles import BN
from max_ep_experts.wgmma import Bf16Product


def main() raises:
    comptime for swiglu in range(2):
        comptime end = ".swiglu" if swiglu == 1 else ""
        emit[grouped_matmul_kernel[swiglu == 1]](String("grouped_matmul", end))
        emit[hopper_kernel[Bf16Product[swiglu == 1]]](String("wgmma", end))
        emit[hopper_kernel[ScaledProduct[swiglu == 1]]](String("fp8", end))
    emit[hopper_kernel[GatheredSwiglu]]("wgmma.gathered")
    emit[sort_kernel]("sort")
    emit[add_kernel[DType.bfloat16, 8]]("add")
    emit[linear_kernel]("linear")
    emit[few_rows_kernel[1, TUNING]]("few_rows.1")
    emit[few_rows_kernel[2, TUNING]]("few_rows.2")
    emit[chosen_gate_up_kernel[TUNING]]("chosen.gate_up")
    emit[chosen_down_kernel[DOWN.n_rows, DOWN.n_steps]]("chosen.down")
    comptime for n_columns in [320, 8448]:
        emit[add_norm_kernel[n_columns]](String("add_norm.", n_columns))
    emit[norm_product_kernel[1, 2048]]("norm_product.1")
    emit[norm_product_kernel[2, 2120]]("norm_product.2")
    emit[heads_kernel[DType.bfloat16, 64]]("heads")
    emit[work_kernel[ChooseExperts[DType.bfloat16, 128, 8, True, True]]]("choose")
    print(COLUMNS, K_STEP, FEW_ROWS, BN, MAX_GROUPS)
