# SPDX-License-Identifier: Apache-2.0
"""Groups, loads and configurations that nobody thought of, against the oracle.

What is drawn follows from `MAX_EP_FUZZ_SEED`; a failure shows it, the group and the
load. `make fuzz` draws others than CI. What has once failed is in `CORPUS` and runs
every time.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from cases import BF16, Case, expected
from fuzzing import (
    LOADS,
    N_CASES,
    N_EXAMPLES,
    SEED,
    Load,
    configurations,
    drawn_cases,
    inputs_of,
)
from harness import Groups, assert_round_trip, input_types, round_trip, take_inputs
from hypothesis import assume, example, given, seed, settings
from hypothesis import strategies as st
from max.graph import Graph, Module

from max_ep import EPBatchManager, EPConfig

fuzzed = settings(
    max_examples=N_EXAMPLES, deadline=None, database=None, print_blob=True
)


def add_graphs(module: Module) -> Groups:
    """Adds groups that are drawn, in one graph."""
    return Groups(None, "fuzz", drawn_cases(SEED, N_CASES), module=module)


@pytest.fixture(scope="module")
def groups(session, one_module: SimpleNamespace) -> Iterator[Groups]:
    """Those groups, compiled."""
    print(f"MAX_EP_FUZZ_SEED={SEED}")
    made = one_module.added[__name__]
    made.start(session, one_module.models["fuzz"])
    yield made
    made.close()


def assert_well(groups: Groups, load: Load) -> None:
    given_inputs = {name: inputs_of(case, load) for name, case in groups.cases.items()}
    got = groups.run(given_inputs)
    for name, case in groups.cases.items():
        where = f"MAX_EP_FUZZ_SEED={SEED}, {case}, {load}"
        assert_round_trip(where, got[name], expected(case, given_inputs[name]))


# Nothing that was drawn has failed yet; these are the ends of what can be drawn.
CORPUS = [
    Load((0,) * 6, masked=0, n_more_experts=0, seed=0),
    Load((100,) * 6, masked=0, n_more_experts=0, seed=1),
    Load((100, 0, 100, 0, 100, 0), masked=100, n_more_experts=40, seed=2),
]


def with_corpus(test: Callable) -> Callable:
    """Lets a test of a load run with those of the corpus as well."""
    for load in CORPUS:
        test = example(load=load)(test)
    return test


@seed(SEED)
@fuzzed
@given(load=LOADS)
@with_corpus
def test_any_load_is_the_oracles(groups, load):
    """Whatever a run was given, the next one is right too: they share memory."""
    assert_well(groups, load)


@seed(SEED)
@fuzzed
@given(load=LOADS, data=st.data())
def test_a_bad_id_harms_one_run(groups, load, data):
    """It is named, and after a reset (`Groups.run`) the next run is right."""
    all_given = {name: inputs_of(case, load) for name, case in groups.cases.items()}
    name = data.draw(st.sampled_from(sorted(groups.cases)))
    case = groups.cases[name]
    rank = data.draw(st.integers(0, case.n_ranks - 1))
    ids = all_given[name].ids[rank]
    assume(len(ids))
    token = data.draw(st.integers(0, len(ids) - 1))
    k = data.draw(st.integers(0, case.top_k - 1))
    too_large = st.integers(case.n_experts, 2**31 - 1)
    ids[token, k] = bad = data.draw(st.integers(-(2**31), -2) | too_large)
    with pytest.raises(Exception, match=f"token {token}, k {k}: expert {bad}\\b"):
        groups.run(all_given)
    assert_well(groups, load)


@seed(SEED)
@settings(fuzzed, max_examples=4 * N_EXAMPLES)
@given(arguments=configurations())
def test_any_configuration(arguments):
    """It is refused in words that name an argument, or a graph can be built."""
    try:
        config = EPConfig(**arguments)
    except (ValueError, TypeError) as error:
        assert any(name in str(error) for name in arguments), (arguments, error)
        return
    if config.n_nodes == 1:  # else the graph needs a node_id
        build(config)


def build(config: EPConfig) -> None:
    """Builds a round trip of all ranks."""
    case = Case(
        "any",
        config.n_gpus_per_node,
        config.n_experts,
        config.top_k,
        config.hidden_size,
        config.max_tokens_per_rank,
        "fp8" if config.is_quantized else "as it is",
        BF16 if config.is_quantized else config.dispatch_dtype,
        config.combine_dtype,
        output_layout=config.output_layout,
        fused_shared_expert=config.fused_shared_expert,
    )
    manager = EPBatchManager(config)
    types = [*input_types(case, config=config), *manager.input_types()]
    with Graph("any", input_types=types) as graph:
        values = iter(graph.inputs)
        ranks = take_inputs(case, values)
        manager.fetch_buffers(list(values))
        graph.output(*(v for rank in round_trip(manager, ranks) for v in rank))
