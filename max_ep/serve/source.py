# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that MAX serves: its checked ``config.json`` and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from ..checkpoint import (
    Stored,
    check_config,
    check_generation,
    check_tensors,
    config_in,
    described,
    ends_of,
    kept_in_fp8,
    read_tensors,
)
from ..checkpoint.decoder import Decoder, LatentAttention
from ..checkpoint.rope import FIELDS


def config_of(pipeline_config: Any) -> dict[str, Any]:
    """Returns the checked ``config.json``, with transformers' defaults."""
    return config_of_model(pipeline_config.model)


def config_of_model(model_config: Any) -> dict[str, Any]:
    """Does the same for the model's part of a pipeline's config."""
    folder = _folder_of(model_config)
    check_generation(folder)
    return check_config(config_in(folder))


def ends_of_answers(pipeline_config: Any) -> set[int]:
    """Returns the tokens at which transformers ends an answer."""
    return ends_of(check_generation(_folder_of(pipeline_config.model)))


def _folder_of(model_config: Any) -> Path:
    """Returns where ``config.json`` is."""
    repo = model_config.huggingface_model_repo
    if repo.repo_type == "local":
        return Path(repo.local_path) / (repo.subfolder or "")
    where = dict(revision=repo.revision, subfolder=repo.subfolder)
    path = hf_hub_download(repo.repo_id, "config.json", **where)
    return Path(path).parent  # MAX has downloaded what is beside it


def decoder_of(pipeline_config: Any) -> Decoder:
    """Returns the description of the model: what all ask for its sizes."""
    return described(config_of(pipeline_config))


def stored_in(pipeline_config: Any, n_gpus: int) -> dict[str, Stored]:
    """Checks headers of files, and returns where each tensor is; files of the hub are
    downloaded."""
    config = config_of(pipeline_config)
    files = [Path(file) for file in pipeline_config.model.resolved_weight_paths()]
    # MAX looks for files in folders of the model's folder, too.
    folder = min((file.parent for file in files), key=lambda path: len(path.parts))
    tensors = read_tensors(folder, files)
    return check_tensors(config, tensors, kept_in_fp8(described(config), n_gpus))


def is_downloaded(pipeline_config: Any) -> bool:
    """Returns whether all files are on this machine."""
    return pipeline_config.model.huggingface_weight_repo.repo_type == "local"


_IN_OTHER_FORM = ("model_type", "dtype", "torch_dtype", "id2label", *FIELDS)
"""Fields that transformers has in another form, or of the whole model."""


def correct(huggingface_config: Any, config: dict[str, Any]) -> None:
    """Gives what transformers made of a ``config.json``, which MAX reads, the values of
    the checked one. They may differ: a class that comes with a checkpoint has defaults
    of its own, and fields beside ``text_config`` are none of the text model. Heads of
    latent attention are those that are served: MAX sizes its layers, buffers and plan
    by them."""
    for name, value in config.items():
        there = getattr(huggingface_config, name, None)
        if value is None or value == there:
            continue
        if there is None or name not in _IN_OTHER_FORM:
            setattr(huggingface_config, name, value)
    if getattr(huggingface_config, "head_dim", None) is None:
        n_heads = huggingface_config.num_attention_heads
        huggingface_config.head_dim = huggingface_config.hidden_size // n_heads
    attention = described(config).layers[0].attention
    if isinstance(attention, LatentAttention):
        huggingface_config.num_attention_heads = attention.n_filled_heads
        huggingface_config.num_key_value_heads = attention.n_filled_heads
