# SPDX-License-Identifier: Apache-2.0
"""Fields of ``config.json`` that all models have."""

from __future__ import annotations

from . import rope
from .rule import Rule, flag, free, is_whole, needed, only, optional, real, whole

MOST_LAYERS = 1024
MOST_EXPERTS = 1 << 18
"""Most layers, and experts of all of them: far above any model, and so few that each
tensor can be looked for by name."""

_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")

IDS = Rule(
    lambda v: (
        v is None
        or is_whole(v, 0)
        or (isinstance(v, list) and all(is_whole(x, 0) for x in v))
    ),
    "an id, a list of ids or null",
)

_LABELS = Rule(
    lambda v: isinstance(v, dict) and all(key.isdigit() for key in v),
    "an object with numbers as names",
)

GENERATION = (
    "assistant_confidence_threshold assistant_lookbehind bad_words_ids "
    "begin_suppress_tokens diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff "
    "eta_cutoff exponential_decay_length_penalty forced_bos_token_id "
    "forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size "
    "num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams "
    "num_return_sequences output_scores remove_invalid_values repetition_penalty "
    "return_dict_in_generate suppress_tokens target_lookbehind temperature top_k "
    "top_p typical_p"
).split()
"""Fields of ``generation_config.json``; transformers drops them from ``config.json``,
and MAX does not read them there."""

_FREE = (
    "_attn_implementation _commit_hash _experts_implementation _name_or_path "
    "attention_dropout attn_implementation auto_map chunk_size_feed_forward "
    "decoder_start_token_id experts_implementation finetuning_task id2label "
    "initializer_range label2id max_new_tokens max_window_layers min_new_tokens "
    "model_name name_or_path num_labels output_attentions output_hidden_states "
    "output_router_logits prefix pretraining_tp problem_type return_dict "
    "router_aux_loss_coef task_specific_params tf_legacy_loss tokenizer_class "
    "torchscript transformers.js_config transformers_version unsloth_fixed "
    "unsloth_version use_bfloat16 use_cache"
).split()
"""What does not change results: of training, of files, of other programs."""

COMMON: dict[str, Rule] = {
    **{name: free() for name in (*GENERATION, *_FREE, *rope.FIELDS)},
    "dtype": optional(only(*_DTYPES)),
    "torch_dtype": optional(only(*_DTYPES)),
    "attention_dropout": free(0.0, float, int),
    "chunk_size_feed_forward": free(0, int),
    "id2label": optional(_LABELS),
    "initializer_range": free(0.02, float),
    "label2id": optional(free(None, dict)),
    "num_labels": whole(2, least=0, most=1000),
    "output_hidden_states": optional(flag(False))._replace(default=False),
    "problem_type": only(None),
    "return_dict": optional(flag(True))._replace(default=True),
    "transformers_version": optional(free(None, str)),
    "use_cache": flag(True),
    "architectures": needed(free()),
    "bos_token_id": optional(whole(None, least=0)),
    "eos_token_id": IDS,
    "pad_token_id": optional(whole(None, least=0)),
    "sep_token_id": optional(whole(None, least=0)),
    "hidden_act": only("silu"),
    "hidden_size": whole(),
    "intermediate_size": whole(),
    "is_decoder": flag(False),
    "is_encoder_decoder": only(False),
    "add_cross_attention": only(False),
    "tie_encoder_decoder": only(False),
    "cross_attention_hidden_size": only(None),
    "max_position_embeddings": whole(),
    "num_attention_heads": whole(),
    "num_experts_per_tok": whole(),
    "num_hidden_layers": whole(most=MOST_LAYERS),
    "num_key_value_heads": whole(),
    "pruned_heads": only({}, None),
    "quantization_config": free(),
    "rms_norm_eps": real(1e-6),
    "tie_word_embeddings": flag(False),
    "vocab_size": whole(),
}

QUANTIZATION: dict[str, Rule] = {
    "quant_method": needed(only("fp8")),
    "weight_block_size": needed(
        Rule(
            lambda v: (
                isinstance(v, list) and len(v) == 2 and all(is_whole(x) for x in v)
            ),
            "a list of two integers from 1 on",
        )
    ),
    "activation_scheme": only("dynamic"),
    "fmt": only("e4m3", "float8_e4m3fn", None),
    "scale_fmt": only(None, "float", "float32", "ue8m0"),
    "dequantize": free(),
    "ignored_layers": free(),  # a matrix is in FP8 if it has scales
    "modules_to_not_convert": free(),
}
"""The same for ``quantization_config``."""

MXFP4: dict[str, Rule] = {
    "quant_method": needed(only("mxfp4")),
    "dequantize": free(),
    "modules_to_not_convert": free(),  # experts are in MXFP4 if they have scales
}
"""The same of gpt-oss."""
