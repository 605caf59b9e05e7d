# SPDX-License-Identifier: Apache-2.0
"""The low-latency calls as custom operators for ``torch.compile``, with fakes.

An operator takes and returns tensors only. So the other fields of a handle are stored
under the address of its tables, which live until combine.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..limits import FP8_BLOCK
from .communicator import refuse
from .low_latency import Handle, How, LowLatency, Wire, check_ends
from .streams import EventOverlap
from .tables import n_table_words, scales_of_rows, split_tables

_KEYS = itertools.count()


class Compiled:
    """Low-latency calls under ``torch.compile``: each receives before it returns."""

    def __init__(self, calls: LowLatency) -> None:
        self.calls = calls
        self.handles: dict[int, Handle] = {}
        self._n_ranks = calls.comm.n_ranks
        # Operators know these calls by a name, and a tensor that they change keeps
        # them in order.
        self._key = str(next(_KEYS))
        with torch.inference_mode(False):
            self._order = torch.zeros(1, dtype=torch.int32, device=calls.comm.device)
        _COMPILED[self._key] = self

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        cap: int,
        n_experts: int,
        wire: Wire,
        stats: torch.Tensor | None,
        return_recv_hook: bool,
    ) -> tuple[Any, torch.Tensor, tuple[Any, ...], EventOverlap, Any]:
        """Returns what the call returns; its handle is a tuple, and has the tables."""
        if wire.format is not None or isinstance(x, tuple):
            raise NotImplementedError(
                "max_ep: format, or a pair x, is not compiled; call outside of the "
                "compiled function, or pass bfloat16 with use_fp8"
            )
        given = x, topk_idx, cap, n_experts, *wire[:3]
        rows, scales, tables = _dispatch(self._order, self._key, *given)
        n_local = n_experts // self._n_ranks
        src_info, ranges, counts = split_tables(tables, n_local, self._n_ranks)
        if stats is not None:
            stats.add_(counts)
        handle = (src_info, ranges, cap, x.shape[1], n_experts, tables)
        result = (rows, scales_of_rows(scales)) if wire[0] else rows
        return result, counts, handle, EventOverlap(), _hook(return_recv_hook)

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        out: torch.Tensor | None,
        return_recv_hook: bool,
    ) -> tuple[torch.Tensor, EventOverlap, Any]:
        """Returns what the call returns."""
        given = x, topk_idx, topk_weights, handle[5]
        y = _combine(self._order, self._key, *given)
        if out is not None:
            y = out.copy_(y)
        return y, EventOverlap(), _hook(return_recv_hook)

    def stored(self, tables: Any) -> Handle:
        """Returns the handle that a compiled dispatch has stored."""
        is_ours = isinstance(tables, torch.Tensor)
        handle = self.handles.get(tables.data_ptr()) if is_ours else None
        if handle is None:
            refuse("handle", "is of another Buffer, or reset() has taken its memory")
        return replace(handle, tables=tables)


_COMPILED: weakref.WeakValueDictionary[str, Compiled] = weakref.WeakValueDictionary()
"""By their names: numbers might be symbols."""


def check_compiled(name: str, how: How) -> None:
    """Refuses to measure waits, which no operator does, and what no call takes."""
    check_ends(how.async_finish, how.return_recv_hook)
    if how.waits_ns is not None:
        raise NotImplementedError(
            f"max_ep: {name} is not compiled; call outside of the compiled function"
        )


def _hook(is_wanted: bool) -> Callable[[], None] | None:
    return _nothing if is_wanted else None


def _nothing() -> None:
    """A hook of a call that has received already."""


@torch.library.custom_op("max_ep::low_latency_dispatch", mutates_args=("order",))
def _dispatch(
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
    compiled = _COMPILED[key]
    wire = Wire(use_fp8, round_scale, use_ue8m0)
    result, _, handle, *_ = compiled.calls.dispatch(
        x.contiguous(), topk_idx.contiguous(), cap, n_experts, wire
    )
    tables = handle.tables
    handle.tables = None  # whoever is called owns them
    compiled.handles[tables.data_ptr()] = handle
    rows, scales = result if use_fp8 else (result, None)
    return rows, x.new_empty(0) if scales is None else scales.transpose(1, 2), tables


@_dispatch.register_fake
def _(order, key, x, topk_idx, cap, n_experts, use_fp8, round_scale, use_ue8m0):
    n_ranks, hidden = _COMPILED[key].calls.comm.n_ranks, x.shape[1]
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


@torch.library.custom_op("max_ep::low_latency_combine", mutates_args=("order",))
def _combine(
    order: torch.Tensor,
    key: str,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    tables: torch.Tensor,
) -> torch.Tensor:
    compiled = _COMPILED[key]
    given = (x.contiguous(), topk_idx.contiguous(), topk_weights.contiguous())
    return compiled.calls.combine(*given, compiled.stored(tables))[0]


@_combine.register_fake
def _(order, key, x, topk_idx, topk_weights, tables):
    return x.new_empty((topk_idx.shape[0], x.shape[2]))
