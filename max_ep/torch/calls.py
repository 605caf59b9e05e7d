# SPDX-License-Identifier: Apache-2.0
"""Which libraries a call needs, by its arguments.

The interfaces open what these functions describe, and ``max-ep build`` compiles it
ahead. So a library that an interface asks for is one that the command can make.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch

from ..limits import FP8_BLOCK, MAX_OF_ENTRY
from .library import Settings, round_up
from .quantized import FORMATS

PLAIN, EXPANDED = "plain", "expanded"
_WORDS = 16
_STEP = 4096
_ROW_BYTES = 16
"""Bytes of a row in a dispatch that is only there for the combine after it."""
_CPU_BYTES = 4 << 20
_GPU_BYTES = 1 << 30


def memory_for(n_tokens: int) -> int:
    """Returns for how many tokens of a rank ``ElasticBuffer`` has memory: few numbers,
    so that few kernels are built."""
    if n_tokens > _STEP:
        return min(round_up(n_tokens, _STEP), MAX_OF_ENTRY)
    return power_of_two(n_tokens)


def power_of_two(n: int) -> int:
    """Returns the first power of two that is not below a number."""
    return 1 << max(0, n - 1).bit_length()


def words_of_row(n_scales: int, top_k: int) -> int:
    """Counts the int32 that go with a row of the normal calls: in steps, so that few
    numbers of choices need kernels of their own."""
    return max(_WORDS, round_up(n_scales + 2 * top_k, _WORDS))


def first_tokens(
    target: str, ranks: int, hosts: int, hidden: int, num_nvl_bytes: int
) -> int:
    """Returns for how many tokens of a rank the normal calls have memory at first: as
    many bfloat16 rows out and back as fit into it, and those staged for other hosts."""
    usual = _CPU_BYTES if target == "cpu" else _GPU_BYTES
    budget = (target != "cpu" and num_nvl_bytes) or usual
    times = 2 + (ranks if hosts > 1 else 0)
    fits = max(1, budget // (times * ranks * 2 * hidden))
    return min(_STEP, 1 << (fits.bit_length() - 1))


def sends_sums(combine_mode: str | None, ranks: int, enable_shrink: bool) -> bool:
    """Returns what low-latency combine sends; None: the default."""
    if combine_mode is None:
        return ranks > 1 and not enable_shrink
    return combine_mode == "sums"


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of a call on which its libraries depend, as ``max-ep build`` names
    them: ``--top-k`` for ``top_k``."""

    method: ClassVar[str]
    """What other ranks hear of it."""

    target: str
    """``"cpu"``, or a GPU's architecture such as ``"sm_90a"``."""
    ranks: int
    experts: int
    top_k: int
    hidden: int
    tokens: int
    format: str = "bfloat16"
    hosts: int = 1

    def libraries(self) -> list[Settings]:
        """Returns what dispatch and combine need."""
        raise NotImplementedError

    def counts(self, n: int) -> Settings:
        """Describes the channel in which each rank sends each other ``n`` counts."""
        return self._given(
            hidden=4 * round_up(n, 4),
            combine_hidden=_ROW_BYTES // 2,
            experts=self.ranks,
            top_k=1,
            tokens=power_of_two(self.ranks),
        )

    def _back(self, columns: int) -> Settings:
        """Describes one in which so many float32 return for each row."""
        of_float32 = dict(combine="float32", partial="float32")
        rows = self.again(self.rows())
        return replace(rows, combine_hidden=columns, **of_float32)

    @staticmethod
    def again(settings: Settings) -> Settings:
        """Describes the channel in which a combine like that of another repeats its
        dispatch: its rows are short."""
        return replace(settings, hidden=_ROW_BYTES, scales=0)

    def row_multiple(self) -> int:
        """Returns what the hidden size is a multiple of: rows are of whole 16 bytes."""
        if self.format in FORMATS:
            return FORMATS[self.format].multiple
        return 16 // self._dtype().itemsize

    def command(self) -> str:
        """Returns what compiles the libraries ahead."""
        words = ["max-ep build --torch", self.target, "--dispatch", NAMES[type(self)]]
        for field in fields(self)[1:]:
            value, name = getattr(self, field.name), field.name.replace("_", "-")
            if value == field.default:
                continue
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{name}")
            else:
                words += [f"--{name}", str(value)]
        return " ".join(words)

    def _dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.format, None)
        if not isinstance(dtype, torch.dtype):
            names = ", ".join(["bfloat16", *FORMATS])
            raise ValueError(f"--format {self.format} must be one of {names}")
        return dtype

    def _row(self, scales: int | None) -> tuple[int, int]:
        """Returns bytes of a row, and words of its scales; None: as many as the format
        has."""
        wire = FORMATS.get(self.format)
        if wire is None:
            return self.hidden * self._dtype().itemsize, scales or 0
        n_bytes = self.hidden // wire.block * wire.scales.itemsize
        n_words = round_up(n_bytes, 4) // 4
        return self.hidden // wire.per_byte, n_words if scales is None else scales

    def _has_relays(self) -> bool:
        """Returns whether a rank of another host has others to relay to."""
        return 1 < self.hosts < self.ranks

    def _given(self, **more: Any) -> Settings:
        """Describes a channel of rows as they are given, by default plain."""
        how = dict(format="given", combine="bfloat16", partial="bfloat16")
        how |= dict(wide_ids=True, rows=PLAIN, scales=0, alignment=1)
        return self._settings(**(how | more))

    def _settings(self, **more: Any) -> Settings:
        mapped = 0 if self.hosts == 1 else self.ranks // self.hosts
        group = dict(target=self.target, ranks=self.ranks, mapped=mapped)
        return Settings(**(group | more))


@dataclass(frozen=True, kw_only=True)
class LowLatencyCall(Call):
    """``low_latency_dispatch`` and ``low_latency_combine``."""

    method = "low_latency_dispatch"

    pair: bool = False
    """Whether tokens are given as values and scales."""
    round_scale: bool = False
    use_ue8m0: bool = False
    combine_mode: str | None = None
    enable_shrink: bool = False

    def row_multiple(self) -> int:
        return 4 * FP8_BLOCK if self.use_ue8m0 else super().row_multiple()

    def settings(self) -> Settings:
        format = self.format
        if self.pair:
            format += "_forwarded"
        elif format == "fp8" and self.round_scale:
            format = "fp8_power_of_two"
        return self._settings(
            format=format,
            hidden=self.hidden,
            combine="bfloat16",
            combine_hidden=self.hidden,
            experts=self.experts,
            top_k=self.top_k,
            tokens=self.tokens,
            packed_scales=self.use_ue8m0,
            wide_ids=True,
            masks=self.enable_shrink,
            sums=sends_sums(self.combine_mode, self.ranks, self.enable_shrink),
        )

    def libraries(self) -> list[Settings]:
        return [self.settings()]


@dataclass(frozen=True, kw_only=True)
class NormalCall(Call):
    """``Buffer.dispatch`` and ``combine``; ``top_k=0``: without ``topk_idx``. Each rank
    is an expert then, and each may be a choice."""

    method = "dispatch or combine"

    scales: int | None = None
    """Words of the scales of a row; None: as many as the format has."""
    num_nvl_bytes: int = 0

    def rows(self) -> Settings:
        """Describes the channel for rows out, and for sums back."""
        row_bytes, n_scales = self._row(self.scales)
        back = "float32" if self.format == "float32" else "bfloat16"
        of_ranks = self.ranks, self.ranks
        experts, top_k = (self.experts, self.top_k) if self.top_k else of_ranks
        return self._given(
            hidden=row_bytes,
            combine=back,
            # Rows that do not come back as they are may be shorter than 16 bytes.
            combine_hidden=round_up(self.hidden, 4 if back == "float32" else 8),
            experts=experts,
            top_k=top_k,
            tokens=self.tokens,
            scales=n_scales,
            partial=back,
            relays=self._has_relays(),
        )

    def weights(self, top_k: int | None = None) -> Settings:
        """Describes the one in which combine brings router weights back."""
        columns = round_up(max(1, self.top_k if top_k is None else top_k), _WORDS)
        return self._back(columns)

    def libraries(self) -> list[Settings]:
        """Returns them for all numbers of tokens that memory is made for: the first,
        and its doubles up to that of the largest call."""
        of_group = self.target, self.ranks, self.hosts
        n = first_tokens(*of_group, self.hidden, self.num_nvl_bytes)
        wanted = [self.counts(self.experts // self.ranks)]
        while True:
            of_n = replace(self, tokens=n)
            rows = of_n.rows()
            wanted += [rows, self.again(rows), of_n.weights()]
            if n >= self.tokens:
                return wanted
            n *= 2


@dataclass(frozen=True, kw_only=True)
class ElasticCall(Call):
    """``ElasticBuffer.dispatch`` and ``combine``."""

    method = "ElasticBuffer.dispatch or combine"

    scales: int | None = None
    """Words of the scales of a row; None: as many as the format has."""
    do_expand: bool = False
    expert_alignment: int = 1
    allow_hybrid_mode: bool = True
    allow_multiple_reduction: bool = True

    def rows(self) -> Settings:
        """Describes the channel for rows out, and for sums back."""
        row_bytes, n_scales = self._row(self.scales)
        # One row is what it is, and never a sum.
        is_rounded = self.allow_multiple_reduction or not self.do_expand
        return self._given(
            hidden=row_bytes,
            combine_hidden=self.hidden,
            experts=self.experts,
            top_k=self.top_k,
            tokens=memory_for(self.tokens),
            rows=EXPANDED if self.do_expand else PLAIN,
            scales=n_scales,
            partial="bfloat16" if is_rounded else "float32",
            alignment=self.expert_alignment if self.do_expand else 1,
            relays=self.allow_hybrid_mode and self._has_relays(),
        )

    def weights(self) -> Settings:
        """Describes the one in which a weight for each choice returns."""
        columns = round_up(self.top_k, 4)
        return self._back(columns)

    def libraries(self) -> list[Settings]:
        rows = self.rows()
        wanted = [rows, self.again(rows)]
        if self.do_expand:
            wanted.append(self.counts(self.experts // self.ranks))
        if self.allow_multiple_reduction or not self.do_expand:
            wanted.append(self.weights())
        return wanted


NAMES: dict[type[Call], str] = {
    LowLatencyCall: "low-latency",
    NormalCall: "normal",
    ElasticCall: "elastic",
}
"""What ``max-ep build --dispatch`` calls them."""
