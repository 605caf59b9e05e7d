# SPDX-License-Identifier: Apache-2.0
"""Compiles the small work around a dispatch, for a GPU that need not be there.

Run by tests/codegen/same_code.py alone.
"""
from emitting import emit
from groups import BF16, ByRank, HIDDEN
from max_ep.work.for_each import work_kernel
from max_ep.formats.forwarded import JoinWords, QuantizeTokens
from max_ep.formats.mxfp8 import MXFP8
from max_ep.row_limit.missing import FindDegraded


def main() raises:
    comptime group = ByRank[BF16, oversubscribed=True, masks=True].group
    emit[work_kernel[FindDegraded[group]]]("degraded")
    emit[work_kernel[JoinWords[MXFP8, HIDDEN]]]("join")
    emit[work_kernel[QuantizeTokens[DType.bfloat16, HIDDEN]]]("quantize")
