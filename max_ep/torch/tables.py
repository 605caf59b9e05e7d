# SPDX-License-Identifier: Apache-2.0
"""Handles that behave like tuples, and tensors that are made quickly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# What code of `torch.compile` calls: half the time of `empty` and `as_strided`.
view = torch._C._dynamo.guards._reinterpret_tensor
"""Views a tensor: size, strides, elements to skip."""


def allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """Returns a function of size, strides and dtype; a GPU must be the current one."""
    return getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}")


def dense(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    strides = [1]
    for n in shape[:0:-1]:
        strides.insert(0, strides[0] * n)
    return shape, tuple(strides)


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
