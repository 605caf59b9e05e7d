# SPDX-License-Identifier: Apache-2.0
"""What `test_fuzz.py` draws: groups, what their ranks are given, and configurations.

All is drawn from one number, `SEED`: a failure names it, and with it the same is drawn
again. `make fuzz` takes another one each time.
"""

import os
from dataclasses import dataclass, replace

import numpy as np
from cases import BF16, F32, Case, Inputs, input_scales, narrow
from hypothesis import strategies as st
from max.dtype import DType

from max_ep import blockwise_fp8_quant_config
from max_ep.limits import PROTOCOLS

# Its first three groups have both protocols, both modes of combine, FP8 and a shared
# expert, padded rows, and few ranks.
SEED = int(os.environ.get("MAX_EP_FUZZ_SEED", "542"))
N_EXAMPLES = int(os.environ.get("MAX_EP_FUZZ_EXAMPLES", "40"))
N_CASES = int(os.environ.get("MAX_EP_FUZZ_CASES", "3"))
"""Groups that are compiled, into one graph; about ten seconds each."""

MOST_RANKS = 6


def drawn_cases(seed: int, n: int) -> dict[str, Case]:
    """Draws groups that a configuration accepts."""
    rng = np.random.default_rng(seed)
    cases: dict[str, Case] = {}
    while len(cases) < n:
        case = _drawn_case(rng, f"fuzz_{seed}_{len(cases)}")
        try:
            case.config()
        except ValueError:
            continue  # `test_any_configuration` looks at these.
        cases[case.name] = case
    return cases


def _drawn_case(rng: np.random.Generator, name: str) -> Case:
    wire = str(rng.choice(["bfloat16", "bfloat16", "float32", "fp8", "fp8_pow2"]))
    tokens = F32 if wire == "float32" or rng.random() < 0.2 else BF16
    wire = "float32" if wire == "bfloat16" and tokens == F32 else wire
    step = 128 if wire.startswith("fp8") else 16 // tokens.size_in_bytes
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
        fused_shared_expert=bool(rng.random() < 0.25),
        protocol=str(rng.choice(PROTOCOLS)),
        combine_mode=["rows", "sums"][rng.integers(2)],
        partial_dtype=[None, BF16, F32][rng.integers(3)],
    )
    if case.combine_mode == "rows":
        case = replace(case, partial_dtype=None)
    if case.protocol != "by_expert" or case.fused_shared_expert:
        case = replace(case, scales=None)
    return case


@dataclass(frozen=True)
class Load:
    """What one run gives to every rank of every group."""

    fullness: tuple[int, ...]
    """Tokens of each of `MOST_RANKS` ranks, in percent of the most."""
    masked: int
    """Choices that are -1, in percent."""
    n_more_experts: int
    """Tokens choose among the first `top_k` experts and so many more."""
    seed: int
    """Of tokens, choices and weights."""


LOADS = st.builds(
    Load,
    fullness=st.tuples(*[st.sampled_from([0, 1, 30, 99, 100])] * MOST_RANKS),
    masked=st.sampled_from([0, 0, 10, 60, 100]),
    n_more_experts=st.sampled_from([0, 1, 40]),
    seed=st.integers(0, 2**32 - 1),
)


def inputs_of(case: Case, load: Load) -> Inputs:
    """Makes what the ranks of a group are given."""
    rng = np.random.default_rng([load.seed, case.n_ranks, case.hidden_size])
    counts = [
        -(-case.max_tokens_per_rank * percent // 100)
        for percent in load.fullness[: case.n_ranks]
    ]
    n_choosable = min(case.n_experts, case.top_k + load.n_more_experts)
    ids = []
    for n in counts:
        all_ids = np.tile(np.arange(n_choosable, dtype=np.int32), (n, 1))
        chosen = rng.permuted(all_ids, axis=1)[:, : case.top_k].copy()
        chosen[rng.random(chosen.shape) < load.masked / 100] = -1
        ids.append(chosen)
    scales = input_scales(case, rng)
    rows = None
    if not case.sends_rows_back:
        shape = (*case.rows_shape, case.hidden_size)
        rows = [_values(rng, shape, case.combine) for _ in counts]
    return Inputs(
        tokens=[_values(rng, (n, case.hidden_size), case.tokens) for n in counts],
        ids=ids,
        weights=[rng.normal(size=(n, case.top_k)).astype(np.float32) for n in counts],
        input_scales=scales,
        expert_rows=rows,
    )


def _values(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: DType
) -> np.ndarray:
    """Draws numbers of very different magnitude, zeros of both signs among them."""
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-6, 6, (*shape[:-1], 1))
    x[rng.random(shape) < 0.05] *= 0.0
    return narrow(x.astype(np.float32), dtype)


_DTYPES = [BF16, F32, DType.float16, DType.float8_e4m3fn, DType.int32]
_PLAIN = dict(
    dispatch_dtype=BF16,
    combine_dtype=BF16,
    hidden_size=128,
    top_k=2,
    n_experts=8,
    max_tokens_per_rank=7,
    n_gpus_per_node=2,
    n_nodes=1,
    target="cpu",
)
_CHANGES: dict[str, list] = dict(
    dispatch_dtype=_DTYPES,
    combine_dtype=_DTYPES,
    hidden_size=[-8, 0, 1, 8, 80, 100, 128, 384, 1 << 20],
    top_k=[-1, 0, 1, 2, 8, 32, 33, 1000],
    n_experts=[-1, 0, 1, 2, 7, 8, 40, 256, 70000],
    max_tokens_per_rank=[-1, 0, 1, 7, 128, 4096, 65535, 65536],
    n_gpus_per_node=[-1, 0, 1, 2, 3, 4, 8, 64],
    n_nodes=[-1, 0, 1, 2],
    target=["cpu", "gpu", "tpu"],
    node_id=[-2, -1, 0, 1],
    dispatch_quant_config=[blockwise_fp8_quant_config()],
    fp8_power_of_two_scales=[False, True],
    output_layout=["packed", "padded", "loose"],
    fused_shared_expert=[False, True],
    protocol=[*PROTOCOLS, "auto", "by_node"],
    combine_mode=["rows", "sums", "none"],
    partial_dtype=[None, *_DTYPES],
    ranks_per_gpu=[-1, 0, 1, 2, 4],
    n_sms=[-1, 0, 1, 64],
    timeout_s=[-1.0, 0.0, 0.001, 1.0, 1e9],
)


@st.composite
def configurations(draw: st.DrawFn) -> dict:
    """Draws arguments of `EPConfig`: plain ones, of which up to four are changed."""
    names = draw(st.lists(st.sampled_from(list(_CHANGES)), max_size=4, unique=True))
    return _PLAIN | {name: draw(st.sampled_from(_CHANGES[name])) for name in names}
