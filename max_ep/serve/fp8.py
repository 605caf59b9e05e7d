# SPDX-License-Identifier: Apache-2.0
"""Blockwise FP8 checkpoints, as those of DeepSeek-V3 and Qwen3.

Matrices are widened to the model's dtype when they load; on one GPU those of experts
stay as they are. A matrix ``NAME.weight`` of float8_e4m3fn has
``NAME.weight_scale_inv``, factors of its blocks of 128 x 128 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from max.driver import Buffer
from max.dtype import DType
from max.graph import Shape
from max.graph.weights import WeightData
from max.pipelines.modeling.config_enums import supported_encoding_dtype

from ..moe_shape import MoeShape, fp8_block
from ..quantize import (
    bfloat16_to_float32,
    float8_e4m3fn_to_float32,
    float32_to_bfloat16,
)
from .settings import n_gpus

_Adapter = Callable[..., dict[str, WeightData]]
_SCALES = "_scale_inv"
"""Behind the name of a weight."""


class _Widened:
    """A weight of a checkpoint, in the model's dtype."""

    def __init__(self, weight: Any, scales: Any, block: list[int], dtype: DType):
        self._weight, self._scales = weight, scales
        self._block, self._dtype = block, dtype

    def data(self) -> WeightData:
        weight = self._weight.data()
        wide = widen(
            _bits(weight, DType.uint8), _values(self._scales.data()), self._block
        )
        return _weight_data(weight.name, wide, self._dtype)


def _bits(data: WeightData, view: DType) -> np.ndarray:
    return data.to_buffer().view(view).to_numpy()


def _values(data: WeightData) -> np.ndarray:
    """Returns a float32 or bfloat16 weight in float32. ``WeightData.astype`` would
    compile a graph."""
    if data.dtype == DType.bfloat16:
        return bfloat16_to_float32(_bits(data, DType.uint16))
    return _bits(data, DType.float32)


def _weight_data(name: str, values: np.ndarray, dtype: DType) -> WeightData:
    """Makes a weight of float32 values, in float32 or rounded to bfloat16."""
    if dtype != DType.bfloat16:
        return WeightData.from_numpy(values, name)
    rounded = Buffer.from_numpy(float32_to_bfloat16(values)).view(dtype)
    return WeightData(rounded, name, dtype, Shape(values.shape))


def widen(bits: np.ndarray, scales: np.ndarray, block: list[int]) -> np.ndarray:
    """Multiplies FP8 bits ``[n, k]`` by the scales of their blocks, in float32."""
    n, k = bits.shape
    each = np.repeat(np.repeat(scales, block[0], 0)[:n], block[1], 1)[:, :k]
    return float8_e4m3fn_to_float32(bits) * each


def _adapted(
    adapter: _Adapter,
    weights: dict[str, Any],
    huggingface_config: Any,
    pipeline_config: Any,
    **more: Any,
) -> dict[str, WeightData]:
    """Widens, and calls an architecture's weight adapter."""
    more |= dict(huggingface_config=huggingface_config, pipeline_config=pipeline_config)
    adapt = partial(adapter, **more)
    block = fp8_block(huggingface_config)
    if not block:
        return adapt(weights)
    shape = MoeShape.of(huggingface_config)
    kept = ".experts." if shape.keeps_fp8(n_gpus(pipeline_config)) else None
    dtype = supported_encoding_dtype(pipeline_config.model.quantization_encoding)
    for name in [name for name in weights if name.endswith(_SCALES)]:
        if not (kept and kept in name):
            of = name.removesuffix(_SCALES)
            weights[of] = _Widened(weights[of], weights.pop(name), block, dtype)
    # MAX casts no weights of a checkpoint that has float8, too.
    return {
        name: _weight_data(name, _values(data), dtype)
        if data.dtype == DType.bfloat16 and dtype != DType.bfloat16
        else data
        for name, data in adapt(weights).items()
    }


def widening(adapters: Mapping[Any, _Adapter]) -> dict[Any, _Adapter]:
    """Puts the widening in front of an architecture's weight adapters; servers pickle
    them."""
    return {key: partial(_adapted, adapter) for key, adapter in adapters.items()}
