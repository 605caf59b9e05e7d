# SPDX-License-Identifier: Apache-2.0
"""Token formats: what dispatch can put on the wire.

:data:`FORMATS` is the only table of them in Python. Configuration, checks, graph
builders, ``max-ep plan``, the memory estimate and the tests' oracle ask it. A new
format is one file in ``mojo/max_ep/formats`` and one entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from max.dtype import DType
from max.nn.quant_config import (
    InputScaleSpec,
    QuantConfig,
    QuantFormat,
    ScaleGranularity,
    ScaleOrigin,
    WeightScaleSpec,
)

from . import reference

PLAIN_DTYPES = (DType.bfloat16, DType.float32)
"""Dtypes of expert rows and results, and of tokens before a format encodes them."""

FP8_BLOCK = 128
"""Elements that share a scale; a test compares it with ``blockwise_fp8.mojo``."""


def blockwise_fp8_quant_config() -> QuantConfig:
    """Returns the ``dispatch_quant_config`` of blockwise FP8 dispatch."""
    return QuantConfig(
        input_scale=InputScaleSpec(
            granularity=ScaleGranularity.BLOCK,
            origin=ScaleOrigin.DYNAMIC,
            dtype=DType.float32,
            block_size=(1, FP8_BLOCK),
        ),
        weight_scale=WeightScaleSpec(
            granularity=ScaleGranularity.BLOCK,
            dtype=DType.float32,
            block_size=(FP8_BLOCK, FP8_BLOCK),
        ),
        mlp_quantized_layers=set(),
        attn_quantized_layers=set(),
        format=QuantFormat.BLOCKSCALED_FP8,
    )


@dataclass(frozen=True)
class TokenFormat:
    """How a token travels to its experts."""

    name: str
    """As ops take it (``formats/table.mojo``)."""
    short_name: str
    """As the command line takes it."""
    dtype: DType
    """``EPConfig.dispatch_dtype``: of the elements on the wire."""
    token_dtypes: tuple[DType, ...]
    """Dtypes that a token may have before it is sent."""
    scale_block: int = 0
    """Elements that share a float32 scale; 0: there are no scales."""
    cpu_rows_dtype: DType | None = None
    """Dtype of delivered rows on CPU, where MAX lacks ``dtype``; None: ``dtype``."""
    make_quant_config: Callable[[], QuantConfig] | None = None
    """Makes the ``dispatch_quant_config`` that it needs; None: it takes none."""
    quantize: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None
    """Oracle, ``quantize(x, power_of_two_scales)``: maps float32 ``[n, hidden]`` to
    values ``[n, hidden]`` and scales ``[n, n_scales]``. None: elements travel as they
    are."""

    @property
    def is_quantized(self) -> bool:
        """Whether rows come with scales."""
        return self.scale_block > 0

    def n_scales(self, hidden_size: int) -> int:
        """Returns the scales of a row."""
        return hidden_size // self.scale_block if self.is_quantized else 0

    def rows_dtype(self, target: str) -> DType:
        """Returns the dtype of delivered rows on ``"cpu"`` or ``"gpu"``."""
        if target == "cpu" and self.cpu_rows_dtype is not None:
            return self.cpu_rows_dtype
        return self.dtype

    def op_name(self, power_of_two_scales: bool) -> str:
        """Returns the name with the rounding of scales, as ops take it."""
        is_rounded = self.is_quantized and power_of_two_scales
        return self.name + ("_power_of_two" if is_rounded else "")

    def check_quant_config(self, given: QuantConfig | None) -> None:
        """Raises a ``ValueError`` unless a quantization config fits the format."""
        if self.make_quant_config is None:
            if given is not None:
                raise ValueError(
                    f"dispatch_quant_config given with dispatch_dtype={self.dtype}; "
                    "pass None, or dispatch_dtype=float8_e4m3fn"
                )
            return
        maker = f"max_ep.{self.make_quant_config.__name__}()"
        if given is None:
            raise ValueError(
                f"dispatch_dtype={self.dtype} needs a dispatch_quant_config: {maker} "
                "makes the supported one"
            )
        wanted = self.make_quant_config()
        have, want = (
            (c.format, c.input_scale.dtype, c.input_scale.block_size)
            for c in (given, wanted)
        )
        if have != want:
            raise ValueError(
                "dispatch_quant_config has format {}, scales of {} for blocks of {}; "
                "supported is {} with scales of {} for blocks of {}, as {} makes "
                "it".format(*have, *want, maker)
            )


FORMATS = (
    TokenFormat("bfloat16", "bfloat16", DType.bfloat16, (DType.bfloat16,)),
    TokenFormat("float32", "float32", DType.float32, (DType.float32,)),
    TokenFormat(
        "blockwise_fp8",
        "fp8",
        DType.float8_e4m3fn,
        PLAIN_DTYPES,
        scale_block=FP8_BLOCK,
        cpu_rows_dtype=DType.uint8,
        make_quant_config=blockwise_fp8_quant_config,
        quantize=reference.quantize_blockwise_fp8,
    ),
)
"""All formats."""

BY_SHORT_NAME = {token_format.short_name: token_format for token_format in FORMATS}
"""Formats by the names that the command line takes."""


def format_of(dtype: DType) -> TokenFormat:
    """Returns the format of a ``dispatch_dtype``; a ``ValueError`` if there is none."""
    for token_format in FORMATS:
        if token_format.dtype == dtype:
            return token_format
    names = [str(f.dtype).removeprefix("DType.") for f in FORMATS]
    raise ValueError(
        f"dispatch_dtype={dtype} must be {', '.join(names[:-1])} or {names[-1]}"
    )
