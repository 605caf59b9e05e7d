# SPDX-License-Identifier: Apache-2.0
"""EPConfig: what every rank of a group must agree on.

Its fields, and the facts that follow from them, are in ``fields.py``; ``checks.py`` and
``protocol.py`` check them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from max.driver import accelerator_count
from max.dtype import DType

from ..cache import compile_once
from ..formats import format_of
from ..limits import GROUP_VARIABLE
from . import checks, protocol
from .fields import ConfigFields

if os.environ.get(GROUP_VARIABLE):  # a process may compile before it has an EPConfig
    compile_once()


@dataclass
class EPConfig(ConfigFields):
    """Sizes of an expert-parallel group; the same on every rank.

    The fields up to ``num_logical_experts`` are those of
    ``max.nn.comm.ep.EPConfig`` in MAX 26.7, with the same names and meanings. Fields
    of features that max_ep does not support must have their defaults. The other fields
    are max_ep's own.

    A *rank* is one of ``n_gpus_per_node * n_nodes`` members. Each process drives
    ``n_gpus_per_node`` of them; ``n_nodes=1`` puts all ranks into one process. With
    ``target="cpu"`` a "node" is a process, so ``n_gpus_per_node=1, n_nodes=4`` is one
    process for each of four ranks.

    Raises:
        ValueError: On construction, if a field is out of range.
    """

    def __post_init__(self) -> None:
        checks.check_types(self)
        checks.check_choices(self)
        if self.target == "auto":
            self.target = "gpu" if accelerator_count() > 0 else "cpu"
        checks.check_sizes(self)
        checks.check_balance(self)
        checks.check_dtypes(self)
        checks.check_hidden_size(self)
        checks.check_scale_layout(self)
        is_auto = self.protocol == "auto"
        if is_auto:
            self.protocol = protocol.choose_protocol(self)
        protocol.check_protocol(self)
        protocol.check_memory(self)
        checks.check_max_output_rows(self)
        checks.check_hierarchical(self)
        checks.check_all_gather(self)
        if is_auto:
            protocol.warn_of_by_expert(self)
        if self.n_nodes > 1:
            compile_once()


def check_is_config(config: Any, user: str) -> None:
    if not isinstance(config, EPConfig):
        kind = f"{type(config).__module__}.{type(config).__qualname__}"
        raise TypeError(f"{user} takes a max_ep.EPConfig, and was given a {kind}")


def estimate_ep_memory_usage(
    *,
    hidden_size: int,
    dispatch_dtype: DType,
    combine_dtype: DType,
    max_tokens_per_rank: int,
    n_experts: int,
    n_nodes: int,
    n_gpus_per_node: int,
    top_k: int,
    use_allreduce: bool = False,
    dispatch_element_dtype: DType | None = None,
) -> int:
    """Returns the bytes of one rank's symmetric region, with ``protocol="auto"``.

    The arguments are those of ``max.nn.comm.ep.ep_config.estimate_ep_memory_usage``. Of
    several formats of one dtype it is the first in :data:`max_ep.formats.FORMATS`. A
    node is a host with GPUs, as there, and what SHMEM puts from is not counted.
    ``max-ep plan`` prints the parts.
    """
    fields = dict(locals())  # all but one are fields of EPConfig
    element_dtype = fields.pop("dispatch_element_dtype")
    packed = (None, DType.float4_e2m1fn) if dispatch_dtype == DType.uint8 else (None,)
    if element_dtype not in packed:
        raise ValueError(
            f"dispatch_element_dtype={element_dtype} with dispatch_dtype="
            f"{dispatch_dtype}: packed are float4_e2m1fn, in uint8; pass None"
        )
    return EPConfig(
        **fields,
        dispatch_quant_config=format_of(dispatch_dtype).make_quant_config(),
        target="cpu",
        protocol="by_expert" if n_nodes > 1 else "auto",
    ).estimate_memory_usage()
