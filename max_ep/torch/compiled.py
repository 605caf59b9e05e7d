# SPDX-License-Identifier: Apache-2.0
"""The low-latency calls as custom operators for ``torch.compile``, with fakes.

``Buffer``'s methods call these under ``torch.compile``. An operator takes and returns
tensors only. So the other fields of a handle are stored under the address of its
tables, which live until combine.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..limits import FP8_BLOCK
from .communicator import refuse
from .tables import n_table_words

if TYPE_CHECKING:
    from .api import Buffer
    from .low_latency_api import Handle

BUFFERS: weakref.WeakValueDictionary[str, Buffer] = weakref.WeakValueDictionary()
"""By their names: numbers might be symbols."""


@torch.library.custom_op("max_ep::low_latency_dispatch", mutates_args=("order",))
def dispatch(
    order: torch.Tensor,
    key: str,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    cap: int,
    n_experts: int,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    buffer = BUFFERS[key]
    result, _, handle, *_ = buffer.low_latency_dispatch(
        x.contiguous(),
        topk_idx.contiguous(),
        cap,
        n_experts,
        use_fp8=use_fp8,
        round_scale=round_scale,
        use_ue8m0=use_ue8m0,
    )
    tables = handle.tables
    handle.tables = None  # whoever is called owns them
    buffer._handles[tables.data_ptr()] = handle
    rows, scales = result if use_fp8 else (result, None)
    return rows, x.new_empty(0) if scales is None else scales.transpose(1, 2), tables


@dispatch.register_fake
def _(order, key, x, topk_idx, cap, n_experts, use_fp8, round_scale, use_ue8m0):
    n_ranks, hidden = BUFFERS[key].group_size, x.shape[1]
    n_local, capacity = n_experts // n_ranks, n_ranks * cap
    dtype = torch.float8_e4m3fn if use_fp8 else torch.bfloat16
    rows = x.new_empty((n_local, capacity, hidden), dtype=dtype)
    scales = x.new_empty(0)
    if use_fp8:
        shape = (n_local, hidden // (FP8_BLOCK * (4 if use_ue8m0 else 1)), capacity)
        dtype = torch.int32 if use_ue8m0 else torch.float32
        scales = x.new_empty(shape, dtype=dtype)
    n_words = n_table_words(n_local, n_ranks, cap)
    return rows, scales, x.new_empty(n_words, dtype=torch.int32)


def stored_handle(buffer: Buffer, tables: torch.Tensor) -> Handle:
    """Returns the handle that a compiled dispatch has stored."""
    is_ours = isinstance(tables, torch.Tensor)
    handle = buffer._handles.get(tables.data_ptr()) if is_ours else None
    if handle is None:
        refuse("handle", "is of another Buffer, or reset() has taken its memory")
    return replace(handle, tables=tables)


@torch.library.custom_op("max_ep::low_latency_combine", mutates_args=("order",))
def combine(
    order: torch.Tensor,
    key: str,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    tables: torch.Tensor,
) -> torch.Tensor:
    buffer = BUFFERS[key]
    given = (x.contiguous(), topk_idx.contiguous(), topk_weights.contiguous())
    return buffer.low_latency_combine(*given, stored_handle(buffer, tables))[0]


@combine.register_fake
def _(order, key, x, topk_idx, topk_weights, tables):
    return x.new_empty((topk_idx.shape[0], x.shape[2]))


def nothing() -> None:
    """A hook of a call that has received already."""
