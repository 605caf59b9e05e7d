# SPDX-License-Identifier: Apache-2.0
"""All token formats, by the names that ops take (`max_ep/formats.py`)."""
from ..token_format import TokenFormat
from .blockwise_fp8 import BlockwiseFP8TokenFormat
from .plain import PlainTokenFormat

comptime FORMAT_NAMES: Array[StaticString, 4] = [
    "bfloat16",
    "float32",
    "blockwise_fp8",
    "blockwise_fp8_power_of_two",
]
"""The names; `launch.mojo` refuses any other when an op is compiled."""

comptime FormatOf[
    name: StaticString, hidden_size: Int, top_k: Int, router_top_k: Int = 0
]: TokenFormat = PlainTokenFormat[
    DType.bfloat16 if name == "bfloat16" else DType.float32,
    hidden_size,
    top_k,
    max(router_top_k, 0),
] if router_top_k > 0 or not name.startswith(
    "blockwise_fp8"
) else BlockwiseFP8TokenFormat[
    hidden_size, top_k, name == "blockwise_fp8_power_of_two"
]
"""The format of a name; in an all-gather `router_top_k` is above 0."""


def has_format(name: StaticString) -> Bool:
    """Returns whether a format has the name."""
    var names = materialize[FORMAT_NAMES]()
    for i in range(len(names)):
        if name == names[i]:
            return True
    return False
