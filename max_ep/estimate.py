# SPDX-License-Identifier: Apache-2.0
"""Estimates a rank's memory with the arguments of MAX's function."""

from __future__ import annotations

from max.dtype import DType

from .config import EPConfig
from .formats import format_of


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
    make_quant_config = format_of(dispatch_dtype).make_quant_config
    return EPConfig(
        **fields,
        dispatch_quant_config=make_quant_config() if make_quant_config else None,
        target="cpu",
        protocol="by_expert" if n_nodes > 1 else "auto",
    ).estimate_memory_usage()
