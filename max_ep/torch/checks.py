# SPDX-License-Identifier: Apache-2.0
"""Errors of wrong arguments, before anything is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from .communicator import Communicator


def refuse(name: str, what: str) -> NoReturn:
    """Raises the error of a wrong argument."""
    raise ValueError(f"max_ep: {name}{'' if what[0] == '=' else ' '}{what}")


def check_handle(comm: Communicator, handle: Any, kind: type, maker: str) -> None:
    """Raises unless a handle is of this communicator, which has not failed."""
    comm.raise_failure()
    if not isinstance(handle, kind):
        refuse("handle", f"is not one that {maker} returned")
    if handle.comm is not comm:
        refuse("handle", "is of another Buffer")


def check_tensor(
    comm: Communicator,
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    any_strides: bool = False,
) -> None:
    """Raises unless a tensor has this dtype and shape; None: any size."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"max_ep: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"max_ep: {name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != comm.device:
        where = f"is on {tensor.device}, this Buffer on {comm.device}"
        refuse(name, f"{where} (its argument device=)")
    found = tensor.shape
    if found != shape and (
        len(found) != len(shape)
        or any(want is not None and want != n for n, want in zip(found, shape))
    ):
        wanted = ", ".join("n" if n is None else str(n) for n in shape)
        refuse(name, f"must be [{wanted}], got {list(found)}")
    if not any_strides and not tensor.is_contiguous():
        refuse(name, "is not contiguous; pass .contiguous()")
