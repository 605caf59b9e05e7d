# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings with transformers' frequencies; MAX knows fewer kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn.rotary_embedding import RotaryEmbedding

from ..checkpoint import Rope


class CheckpointRope(RotaryEmbedding):
    """A checkpoint's :class:`Rope` takes the place of MAX's ``scaling_params``."""

    def __init__(self, *args: Any, scaling_params: Rope, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rope = scaling_params

    def freqs_cis_base(self) -> TensorValue:
        """Returns cosines and sines, ``[max_seq_len * 2, head_dim / 2, 2]``."""
        if self._freqs_cis is None:
            frequencies, factor = self._rope.inverse_frequencies()
            n, cpu = 2 * self.max_seq_len, DeviceRef.CPU()
            positions = ops.range(0, n, device=cpu, dtype=DType.float32)
            angles = ops.outer(positions, ops.constant(frequencies, device=cpu))
            table = ops.stack([ops.cos(angles), ops.sin(angles)], axis=-1)
            self._freqs_cis = table * np.float32(factor) if factor != 1 else table
        return TensorValue(self._freqs_cis)
