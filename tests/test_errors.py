# SPDX-License-Identifier: Apache-2.0
"""What goes wrong when a group is set up, or a graph runs, is said, and harms once."""

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from cases import BF16, CASES, F32, Inputs, expected, expected_dispatch, make_inputs
from harness import (
    Groups,
    assert_dispatched,
    assert_round_trip,
    assert_same_bits,
    building,
    flatten,
    raises,
    run_in_child,
    take_outputs,
    to_buffer,
    to_numpy,
)
from max.driver import Buffer
from max.engine import InferenceSession, Model
from max.graph import Graph, Module
from processes import names_of
from test_refusals import (
    AS_SUMS,
    OF_F32,
    OF_FP8,
    ROWS,
    SUMS,
    SUMS_TWO,
    TWO,
    dispatch_all,
    ids_of,
    refused,
    tensor,
)
from test_refusals import building as building_of_types

from max_ep import (
    EPBatchManager,
    EPCommInitializer,
    call_ep_combine_wait,
    call_ep_dispatch_wait,
)

# -------------------------------------------------------------------- initializer


def test_model_inputs_need_memory(session):
    comm = EPCommInitializer(TWO.config())
    with raises(RuntimeError, "ep_init(session) first"):
        comm.model_inputs()
    for call in (comm.reset, comm.check):
        with raises(RuntimeError, "before ep_init; ep_init(session) first"):
            call()
    comm.close()  # nothing to free; harmless
    comm.ep_init(session)
    assert len(comm.model_inputs()) == 10
    with raises(RuntimeError, "ep_init; before; close() first"):
        comm.ep_init(session)
    comm.close()
    comm.close()
    with raises(RuntimeError, "ep_init(session) first; close()"):
        comm.model_inputs()
    with raises(RuntimeError, "before ep_init"):
        comm.reset()


def test_gpus_that_are_missing_are_named(session, monkeypatch):
    """Before anything is compiled: MAX's compiler would only say that it failed."""
    monkeypatch.setattr("max_ep.memory.initializer.accelerator_count", lambda: 0)
    with raises(ValueError, "needs 2 GPUs; shows 0; target='cpu'"):
        EPCommInitializer(TWO.config(target="gpu")).ep_init(session)


def test_balanced_experts_need_a_placement(session):
    balanced = dict(eplb_enabled=True, num_moe_layers=1)
    with EPCommInitializer(TWO.config(**balanced)) as comm:
        comm.ep_init(session)
        with raises(ValueError, "eplb_enabled=True; set_eplb_placement; phy2log_plan"):
            comm.model_inputs()


def test_several_processes_need_a_node_id(session, monkeypatch):
    monkeypatch.delenv("MAX_EP_NODE_ID", raising=False)
    config = TWO.config(n_gpus_per_node=1, n_nodes=2)
    with raises(ValueError, "node_id is -1; n_nodes=2; MAX_EP_NODE_ID"):
        EPCommInitializer(config).ep_init(session)
    for text in ("2", "-1", "one", ""):
        monkeypatch.setenv("MAX_EP_NODE_ID", text)
        with raises(ValueError, f"MAX_EP_NODE_ID={text} must be in [0, n_nodes=2)"):
            EPCommInitializer(config).ep_init(session)


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ({}, OF_F32),
        ({}, dict(combine_dtype=F32)),
        ({}, dict(hidden_size=96)),
        ({}, dict(top_k=2)),
        ({}, dict(n_experts=6)),
        ({}, dict(max_tokens_per_rank=8)),
        ({}, dict(n_nodes=4)),
        ({}, dict(n_gpus_per_node=2)),
        ({}, dict(protocol="by_rank")),
        (dict(protocol="by_rank"), AS_SUMS),
        (AS_SUMS, AS_SUMS | dict(partial_dtype=F32)),
        (OF_FP8 | dict(hidden_size=256), dict(hidden_size=256)),
        (
            OF_FP8 | dict(hidden_size=256),
            OF_FP8 | dict(hidden_size=256, fp8_power_of_two_scales=True),
        ),
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_processes_agree_on_all_that_matters(ours, theirs):
    """Fails if a field is not compared: a peer would read what is not there."""
    group = dict(n_gpus_per_node=1, n_nodes=2)
    ours, theirs = (
        EPCommInitializer(TWO.config(**(group | changes)))._fingerprint()
        for changes in (ours, theirs)
    )
    assert ours != theirs


def test_a_set_up_that_fails_leaves_nothing(session, monkeypatch):
    config = TWO.config(n_gpus_per_node=1, n_nodes=2, node_id=0)
    comm = EPCommInitializer(config, group="fails")
    comm._model = SimpleNamespace()  # the set-up graph, which does not run
    monkeypatch.setattr(comm, "_prepare_ranks", lambda **_: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            comm.ep_init(session)
        assert names_of("fails") == []


def test_a_peer_that_does_not_come_is_named(session):
    """After the configuration's time-out."""
    config = TWO.config(n_gpus_per_node=1, n_nodes=2, node_id=0, timeout_s=0.2)
    with raises(TimeoutError, "max_ep: node 0 waited 0.2 s for node 1; Start all 2"):
        EPCommInitializer(config, group="alone").ep_init(session)
    assert names_of("alone") == []


def test_the_set_up_graph_is_loaded_once_a_session(session, monkeypatch):
    """Loading takes seconds; one graph prepares groups of all sizes."""
    loaded = []
    load = session.load
    monkeypatch.setattr(session, "load", lambda g: loaded.append(g) or load(g))
    for name in ("one_rank", "fp8"):
        with EPCommInitializer(CASES[name].config()) as comm:
            comm.ep_init(session)
    assert len(loaded) <= 1


# ------------------------------------------------------------------- at run time


def loose_round_trip(manager, ranks):
    """A round trip whose tokens, ids and weights may differ in rows. Results of rank 0
    have as many rows as its tokens, of rank 1 as its weights."""
    for rank, x in enumerate(ranks):
        manager.ep_dispatch_async(x.tokens, x.ids, rank)
    got = [manager.ep_dispatch_wait(rank) for rank in range(2)]
    for rank in range(2):
        manager.ep_combine_async(got[rank][0], rank)
    weights = ranks[1].weights
    of_rank_1 = manager.atomic_counters[0][1], *manager._pointers(1)[1:]
    given = manager.config, weights.shape[0], weights, got[1][0]
    results = [
        manager.ep_combine_wait(ranks[0].weights, 0),
        call_ep_combine_wait(*of_rank_1, *given),
    ]
    return [[*got[r], manager._src_info[r], results[r]] for r in range(2)]


def build_receive(module: Module) -> None:
    """Adds the waits of dispatch only: what has arrived before an error."""
    manager = EPBatchManager(TWO.config())
    types = manager.input_types()
    with Graph("receive", input_types=types, module=module) as graph:
        manager.fetch_buffers(graph.inputs)
        pointers = manager._pointers(0)[1:]
        outputs = [
            call_ep_dispatch_wait(counter, *pointers, manager.config)
            for counter in manager.atomic_counters[0]
        ]
        graph.output(*(value for rank in outputs for value in rank))


def build_sums(module: Module) -> None:
    """Adds the three graphs of `Sums`."""
    for name in ("send", "dispatch"):
        started = building(f"sums_{name}", SUMS_TWO, SUMS, module, True)
        with started as (manager, ranks, graph):
            given = [x.tokens for x in ranks], [x.ids for x in ranks], [0, 1]
            weights = [x.weights for x in ranks]
            dispatched = manager.ep_dispatch_all(*given, router_weights=weights)
            rows = [d[0] for d in dispatched]
            if name == "send":
                for rank in range(2):
                    manager.ep_combine_async(rows[rank], rank)
            graph.output(*rows)
    manager = EPBatchManager(SUMS)
    types = [tensor(BF16, f"r{r}", 80) for r in range(2)]
    types += [ids_of(f"n{r}", 1) for r in range(2)]
    declared = [*types, *manager.input_types()]
    with Graph("sums_receive", input_types=declared, module=module) as graph:
        values = [value.tensor for value in graph.inputs[:4]]
        manager.fetch_buffers(graph.inputs[4:])
        pointers = manager._pointers(1)[1:]
        outputs = [
            call_ep_combine_wait(counter, *pointers, SUMS, n.shape[0], None, rows)
            for counter, rows, n in zip(
                manager.atomic_counters[0], values[:2], values[2:]
            )
        ]
        graph.output(*outputs)


def build_open(module: Module) -> None:
    """Adds dispatch of tokens and of ids whose number of columns is left open."""
    for what, types in (
        ("input_tokens", dict(tokens=tensor(BF16, "t", "h"))),
        ("topk_ids", dict(ids=ids_of("t", "k"))),
    ):
        with building_of_types(name=f"open_{what}", module=module, **types) as (
            manager,
            x,
        ):
            Graph.current.output(*(d[1] for d in dispatch_all(manager, x)))


def loose_groups(module: Module) -> Groups:
    how = dict(build=loose_round_trip, numbers_differ=True)
    return Groups(None, "loose", {"two": TWO}, module=module, **how)


def add_graphs(module: Module) -> Groups:
    """Adds all graphs of this file that run."""
    build_receive(module)
    build_sums(module)
    build_open(module)
    return loose_groups(module)


@pytest.fixture(scope="module")
def models(one_module: SimpleNamespace) -> dict[str, Model]:
    return one_module.models


@pytest.mark.parametrize("what, needed", [("input_tokens", "80"), ("topk_ids", "3")])
def test_sizes_that_must_not_be_open(session, models, what, needed):
    """A symbolic hidden size or top_k is refused when it differs. The kernels take both
    from the config: they would read beyond fewer columns."""
    n_columns = 40 if what == "input_tokens" else 80
    n_choices = 1 if what == "topk_ids" else 3
    arrays = [
        np.zeros((4, n_columns), np.uint16),
        np.tile(np.arange(n_choices, dtype=np.int32), (4, 1)),
        np.zeros((4, 3), np.float32),
        np.zeros((ROWS, 80), np.uint16),
    ]
    inputs = [to_buffer(array) for array in arrays]
    with EPCommInitializer(TWO.config()) as comm:
        comm.ep_init(session)
        with raises(ValueError, f"{what}; {needed}") as caught:
            models[f"open_{what}"].execute(*inputs, *comm.model_inputs())
        comm.reset()
    assert "dropped" not in str(caught.value), "it read beyond the ids"


class Loose:
    """`loose_round_trip` of `TWO`, whose memory stays as an error leaves it. `receive`
    runs the waits of dispatch only: it shows what has arrived."""

    def __init__(self, groups: Groups, receive: Model) -> None:
        self._model, self._receive = groups.model, receive
        self.comm = groups.comms["two"]

    def run(self, given: Inputs, buffers: list[Buffer] | None = None) -> list:
        buffers = self.comm.model_inputs() if buffers is None else buffers
        outputs = self._model.execute(*flatten(given), *buffers)
        return take_outputs(TWO, iter(outputs))

    def receive(self) -> list[SimpleNamespace]:
        outputs = iter(self._receive.execute(*self.comm.model_inputs()))
        names = "rows row_offsets expert_ids src_info".split()
        return [
            SimpleNamespace(**{name: to_numpy(next(outputs)) for name in names})
            for _ in range(TWO.n_ranks)
        ]

    def check_next_run(self) -> None:
        """After `reset` the same buffers are as good as new."""
        self.comm.reset()
        for routing in ("full", "uniform"):
            given = make_inputs(TWO, routing)
            got = self.run(given)
            assert_round_trip(f"after reset, {routing}", got, expected(TWO, given))


@pytest.fixture
def loose(added, models) -> Iterator[Loose]:
    """`Loose`, usable again after a test whatever happened in it."""
    made = Loose(added, models["receive"])
    yield made
    made.comm.reset()


@pytest.fixture
def given() -> Inputs:
    return make_inputs(TWO, "full")


def grow(given: Inputs, rank: int) -> None:
    for of_ranks in (given.tokens, given.ids, given.weights):
        of_ranks[rank] = np.concatenate([of_ranks[rank], of_ranks[rank][:1]])


BAD_IDS = [(rank, i) for rank in (0, 1) for i in (5, -2, 2**31 - 1, -(2**31))]
# What is done to the inputs, `g`, and words of the error. How many tokens rank 1 had is
# not known to its combine, but their rows are.
SPOILED = """
g.ids[0][:] = 4 | rank 0; 14 of 21; token 2; expert 4; distinct
grow(g, 0) | dispatch_async; rank 0; 8 tokens; max_tokens_per_rank is 7; reset()
grow(g, 1) | dispatch_async; rank 1; 8 tokens; max_tokens_per_rank is 7; reset()
g.ids[1] = g.ids[1][:5] | dispatch_async; rows; topk_ids; 5; 7
g.weights[0] = g.weights[0][:6] | combine_wait; router_weights; 6
g.weights[0] = g.weights[0][:0] | combine_wait; router_weights; 0
g.weights[1] = g.weights[1][:3] | combine_wait; router_weights; 3; 21 rows; only 9
g.weights[1] = g.weights[1][:0] | combine_wait; router_weights; 0; 21 rows; only 0
""" + "\n".join(
    f"g.ids[{rank}][[2, 4], [1, 0]] = {i} | dispatch_async; rank {rank}; token 2; k 1; "
    f"expert {i}; [-1, 5); 2 of 21; reset()"
    for rank, i in BAD_IDS
)


@refused(SPOILED)
def test_a_run_that_is_refused(loose, given, arguments, words):
    """It is said once, on a line that begins with the library's name."""
    exec(arguments, globals(), {"g": given})
    with raises(ValueError, words) as caught:
        loose.run(given)
    ours = [s for s in str(caught.value).splitlines() if s.startswith("max_ep: ")]
    assert len(ours) == 1, str(caught.value)
    loose.check_next_run()


def test_an_id_out_of_range_harms_no_other_token(loose, given):
    """All other choices arrive, as if the bad ones had been -1."""
    given.ids[1][[0, 3, 6], [2, 0, 1]] = [5, -7, 1_000_000]
    with raises(ValueError, "rank 1; token 0; k 2; 3 of 21"):
        loose.run(given)
    got = loose.receive()
    given.ids[1][[0, 3, 6], [2, 0, 1]] = -1
    assert_dispatched("after bad ids", got, expected_dispatch(TWO, given))
    loose.check_next_run()


def test_the_run_after_a_failed_one_names_reset(loose, given):
    """I3: nobody has read what rank 0 sent before it failed, so it may not send."""
    given.ids[0][0, 0] = 5
    with raises(ValueError, "rank 0"):
        loose.run(given)
    with raises(ValueError, "dispatch_async on rank 0; has read; reset()"):
        loose.run(make_inputs(TWO, "uniform"))
    loose.check_next_run()


def test_counters_that_nobody_set_up(loose, given):
    buffers = loose.comm.model_inputs()
    for rank in range(TWO.n_ranks):
        zeros = np.zeros(buffers[rank].shape[0], np.int32)
        buffers[rank] = Buffer.from_numpy(zeros)
    with raises(ValueError, "atomic_counters; not initialized; ep_init()"):
        loose.run(given, buffers)
    loose.check_next_run()


def test_run_after_close(loose, given, session):
    """Buffers kept from before `close` lead to an error, not to freed memory."""
    comm = EPCommInitializer(TWO.config())
    comm.ep_init(session)
    old = comm.model_inputs()
    want = expected(TWO, given)
    assert_round_trip("before close", loose.run(given, old), want)
    comm.close()
    with raises(ValueError, "symmetric memory; freed; close"):
        loose.run(given, old)
    comm.ep_init(session)
    with raises(ValueError, "freed"):
        loose.run(given, old)
    new = comm.model_inputs()
    assert_round_trip("after a second ep_init", loose.run(given, new), want)
    comm.close()


_OTHER_CONFIG = """
from test_errors import *
import sys
from max.driver import CPU as Host
session = InferenceSession(devices=[Host()])
models, groups = session.load_all(sys.argv[1]), loose_groups(Module())
groups.start(session, models["loose"])
loose = Loose(groups, models["receive"])
comm = EPCommInitializer(TWO.config(hidden_size=40))
comm.ep_init(session)
try:
    loose.run(make_inputs(TWO, "full"), comm.model_inputs())
except ValueError as error:
    print("refused:", error)
"""


def test_memory_of_another_config(one_module):
    """`model_inputs` of smaller buffers are refused, not overrun."""
    said = run_in_child(_OTHER_CONFIG, str(one_module.path))
    assert "refused:" in said and "belongs to another EPConfig" in said, said


class Sums:
    """Combine to sums of `TWO` in three graphs: whatever goes wrong, between them.
    `send` dispatches and sends the dispatched rows back, `dispatch` only dispatches,
    `receive` adds up."""

    def __init__(self, session: InferenceSession, models: dict[str, Model]) -> None:
        self._models = models
        self.comm = EPCommInitializer(SUMS)
        self.comm.ep_init(session)

    def _run(self, name: str, inputs: list[Buffer]) -> list[Buffer]:
        inputs = [*inputs, *self.comm.model_inputs()]
        return self._models[f"sums_{name}"].execute(*inputs)

    def send(self, given: Inputs, name: str = "send") -> list[Buffer]:
        """Returns the dispatched rows, which are the expert rows."""
        return self._run(name, flatten(given))

    def receive(self, rows: list[Buffer], n_tokens: list[int]) -> list[np.ndarray]:
        """Adds up for ranks that have so many tokens."""
        numbers = [to_buffer(np.zeros((n, 1), np.int32)) for n in n_tokens]
        return [to_numpy(x) for x in self._run("receive", [*rows, *numbers])]

    def check_next_run(self) -> None:
        """After `reset`, all is well; the test after it starts from there."""
        self.comm.reset()
        for routing in ("full", "masked", "uniform"):
            given = make_inputs(SUMS_TWO, routing)
            n_tokens = [len(t) for t in given.tokens]
            results = self.receive(self.send(given), n_tokens)
            for got, want in zip(results, expected(SUMS_TWO, given).combine):
                assert_same_bits(f"after reset, {routing}", got, want)
        self.comm.reset()


@pytest.fixture(scope="module")
def sums(session, models: dict[str, Model]) -> Iterator[Sums]:
    sums = Sums(session, models)
    yield sums
    sums.comm.close()


@pytest.mark.parametrize(
    "n_tokens, n_rows, words",
    [
        ([6, 7], 42, "combine_wait; rank 0; 6 tokens; 7 were dispatched; reset()"),
        ([7, 0], 42, "combine_wait; rank 1; 0 tokens; 7 were dispatched; reset()"),
        ([7, 7], 41, "combine_wait on rank 0; end at 42; holds 41"),
    ],
)
def test_sums_of_other_tokens_and_rows(sums, given, n_tokens, n_rows, words):
    rows = sums.send(given)
    assert rows[0].shape[0] == 42
    rows[0] = rows[0][:n_rows, :]
    with raises(ValueError, words):
        sums.receive(rows, n_tokens)
    sums.check_next_run()


def test_router_weights_of_other_tokens(sums, given):
    given.weights[1] = given.weights[1][:5]
    with raises(ValueError, "dispatch_async; rows of router_weights; 5; 7"):
        sums.send(given)
    sums.check_next_run()


def test_a_dispatch_between_async_and_wait_of_sums(sums, given):
    """The own rows would be looked for where those of the next dispatch are."""
    rows = sums.send(given)
    sums.send(given, "dispatch")
    words = "combine_async answered dispatch 1; last dispatch_wait was of 2"
    with raises(ValueError, f"combine_wait on rank 0; {words}; before the next one"):
        sums.receive(rows, [7, 7])
    sums.check_next_run()


@pytest.mark.parametrize("token_idx", [0, 6])
def test_a_lost_partial_sum_is_not_summed_as_nothing(sums, given, token_idx):
    """The flag of one partial on rank 0 is what it was before generation 1."""
    given.ids[0][:] = [0, 3, 4]  # one row on rank 0, two on rank 1
    rows = sums.send(given)
    recv = sums.comm.model_inputs()[-3].to_numpy()[0]
    msg_bytes = SUMS.sizes().combine_msg_bytes
    partial = (1 * SUMS.max_tokens_per_rank + token_idx) * msg_bytes
    flag = ctypes.c_uint64.from_address(int(recv) + partial + msg_bytes - 16)
    assert flag.value == 1 << 32 | 2, "generation 1, two rows"
    flag.value = 0
    with raises(ValueError, "combine_wait on rank 0; 21 rows; sums of 19"):
        sums.receive(rows, [7, 7])
    sums.check_next_run()
