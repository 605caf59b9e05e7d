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
    """The rotary embedding of a checkpoint's :class:`Rope`."""

    def __init__(self, rope: Rope, max_seq_len: int) -> None:
        super().__init__(
            dim=rope.dim,
            n_heads=1,
            theta=rope.parameters["rope_theta"],
            max_seq_len=max_seq_len,
            head_dim=rope.dim,
            interleaved=False,
        )
        self._rope = rope

    @classmethod
    def of_max(cls, *, max_seq_len: int, scaling_params: Rope, **_: Any) -> Any:
        """Takes the arguments of MAX's, with a ``Rope`` for ``scaling_params``."""
        return cls(scaling_params, max_seq_len)

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
