# SPDX-License-Identifier: Apache-2.0
"""Compares what a chain of layers gives with exact arithmetic, where it is.

What a dispatch delivers is compared with the oracle in tests/. Each check raises a
:class:`CheckError` that begins with ``where``.
"""

import numpy as np
import torch

from max_ep import reference

from .cases import Shape, expert_row


class CheckError(AssertionError):
    """A result differs from the oracle's."""


def _require(is_right: bool | torch.Tensor, message: str) -> None:
    if not bool(is_right):
        raise CheckError(message)


def from_bits(bits: np.ndarray, device: str | torch.device = "cpu") -> torch.Tensor:
    """Makes a bfloat16 tensor of bits (``uint16``, any shape)."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(device)


def expert_sums(
    shape: Shape, n_ranks: int, ids: np.ndarray, weights: np.ndarray, device: str
) -> torch.Tensor:
    """Adds up what experts return that return the row of their rank: float64."""
    owners = ids // reference.n_local_experts(shape.n_experts, n_ranks)
    of_rank = [np.where(owners == rank, weights, 0) for rank in range(n_ranks)]
    factors = torch.from_numpy(np.stack(of_rank).sum(axis=2).T).to(device)
    rows = np.stack([expert_row(shape, rank) for rank in range(n_ranks)])
    return factors.double() @ torch.from_numpy(rows).to(device).double()


def check_chain(where: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Compares a chain's result with float64 that bfloat16 holds, or rounds once."""
    same = got == want.to(torch.bfloat16)  # by value: 0 may have either sign
    _require(same.all(), f"{where}: {int((~same).sum())} elements of the chain differ")


def check_same(where: str, got: torch.Tensor, want: torch.Tensor | np.ndarray) -> None:
    """Compares values, element by element."""
    if isinstance(want, np.ndarray):
        want = torch.from_numpy(want)
    _require(torch.equal(got, want.to(got.device)), f"{where} differ")
