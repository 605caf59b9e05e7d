# SPDX-License-Identifier: Apache-2.0
"""All token formats, by the names that ops take (`max_ep/formats.py`)."""
from ..protocol.token_format import TokenFormat
from .block_numbers import BlockNumbers
from .block_scaled import BlockScaledTokenFormat
from .blockwise_fp8 import BlockwiseFP8
from .forwarded import ForwardedTokenFormat
from .mxfp4 import MXFP4
from .mxfp8 import MXFP8
from .nvfp4 import NVFP4
from .plain import PlainTokenFormat
from .scale_layouts import InTiles, RowByRow, ScaledRows, TransposedRows, WithRowScales


struct _Table[*Formats: BlockNumbers]:
    comptime Named[name: StaticString]: BlockNumbers = Self.Formats[
        Self._checked[Self.index_of(name), name]()
    ]
    """The format of a name, which may also say that tokens are quantized before."""

    @staticmethod
    def _checked[idx: Int, name: StaticString]() -> Int:
        comptime assert idx >= 0, "max_ep: formats/table.mojo has no format " + name
        return idx

    @staticmethod
    def index_of(name: StaticString) -> Int:
        var base = name.removesuffix("_forwarded")
        if name == "nvfp4_dynamic":
            base = NVFP4.name
        comptime for i in range(Self.Formats.length):
            if Self.Formats[i].name == base:
                return i
        return -1


comptime NumbersOf = _Table[
    BlockwiseFP8[], BlockwiseFP8[True], MXFP8, NVFP4, MXFP4
].Named
"""All formats that have a scale for each block."""

# fmt: off
comptime _RowsOf[scales: StaticString]: ScaledRows = (
    InTiles if scales == "tiles"
    else RowByRow if scales == "rows"
    else TransposedRows[scales == "packed"]
)

comptime FormatOf[
    name: StaticString,
    hidden_size: Int,
    top_k: Int,
    router_top_k: Int = 0,
    scales: StaticString = "transposed",
]: TokenFormat = (
    PlainTokenFormat[DType.bfloat16, hidden_size, top_k, router_top_k]
    if name == "bfloat16"
    else PlainTokenFormat[DType.float32, hidden_size, top_k, router_top_k]
    if name == "float32" or router_top_k > 0
    else ForwardedTokenFormat[NVFP4, WithRowScales[_RowsOf[scales]], hidden_size, top_k]
    if name == "nvfp4_dynamic"
    else ForwardedTokenFormat[NumbersOf[name], _RowsOf[scales], hidden_size, top_k]
    if name.endswith("_forwarded")
    else BlockScaledTokenFormat[NumbersOf[name], _RowsOf[scales], hidden_size, top_k]
)
"""The format of a name; in an all-gather `router_top_k` is above 0. `scales` says
where scales go: transposed, rows, tiles or packed."""
# fmt: on
