# SPDX-License-Identifier: Apache-2.0
"""Which models are served where, and the sizes of their MoE layers. It loads no MAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .limits import FP8_BLOCK, fp8_takes

PLACES = ("the CPU", "one GPU", "several GPUs")

SUPPORTED = {
    "Qwen3MoeForCausalLM": PLACES,
    "MiniMaxM2ForCausalLM": PLACES[:2],
    "DeepseekV3ForCausalLM": PLACES[2:],
}
"""Where an architecture is served: the table of docs/serving.md."""


def check_place(architecture: str, n_gpus: int) -> None:
    """Refuses an architecture that is not served on so many GPUs; 0: the CPU."""
    place, places = PLACES[min(n_gpus, 2)], SUPPORTED[architecture]
    if place not in places:
        raise ValueError(
            f"{architecture} is not served on {place}, but on {' and '.join(places)}; "
            "`max serve` without max_ep may serve it there"
        )


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
    has_fp8_blocks: bool = False
    """Whether matrices are in FP8 with a scale for each 128 x 128 elements."""

    def keeps_fp8(self, n_gpus: int) -> bool:
        """Returns whether experts stay in FP8, and tokens are dispatched in it; if not,
        their weights are widened when they load, as those of all other layers."""
        sizes = (2 * self.moe_dim, self.hidden_size), (self.hidden_size, self.moe_dim)
        fits = all(fp8_takes(n, k) for n, k in sizes)
        return n_gpus == 1 and self.has_fp8_blocks and fits

    @classmethod
    def of(cls, huggingface_config: Any) -> MoeShape:
        """Reads a checkpoint's ``config.json``, as transformers parses it."""
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
            has_shared_expert=getattr(huggingface_config, "n_shared_experts", 0) == 1,
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
