# SPDX-License-Identifier: Apache-2.0
"""Heads of zeros behind those of a checkpoint, where MAX's latent attention does not
take their number. That runs on GPUs alone, so transformers runs the weights here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from max.graph.weights import WeightsFormat
from transformers import AutoConfig, AutoModelForCausalLM

from graphs.serve.checkpoint import make_checkpoint
from max_ep.checkpoint import check_config, config_in, loaded_bytes
from max_ep.serve import deepseek_v3
from max_ep.serve.source import decoder_of
from tests.serve.serving import model_of, write_widened


def _flags(folder: Path) -> SimpleNamespace:
    """What MAX knows of a checkpoint on two GPUs, as far as we ask."""
    repo = SimpleNamespace(repo_type="local", local_path=str(folder), subfolder=None)
    model = SimpleNamespace(
        huggingface_model_repo=repo,
        resolved_weight_paths=lambda: sorted(folder.glob("*.safetensors")),
        device_specs=[SimpleNamespace(device_type="gpu")] * 2,
        quantization_encoding="bfloat16",
    )
    return SimpleNamespace(model=model)


def served_weights(folder: Path) -> dict:
    """Reads a checkpoint as MAX's model gets it."""
    adapter = deepseek_v3.architecture.weight_adapters[WeightsFormat.safetensors]
    parsed = AutoConfig.from_pretrained(folder)
    return adapter({}, huggingface_config=parsed, pipeline_config=_flags(folder))


@pytest.mark.parametrize("n, filled, dtype", [(4, 16, "bfloat16"), (24, 32, "float8")])
def test_heads_of_zeros_change_no_token(tmp_path, n, filled, dtype):
    """Fails if zeros stand before the heads in one matrix and behind them in another,
    or if one of the three matrices has none."""
    folder = tmp_path / "model"
    make_checkpoint(folder, f"deepseek_{n}_heads", dtype)
    weights = served_weights(folder)
    as_read = {
        name: torch.from_dlpack(weight).float()
        for name, weight in weights.items()
        if ".self_attn." in name
    }
    if dtype == "float8":
        folder = write_widened(folder, tmp_path / "widened")
    theirs = model_of(folder, torch.float32)
    state = theirs.state_dict()
    for name in as_read:  # rounded, as it is served
        theirs_name = f"model.{name}"
        state[theirs_name].copy_(state[theirs_name].bfloat16())
    more = dict(num_attention_heads=filled, num_key_value_heads=filled)
    config = AutoConfig.from_pretrained(folder, **more)
    ours = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ours.load_state_dict(state | {f"model.{name}": x for name, x in as_read.items()})
    tokens = torch.arange(5, 18)[None]
    with torch.no_grad():
        logits = [model(tokens).logits for model in (theirs, ours)]
        answers = [
            model.generate(tokens, max_new_tokens=6, do_sample=False)
            for model in (theirs, ours)
        ]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(*answers)
    # What is planned is what is loaded; scales and biases of routers are few.
    planned = sum(loaded_bytes(check_config(config_in(tmp_path / "model")), 1))
    of_element = {1: 1, 2: 2, 4: 2}
    loaded = sum(
        math.prod(weight.shape.static_dims) * of_element[weight.dtype.size_in_bytes]
        for name, weight in weights.items()
        if not name.endswith("_scale")
    )
    assert planned == loaded


def test_heads_that_max_takes_stay_as_they_are(tmp_path):
    make_checkpoint(tmp_path, "deepseek_tiny", "bfloat16")
    weights = served_weights(tmp_path)
    of = decoder_of(_flags(tmp_path)).layers[0].attention
    after = deepseek_v3.with_filled_heads(weights, of)
    assert all(after[name] is weight for name, weight in weights.items())
    counts = {1: 16, 15: 16, 16: 16, 17: 32, 32: 32, 33: 64, 65: 96, 128: 128}
    for n, filled in counts.items():
        assert replace(of, n_heads=n).n_filled_heads == filled
