# SPDX-License-Identifier: Apache-2.0
"""Checkpoints drawn from a seed: logits of what we read of them against transformers.

What is compared is `config.json` in many spellings, files, FP8 and its scales, and the
description that graphs are made of; nothing is compiled, so architectures that only
GPUs serve are here, too. `test_architectures.py` compares graphs.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphs.serve.checkpoint import _VISION, _draw_what_is_constant
from max_ep.checkpoint import ARCHITECTURES
from max_ep.checkpoint.files import INDEX, SINGLE
from max_ep.serve.model import as_qwen3
from tests.children import ALL_CASES
from tests.serve.described import DescribedDecoder
from tests.serve.serving import model_of

N_SEEDS = 40 if ALL_CASES else 2

Draw = random.Random
_Kinds = list[list[dict[str, Any]]]

_FLAGS = [False, True]
_ONLY = [dict(mlp_only_layers=x) for x in ([], [0], [2])] + [
    dict(decoder_sparse_step=2)
]
_MLPS = [dict(mlp_layer_types=x) for x in (None, ["sparse"] * 3)]
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOWS = [dict(sliding_window=16, layer_types=x) for x in (None, _TYPES)]
_GROUPS = [
    dict(n_group=n, topk_group=chosen, num_experts_per_tok=top_k)
    for n, chosen, top_k in ((1, 1, 12), (3, 2, 5), (2, 1, 1), (6, 6, 3))
]


def _each(field: str, *values: Any) -> list[dict[str, Any]]:
    return [{field: value} for value in values]


SPECIAL: dict[str, _Kinds] = {
    "Qwen3Moe": [_ONLY, _each("norm_topk_prob", *_FLAGS)],
    "MiniMaxM2": [],
    "Mixtral": [],
    "Qwen2Moe": [
        _ONLY,
        _each("norm_topk_prob", *_FLAGS),
        _each("qkv_bias", *_FLAGS),
        _each("shared_expert_intermediate_size", 33, 128),
    ],
    "Olmoe": [
        _each("norm_topk_prob", *_FLAGS),
        _each("attention_bias", *_FLAGS),
        _each("clip_qkv", None, 0.3, 2.0),
    ],
    "Glm4Moe": [
        _GROUPS,
        _each("norm_topk_prob", *_FLAGS),
        _each("attention_bias", *_FLAGS),
        _each("use_qk_norm", *_FLAGS),
        _each("first_k_dense_replace", 0, 2),
        _each("n_shared_experts", 1, 3),
        _each("routed_scaling_factor", 0.3, 2.5),
    ],
    "GptOss": [_WINDOWS, _each("attention_bias", *_FLAGS)],
    "HYV3": [
        _MLPS,
        _each("num_shared_experts", 1, 2),
        _each("router_scaling_factor", 1.5, 2.826),
    ],
    "Laguna": [
        _WINDOWS,
        _MLPS,
        _each("moe_router_logit_softcapping", 0.0, 3.0),
        _each("moe_routed_scaling_factor", 1.0, 2.5),
        _each("shared_expert_intermediate_size", 33, 128),
    ],
    "Qwen3VLMoe": [_ONLY, _each("attention_bias", *_FLAGS)],
}
"""What transformers' classes of an architecture begin with, and special fields: one of
each list is drawn."""

_EXPERTS = {"Mixtral": "num_local_experts", "MiniMaxM2": "num_local_experts"}
_EXPERTS |= {"GptOss": "num_local_experts", "Glm4Moe": "n_routed_experts"}
_PLAIN_INNER = ("Mixtral", "MiniMaxM2", "Olmoe", "GptOss")
"""Their experts have ``intermediate_size``."""

_ROPES: list[dict[str, Any]] = [
    dict(rope_type="default"),
    dict(rope_type="linear", factor=3.3),
    dict(
        rope_type="llama3",
        factor=2.5,
        low_freq_factor=0.5,
        high_freq_factor=1.7,
        original_max_position_embeddings=16,
    ),
    dict(rope_type="yarn", factor=2.7, beta_fast=16.5, truncate=False),
    dict(
        rope_type="yarn",
        factor=40.0,
        original_max_position_embeddings=33,
        mscale=0.7,
        mscale_all_dim=0.4,
    ),
]


def _rope_of_kind(draw: Draw) -> dict[str, Any]:
    """Draws rotary embeddings of a kind of Laguna's layers."""
    rope = draw.choice(_ROPES) | dict(rope_theta=draw.choice([1e4, 12345.0]))
    if rope["rope_type"] == "yarn":
        rope = dict(original_max_position_embeddings=64) | rope | dict(truncate=True)
    return rope | dict(partial_rotary_factor=draw.choice([0.5, 1.0]))


def drawn_fields(name: str, draw: Draw) -> dict[str, Any]:
    """Draws fields of a config with three layers."""
    heads, kv_heads = draw.choice([(6, 2), (5, 5), (7, 1), (9, 3)])
    head, inner = draw.choice([8, 16, 20]), draw.choice([17, 30, 64])
    fields: dict[str, Any] = dict(
        vocab_size=draw.choice([211, 517]),
        max_position_embeddings=draw.choice([128, 300]),
        hidden_size=draw.choice([44, 64, 100]),
        intermediate_size=50,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_experts_per_tok=draw.choice([1, 3, 12]),
        rms_norm_eps=draw.choice([1e-6, 3e-3, 0.1]),
        tie_word_embeddings=draw.choice(_FLAGS),
        **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"]),
    )
    fields[_EXPERTS.get(name, "num_experts")] = 12
    is_plain = name in _PLAIN_INNER
    fields["intermediate_size" if is_plain else "moe_intermediate_size"] = inner
    if name in ("Qwen2Moe", "Olmoe"):
        fields["hidden_size"] = head * heads
    else:
        fields["head_dim"] = head
    for kind in SPECIAL[name]:
        fields |= draw.choice(kind)
    if name == "Laguna":
        of_layers = [kv_heads * draw.choice([1, 2, 3]) for _ in range(3)]
        ropes = draw.choice([None, {kind: _rope_of_kind(draw) for kind in _TYPES[:2]}])
        each = dict(num_attention_heads_per_layer=of_layers, rope_parameters=ropes)
        return fields | each
    served = _ROPES[:1] if name in ("MiniMaxM2", "Qwen3VLMoe") else _ROPES
    rope = draw.choice(served) | dict(rope_theta=draw.choice([1e4, 12345.0]))
    if name == "MiniMaxM2" or rope["rope_type"] == "default" and name == "Glm4Moe":
        rope["partial_rotary_factor"] = draw.choice([0.5, 1.0])
    return fields | dict(rope_parameters=rope)


def make(folder: Path, name: str, draw: Draw) -> None:
    """Saves a random model as transformers does, in one of its formats."""
    fields = drawn_fields(name, draw)
    kind, config_kind = f"{name}ForCausalLM", getattr(transformers, f"{name}Config")
    if name == "Qwen3VLMoe":
        kind = f"{name}ForConditionalGeneration"
        outer = dict(tie_word_embeddings=fields.pop("tie_word_embeddings"))
        vision = _VISION | dict(out_hidden_size=fields["hidden_size"])
        config = config_kind(text_config=fields, vision_config=vision, **outer)
    else:
        config = config_kind(**fields)
    model = getattr(transformers, kind)._from_config(config, dtype=torch.float32)
    for values in model.parameters():
        if values.ndim > 1:
            values.data.normal_(std=0.08)
    _draw_what_is_constant(model)
    model.save_pretrained(folder, save_original_format=draw.choice(_FLAGS))


def spell_otherwise(folder: Path, draw: Draw) -> None:
    """Writes rotary embeddings as older versions of transformers do, or halfway, and
    leaves out fields that are null, and writes some beside `text_config`."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    rope = text.get("rope_parameters")
    if rope and "full_attention" not in rope and draw.choice(_FLAGS):
        text["rope_scaling"] = text.pop("rope_parameters")
        for field in ("rope_theta", "partial_rotary_factor"):
            if field in rope and draw.choice(_FLAGS):
                text[field] = rope.pop(field)
        if draw.choice(_FLAGS):
            rope["type"] = rope.pop("rope_type")
    for field in [field for field, value in text.items() if value is None]:
        if draw.choice(_FLAGS):
            del text[field]
    if text is not config and draw.choice(_FLAGS):
        config |= dict(num_experts_per_tok=2, hidden_size=8)  # nobody reads them
    (folder / "config.json").write_text(json.dumps(config))


_SCALES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu]


def in_fp8(
    weight: torch.Tensor, block: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a matrix in FP8, the scales of its blocks, and its values."""
    (n, k), (rows, columns) = weight.shape, block
    padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = (blocks.abs().amax((1, 3)) / 224).to(dtype)
    each = scales.float()[:, None, :, None]
    values = (blocks / each).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored, wide = (
        x.flatten(2).flatten(0, 1)[:n, :k].contiguous()
        for x in (values, values.float() * each)
    )
    return stored, scales, wide


def store_otherwise(folder: Path, plain: Path, draw: Draw) -> None:
    """Stores a checkpoint in several dtypes and, for architectures that have it, in
    FP8, in files of which others have copies, and with an index that does not name all;
    in ``plain`` are the values."""
    weights = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    shutil.copytree(folder, plain)
    config = json.loads((folder / "config.json").read_text())
    block = draw.choice([None, [128, 128], [16, 32], [64, 7]])
    if config["model_type"] in ("gpt_oss", "laguna"):
        block = None
    scales = draw.choice(_SCALES)
    text = config.get("text_config", config)
    inner = text.get("moe_intermediate_size", text["intermediate_size"])
    stored, values = {}, {}
    for name, weight in weights.items():
        is_matrix = re.search(r"(_proj|\.w[123])\.weight$", name)
        is_fused = name.endswith("experts.down_proj") or (
            name.endswith("gate_up_proj") and block and not inner % block[0]
        )
        if block and is_fused and draw.random() < 0.8:
            of_experts = [in_fp8(matrix, block, scales) for matrix in weight]
            both = map(torch.stack, zip(*of_experts))
            stored[name], stored[f"{name}_scale_inv"], values[name] = both
        elif block and is_matrix and draw.random() < 0.8:
            matrix, of_blocks, values[name] = in_fp8(weight, block, scales)
            stored |= {name: matrix, f"{name}_scale_inv": of_blocks}
        else:
            dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
            stored[name] = weight.to(dtype)
            values[name] = stored[name].float()
    save_file(values, plain / SINGLE, {"format": "pt"})
    if block:
        fp8 = dict(quant_method="fp8", weight_block_size=block)
        (folder / "config.json").write_text(
            json.dumps(config | {"quantization_config": fp8})
        )
    names = draw.sample([*stored], len(stored))
    where = {}
    for i in range(3):
        own, others = names[i::3], names[(i + 1) % 3 :: 3]
        there = {x: stored[x] for x in [*own, *others[:4]]}
        save_file(there, folder / f"{i}.safetensors")
        where |= {name: f"{i}.safetensors" for name in own[1:]}
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize("seed", range(N_SEEDS))
@pytest.mark.parametrize("name", SPECIAL)
def test_what_is_read_has_logits_of_transformers(name, seed, tmp_path):
    """Fails if a field is not read as transformers reads it, or a weight is another; or
    if MAX is given another size."""
    draw = random.Random(f"{name} {seed}")
    torch.manual_seed(seed)
    made, plain = tmp_path / "made", tmp_path / "plain"
    make(made, name, draw)
    spell_otherwise(made, draw)
    store_otherwise(made, plain, draw)
    reference = model_of(plain, dtype=torch.float32).eval()
    reference.set_experts_implementation("eager")
    decoder = DescribedDecoder(made)
    vocabulary = len(reference.get_input_embeddings().weight)
    tokens = [draw.randrange(vocabulary) for _ in range(40)]
    with torch.no_grad():
        wanted = reference(torch.tensor([tokens])).logits[0]
        logits = decoder.logits(tokens)
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)
    of_transformers = reference.config.get_text_config()
    given = vars(as_qwen3(decoder.described))
    del given["num_attention_heads"]  # layers of Laguna have their own
    for field, value in given.items():
        if hasattr(of_transformers, field):
            assert value == getattr(of_transformers, field), field


def test_each_architecture_is_drawn():
    """All that our decoder serves; transformers' names."""
    drawn = {name.partition("For")[0] for name in ARCHITECTURES} - {"DeepseekV3"}
    assert drawn == {*SPECIAL}
