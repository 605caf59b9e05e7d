# SPDX-License-Identifier: Apache-2.0
"""Handles, and the tables of a low-latency dispatch in one int32 tensor.

Token and choice of each row ``[n_local, n_ranks * cap, 2]``, first row and rows of each
source ``[n_local, n_ranks, 2]``, rows of each expert ``[n_local]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# What code of `torch.compile` calls: half the time of `empty` and `as_strided`.
view = torch._C._dynamo.guards._reinterpret_tensor
"""Views a tensor: size, strides, elements to skip."""


def first_rows(tensor: torch.Tensor | None, n: int) -> torch.Tensor | None:
    """Returns the first rows of a tensor that nobody else has: to autograd no view."""
    if tensor is None:
        return None
    return view(tensor, (n, *tensor.shape[1:]), tensor.stride(), 0)


def allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """Returns a function of size, strides and dtype; a GPU must be the current one."""
    return getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}")


class Unchanged:
    """A tensor as it is now; it keeps its memory, which so is no other's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self._version = tensor, version(tensor)

    def is_in(self, other: torch.Tensor) -> bool:
        """Returns whether another has the same elements, in the same memory, and nobody
        has written to them since. Of inference tensors nobody knows."""
        mine = self.tensor
        if other is not mine and _place(other) != _place(mine):
            return False
        return version(mine) == self._version


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Says where elements are. By the storage: all empty tensors have the address 0,
    and ranks without tokens must decide as the others do."""
    storage = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *storage, tensor.shape, tensor.stride(), tensor.dtype


def version(tensor: torch.Tensor) -> int | None:
    """Counts the writes to a tensor; None: nobody does."""
    return None if tensor.is_inference() else tensor._version


def row_major(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns size and strides, as an ``allocator`` takes them."""
    return shape, torch.empty(shape, device="meta").stride()


class LazyTuple(Sequence[Any]):
    """Behaves like a tuple; its items are made on first access.

    It is not a tuple, because `torch.compile` would read the items of that tuple.
    """

    def items(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        return self.items()[index]

    def __len__(self) -> int:
        return len(self.items())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items())


def scales_of_rows(scales: torch.Tensor) -> torch.Tensor:
    """Views scales ``[n_local, n, capacity]`` as ``[n_local, capacity, n]``."""
    if scales.shape[1] == 1:  # dense, so that it can be viewed as bytes
        return scales.view(scales.shape[0], scales.shape[2], 1)
    return scales.transpose(1, 2)


def n_table_words(n_local: int, n_ranks: int, cap: int) -> int:
    return n_local * (2 * n_ranks * cap + 2 * n_ranks + 1)


def split_tables(
    tables: torch.Tensor, n_local: int, n_ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns tokens, ranges as DeepEP packs them, and counts."""
    n_behind = n_local * (2 * n_ranks + 1)
    src_info = tables[:-n_behind].view(n_local, -1, 2)
    ranges = tables[-n_behind:-n_local].view(n_local, n_ranks, 2)
    packed = ranges.flip(2).view(torch.int64).squeeze(2)
    return src_info[:, :, 0], packed, tables[-n_local:]
