# SPDX-License-Identifier: Apache-2.0
"""All token formats, by the names that ops take (`max_ep/formats.py`)."""
from ..token_format import TokenFormat
from .blockwise_fp8 import BlockwiseFP8TokenFormat
from .plain import PlainTokenFormat
from .with_metadata import WithMetadataTokenFormat

comptime FORMAT_NAMES: Array[StaticString, 4] = [
    "bfloat16",
    "float32",
    "blockwise_fp8",
    "blockwise_fp8_power_of_two",
]
"""The names; `launch.mojo` refuses any other when an op is compiled."""

comptime _plain_dtype[name: StaticString] = (
    DType.bfloat16 if name == "bfloat16" else DType.float32
)

comptime FormatOf[
    name: StaticString, hidden_size: Int, top_k: Int, router_top_k: Int = 0
]: TokenFormat = WithMetadataTokenFormat[
    _plain_dtype[name], hidden_size, top_k, router_top_k
] if router_top_k > 0 else _FormatOf[
    name, hidden_size, top_k
]
"""The format of a name; in an all-gather `router_top_k` is not 0."""

comptime _FormatOf[
    name: StaticString, hidden_size: Int, top_k: Int
]: TokenFormat = BlockwiseFP8TokenFormat[
    hidden_size, top_k, name == "blockwise_fp8_power_of_two"
] if name == "blockwise_fp8" or name == "blockwise_fp8_power_of_two" else PlainTokenFormat[
    _plain_dtype[name], hidden_size, top_k
]


def has_format(name: StaticString) -> Bool:
    """Returns whether a format has the name."""
    var names = materialize[FORMAT_NAMES]()
    for i in range(len(names)):
        if name == names[i]:
            return True
    return False
