# SPDX-License-Identifier: Apache-2.0
"""Small functions that test programs of DeepEP import."""

from __future__ import annotations

from typing import Any

import torch

from max_ep.torch import dequantize, quantize

_BLOCK = 128


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """Returns 0 for equal tensors, about 1 for unrelated ones."""
    x, y = x.double() + 1, y.double() + 1
    squares = (x.square() + y.square()).sum()
    return (1 - 2 * (x * y).sum() / squares).item() if x.numel() else 0.0


def safe_div(a: float, b: float) -> float:
    """Divides; 0 / 0 is 0."""
    return 0 if a == 0 and b == 0 else a / b


def ceil_div(x: int, y: int) -> int:
    """Divides, and rounds up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Rounds up to a multiple."""
    return ceil_div(x, y) * y


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``[n, hidden]`` to float8_e4m3fn, with a float32 scale for each 128
    elements, the last perhaps fewer."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % _BLOCK))
    rows, scales = quantize(padded, "fp8")
    return rows[:, : x.shape[1]].contiguous(), scales


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """Returns bfloat16 ``[n, hidden]`` of float8_e4m3fn and scales: float32, or int32
    with four UE8M0 in a word. Scales may have another shape, such as ``[n / 4,
    hidden / 128]`` words."""
    if x_scales.dtype == torch.int32:
        x_scales = x_scales.contiguous().view(torch.float8_e8m0fnu).float()
    n, hidden = x_fp8.shape
    padded = x_fp8.new_zeros((n, align(hidden, _BLOCK)))
    padded[:, :hidden] = x_fp8
    scales = x_scales.reshape(n, padded.shape[1] // _BLOCK)
    return dequantize(padded, scales)[:, :hidden].bfloat16()


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Leaves one of each number below ``num_slots`` in a row; -1 in other places."""
    is_there = x.new_zeros((len(x), num_slots + 1), dtype=torch.bool)
    is_there.scatter_(1, torch.where(x < 0, num_slots, x), True)
    numbers = torch.arange(num_slots, dtype=x.dtype, device=x.device)
    found = torch.where(is_there[:, :num_slots], numbers, -1).sort(1, True).values
    n = min(num_slots, x.shape[1])
    x.fill_(-1)
    x[:, :n] = found[:, :n]


def create_grouped_scores(
    scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int
) -> torch.Tensor:
    """Sets to 0 the scores of experts outside of a token's groups."""
    is_chosen = scores.new_zeros((len(scores), num_groups)).scatter_(1, group_idx, 1)
    n = scores.shape[1] // num_groups
    return scores * is_chosen.repeat_interleave(n, 1)


def hash_tensor(t: torch.Tensor) -> int:
    """Returns a number that other bits are unlikely to give."""
    words = torch.int32 if t.element_size() == 4 else torch.uint8
    return t.contiguous().view(words).sum().item()


def hash_tensors(*tensors: Any) -> int:
    """Returns such a number for all tensors, in tuples and lists, too."""
    value = 0
    for t in tensors:
        if isinstance(t, (tuple, list)):
            value ^= hash_tensors(*t)
        elif t is not None:
            value ^= hash_tensor(t)
    return value


def count_bytes(*tensors: Any) -> int:
    """Returns the bytes of all tensors, in tuples and lists, too."""
    total = 0
    for t in tensors:
        if isinstance(t, (tuple, list)):
            total += count_bytes(*t)
        elif t is not None:
            total += t.numel() * t.element_size()
    return total
