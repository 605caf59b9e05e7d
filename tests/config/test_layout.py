# SPDX-License-Identifier: Apache-2.0
"""Sizes of which Python asks Mojo, and constants that both have.

`mojo/places.mojo` walks through the picture in `layout.mojo`, place by place.
"""

from dataclasses import replace

import numpy as np
import pytest
from max.dtype import DType

from max_ep import (
    estimate_ep_memory_usage,
    formats,
    limits,
    quantize,
)
from max_ep.config.protocol import least_region_bytes
from tests.codegen.kernels import mojo_constant
from tests.oracle.cases import BY_RANK_CASES, CASES, LARGE_CASES, SUMS_CASES, Case

# ------------------------------------------------------------------- constants


FP8_SOURCE = "max_ep/formats/blockwise_fp8.mojo"
EXPERTS_SOURCE = "max_ep_experts/fp8.mojo"


@pytest.mark.parametrize(
    "value, name, path",
    [
        (limits.MAX_TOP_K, "MAX_TOP_K", "max_ep/protocol/layout.mojo"),
        (limits.MAX_RANKS, "MAX_RANKS", "max_ep/protocol/layout.mojo"),
        (limits.TOKEN_ALIGN_BYTES, "MESSAGE_ALIGN", "max_ep/protocol/layout.mojo"),
        (limits.MAX_EXPERTS, "MAX_EXPERTS", "max_ep/protocol/layout.mojo"),
        (limits.METADATA_BYTES / 2, "ENTRY_BYTES", "max_ep/protocol/layout.mojo"),
        (limits.SOURCE_INFO_BYTES, "SOURCE_INFO_BYTES", "max_ep/protocol/layout.mojo"),
        (limits.FP8_BLOCK, "FP8_BLOCK", FP8_SOURCE),
        (quantize.FP8_MAX, "FP8_MAX", "max_ep/formats/casts.mojo"),
        (quantize.FP8_MIN_AMAX, "FP8_MIN_AMAX", FP8_SOURCE),
        # The experts' matmul quantizes as dispatch does.
        (limits.FP8_BLOCK, "BLOCK", EXPERTS_SOURCE),
        (quantize.FP8_MAX, "FP8_MAX", EXPERTS_SOURCE),
        (quantize.FP8_MIN_AMAX, "FP8_MIN_AMAX", EXPERTS_SOURCE),
        (limits.FP8_COLUMNS, "BN", "max_ep_experts/tiles.mojo"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_python_and_mojo_agree(value, name, path):
    assert np.float32(value) == np.float32(mojo_constant(name, path))


def test_entries_hold_what_the_config_lets_through():
    bits = mojo_constant("ENTRY_FIELD_BITS", "max_ep/protocol/entries.mojo")
    assert limits.MAX_OF_ENTRY == 2**bits - 1


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def test_sizes_that_python_uses():
    for case in (CASES | LARGE_CASES | BY_RANK_CASES | SUMS_CASES).values():
        config = case.config()
        assert config.n_local_experts == case.n_local_experts
        assert config.sizes().n_local_experts == case.n_local_experts
        assert config.get_max_recv_tokens() == case.max_rows
        # MAX's function of this name has no protocol, so ours answers for "auto".
        if case.token_format == formats.format_of(case.token_format.dtype):
            rows = dict(combine_mode="rows", partial_dtype=None)
            auto = case.config(protocol="auto", combine_quant_config=None, **rows)
            assert estimate(case) == auto.estimate_memory_usage()


def test_memory_is_bounded_by_what_config_counts():
    """Fails if most of a region is something that `least_region_bytes` leaves out: it
    could overflow unseen."""
    for case in (CASES | LARGE_CASES | BY_RANK_CASES | SUMS_CASES).values():
        for masks in (dict(), dict(on_timeout="mask")):
            config = case.config(**masks)
            least = least_region_bytes(config, config.protocol)
            n_places = config.n_experts + config.n_ranks * (3 + config.top_k)
            more = 2 * least + 512 * config.max_tokens_per_rank * n_places
            assert least < config.sizes().region_bytes < more + 2**15


@pytest.mark.parametrize(
    "changes",
    [
        dict(hidden_size=67106816, n_experts=2**20, top_k=32, n_gpus_per_node=128),
        dict(max_tokens_per_rank=67108864, hidden_size=2**18, top_k=2),
        dict(
            max_tokens_per_rank=65535,
            hidden_size=2**18,
            n_experts=65535,
            top_k=32,
            n_gpus_per_node=128,
            protocol="by_rank",
            combine_mode="sums",
            on_timeout="mask",
        ),
    ],
)
def test_the_largest_sizes_do_not_wrap(changes):
    """What `check_memory` just lets through: twice as much is refused, or is more than
    an entry holds."""
    sizes = dict(hidden_size=8, n_experts=2, max_tokens_per_rank=1) | changes
    config = CASES["two_ranks"].config(**sizes)
    found, least = config.sizes(), least_region_bytes(config, config.protocol)
    assert 2**42 < least < found.region_bytes < 2 * least < 2**49
    assert all(n >= 0 for n in vars(found).values() if isinstance(n, int))
    for kind in found.gpu + found.cpu:
        assert min(n for n in vars(kind).values() if isinstance(n, int)) >= -1
    field = next(iter(changes))
    with pytest.raises(ValueError, match=f"{field}.*(is too large|at most 65535)"):
        CASES["two_ranks"].config(**(sizes | {field: 2 * sizes[field]}))


def estimate(case: Case, **changes: object) -> int:
    names = "hidden_size dispatch_dtype combine_dtype max_tokens_per_rank n_experts"
    names += " n_nodes n_gpus_per_node top_k"
    config = case.config()
    given = {name: getattr(config, name) for name in names.split()}
    return estimate_ep_memory_usage(**(given | changes))


def test_memory_estimate_refuses_what_config_does():
    six = CASES["two_ranks"], dict(n_experts=6)
    assert estimate(six[0], use_allreduce=True, **six[1]) < estimate(six[0], **six[1])
    with pytest.raises(ValueError, match="dispatch_element_dtype.*float4_e2m1fn"):
        dtype = DType.float4_e2m1fn
        estimate(CASES["two_ranks"], dispatch_element_dtype=dtype)
    packed = dict(dispatch_dtype=DType.uint8, dispatch_element_dtype=dtype)
    case = CASES["nvfp4_scaled_each"]
    want = case.config(protocol="auto").estimate_memory_usage()
    assert estimate(case, **packed) == want


@pytest.mark.parametrize(
    "waits, target, n_gpus_per_node, more",
    [
        (False, "cpu", 1, {}),
        (False, "cpu", 4, {}),
        (True, "cpu", 1, {"n_nodes": 4}),
        # Its own blocks wait for each other in the fused forms.
        (True, "gpu", 1, {}),
        (True, "gpu", 4, {}),
        (False, "gpu", 4, {"ranks_per_gpu": 4}),
        (True, "gpu", 4, {"ranks_per_gpu": 2}),
    ],
)
def test_there_is_time_where_a_wait_can_be_met_later(
    waits, target, n_gpus_per_node, more
):
    given = {"target": target, "n_gpus_per_node": n_gpus_per_node, **more}
    config = CASES["one_rank"].config(timeout_s=2, **given)
    assert config.timeout_ms == (2000 if waits else 0)


def test_counters_hold_every_pair():
    """Two words a pair, of up to `n_experts + MAX_RANKS`; then experts of two
    dispatches and slots of one, for each choice."""
    header = mojo_constant("N_HEADER_WORDS", "max_ep/protocol/counters.mojo")
    case = CASES["two_ranks"]
    of_pairs = 2 * (case.n_experts + mojo_constant("MAX_RANKS") + 1)
    n_choices = case.max_tokens_per_rank * case.top_k
    # Last, rows found of each token, and dropped of each local expert.
    n_last = case.max_tokens_per_rank + case.n_local_experts
    assert case.config().sizes().counters_words == (
        header + of_pairs + 3 * n_choices + n_last
    )
    # Sums: of each rank its tokens, and a row and a weight a choice.
    sums = case.config(combine_mode="sums", protocol="auto").sizes()
    assert sums.counters_words == case.config().sizes().counters_words + (
        case.n_ranks * (1 + 2 * n_choices)
    )
    # Masks: a word a rank, and one; then 64 bits for each pair, and two for each rank.
    # Rows have places of their own for each owner.
    masks = case.config(on_timeout="mask").sizes()
    plain = case.config().sizes()
    assert masks.masked_word == plain.counters_words - n_last
    decided = up(masks.masked_word + case.n_ranks + 1, 2)
    n_pairs = case.n_local_experts * case.n_ranks
    assert masks.counters_words == decided + 2 * (n_pairs + 2 * case.n_ranks) + n_last
    assert masks.combine_recv_bytes == case.n_ranks * plain.combine_recv_bytes
    assert masks.dispatch_counts_bytes == plain.dispatch_counts_bytes + 8 * case.n_ranks
    alone = replace(case, n_ranks=1, n_experts=case.n_local_experts)
    assert alone.config(on_timeout="mask").sizes() == alone.config().sizes()
