# SPDX-License-Identifier: Apache-2.0
"""The same program for MAX's EP and for max_ep: only the import differs.

One file, to be read from top to bottom and run with either.

    python graphs/changed_import.py --package max.nn.comm.ep
    python graphs/changed_import.py --package max_ep

Dispatch, an "expert" that multiplies its rows by a number of its own, combine;
in each of the forms in which both packages have them. On GPUs, one rank each.
MAX's EP needs two or more; without GPUs, max_ep runs four ranks on the CPU.

Prints digests of every form's results, which must be the same for both
packages: of dispatch, each expert's rows in ascending order, as a package may
deliver them in any; of combine, the sums of tokens and weights for which
float32 is exact, in whatever order it adds. ``--save FILE.npz`` keeps all
outputs, those of random tokens and weights too.
"""

import argparse
import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from max.driver import CPU, Accelerator, Buffer, Device, accelerator_count
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferValue, DeviceRef, Graph, TensorType, TensorValue, ops
from max.nn.quant_config import (
    InputScaleSpec,
    QuantConfig,
    QuantFormat,
    ScaleGranularity,
    ScaleOrigin,
    WeightScaleSpec,
)

HIDDEN_SIZE, N_EXPERTS, TOP_K, MAX_TOKENS, FP8_BLOCK = 1024, 16, 4, 64, 128
FORMS = ("split", "fused", "all")
"""Async and wait; one op a rank; one call for all ranks."""
OUTPUTS = ("sums", "rows", "scales", "row_offsets", "expert_ids")
PHY2LOG = [*range(N_EXPERTS), 3, 0, 7, 0, 1, 2, 3, 0]
"""With ``--balanced``, the logical expert of each physical one; 3 and 0 are busy."""
MAX_REPLICAS = PHY2LOG.count(0)
EXACT_RUNS, RANDOM_RUN = ("uniform", "crowded"), "random"
"""Times each graph runs: which experts are chosen, what tokens and weights are."""


@dataclass(frozen=True)
class Kind:
    """What is asked of dispatch and combine."""

    is_fp8: bool = False
    has_shared: bool = False
    """A fused shared expert; it comes first."""
    is_balanced: bool = False
    """Replicas of experts, of :data:`PHY2LOG`."""
    adds_up: bool = False
    """All ranks have the tokens of rank 0, and add up (``use_allreduce``)."""
    fuses_send: bool = False
    """``fuse_ffn_combine_send``, which asks experts, not dispatch or combine."""


def fp8_quant_config() -> QuantConfig:
    """Asks for float8_e4m3fn with a float32 scale for every 128 channels."""
    return QuantConfig(
        input_scale=InputScaleSpec(
            granularity=ScaleGranularity.BLOCK,
            origin=ScaleOrigin.DYNAMIC,
            dtype=DType.float32,
            block_size=(1, FP8_BLOCK),
        ),
        weight_scale=WeightScaleSpec(
            granularity=ScaleGranularity.BLOCK,
            dtype=DType.float32,
            block_size=(FP8_BLOCK, FP8_BLOCK),
        ),
        mlp_quantized_layers=set(),
        attn_quantized_layers=set(),
        format=QuantFormat.BLOCKSCALED_FP8,
    )


def ep_config(ep: ModuleType, n_ranks: int, kind: Kind) -> Any:
    """Makes the package's ``EPConfig``."""
    balanced = dict(
        eplb_enabled=True,
        num_moe_layers=1,
        max_replicas=MAX_REPLICAS,
        eplb_phy2log_plan=np.array([PHY2LOG]),
        num_logical_experts=N_EXPERTS,
    )
    return ep.EPConfig(
        dispatch_dtype=DType.float8_e4m3fn if kind.is_fp8 else DType.bfloat16,
        combine_dtype=DType.bfloat16,
        hidden_size=HIDDEN_SIZE,
        top_k=TOP_K,
        n_experts=len(PHY2LOG) if kind.is_balanced else N_EXPERTS,
        max_tokens_per_rank=MAX_TOKENS,
        n_gpus_per_node=n_ranks,
        n_nodes=1,
        node_id=0,
        dispatch_quant_config=fp8_quant_config() if kind.is_fp8 else None,
        fused_shared_expert=kind.has_shared,
        use_allreduce=kind.adds_up,
        fuse_ffn_combine_send=kind.fuses_send,
        **(balanced if kind.is_balanced else {}),
    )


# -------------------------------------------------------------------------- graph


def dispatch(
    manager: Any, form: str, x: list[TensorValue], ids: list[TensorValue]
) -> list[tuple[TensorValue, ...]]:
    """Dispatches on all ranks: rows, for FP8 scales, offsets, ids, statistics."""
    ranks = list(range(len(x)))
    if form == "all":
        return manager.ep_dispatch_all(x, ids, ranks)
    if form == "fused":
        return [manager.ep_dispatch(x[rank], ids[rank], rank) for rank in ranks]
    for rank in ranks:
        manager.ep_dispatch_async(x[rank], ids[rank], device_id=rank)
    return [manager.ep_dispatch_wait(device_id=rank) for rank in ranks]


def combine(
    manager: Any,
    form: str,
    rows: list[TensorValue],
    weights: list[TensorValue],
    ids: list[TensorValue],
) -> list[TensorValue]:
    """Combines on all ranks."""
    ranks = list(range(len(rows)))
    if form == "all":
        return manager.ep_combine_all(rows, weights, ranks)
    if form == "fused":
        # In all-reduce mode MAX takes the ids again.
        return [manager.ep_combine(rows[r], weights[r], r, ids[r]) for r in ranks]
    for rank in ranks:
        manager.ep_combine_async(rows[rank], device_id=rank)
    return [manager.ep_combine_wait(weights[rank], device_id=rank) for rank in ranks]


def experts(dispatched: tuple[TensorValue, ...], factors: TensorValue) -> TensorValue:
    """Multiplies every row by its expert's factor, ``[n_groups]`` float32; bfloat16.

    Rows after the last offset are undefined, as they were.
    """
    rows, *scales, row_offsets, expert_ids, _ = dispatched
    n_rows, last = rows.shape[0], int(expert_ids.shape[0]) - 1
    values = ops.cast(rows, DType.float32)
    if scales:
        blocks = ops.reshape(values, [n_rows, -1, FP8_BLOCK])
        blocks = blocks * ops.unsqueeze(ops.transpose(scales[0], 0, 1), 2)
        values = ops.reshape(blocks, [n_rows, HIDDEN_SIZE])
    row = ops.range(0, n_rows, 1, dtype=DType.int32, device=rows.device)
    ends = ops.cast(row_offsets[1:], DType.int32)
    # The group of a row is the number of groups that end at or before it.
    is_behind = ops.cast(ops.unsqueeze(row, 1) >= ends, DType.int32)
    group = ops.min(ops.squeeze(ops.sum(is_behind, axis=1), 1), last)
    expert = ops.gather(expert_ids, group, axis=0)
    factor = ops.gather(factors, ops.max(ops.min(expert, last), 0), axis=0)
    return ops.cast(values * ops.unsqueeze(factor, 1), DType.bfloat16)


def balance(ids: TensorValue, tables: list[BufferValue]) -> TensorValue:
    """Replaces logical experts ``[n, TOP_K]`` int32 by replicas, in plain ops."""
    log2phy, logcnt = (ops.buffer_load(table)[0] for table in tables)
    n, device = ids.shape[0], ids.device
    token = ops.range(0, n, 1, out_dim=n, dtype=DType.int32, device=device)
    k = ops.range(0, TOP_K, 1, dtype=DType.int32, device=device)
    choice = ops.unsqueeze(token, 1) * TOP_K + k
    replica = choice % ops.gather(logcnt, ids, axis=0)
    places = ids * MAX_REPLICAS + replica
    return ops.gather(ops.reshape(log2phy, [-1]), places, axis=0)


def build(
    ep: ModuleType,
    form: str,
    n_ranks: int,
    device_of: Callable[[int], DeviceRef],
    kind: Kind,
    weights_dtype: DType,
) -> Graph:
    """Builds a round trip of all ranks.

    Inputs, each a tensor a rank: tokens ``[n, HIDDEN_SIZE]`` bfloat16, ids
    ``[n, TOP_K]`` int32, weights of that shape, factors ``[n_groups]`` float32;
    then the EP inputs. Outputs, each a tensor a rank: the sums; what dispatch gave,
    without its statistics.
    """
    config = ep_config(ep, n_ranks, kind)
    manager = ep.EPBatchManager(config)
    ranks = range(n_ranks)
    types: list[Any] = []
    for dtype, width in (
        (DType.bfloat16, HIDDEN_SIZE),
        (DType.int32, TOP_K),
        (weights_dtype, TOP_K),
    ):
        types += [TensorType(dtype, [f"n_{r}", width], device_of(r)) for r in ranks]
    n_groups = [config.n_experts // n_ranks + kind.has_shared]
    types += [TensorType(DType.float32, n_groups, device_of(r)) for r in ranks]
    name = f"changed_import_{form}_{n_ranks}" + "_fp8" * kind.is_fp8
    name += "_shared" * kind.has_shared + "_balanced" * kind.is_balanced
    name += "_allreduce" * kind.adds_up
    with Graph(name, input_types=[*types, *manager.input_types()]) as graph:
        values = [value.tensor for value in graph.inputs[: len(types)]]
        manager.fetch_buffers(graph.inputs[len(types) :])
        x, ids, weights, factors = (
            values[i : i + n_ranks] for i in range(0, len(values), n_ranks)
        )
        if kind.is_balanced:  # the tables are the last inputs, those of a kind together
            tables = [value.buffer for value in graph.inputs[-2 * n_ranks :]]
            ids = [balance(ids[r], tables[r::n_ranks]) for r in ranks]
        dispatched = dispatch(manager, form, x, ids)
        rows = [experts(*pair) for pair in zip(dispatched, factors)]
        sums = combine(manager, form, rows, weights, ids)
        kept = [value for values in list(zip(*dispatched))[:-1] for value in values]
        graph.output(*sums, *kept)
    return graph


# --------------------------------------------------------------------------- data


def make_inputs(run: str, counts: list[int], kind: Kind) -> list[list[np.ndarray]]:
    """Makes what the ranks are given, ``counts`` tokens each: tokens, ids, weights,
    factors. All but ids are float32 that bfloat16 can hold.

    But for the random run, tokens are integers of four bits and an exponent,
    448 the largest of every block, so that FP8 holds them with a scale of 1;
    and weights are sixteenths.
    """
    rng = np.random.default_rng([len(counts), *run.encode()])
    tokens, ids, weights = [], [], []
    for n in counts:
        sign = rng.choice([-1.0, 1.0], (n, HIDDEN_SIZE))
        x = sign * rng.integers(1, 16, sign.shape) * 2 ** rng.integers(0, 4, sign.shape)
        x[:, ::FP8_BLOCK] = 448 * sign[:, ::FP8_BLOCK]
        w = rng.integers(1, 16, (n, TOP_K)) / 16
        if run == RANDOM_RUN:
            x = rng.standard_normal(x.shape)
            w = rng.dirichlet(np.ones(TOP_K), n)
        n_choosable = TOP_K + 1 if run == "crowded" else N_EXPERTS
        chosen = np.argsort(rng.random((n, n_choosable)), axis=1)[:, :TOP_K]
        tokens.append(widen(narrow(x.astype(np.float32))))
        ids.append(chosen.astype(np.int32))
        weights.append(widen(narrow(w.astype(np.float32))))
    if kind.adds_up:
        tokens, ids, weights = ([x[0]] * len(x) for x in (tokens, ids, weights))
    experts = PHY2LOG if kind.is_balanced else range(N_EXPERTS)
    factors = 1 + np.array(experts, np.float32).reshape(len(counts), -1)
    shared = np.full((len(counts), int(kind.has_shared)), 3, np.float32)
    return [tokens, ids, weights, list(np.hstack([shared, factors]))]


def narrow(x: np.ndarray) -> np.ndarray:
    """Cuts float32 off to bfloat16, as bits."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def widen(bits: np.ndarray) -> np.ndarray:
    """Undoes :func:`narrow` for what it did not change."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_buffer(array: np.ndarray, dtype: DType) -> Buffer:
    """Hands an array to MAX, on the host."""
    if dtype == DType.bfloat16:
        return Buffer.from_numpy(narrow(array)).view(dtype, array.shape)
    return Buffer.from_numpy(np.ascontiguousarray(array))


def to_numpy(buffer: Buffer) -> np.ndarray:
    """Takes an array from MAX; bfloat16 and float8 as their bits."""
    bits = {DType.bfloat16: DType.uint16, DType.float8_e4m3fn: DType.uint8}
    buffer = buffer.to(CPU())
    if buffer.dtype in bits:
        buffer = buffer.view(bits[buffer.dtype], list(buffer.shape))
    return buffer.to_numpy().copy()


def placement_tables() -> list[np.ndarray]:
    """Makes ``log2phy`` and ``logcnt`` of :data:`PHY2LOG`, one layer."""
    logcnt = np.bincount(PHY2LOG).astype(np.int32)
    log2phy = np.full((N_EXPERTS, MAX_REPLICAS), -1, np.int32)
    for expert, places in enumerate(log2phy):
        places[: logcnt[expert]] = np.flatnonzero(np.equal(PHY2LOG, expert))
    return [log2phy[None], logcnt[None]]


def rows_of_experts(ids: list[np.ndarray], kind: Kind) -> np.ndarray:
    """Counts the rows that the experts of each rank must get, ``[n_ranks, n_groups]``,
    by expert; ``ids`` are int32 ``[n_tokens, TOP_K]`` of each rank."""
    n_experts = N_EXPERTS
    if kind.is_balanced:
        (log2phy,), (logcnt,) = placement_tables()
        n_experts = len(PHY2LOG)
        choices = [np.arange(x.size).reshape(x.shape) for x in ids]
        ids = [log2phy[x, c % logcnt[x]] for x, c in zip(ids, choices)]
    sent = ids[:1] if kind.adds_up else ids
    chosen = np.bincount(np.concatenate(sent).ravel(), minlength=n_experts)
    n_tokens = [[len(x)] * kind.has_shared for x in ids]
    return np.hstack([n_tokens, chosen.reshape(len(ids), -1)]).astype(np.int64)


def by_expert(arrays: list[np.ndarray], n_rows: np.ndarray) -> list[np.ndarray]:
    """Sorts the bytes of each expert's rows, of FP8 with their scales.

    MAX lets every expert's FP8 rows begin at a multiple of four; what follows the
    ``n_rows`` that each must have is left out.
    """
    rows, *scales, row_offsets, expert_ids = arrays
    columns = [rows] + [np.ascontiguousarray(scale.T) for scale in scales]
    row_bytes = np.concatenate([c.view(np.uint8) for c in columns], axis=1)
    found = [row_bytes[:0]] * len(expert_ids)
    for group, expert in enumerate(expert_ids):
        begin, end = (int(row_offsets[group + i]) for i in range(2))
        if end > begin:
            mine = row_bytes[begin : min(end, begin + int(n_rows[expert]))]
            found[expert] = mine[np.lexsort(mine.T[::-1])]
    return found


# --------------------------------------------------------------------------- main


def execute(
    model: Model,
    comm: Any,
    inputs: list[list[np.ndarray]],
    dtypes: list[DType],
    devices: list[Device],
) -> list[list[np.ndarray]]:
    """Runs a graph of :func:`build` once; returns the outputs of each rank."""
    # Kept until the run has ended: copies to a GPU may come later.
    given = [
        to_buffer(array, dtype)
        for arrays, dtype in zip(inputs, dtypes)
        for array in arrays
    ]
    there = [buffer.to(devices[i % len(devices)]) for i, buffer in enumerate(given)]
    outputs = model.execute(*there, *comm.model_inputs())
    found = [to_numpy(buffer) for buffer in outputs]
    return [found[rank :: len(devices)] for rank in range(len(devices))]


def main() -> None:
    """Runs one package; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", default="max_ep")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4))
    parser.add_argument("--forms", nargs="+", choices=FORMS)
    parser.add_argument("--tokens", nargs="+", type=int, help="of each rank")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--shared-expert", action="store_true", help="a fused one")
    parser.add_argument("--balanced", action="store_true", help="with replicas")
    parser.add_argument("--allreduce", action="store_true", help="use_allreduce")
    parser.add_argument("--fused-send", action="store_true", help="of the experts")
    parser.add_argument("--bfloat16-weights", action="store_true")
    parser.add_argument("--save", help="an .npz of all outputs")
    options = parser.parse_args()

    ep = importlib.import_module(options.package)  # this is all that differs

    n_gpus = accelerator_count()
    n_ranks = options.ranks or {0: 4, 1: 1, 2: 2, 3: 2}.get(n_gpus, 4)
    devices = [Accelerator(rank) if n_gpus else CPU() for rank in range(n_ranks)]
    counts = options.tokens or [MAX_TOKENS, 1, 17, 40][:n_ranks]
    # The ranks of one CPU run one after another, so none may wait in its turn.
    # MAX's EP fuses a shared expert where dispatch is one launch.
    forms = options.forms or [
        form
        for form in FORMS
        if (n_gpus or form != "fused" or options.allreduce)
        and (form != "split" or not options.shared_expert)
    ]
    kind = Kind(
        options.fp8,
        options.shared_expert,
        options.balanced,
        options.allreduce,
        options.fused_send,
    )
    dtypes = [DType.bfloat16, DType.int32, DType.float32, DType.float32]
    if options.bfloat16_weights:
        dtypes[2] = DType.bfloat16
    if options.fp8 and not n_gpus:
        parser.error("--fp8 needs GPUs: MAX has no float8 tensors on a CPU")
    session = InferenceSession(devices=devices if n_gpus else [CPU()])
    comm = ep.EPCommInitializer(ep_config(ep, n_ranks, kind))
    comm.ep_init(session)
    if options.balanced:
        tables = [Buffer.from_numpy(table) for table in placement_tables()]
        comm.set_eplb_placement(*([t.to(d) for d in devices] for t in tables))
    if options.allreduce:
        counts = counts[:1] * n_ranks
    saved = {"counts": np.array(counts)}
    for form in forms:
        device_of = DeviceRef.GPU if n_gpus else lambda rank: DeviceRef.CPU()
        graph = build(ep, form, n_ranks, device_of, kind, dtypes[2])
        model = session.load(graph)
        dispatch_digest, combine_digest = hashlib.sha256(), hashlib.sha256()
        for run in (*EXACT_RUNS, RANDOM_RUN):
            inputs = make_inputs(run, counts, kind)
            found = execute(model, comm, inputs, dtypes, devices)
            n_rows = rows_of_experts(inputs[1], kind)
            for rank, (sums, *dispatched) in enumerate(found):
                names = OUTPUTS if options.fp8 else OUTPUTS[:2] + OUTPUTS[3:]
                for name, array in zip(names, [sums, *dispatched]):
                    saved[f"{form}/{run}/{rank}/{name}"] = array
                if run in EXACT_RUNS:
                    combine_digest.update(sums.tobytes())
                    for expert_rows in by_expert(dispatched, n_rows[rank]):
                        dispatch_digest.update(b"%d rows" % len(expert_rows))
                        dispatch_digest.update(expert_rows.tobytes())
        digests = dispatch_digest.hexdigest()[:16], combine_digest.hexdigest()[:16]
        print(f"{form}: dispatch %s, combine %s" % digests, flush=True)
    if options.save:
        np.savez(options.save, **saved)


if __name__ == "__main__":
    main()
