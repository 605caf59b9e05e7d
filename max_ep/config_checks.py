# SPDX-License-Identifier: Apache-2.0
"""Some checks of ``EPConfig``: of its hidden size, and of a cap on rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .limits import TOKEN_ALIGN_BYTES

if TYPE_CHECKING:
    from .config import EPConfig


def check_max_output_rows(config: EPConfig) -> None:
    """Refuses a cap where rows cannot be dropped."""
    n_rows = config.max_output_rows
    if n_rows is None:
        return
    if not isinstance(n_rows, int) or n_rows < 1:
        raise ValueError(f"max_output_rows={n_rows!r} must be an integer >= 1, or None")
    if config.target != "cpu" or config.is_padded or config.router_top_k:
        raise ValueError(
            f"max_output_rows={n_rows} with target={config.target!r}, output_layout="
            f"{config.output_layout!r}: only CPU ranks drop rows that do not fit, and "
            "only packed ones, of no all-gather; leave it out"
        )


def check_hidden_size(config: EPConfig) -> None:
    """Checks that rows are made of whole 16-byte vectors and whole blocks."""
    block = config.token_format.scale_block
    if block and config.hidden_size % block != 0:
        raise ValueError(
            f"hidden_size={config.hidden_size} must be a multiple of {block} for "
            f"{config.token_format.short_name.upper()} dispatch; pad it"
        )
    for field in ("dispatch_dtype", "combine_dtype", "partial_dtype"):
        dtype = getattr(config, field)
        is_packed = field == "dispatch_dtype"
        n_packed = config.token_format.values_per_byte if is_packed else 1
        n_bytes = config.hidden_size * dtype.size_in_bytes // n_packed if dtype else 0
        if n_bytes % TOKEN_ALIGN_BYTES != 0:
            multiple = n_packed * TOKEN_ALIGN_BYTES // dtype.size_in_bytes
            raise ValueError(
                f"hidden_size={config.hidden_size} of {dtype} ({field}) is {n_bytes} "
                f"bytes, which must be a multiple of {TOKEN_ALIGN_BYTES}; pad it "
                f"to a multiple of {multiple}"
            )
