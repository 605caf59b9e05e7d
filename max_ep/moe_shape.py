# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model's MoE layers. It loads no MAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .limits import FP8_BLOCK, fp8_takes


@dataclass(frozen=True)
class MoeShape:
    """The sizes of a model's MoE layers."""

    hidden_size: int
    """Elements of a token."""
    n_experts: int
    """Routed experts."""
    top_k: int
    """Experts of a token."""
    moe_dim: int
    """Elements between an expert's two matmuls."""
    has_shared_expert: bool = False
    """Whether one expert of the same sizes has all tokens; it goes through dispatch."""
    is_swiglu: bool = True
    """Whether experts have plain SwiGLU, without biases."""
    has_fp8_blocks: bool = False
    """Whether matrices are in FP8 with a scale for each 128 x 128 elements."""

    def keeps_fp8(self, n_gpus: int) -> bool:
        """Returns whether experts stay in FP8, and tokens are dispatched in it; if not,
        their weights are widened when they load, as those of all other layers. A
        shared expert that goes through dispatch is one of them."""
        sizes = (2 * self.moe_dim, self.hidden_size), (self.hidden_size, self.moe_dim)
        fits = all(fp8_takes(n, k) for n, k in sizes)
        return n_gpus > 0 and self.has_fp8_blocks and fits and self.is_swiglu

    @classmethod
    def of(cls, huggingface_config: Any) -> MoeShape:
        """Reads a checkpoint's ``config.json``, as transformers parses it."""
        kinds = getattr(huggingface_config, "architectures", None) or [""]
        names = "n_routed_experts", "num_experts", "num_local_experts"
        found = [getattr(huggingface_config, name, None) for name in names]
        n_experts = next(filter(None, found), 0)
        if not n_experts:
            kind = getattr(huggingface_config, "model_type", "model")
            raise ValueError(
                f"a {kind} checkpoint without experts: its config.json has none of "
                f"{names[0]}, {names[1]} and {names[2]}; serve it without max_ep"
            )
        return cls(
            hidden_size=huggingface_config.hidden_size,
            n_experts=n_experts,
            top_k=huggingface_config.num_experts_per_tok,
            # In models without dense layers the field has the plain name.
            moe_dim=getattr(huggingface_config, "moe_intermediate_size", None)
            or huggingface_config.intermediate_size,
            # Two or more are one wider expert, which MAX runs itself.
            has_shared_expert=kinds[0] == "DeepseekV3ForCausalLM"
            and huggingface_config.n_shared_experts == 1,
            is_swiglu=kinds[0] != "GptOssForCausalLM",
            has_fp8_blocks=fp8_block(huggingface_config) == [FP8_BLOCK] * 2,
        )


def dense_layers(config: Any) -> list[int]:
    """Returns the layers of a Qwen3-MoE that have an MLP in place of experts."""
    step = getattr(config, "decoder_sparse_step", 1)
    named = getattr(config, "mlp_only_layers", None) or ()
    return [i for i in range(config.num_hidden_layers) if (i + 1) % step or i in named]


def fp8_block(huggingface_config: Any) -> list[int] | None:
    """Returns the sizes of the blocks that have a scale; None: it is not in FP8."""
    config = getattr(huggingface_config, "quantization_config", None) or {}
    return config.get("weight_block_size")
