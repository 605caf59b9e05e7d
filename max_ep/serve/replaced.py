# SPDX-License-Identifier: Apache-2.0
"""The names of MAX that are replaced: all of them stand here.

MAX's architectures make their group, its memory and its manager themselves, each in
another place. While a model is built, the classes they use for that are ours wherever
an architecture's module has them, and MAX's matmuls and attention are those of
``hopper.py``, and its choice of experts that of ``routing.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from .. import EPBatchManager
from . import hopper, routing

EVERYWHERE: dict[str, Any] = {
    "max.nn.moe.moe:grouped_matmul_ragged": hopper.grouped_matmul_anywhere,
    "max.nn.linear:linear": hopper.linear_anywhere,
    "max.nn.stacked_linear:linear": hopper.linear_anywhere,
    "max.graph:TensorValue.__matmul__": hopper.product_anywhere,
    "max.nn.attention.multi_latent_attention:mla_prefill_decode_graph": (
        hopper.latent_attention_anywhere
    ),
    "max.pipelines.architectures.deepseekV3.layers.moe_gate:moe_router_group_limited": (
        routing.router_anywhere
    ),
}
"""Module and name of a function of MAX, and what replaces it there."""

_EP = "max.nn.comm.ep"
IN_ARCHITECTURES: dict[str, Any] = {
    f"{_EP}:EPBatchManager": EPBatchManager,
    "max.nn.moe:MoE": hopper.PlacedMoE,
    "max.nn.moe.expert_parallel:forward_moe_sharded_layers": hopper.forward_layers,
}
"""The home of what MAX's architectures import under its name, and what replaces it in
all of them. :data:`OF_A_MODEL` is replaced, too, by what a model makes."""

OF_A_MODEL = (f"{_EP}:EPConfig", f"{_EP}:EPCommInitializer")

_ARCHITECTURES = "max.pipelines.architectures."

DEEPSEEK_LAYER = f"{_ARCHITECTURES}deepseekV3.deepseekV3:DeepseekV3DecoderLayer"
"""Replaced by one that knows its number, as a placement has it."""

DEEPSEEK_CONFIG = f"{_ARCHITECTURES}deepseekV3.model:DeepseekV3Config"
"""Replaced by one that gives the graph what was checked."""

REQUESTS = "max.serve.router.openai_routes:_parse_openai_request_body"
ANSWERS = "max.serve.pipelines.llm:TokenGeneratorPipeline.next_token_chunk"
DETOKENIZER = "max.serve.pipelines.llm:create_buffered_detokenizer"
"""They are replaced for good where a server makes a tokenizer, by ``requests.py`` and
``stops.py``."""


def home_of(place: str) -> tuple[Any, str]:
    """Returns the module or class that has a name, and the name."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    home = import_module(module)
    for owner in owners:
        home = getattr(home, owner)
    return home, name


def absent() -> list[str]:
    """Returns the names that this version of MAX lacks."""
    lacking = []
    of_servers = REQUESTS, ANSWERS, DETOKENIZER
    others = *OF_A_MODEL, DEEPSEEK_LAYER, DEEPSEEK_CONFIG, *of_servers
    for place in (*EVERYWHERE, *IN_ARCHITECTURES, *others):
        try:
            home, name = home_of(place)
            getattr(home, name)
        except (ImportError, AttributeError):
            lacking.append(place)
    return lacking


@contextmanager
def replaced(of_model: dict[str, Any] | None = None) -> Iterator[None]:
    """Replaces names; ``of_model`` are what :data:`OF_A_MODEL` is for a model, None:
    only matmuls and attention are replaced.

    Raises:
        RuntimeError: This version of MAX lacks some.
    """
    if lacking := absent():
        raise RuntimeError(
            f"this version of MAX lacks {', '.join(lacking)}, which max_ep.serve "
            "replaces; install max==26.7.*"
        )
    changes = [(*home_of(place), ours) for place, ours in EVERYWHERE.items()]
    modules = [sys.modules[name] for name in sys.modules if _ARCHITECTURES in name]
    of_layers = {} if of_model is None else IN_ARCHITECTURES | of_model
    for place, ours in of_layers.items():
        home, name = home_of(place)
        theirs = getattr(home, name)
        changes += [(m, name, ours) for m in modules if vars(m).get(name) is theirs]
    before = [getattr(home, name) for home, name, _ in changes]
    for home, name, ours in changes:
        setattr(home, name, ours)
    try:
        yield
    finally:
        for (home, name, _), theirs in zip(changes, before):
            setattr(home, name, theirs)
