# SPDX-License-Identifier: Apache-2.0
"""What goes wrong when a group is set up, or a graph runs, is said, and harms once."""

import ctypes
import functools
import os
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from max.driver import Buffer

from max_ep import AllGatherTokenDispatcher, EPCommInitializer
from max_ep.memory.local_ranks import LocalRanks
from tests.children import names_of
from tests.config.test_config import AS_SUMS, OF_F32, OF_FP8, OF_NVFP4, TWO
from tests.errors import raises, refused
from tests.harness import to_buffer, to_numpy
from tests.oracle.cases import F32
from tests.oracle.drawn import Inputs, make_inputs
from tests.oracle.oracle import expected_dispatch
from tests.processes import process_graphs
from tests.processes.generations import PHASED, check_dispatched
from tests.processes.in_turn import Group

pytestmark = pytest.mark.usefixtures("graphs")  # they have the set-up, too
add_process_graphs = process_graphs.add_process_graphs

# -------------------------------------------------------------------- initializer


def test_model_inputs_need_memory(session):
    comm = EPCommInitializer(TWO.config())
    with raises(RuntimeError, "ep_init(session) first"):
        comm.model_inputs()
    for call in (comm.reset, comm.check):
        with raises(RuntimeError, "before ep_init; ep_init(session) first"):
            call()
    comm.close()  # nothing to free; harmless
    with raises(TypeError, "session is a NoneType; pass an InferenceSession"):
        comm.ep_init(None)
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


def test_several_processes_need_a_node_id(session, monkeypatch):
    monkeypatch.delenv("MAX_EP_NODE_ID", raising=False)
    config = TWO.config(n_gpus_per_node=1, n_nodes=2)
    with raises(ValueError, "node_id is -1; n_nodes=2; MAX_EP_NODE_ID"):
        EPCommInitializer(config).ep_init(session)
    for text in ("2", "-1", "one", ""):
        monkeypatch.setenv("MAX_EP_NODE_ID", text)
        with raises(ValueError, f"MAX_EP_NODE_ID={text} must be in [0, n_nodes=2)"):
            EPCommInitializer(config).ep_init(session)


def test_gpu_processes_take_their_group_from_the_environment(monkeypatch):
    monkeypatch.delenv("MAX_EP_GROUP", raising=False)
    config = TWO.config(target="gpu", n_gpus_per_node=1, n_nodes=2)
    with raises(ValueError, "group='mine'; MAX_EP_GROUP; SHMEM, which has no groups"):
        EPCommInitializer(config, group="mine")
    monkeypatch.setenv("MAX_EP_GROUP", "mine")
    EPCommInitializer(config, group="mine")


def test_processes_agree_on_all_that_matters():
    """Fails if a field is not compared: a peer would read what is not there."""
    wide = dict(hidden_size=256)
    differ = [
        *({}, OF_F32, dict(combine_dtype=F32), dict(hidden_size=96), dict(top_k=2)),
        *(dict(n_experts=6), dict(max_tokens_per_rank=8), dict(n_nodes=4), wide),
        *(dict(n_gpus_per_node=2), dict(protocol="by_rank"), AS_SUMS),
        *(AS_SUMS | dict(partial_dtype=F32), OF_FP8 | wide),
        AS_SUMS | dict(partial_dtype=F32, combine_dtype=F32),
        OF_FP8 | wide | dict(fp8_power_of_two_scales=True),
        OF_FP8 | wide | dict(tokens_are_quantized=True),
        *(OF_NVFP4, OF_NVFP4 | dict(nvfp4_dyn_global_scales=True)),
        dict(on_timeout="mask"),
    ]
    group = dict(n_gpus_per_node=1, n_nodes=2)
    configs = [TWO.config(**(group | changes)) for changes in differ]
    gather = functools.partial(AllGatherTokenDispatcher, 80, target="cpu", **group)
    configs += [gather(top_k, max_tokens_per_rank=7).config for top_k in (3, 4)]
    found = {EPCommInitializer(config)._fingerprint() for config in configs}
    assert len(found) == len(configs)


@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
def test_a_peer_that_does_not_come_is_named(session, on_timeout):
    """After the configuration's time-out for the start. Nothing is left."""
    two = dict(n_gpus_per_node=1, n_nodes=2, node_id=0)
    config = TWO.config(**two, start_timeout_s=0.2, on_timeout=on_timeout)
    group = f"alone-{os.getpid()}"
    with raises(TimeoutError, "max_ep: node 0 waited 0.2 s for nodes [1]; Start all 2"):
        EPCommInitializer(config, group=group).ep_init(session)
    assert names_of(group) == []


def test_a_set_up_that_fails_leaves_nothing(session, monkeypatch):
    config = TWO.config(n_gpus_per_node=1, n_nodes=2, node_id=0)
    group = f"fails-{os.getpid()}"
    comm = EPCommInitializer(config, group=group)
    monkeypatch.setattr(LocalRanks, "prepare", lambda *_, **__: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            comm.ep_init(session, setup=SimpleNamespace())  # which does not run
        assert names_of(group) == []


# ------------------------------------------------------------------- at run time
# Four ranks with 4, 4, 4 and 2 experts, top_k 4, 32 tokens each; all choose experts 0
# to 3. They run one after another, phase by phase.


@pytest.fixture
def group(groups: dict[str, Group]) -> Iterator[Group]:
    """By expert; usable again after a test whatever happened in it."""
    yield groups["small"]
    groups["small"].comm.reset()


@pytest.fixture
def sums(groups: dict[str, Group]) -> Iterator[Group]:
    yield groups["small_sums"]
    groups["small_sums"].comm.reset()


@pytest.fixture
def given() -> Inputs:
    return make_inputs(PHASED["small"], "full")


def grow(given: Inputs, rank: int) -> None:
    for of_ranks in (given.tokens, given.ids, given.weights):
        of_ranks[rank] = np.concatenate([of_ranks[rank], of_ranks[rank][:1]])


BAD_IDS = [(rank, i) for rank in (0, 1) for i in (14, -2, 2**31 - 1, -(2**31))]
# What is done to the inputs, `g`, and words of the error. The kernels take sizes from
# the config: they would read beyond fewer columns.
SPOILED = """
g.ids[0][:] = 13 | rank 0; 96 of 128; token 8; expert 13; distinct
grow(g, 0) | dispatch_async; rank 0; 33 tokens; max_tokens_per_rank is 32; reset()
grow(g, 1) | dispatch_async; rank 1; 33 tokens; max_tokens_per_rank is 32; reset()
g.ids[1] = g.ids[1][:5] | dispatch_async; rows; topk_ids; 5; 32
g.ids[1] = g.ids[1][:, :1].copy() | topk_ids; 4
g.tokens[1] = g.tokens[1][:, :40].copy() | input_tokens; 256
g.weights[0] = g.weights[0][:3] | combine_wait; 3 tokens are combined; 32 were
g.weights[1] = g.weights[1][:0] | combine_wait; 0 tokens are combined; 32 were
""" + "\n".join(
    f"g.ids[{rank}][[2, 4], [1, 0]] = {i} | dispatch_async; rank {rank}; token 2; k 1; "
    f"expert {i}; [-1, n_experts); 2 of 128; reset()"
    for rank, i in BAD_IDS
)


@refused(SPOILED)
def test_a_run_that_is_refused(group, given, arguments, words):
    """It is said once, on a line that begins with the library's name."""
    exec(arguments, globals(), {"g": given})
    with raises(ValueError, words) as caught:
        group.round_trip(given)
    ours = [s for s in str(caught.value).splitlines() if s.startswith("max_ep: ")]
    assert len(ours) == 1, str(caught.value)
    group.check_next_run()


@pytest.mark.parametrize("name", PHASED)
def test_an_id_out_of_range_harms_no_other_token(groups, given, name):
    """All other choices arrive, as if the bad ones had been -1."""
    group = groups[name]
    given.ids[3][[0, 3, 6], [2, 0, 1]] = [14, -7, 1_000_000]
    with raises(ValueError, "rank 3; token 0; k 2; 3 of 128"):
        group.send(given)
    given.ids[3][[0, 3, 6], [2, 0, 1]] = -1
    want = expected_dispatch(group.case, given)
    for got, of_rank in zip(group.receive(), want, strict=True):
        check_dispatched("after bad ids", got, of_rank)
    group.check_next_run()


def test_rows_that_have_changed_places(group, given):
    group.send(given)
    got = group.receive()
    src_info = to_numpy(got[0][3])
    got[0][3] = to_buffer(src_info[[1, 0, *range(2, len(src_info))]])
    with raises(ValueError, "is not that of this rank's last dispatch_wait"):
        group.send_back(got)
    group.check_next_run()


def test_counters_that_nobody_set_up(group, given):
    for buffer in group.comm.model_inputs()[:4]:
        zeros = np.zeros(buffer.shape[0], np.int32)
        buffer.inplace_copy_from(Buffer.from_numpy(zeros))
    with raises(ValueError, "atomic_counters; not initialized; ep_init()"):
        group.send(given)


@pytest.mark.parametrize("place", [-4, -2])
def test_addresses_of_another_op(group, given, place):
    """Receive buffers, or counts, of combine where those of dispatch belong."""
    buffers = group.comm.model_inputs()
    buffers[place], buffers[place + 1] = buffers[place + 1], buffers[place]
    group.buffers = buffers
    with raises(ValueError, "recv_ptrs and recv_count_ptrs; model_inputs(); order"):
        group.send(given)
    group.buffers = None
    group.check_next_run()


def test_run_after_close(groups, given):
    """Buffers kept from before `close` lead to an error, not to freed memory."""
    group = groups["small"]
    old = group.comm.model_inputs()
    group.comm.close()
    group.buffers = old
    with raises(ValueError, "symmetric memory; freed; close"):
        group.send(given)
    group.engine.set_up(group.comm)
    with raises(ValueError, "freed"):
        group.send(given)
    group.buffers = None
    group.check_next_run()


def test_memory_of_another_config(group, given):
    """`model_inputs` of smaller buffers are refused, not overrun."""
    with EPCommInitializer(group.case.config(hidden_size=40)) as comm:
        group.engine.set_up(comm)
        group.buffers = comm.model_inputs()
        with raises(ValueError, "belongs to another EPConfig"):
            group.send(given)
        group.buffers = None


@refused("""
w[0] = w[0][:6] | combine_wait; rank 0; 6 tokens; 32 were dispatched; reset()
w[1] = w[1][:0] | combine_wait; rank 1; 0 tokens; 32 were dispatched; reset()
got[0][0] = got[0][0][:511, :] | combine_wait on rank 0; 512 rows; hold 511
sums.send(given); sums.receive() | combine_wait on rank 0; combine_async answered \
dispatch 1; last dispatch_wait was of 2; before the next one
""")
def test_what_may_not_change_before_sums_are_added(sums, given, arguments, words):
    """The own rows are read where they were given, and where the dispatch put them."""
    sums.send(given)
    got, w = sums.receive(), given.weights
    sums.send_back(got)
    exec(arguments, dict(sums=sums, given=given, got=got, w=w))
    with raises(ValueError, words):
        sums.add_up(given, got)
    sums.check_next_run()


def test_router_weights_of_other_tokens(sums, given):
    given.weights[1] = given.weights[1][:5]
    with raises(ValueError, "dispatch_async; rows of router_weights; 5; 32"):
        sums.send(given)
    sums.check_next_run()


@pytest.mark.parametrize("token_idx", [0, 31])
def test_a_lost_partial_sum_is_not_summed_as_nothing(sums, given, token_idx):
    """The flag of one partial on rank 0 says that it is of fewer rows."""
    given.ids[0][:] = [0, 4, 5, 6]  # one row on rank 0, three on rank 1
    sums.send(given)
    got = sums.receive()
    sums.send_back(got)
    recv, sizes = sums.comm.model_inputs()[-3].to_numpy()[0], sums.case.config().sizes()
    partial = (1 * sums.case.max_tokens_per_rank + token_idx) * sizes.combine_msg_bytes
    end = int(recv) + partial + sizes.combine_msg_bytes
    flag = ctypes.c_uint64.from_address(end - 16)
    assert flag.value == 1 << 32 | 3, "generation 1, three rows"
    flag.value = 1 << 32 | 1
    with raises(ValueError, "combine_wait on rank 0; 128 rows; are of 126"):
        sums.add_up(given, got)
    sums.check_next_run()
