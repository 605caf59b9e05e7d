# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are served, and what is refused of one, in one sentence."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from max.dtype import DType
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    GptOssConfig,
    Qwen3MoeConfig,
    Qwen3VLMoeConfig,
    Qwen3VLMoeTextConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from graphs.serve.checkpoint import OTHER_SIZES, make_checkpoint
from max_ep.checkpoint import (
    ARCHITECTURES,
    Rope,
    check_config,
    check_tensors,
    config_in,
    loaded_bytes,
    read_tensors,
)
from max_ep.checkpoint.common import COMMON, GENERATION
from max_ep.checkpoint.files import SINGLE
from max_ep.checkpoint.rule import NEEDED
from max_ep.checkpoint.tensors import needed_tensors
from max_ep.quantize import quantize_mxfp4
from max_ep.serve.weights import _Reader
from tests.serve.serving_configs import PUBLISHED

TINY = [size for size in OTHER_SIZES if size.endswith("tiny")]

IN_TRANSFORMERS = {
    name: getattr(transformers, f"{name.removesuffix('ForCausalLM')}Config")
    for name in ARCHITECTURES
    if name.endswith("ForCausalLM")
} | {"Qwen3VLMoeForConditionalGeneration": Qwen3VLMoeTextConfig}
QWEN = PUBLISHED["Qwen3-30B-A3B"]
MINIMAX, DEEPSEEK = PUBLISHED["MiniMax-M2"], PUBLISHED["DeepSeek-V3"]
MIXTRAL, GPT_OSS = PUBLISHED["Mixtral-8x7B-v0.1"], PUBLISHED["gpt-oss-20b"]
GLM4, OLMOE = PUBLISHED["GLM-4.5-Air"], PUBLISHED["OLMoE-1B-7B-0924"]
QWEN2 = PUBLISHED["Qwen1.5-MoE-A2.7B"]
QWEN3_VL = PUBLISHED["Qwen3-VL-30B-A3B-Instruct"]
HYV3, LAGUNA = PUBLISHED["Hy3"], PUBLISHED["Laguna-XS-2.1"]
FP8 = {"quant_method": "fp8"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_field_of_transformers_is_on_the_list(architecture):
    """With its default. Fails when a version of transformers adds a field, or changes a
    default: compare what it does, and serve it or refuse it."""
    rules = ARCHITECTURES[architecture].fields
    for field in dataclasses.fields(IN_TRANSFORMERS[architecture]):
        assert field.name in rules
        default = rules[field.name].default
        assert default is NEEDED or default == field.default, field.name
    known = {field.name for field in dataclasses.fields(IN_TRANSFORMERS[architecture])}
    aliases = IN_TRANSFORMERS[architecture].attribute_map
    known |= {*aliases, *aliases.values()}
    for alias in {"num_experts", "num_local_experts"} - known:
        assert alias not in rules or not rules[alias].takes(8), alias
    outer = ARCHITECTURES[architecture].outer_fields
    if outer is not None:
        of_all = {field.name for field in dataclasses.fields(Qwen3VLMoeConfig)}
        assert of_all <= {*outer, *COMMON}
    dropped = set(GenerationConfig._get_default_generation_params())
    assert dropped == {*GENERATION, "use_cache"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_are_served(name):
    check_config(PUBLISHED[name])


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK_YARN = DEEPSEEK["rope_scaling"]
HALF = {"partial_rotary_factor": 0.5}
ALL = {"partial_rotary_factor": 1.0}
LAGUNA_ROPE = LAGUNA["rope_parameters"]["full_attention"]


def without(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {field: value for field, value in config.items() if field != name}


@pytest.mark.parametrize(
    "config, words",
    [
        # Other results than those of transformers.
        (QWEN | {"use_sliding_window": True}, "use_sliding_window=True is not served"),
        (QWEN | {"attention_bias": True}, "attention_bias=True"),
        (QWEN | {"hidden_act": "gelu"}, "hidden_act='gelu' is not served"),
        (QWEN | {"a\nb": 0.5}, r"'a\\nb'=0.5 is not on max_ep's list"),
        (QWEN | {"num_labels": 2**31 - 1}, "num_labels=2147483647 is not served"),
        (QWEN | {"initializer_range": 1}, "initializer_range=1 is not served"),
        (QWEN | {"attention_multiplier": 0.5}, "attention_multiplier=0.5 is not on"),
        (QWEN | {"logits_scaling": 2.0}, "logits_scaling=2.0 is not on max_ep's list"),
        (QWEN | {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        (QWEN | {"n_shared_experts": 1}, "n_shared_experts=1 is not on"),
        (QWEN | {"shared_expert_intermediate_size": 64}, "shared_expert_inter"),
        (QWEN | {"layer_types": ["sliding_attention"] * 48}, "layer_types="),
        (QWEN | {"layer_types": ["full_attention"]}, "layer_types has 1 element,"),
        (QWEN | {"model_type": "qwen2_moe"}, "model_type='qwen2_moe' is not served"),
        (QWEN | {"num_local_experts": 64}, "num_local_experts=64 does not fit to"),
        (QWEN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (QWEN | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (QWEN | {"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        (QWEN | {"rope_scaling": YARN | {"mrope_section": [1]}}, "has mrope_section"),
        (QWEN | {"rope_scaling": without(YARN, "factor")}, "has no factor"),
        (MINIMAX | {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        (MINIMAX | {"attn_type_list": [0] * 62}, "attn_type_list="),
        (MINIMAX | {"rope_scaling": YARN}, "rope_scaling of type 'yarn' is not served"),
        (MINIMAX | {"shared_intermediate_size": 8}, "shared_intermediate_size=8"),
        (MINIMAX | {"partial_rotary_factor": 1.0}, "rotary_dim=64 does not fit to"),
        (DEEPSEEK | {"topk_method": "greedy"}, "topk_method='greedy'"),
        (DEEPSEEK | {"norm_topk_prob": False}, "norm_topk_prob=False is not served"),
        (DEEPSEEK | {"q_lora_rank": None}, "q_lora_rank=None"),
        (DEEPSEEK | {"rope_interleave": False}, "rope_interleave=False"),
        (DEEPSEEK | {"rope_scaling": None}, "rope_parameters of type 'default'"),
        (DEEPSEEK | {"rope_scaling": DEEPSEEK_YARN | {"mscale": 0.7}}, "mscale=0.7"),
        (
            DEEPSEEK | {"rope_scaling": DEEPSEEK_YARN | {"beta_slow": 800}},
            "beta_slow=800 and original_max_.*=4096; .* above 2 . pi . beta_slow",
        ),
        # MAX's kernels are for these sizes.
        *(
            (DEEPSEEK | {size: n}, f"{size}={n} is not served with DeepseekV3")
            for size, n in [
                ("kv_lora_rank", 256),
                ("qk_nope_head_dim", 64),
                ("qk_rope_head_dim", 32),
                ("v_head_dim", 64),
                ("num_attention_heads", 0),
                ("q_lora_rank", 20),
            ]
        ),
        (DEEPSEEK | {"num_key_value_heads": 64}, "num_key_value_heads=64"),
        (DEEPSEEK | {"head_dim": 128}, "head_dim=128 does not fit"),
        (MIXTRAL | {"sliding_window": 8}, "sliding_window=8 is not served"),
        (MIXTRAL | {"num_experts": 4}, "num_experts=4 does not fit to num_local"),
        (
            LAGUNA
            | {
                "rope_parameters": LAGUNA["rope_parameters"]
                | {"full_attention": LAGUNA_ROPE | {"truncate": False}}
            },
            "rope_parameters has truncate=False; served with Laguna",
        ),
        (LAGUNA | {"mlp_only_layers": True}, "mlp_only_layers=True is not served"),
        (GPT_OSS | {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not served"),
        (GPT_OSS | {"experts_per_token": 2}, "experts_per_token=2 does not fit"),
        (GPT_OSS | {"layer_types": ["full_attention"]}, "layer_types has 1 element,"),
        (GPT_OSS | {"quantization_config": FP8}, "quant_method='fp8' is not served"),
        (
            GLM4 | {"rope_scaling": YARN | HALF, "partial_rotary_factor": 1.0},
            "rope_scaling has partial_rotary_factor=0.5, and beside it is 1.0",
        ),
        (
            without(GLM4, "partial_rotary_factor") | {"rope_scaling": YARN | ALL},
            "rope_scaling has partial_rotary_factor=1.0, and beside it is 0.5",
        ),
        (GLM4 | {"partial_rotary_factor": None}, "partial_rotary_factor=None is not"),
        (GLM4 | {"n_group": 3}, "n_group=3 does not fit to n_routed_experts=128"),
        (GLM4 | {"n_group": 128, "topk_group": 8}, "have two experts or more"),
        (GLM4 | {"first_k_dense_replace": 46}, "first_k_dense_replace=46 does not"),
        (QWEN2 | {"use_sliding_window": True}, "use_sliding_window=True"),
        (OLMOE | {"head_dim": 64}, "head_dim=64 is not on max_ep's list"),
        (HYV3 | {"first_k_dense_replace": 3}, "first_k_dense_replace=3 does not fit"),
        (HYV3 | {"expert_hidden_dim": 512}, "expert_hidden_dim=512 does not fit to m"),
        (HYV3 | {"route_norm": False}, "route_norm=False is not served"),
        (LAGUNA | {"mlp_only_layers": []}, r"mlp_only_layers=.. does not .*=\[0\]"),
        (LAGUNA | HALF, "partial_rotary_factor=0.5 is not served with Laguna"),
        (LAGUNA | {"gating": "per-element"}, "gating='per-element' is not served"),
        *(
            (LAGUNA | {"rope_theta": 5e5, "rope_parameters": of}, f"has {name}=None")
            for name in ("rope_theta", "original_max_position_embeddings")
            for of in [
                {
                    "full_attention": without(LAGUNA_ROPE, name),
                    "sliding_attention": LAGUNA_ROPE,
                    "original_max_position_embeddings": 4096,
                }
            ]
        ),
        # transformers cannot parse them, though they do not count.
        *(
            (QWEN3_VL | {"text_config": QWEN3_VL["text_config"] | wrong}, words)
            for wrong, words in (
                ({"tie_word_embeddings": 1}, "embeddings=1 is not served with text_c"),
                ({"architectures": 3}, "architectures=3 is not served with text_conf"),
                ({"quantization_config": "x"}, "quantization_config='x' is not served"),
            )
        ),
        (QWEN3_VL | {"rope_scaling": 3}, "rope_scaling=3 is not served"),
        (QWEN3_VL | {"rope_parameters": YARN}, "rope_parameters={.* is not served"),
        (QWEN3_VL | {"image_token_id": None}, "image_token_id=None is not served"),
        (QWEN3_VL | {"num_labels": None}, "num_labels=None is not served"),
        # What no model has.
        ([], "holds no names"),
        ({}, "'no architecture' is not supported; there are Qwen3MoeForCausalLM"),
        (without(QWEN, "model_type"), "is not complete: it has no model_type; add 'qw"),
        (QWEN | {"architectures": [["x"]]}, r"architectures=\[\['x'\]\] must be a"),
        (QWEN | {"architectures": "Qwen3MoeForCausalLM"}, "architectures='Qwen3"),
        (QWEN | {"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' is not"),
        (QWEN | {"num_experts": "8"}, "num_experts='8' is not served"),
        (QWEN | {"num_experts": -1}, "num_experts=-1 is not served"),
        (QWEN | {"num_experts": 7.5}, "num_experts=7.5 is not served"),
        (QWEN | {"num_experts": 1e30}, "num_experts=1e.30 is not served"),
        (QWEN | {"num_experts": True}, "num_experts=True is not served"),
        (QWEN | {"num_experts": None}, "num_experts=None is not served"),
        (QWEN | {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is not"),
        (QWEN | {"num_experts": 10**9}, "num_experts=1000000000 does not fit to num_h"),
        (QWEN | {"hidden_size": 256.0}, "hidden_size=256.0 is not served"),
        (QWEN | {"hidden_size": 2**61}, "hidden_size=.* is not served"),
        (QWEN | {"num_experts_per_tok": 33}, "num_experts_per_tok=33 does not fit"),
        (QWEN | {"num_experts": 4}, "num_experts_per_tok=8 does not fit to num_exp"),
        (QWEN | {"num_key_value_heads": 5}, "num_key_value_heads=5 does not fit"),
        (QWEN | {"mlp_only_layers": [48]}, "mlp_only_layers has 48"),
        (QWEN | {"mlp_only_layers": 3}, "mlp_only_layers=3 is not served"),
        (QWEN | {"eos_token_id": "x"}, "eos_token_id='x' is not served"),
        (QWEN | {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is not served"),
        (QWEN | {"norm_topk_prob": 1}, "norm_topk_prob=1 is not served"),
        (QWEN | {"rope_theta": "1e6"}, "rope_theta='1e6'"),
        (QWEN | {"rope_scaling": 3}, "rope_scaling=3 must be an object"),
        (QWEN | {"rope_scaling": {"rope_type": ["yarn"]}}, r"of type \['yarn'\]"),
        (QWEN | {"rope_scaling": YARN | {"factor": 0}}, "has factor=0"),
        (QWEN | {"quantization_config": 3}, "quantization_config=3 must be an object"),
        (QWEN | {"quantization_config": {}}, "quantization_config={} must be an obj"),
        (QWEN | {"quantization_config": {"quant_method": "awq"}}, "in 'awq' without"),
        *(
            (
                QWEN | {"quantization_config": DEEPSEEK["quantization_config"] | more},
                words,
            )
            for more, words in (
                ({"activation_scheme": "static"}, "activation_scheme='static'"),
                ({"fmt": "e5m2"}, "fmt='e5m2' is not served"),
                ({"weight_block_size": [128]}, r"weight_block_size=\[128\]"),
                ({"kv_cache_scheme": {}}, "kv_cache_scheme={} is not on"),
            )
        ),
        *(
            (without(QWEN, name), f"not complete: it has no {name}")
            for name in ("hidden_size", "num_experts", "vocab_size")
        ),
    ],
)
def test_fields_that_are_refused_by_name(config, words):
    with pytest.raises(ValueError, match=words) as raised:
        check_config(config)
    assert "\n" not in str(raised.value)


def test_rope_is_that_of_transformers():
    """Within a few roundings of float32. Fails if a field of a kind is not read."""
    llama3 = dict(low_freq_factor=1.0, high_freq_factor=4.0)
    kinds: list[dict[str, Any]] = [
        {},
        {"rope_type": "linear", "factor": 3.0},
        {"type": "llama3", "factor": 8.0, **llama3},
        YARN,
        {"type": "yarn", "factor": 4.0},
        YARN | {"attention_factor": 0.5, "beta_fast": 16, "beta_slow": 2},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
        YARN | {"factor": 40.0, "original_max_position_embeddings": 64},
    ]
    for kind in kinds:
        for config in (
            QWEN | {"rope_scaling": kind},
            without(QWEN, "head_dim") | {"rope_parameters": kind, "rope_theta": None},
        ):
            given = (
                without(config, "rope_theta") if not config["rope_theta"] else config
            )
            theirs = Qwen3MoeConfig(**json.loads(json.dumps(given)))
            name = theirs.rope_parameters["rope_type"]
            wanted, factor = (
                ROPE_INIT_FUNCTIONS[name](theirs, "cpu")
                if name != "default"
                else Qwen3MoeRotaryEmbedding.compute_default_rope_parameters(theirs)
            )
            ours, our_factor = Rope.of(check_config(given)).inverse_frequencies()
            assert ours.dtype == np.float32
            np.testing.assert_allclose(ours, wanted.numpy(), rtol=5e-7, err_msg=kind)
            assert our_factor == pytest.approx(factor)


def test_no_rope_parameters_are_others_than_empty_ones():
    """In transformers gpt-oss has YaRN by default, unless the object is empty."""
    plain = without(without(GPT_OSS, "rope_scaling"), "rope_theta")
    for given in ({}, {"rope_parameters": None}, {"rope_parameters": {}}):
        ours = Rope.of(check_config(plain | given)).kind  # theirs changes what is given
        assert ours == GptOssConfig(**plain, **given).rope_parameters["rope_type"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str], Path]:
    """Returns a function that makes a checkpoint once."""
    folder = tmp_path_factory.mktemp("made")

    def make(size: str, dtype: str = "float32") -> Path:
        path = folder / f"{size}_{dtype}"
        if not path.exists():
            make_checkpoint(path, size, dtype)
        return path

    return make


def check(folder: Path) -> dict[str, Any]:
    return check_tensors(check_config(config_in(folder)), read_tensors(folder))


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("size", ["tiny", "minimax_tiny", "deepseek_tiny", *TINY])
def test_what_transformers_saves_is_served(size, made, tmp_path):
    """Also its own names, with experts in tensors of three dimensions."""
    kind = AutoModelForCausalLM
    if size == "qwen3_vl_tiny":
        kind = AutoModelForImageTextToText
    model = kind.from_pretrained(made(size))
    model.save_pretrained(tmp_path, save_original_format=False)
    shutil.copy(made(size) / "config.json", tmp_path)
    separate, fused = check(made(size)), check(tmp_path)
    assert set(separate) == set(fused)
    n_experts = 8 if size == "mixtral_tiny" else 16
    parts = [place.part for place in fused.values()]
    assert {part and part.expert for part in parts} == {None, *range(n_experts)}
    one_each = {place.tensor.name: place.tensor for place in separate.values()}
    n_bytes = sum(tensor.n_bytes for tensor in one_each.values())
    assert sum(loaded_bytes(check_config(config_in(tmp_path)), 1)) == n_bytes // 2
    # Each has a name of its own in our decoder.
    assert len({place.here for place in fused.values()}) == len(fused)


def save_in_mxfp4(model: Path, folder: Path) -> None:
    """Stores the experts of a tiny gpt-oss as published ones are."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    weights = load_file(folder / SINGLE)
    for name in [name for name in weights if name.endswith("_proj")]:
        turned = weights.pop(name).float().transpose(1, 2).contiguous()
        rows = turned.reshape(-1, turned.shape[2]).numpy()
        values, scales = quantize_mxfp4(rows)
        sizes = [*turned.shape[:2], turned.shape[2] // 32]
        weights[f"{name}_blocks"] = torch.from_numpy(values).reshape(*sizes, 16)
        weights[f"{name}_scales"] = torch.from_numpy(scales).reshape(sizes)
    save_file(weights, folder / SINGLE)
    method = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.0"])
    change_config(folder, quantization_config=method)


def test_experts_of_gpt_oss_in_mxfp4(made, tmp_path):
    """As transformers widens them; gate and up alternate in what is stored."""
    save_in_mxfp4(made("gpt_oss_tiny"), tmp_path)
    weights, stored = load_file(tmp_path / SINGLE), check(tmp_path)
    assert set(stored) == set(check(made("gpt_oss_tiny")))
    reader = _Reader(stored, None, DType.float32)
    experts = "model.layers.1.mlp.experts"
    of_both = convert_moe_packed_tensors(
        *(weights[f"{experts}.gate_up_proj_{x}"] for x in ("blocks", "scales")),
        dtype=torch.float32,
    )
    for i, name in enumerate(("gate_proj", "up_proj")):
        read = reader.weights(())[f"{experts}.5.{name}.weight"].data()
        wanted = of_both[5, :, i::2].T
        assert torch.equal(torch.from_dlpack(read), wanted)
    del weights[f"{experts}.down_proj_scales"]
    save_file(weights, tmp_path / SINGLE)
    with pytest.raises(ValueError, match="down_proj_blocks is in MXFP4 without"):
        check(tmp_path)


def test_rows_in_mxfp4_are_whole_blocks():
    """Others would be cut, and not fit into the graph."""
    needed = needed_tensors(check_config(GPT_OSS | {"hidden_size": 2888}))
    experts = "model.layers.0.mlp.experts.0"
    for name, n_scales in (("gate_proj", 0), ("down_proj", 1)):
        parts = needed[f"{experts}.{name}.weight"].parts
        assert len([part for part in parts if part.scales]) == n_scales


def test_rows_that_are_columns_where_the_shape_says_so(made, tmp_path):
    """Experts of Qwen3-VL-MoE are stored one way, and saved by transformers another."""
    folder = made("qwen3_vl_tiny")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    model.save_pretrained(tmp_path, save_original_format=False)
    shutil.copy(folder / "config.json", tmp_path)
    each = []
    for where in (folder, tmp_path):
        read = _Reader(check(where), None, DType.float32).weights(())
        prefix = "model.language_model.layers.1.mlp.experts.7"
        names = [f"{prefix}.{x}_proj.weight" for x in ("gate", "up", "down")]
        each.append([torch.from_dlpack(read[name].data()) for name in names])
    both, down = model.model.language_model.layers[1].mlp.experts.parameters()
    for gate, up, of_down in each:
        assert torch.equal(torch.cat([gate, up]), both[7])
        assert torch.equal(of_down, down[7])


def test_experts_of_one_tensor_in_fp8(made, tmp_path):
    """Scales are taken apart as their matrices, where no block has gate and up."""
    shutil.copytree(made("tiny"), tmp_path, dirs_exist_ok=True)
    weights, experts = load_file(tmp_path / SINGLE), "model.layers.1.mlp.experts"
    for name in [name for name in weights if name.startswith(experts)]:
        del weights[name]
    of_fp8 = torch.randn(16, 128, 128).to(torch.float8_e4m3fn)
    weights[f"{experts}.gate_up_proj"] = of_fp8
    weights[f"{experts}.down_proj"] = of_fp8[:, :, :64].clone()
    scales = torch.rand(16, 4, 4)
    weights[f"{experts}.gate_up_proj_scale_inv"] = scales
    weights[f"{experts}.down_proj_scale_inv"] = scales[:, :, :2].clone()
    save_file(weights, tmp_path / SINGLE)
    method = dict(quant_method="fp8", weight_block_size=[32, 32])
    change_config(tmp_path, quantization_config=method)
    for kept in ((), (".experts.",)):
        if kept:
            method["weight_block_size"] = [128, 32]
        read = _Reader(check(tmp_path), (32, 32), DType.float32).weights(kept)
        name = f"{experts}.5.up_proj.weight"
        stored = of_fp8[5, 64:]
        if not kept:
            each = scales[5, 2:].repeat_interleave(32, 0).repeat_interleave(32, 1)
            stored = stored.float() * each
        else:
            own = torch.from_dlpack(read[f"{name}_scale_inv"].data())
            assert torch.equal(own, scales[5, 2:])
        data = read[name].data()
        assert torch.equal(torch.from_dlpack(data).view(stored.dtype), stored)
    method["weight_block_size"] = [128, 32]
    change_config(tmp_path, quantization_config=method)
    weights[f"{experts}.gate_up_proj_scale_inv"] = scales[:, :1].clone()
    save_file(weights, tmp_path / SINGLE)
    with pytest.raises(ValueError, match="for 128 rows, of gate and of up; store each"):
        check(tmp_path)


def test_leftovers_are_skipped(made, tmp_path):
    """By a list; what is not on it is refused."""
    shutil.copytree(made("tiny"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / SINGLE)
    before = check(tmp_path)
    attention = "model.layers.1.self_attn"
    for name in ("rotary_emb.inv_freq", "k_scale", "k_proj.k_scale", "attn.v_scale"):
        weights[f"{attention}.{name}"] = torch.zeros(4)
    save_file(weights, tmp_path / SINGLE)
    assert set(check(tmp_path)) == set(before)
    weights[f"{attention}.q_proj.bias"] = torch.zeros(128)
    save_file(weights, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"model.safetensors: .*q_proj.bias: Qwen3Moe"):
        check(tmp_path)
    # The copy of tied embeddings does not count. Another matrix does in transformers.
    del weights[f"{attention}.q_proj.bias"]
    change_config(tmp_path, tie_word_embeddings=True)
    copy = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": copy}, tmp_path / SINGLE)
    assert set(before) - set(check(tmp_path)) == {"lm_head.weight"}
    copy[-1, -1] += 1
    for other in (copy, copy.half()):
        save_file(weights | {"lm_head.weight": other}, tmp_path / SINGLE)
        with pytest.raises(ValueError, match="lm_head.weight is not model.embed_tok"):
            check(tmp_path)


def test_layers_that_predict_further_tokens_are_skipped(made, tmp_path):
    shutil.copytree(made("deepseek_tiny"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / SINGLE)
    weights["model.layers.2.eh_proj.weight"] = torch.zeros(4)
    save_file(weights, tmp_path / SINGLE)
    check(tmp_path)
    weights["model.layers.3.eh_proj.weight"] = torch.zeros(4)
    save_file(weights, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"model.layers.3.eh_proj.weight: Deepseek"):
        check(tmp_path)


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    "size, dtype, change, words",
    [
        ("tiny", "float32", {Q_PROJ: None}, f"has no tensor {Q_PROJ} of shape .128, "),
        ("tiny", "float32", {EXPERT: None, Q_PROJ: None}, "and 1 other, which"),
        ("tiny", "float32", {Q_PROJ: torch.zeros(127, 128)},
         rf"model.safetensors: {Q_PROJ} has shape \[127, 128\], and config.json wants"),
        ("tiny", "float32", {Q_PROJ: torch.zeros(128, 128, dtype=torch.float64)},
         f"{Q_PROJ} has dtype F64; served is BF16 or F16 or F32"),
        ("tiny", "float32", {Q_PROJ: torch.zeros(128, 128).to(torch.float8_e4m3fn)},
         f"{Q_PROJ} has dtype F8_E4M3; served is BF16 or F16 or F32$"),
        ("tiny", "float32", {EXPERT: torch.zeros(64, 128, dtype=torch.int8)},
         f"{EXPERT} has dtype I8"),
        ("tiny", "float32",
         {"model.layers.1.mlp.experts.down_proj": torch.zeros(16, 128, 64)},
         "mlp.experts.down_proj: Qwen3Moe.* has no such tensor"),
        ("tiny", "float8", {f"{EXPERT}_scale_inv": None},
         f"{EXPERT} is in FP8 without {EXPERT}_scale_inv"),
        ("tiny", "float8", {f"{EXPERT}_scale_inv": torch.zeros(2, 1)},
         rf"{EXPERT}_scale_inv has shape \[2, 1\], and config.json wants \[1, 1\]"),
        ("tiny", "float8", {f"{EXPERT}_scale_inv": torch.zeros(1, 1, dtype=torch.int8)},
         "has dtype I8; served is BF16 or F16 or F32 or F8_E8M0"),
        ("tiny", "float8", {EXPERT: torch.zeros(64, 128)}, "_scale_inv: Qwen3Moe"),
    ],
)  # fmt: skip
def test_tensors_that_are_refused_by_name(size, dtype, change, words, made, tmp_path):
    shutil.copytree(made(size, dtype), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / SINGLE) | change
    save_file({n: w for n, w in weights.items() if w is not None}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=words) as raised:
        check(tmp_path)
    assert "\n" not in str(raised.value)


def test_experts_that_stay_in_fp8_must_be_in_it(made, tmp_path):
    shutil.copytree(made("tiny_wide"), tmp_path, dirs_exist_ok=True)
    block = dict(quant_method="fp8", weight_block_size=[128, 128])
    change_config(tmp_path, quantization_config=block)
    config, tensors = check_config(config_in(tmp_path)), read_tensors(tmp_path)
    check_tensors(config, tensors)
    with pytest.raises(ValueError, match="is in F32, and config.json says"):
        check_tensors(config, tensors, kept=(".experts.",))


def test_a_config_that_cannot_be_read(tmp_path):
    for text in ("{", "\xff", "[" * 99999, ""):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=re.escape("config.json is not JSON")):
            config_in(tmp_path)
