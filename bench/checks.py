# SPDX-License-Identifier: Apache-2.0
"""Compares what a library delivered with the oracle, on the GPU that holds it.

Routing comes from the oracle (``bench.cases.routes``) for all rows at every
size; payload is compared on the device, by torch. What the oracle must compute
number by number (FP8 bits, float32 sums) is compared for a sample of tokens.

``exact``: rows in the oracle's order and all numbers bit for bit. Otherwise the
rows of an expert may stand in any order, and quantized values and sums may
differ by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from max_ep import reference

from .cases import FP8_BLOCK, TAG_COLUMNS, Shape, expert_row

_CHUNK_ROWS = 8192
_SAMPLE = 32
"""Tokens (or rows) of a rank that the oracle computes itself."""


class CheckError(AssertionError):
    """A result differs from the oracle's."""


def _require(is_right: bool, message: str) -> None:
    if not is_right:
        raise CheckError(message)


def from_bits(bits: np.ndarray, device: str | torch.device = "cpu") -> torch.Tensor:
    """Makes a bfloat16 tensor of bits (``uint16``, any shape)."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(device)


@dataclass
class Delivered:
    """What dispatch gave one rank, as torch tensors on its device."""

    rows: torch.Tensor
    """``[max_recv_tokens, hidden_size]`` bfloat16, or uint8 for FP8."""
    scales: torch.Tensor | None
    """``[hidden_size / 128, max_recv_tokens]`` float32 for FP8."""
    row_offsets: torch.Tensor
    """``[n_local_experts + 1]``."""
    expert_ids: torch.Tensor
    """``[n_local_experts]``: the local expert of each range."""


def token_numbers(rows: torch.Tensor) -> torch.Tensor:
    """Reads the number that each row's signs spell: ``int64 [n_rows]``."""
    tag = rows[:, :TAG_COLUMNS].contiguous()
    if tag.dtype == torch.uint8:
        is_negative = tag >= 128
    else:
        is_negative = tag.view(torch.int16) < 0
    power = 1 << torch.arange(TAG_COLUMNS, device=rows.device)
    return (is_negative.long() * power).sum(dim=1)


def check_dispatch(
    where: str,
    got: Delivered,
    want_numbers: np.ndarray,
    want_offsets: np.ndarray,
    x_all: torch.Tensor,
    *,
    exact: bool,
    filled_to: int = 1,
) -> None:
    """Compares one rank's rows with the oracle.

    Args:
        where: Names the rank in the error.
        got: What dispatch gave it.
        want_numbers: ``[n_rows]``, see :class:`bench.cases.Routes`.
        want_offsets: ``[n_local_experts + 1]``.
        x_all: The group's tokens ``[n_ranks * n_tokens, hidden_size]`` bfloat16
            on the device of ``got``.
        exact: See the module.
        filled_to: Each expert's rows are filled up to a multiple of it; what is
            behind its own is not looked at.

    Raises:
        CheckError: If anything differs.
    """
    device = got.rows.device
    offsets = got.row_offsets.cpu().numpy().astype(np.int64)
    n_rows = len(want_numbers)
    want_counts = np.diff(want_offsets.astype(np.int64))
    expert_ids = got.expert_ids.cpu().numpy()
    counts = want_counts[expert_ids]  # of each range
    _require(
        offsets[0] == 0
        and np.array_equal(np.diff(offsets), -(-counts // filled_to) * filled_to),
        f"{where}: {int(offsets[-1])} rows, needs {n_rows}, or an expert's are "
        "not as many as were sent to it",
    )
    if exact:
        _require(np.array_equal(offsets, want_offsets), f"{where}: row_offsets differ")
    if n_rows == 0:
        return
    own = [first + np.arange(n) for first, n in zip(offsets, counts)]
    at = torch.from_numpy(np.concatenate(own)).to(device)
    numbers = token_numbers(got.rows[at, :TAG_COLUMNS])
    wanted = torch.from_numpy(want_numbers).to(device)
    expert = np.repeat(expert_ids, counts)
    want_expert = np.repeat(np.arange(len(want_counts)), want_counts)
    if exact:
        _require(bool((numbers == wanted).all()), f"{where}: rows out of order")
    key = torch.from_numpy(expert.astype(np.int64)).to(device) << 32 | numbers
    want_key = torch.from_numpy(want_expert.astype(np.int64)).to(device) << 32 | wanted
    _require(
        torch.equal(key.sort().values, want_key.sort().values),
        f"{where}: an expert has the wrong tokens",
    )
    for begin in range(0, n_rows, _CHUNK_ROWS):
        part = slice(begin, min(begin + _CHUNK_ROWS, n_rows))
        x, rows = x_all[numbers[part]], got.rows[at[part]]
        if got.scales is None:
            same = rows.view(torch.int16) == x.view(torch.int16)
            _require(bool(same.all()), f"{where}: a row's payload differs")
        else:
            _check_dequantized(where, rows, got.scales[:, at[part]], x)
    if got.scales is not None and exact:
        _check_quantized_sample(where, got, numbers, n_rows, x_all)


def _check_dequantized(
    where: str, values: torch.Tensor, scales: torch.Tensor, x: torch.Tensor
) -> None:
    """Compares FP8 values times their scales with the tokens, to rounding."""
    scale = scales.T.repeat_interleave(FP8_BLOCK, dim=1)
    x = x.float()
    error = (values.view(torch.float8_e4m3fn).float() * scale - x).abs()
    # Half a step of 3 mantissa bits, or of the subnormals; a little more for
    # the scale's own rounding.
    allowed = x.abs() * (2.0**-4 * 1.02) + scale.abs() * 2.0**-9
    _require(bool((error <= allowed).all()), f"{where}: a dequantized row is off")


def _check_quantized_sample(
    where: str,
    got: Delivered,
    numbers: torch.Tensor,
    n_rows: int,
    x_all: torch.Tensor,
) -> None:
    picked = torch.linspace(0, n_rows - 1, min(_SAMPLE, n_rows)).long()
    picked = picked.to(got.rows.device)
    x = x_all[numbers[picked]].float().cpu().numpy()
    values, scales = reference.quantize_blockwise_fp8(x)
    assert got.scales is not None
    _require(
        np.array_equal(got.rows[picked].cpu().numpy(), values),
        f"{where}: FP8 values differ from the oracle's",
    )
    _require(
        np.array_equal(got.scales[:, picked].T.cpu().numpy(), scales),
        f"{where}: FP8 scales differ from the oracle's",
    )


def check_combine(
    where: str,
    shape: Shape,
    got: torch.Tensor,
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    n_ranks: int,
    *,
    is_fp8: bool,
    exact: bool,
    sums_on_rank: int | None = None,
) -> None:
    """Compares one rank's sums with the oracle.

    Experts return their rows as they are; for FP8, the row of their rank
    (:func:`bench.cases.expert_row`).

    Args:
        where: Names the rank in the error.
        shape: Sizes.
        got: ``[n_tokens, hidden_size]`` bfloat16.
        x: The rank's tokens, bfloat16 bits ``[n_tokens, hidden_size]``.
        ids: ``int32 [n_tokens, top_k]``.
        weights: ``float32 [n_tokens, top_k]``.
        n_ranks: Ranks of the group.
        is_fp8: Whether experts return their rank's row.
        exact: See the module.
        sums_on_rank: With sums, the rank whose sums they are: the
            parts of the others were rounded to bfloat16.

    Raises:
        CheckError: If anything differs.
    """
    parts = expected_parts(shape, got.device, x, ids, weights, n_ranks, is_fp8=is_fp8)
    want = sum(parts)
    allowed = 2.0**-6 * (1 + want.abs())
    if sums_on_rank is not None:
        rounded = [part for rank, part in enumerate(parts) if rank != sums_on_rank]
        allowed += 2.0**-8 * sum(part.abs() for part in rounded)
    close = (got.double() - want).abs() <= allowed
    _require(bool(close.all()), f"{where}: {int((~close).sum())} sums are off")
    if not exact:
        return
    n_local = reference.n_local_experts(shape.n_experts, n_ranks)

    def expert(expert_id: int, rows: np.ndarray) -> np.ndarray:
        if not is_fp8:
            return rows
        row = expert_row(shape, expert_id // n_local)
        return np.broadcast_to(row, rows.shape).copy()

    picked = np.unique(np.linspace(0, len(x) - 1, min(_SAMPLE, len(x))).astype(int))
    x_picked = reference.bfloat16_to_float32(x[picked])

    def sums_on(rank: int) -> np.ndarray:
        there = np.where(ids[picked] // n_local == rank, ids[picked], -1)
        return reference.moe(x_picked, there, weights[picked], expert)

    if sums_on_rank is None:
        sums = reference.moe(x_picked, ids[picked], weights[picked], expert)
    else:
        sums = sums_on(sums_on_rank)
        for rank in range(n_ranks):
            if rank != sums_on_rank:
                sent = reference.float32_to_bfloat16(sums_on(rank))
                sums = sums + reference.bfloat16_to_float32(sent)
    bits = got[torch.from_numpy(picked).to(got.device)].cpu().view(torch.int16)
    _require(
        np.array_equal(
            bits.numpy().view(np.uint16), reference.float32_to_bfloat16(sums)
        ),
        f"{where}: sums differ from the oracle's",
    )


def expected_parts(
    shape: Shape,
    device: str | torch.device,
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    n_ranks: int,
    *,
    is_fp8: bool,
) -> list[torch.Tensor]:
    """Returns what each rank's experts add to the sums of one rank's tokens.

    Args:
        shape: Sizes.
        device: Where to compute.
        x: The tokens, bfloat16 bits ``[n_tokens, hidden_size]``.
        ids: ``int32 [n_tokens, top_k]``.
        weights: ``float32 [n_tokens, top_k]``.
        n_ranks: Ranks of the group.
        is_fp8: Whether experts return their rank's row, not the token.

    Returns:
        float64 ``[n_tokens, hidden_size]``, one a rank.
    """
    n_local = reference.n_local_experts(shape.n_experts, n_ranks)
    parts = []
    for rank in range(n_ranks):
        w = np.where(ids // n_local == rank, weights, 0).astype(np.float64)
        factor = torch.from_numpy(w.sum(axis=1, keepdims=True)).to(device)
        row = from_bits(x, device)
        if is_fp8:
            row = torch.from_numpy(expert_row(shape, rank)).to(device)
        parts.append(factor * row.double())
    return parts


def check_chain(where: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Compares a chain's result, element by element.

    Args:
        where: Names the rank in the error.
        got: ``[n_tokens, hidden_size]`` bfloat16.
        want: The same in float64; bfloat16 can hold it, or rounds it once.
    """
    same = got == want.to(torch.bfloat16)  # by value: 0 may have either sign
    _require(
        bool(same.all()), f"{where}: {int((~same).sum())} elements of the chain differ"
    )


def check_same(where: str, got: torch.Tensor, want: torch.Tensor | np.ndarray) -> None:
    """Compares values, element by element."""
    if isinstance(want, np.ndarray):
        want = torch.from_numpy(want).to(got.device)
    _require(torch.equal(got, want), f"{where} differ")


def stack_tokens(x: Sequence[np.ndarray], device: str | torch.device) -> torch.Tensor:
    """Puts all ranks' tokens on one device: ``[n_ranks * n_tokens, hidden]``."""
    return torch.cat([from_bits(rank_x, device) for rank_x in x])


def check_permutation(
    where: str,
    rows: torch.Tensor,
    choices: np.ndarray,
    ids: np.ndarray,
    x: torch.Tensor,
) -> None:
    """Compares one rank's rows, in any order of experts, with its tokens.

    Args:
        where: Names the rank in the error.
        rows: ``[n_tokens * top_k, hidden_size]``.
        choices: Of each row, ``token * top_k + k``.
        ids: ``int32 [n_tokens, top_k]``.
        x: ``[n_tokens, hidden_size]``, the tokens.

    Raises:
        CheckError: If anything differs.
    """
    all_choices = np.arange(ids.size)
    _require(np.array_equal(np.sort(choices), all_choices), f"{where}: choices differ")
    experts = ids.reshape(-1)[choices]
    n_ranges = 1 + int((np.diff(experts) != 0).sum())
    is_sorted = n_ranges == len(np.unique(experts))
    _require(is_sorted, f"{where}: an expert's rows are not together")
    at = torch.from_numpy(choices // ids.shape[1]).to(x.device)
    for begin in range(0, len(at), _CHUNK_ROWS):
        part = slice(begin, begin + _CHUNK_ROWS)
        _require(torch.equal(rows[part], x[at[part]]), f"{where}: a row differs")
