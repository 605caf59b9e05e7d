# SPDX-License-Identifier: Apache-2.0
"""All token formats, by the names that ops take (`max_ep/formats.py`)."""
from ..token_format import TokenFormat
from .block_scaled import BlockNumbers, BlockScaledTokenFormat
from .blockwise_fp8 import BlockwiseFP8
from .forwarded import ForwardedTokenFormat
from .mxfp4 import MXFP4
from .mxfp8 import MXFP8
from .nvfp4 import NVFP4
from .plain import PlainTokenFormat
from .scale_layouts import InTiles, RowByRow, ScaledRows, TransposedRows, WithRowScales

comptime NumbersOf[name: StaticString]: BlockNumbers = MXFP8 if name.startswith(
    "mxfp8"
) else (
    MXFP4 if name.startswith("mxfp4") else NVFP4 if name.startswith(
        "nvfp4"
    ) else BlockwiseFP8[name == "fp8_power_of_two"]
)

comptime _RowsOf[scales: StaticString]: ScaledRows = InTiles if scales == "tiles" else (
    RowByRow if scales == "rows" else TransposedRows[scales == "packed"]
)

comptime FormatOf[
    name: StaticString,
    hidden_size: Int,
    top_k: Int,
    router_top_k: Int = 0,
    scales: StaticString = "transposed",
]: TokenFormat = PlainTokenFormat[
    DType.bfloat16 if name == "bfloat16" else DType.float32,
    hidden_size,
    top_k,
    router_top_k,
] if router_top_k > 0 or name == "bfloat16" or name == "float32" else (
    ForwardedTokenFormat[
        NumbersOf[name], _RowsOf[scales], hidden_size, top_k
    ] if name.endswith("_forwarded") else ForwardedTokenFormat[
        NVFP4, WithRowScales[_RowsOf[scales]], hidden_size, top_k, has_row_scale=True
    ] if name
    == "nvfp4_dynamic" else BlockScaledTokenFormat[
        NumbersOf[name], _RowsOf[scales], hidden_size, top_k
    ]
)
"""The format of a name; in an all-gather `router_top_k` is above 0. `scales` says
where scales go: transposed, rows, tiles or packed."""


def has_format(name: StringSlice) -> Bool:
    """Returns whether a format has a name; `FormatOf` takes any for blockwise FP8."""
    for begin in ["fp8", "mxfp8", "mxfp4", "nvfp4"]:
        if name.startswith(begin):
            return True
    return name == "bfloat16" or name == "float32"
