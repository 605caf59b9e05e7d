# SPDX-License-Identifier: Apache-2.0
"""One graph for MAX's EP and for max_ep, built by the same calls: only the import
differs. On GPUs `test_gpu_changed_import.py` runs each package in a process of its own.

Each expert multiplies its rows by a number of its own; of FP8 the values, without their
scales. A kind is words: `fp8`, `shared` (a fused shared expert), `balanced` (replicas
of experts), `allreduce`, `fused_send` (asked of experts, not of dispatch or combine),
`bfloat16_weights`, `silent` (a rank without tokens).
"""

import dataclasses
import importlib
from types import ModuleType
from typing import Any

import numpy as np
from max.driver import CPU, Accelerator, Buffer, Device, accelerator_count
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import (
    BufferValue,
    DeviceRef,
    Graph,
    Module,
    TensorType,
    TensorValue,
    ops,
)
from max.nn.comm.ep import EPConfig as MaxEPConfig

from max_ep.balance import Placement
from tests.harness import graph_of, to_buffer, to_numpy
from tests.oracle.cases import BF16, F32, Case
from tests.oracle.drawn import Inputs, make_inputs, narrow, widen

N_EXPERTS, TOP_K, MAX_TOKENS = 16, 4, 64
PHY2LOG = [*range(N_EXPERTS), 3, 0, 7, 0, 1, 2, 3, 0]
"""The logical expert of each physical one; 3 and 0 are busy."""
REPLICAS = PHY2LOG.count(0)
RUNS = {"uniform": True, "full": True, "zipf": False}
"""Routings, and whether sums are exact in float32, in whatever order they are added."""


def case_of(n_ranks: int, kind: str) -> Case:
    how = dict(fused_shared_expert="shared" in kind, use_allreduce="allreduce" in kind)
    n_experts = len(PHY2LOG) if "balanced" in kind else N_EXPERTS
    wire = "fp8" if "fp8" in kind else "bfloat16"
    return Case(kind, n_ranks, n_experts, TOP_K, 1024, MAX_TOKENS, wire, **how)


def config_of(ep: ModuleType, case: Case, kind: str) -> Any:
    """Makes the package's `EPConfig`, of the fields that MAX's has."""
    fields: dict[str, Any] = dict(node_id=0, fuse_ffn_combine_send="fused_send" in kind)
    if "balanced" in kind:
        fields |= dict(eplb_enabled=True, num_moe_layers=1, max_replicas=REPLICAS)
        fields |= dict(num_logical_experts=N_EXPERTS, eplb_phy2log_plan=[PHY2LOG])
    config = case.config(**fields)
    names = [field.name for field in dataclasses.fields(MaxEPConfig)]
    return ep.EPConfig(**{name: getattr(config, name) for name in names})


def placement(n_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes `log2phy` and `logcnt`, of one layer."""
    made = Placement(np.array([PHY2LOG]), n_ranks)
    return made.log2phy(REPLICAS), made.logcnt


def factors_of(case: Case, kind: str) -> np.ndarray:
    """What experts multiply by, float32 `[n_ranks, n_groups]`; the shared one first."""
    experts = PHY2LOG if "balanced" in kind else range(N_EXPERTS)
    factors = 1 + np.array(experts, np.float32).reshape(case.n_ranks, -1)
    shared = np.full((case.n_ranks, int(case.fused_shared_expert)), 3, np.float32)
    return np.hstack([shared, factors])


def given_to(case: Case, kind: str, routing: str) -> Inputs:
    """Makes tokens, ids of logical experts, and weights that bfloat16 can hold.

    Where sums are exact, tokens are integers of four bits and an exponent, 448 the
    largest of every block, so FP8 holds them with a scale of 1; weights are sixteenths.
    """
    counts = [17, 0] if "silent" in kind else [MAX_TOKENS, 1, 17, 40][: case.n_ranks]
    logical = dataclasses.replace(case, n_experts=N_EXPERTS)
    given = make_inputs(logical, routing, counts=counts)
    rng = np.random.default_rng(len(counts))
    for rank, n in enumerate(counts):
        weights = given.weights[rank]
        if RUNS[routing]:
            x = rng.integers(-15, 16, (n, case.hidden_size))
            x = x * 2.0 ** rng.integers(0, 4, x.shape)
            x[:, ::128] = 448
            given.tokens[rank] = narrow(x.astype(np.float32), BF16)
            weights = rng.integers(1, 16, weights.shape).astype(np.float32) / 16
        given.weights[rank] = widen(narrow(weights, BF16))
    lists = given.tokens, given.ids, given.weights
    if case.use_allreduce:  # all ranks have the tokens of rank 0
        lists = tuple([x[0]] * case.n_ranks for x in lists)
    return Inputs(*lists, None, None)


def experts(dispatched: tuple[TensorValue, ...], factors: TensorValue) -> TensorValue:
    """Multiplies every row by its expert's factor. Rows after the last offset are
    undefined, as they were."""
    rows, *_, row_offsets, expert_ids, _ = dispatched
    last = int(expert_ids.shape[0]) - 1
    row = ops.range(0, rows.shape[0], 1, dtype=DType.int32, device=rows.device)
    ends = ops.cast(row_offsets[1:], DType.int32)
    # The group of a row is the number of groups that end at or before it.
    is_behind = ops.cast(ops.unsqueeze(row, 1) >= ends, DType.int32)
    group = ops.min(ops.squeeze(ops.sum(is_behind, axis=1), 1), last)
    expert = ops.gather(expert_ids, group, axis=0)
    factor = ops.gather(factors, ops.max(ops.min(expert, last), 0), axis=0)
    return ops.cast(ops.cast(rows, F32) * ops.unsqueeze(factor, 1), BF16)


def balance(ids: TensorValue, tables: list[BufferValue]) -> TensorValue:
    """Replaces logical experts by replicas, in plain ops."""
    log2phy, logcnt = (ops.buffer_load(table)[0] for table in tables)
    n, device = ids.shape[0], ids.device
    token = ops.range(0, n, 1, out_dim=n, dtype=DType.int32, device=device)
    k = ops.range(0, TOP_K, 1, dtype=DType.int32, device=device)
    replica = (ops.unsqueeze(token, 1) * TOP_K + k) % ops.gather(logcnt, ids, axis=0)
    places = ids * REPLICAS + replica
    return ops.gather(ops.reshape(log2phy, [-1]), places, axis=0)


def graph_name(form: str, case: Case, kind: str) -> str:
    return f"changed_import_{case.n_ranks}_{form}_{kind.replace(' ', '_')}"


def build(
    manager: Any, form: str, case: Case, kind: str, module: Module | None = None
) -> Graph:
    """Builds a round trip. Inputs of each rank: tokens, ids, weights, factors; then the
    EP inputs. Outputs of each rank: its sums, and what dispatch gave but statistics."""
    ranks, types = list(range(case.n_ranks)), []
    of_weights = BF16 if "bfloat16_weights" in kind else F32
    for rank in ranks:
        n = f"n_{rank}"
        place = DeviceRef.GPU(rank) if accelerator_count() else DeviceRef.CPU()
        types += [
            TensorType(BF16, [n, case.hidden_size], place),
            TensorType(DType.int32, [n, TOP_K], place),
            TensorType(of_weights, [n, TOP_K], place),
            TensorType(F32, [factors_of(case, kind).shape[1]], place),
        ]
    name = graph_name(form, case, kind)
    with graph_of(manager, name, types, module) as (graph, values):
        x, ids, weights, factors = (values[i::4] for i in range(4))
        if "balanced" in kind:  # the tables are last, those of a kind together
            tables = [value.buffer for value in graph.inputs[-2 * case.n_ranks :]]
            ids = [balance(ids[r], tables[r :: case.n_ranks]) for r in ranks]
        if form == "split":
            for r in ranks:
                manager.ep_dispatch_async(x[r], ids[r], device_id=r)
            dispatched = [manager.ep_dispatch_wait(device_id=r) for r in ranks]
        elif form == "fused":
            dispatched = [manager.ep_dispatch(x[r], ids[r], r) for r in ranks]
        else:
            dispatched = manager.ep_dispatch_all(x, ids, ranks)
        rows = list(map(experts, dispatched, factors))
        if form == "split":
            for r in ranks:
                manager.ep_combine_async(rows[r], device_id=r)
            sums = [manager.ep_combine_wait(weights[r], device_id=r) for r in ranks]
        elif form == "fused":  # in all-reduce mode MAX takes the ids again
            sums = [manager.ep_combine(rows[r], weights[r], r, ids[r]) for r in ranks]
        else:
            sums = manager.ep_combine_all(rows, weights, ranks)
        graph.output(*(v for y, d in zip(sums, dispatched) for v in (y, *d[:-1])))
    return graph


Results = dict[tuple[str, str], list[list[np.ndarray]]]
"""By form and routing what each rank got, as bits."""


def run(_: int, package: str, n_ranks: int, kind: str, forms: list[str]) -> Results:
    """Runs one package, in each form with each routing."""
    ep, case = importlib.import_module(package), case_of(n_ranks, kind)
    is_gpu = accelerator_count() > 0
    devices = [Accelerator(r) if is_gpu else CPU() for r in range(n_ranks)]
    session = InferenceSession(devices=devices if is_gpu else devices[:1])
    config = config_of(ep, case, kind)

    def load(form: str) -> Model:
        return session.load(build(ep.EPBatchManager(config), form, case, kind))

    return run_in(session, devices, ep, kind, {form: load(form) for form in forms})


def run_in(
    session: InferenceSession,
    devices: list[Device],
    ep: ModuleType,
    kind: str,
    models: dict[str, Model],
) -> Results:
    n_ranks, results = len(devices), {}
    case, factors = case_of(n_ranks, kind), factors_of(case_of(n_ranks, kind), kind)
    comm = ep.EPCommInitializer(config_of(ep, case, kind))
    comm.ep_init(session)
    if "balanced" in kind:
        tables = map(Buffer.from_numpy, placement(n_ranks))
        comm.set_eplb_placement(*([t.to(d) for d in devices] for t in tables))
    for form, model in models.items():
        for routing in RUNS:
            given, there = given_to(case, kind, routing), []
            for rank, device in enumerate(devices):
                weights = given.weights[rank]
                if "bfloat16_weights" in kind:
                    weights = narrow(weights, BF16)
                of_rank = given.tokens[rank], given.ids[rank], weights, factors[rank]
                there += [to_buffer(array, device) for array in of_rank]
            found = list(map(to_numpy, model.execute(*there, *comm.model_inputs())))
            n = len(found) // n_ranks
            results[form, routing] = [found[n * r : n * r + n] for r in range(n_ranks)]
    return results
