# SPDX-License-Identifier: Apache-2.0
"""Compares what a library delivered with the oracle, on the GPU that holds it.

Routing comes from the oracle (``cases.routes``) for all rows at every
size; payload is compared on the device, by torch. Quantized bits, which the oracle
must compute one by one, are compared for a sample of rows.

``exact``: rows in the oracle's order and bit for bit. Otherwise the rows of an expert
may stand in any order, and quantized values may differ by rounding. Sums are compared
in a chain of layers, where they are exact. Each check raises a :class:`CheckError` that
begins with ``where``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .. import reference
from ..formats import BY_NAME
from ..limits import FP8_BLOCK
from ..plural import counted
from .cases import TAG_COLUMNS, Shape, expert_row

_CHUNK_ROWS = 8192
_SAMPLE = 32
"""Rows of a rank that the oracle quantizes itself."""


class CheckError(AssertionError):
    """A result differs from the oracle's."""


def _require(is_right: bool | torch.Tensor, message: str) -> None:
    if not bool(is_right):
        raise CheckError(message)


def from_bits(bits: np.ndarray, device: str | torch.device = "cpu") -> torch.Tensor:
    """Makes a bfloat16 tensor of bits (``uint16``, any shape)."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(device)


def stack_tokens(x: Sequence[np.ndarray], device: str | torch.device) -> torch.Tensor:
    """Puts all ranks' tokens on one device: ``[n_ranks * n_tokens, hidden]``."""
    return torch.cat([from_bits(rank_x, device) for rank_x in x])


def expert_sums(
    shape: Shape, n_ranks: int, ids: np.ndarray, weights: np.ndarray, device: str
) -> torch.Tensor:
    """Adds up what experts return that return the row of their rank: float64."""
    owners = ids // reference.n_local_experts(shape.n_experts, n_ranks)
    of_rank = [np.where(owners == rank, weights, 0) for rank in range(n_ranks)]
    factors = torch.from_numpy(np.stack(of_rank).sum(axis=2).T).to(device)
    rows = np.stack([expert_row(shape, rank) for rank in range(n_ranks)])
    return factors.double() @ torch.from_numpy(rows).to(device).double()


@dataclass
class Delivered:
    """What dispatch gave one rank, as torch tensors on its device."""

    dtype: str
    """One of ``cases.DTYPES``."""
    rows: torch.Tensor
    """``[max_recv_tokens, hidden_size]`` bfloat16, or the bytes of quantized values."""
    scales: torch.Tensor | None
    """``[hidden_size / 128, max_recv_tokens]`` float32 for FP8, bytes
    ``[max_recv_tokens, n_scales]`` for the others that quantize."""
    row_offsets: torch.Tensor
    """``[n_local_experts + 1]``."""
    expert_ids: torch.Tensor
    """``[n_local_experts]``: the local expert of each range."""
    are_scales_packed: bool = False
    """They are powers of two, and four exponents stand in an int32."""

    def __post_init__(self) -> None:
        if self.are_scales_packed:
            n, n_rows = self.scales.shape
            exponents = self.scales.view(torch.uint8).view(n, n_rows, 4).transpose(1, 2)
            bits = exponents.reshape(4 * n, n_rows).int() << 23
            self.scales = bits.view(torch.float32)


def token_numbers(rows: torch.Tensor, values_per_byte: int = 1) -> torch.Tensor:
    """Reads the number that each row's signs spell: ``int64 [n_rows]``."""
    tag = rows[:, : TAG_COLUMNS // values_per_byte].contiguous()
    if tag.dtype != torch.uint8:
        is_negative = tag.view(torch.int16) < 0
    elif values_per_byte == 1:
        is_negative = tag >= 128
    else:  # the first in the lower half
        is_negative = torch.stack([tag & 8, tag & 128], dim=2).flatten(1) > 0
    power = 1 << torch.arange(TAG_COLUMNS, device=rows.device)
    return (is_negative.long() * power).sum(dim=1)


def check_dispatch(
    where: str,
    got: Delivered,
    wanted: reference.DispatchResult,
    x_all: torch.Tensor,
    *,
    exact: bool,
    filled_to: int = 1,
) -> None:
    """Compares one rank's rows with the oracle.

    ``wanted`` is the rank's of :func:`cases.routes`, ``x_all`` is
    :func:`stack_tokens` of the group. Each expert's rows are filled up to a multiple of
    ``filled_to``; what follows its own is not compared.
    """
    device = got.rows.device
    offsets = got.row_offsets.cpu().numpy().astype(np.int64)
    want_offsets, n_rows = wanted.row_offsets.astype(np.int64), len(wanted.rows)
    want_counts = np.diff(want_offsets)
    expert_ids = got.expert_ids.cpu().numpy()
    counts = want_counts[expert_ids]  # of each range
    _require(
        offsets[0] == 0
        and np.array_equal(np.diff(offsets), -(-counts // filled_to) * filled_to),
        f"{where}: {counted(int(offsets[-1]), 'row')}, needs {n_rows}, or an expert's "
        "are not as many as were sent to it",
    )
    if exact:
        _require(np.array_equal(offsets, want_offsets), f"{where}: row_offsets differ")
    if n_rows == 0:
        return
    own = [first + np.arange(n) for first, n in zip(offsets, counts)]
    at = torch.from_numpy(np.concatenate(own)).to(device)
    token_format = BY_NAME[got.dtype]
    numbers = token_numbers(got.rows[at], token_format.values_per_byte)
    want_numbers = torch.from_numpy(wanted.rows[:, 0]).to(device)
    if exact:
        _require((numbers == want_numbers).all(), f"{where}: rows out of order")

    def keys(experts: np.ndarray, n: np.ndarray, tokens: torch.Tensor) -> torch.Tensor:
        expert = np.repeat(experts.astype(np.int64), n)
        return (torch.from_numpy(expert).to(device) << 32 | tokens).sort().values

    same = torch.equal(
        keys(expert_ids, counts, numbers),
        keys(np.arange(len(want_counts)), want_counts, want_numbers),
    )
    _require(same, f"{where}: an expert has the wrong tokens")
    if got.dtype in ("bfloat16", "fp8"):
        for begin in range(0, n_rows, _CHUNK_ROWS):
            part = slice(begin, begin + _CHUNK_ROWS)
            x, rows = x_all[numbers[part]], got.rows[at[part]]
            if got.scales is None:
                same = rows.view(torch.int16) == x.view(torch.int16)
                _require(same.all(), f"{where}: a row's payload differs")
            else:
                _check_dequantized(where, rows, got.scales[:, at[part]], x)
    if got.scales is not None and exact:
        picked = torch.linspace(0, n_rows - 1, min(_SAMPLE, n_rows)).long().to(device)
        x = x_all[numbers[picked]].float().cpu().numpy()
        more = {"power_of_two_scales": True} if got.are_scales_packed else {}
        values, scales = token_format.quantize(x, **more)
        got_values = got.rows[picked]
        got_scales = got.scales.T if got.dtype == "fp8" else got.scales
        same = np.array_equal(got_values.cpu().numpy(), values)
        _require(same, f"{where}: quantized values differ from the oracle's")
        same = np.array_equal(got_scales[picked].cpu().numpy(), scales)
        _require(same, f"{where}: scales differ from the oracle's")


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
    _require((error <= allowed).all(), f"{where}: a dequantized row is off")


def check_rows(
    where: str, rows: torch.Tensor, numbers: np.ndarray, x_all: torch.Tensor
) -> None:
    """Compares bfloat16 rows, in any order, with the tokens of these numbers; ``x_all``
    is :func:`stack_tokens` of the group."""
    message = f"{where}: {counted(len(rows), 'row')}, needs {len(numbers)}"
    _require(len(rows) == len(numbers), message)
    got = token_numbers(rows)
    want = torch.from_numpy(numbers).to(rows.device)
    same = torch.equal(got.sort().values, want.sort().values)
    _require(same, f"{where}: rows of the wrong tokens")
    for begin in range(0, len(rows), _CHUNK_ROWS):
        part = slice(begin, begin + _CHUNK_ROWS)
        same = rows[part].view(torch.int16) == x_all[got[part]].view(torch.int16)
        _require(same.all(), f"{where}: a row's payload differs")


def check_chain(
    where: str, got: torch.Tensor, want: torch.Tensor, *, is_exact: bool = True
) -> None:
    """Compares a chain's result with float64 that bfloat16 holds, or rounds once; if
    not ``is_exact``, as :func:`check_near`."""
    if not is_exact:
        check_near(where, got, want)
        return
    same = got == want.to(torch.bfloat16)  # by value: 0 may have either sign
    _require(
        same.all(),
        f"{where}: {counted(int((~same).sum()), 'element')} of the chain differ",
    )


def check_near(where: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Compares rows that were rounded to bfloat16 three times, each as a whole: a wrong
    element of one makes more of a difference than the roundings of all."""
    off = (got.double() - want).norm(dim=1) / want.norm(dim=1)
    _require((off < 2.0**-7).all(), f"{where}: a row is off by {float(off.max()):.2g}")


def check_same(where: str, got: torch.Tensor, want: torch.Tensor | np.ndarray) -> None:
    """Compares values, element by element."""
    if isinstance(want, np.ndarray):
        want = torch.from_numpy(want)
    _require(torch.equal(got, want.to(got.device)), f"{where} differ")
