# SPDX-License-Identifier: Apache-2.0
"""What the processes of a group must have alike.

The list is the fields of a configuration: each of them is compared, but for those of
``MAY_DIFFER``, which says why. So a new field is compared until somebody argues. What
the environment says ends in fields (``MAX_EP_TIMEOUT_S``, ``MAX_EP_PROTOCOL``,
``MAX_EP_PLACEMENT``), or changes no memory.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
from max.dtype import DType
from max.nn.quant_config import QuantConfig

from .extension import sources_hash
from .formats import name_of_format

if TYPE_CHECKING:
    from .config import EPConfig

_NOT_READ = "MAX has it; max_ep does not read it."

MAY_DIFFER = {
    "node_id": "It is the number of the process.",
    "timeout_s": "Each process waits as long as it says.",
    "start_timeout_s": "The same.",
    "n_sms": "A launch occupies multiprocessors of its own GPU only.",
    "fuse_ffn_combine_send": _NOT_READ,
    "moe_dim": _NOT_READ,
    "max_batch_size": _NOT_READ,
}
"""Fields of :class:`EPConfig` that may differ between processes, and why. None of them
changes what is sent, where it is put, or what it means."""


def agreed(config: EPConfig) -> dict[str, str]:
    """Returns, by name and in words, what must be the same in all processes.

    Last come the sources of the kernels, and the compiler: another version of max_ep
    may have another layout.
    """
    facts = {
        field.name: _in_words(field.name, getattr(config, field.name))
        for field in fields(config)
        if field.name not in MAY_DIFFER
    }
    return facts | {"sources_hash": sources_hash()}


def _in_words(name: str, value: Any) -> str:
    """Writes the value of a field; of equal meaning is what has equal words."""
    if isinstance(value, QuantConfig):
        return name_of_format(value)
    if isinstance(value, DType):
        return value.name
    if isinstance(value, np.ndarray):
        shape = "x".join(map(str, value.shape))
        return f"{shape}:{hashlib.sha256(value.tobytes()).hexdigest()[:8]}"
    if isinstance(value, (bool, int, str, type(None))):
        return str(value)
    raise TypeError(f"EPConfig.{name} is a {type(value).__name__}: say how it compares")
