# SPDX-License-Identifier: Apache-2.0
"""What the processes of `test_processes.py` run.

`max_ep.launch` spawns its processes, so what they run is imported: it is here.

* data: inputs that any process can recompute from (seed, generation, rank),
  and what the oracle makes of them;
* graphs: compiled once, by the parent, into one file that the children read;
* `Member`: a process that has joined a group;
* scenarios: runs of a healthy group; each has a group of its own, so that one
  which fails does not take the next along;
* children: the processes of groups that must fail.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from all_gather import NAME as ALL_GATHER
from all_gather import add_all_gather, check_all_gather, dispatcher_of, factor_of
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, Module, TensorType

from max_ep import (
    EPBatchManager,
    EPCommBuffers,
    EPCommInitializer,
    EPConfig,
    call_ep_combine_async,
    call_ep_combine_wait,
    call_ep_dispatch_async,
    call_ep_dispatch_wait,
    extension_path,
    reference,
)
from max_ep.limits import GROUP_VARIABLE, NODE_VARIABLE
from max_ep.memory.symmetric_memory import SharedMemory

N_RANKS = 4
_DISPATCH, _COMBINE = range(2)


# ------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Shape:
    """Sizes of a group, and the seed of its data."""

    hidden_size: int = 256
    top_k: int = 4
    # 4 ranks do not divide 14: the last rank holds 2 experts, the others 4.
    n_experts: int = 14
    max_tokens_per_rank: int = 32
    silent_rank: int | None = None
    """A rank that sends nothing and that nobody sends to."""
    fused_shared_expert: bool = False
    protocol: str = "by_expert"
    combine_mode: str = "rows"
    seed: int = 1

    def config(
        self,
        node_id: int,
        n_nodes: int = N_RANKS,
        n_gpus_per_node: int = 1,
        timeout_s: float = 10.0,
    ) -> EPConfig:
        return EPConfig(
            dispatch_dtype=DType.bfloat16,
            combine_dtype=DType.bfloat16,
            hidden_size=self.hidden_size,
            top_k=self.top_k,
            n_experts=self.n_experts,
            max_tokens_per_rank=self.max_tokens_per_rank,
            n_gpus_per_node=n_gpus_per_node,
            n_nodes=n_nodes,
            node_id=node_id,
            target="cpu",
            timeout_s=timeout_s,
            fused_shared_expert=self.fused_shared_expert,
            protocol=self.protocol,
            combine_mode=self.combine_mode,
        )


SMALL = Shape()

# A full launch moves 256 * 4 * 4112 bytes: more than STREAM_BYTES of
# cpu_copy.mojo, so its messages are written past the caches, by all workers.
LARGE = Shape(hidden_size=2048, n_experts=8, max_tokens_per_rank=256)


# 4 ranks, 3 experts: the last rank holds none. Nobody sends to it, so it waits
# for nobody and may be ahead of all.
FEW_EXPERTS = Shape(n_experts=3, top_k=2)

# The last rank receives nobody's rows but its own.
SHARED = replace(FEW_EXPERTS, fused_shared_expert=True)

# The same, and large launches, by the other protocol.
SHARED_BY_RANK = replace(SHARED, protocol="by_rank")
LARGE_BY_RANK = replace(LARGE, protocol="by_rank")

# And with combine of sums.
SHARED_SUMS = replace(SHARED_BY_RANK, combine_mode="sums")
LARGE_SUMS = replace(LARGE_BY_RANK, combine_mode="sums")

# Those whose phases are graphs of their own.
IN_PHASES = {
    "": SMALL,
    "_by_rank": replace(SMALL, protocol="by_rank"),
    "_sums": replace(SMALL, protocol="by_rank", combine_mode="sums"),
}
"""By what their graphs' names end with."""
_SUFFIXES = {(s.protocol, s.combine_mode): name for name, s in IN_PHASES.items()}


@dataclass
class Batch:
    """What one rank sends in one generation."""

    tokens: np.ndarray
    """bfloat16 bits, uint16 `[n_tokens, hidden_size]`. Columns 0, 1, 2 hold
    rank, generation and token, so a wrong row tells where it came from."""
    ids: np.ndarray
    """int32 `[n_tokens, top_k]`, some are -1."""
    weights: np.ndarray
    """float32 `[n_tokens, top_k]`."""


def make_batch(shape: Shape, generation: int, rank: int) -> Batch:
    """Draws a rank's inputs; counts change from generation to generation.

    Of every 7 generations, one is full on all ranks with all tokens to the
    experts of rank 0 (or the first that talks), and one is empty on all ranks;
    in the others one rank is empty.
    """
    rng = np.random.default_rng([shape.seed, generation, rank])
    n_tokens = int(rng.integers(1, shape.max_tokens_per_rank + 1))
    experts = np.arange(shape.n_experts, dtype=np.int32)
    if shape.silent_rank is not None:
        n_local = reference.n_local_experts(shape.n_experts, N_RANKS)
        experts = experts[experts // n_local != shape.silent_rank]
    share_masked = 0.2
    if generation % 7 == 3:
        n_tokens, share_masked = shape.max_tokens_per_rank, 0.0
        experts = experts[: shape.top_k]
    elif generation % 7 == 5 or generation % N_RANKS == rank:
        n_tokens = 0
    tokens = rng.standard_normal((n_tokens, shape.hidden_size), np.float32)
    tokens[:, 0], tokens[:, 1] = rank, generation % 256
    tokens[:, 2] = np.arange(n_tokens)
    ids = rng.permuted(np.tile(experts, (n_tokens, 1)), axis=1)
    ids = np.ascontiguousarray(ids[:, : shape.top_k])
    ids[rng.random(ids.shape) < share_masked] = -1
    if rank == shape.silent_rank:
        ids[:] = -1
    return Batch(
        reference.float32_to_bfloat16(tokens),
        ids,
        rng.random(ids.shape, np.float32),
    )


def expert(expert_id: int, generation: int, rows: np.ndarray) -> np.ndarray:
    """What an expert makes of its rows (float32, exact in bfloat16).

    A power of two with a sign, another one for each expert: a row that comes
    back from the wrong expert, or from another generation, is a wrong sum.
    """
    sign = -1 if (expert_id + generation) % 2 else 1
    return rows * np.float32(sign * 2.0 ** (expert_id // 2 + generation % 3 - 4))


@dataclass
class Want:
    """What one rank must get in one generation."""

    dispatched: reference.DispatchResult
    result: np.ndarray
    """bfloat16 bits, uint16 `[n_tokens, hidden_size]`."""


@dataclass
class Prepared:
    """A generation's inputs on one rank, and what it must get."""

    inputs: list[Any]
    want: Want


def oracle(shape: Shape, generation: int, rank: int) -> Want:
    """Computes a rank's results from all ranks' inputs."""
    batches = [make_batch(shape, generation, r) for r in range(N_RANKS)]
    dispatched = reference.dispatch(
        [b.tokens for b in batches],
        [b.ids for b in batches],
        shape.n_experts,
        shared_expert=shape.fused_shared_expert,
    )
    return Want(dispatched[rank], moe(shape, generation, generation, rank))


def rounded(x: np.ndarray) -> np.ndarray:
    """Rounds float32 to what bfloat16 holds."""
    return reference.bfloat16_to_float32(reference.float32_to_bfloat16(x))


def moe(shape: Shape, generation: int, expert_generation: int, rank: int) -> np.ndarray:
    """Computes a rank's sums, as bfloat16 bits."""
    if shape.combine_mode == "sums":
        return moe_by_sums(shape, generation, expert_generation, rank)
    mine = make_batch(shape, generation, rank)
    sums = reference.moe(
        reference.bfloat16_to_float32(mine.tokens),
        mine.ids,
        mine.weights,
        lambda e, rows: expert(e, expert_generation, rows),
        shared_fn=(
            functools.partial(expert, shape.n_experts, expert_generation)
            if shape.fused_shared_expert
            else None
        ),
        round_sum=rounded,
    )
    return reference.float32_to_bfloat16(sums)


def moe_by_sums(
    shape: Shape, generation: int, expert_generation: int, rank: int
) -> np.ndarray:
    """Computes a rank's sums from the rows of all ranks, as bfloat16 bits."""
    batches = [make_batch(shape, generation, r) for r in range(N_RANKS)]
    dispatched = reference.dispatch(
        [reference.bfloat16_to_float32(b.tokens) for b in batches],
        [b.ids for b in batches],
        shape.n_experts,
        shared_expert=shape.fused_shared_expert,
    )
    for owner, result in enumerate(dispatched):
        _apply_experts(shape, expert_generation, owner, result, result.rows)
    weights = [b.weights for b in batches]
    sums = reference.combine_sums(
        [result.rows for result in dispatched], dispatched, weights, rounded, rounded
    )
    return reference.float32_to_bfloat16(sums[rank])


# ----------------------------------------------------------------------- graphs


def _inputs(config: EPConfig, rank: int = 0) -> list[TensorType]:
    """Types of tokens, ids, weights and factors of rows."""
    cpu, n = DeviceRef.CPU(), f"n_{rank}"
    return [
        TensorType(DType.bfloat16, [n, config.hidden_size], cpu),
        TensorType(DType.int32, [n, config.top_k], cpu),
        TensorType(DType.float32, [n, config.top_k], cpu),
        TensorType(DType.bfloat16, [config.n_output_rows, 1], cpu),
    ]


def _add_round_trip(module: Module, name: str, config: EPConfig, form: str) -> None:
    """Adds a graph that dispatches, runs experts and combines.

    Outputs, for each local rank: rows, row_offsets, expert_ids, src_info, sums.
    """
    local_ranks = list(range(config.n_gpus_per_node))
    types = [t for i in local_ranks for t in _inputs(config, i)]
    ep = EPBatchManager(config)
    with Graph(name, input_types=types + ep.input_types(), module=module) as graph:
        ep.fetch_buffers(graph.inputs[len(types) :])
        values = [v.tensor for v in graph.inputs[: len(types)]]
        tokens, ids, weights, factors = (values[i::4] for i in range(4))
        sent: list[Any] = [None] * len(local_ranks)
        if config.combines_sums:
            sent, weights = weights, sent
        if form == "all":
            rows = ep.ep_dispatch_all(tokens, ids, local_ranks)
            products = [r[0] * f for r, f in zip(rows, factors)]
            sums = ep.ep_combine_all(products, weights, local_ranks)
        elif form == "fused":
            rows = [ep.ep_dispatch(tokens[0], ids[0], 0)]
            sums = [ep.ep_combine(rows[0][0] * factors[0], weights[0], 0)]
        else:
            for i in local_ranks:
                ep.ep_dispatch_async(tokens[i], ids[i], i, router_weight=sent[i])
            rows = [ep.ep_dispatch_wait(i) for i in local_ranks]
            for i in local_ranks:
                ep.ep_combine_async(rows[i][0] * factors[i], i)
            sums = [ep.ep_combine_wait(weights[i], i) for i in local_ranks]
        outputs = []
        for i in local_ranks:
            outputs += [*rows[i][:3], ep._src_info[i], sums[i]]
        graph.output(*outputs)


def _add_back_to_back(module: Module, name: str, config: EPConfig) -> None:
    """Adds a graph that dispatches twice, then combines the second twice.

    Nothing but the done words keeps a rank from overwriting, in its second
    launch, what a peer is reading in its first.
    """
    types = _inputs(config, 1)[:3] + _inputs(config, 2) + _inputs(config)[3:]
    ep = EPBatchManager(config)
    with Graph(name, input_types=types + ep.input_types(), module=module) as graph:
        ep.fetch_buffers(graph.inputs[len(types) :])
        values = [v.tensor for v in graph.inputs[: len(types)]]
        inputs, weights, (factors_1, factors_2) = values[:6], values[5], values[6:]
        dispatched = []
        for tokens, ids, sent in (inputs[:3], inputs[3:]):
            if not config.combines_sums:
                sent = None
            rows = ep.ep_dispatch(tokens, ids, 0, router_weight=sent)[:3]
            dispatched.append((*rows, ep._src_info[0]))
        first, second = dispatched
        if config.combines_sums:
            weights = None
        products = [second[0] * factors_1, second[0] * factors_2]
        sums = [ep.ep_combine(rows, weights, 0) for rows in products]
        graph.output(*first, *second, *sums)


def _add_phases(module: Module, suffix: str) -> None:
    """Adds graphs of one op each: whatever happens, happens between them."""
    config = IN_PHASES[suffix].config(0)
    cpu, n_rows = DeviceRef.CPU(), config.get_max_recv_tokens()
    tokens, ids, weights, _ = _inputs(config)
    rows = TensorType(DType.bfloat16, [n_rows, config.hidden_size], cpu)
    src_info = TensorType(DType.int32, [n_rows, 2], cpu)

    def pointers(comm: EPCommBuffers, group: int) -> list[Any]:
        return [
            comm.send_buf_ptrs[group],
            comm.recv_buf_ptrs[group],
            comm.recv_count_ptrs[group],
        ]

    def dispatch_async(comm, counter, tokens, ids, weights):  # noqa: ANN001, ANN202
        call_ep_dispatch_async(
            tokens,
            ids,
            counter,
            *pointers(comm, _DISPATCH),
            config,
            router_weights=weights if config.combines_sums else None,
        )
        return ()

    def dispatch_wait(comm, counter):  # noqa: ANN001, ANN202
        return call_ep_dispatch_wait(counter, *pointers(comm, _DISPATCH)[1:], config)

    def combine_async(comm, counter, rows, src_info):  # noqa: ANN001, ANN202
        call_ep_combine_async(
            rows, src_info, counter, *pointers(comm, _COMBINE), config
        )
        return ()

    def combine_wait(comm, counter, weights, rows):  # noqa: ANN001, ANN202
        return (
            call_ep_combine_wait(
                counter,
                *pointers(comm, _COMBINE)[1:],
                config,
                weights.shape[0],
                None if config.combines_sums else weights,
                rows if config.adds_unsent_rows else None,
            ),
        )

    for build, types in (
        (dispatch_async, [tokens, ids, weights]),
        (dispatch_wait, []),
        (combine_async, [rows, src_info]),
        (combine_wait, [weights, rows]),
    ):
        ep = EPBatchManager(config)
        with Graph(
            build.__name__ + suffix, input_types=types + ep.input_types(), module=module
        ) as graph:
            values = [v.tensor for v in graph.inputs[: len(types)]]
            comm = ep.comm_buffers(graph.inputs[len(types) :])
            graph.output(*build(comm, comm.atomic_counters[0][0], *values))


def compile_graphs(path: Path, session: InferenceSession) -> None:
    """Compiles all graphs into one file, and the set-up graph into MAX's cache.

    One module: all graphs compile in about the time of one.
    """
    module = Module()
    small = SMALL.config(0)
    _add_round_trip(module, "async_wait", small, "async_wait")
    _add_round_trip(module, "fused", small, "fused")
    for suffix in IN_PHASES:
        _add_phases(module, suffix)
    _add_round_trip(
        module, "two_by_two", SMALL.config(0, n_nodes=2, n_gpus_per_node=2), "all"
    )
    _add_back_to_back(module, "large", LARGE.config(0))
    _add_back_to_back(module, "large_by_rank", LARGE_BY_RANK.config(0))
    _add_round_trip(module, "few_experts", FEW_EXPERTS.config(0), "async_wait")
    _add_round_trip(module, "shared", SHARED.config(0), "async_wait")
    _add_round_trip(module, "shared_by_rank", SHARED_BY_RANK.config(0), "async_wait")
    _add_round_trip(module, "shared_sums", SHARED_SUMS.config(0), "async_wait")
    _add_back_to_back(module, "large_sums", LARGE_SUMS.config(0))
    add_all_gather(module, SMALL, N_RANKS)
    compiled = session.compile(module, custom_extensions=[extension_path()])
    compiled.export_mef(path)
    with EPCommInitializer(SMALL.config(0, n_nodes=1)) as comm:
        comm.ep_init(session)


# ----------------------------------------------------------------------- member


def _bfloat16(bits: np.ndarray) -> Buffer:
    return Buffer.from_numpy(np.ascontiguousarray(bits)).view(DType.bfloat16)


def _bits(buffer: Buffer) -> np.ndarray:
    return buffer.view(DType.uint16).to_numpy()


class Engine:
    """A session and the graphs that the parent compiled."""

    def __init__(self, graphs: str | None = None) -> None:
        self.session = InferenceSession(devices=[CPU()])
        self.models: dict[str, Model] = {}
        if graphs is not None:
            self.models = self.session.load_all(graphs)
        self._first: EPCommInitializer | None = None

    def join(self, config: EPConfig, group: str | None = None) -> EPCommInitializer:
        """Returns an initializer that need not load the set-up graph again."""
        if self._first is None:
            self._first = EPCommInitializer(SMALL.config(0, n_nodes=1))
            self._first.ep_init(self.session)
        comm = EPCommInitializer(config, group)
        comm._model = self._first._model
        return comm


class Member:
    """A process that has joined a group, with all it needs to run."""

    def __init__(
        self,
        engine: Engine,
        config: EPConfig,
        shape: Shape = SMALL,
        group: str | None = None,
    ) -> None:
        self.models, self.shape, self.config = engine.models, shape, config
        self.comm = engine.join(config, group)
        self.comm.ep_init(engine.session)
        self.rank = config.node_id * config.n_gpus_per_node
        self.ranks = range(self.rank, self.rank + config.n_gpus_per_node)
        self._sent_rows: Buffer | None = None

    def run(self, graph: str, *inputs: Any) -> list[Buffer]:
        return self.models[graph].execute(*inputs, *self.comm.model_inputs())

    # ---------------------------------------------------------- whole generations

    def prepare(self, generation: int) -> list[Prepared]:
        """Makes the inputs of each own rank, and what must come out."""
        made = []
        for rank in self.ranks:
            batch = make_batch(self.shape, generation, rank)
            want = oracle(self.shape, generation, rank)
            factors = np.ones((self.config.n_output_rows, 1), np.float32)
            _apply_experts(self.shape, generation, rank, want.dispatched, factors)
            inputs = [_bfloat16(batch.tokens), batch.ids, batch.weights]
            inputs.append(_bfloat16(reference.float32_to_bfloat16(factors)))
            made.append(Prepared(inputs, want))
        return made

    def round_trip(
        self, graph: str, generation: int, prepared: list[Prepared] | None = None
    ) -> None:
        """Runs a generation in one graph, and compares it with the oracle.

        Args:
            graph: Which.
            generation: Its number, in errors.
            prepared: What `prepare` made, of this generation or another; None: of
                this one, now.
        """
        prepared = prepared or self.prepare(generation)
        outputs = self.run(graph, *(x for one in prepared for x in one.inputs))
        received = (outputs[i::5] for i in range(5))
        for rank, one, *got in zip(self.ranks, prepared, *received):
            where = f"rank {rank}, generation {generation} ({graph})"
            check_dispatched(where, got[:4], one.want.dispatched)
            check_bits(f"{where}: sums", _bits(got[4]), one.want.result)

    def run_phase(self, phase: str, *inputs: Any) -> list[Buffer]:
        """Runs one of the graphs of one op."""
        suffix = _SUFFIXES[self.shape.protocol, self.shape.combine_mode]
        return self.run(phase + suffix, *inputs)

    def phases(self, generation: int, pause: Callable[[str], None]) -> None:
        """Runs a generation in graphs of one op, with something between them."""
        pause("dispatch_async")
        self.dispatch_async(generation)
        pause("dispatch_wait")
        rows, src_info = self.dispatch_wait(generation)
        pause("combine_async")
        self.combine_async(generation, rows, src_info)
        pause("combine_wait")
        self.combine_wait(generation, generation)

    # ------------------------------------------------------------------- its parts

    def dispatch_async(self, generation: int) -> None:
        batch = make_batch(self.shape, generation, self.rank)
        tokens = _bfloat16(batch.tokens)
        self.run_phase("dispatch_async", tokens, batch.ids, batch.weights)

    def dispatch_wait(self, generation: int) -> tuple[np.ndarray, Buffer]:
        """Returns the rows (bits) and `src_info`, after comparing them."""
        got = self.run_phase("dispatch_wait")
        want = oracle(self.shape, generation, self.rank)
        where = f"rank {self.rank}, generation {generation} (dispatch_wait)"
        check_dispatched(where, got, want.dispatched)
        return _bits(got[0]), got[3]

    def combine_async(
        self, generation: int, rows: np.ndarray, src_info: Buffer
    ) -> None:
        """Sends back what the experts make of the rows that were received."""
        bounds = oracle(self.shape, generation, self.rank).dispatched
        rows = rows.copy()
        rows[len(bounds.rows) :] = 0xFFFF  # NaN: nobody may read these
        rows = reference.bfloat16_to_float32(rows)
        _apply_experts(self.shape, generation, self.rank, bounds, rows)
        rows = reference.float32_to_bfloat16(rows)
        self.send_rows(rows, src_info)

    def send_rows(self, rows: np.ndarray, src_info: Buffer) -> None:
        """Sends back rows, given as bits."""
        self._sent_rows = _bfloat16(rows)
        self.run_phase("combine_async", self._sent_rows, src_info)

    def combine_wait(self, generation: int, expert_generation: int) -> None:
        batch = make_batch(self.shape, generation, self.rank)
        (got,) = self.run_phase("combine_wait", batch.weights, self._sent_rows)
        check_bits(
            f"rank {self.rank}, generation {generation} (combine_wait): sums",
            _bits(got),
            moe(self.shape, generation, expert_generation, self.rank),
        )


def _apply_experts(
    shape: Shape,
    generation: int,
    rank: int,
    dispatched: reference.DispatchResult,
    rows: np.ndarray,
) -> None:
    """Runs each expert of a rank on its rows, in place."""
    n_local = reference.n_local_experts(shape.n_experts, N_RANKS)
    bounds = dispatched.row_offsets
    ids = [rank * n_local + i for i in range(n_local)]
    if shape.fused_shared_expert:
        ids.insert(0, shape.n_experts)
    for i, expert_id in enumerate(ids):
        mine = slice(bounds[i], bounds[i + 1])
        rows[mine] = expert(expert_id, generation, rows[mine])


def check_dispatched(
    where: str, got: list[Buffer], want: reference.DispatchResult
) -> None:
    rows, row_offsets, expert_ids, src_info = got
    n = len(want.rows)
    check_bits(f"{where}: row_offsets", row_offsets.to_numpy(), want.row_offsets)
    check_bits(f"{where}: expert_ids", expert_ids.to_numpy(), want.expert_ids)
    check_bits(f"{where}: src_info", src_info.to_numpy()[:n], want.src_info)
    check_bits(f"{where}: rows", _bits(rows)[:n], want.rows)


def check_bits(what: str, got: np.ndarray, want: np.ndarray) -> None:
    """Raises unless two arrays are the same, bit for bit."""
    assert got.dtype == want.dtype, (what, got.dtype, want.dtype)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, want {want.shape}"
    wrong = np.argwhere(got != want)
    if len(wrong) == 0:
        return
    at = tuple(int(i) for i in wrong[0])
    text = f"{what}: {len(wrong)} of {got.size} wrong, first {list(at)}: got "
    text += f"{got[at]}, want {want[at]}"
    if got.ndim == 2 and got.dtype == np.uint16:
        tags = reference.bfloat16_to_float32(np.stack([got[at[0]], want[at[0]]]))
        text += ". Row starts with (rank, generation, token) "
        text += f"{tags[0, :3]}, want {tags[1, :3]}"
    raise AssertionError(text)


# -------------------------------------------------------------------- scenarios


def _async_wait(member: Member) -> None:
    for generation in range(1, 15):
        member.round_trip("async_wait", generation)


def _fused(member: Member) -> None:
    for generation in range(1, 15):
        member.round_trip("fused", generation)


def _two_hundred_generations(member: Member) -> None:
    """Ranks choose their form by themselves: on the wire there is one."""
    for generation in range(1, 201):
        is_fused = (generation + member.rank) % 3 == 0
        member.round_trip("fused" if is_fused else "async_wait", generation)


def _delays_between_executes(member: Member) -> None:
    rng = np.random.default_rng(100 + member.rank)
    for generation in range(1, 31):
        _sleep_at_random(rng)
        member.round_trip("async_wait", generation)


def _delays_between_phases(member: Member) -> None:
    """Each rank is late by other times before each phase, of any protocol."""
    rng = np.random.default_rng(200 + member.rank)
    for generation in range(1, 31):
        member.phases(generation, lambda _: _sleep_at_random(rng))


def _sleep_at_random(rng: np.random.Generator) -> None:
    """Sleeps: often not at all, now and then for many generations' time."""
    time.sleep(rng.choice([0, 0, 0.002, 0.005, 0.03]))


def _silent_rank(member: Member) -> None:
    """Nobody exchanges anything with rank 2, which is now ahead, now behind."""
    member.shape = replace(SMALL, silent_rank=2)
    rng = np.random.default_rng(300)
    for generation in range(1, 31):
        slow = rng.permutation(N_RANKS)[:2]

        def pause(_: str, is_slow: bool = member.rank in slow) -> None:
            time.sleep(0.008 if is_slow else 0)

        member.phases(generation, pause)


def _large(member: Member, graph: str = "large") -> None:
    """Launches that are long, and close on each other's heels."""
    shape, rank = member.shape, member.rank
    for generation in (2, 3, 9, 10, 23, 6):
        batches = [make_batch(shape, generation + i, rank) for i in range(2)]
        wants = [oracle(shape, generation + i, rank) for i in range(2)]
        inputs = [x for b in batches for x in (_bfloat16(b.tokens), b.ids, b.weights)]
        for i in range(2):
            factors = np.ones((member.config.get_max_recv_tokens(), 1), np.float32)
            _apply_experts(shape, generation + i, rank, wants[1].dispatched, factors)
            inputs.append(_bfloat16(reference.float32_to_bfloat16(factors)))
        got = member.run(graph, *inputs)
        where = f"rank {rank}, generations {generation}, {generation + 1}"
        check_dispatched(f"{where}, first", got[:4], wants[0].dispatched)
        check_dispatched(f"{where}, second", got[4:8], wants[1].dispatched)
        for i in range(2):
            want = moe(shape, generation + 1, generation + i, rank)
            check_bits(f"{where}, combine {i}", _bits(got[8 + i]), want)


def _few_experts(member: Member, graph: str = "few_experts") -> None:
    """Ranks that hold experts are slow, the one that holds none is not."""
    rng = np.random.default_rng(350 + member.rank)
    for generation in range(1, 31):
        if member.rank < 3:
            _sleep_at_random(rng)
        member.round_trip(graph, generation)


def _shared(member: Member) -> None:
    """The same with a fused shared expert, so that every rank has rows."""
    _few_experts(member, "shared")


def _shared_by_rank(member: Member) -> None:
    """The same by `by_rank`: own tokens stand where the rows come from."""
    _few_experts(member, "shared_by_rank")


def _large_by_rank(member: Member) -> None:
    """A fast rank must not overwrite tokens that a slow one is copying."""
    _large(member, "large_by_rank")


def _shared_sums(member: Member) -> None:
    """The same with combine of sums: own rows are added where they stand."""
    _few_experts(member, "shared_sums")


def _large_sums(member: Member) -> None:
    """Partial sums, of one dispatch twice: nobody must overwrite unread ones."""
    _large(member, "large_sums")


def _all_gather(member: Member) -> None:
    """Everything goes to everybody, also from ranks that are late, or have nothing."""
    rng = np.random.default_rng(360 + member.rank)
    factor = np.array([factor_of(member.rank)])
    for generation in range(1, 31):
        _sleep_at_random(rng)
        batches = [make_batch(SMALL, generation, r) for r in range(N_RANKS)]
        own = batches[member.rank]
        rows, *said, sums = member.run(
            ALL_GATHER, _bfloat16(own.tokens), own.ids, own.weights, factor
        )
        where = f"rank {member.rank}, generation {generation} (all-gather)"
        got = [_bits(rows), *(value.to_numpy() for value in said), _bits(sums)]
        check_all_gather(where, got, batches, member.rank)


SLOW_RANK = 1
SLOW_S = 0.04


def _dispatch_only(member: Member) -> dict[str, list[float]]:
    """Only dispatches, so only the done words keep a fast rank back.

    Returns:
        When `dispatch_async` ended and `dispatch_wait` began, by generation.
    """
    times: dict[str, list[float]] = {"sent": [], "looked": []}
    for generation in range(1, 13):
        member.dispatch_async(generation)
        times["sent"].append(time.monotonic())
        time.sleep(SLOW_S if member.rank == SLOW_RANK else 0)
        times["looked"].append(time.monotonic())
        member.dispatch_wait(generation)
    return times


def _combine_only(member: Member) -> dict[str, list[float]]:
    """Combines one dispatch again and again, each time other rows."""
    times: dict[str, list[float]] = {"sent": [], "looked": []}
    dispatched = 2
    member.dispatch_async(dispatched)
    rows, src_info = member.dispatch_wait(dispatched)
    bounds = oracle(member.shape, dispatched, member.rank).dispatched
    for generation in range(1, 13):
        sent = reference.bfloat16_to_float32(rows)
        _apply_experts(member.shape, generation, member.rank, bounds, sent)
        sent = reference.float32_to_bfloat16(sent)
        member.send_rows(sent, src_info)
        times["sent"].append(time.monotonic())
        time.sleep(SLOW_S if member.rank == SLOW_RANK else 0)
        times["looked"].append(time.monotonic())
        member.combine_wait(dispatched, generation)
    return times


STOPPED_S = 0.5


def _stopped(member: Member) -> list[float]:
    """Rank 2 is stopped three times, wherever it is then.

    Returns:
        The seconds that each generation took.
    """
    stoppers, seconds = [], []
    for generation in range(1, 61):
        begin = time.monotonic()
        if member.rank == 2 and generation in (10, 25, 40):
            delay = generation / 10_000
            stoppers.append(
                subprocess.Popen(
                    f"sleep {delay}; kill -STOP {os.getpid()};"
                    f" sleep {STOPPED_S}; kill -CONT {os.getpid()}",
                    shell=True,
                )
            )
        time.sleep(0.002)
        member.phases(generation, lambda _: None)
        seconds.append(time.monotonic() - begin)
    for stopper in stoppers:
        stopper.wait()
    return seconds


def _generations_wrap(member: Member) -> None:
    """Starts so late that the 32 bits of the generation wrap on the way.

    Choices that no generation had before must not pass for rows of one: the
    memory that they would be in is still as it was made.

    No peer can have read or written the words set here: it first needs what
    this rank sends.
    """
    first = 2**32 - 4
    shape, n_local = member.shape, member.config.n_local_experts
    counts = member.comm._pointers[:, 2, member.rank]
    # layout.mojo: the done words stand behind the counts.
    for start, n_counts in zip(counts, (n_local * N_RANKS, shape.n_experts)):
        done = (ctypes.c_uint64 * N_RANKS).from_address(int(start) + 8 * n_counts)
        done[:] = [(first - 1) << 32] * N_RANKS
    # counters.mojo: dispatch sent, received; combine sent, received.
    words = member.comm.model_inputs()[0].to_numpy()[3:7].view(np.uint32)
    assert list(words) == [0] * 4
    words[:] = first - 1
    rng = np.random.default_rng(400 + member.rank)
    n_generations = 10
    for generation in range(1, n_generations + 1):
        member.phases(generation, lambda _: _sleep_at_random(rng))
    # 0 is left out: it is what memory shows that nobody has written; and 1, so
    # that even and odd alternate.
    late = first + n_generations - 2**32 + 1
    assert list(words) == [late] * 4, "the counters do not stand there any more"


def _two_by_two(member: Member) -> None:
    rng = np.random.default_rng(500 + member.rank)
    for generation in range(1, 31):
        _sleep_at_random(rng)
        member.round_trip("two_by_two", generation)


SCENARIOS: dict[str, Callable[[Member], Any]] = {
    "async_wait": _async_wait,
    "fused": _fused,
    "two_hundred_generations": _two_hundred_generations,
    "delays_between_executes": _delays_between_executes,
    "delays_between_phases": _delays_between_phases,
    "delays_between_phases_by_rank": _delays_between_phases,
    "delays_between_phases_sums": _delays_between_phases,
    "silent_rank": _silent_rank,
    "large": _large,
    "few_experts": _few_experts,
    "shared": _shared,
    "shared_by_rank": _shared_by_rank,
    "large_by_rank": _large_by_rank,
    "shared_sums": _shared_sums,
    "large_sums": _large_sums,
    ALL_GATHER: _all_gather,
    "dispatch_only": _dispatch_only,
    "combine_only": _combine_only,
    "stopped": _stopped,
    "generations_wrap": _generations_wrap,
}


@dataclass
class Outcome:
    """How a scenario went on one process."""

    error: str | None
    value: Any = None
    seconds: float = 0.0


def run_scenarios(
    node_id: int, graphs: str, names: list[str], notes: str
) -> dict[str, Outcome]:
    """Runs scenarios of four processes, each in a group of its own."""
    engine = Engine(graphs)
    engine.join(SMALL.config(node_id))
    outcomes = {}
    for name in names:
        # Where one failed, some processes come from there later than others.
        meet(notes, name, node_id, N_RANKS)
        shapes = {
            "large": LARGE,
            "few_experts": FEW_EXPERTS,
            "shared": SHARED,
            "shared_by_rank": SHARED_BY_RANK,
            "large_by_rank": LARGE_BY_RANK,
            "shared_sums": SHARED_SUMS,
            "large_sums": LARGE_SUMS,
            **{f"delays_between_phases{s}": IN_PHASES[s] for s in IN_PHASES},
        }
        shape = shapes.get(name, SMALL)
        config = shape.config(node_id)
        if name == ALL_GATHER:
            config = dispatcher_of(shape, N_RANKS, node_id).config
        outcomes[name] = _run_scenario(engine, config, shape, name, SCENARIOS[name])
    return outcomes


def run_two_by_two(node_id: int, graphs: str) -> Outcome:
    """Runs two processes of two ranks each."""
    config = SMALL.config(node_id, n_nodes=2, n_gpus_per_node=2)
    return _run_scenario(Engine(graphs), config, SMALL, "two_by_two", _two_by_two)


def _run_scenario(
    engine: Engine,
    config: EPConfig,
    shape: Shape,
    name: str,
    scenario: Callable[[Member], Any],
) -> Outcome:
    group = f"{os.environ[GROUP_VARIABLE]}-{name}"
    begin = time.monotonic()
    error = value = member = None
    try:
        member = Member(engine, config, shape, group)
        # launch() removes the names of the group that it made, not of this one.
        assert f"max_ep-{group}-{config.node_id}" not in names_of(group)
        value = scenario(member)
    except Exception:
        error = traceback.format_exc()
    finally:
        if member is not None:
            member.comm.close()
    return Outcome(error, value, time.monotonic() - begin)


def names_of(group: str) -> list[str]:
    """Lists what a group has in the shared-memory file system."""
    return sorted(n for n in os.listdir("/dev/shm") if n.startswith(f"max_ep-{group}"))


# ------------------------------------------------------------- set-up that fails


@dataclass
class SetUp:
    """How an attempt to join a group went on one process."""

    error: str | None
    seconds: float


def set_up_configs(node_id: int, timeout_s: float) -> dict[str, EPConfig]:
    """Lists what a process of `set_up` believes of each group."""
    odd = replace(SMALL, hidden_size=512)
    other = odd if node_id == 2 else SMALL
    return {
        "healthy": SMALL.config(node_id, 3, timeout_s=timeout_s),
        "missing": SMALL.config(node_id, 4, timeout_s=timeout_s),
        "different": other.config(node_id, 3, timeout_s=timeout_s),
        # As if launch() had started more processes than the group has nodes.
        "outside": SMALL.config(-1, 2, timeout_s=timeout_s),
        "again": SMALL.config(node_id, 3, timeout_s=timeout_s),
    }


def set_up(node_id: int, timeout_s: float, notes: str) -> dict[str, SetUp]:
    """Joins several groups in which something is wrong; three processes."""
    Path(notes, "group").write_text(os.environ[GROUP_VARIABLE])
    engine = Engine()
    answers = {}

    def attempt(case: str, config: EPConfig, times: int = 1) -> None:
        comm = engine.join(config, f"{os.environ[GROUP_VARIABLE]}-{case}")
        meet(notes, case, node_id, 3)
        # The odd one of "different" comes last, to peers that wait for it.
        time.sleep(0.3 if node_id == 2 and times == 1 else 0)
        error = None
        begin = time.monotonic()
        try:
            for _ in range(times):
                comm.ep_init(engine.session)
                comm.close()
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
        answers[case] = SetUp(error, time.monotonic() - begin)

    assert os.environ[NODE_VARIABLE] == str(node_id)
    for case, config in set_up_configs(node_id, timeout_s).items():
        attempt(case, config, times=30 if case == "again" else 1)
    return answers


def meet(notes: str, what: str, node_id: int, n_nodes: int) -> None:
    """Waits until all processes are here: nobody is late for what follows."""
    Path(notes, f"{what}-{node_id}").touch()
    while not all(Path(notes, f"{what}-{i}").exists() for i in range(n_nodes)):
        time.sleep(0.002)


# --------------------------------------------------------------- children that die

KILLED_RANK = 3
KILLED_AT = 4
"""The generation."""


def die(node_id: int, graphs: str, where: str, timeout_s: float, notes: str) -> None:
    """Runs a group in which one rank is killed in front of a phase.

    The others raise what they saw, with the time it took them.
    """
    Path(notes, "group").write_text(os.environ[GROUP_VARIABLE])
    config = SMALL.config(node_id, timeout_s=timeout_s)
    engine = Engine(graphs)
    engine.join(config)
    # The time-out is for those that wait for the dead, not for slow starters.
    meet(notes, "loaded", node_id, N_RANKS)
    member = Member(engine, config)
    begin = time.monotonic()

    def pause(phase: str) -> None:
        nonlocal begin
        begin = time.monotonic()
        if node_id == KILLED_RANK and generation == KILLED_AT and phase == where:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        for generation in range(1, KILLED_AT + 2):
            if where == "dispatch_wait":  # a program that only dispatches
                pause("dispatch_async")
                member.dispatch_async(generation)
                pause("dispatch_wait")
                member.dispatch_wait(generation)
            else:
                member.phases(generation, pause)
    except ValueError as error:
        seconds = time.monotonic() - begin
        raise RuntimeError(
            f"after {seconds:.2f} s in generation {generation}"
        ) from error
    finally:
        member.comm.close()


def work(node_id: int, graphs: str) -> str:
    """Runs a healthy group once.

    Returns:
        The name of the group.
    """
    member = Member(Engine(graphs), SMALL.config(node_id))
    member.round_trip("fused", 1)
    return os.environ[GROUP_VARIABLE]


# ---------------------------------------------------------- children without ranks


def multiply(node_id: int, factor: int) -> tuple[int, str, str, bool]:
    return (
        node_id * factor,
        os.environ[NODE_VARIABLE],
        os.environ[GROUP_VARIABLE],
        hasattr(InferenceSession.compile, "__wrapped__"),  # by compile_once
    )


def fail_in_various_ways(node_id: int, notes: str) -> Any:
    """0 raises, 1 is killed, 2 exits, 3 cannot be answered, 4 is well.

    1 is killed when its memory has a name, 2 has left one.
    """
    group = os.environ[GROUP_VARIABLE]
    memory = SharedMemory(group, node_id, 5, 1, 4096, "")
    Path(notes, "group").write_text(group)
    if node_id == 0:
        _raise_deep_inside()
    if node_id == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if node_id == 2:
        os._exit(7)
    memory.close()
    if node_id == 3:
        return threading.Lock()  # cannot be pickled
    return "well"


def _raise_deep_inside() -> None:
    raise LookupError("the reason")


def sleep_for_long(node_id: int, notes: str) -> int:
    """Node 0 returns at once; the others note their pid and hang."""
    if node_id == 0:
        return 0
    SharedMemory(os.environ[GROUP_VARIABLE], node_id, 3, 1, 4096, "")
    note = Path(notes, f"{node_id}.tmp")
    note.write_text(f"{os.getpid()} {os.environ[GROUP_VARIABLE]}")
    note.rename(Path(notes, f"{node_id}"))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    return node_id
