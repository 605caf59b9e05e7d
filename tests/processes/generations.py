# SPDX-License-Identifier: Apache-2.0
"""What groups of processes are given in each generation, and must get."""

import functools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from max.driver import Buffer

from max_ep import EPConfig
from max_ep.reference import DispatchResult
from tests.children import ALL_CASES
from tests.harness import assert_dispatched, to_buffer, to_numpy
from tests.oracle.cases import BF16, Case, in_protocols
from tests.oracle.drawn import Inputs, make_inputs, narrow, token_counts, widen
from tests.oracle.oracle import expected, expected_dispatch

N_RANKS = 4

# 4 ranks do not divide 14: the last rank holds 2 experts, the others 4.
SMALL = Case("small", N_RANKS, 14, 4, 256, 32)

# A full launch moves 256 * 4 * 4112 bytes: more than STREAM_BYTES of
# cpu_copy.mojo, so its messages are written past the caches, by all workers.
LARGE = Case("large", N_RANKS, 8, 4, 2048, 256)

# The last rank holds no expert. Nobody sends to it, so it waits for nobody and may
# run ahead of all. With a shared expert it receives nobody's rows but its own.
FEW_EXPERTS = Case("few_experts", N_RANKS, 3, 2, 256, 32)
SHARED = replace(FEW_EXPERTS, name="shared", fused_shared_expert=True)

PHASED = in_protocols([SMALL])
"""Groups whose phases are graphs of their own."""

GROUPS = PHASED | in_protocols([LARGE, SHARED]) | {FEW_EXPERTS.name: FEW_EXPERTS}
SPLITS_ALL = ALL_CASES
"""Whether groups that are not phased have ops of their own to send and to receive."""
if not ALL_CASES:
    for name in ("large", "large_by_rank", "shared", "few_experts"):
        del GROUPS[name]


def config_of(case: Case, node_id: int, **changes: Any) -> EPConfig:
    """A process of one rank, unless changed."""
    one_each = dict(n_nodes=case.n_ranks, n_gpus_per_node=1, timeout_s=60.0)
    return case.config(node_id=node_id, **(one_each | changes))


def inputs_of(case: Case, generation: int, silent_rank: int | None = None) -> Inputs:
    """Draws what all ranks are given, for each generation anew.

    Of every 7 generations, one is full on all ranks with all tokens to the experts of
    rank 0, and one is empty on all ranks; in the others one rank is empty, and some
    choices are -1. Nothing is sent by a silent rank, or to it.
    """
    named = replace(case, name=f"{case.name}/{generation}")
    routing = {3: "full", 5: "all_silent"}.get(generation % 7, "masked")
    counts = token_counts(named, routing)
    if routing == "masked":
        counts[generation % case.n_ranks] = 0
    given = make_inputs(named, routing, counts=counts)
    if silent_rank is not None:
        given.ids[silent_rank][:] = -1
        for ids in given.ids:
            ids[ids // case.n_local_experts == silent_rank] = -1
    return given


def expert(expert_id: int, generation: int, rows: np.ndarray) -> np.ndarray:
    """What an expert makes of its rows (float32, exact in bfloat16).

    A power of two with a sign, another one for each expert: a row that comes
    back from the wrong expert, or from another generation, is a wrong sum.
    """
    sign = -1 if (expert_id + generation) % 2 else 1
    return rows * np.float32(sign * 2.0 ** (expert_id // 2 + generation % 3 - 4))


def apply_experts(
    case: Case, generation: int, rank: int, dispatched: DispatchResult, rows: np.ndarray
) -> np.ndarray:
    """Runs each expert of a rank on its rows, in place."""
    bounds = dispatched.row_offsets
    ids = [rank * case.n_local_experts + i for i in range(case.n_local_experts)]
    if case.fused_shared_expert:
        ids.insert(0, case.n_experts)
    for i, expert_id in enumerate(ids):
        mine = slice(bounds[i], bounds[i + 1])
        rows[mine] = expert(expert_id, generation, rows[mine])
    return rows


@dataclass
class Oracle:
    """What all ranks are given in a generation, and must get."""

    case: Case
    given: Inputs

    def inputs(self, rank: int) -> list:
        tokens = to_buffer(self.given.tokens[rank])
        return [tokens, self.given.ids[rank], self.given.weights[rank]]

    @functools.cached_property
    def dispatched(self) -> list[DispatchResult]:
        return expected_dispatch(self.case, self.given)

    def sums(self, rank: int, expert_generation: int) -> np.ndarray:
        """A rank's results, bfloat16 bits, of experts as they are in a generation."""
        rows = [
            narrow(
                apply_experts(self.case, expert_generation, r, x, widen(x.rows)), BF16
            )
            for r, x in enumerate(self.dispatched)
        ]
        given = replace(self.given, expert_rows=rows)
        return expected(self.case, given).combine[rank]


def check_dispatched(where: str, got: list[Buffer], want: DispatchResult) -> None:
    names = "rows row_offsets expert_ids src_info".split()
    arrays = dict(zip(names, map(to_numpy, got)))
    assert_dispatched(where, [SimpleNamespace(**arrays)], [want])
