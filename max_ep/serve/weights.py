# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's weights as MAX's models take them.

Each is what the index says, in the model's dtype; MAX's adapters name it. Matrices of
experts that are stored in one tensor are taken apart. Those in blockwise FP8 are
multiplied with their factors; on one GPU experts stay in FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from max.driver import Buffer, is_virtual_device_mode
from max.dtype import DType
from max.graph import Shape
from max.graph.weights import WeightData, load_weights
from max.pipelines.modeling.config_enums import supported_encoding_dtype

from ..checkpoint import Stored
from ..checkpoint.tensors import SCALES
from ..moe_shape import MoeShape, fp8_block
from ..quantize import (
    bfloat16_to_float32,
    float8_e4m3fn_to_float32,
    float32_to_bfloat16,
)
from .settings import n_gpus
from .source import stored_in

_Adapter = Callable[..., dict[str, WeightData]]

_FLOAT32 = "e_score_correction_bias"
"""The end of the name of a router's bias: float32 in all models, as in transformers."""

_E8M0_NAN = 255


class _Weight:
    """A weight that is read when an adapter asks for it."""

    def __init__(self, read: Callable[[], WeightData]) -> None:
        self.data = read


def widen(bits: np.ndarray, scales: np.ndarray, block: list[int]) -> np.ndarray:
    """Multiplies FP8 bits ``[n, k]`` by the scales of their blocks, in float32."""
    n, k = bits.shape
    each = np.repeat(np.repeat(scales, block[0], 0)[:n], block[1], 1)[:, :k]
    return float8_e4m3fn_to_float32(bits) * each


def _bits(data: WeightData, view: DType) -> np.ndarray:
    return data.to_buffer().view(view).to_numpy()


def _values(data: WeightData) -> np.ndarray:
    """Returns a weight in float32. ``WeightData.astype`` would compile a graph."""
    if data.dtype == DType.bfloat16:
        return bfloat16_to_float32(_bits(data, DType.uint16))
    if data.dtype == DType.float16:
        return _bits(data, DType.float16).astype(np.float32)
    if data.dtype == DType.float8_e8m0fnu:
        exponents = _bits(data, DType.uint8)
        values = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
        return np.where(exponents == _E8M0_NAN, np.float32("nan"), values)
    return _bits(data, DType.float32)


def _weight_data(name: str, values: np.ndarray, dtype: DType) -> WeightData:
    """Makes a weight of float32 values, in float32 or rounded to bfloat16."""
    if dtype != DType.bfloat16:
        return WeightData.from_numpy(values, name)
    rounded = Buffer.from_numpy(float32_to_bfloat16(values)).view(dtype)
    return WeightData(rounded, name, dtype, Shape(values.shape))


class _Reader:
    """Reads a checkpoint's weights in the model's dtype."""

    def __init__(
        self, stored: Mapping[str, Stored], block: list[int] | None, dtype: DType
    ) -> None:
        self._stored, self._block, self._dtype = stored, block, dtype
        files = {place.tensor.file for place in stored.values()}
        self._of_file = {file: dict(load_weights([file]).items()) for file in files}

    def weights(self, kept: str | None) -> dict[str, _Weight]:
        """Returns all by name; those with ``kept`` in their name stay in FP8."""
        weights = {}
        for name in self._stored:
            is_kept = bool(kept) and kept in name
            if is_kept or not name.endswith(SCALES):
                weights[name] = _Weight(partial(self._read, name, is_kept))
        return weights

    def _read(self, name: str, is_kept: bool) -> WeightData:
        raw = self._raw(name)
        if is_kept and not name.endswith(SCALES):
            return raw
        is_float32 = is_kept or name.endswith(_FLOAT32)
        dtype = DType.float32 if is_float32 else self._dtype
        if raw.dtype == dtype:
            return raw
        if is_virtual_device_mode():  # Nobody reads the values
            sizes = [int(n) for n in raw.shape]
            return WeightData(Buffer(dtype, sizes), name, dtype, raw.shape)
        if raw.dtype == DType.float8_e4m3fn:
            assert self._block is not None
            scales = _values(self._raw(name + SCALES))
            wide = widen(_bits(raw, DType.uint8), scales, self._block)
            return _weight_data(name, wide, dtype)
        return _weight_data(name, _values(raw), dtype)

    def _raw(self, name: str) -> WeightData:
        """Returns a weight as stored, under its own name."""
        place = self._stored[name]
        data = self._of_file[place.tensor.file][place.tensor.name].data()
        if place.expert is None:
            return WeightData(data.data, name, data.dtype, data.shape)
        rows = slice(place.begin, place.begin + place.n_rows)
        n_columns = int(data.shape[2])
        matrix = _bits(data, DType.uint8)[place.expert, rows]
        part = Buffer.from_numpy(matrix).view(data.dtype, [place.n_rows, n_columns])
        return WeightData(part, name, data.dtype, Shape([place.n_rows, n_columns]))


def _adapted(
    adapter: _Adapter,
    _weights: dict[str, Any],
    huggingface_config: Any,
    pipeline_config: Any,
    **more: Any,
) -> dict[str, WeightData]:
    """Reads what the model needs, and calls an architecture's weight adapter. In what
    MAX has opened the last copy of a tensor counts, not that of the index."""
    more |= dict(huggingface_config=huggingface_config, pipeline_config=pipeline_config)
    n = n_gpus(pipeline_config)
    keeps_fp8 = MoeShape.of(huggingface_config).keeps_fp8(n)
    reader = _Reader(
        stored_in(pipeline_config, n),
        fp8_block(huggingface_config),
        supported_encoding_dtype(pipeline_config.model.quantization_encoding),
    )
    return adapter(reader.weights(".experts." if keeps_fp8 else None), **more)


def reading(adapters: Mapping[Any, _Adapter]) -> dict[Any, _Adapter]:
    """Puts the reading in front of an architecture's weight adapters; servers pickle
    them."""
    return {key: partial(_adapted, adapter) for key, adapter in adapters.items()}
