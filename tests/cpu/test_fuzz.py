# SPDX-License-Identifier: Apache-2.0
"""Groups, loads and configurations that nobody thought of, against the oracle.

All is drawn from one number, `MAX_EP_FUZZ_SEED`: a failure shows it, the group and the
load, and with it the same is drawn again. `make fuzz` draws others than CI.
"""

import os
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st
from max.graph import Module

from max_ep.formats import BY_NAME
from max_ep.limits import PROTOCOLS
from tests.children import slow
from tests.harness import Groups, assert_round_trip
from tests.oracle.cases import BF16, F32, Case
from tests.oracle.drawn import Inputs, make_inputs
from tests.oracle.oracle import expected

pytestmark = slow

# Its first three groups have both protocols, both modes of combine, FP8, MXFP8, MXFP4,
# all layouts of scales, quantized sums, tokens that are quantized already, padded rows,
# a cap on rows, and few ranks.
SEED = int(os.environ.get("MAX_EP_FUZZ_SEED", "11138"))
N_EXAMPLES = int(os.environ.get("MAX_EP_FUZZ_EXAMPLES", "40"))
N_CASES = int(os.environ.get("MAX_EP_FUZZ_CASES", "3"))  # about ten seconds each
MOST_RANKS = 6

fuzzed = settings(
    max_examples=N_EXAMPLES, deadline=None, database=None, print_blob=True
)


def drawn_cases() -> dict[str, Case]:
    rng = np.random.default_rng(SEED)
    cases: dict[str, Case] = {}
    while len(cases) < N_CASES:
        case = _drawn_case(rng, f"fuzz_{SEED}_{len(cases)}")
        try:
            case.config()
        except ValueError:
            continue  # test_config.py looks at these
        cases[case.name] = case
    return cases


def _drawn_case(rng: np.random.Generator, name: str) -> Case:
    wires = ["bfloat16", "bfloat16", "float32", "fp8", "fp8_pow2"]
    wire = str(rng.choice([*wires, "mxfp8", "nvfp4", "mxfp4"]))
    tokens = F32 if wire == "float32" or rng.random() < 0.2 else BF16
    wire = "float32" if wire == "bfloat16" and tokens == F32 else wire
    step = BY_NAME[wire.removesuffix("_pow2")].scale_block
    step = max(step, 32) if step else 16 // tokens.size_in_bytes
    mode = ["rows", "sums"][rng.integers(2)]
    partial = [None, None, "mxfp8", "fp8"][rng.integers(4)] if mode == "sums" else None
    step = max(step, BY_NAME[partial].scale_block) if partial else step
    n_experts = int(rng.integers(1, 41))
    case = Case(
        name,
        n_ranks=int(rng.integers(1, MOST_RANKS + 1)),
        n_experts=n_experts,
        top_k=int(rng.integers(1, min(n_experts, 12) + 1)),
        hidden_size=step * int(rng.integers(1, 1 + 640 // step)),
        max_tokens_per_rank=int(rng.integers(1, 41)),
        wire=wire,
        tokens=tokens,
        combine=[BF16, F32][rng.integers(2)],
        scales=[None, None, "one", "each"][rng.integers(4)],
        output_layout=["packed", "packed", "padded"][rng.integers(3)],
        scale_layout=["auto", "rows", "transposed", "tiles"][rng.integers(4)],
        fused_shared_expert=bool(rng.random() < 0.25),
        protocol=str(rng.choice(PROTOCOLS)),
        combine_mode=mode,
        partial_dtype=[None, BF16, F32][rng.integers(3)],
        partial=partial,
        forwards=bool(rng.random() < 0.25),
        row_scales=bool(rng.random() < 0.1),
    )
    if not case.is_padded and rng.random() < 0.3:
        most = int(rng.integers(1, case.max_rows + 1))
        case = replace(case, max_output_rows=most)
    if not case.is_quantized:
        case = replace(case, scale_layout="auto", forwards=False)
    if case.combine_mode == "rows" or case.partial:
        case = replace(case, partial_dtype=None)
    takes_scales = case.protocol == "by_expert" and not case.fused_shared_expert
    if not takes_scales or case.forwards or case.row_scales:
        case = replace(case, scales=None)
    return case


@dataclass(frozen=True)
class Load:
    fullness: tuple[int, ...]  # tokens of `MOST_RANKS` ranks, in percent of the most
    routing: str
    seed: int


LOADS = st.builds(
    Load,
    fullness=st.tuples(*[st.sampled_from([0, 1, 30, 99, 100])] * MOST_RANKS),
    routing=st.sampled_from(["uniform", "zipf", "full", "masked", "all_masked"]),
    seed=st.integers(0, 2**32 - 1),
)


def inputs_of(case: Case, load: Load) -> Inputs:
    most = case.max_tokens_per_rank
    counts = [-(-most * percent // 100) for percent in load.fullness[: case.n_ranks]]
    # What is drawn follows from the name.
    named = replace(case, name=f"{case.name}/{load.seed}")
    return make_inputs(named, load.routing, counts=counts)


def add_graphs(module: Module) -> Groups:
    return Groups(None, "fuzz", drawn_cases(), module=module)


def assert_well(groups: Groups, load: Load) -> None:
    all_given = {name: inputs_of(case, load) for name, case in groups.cases.items()}
    got = groups.run(all_given)
    for name, case in groups.cases.items():
        where = f"MAX_EP_FUZZ_SEED={SEED}, {case}, {load}"
        assert_round_trip(where, got[name], expected(case, all_given[name]))


@seed(SEED)
@fuzzed
@given(load=LOADS)
# The ends of what can be drawn; what fails once is added, and runs every time.
@example(load=Load((0,) * 6, "uniform", seed=0))
@example(load=Load((100,) * 6, "full", seed=1))
@example(load=Load((100, 0, 100, 0, 100, 0), "all_masked", seed=2))
def test_any_load_is_the_oracles(added, load):
    """Whatever a run was given, the next one is right too: they share memory."""
    assert_well(added, load)
