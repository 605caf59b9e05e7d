# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint must be to be served. Neither MAX nor transformers is loaded.

``architectures`` has an entry for each that is served, ``fields`` checks those of
``config.json``, ``rope`` those of rotary embeddings, ``generation`` those of
``generation_config.json``, ``describe`` says what they make of a decoder, ``files``
reads headers of safetensors, ``tensors`` compares them with what a model needs. All
refuse in one sentence, a ``ValueError``.
"""

from .architectures import (
    ARCHITECTURES,
    BIASES,
    PLACES,
    check_place,
    described,
    what_transformers_ignores,
    what_was_not_compared,
    why_not_balanced,
)
from .fields import check_config, config_in, json_in
from .files import Tensor, read_tensors
from .generation import GENERATION_FILE, check_generation, ends_of, has_penalties
from .rope import Rope
from .tensors import Stored, check_tensors, kept_in_fp8, loaded_bytes

__all__ = [
    "ARCHITECTURES",
    "BIASES",
    "GENERATION_FILE",
    "PLACES",
    "Rope",
    "Stored",
    "Tensor",
    "check_config",
    "check_generation",
    "check_place",
    "what_transformers_ignores",
    "what_was_not_compared",
    "check_tensors",
    "config_in",
    "described",
    "ends_of",
    "has_penalties",
    "json_in",
    "kept_in_fp8",
    "loaded_bytes",
    "read_tensors",
    "why_not_balanced",
]
