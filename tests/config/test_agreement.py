# SPDX-License-Identifier: Apache-2.0
"""What a group agrees on: each field of `EPConfig`, and of a PyTorch library's key."""

import dataclasses
import re

import pytest

from max_ep import (
    AllGatherTokenDispatcher,
    EPCommInitializer,
    EPConfig,
    mxfp4_quant_config,
    mxfp8_quant_config,
)
from max_ep.agreement import MAY_DIFFER
from max_ep.graph.ops import group_of_ops
from max_ep.processes.meeting import differing
from max_ep.torch.library import Settings
from tests.children import ROOT
from tests.config.test_config import (
    AS_SUMS,
    BALANCED,
    OF_FP8,
    OF_NVFP4,
    PLANNED,
    QUANT,
    REFUSED_FIELD,
    TWO,
)
from tests.errors import raises
from tests.oracle.cases import F32

WIDE_FP8 = OF_FP8 | dict(hidden_size=384)
WIDE_SUMS = AS_SUMS | dict(hidden_size=384)
QUANTIZED_SUMS = WIDE_SUMS | dict(combine_quant_config=QUANT)
OTHER_PLAN = [[0, 1, 2, 3, 0], [0, 1, 2, 3, 1]]
MXFP8, MXFP4 = mxfp8_quant_config(), mxfp4_quant_config()

# For each field what a process has, and what another has in the field.
DIFFERENCES = dict(
    dispatch_dtype=[({}, F32)],
    combine_dtype=[({}, F32)],
    hidden_size=[({}, 96)],
    top_k=[({}, 2)],
    n_experts=[({}, 6)],
    max_tokens_per_rank=[({}, 8)],
    n_gpus_per_node=[({}, 2)],
    n_nodes=[({}, 4)],
    node_id=[(dict(node_id=0), 1)],
    dispatch_quant_config=[(WIDE_FP8, MXFP8), (OF_NVFP4, MXFP4)],
    nvfp4_dyn_global_scales=[(OF_NVFP4, True)],
    fused_shared_expert=[({}, True)],
    fuse_ffn_combine_send=[({}, True)],
    moe_dim=[({}, 64)],
    use_allreduce=[(dict(n_nodes=1, n_gpus_per_node=2, n_experts=6), True)],
    max_batch_size=[({}, 8)],
    eplb_enabled=[(BALANCED | dict(eplb_enabled=False), True)],
    num_moe_layers=[(BALANCED, 3)],
    max_replicas=[(BALANCED, 3)],
    eplb_phy2log_plan=[(BALANCED, OTHER_PLAN), (BALANCED | PLANNED, OTHER_PLAN)],
    num_logical_experts=[(BALANCED, 3)],
    target=[({}, "gpu")],
    protocol=[({}, "by_rank")],
    combine_mode=[(dict(protocol="by_rank"), "sums")],
    combine_quant_config=[(WIDE_SUMS, QUANT), (QUANTIZED_SUMS, MXFP8)],
    partial_dtype=[(AS_SUMS, F32)],
    timeout_s=[({}, 5)],
    start_timeout_s=[({}, 5)],
    on_timeout=[({}, "mask")],
    fp8_power_of_two_scales=[(WIDE_FP8, True)],
    ranks_per_gpu=[(dict(n_gpus_per_node=2), 2)],
    n_sms=[({}, 3)],
    output_layout=[({}, "padded")],
    max_output_rows=[({}, 9), (dict(max_output_rows=9), 17)],
    scale_layout=[(WIDE_FP8, "rows")],
    tokens_are_quantized=[(WIDE_FP8, True)],
    hierarchical=[(dict(protocol="by_rank", combine_mode="sums"), True)],
    router_top_k=["all-gather"],
)


def pair_of(field: str, how) -> tuple[EPConfig, EPConfig]:
    """Makes two configurations that differ in one field."""
    if how == "all-gather":
        one = AllGatherTokenDispatcher(80, 3, 7, 1, 2, target="cpu").config
        return one, dataclasses.replace(one, router_top_k=4)
    changes, value = how
    one = TWO.config(**(dict(n_gpus_per_node=1, n_nodes=2) | changes))
    return one, dataclasses.replace(one, **{field: value})


def words_of(config: EPConfig) -> list[str]:
    return EPCommInitializer(config)._fingerprint().split(", ")


def test_each_field_has_its_place():
    """Fails for a new field that is not in the table above."""
    names = {field.name for field in dataclasses.fields(EPConfig)}
    assert {*DIFFERENCES, REFUSED_FIELD} == names
    assert set(MAY_DIFFER) < names and all(MAY_DIFFER.values())


def test_the_guide_lists_what_may_differ():
    page = (ROOT / "docs/from_max.md").read_text()
    table = page.partition("These fields may differ:")[2].partition("`EPConfig.eplb")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.M)) == MAY_DIFFER


@pytest.mark.parametrize("field", DIFFERENCES)
def test_fields_are_compared_or_may_differ(field):
    """With what is not compared, ops and memory are the same, but for their speed."""
    for how in DIFFERENCES[field]:
        one, other = pair_of(field, how)
        theirs, own = differing(*(", ".join(words_of(c)) for c in (one, other)))
        if field not in MAY_DIFFER:
            for said in (theirs, own):
                assert any(word.startswith(f"{field}=") for word in said.split(", "))
            continue
        assert not theirs + own
        without = {f"n_sms={c.n_sms}" for c in (one, other)}
        words = [[w for w in group_of_ops(c) if w not in without] for c in (one, other)]
        assert words[0] == words[1] and one.token_format == other.token_format


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Settings)])
def test_ranks_of_pytorch_compare_all_that_a_library_is_built_for(field):
    """In the words of its callers. Fails if a field is left out of either text."""
    sizes = dict(hidden=64, combine_hidden=64, experts=4, ranks=2, top_k=2, tokens=8)
    for is_low_latency in (False, True):
        how = dict(target="cpu", format="fp8", combine="bfloat16")
        one = Settings(**sizes, **how, wide_ids=is_low_latency)
        value = getattr(one, field)
        other = not value if isinstance(value, bool) else f"{value}1"
        two = dataclasses.replace(one, **{field: other})
        assert one.facts() != two.facts() and one.name() != two.name()
        assert str(other) in two.facts()
    theirs, own = differing(one.facts(), dataclasses.replace(one, tokens=9).facts())
    assert theirs == "num_max_dispatch_tokens_per_rank=8"
    assert own == "num_max_dispatch_tokens_per_rank=9"


def test_formats_are_named_as_users_know_them():
    one, other = pair_of("dispatch_quant_config", (WIDE_FP8, MXFP8))
    assert "dispatch_quant_config=fp8" in words_of(one)
    assert "dispatch_quant_config=mxfp8" in words_of(other)
    plans = [
        pair_of("eplb_phy2log_plan", (BALANCED | PLANNED, p))
        for p in (PLANNED["eplb_phy2log_plan"], OTHER_PLAN)
    ]
    assert words_of(plans[0][0]) == words_of(plans[0][1]) != words_of(plans[1][1])


def test_other_sources_are_refused(monkeypatch):
    """Another version may have another layout."""
    config = TWO.config()
    before = words_of(config)
    monkeypatch.setattr("max_ep.agreement.sources_hash", lambda: "0" * 16)
    assert differing(", ".join(before), ", ".join(words_of(config)))[1] == (
        "sources_hash=" + "0" * 16
    )


def test_a_value_that_has_no_words_is_refused():
    config = TWO.config()
    config.partial_dtype = 1.5
    with raises(TypeError, "EPConfig.partial_dtype is a float; say how it compares"):
        words_of(config)
