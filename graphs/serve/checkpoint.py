# SPDX-License-Identifier: Apache-2.0
"""Makes a checkpoint with random weights, tokenizer included, in seconds.

    python -m graphs.serve.checkpoint FOLDER

Of Qwen3-MoE, or of another architecture (``--size mixtral_tiny``). With ``--dtype
float8`` matrices are in blockwise FP8, as published.
What such a model says has no meaning, but it says it like any other model: the same
graphs, kernels and memory as those of a trained checkpoint of its size. Its tokens are
pieces of ASCII, so answers can be read and compared.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_TEXT = Path(__file__).resolve().parents[2] / "README.md"
_DTYPES = ["float32", "bfloat16", "float16", "float8"]
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_THINKING = ["<think>", "</think>"]
"""Tokens of MiniMax-M2: MAX separates its thoughts from its answers by them."""
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_QWEN3_30B: dict[str, Any] = dict(
    hidden_size=2048,
    moe_intermediate_size=768,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
)
"""The layers of Qwen3-30B-A3B."""

_TINY: dict[str, Any] = dict(
    hidden_size=128,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=16,
    num_experts_per_tok=4,
)

SIZES: dict[str, dict[str, Any]] = {
    # Compiles in two minutes on two cores.
    "tiny": _TINY,
    # Each field has a value that MAX's own model ignores, or that is not published.
    "tiny_uncommon": _TINY
    | dict(
        mlp_only_layers=[0],
        norm_topk_prob=False,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=10000.0,
            factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    # The smallest whose experts stay in FP8, or gather their tokens; its graph can be
    # built.
    "tiny_wide": _TINY | dict(hidden_size=256, moe_intermediate_size=128, head_dim=64),
    # No multiples of what kernels for GPUs take.
    "tiny_odd": _TINY
    | dict(
        hidden_size=72,
        intermediate_size=50,
        moe_intermediate_size=20,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_attention_heads=6,
        head_dim=20,
        num_experts=6,
        num_experts_per_tok=3,
    ),
    # As wide as those that people serve.
    "small": _QWEN3_30B | {"num_hidden_layers": 2},
    # 10 GB in bfloat16.
    "large": _QWEN3_30B | {"num_hidden_layers": 8},
    # 20 GB: what a layer takes shows beside what a step costs in any case.
    "deep": _QWEN3_30B | {"num_hidden_layers": 16},
    # 60 GB: as deep as the real one.
    "full": _QWEN3_30B | {"num_hidden_layers": 48},
}
"""Fields of ``Qwen3MoeConfig``, by name of a size."""

_IN_MINIMAX = {
    "moe_intermediate_size": "intermediate_size",
    "num_experts": "num_local_experts",
}
"""How ``MiniMaxM2Config`` names these fields."""

MINIMAX_SIZES = {
    f"minimax_{size}": {
        _IN_MINIMAX.get(name, name): n for name, n in SIZES[size].items()
    }
    for size in ("tiny", "small")
}
"""Fields of ``MiniMaxM2Config``, by name of a size."""

DEEPSEEK_SIZES = {
    # Too small for MAX's matmuls on GPUs; its graph can be built.
    "deepseek_tiny": dict(
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=16,
    ),
    "deepseek": dict(
        hidden_size=2048,
        intermediate_size=4096,
        moe_intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=64,
    ),
}
"""Fields of ``DeepseekV3Config``, by name of a size; others are DeepSeek-V3's."""

DEEPSEEK_SIZES |= {  # which are served with heads of zeros
    f"deepseek_{n}_heads": DEEPSEEK_SIZES["deepseek_tiny"]
    | dict(hidden_size=1024, intermediate_size=2048, moe_intermediate_size=512)
    | dict(num_attention_heads=n, num_key_value_heads=n)
    for n in (4, 24)
}

_NARROW: dict[str, Any] = dict(
    hidden_size=128,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts_per_tok=4,
)

_WITH_DENSE = _NARROW | dict(intermediate_size=256, moe_intermediate_size=64)

OTHER_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral_tiny": (
        "Mixtral",
        _NARROW | dict(num_local_experts=8, head_dim=48),
    ),
    "qwen2_tiny": (
        "Qwen2Moe",
        _WITH_DENSE
        | dict(
            num_experts=16,
            shared_expert_intermediate_size=96,
            norm_topk_prob=True,
            num_hidden_layers=3,
            mlp_only_layers=[1],
        ),
    ),
    "olmoe_tiny": (
        "Olmoe",
        _NARROW | dict(num_experts=16, clip_qkv=0.7, attention_bias=True),
    ),
    "glm4_tiny": (
        "Glm4Moe",
        _WITH_DENSE
        | dict(
            head_dim=32,
            n_routed_experts=16,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            routed_scaling_factor=2.5,
            attention_bias=True,
            use_qk_norm=True,
        ),
    ),
    "gpt_oss_tiny": (
        "GptOss",
        _NARROW | dict(head_dim=32, num_local_experts=16, sliding_window=16),
    ),
    "hyv3_tiny": (
        "HYV3",
        _WITH_DENSE | dict(head_dim=32, num_experts=16, router_scaling_factor=1.5),
    ),
    "laguna_tiny": (
        "Laguna",
        _WITH_DENSE
        | dict(
            head_dim=32,
            num_experts=16,
            num_hidden_layers=3,
            num_attention_heads_per_layer=[4, 2, 6],
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            sliding_window=16,
            shared_expert_intermediate_size=96,
            moe_routed_scaling_factor=2.5,
            moe_router_logit_softcapping=3.0,
        ),
    ),
    "qwen3_vl_tiny": (
        "Qwen3VLMoe",
        _WITH_DENSE | dict(head_dim=32, num_experts=16),
    ),
}
"""By name of a size: what transformers' classes of the architecture begin with, and
fields of its config. Where a field is special, it has an uncommon value."""

_FOR_GPUS: dict[str, dict[str, Any]] = {
    "mixtral": dict(intermediate_size=512, head_dim=128),
    "qwen2": dict(moe_intermediate_size=512, shared_expert_intermediate_size=768),
    "olmoe": dict(intermediate_size=512),
    "glm4": dict(moe_intermediate_size=512, head_dim=128),
    "gpt_oss": dict(intermediate_size=512, head_dim=64),
    "hyv3": dict(moe_intermediate_size=512, head_dim=128),
    "laguna": dict(
        moe_intermediate_size=512,
        shared_expert_intermediate_size=768,
        head_dim=128,
        num_attention_heads_per_layer=[16, 8, 32],
    ),
}
"""Fields for GPUs, whose matmuls MAX does not compile for tiny models."""

OTHER_SIZES |= {
    f"{name}_small": (
        OTHER_SIZES[f"{name}_tiny"][0],
        OTHER_SIZES[f"{name}_tiny"][1]
        | dict(hidden_size=1024, num_attention_heads=16, num_key_value_heads=4)
        | fields,
    )
    for name, fields in _FOR_GPUS.items()
}

_VISION = dict(
    depth=1,
    hidden_size=32,
    intermediate_size=32,
    num_heads=2,
    out_hidden_size=128,
    num_position_embeddings=16,
    deepstack_visual_indexes=[0],
)
"""Fields of ``vision_config`` of Qwen3-VL-MoE; images are not served."""

_YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=1024,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=1.0,
)

BLOCKWISE_FP8 = dict(
    quant_method="fp8",
    fmt="e4m3",
    activation_scheme="dynamic",
    weight_block_size=[128, 128],
)
"""As in the config.json of Qwen3's and DeepSeek-V3's checkpoints."""

_READ_BY_MAX = dict(
    moe_layer_freq=1,
    num_nextn_predict_layers=0,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    rope_scaling=_YARN,
)
"""What DeepSeek's own config.json has and that of transformers has not."""


def make_tokenizer(*more_special: str) -> PreTrainedTokenizerFast:
    """Trains a tokenizer on this project's README; with tokens that MAX looks for."""
    tokenizer = Tokenizer(models.BPE(unk_token=_SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = [
        pre_tokenizers.ByteLevel(False).pre_tokenize_str(chr(i))[0][0]
        for i in range(32, 127)
    ] + ["Ċ"]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[*_SPECIAL, *more_special],
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    text = _TEXT.read_text(encoding="utf-8")
    tokenizer.train_from_iterator([text.encode("ascii", "ignore").decode()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_SPECIAL[0],
        eos_token=_SPECIAL[2],
        chat_template=_CHAT,
    )


def make_checkpoint(folder: Path, size: str = "tiny", dtype: str = "float32") -> None:
    """Writes a checkpoint of a key of :data:`SIZES`, :data:`MINIMAX_SIZES`,
    :data:`DEEPSEEK_SIZES` or :data:`OTHER_SIZES`, as ``save_pretrained`` does; float8:
    in blockwise FP8."""
    tokenizer = make_tokenizer(*(_THINKING if size in MINIMAX_SIZES else ()))
    tokenizer.save_pretrained(folder)
    common = dict(
        vocab_size=len(tokenizer),
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    read_by_max: dict[str, Any] = {}
    if size in DEEPSEEK_SIZES:
        read_by_max = _READ_BY_MAX
        kind: Any = DeepseekV3ForCausalLM
        config: Any = DeepseekV3Config(
            **DEEPSEEK_SIZES[size],
            **common,
            first_k_dense_replace=1,
            rope_parameters=_YARN,
        )
    elif size in OTHER_SIZES:
        kind, config = _other(size, common)
    elif size in MINIMAX_SIZES:
        sizes = MINIMAX_SIZES[size]
        # Half of each head is rotated, as in MiniMax-M2.
        read_by_max = dict(rotary_dim=sizes["head_dim"] // 2)
        kind = MiniMaxM2ForCausalLM
        config = MiniMaxM2Config(
            **sizes,
            **common,
            bos_token_id=None,
            rope_parameters=dict(
                rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5
            ),
        )
    else:
        kind = Qwen3MoeForCausalLM
        plain = dict(
            intermediate_size=4 * SIZES[size]["hidden_size"], norm_topk_prob=True
        )
        config = Qwen3MoeConfig(**common, **(plain | SIZES[size]))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        stored = "bfloat16" if dtype == "float8" else dtype
        model = kind._from_config(config, dtype=getattr(torch, stored))
        if size in MINIMAX_SIZES or size in OTHER_SIZES:
            _draw_what_is_constant(model)
    model.save_pretrained(folder)
    if read_by_max:
        _add_fields(folder, read_by_max)
    if dtype == "float8":
        to_blockwise_fp8(folder)


def _add_fields(folder: Path, more: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more, indent=2))


def to_blockwise_fp8(folder: Path) -> None:
    """Puts the matrices of a checkpoint into FP8, and says so in its config."""
    quantize_matrices(folder)
    _add_fields(folder, {"quantization_config": BLOCKWISE_FP8})


def quantize_matrices(folder: Path) -> None:
    """Puts layers' matrices into FP8, with a scale for each 128 x 128 elements."""
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        for name, weight in list(weights.items()):
            if not re.search(r"(_proj|_proj_with_mqa|\.w[123])\.weight$", name):
                continue
            n, k = weight.shape
            padded = torch.nn.functional.pad(weight.float(), (0, -k % 128, 0, -n % 128))
            blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
            scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
            values = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
            weights[name] = values[:n, :k].to(torch.float8_e4m3fn).contiguous()
            weights[f"{name}_scale_inv"] = scales
        save_file(weights, path, {"format": "pt"})


def _other(size: str, common: dict[str, Any]) -> tuple[Any, Any]:
    """Returns transformers' class of a key of :data:`OTHER_SIZES`, and a config."""
    name, fields = OTHER_SIZES[size]
    of_config = getattr(transformers, f"{name}Config")
    if name != "Qwen3VLMoe":
        config = of_config(**(common | {"bos_token_id": None} | fields))
        return getattr(transformers, f"{name}ForCausalLM"), config
    config = of_config(text_config=common | fields, vision_config=_VISION)
    return transformers.Qwen3VLMoeForConditionalGeneration, config


def _draw_what_is_constant(model: Any) -> None:
    """Draws norms, biases, sinks and what routers add: else none would be missed."""
    for name, values in (*model.named_parameters(), *model.named_buffers()):
        is_one = bool((values.data == 1).all())
        if "inv_freq" in name or not (is_one or bool((values.data == 0).all())):
            continue
        if is_one:
            values.data.uniform_(0.5, 1.5)
        else:
            values.data.normal_(std=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    sizes = [*SIZES, *MINIMAX_SIZES, *DEEPSEEK_SIZES, *OTHER_SIZES]
    parser.add_argument("--size", choices=sizes, default="tiny")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32")
    args = parser.parse_args()
    make_checkpoint(args.folder, args.size, args.dtype)
    print(f"{args.size} model, {args.dtype}, random weights: {args.folder}")


if __name__ == "__main__":
    main()
