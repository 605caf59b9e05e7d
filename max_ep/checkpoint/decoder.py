# SPDX-License-Identifier: Apache-2.0
"""A decoder as a checked ``config.json`` describes it, layer by layer.

The tensors that a checkpoint must have and the graph that serves it are both made of
this description. Neither MAX nor transformers is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..limits import FP8_BLOCK, fp8_takes
from .rope import Rope


@dataclass(frozen=True)
class Attention:
    """Grouped attention of a layer."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""
    norm: Literal[None, "head", "all"] = None
    """Whether queries and keys are normalized: each head, or all heads together."""
    clip: float | None = None
    """Largest absolute value of queries, keys and values."""
    has_bias: bool = False
    """Whether queries, keys and values have a bias."""
    has_output_bias: bool = False
    has_sinks: bool = False
    """Whether each head has a logit that takes weight from all tokens."""
    has_gate: bool = False
    """Whether each head is multiplied with the softplus of a product of its own."""


_AXIS_OF_HEADS = {"q_b_proj.weight": 0, "kv_b_proj.weight": 0, "o_proj.weight": 1}
"""In matrices of latent attention that have a part for each head."""


@dataclass(frozen=True)
class LatentAttention:
    """Attention of DeepSeek-V3, whose cache has a latent vector for each token."""

    n_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: Rope

    @property
    def n_filled_heads(self) -> int:
        """Returns how many heads are served, with those of zeros: MAX's kernel takes 16
        and multiples of 32 (docs/upstream.md)."""
        return 16 if self.n_heads <= 16 else -(-self.n_heads // 32) * 32

    def filled(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that a tensor has with heads of zeros behind its own."""
        axis = _AXIS_OF_HEADS.get(name.rpartition(".self_attn.")[2])
        if axis is None:
            return shape
        n_of_all = shape[axis] // self.n_heads * self.n_filled_heads
        return (*shape[:axis], n_of_all, *shape[axis + 1 :])


@dataclass(frozen=True)
class Router:
    """How a token chooses its experts, and weights them."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalizes: bool = True
    """Whether a token's weights are divided by their sum."""
    scale: float = 1.0
    """What weights are multiplied with."""
    softcap: float = 0.0
    """If above 0, logits are ``softcap * tanh(logits / softcap)``."""
    n_groups: int = 1
    n_chosen_groups: int = 1
    """Experts are chosen from so many groups, those with the best two experts."""
    has_bias: bool = False
    """Whether logits have a bias."""


@dataclass(frozen=True)
class Moe:
    """A layer of experts."""

    n_experts: int
    top_k: int
    dim: int
    """Elements between an expert's two matmuls."""
    router: Router
    shared_dim: int = 0
    """The same of an expert that has all tokens; 0: there is none."""
    has_shared_gate: bool = False
    """Whether its result is multiplied with the sigmoid of a product."""
    dispatches_shared: bool = False
    """Whether it goes through dispatch: one expert of the size of the others."""
    has_correction: bool = False
    """Whether a bias is added to the scores by which experts are chosen."""
    is_clamped: bool = False
    """Whether experts are those of gpt-oss: with biases, and a clamped activation."""


@dataclass(frozen=True)
class Layer:
    attention: Attention | LatentAttention
    moe: Moe | None
    """None: the layer has an MLP of ``intermediate_size`` elements."""


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls the parts of a layer, where names differ."""

    model: str = "model"
    moe: str = "mlp"
    router: str = "gate"
    correction: str | None = None
    """A router's bias that only chooses, within the MoE layer."""
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"
    in_transformers: Mapping[str, str] = field(default_factory=dict)
    """Ends of names, and other ends that transformers 5 gives them."""
    fused: tuple[bool, ...] = (False,)
    """Whether rows are columns where all experts of a layer are in one tensor; with
    both values, as the shape says."""
    is_interleaved: bool = False
    """Whether there gate and up alternate."""
    may_be_mxfp4: bool = False
    """Whether there blocks of 32 elements may have 4 bits each, and a scale."""


@dataclass(frozen=True)
class Decoder:
    hidden_size: int
    vocab_size: int
    mlp_dim: int
    """Elements between the two matmuls of a layer without experts."""
    rms_norm_eps: float
    is_tied: bool
    layers: tuple[Layer, ...]
    moe: Moe
    """That of all layers that have experts."""
    fp8_block: tuple[int, int] | None = None
    """Rows and columns that have one scale, in matrices that are in FP8."""
    names: Names = Names()

    @property
    def dense_layers(self) -> list[int]:
        """Returns the layers without experts."""
        return [i for i, layer in enumerate(self.layers) if layer.moe is None]

    @property
    def expert_sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns rows and columns of an expert's first matrix, which has gate and up,
        and of its second."""
        hidden, dim = self.hidden_size, self.moe.dim
        return (2 * dim, hidden), (hidden, dim)

    def keeps_fp8(self, n_gpus: int) -> bool:
        """Returns whether experts stay in FP8, and tokens are dispatched in it; if not,
        their weights are widened when they load, as those of all other layers. A
        shared expert that goes through dispatch is one of them."""
        fits = all(fp8_takes(n, k) for n, k in self.expert_sizes)
        is_known = self.fp8_block == (FP8_BLOCK, FP8_BLOCK) and not self.moe.is_clamped
        return n_gpus > 0 and is_known and fits


def decoder(
    config: Mapping[str, Any],
    attention: Any,
    moe: Moe,
    names: Names = Names(),
    dense: Any = (),
) -> Decoder:
    """Makes a decoder. ``attention`` is that of all layers or a list with one of each;
    ``dense`` are the layers without experts."""
    n_layers = config["num_hidden_layers"]
    moe = replace(moe, has_correction=names.correction is not None)
    block = (config["quantization_config"] or {}).get("weight_block_size")
    of_layers = attention if isinstance(attention, list) else [attention] * n_layers
    without = {*dense}
    return Decoder(
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        mlp_dim=config["intermediate_size"],
        rms_norm_eps=config["rms_norm_eps"],
        is_tied=config["tie_word_embeddings"],
        layers=tuple(
            Layer(of_layer, None if i in without else moe)
            for i, of_layer in enumerate(of_layers)
        ),
        moe=moe,
        fp8_block=tuple(block) if block else None,
        names=names,
    )


def attention(config: Mapping[str, Any], **special: Any) -> Attention:
    """Makes the attention that most models have, and what is special."""
    n_heads = config["num_attention_heads"]
    plain = dict(
        n_heads=n_heads,
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // n_heads,
    )
    if "rope" not in special:
        special["rope"] = Rope.of(config)
    return Attention(**(plain | special))
