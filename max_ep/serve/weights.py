# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's weights as MAX's models take them.

Each is in the model's dtype; MAX's adapters name it. Matrices of
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

from ..checkpoint import Stored, kept_in_fp8
from ..checkpoint.tensors import SCALES
from ..quantize import (
    bfloat16_to_float32,
    float4_e2m1fn_to_float32,
    float8_e4m3fn_to_float32,
    float8_e8m0fnu_to_float32,
    float32_to_bfloat16,
)
from .settings import n_gpus
from .source import decoder_of, stored_in

_Adapter = Callable[..., dict[str, WeightData]]

_FLOAT32 = "e_score_correction_bias"
"""The end of our name of a router's bias: float32 in all models, as in transformers."""

_BITS = {1: DType.uint8, 2: DType.uint16, 4: DType.uint32}
"""Dtypes of bits, by the bytes of an element."""


class _Weight:
    """A weight that is read when an adapter asks for it."""

    def __init__(self, read: Callable[[], WeightData]) -> None:
        self.data = read


def widen(bits: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Multiplies FP8 bits ``[n, k]`` by the scales of their blocks, in float32."""
    n, k = bits.shape
    each = np.repeat(np.repeat(scales, block[0], 0)[:n], block[1], 1)[:, :k]
    return float8_e4m3fn_to_float32(bits) * each


def widen_mxfp4(blocks: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Widens blocks ``[n, k / 32, 16]`` of pairs of values, of ``[n, k / 32]``
    exponents; returns float32 ``[n, k]``."""
    scales = float8_e8m0fnu_to_float32(exponents)
    values = float4_e2m1fn_to_float32(blocks) * scales[..., np.newaxis]
    return values.reshape(len(blocks), -1)


def _bits(data: WeightData, view: DType) -> np.ndarray:
    return data.to_buffer().view(view).to_numpy()


def _values(data: WeightData) -> np.ndarray:
    """Returns a weight in float32. ``WeightData.astype`` would compile a graph."""
    if data.dtype == DType.bfloat16:
        return bfloat16_to_float32(_bits(data, DType.uint16))
    if data.dtype == DType.float16:
        return _bits(data, DType.float16).astype(np.float32)
    if data.dtype == DType.float8_e8m0fnu:
        return float8_e8m0fnu_to_float32(_bits(data, DType.uint8))
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
        self,
        stored: Mapping[str, Stored],
        block: tuple[int, int] | None,
        dtype: DType,
    ) -> None:
        self._stored, self._block, self._dtype = stored, block, dtype
        scales = [place.scales for place in stored.values() if place.scales]
        files = {x.file for x in (*scales, *(p.tensor for p in stored.values()))}
        self._of_file = {file: dict(load_weights([file]).items()) for file in files}

    def weights(self, kept: tuple[str, ...]) -> dict[str, _Weight]:
        """Returns all by name; those with one of ``kept`` in their name stay in FP8."""
        weights = {}
        for name in self._stored:
            is_kept = any(part in name for part in kept)
            if is_kept or not name.endswith(SCALES):
                weights[name] = _Weight(partial(self._read, name, is_kept))
        return weights

    def _read(self, name: str, is_kept: bool) -> WeightData:
        raw = self._raw(name)
        if is_kept and not name.endswith(SCALES):
            return raw
        ends = name, self._stored[name].here
        is_float32 = is_kept or any(end.endswith(_FLOAT32) for end in ends)
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
        part = place.part
        if part is None:
            return WeightData(data.data, name, data.dtype, data.shape)
        if place.scales is not None:
            exponents = self._of_file[place.scales.file][place.scales.name].data()
            of_expert = [_bits(x, DType.uint8)[part.expert] for x in (data, exponents)]
            blocks, scales = (x[part.begin :: part.step] for x in of_expert)
            values = widen_mxfp4(blocks[: place.shape[0]], scales[: place.shape[0]])
            return WeightData.from_numpy(values, name)
        matrix = _bits(data, _BITS[data.dtype.size_in_bytes])[part.expert]
        matrix = matrix.T if part.is_transposed else matrix
        matrix = matrix[part.begin :: part.step][: place.shape[0]]
        taken = Buffer.from_numpy(np.ascontiguousarray(matrix)).view(data.dtype)
        return WeightData(taken, name, data.dtype, Shape(place.shape))


def _adapted(
    adapter: _Adapter,
    _weights: dict[str, Any],
    pipeline_config: Any,
    **more: Any,
) -> dict[str, WeightData]:
    """Reads what the model needs, and calls an architecture's weight adapter. MAX has
    opened files that the index does not name, too."""
    _, weights = _read(pipeline_config)
    return adapter(weights, pipeline_config=pipeline_config, **more)


def decoder_weights(pipeline_config: Any) -> dict[str, WeightData]:
    """Reads what our decoder needs, under its names."""
    stored, weights = _read(pipeline_config)
    return {stored[name].here: weight.data() for name, weight in weights.items()}


def _read(pipeline_config: Any) -> tuple[dict[str, Stored], dict[str, _Weight]]:
    """Returns where each weight is, and how it is read; of both by name."""
    n, model = n_gpus(pipeline_config), decoder_of(pipeline_config)
    dtype = supported_encoding_dtype(pipeline_config.model.quantization_encoding)
    stored = stored_in(pipeline_config, n)
    reader = _Reader(stored, model.fp8_block, dtype)
    return stored, reader.weights(kept_in_fp8(model, n))


def reading(adapters: Mapping[Any, _Adapter]) -> dict[Any, _Adapter]:
    """Puts the reading in front of an architecture's weight adapters; servers pickle
    them."""
    return {key: partial(_adapted, adapter) for key, adapter in adapters.items()}
