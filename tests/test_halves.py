# SPDX-License-Identifier: Apache-2.0
"""Halves that overlap: which waits may begin early, and where their results stand.

What overlaps runs on GPUs only (tests/test_gpu.py: `halves_beside`). Here graphs are
built for GPUs and looked at, and CPU ranks run them with the same room for results.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from cases import CASES, REDUCED_CASES, Case, expected, make_inputs
from harness import Groups, assert_round_trip
from max.dtype import DType
from max.graph import BufferType, BufferValue, DeviceRef, Graph, Module, TensorType, ops

from max_ep import (
    EPBatchManager,
    EPConfig,
    call_ep_dispatch_async,
    call_ep_dispatch_wait,
)
from max_ep.kernels import combine_room, dispatch_room
from max_ep.kernels.room import Room

TWO = CASES["two_ranks"]  # 5 experts, top_k 3, hidden 80, 7 tokens, bfloat16


class WithRoom(EPConfig):
    """A group whose waits have room for their results, on CPU, too."""

    halves_may_overlap = True

    @classmethod
    def of(cls, case: Case) -> WithRoom:
        config = case.config()
        return cls(**{f.name: getattr(config, f.name) for f in fields(config)})


CASES_WITH_ROOM = {
    # Packed and padded rows, both formats of rows, with a shared expert or none.
    name: REDUCED_CASES[name]
    for name in ("padded_last_rank_empty_reduced", "shared_fp8_reduced")
}


def add_graphs(module: Module) -> Groups:
    """Adds the graph of this file that runs: in room, although nothing overlaps."""
    with patch.object(Room, "overlaps", return_value=True) as overlaps:
        groups = Groups(
            None, "with_room", CASES_WITH_ROOM, config=WithRoom.of, module=module
        )
    # Every wait has been asked for.
    n_ranks = sum(case.n_ranks for case in CASES_WITH_ROOM.values())
    assert overlaps.call_count == 2 * n_ranks
    return groups


@pytest.fixture(scope="module")
def with_room(session, one_module: SimpleNamespace) -> Iterator[Groups]:
    made = one_module.added[__name__]
    made.start(session, one_module.models["with_room"])
    yield made
    made.close()


def test_results_in_room_are_the_oracles(with_room: Groups) -> None:
    given = {n: make_inputs(c, "uniform", "random") for n, c in CASES_WITH_ROOM.items()}
    got = with_room.run(given)
    for name, case in CASES_WITH_ROOM.items():
        assert_round_trip(name, got[name], expected(case, given[name]))


# ------------------------------------------------------------------ what is built


def on_gpus(**changes: object) -> EPConfig:
    """Two ranks with reduced combine, a GPU each."""
    given = dict(target="gpu", protocol="rank_slots", combine_mode="reduced")
    return TWO.config(**(given | changes))


@contextmanager
def building(config: EPConfig) -> Iterator[tuple[EPBatchManager, list]]:
    """Starts a graph, with tokens, ids, weights and rows of each rank."""
    manager = EPBatchManager(config)
    types = [
        TensorType(dtype, [n, columns], config.device(rank))
        for rank in range(config.n_gpus_per_node)
        for dtype, n, columns in (
            (DType.bfloat16, "t", config.hidden_size),
            (DType.int32, "t", config.top_k),
            (DType.float32, "t", config.top_k),
            (DType.bfloat16, config.n_output_rows, config.hidden_size),
        )
    ]
    declared = [*types, *manager.input_types()]
    with Graph("never_compiled", input_types=declared) as graph:
        manager.fetch_buffers(graph.inputs[len(types) :])
        values = [value.tensor for value in graph.inputs[: len(types)]]
        yield manager, [values[i : i + 4] for i in range(0, len(values), 4)]


def send(manager: EPBatchManager, x: list, rank: int = 0) -> None:
    reduced = manager.config.is_reduced
    manager.ep_dispatch_async(
        x[rank][0], x[rank][1], rank, router_weight=x[rank][2] if reduced else None
    )


def lines_of(name: str) -> list[str]:
    """Returns the lines of the graph that have an EP op of that name."""
    return [line for line in str(Graph.current).splitlines() if f'"{name}"' in line]


def test_a_wait_behind_its_async_op_begins_beside_it() -> None:
    config = on_gpus()
    with building(config) as (manager, x):
        for rank in range(2):
            send(manager, x, rank)
        for rank in range(2):
            manager.ep_dispatch_wait(rank)
        for rank in range(2):
            manager.ep_combine_async(x[rank][3], rank)
        for rank in range(2):
            manager.ep_combine_wait(None, rank)
        for name in ("dispatch_wait.in_room", "combine_wait.rows.in_room"):
            assert len(lines_of(f"max_ep.{name}")) == 2
        for name in ("dispatch_async", "combine_async"):
            sending = lines_of(f"max_ep.{name}")
            assert len(sending) == 2
            assert all("halves_overlap = true" in line for line in sending)
        assert not lines_of("max_ep.dispatch_wait")
        assert not lines_of("max_ep.combine_wait.rows")


def test_room_is_claimed_before_anything_is_sent() -> None:
    """MAX gives a buffer memory when it is first used; by then it must be known."""
    with building(on_gpus()) as (manager, x):
        send(manager, x)
        built = re.findall(r'"max_ep\.([\w.]+)"', str(Graph.current))
        # Rows, offsets, ids, and sources.
        assert built == ["claim_4", "dispatch_async"]
        manager.ep_dispatch_wait(0)
        manager.ep_combine_async(x[0][3], 0)
        built = re.findall(r'"max_ep\.([\w.]+)"', str(Graph.current))
        assert built[-2:] == ["claim_1", "combine_async"]


def test_a_refused_dispatch_claims_nothing() -> None:
    with building(on_gpus()) as (manager, x):
        with pytest.raises(ValueError, match="needs router weights"):
            manager.ep_dispatch_async(x[0][0], x[0][1], 0)
        assert "claim" not in str(Graph.current)


def nothing(manager: EPBatchManager, x: list) -> None:
    pass


def work_of_another_device(manager: EPBatchManager, x: list) -> None:
    send(manager, x, 1)
    _ = x[1][0] + 1


def a_view(manager: EPBatchManager, x: list) -> None:
    x[0][3].reshape([-1, 40])


def work(manager: EPBatchManager, x: list) -> None:
    _ = x[0][3] * 2


def a_store(manager: EPBatchManager, x: list) -> None:
    ops.buffer_store(cache_on(0), x[0][0])


def a_store_on_another_device(manager: EPBatchManager, x: list) -> None:
    ops.buffer_store(cache_on(1), x[1][0])


def a_transfer(manager: EPBatchManager, x: list) -> None:
    x[0][0].to(DeviceRef.GPU(1))


def cache_on(device_id: int) -> BufferValue:
    return ops.buffer_create(
        BufferType(DType.bfloat16, ["t", 80], DeviceRef.GPU(device_id))
    )


def watch(manager: EPBatchManager, x: list) -> None:
    manager.ep_watch("dispatch", 0)


def another_group(manager: EPBatchManager, x: list) -> None:
    other = EPBatchManager(manager.config)
    other.bind_comm_buffers(manager._buffers.values())
    send(other, x)


@pytest.mark.parametrize(
    "between, overlap",
    [
        (nothing, True),
        (work_of_another_device, True),
        (a_view, True),
        (a_store_on_another_device, True),
        (work, False),
        (a_store, False),
        (a_transfer, False),
        (watch, False),
        (another_group, False),
    ],
)
def test_what_is_between_the_halves(between: Callable, overlap: bool) -> None:
    """With work between, each half has all multiprocessors: it comes first, anyway."""
    with building(on_gpus()) as (manager, x):
        send(manager, x)
        between(manager, x)
        manager.ep_dispatch_wait(0)
        waits = [
            len(lines_of(f"max_ep.dispatch_wait{end}")) for end in (".in_room", "")
        ]
        assert waits == ([1, 0] if overlap else [0, 1])
        told = f"halves_overlap = {str(overlap).lower()}"
        assert told in lines_of("max_ep.dispatch_async")[0]
        assert "halves_overlap = true" not in "".join(
            lines_of("max_ep.dispatch_async")[1:]
        )


def test_the_next_dispatch_between_the_halves_of_combine() -> None:
    """Then the kernel before each wait is another one than its async op's."""
    with building(on_gpus()) as (manager, x):
        send(manager, x)
        manager.ep_dispatch_wait(0)
        manager.ep_combine_async(x[0][3], 0)
        send(manager, x)
        manager.ep_combine_wait(None, 0)
        manager.ep_dispatch_wait(0)
        text = str(Graph.current)
        waits = re.findall(r'"max_ep\.(\w+_wait[\w.]*)"', text)
        assert waits == ["dispatch_wait.in_room", "combine_wait.rows", "dispatch_wait"]
        told = re.findall("halves_overlap = (true|false)", text)
        assert told == ["true", "false", "false"]


def test_tokens_that_were_sent_before() -> None:
    """The wait waits for their stream, too: then all multiprocessors are better."""
    with building(on_gpus(protocol="gather")) as (manager, x):
        manager.ep_send_tokens(x[0][0], 0)
        send(manager, x)
        manager.ep_dispatch_wait(0)
        text = str(Graph.current)
    assert "halves_overlap = true" not in text and "claim" not in text


def test_room_is_for_both_halves() -> None:
    config = on_gpus()
    with building(config) as (manager, x):
        room = dispatch_room(config, DeviceRef.GPU(0))
        with pytest.raises(ValueError, match="pass the same to both, or to none"):
            call_ep_dispatch_wait(
                manager.atomic_counters[0][0],
                *manager._pointers(0)[1:],
                config,
                room=room,
            )


@pytest.mark.parametrize(
    "changes",
    [
        dict(target="cpu"),
        dict(protocol="expert_slots", combine_mode="unreduced"),
        dict(ranks_per_gpu=2),
        dict(n_sms=1),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_who_has_no_overlap(changes: dict) -> None:
    config = on_gpus(**changes)
    assert not config.halves_may_overlap
    assert dispatch_room(config, DeviceRef.CPU()) is None
    with building(config) as (manager, x):
        for rank in range(2):
            send(manager, x, rank)
        for rank in range(2):
            manager.ep_dispatch_wait(rank)
        text = str(Graph.current)
    assert "in_room" not in text and "claim" not in text
    assert "halves_overlap = true" not in text


def test_unreduced_combine_has_no_overlap() -> None:
    config = on_gpus(combine_mode="unreduced")
    with building(config) as (manager, x):
        send(manager, x)
        manager.ep_dispatch_wait(0)
        manager.ep_combine_async(x[0][3], 0)
        manager.ep_combine_wait(x[0][2], 0)
        found = re.findall(r'"max_ep\.(\w+_wait[\w.]*)"', str(Graph.current))
    assert found == ["dispatch_wait.in_room", "combine_wait"]
    assert combine_room(config, DeviceRef.GPU(0), TWO.max_tokens_per_rank) is None


def test_without_room_nothing_overlaps() -> None:
    """Who builds single ops says so by the room, or does as ever."""
    config = on_gpus()
    with building(config) as (manager, x):
        call_ep_dispatch_async(
            x[0][0],
            x[0][1],
            manager.atomic_counters[0][0],
            *manager._pointers(0),
            config,
            router_weights=x[0][2],
        )
        text = str(Graph.current)
    assert "halves_overlap = false" in text and "claim" not in text


def test_room_is_of_the_results_types() -> None:
    config = replace(on_gpus(), output_layout="padded")
    with building(config):
        room = dispatch_room(config, DeviceRef.GPU(1))
        assert not re.search("claim", str(Graph.current))
        room.claim()
    shapes = [[int(dim) for dim in buffer.shape] for buffer in room.buffers]
    n, local = config.n_output_rows, config.n_local_experts
    assert shapes == [[n, 80], [local], [local * 2, 2], [n, 2]]
    assert {buffer.device for buffer in room.buffers} == {DeviceRef.GPU(1)}


@pytest.mark.parametrize("tables", ["unread", "read"])
def test_nothing_is_copied_out_of_the_room(tmp_path: Path, tables: str) -> None:
    """MAX would copy what a graph loads and no op takes: a copy between two kernels.

    Fails without `look`: row tables that nothing reads took 2 us of each exchange.
    """
    program = Path(__file__).with_name("halves_graph.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), tables],
        capture_output=True,
        text=True,
        # Importing MAX sets variables behind Python's back that keep another
        # Python from finding its packages.
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    calls = done.stdout.split()
    assert sum("dispatch_wait_in_room" in call for call in calls) == 2 * TWO.n_ranks
    # A function that both ranks' results go through.
    assert calls.count("mgp_buffer_device_to_device") == 1, calls
