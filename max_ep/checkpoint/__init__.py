# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint must be to be served. Neither MAX nor transformers is loaded.

``fields`` has the fields of ``config.json``, ``rope`` those of rotary embeddings,
``files`` reads headers of safetensors, ``tensors`` compares them with what a model
needs. All refuse in one sentence, a ``ValueError``.
"""

from .fields import check_config, config_in
from .files import Tensor, read_tensors
from .rope import Rope
from .tensors import Stored, check_tensors, loaded_bytes, shape_of

__all__ = [
    "Rope",
    "Stored",
    "Tensor",
    "check_config",
    "check_tensors",
    "config_in",
    "loaded_bytes",
    "read_tensors",
    "shape_of",
]
