# SPDX-License-Identifier: Apache-2.0
"""Runs cases through MAX: many cases in one compiled graph, compared bitwise.

Compiling is what a test of a graph costs, so the graph is built once for many
cases, with open token counts, and run for every routing.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cases import BF16, Case, Expected, Inputs
from max import driver
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, Module, TensorType, TensorValue

from max_ep import EPBatchManager, EPCommInitializer, EPConfig
from max_ep.reference import DispatchResult, PaddedResult

CPU = DeviceRef.CPU()


def run_in_child(code: str, *arguments: str) -> str:
    """Runs Python code that may crash in a process of its own; returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"died of {done.returncode}: {done.stderr[-1000:]}"
    return done.stdout


def to_buffer(array: np.ndarray, device: Device | None = None) -> Buffer:
    """Hands an array to MAX; bfloat16 arrives as its bits."""
    buffer = Buffer.from_numpy(np.ascontiguousarray(array))
    if array.dtype == np.uint16:
        buffer = buffer.view(BF16, array.shape)
    return buffer.to(device) if device is not None else buffer


_BITS = {BF16: DType.uint16, DType.float8_e4m3fn: DType.uint8}


def to_numpy(buffer: Buffer) -> np.ndarray:
    """Takes an array from MAX; what NumPy lacks, as its bits. A copy."""
    if not buffer.is_host:
        buffer = buffer.to(driver.CPU())
    if buffer.dtype in _BITS:
        buffer = buffer.view(_BITS[buffer.dtype], tuple(buffer.shape))
    return buffer.to_numpy().copy()


@dataclass
class RankInputs:
    """Graph inputs of one rank."""

    tokens: TensorValue
    ids: TensorValue
    weights: TensorValue
    input_scales: TensorValue | None
    expert_rows: TensorValue | None


@dataclass
class Received:
    """What one rank got, whole tensors, bits where the oracle has bits."""

    rows: np.ndarray
    scales: np.ndarray | None
    row_offsets: np.ndarray
    expert_ids: np.ndarray
    stats: np.ndarray
    src_info: np.ndarray
    result: np.ndarray


@dataclass
class ReceivedPadded:
    """What one rank got in padded rows, whole tensors."""

    rows: np.ndarray
    scales: np.ndarray | None
    recv_counts: np.ndarray
    src_info: np.ndarray
    recv_ranges: np.ndarray
    kept_src_info: np.ndarray
    """What the manager hands from dispatch to combine: `src_info`."""
    result: np.ndarray


def input_types(
    case: Case,
    prefix: str = "",
    config: EPConfig | None = None,
    numbers_differ: bool = False,
) -> list[TensorType]:
    """Declares the inputs of all ranks of a case, in the order of `flatten`.

    With `numbers_differ`, tokens, ids and weights may have different numbers of rows.
    """
    types = []
    for rank in range(case.n_ranks):
        n = f"{prefix}{case.name}_t{rank}"
        place = CPU if config is None else config.device(rank)
        rows = [f"{n}_{what}" if numbers_differ else n for what in range(3)]
        types += [
            TensorType(case.tokens, [rows[0], case.hidden_size], place),
            TensorType(DType.int32, [rows[1], case.top_k], place),
            TensorType(DType.float32, [rows[2], case.top_k], place),
        ]
        if case.scales is not None:
            n_scales = 1 if case.scales == "one" else case.n_experts
            types.append(TensorType(DType.float32, [n_scales], place))
        if not case.sends_rows_back:
            shape = [*case.rows_shape, case.hidden_size]
            types.append(TensorType(case.combine, shape, place))
    return types


def take_inputs(case: Case, values: Iterable) -> list[RankInputs]:
    """Takes the inputs of all ranks of a case from an iterator."""

    def take() -> TensorValue:
        return next(values).tensor

    return [
        RankInputs(
            take(),
            take(),
            take(),
            take() if case.scales is not None else None,
            None if case.sends_rows_back else take(),
        )
        for _ in range(case.n_ranks)
    ]


def flatten(given: Inputs, config: EPConfig | None = None) -> list[Buffer]:
    """Lists the inputs of all ranks in the order of `input_types`."""
    buffers = []
    for rank in range(len(given.tokens)):
        arrays = []
        arrays += [given.tokens[rank], given.ids[rank], given.weights[rank]]
        if given.input_scales is not None:
            arrays.append(given.input_scales)
        if given.expert_rows is not None:
            arrays.append(given.expert_rows[rank])
        device = None
        if config is not None and config.target == "gpu":
            device = driver.Accelerator(config.device(rank).id)
        buffers += [to_buffer(array, device) for array in arrays]
    return buffers


def weights_of(
    config: EPConfig, given: RankInputs
) -> tuple[TensorValue | None, TensorValue | None]:
    """Says which router weights dispatch takes, and which combine."""
    if config.combines_sums:
        return given.weights, None
    return None, given.weights


def round_trip(
    manager: EPBatchManager, ranks: Sequence[RankInputs]
) -> list[list[TensorValue]]:
    """Builds dispatch and combine of all ranks, in async and wait forms."""
    weights = [weights_of(manager.config, given) for given in ranks]
    for rank, given in enumerate(ranks):
        manager.ep_dispatch_async(
            given.tokens, given.ids, rank, given.input_scales, weights[rank][0]
        )
    dispatched = [manager.ep_dispatch_wait(rank) for rank in range(len(ranks))]
    for rank, given in enumerate(ranks):
        rows = given.expert_rows
        manager.ep_combine_async(dispatched[rank][0] if rows is None else rows, rank)
    # `_src_info` is how the manager hands src_info from wait to combine.
    return [
        [
            *dispatched[rank],
            manager._src_info[rank],
            manager.ep_combine_wait(weights[rank][1], rank),
        ]
        for rank in range(len(ranks))
    ]


def take_outputs(
    case: Case, outputs: Iterable[Buffer]
) -> list[Received] | list[ReceivedPadded]:
    """Takes what `round_trip` built from an iterator over a run's outputs."""

    def take() -> np.ndarray:
        return to_numpy(next(outputs))

    kind = ReceivedPadded if case.is_padded else Received
    return [
        kind(take(), take() if case.is_fp8 else None, *(take() for _ in range(5)))
        for _ in range(case.n_ranks)
    ]


def fused_round_trip(
    manager: EPBatchManager, ranks: Sequence[RankInputs]
) -> list[list[TensorValue]]:
    """Builds what `round_trip` builds, one launch a direction and rank."""
    weights = [weights_of(manager.config, given) for given in ranks]
    dispatched = [
        manager.ep_dispatch(
            given.tokens, given.ids, rank, given.input_scales, weights[rank][0]
        )
        for rank, given in enumerate(ranks)
    ]
    return [
        [
            *dispatched[rank],
            manager._src_info[rank],
            manager.ep_combine(
                dispatched[rank][0] if given.expert_rows is None else given.expert_rows,
                weights[rank][1],
                rank,
            ),
        ]
        for rank, given in enumerate(ranks)
    ]


@contextlib.contextmanager
def building(
    name: str,
    case: Case,
    config: EPConfig | None = None,
    module: Module | None = None,
    numbers_differ: bool = False,
) -> Iterator[tuple[EPBatchManager, list[RankInputs], Graph]]:
    """Begins a graph of one case: a manager that has its buffers, and all inputs."""
    config = config or case.config()
    manager = EPBatchManager(config)
    types = input_types(case, "", config, numbers_differ)
    declared = [*types, *manager.input_types()]
    with Graph(name, input_types=declared, module=module) as graph:
        manager.fetch_buffers(graph.inputs[len(types) :])
        yield manager, take_inputs(case, iter(graph.inputs)), graph


class Groups:
    """The groups of several cases in one compiled graph."""

    def __init__(
        self,
        session: InferenceSession | None,
        name: str,
        cases: Mapping[str, Case],
        *,
        config: Callable[[Case], EPConfig] = Case.config,
        build: Callable = round_trip,
        module: Module | None = None,
        numbers_differ: bool = False,
    ) -> None:
        """Builds and compiles the graph and sets up each case's memory.

        With a module, the graph is only added to it, which takes no session, and
        `start` does the rest.
        """
        self.cases = cases
        managers = {n: EPBatchManager(config(c)) for n, c in cases.items()}
        types = []
        for case_name, case in cases.items():
            manager = managers[case_name]
            types += input_types(case, "", manager.config, numbers_differ)
            types += manager.input_types()
        with Graph(name, input_types=types, module=module) as graph:
            values = iter(graph.inputs)
            outputs = []
            for case_name, case in cases.items():
                ranks = take_inputs(case, values)
                manager = managers[case_name]
                n_values = len(manager.input_types())
                manager.fetch_buffers([next(values) for _ in range(n_values)])
                outputs += [v for r in build(manager, ranks) for v in r]
            graph.output(*outputs)
        self.comms = {n: EPCommInitializer(m.config) for n, m in managers.items()}
        if module is None:
            self.start(session, session.load(graph))

    def start(self, session: InferenceSession, model: Model) -> None:
        """Takes the compiled graph and sets up each case's memory."""
        self.model = model
        for comm in self.comms.values():
            comm.ep_init(session)

    def inputs(self, given: Mapping[str, Inputs]) -> list[Buffer]:
        """Lists the inputs of the model."""
        inputs = []
        for name, comm in self.comms.items():
            inputs += flatten(given[name], comm.config) + comm.model_inputs()
        return inputs

    def run(self, given: Mapping[str, Inputs]) -> dict[str, list[Received]]:
        """Runs all cases once."""
        inputs = self.inputs(given)
        try:
            outputs = iter(self.model.execute(*inputs))
            for comm in self.comms.values():
                comm.check()
        except Exception:
            for comm in self.comms.values():
                comm.reset()
            raise
        return {n: take_outputs(c, outputs) for n, c in self.cases.items()}

    def close(self) -> None:
        for comm in self.comms.values():
            comm.close()


# ------------------------------------------------------------------- comparing


def as_bits(array: np.ndarray) -> np.ndarray:
    """Views an array's elements as unsigned integers."""
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def assert_same_bits(where: str, got: np.ndarray, want: np.ndarray) -> None:
    """Compares bit for bit and says where the first difference is."""
    assert got.dtype == want.dtype, f"{where}: {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{where}: {got.shape}, want {want.shape}"
    differs = np.argwhere(as_bits(got) != as_bits(want))
    if len(differs) == 0:
        return
    first = tuple(int(i) for i in differs[0])
    raise AssertionError(
        f"{where}: {len(differs)} of {got.size} elements differ, first at row "
        f"{first[0]}"
        + (f", column {first[1]}" if len(first) > 1 else "")
        + f": got {got[first]} (bits {as_bits(got)[first]:#x}), want "
        f"{want[first]} (bits {as_bits(want)[first]:#x})"
    )


def _describe_row(result: DispatchResult, row: int) -> str:
    group = int(np.searchsorted(result.row_offsets, row, "right")) - 1
    token_idx, k = result.src_info[row]
    return (
        f"group {group}, from rank {result.src_ranks[row]}, token "
        f"{token_idx}, choice {k}"
    )


def assert_padded(where: str, got: ReceivedPadded, want: PaddedResult) -> None:
    """Compares all that dispatch delivers to one rank, expert by expert."""
    assert_same_bits(f"{where}: recv_counts", got.recv_counts, want.recv_counts)
    for name in ("recv_ranges", "src_info", "rows", "scales"):
        have, need = getattr(got, name), getattr(want, name)
        if need is None:
            continue
        assert have.shape == need.shape, f"{where}: {name}: {have.shape}"
        for expert, n_rows in enumerate(want.recv_counts):
            here = f"{where}: {name} of local expert {expert}"
            if name == "scales":
                assert_same_bits(
                    here, have[expert, :, :n_rows], need[expert, :, :n_rows]
                )
            elif name == "recv_ranges":
                assert_same_bits(here, have[expert], need[expert])
            else:
                assert_same_bits(here, have[expert, :n_rows], need[expert, :n_rows])
    assert (got.kept_src_info == got.src_info).all()


def assert_dispatched(
    where: str,
    got: Sequence[Received] | Sequence[ReceivedPadded],
    want: Sequence[DispatchResult] | Sequence[PaddedResult],
) -> None:
    """Compares all that dispatch delivers, on every rank."""
    for rank, (g, w) in enumerate(zip(got, want, strict=True)):
        here = f"{where}, rank {rank}"
        if isinstance(w, PaddedResult):
            assert_padded(here, g, w)
            continue
        # First what says which row is which.
        assert_same_bits(f"{here}: row_offsets", g.row_offsets, w.row_offsets)
        assert_same_bits(f"{here}: expert_ids", g.expert_ids, w.expert_ids)
        n_rows = len(w.rows)
        assert_same_bits(f"{here}: src_info", g.src_info[:n_rows], w.src_info)
        for what, have, need in [("rows", g.rows[:n_rows], w.rows)] + (
            [("scales (transposed)", g.scales.T[:n_rows], w.scales.T)]
            if w.scales is not None
            else []
        ):
            differs = np.argwhere(as_bits(have) != as_bits(need))
            if len(differs):
                row = int(differs[0, 0])
                twins = [
                    f"row {r} of rank {other} ({_describe_row(o, r)})"
                    for other, o in enumerate(want)
                    if what == "rows"
                    for r in np.flatnonzero(
                        (as_bits(o.rows) == as_bits(have)[row]).all(axis=1)
                    )[:1]
                ]
                here += f" ({_describe_row(w, row)}; what is there is "
                here += f"{twins[0] if twins else 'no row of this dispatch'})"
            assert_same_bits(f"{here}: {what}", have, need)


def assert_combined(
    where: str, got: Sequence[Received], want: Sequence[np.ndarray]
) -> None:
    """Compares what combine gives back, on every rank; a row is a token."""
    for rank, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(f"{where}, rank {rank}: combine", g.result, w)


def assert_round_trip(where: str, got: Sequence[Received], want: Expected) -> None:
    """Compares dispatch, then combine."""
    assert_dispatched(where, got, want.dispatch)
    assert_combined(where, got, want.combine)
