# SPDX-License-Identifier: Apache-2.0
"""Token formats: how dispatch encodes tokens on the wire.

:data:`FORMATS` is the only table of them in Python. Configuration, checks, graph
builders, ``max-ep plan``, the memory estimate and the tests' oracle ask it.
docs/adding_a_format.md lists what a new format touches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from max.dtype import DType
from max.nn.quant_config import NVFP4_BLOCK_SIZE, QuantConfig, QuantFormat

from . import quantize
from .limits import FP8_BLOCK

PLAIN_DTYPES = (DType.bfloat16, DType.float32)
"""Dtypes of expert rows and results, and of tokens before a format encodes them."""

MX_BLOCK = 32
"""Elements that share a scale in the OCP Microscaling formats."""

_WIDEN = {
    DType.float8_e4m3fn: quantize.float8_e4m3fn_to_float32,
    DType.float8_e8m0fnu: quantize.float8_e8m0fnu_to_float32,
    DType.uint8: quantize.float4_e2m1fn_to_float32,  # two in a byte
}
"""Makes float32 of the bits of dtypes that NumPy lacks."""


def widen_bits(dtype: DType, bits: np.ndarray) -> np.ndarray:
    """Makes float32 of the bits of values or scales; those of float32 are returned."""
    if dtype in _WIDEN:
        return _WIDEN[dtype](bits)
    return bits.view(dtype.to_numpy()).astype(np.float32, copy=False)


_NO_LAYERS: dict[str, Any] = dict(mlp_quantized_layers=(), attn_quantized_layers=())


def blockwise_fp8_quant_config() -> QuantConfig:
    """Returns the ``dispatch_quant_config`` of blockwise FP8 dispatch."""
    return QuantConfig.blockscaled_fp8(**_NO_LAYERS)


def mxfp8_quant_config() -> QuantConfig:
    """Returns the ``dispatch_quant_config`` of MXFP8 dispatch."""
    config = QuantConfig.mxfp4(**_NO_LAYERS)
    scales = replace(config.input_scale, dtype=DType.float8_e8m0fnu)
    return replace(config, format=QuantFormat.MXFP8, input_scale=scales)


def nvfp4_quant_config() -> QuantConfig:
    """Returns the ``dispatch_quant_config`` of NVFP4 dispatch."""
    return QuantConfig.nvfp4(**_NO_LAYERS)


def mxfp4_quant_config() -> QuantConfig:
    """Returns the ``dispatch_quant_config`` of MXFP4 dispatch."""
    return QuantConfig.mxfp4(**_NO_LAYERS)


@dataclass(frozen=True)
class TokenFormat:
    """How a token travels to its experts."""

    name: str
    """As its Mojo struct and the command line have it."""
    dtype: DType
    """``EPConfig.dispatch_dtype``: of the elements on the wire."""
    scale_block: int = 0
    """Elements that share a scale; 0: there are no scales."""
    scale_dtype: DType = DType.float32
    """Dtype of the scales."""
    make_quant_config: Callable[[], QuantConfig | None] = lambda: None
    """Makes the ``dispatch_quant_config`` that it needs; it returns None if it takes
    none."""
    quantize: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None
    """Oracle: maps float32 ``[n, hidden]`` to values ``[n, hidden]`` and scales ``[n,
    n_scales]``. None: elements travel as they are."""
    rounds_scales: bool = False
    """Whether ``fp8_power_of_two_scales`` rounds its scales, which are float32: then
    ``quantize`` takes ``power_of_two_scales``, and in Mojo the format also has its name
    with ``_power_of_two``."""
    row_scale_bytes: int = 0
    """16: a scale of the whole token follows those of the blocks."""

    @property
    def is_quantized(self) -> bool:
        """Whether rows come with scales."""
        return self.scale_block > 0

    @property
    def values_per_byte(self) -> int:
        """Values in a byte, or in an element of more: two float4_e2m1fn are a uint8."""
        return 2 if self.dtype == DType.uint8 else 1

    def row_columns(self, hidden_size: int) -> int:
        """Returns how many of ``dtype`` a row of values has."""
        return hidden_size // self.values_per_byte

    def n_scales(self, hidden_size: int) -> int:
        return hidden_size // self.scale_block if self.is_quantized else 0

    @property
    def scale_layouts(self) -> tuple[str, ...]:
        """Each ``EPConfig.scale_layout`` that it can have, the default first."""
        if self.is_quantized and self.scale_dtype == DType.float32:
            return ("transposed", "rows", "packed")[: 2 + self.rounds_scales]
        return ("rows", "transposed", "tiles") if self.is_quantized else ()

    def words(self) -> list[str]:
        """Describes a token on the wire, in the words of ``op_config.mojo``."""
        value_bits = 8 * self.dtype.size_in_bytes // self.values_per_byte
        return [
            f"value_bits={value_bits}",
            f"scale_block={self.scale_block}",
            f"scale_bytes={self.scale_dtype.size_in_bytes}",
        ]

    def dequantize(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Multiplies values ``[..., hidden]`` by their scales ``[..., n_scales]``, as
        ``quantize`` makes them, in float32: the oracle of :func:`max_ep.dequantize`."""
        x, factors = self.widen(values, scales)
        return x * factors

    def widen(
        self, values: np.ndarray, scales: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Makes float32 of values and of scales, and a scale for each value."""
        x = widen_bits(self.dtype, values)
        wanted = (*x.shape[:-1], x.shape[-1] // self.scale_block)
        if scales.shape != wanted:
            raise ValueError(
                f"scales must be {list(wanted)}, got {list(scales.shape)}; those that "
                "dispatch delivers may stand transposed: pass scales.T"
            )
        factors = widen_bits(self.scale_dtype, scales)
        return x, np.repeat(factors, self.scale_block, axis=-1)

    def with_row_scales(self) -> TokenFormat:
        """Returns NVFP4 with a scale of each token, or the format as it is."""
        if self.name != "nvfp4":
            return self
        return replace(
            self,
            name="nvfp4_dynamic",
            row_scale_bytes=16,
            quantize=lambda x: quantize.quantize_nvfp4_dynamic(x)[:2],
        )

    def check_quant_config(
        self, given: QuantConfig | None, field: str = "dispatch_quant_config"
    ) -> None:
        """Raises a ``ValueError`` unless a quantization config fits the format."""
        wanted = self.make_quant_config()
        if wanted is None:
            if given is not None:
                raise ValueError(
                    f"dispatch_quant_config given with dispatch_dtype={self.dtype}; "
                    "pass None, or the dispatch_dtype that it quantizes to"
                )
            return
        maker = f"max_ep.{self.make_quant_config.__name__}()"
        if given is None:
            raise ValueError(
                f"dispatch_dtype={self.dtype} needs a dispatch_quant_config: {maker} "
                "makes the supported one"
            )
        have, want = (
            (c.format, c.input_scale.dtype, c.input_scale.block_size)
            for c in (given, wanted)
        )
        if have != want:
            has = "{} has format {}, scales of {} for blocks of {}".format(field, *have)
            supported = "{} with scales of {} for blocks of {}".format(*want)
            raise ValueError(f"{has}; supported is {supported}, as {maker} makes it")


FORMATS = (
    TokenFormat("bfloat16", DType.bfloat16),
    TokenFormat("float32", DType.float32),
    TokenFormat(
        "fp8",
        DType.float8_e4m3fn,
        scale_block=FP8_BLOCK,
        make_quant_config=blockwise_fp8_quant_config,
        quantize=quantize.quantize_blockwise_fp8,
        rounds_scales=True,
    ),
    TokenFormat(
        "mxfp8",
        DType.float8_e4m3fn,
        scale_block=MX_BLOCK,
        scale_dtype=DType.float8_e8m0fnu,
        make_quant_config=mxfp8_quant_config,
        quantize=quantize.quantize_mxfp8,
    ),
    TokenFormat(
        "nvfp4",
        DType.uint8,
        scale_block=NVFP4_BLOCK_SIZE,
        scale_dtype=DType.float8_e4m3fn,
        make_quant_config=nvfp4_quant_config,
        quantize=quantize.quantize_nvfp4,
    ),
    TokenFormat(
        "mxfp4",
        DType.uint8,
        scale_block=MX_BLOCK,
        scale_dtype=DType.float8_e8m0fnu,
        make_quant_config=mxfp4_quant_config,
        quantize=quantize.quantize_mxfp4,
    ),
)
"""All formats."""

BY_NAME = {token_format.name: token_format for token_format in FORMATS}
"""Formats by the names that the command line takes."""


def name_of_format(config: QuantConfig) -> str:
    """Returns the name of the format that a quantization config asks for."""
    for token_format in FORMATS:
        wanted = token_format.make_quant_config()
        if wanted is not None and wanted.format == config.format:
            return token_format.name
    return config.format.name.lower()


def on_target(dtype: DType, target: str) -> DType:
    """Returns the dtype of tensors that hold ``dtype`` on ``"cpu"`` or ``"gpu"``.

    MAX has no tensors of float8 on CPU: there uint8 holds the bits.
    """
    return DType.uint8 if target == "cpu" and dtype.size_in_bytes == 1 else dtype


def format_of(dtype: DType, quant_config: QuantConfig | None = None) -> TokenFormat:
    """Returns the format of a ``dispatch_dtype`` and a ``dispatch_quant_config``; the
    first of the dtype, if none has such a config."""
    of_dtype = [f for f in FORMATS if f.dtype == dtype]
    for token_format in of_dtype:
        wanted = token_format.make_quant_config()
        if wanted and quant_config and wanted.format == quant_config.format:
            return token_format
    if of_dtype:
        return of_dtype[0]
    names = list(dict.fromkeys(str(f.dtype).removeprefix("DType.") for f in FORMATS))
    raise ValueError(
        f"dispatch_dtype={dtype} must be {', '.join(names[:-1])} or {names[-1]}"
    )
