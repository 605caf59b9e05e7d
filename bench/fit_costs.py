# SPDX-License-Identifier: Apache-2.0
"""Fits the constants of ``max_ep/choice.py``: ``python -m bench.fit_costs [JSON...]``.

Of the captured, fused round trips of max_ep in tables of ``bench.gpu_round_trip``
(bfloat16, uniform routing): a constant for each protocol and combine mode, and two
speeds for all, least squares of relative errors.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from max.dtype import DType

from max_ep import EPConfig
from max_ep.choice import predict

from .gpu_shapes import OURS, SHAPES

_RESULTS = Path(__file__).parent.parent / "docs/results"
TABLES = [_RESULTS / f"protocols_{n_ranks}_ranks.json" for n_ranks in (2, 4)]


@dataclass(frozen=True)
class Measured:
    """A row of a table."""

    protocol: str
    combine_mode: str
    config: EPConfig
    """With as many tokens a rank as were measured."""
    us: float


@dataclass(frozen=True)
class Fit:
    """The constants, under the names they have in ``max_ep/choice.py``."""

    fixed_us: dict[tuple[str, str], float]
    wire_gbps: float
    rows_gbps: float


def measured(tables: list[Path] = TABLES) -> list[Measured]:
    """Reads what tables say of max_ep's fused, captured forms."""
    found = []
    for row in (row for t in tables for row in json.loads(t.read_text())["rows"]):
        of_peer = OURS.get(row["peer"], {})
        is_plain = (row["dtype"], row["routing"]) == ("bfloat16", "uniform")
        if not of_peer or row["form"] != "fused" or not is_plain:
            continue
        if "captured_us" not in row or row["n_ranks"] == 1:
            continue
        shape = SHAPES[row["shape"]]
        config = EPConfig(
            dispatch_dtype=DType.bfloat16,
            combine_dtype=DType.bfloat16,
            hidden_size=shape.hidden_size,
            top_k=shape.top_k,
            n_experts=shape.n_experts,
            max_tokens_per_rank=row["n_tokens"],
            n_gpus_per_node=row["n_ranks"],
            n_nodes=1,
            target="gpu",
            **of_peer,
        )
        us = row["captured_us"]
        found.append(Measured(config.protocol, config.combine_mode, config, us))
    return found


def fit(rows: list[Measured]) -> Fit:
    """Fits the constants to rows of tables."""
    kinds = sorted({(row.protocol, row.combine_mode) for row in rows})
    terms = np.zeros((len(rows), len(kinds) + 2))
    for i, row in enumerate(rows):
        prediction = predict(row.config, row.protocol)
        terms[i, kinds.index((row.protocol, row.combine_mode))] = 1
        terms[i, -2:] = prediction.wire_bytes / 1e3, prediction.row_bytes / 1e3
        terms[i] /= row.us
    found, *_ = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)
    *fixed, wire, per_row = (float(value) for value in found)
    return Fit(dict(zip(kinds, fixed)), 1 / wire, 1 / per_row)


def main() -> None:
    """Prints the constants, and how far they are off."""
    rows = measured([Path(name) for name in sys.argv[1:]] or TABLES)
    found = fit(rows)
    print("FIXED_US = {")
    for kind, us in found.fixed_us.items():
        print(f'    ("{kind[0]}", "{kind[1]}"): {us:.1f},')
    print(f"}}\nWIRE_GBPS = {found.wire_gbps:.0f}\nROWS_GBPS = {found.rows_gbps:.0f}")
    for row in rows:
        p = predict(row.config, row.protocol)
        us = found.fixed_us[row.protocol, row.combine_mode]
        us += p.wire_bytes / found.wire_gbps / 1e3 + p.row_bytes / found.rows_gbps / 1e3
        print(
            f"{row.protocol:13} {row.combine_mode:10} {row.config.n_ranks} ranks, "
            f"{row.config.max_tokens_per_rank:5} tokens: measured {row.us:7.1f} us, "
            f"predicted {us:7.1f}"
        )


if __name__ == "__main__":
    main()
