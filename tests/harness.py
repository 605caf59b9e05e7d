# SPDX-License-Identifier: Apache-2.0
"""Runs cases through MAX: many cases in one compiled graph, compared bitwise.

Compiling is what a test of a graph costs, so the graph is built once for many
cases, with open token counts, and run for every routing.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from max import driver
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, Module, TensorType, TensorValue

from max_ep import EPBatchManager, EPCommInitializer, EPConfig
from max_ep.quantize import float8_e8m0fnu_to_float32
from tests.oracle.cases import BF16, Case
from tests.oracle.drawn import Inputs, widen
from tests.oracle.oracle import Expected
from tests.oracle.row_layouts import PaddedResult, scales_of_tiles

CPU = DeviceRef.CPU()


def to_buffer(array: np.ndarray, device: Device | None = None) -> Buffer:
    """Hands an array to MAX; bfloat16 arrives as its bits."""
    buffer = Buffer.from_numpy(np.ascontiguousarray(array))
    if array.dtype == np.uint16:
        buffer = buffer.view(BF16, array.shape)
    return buffer.to(device) if device is not None else buffer


selected: set[str | None] = set()
"""Names of the tests of this run, of their fixtures, and of their cases: all that a
file has to compile."""

_BYTES = (DType.float8_e4m3fn, DType.float8_e8m0fnu)
_BITS = {BF16: DType.uint16} | dict.fromkeys(_BYTES, DType.uint8)


def to_numpy(buffer: Buffer) -> np.ndarray:
    """Takes an array from MAX; what NumPy lacks, as its bits. A copy."""
    if not buffer.is_host:
        buffer = buffer.to(driver.CPU())
    if buffer.dtype in _BITS:
        buffer = buffer.view(_BITS[buffer.dtype], tuple(buffer.shape))
    return buffer.to_numpy().copy()


@dataclass
class RankInputs:
    tokens: TensorValue | tuple[TensorValue, TensorValue]
    ids: TensorValue
    weights: TensorValue
    input_scales: TensorValue | None = None
    expert_rows: TensorValue | None = None

    def rows_of(self, dispatched: Sequence[TensorValue]) -> TensorValue:
        """The rows that go back: those dispatched, or those given."""
        return dispatched[0] if self.expert_rows is None else self.expert_rows


def input_types(
    case: Case, prefix: str = "", config: EPConfig | None = None
) -> list[TensorType]:
    """Declares the inputs of all ranks of a case, in the order of `flatten`."""
    types = []
    for rank in range(case.n_ranks):
        n = f"{prefix or case.name}_t{rank}"
        place = CPU if config is None else config.device(rank)
        tokens = [(case.tokens, case.hidden_size)]
        if case.forwards:
            used = config or case.config()
            tokens = [(used.output_dtype, used.row_columns)]
            tokens += [(used.scales_dtype, used.n_scales)]
        types += [
            *(TensorType(dtype, [n, columns], place) for dtype, columns in tokens),
            TensorType(DType.int32, [n, case.top_k], place),
            TensorType(DType.float32, [n, case.top_k], place),
        ]
        if case.scales is not None:
            n_scales = 1 if case.scales == "one" else case.n_experts
            types.append(TensorType(DType.float32, [n_scales], place))
        if not case.sends_rows_back:
            shape = [*case.rows_shape, case.hidden_size]
            types.append(TensorType(case.combine, shape, place))
    return types


def take_inputs(case: Case, values: Iterable) -> list[RankInputs]:
    ranks = []
    for _ in range(case.n_ranks):
        tokens = next(values).tensor
        if case.forwards:
            tokens = tokens, next(values).tensor
        given = RankInputs(tokens, *(next(values).tensor for _ in range(2)))
        if case.scales is not None:
            given.input_scales = next(values).tensor
        if not case.sends_rows_back:
            given.expert_rows = next(values).tensor
        ranks.append(given)
    return ranks


def flatten(given: Inputs, config: EPConfig | None = None) -> list[Buffer]:
    """Lists the inputs of all ranks in the order of `input_types`."""
    buffers = []
    for rank in range(len(given.tokens)):
        arrays = [given.ids[rank], given.weights[rank]]
        if given.input_scales is not None:
            arrays.append(given.input_scales)
        if given.expert_rows is not None:
            arrays.append(given.expert_rows[rank])
        device = None
        if config is not None and config.target == "gpu":
            device = driver.Accelerator(config.device(rank).id)
        tokens = [to_buffer(given.tokens[rank], device)]
        if config is not None and config.tokens_are_quantized:
            rounded = {"power_of_two_scales": True}
            more = rounded if config.fp8_power_of_two_scales else {}
            bits = config.token_format.quantize(widen(given.tokens[rank]), **more)
            tokens = [to_buffer(array, device) for array in bits]
            for i, dtype in enumerate((config.output_dtype, config.scales_dtype)):
                tokens[i] = tokens[i].view(dtype, tuple(tokens[i].shape))
        buffers += tokens
        buffers += [to_buffer(array, device) for array in arrays]
    return buffers


def weights_of(
    config: EPConfig, given: RankInputs
) -> tuple[TensorValue | None, TensorValue | None]:
    """Says which router weights dispatch takes, and which combine."""
    return (given.weights, None) if config.combines_sums else (None, given.weights)


Built = list[list[TensorValue]]
"""What dispatch gives a rank, `src_info` as it is handed to combine, the result."""


def built_of(
    manager: EPBatchManager,
    ranks: Sequence[RankInputs],
    dispatched: Sequence[Sequence[TensorValue]],
    sums: Sequence[TensorValue],
) -> Built:
    """Lists what each rank gets; with a cap on rows also how many are dropped."""
    built = []
    for i, (x, d, y) in enumerate(zip(ranks, dispatched, sums)):
        # `_src_info` is how the manager hands src_info from wait to combine.
        built.append([*d, manager._src_info[i], y])
        if manager.config.max_output_rows is not None:
            built[i] += manager.ep_dropped(x.ids, i)
    return built


def round_trip(manager: EPBatchManager, ranks: Sequence[RankInputs]) -> Built:
    """Builds dispatch and combine of all ranks, in async and wait forms."""
    weights = [weights_of(manager.config, given) for given in ranks]
    for i, x in enumerate(ranks):
        manager.ep_dispatch_async(x.tokens, x.ids, i, x.input_scales, weights[i][0])
    dispatched = [manager.ep_dispatch_wait(i) for i in range(len(ranks))]
    for i, x in enumerate(ranks):
        manager.ep_combine_async(x.rows_of(dispatched[i]), i)
    sums = [manager.ep_combine_wait(w, i) for i, (_, w) in enumerate(weights)]
    return built_of(manager, ranks, dispatched, sums)


def fused_round_trip(manager: EPBatchManager, ranks: Sequence[RankInputs]) -> Built:
    """Builds what `round_trip` builds, one launch a direction and rank."""
    weights = [weights_of(manager.config, given) for given in ranks]
    dispatched = [
        manager.ep_dispatch(x.tokens, x.ids, i, x.input_scales, weights[i][0])
        for i, x in enumerate(ranks)
    ]
    sums = [
        manager.ep_combine(x.rows_of(dispatched[i]), weights[i][1], i)
        for i, x in enumerate(ranks)
    ]
    return built_of(manager, ranks, dispatched, sums)


def all_round_trip(manager: EPBatchManager, ranks: Sequence[RankInputs]) -> Built:
    """Builds what `round_trip` builds from the `*_all` forms. The ranks are
    named in reverse, which must not matter."""
    order = list(reversed(range(len(ranks))))
    given = [ranks[i] for i in order]
    sent, weights = zip(*(weights_of(manager.config, x) for x in given))
    scales = [x.input_scales for x in given]
    dispatched = manager.ep_dispatch_all(
        [x.tokens for x in given],
        [x.ids for x in given],
        order,
        None if scales[0] is None else scales,
        None if sent[0] is None else list(sent),
    )
    rows = [x.rows_of(d) for d, x in zip(dispatched, given)]
    weights = None if weights[0] is None else list(weights)
    sums = manager.ep_combine_all(rows, weights, order)
    return built_of(manager, ranks, dispatched[::-1], sums[::-1])


PACKED = "row_offsets expert_ids stats src_info result".split()
PADDED = "recv_counts src_info recv_ranges kept_src_info result".split()
"""What follows the rows and their scales; `kept_src_info` goes to combine."""


def take_outputs(case: Case, outputs: Iterable[Buffer]) -> list[SimpleNamespace]:
    """Takes what `round_trip` built from an iterator over a run's outputs: whole
    tensors, as bits where the oracle has bits. Scales stand as the oracle's."""
    names = [
        "rows",
        *["scales"] * case.is_quantized,
        *["row_scales"] * case.row_scales,
        *(PADDED if case.is_padded else PACKED),
        *["dropped", "dropped_of_experts"] * (case.max_output_rows is not None),
    ]
    layout = case.config().scale_layout
    if layout == "tiles":
        names.insert(names.index("row_offsets") + 1, "scales_offsets")
    ranks = []
    for _ in range(case.n_ranks):
        got = SimpleNamespace(**{name: to_numpy(next(outputs)) for name in names})
        if layout == "rows":
            got.scales = got.scales.swapaxes(-1, -2)
        if layout == "packed":
            bits = got.scales[..., np.newaxis].view(np.uint8).swapaxes(-1, -2)
            *outer, n_words, _, n_rows = bits.shape
            got.scales = float8_e8m0fnu_to_float32(bits)
            got.scales = got.scales.reshape(*outer, 4 * n_words, n_rows)
        if layout == "tiles":
            assert (got.scales_offsets == np.arange(case.n_local_experts)).all()
            n_blocks = case.token_format.n_scales(case.hidden_size)
            got.scales = scales_of_tiles(got.scales, got.row_offsets, n_blocks).T
        ranks.append(got)
    return ranks


@contextlib.contextmanager
def graph_of(
    manager: Any, name: str, types: Sequence[TensorType], module: Module | None = None
) -> Iterator[tuple[Graph, list[TensorValue]]]:
    """Begins a graph, whose manager has its buffers; yields it, and what it is given
    besides."""
    declared = [*types, *manager.input_types()]
    with Graph(name, input_types=declared, module=module) as graph:
        manager.fetch_buffers(graph.inputs[len(types) :])
        yield graph, [value.tensor for value in graph.inputs[: len(types)]]


@contextlib.contextmanager
def building(
    name: str, case: Case, config: EPConfig | None = None, module: Module | None = None
) -> Iterator[tuple[EPBatchManager, list[RankInputs], Graph]]:
    """Begins a graph of one case: a manager that has its buffers, and all inputs."""
    config = config or case.config()
    manager = EPBatchManager(config)
    types = input_types(case, "", config)
    with graph_of(manager, name, types, module) as (graph, values):
        yield manager, take_inputs(case, iter(values)), graph


class Groups:
    """The groups of several cases in one graph.

    `build` makes a round trip of one case; or `build_all` makes some of all: it takes
    managers and inputs by name, and returns what it built by label, which is a name or
    begins with one. With a module, the graph is only added to it, which takes no
    session, and `start` does the rest.
    """

    def __init__(
        self,
        session: InferenceSession | None,
        name: str,
        cases: Mapping[str, Case],
        *,
        config: Callable[[Case], EPConfig] = Case.config,
        build: Callable = round_trip,
        build_all: Callable | None = None,
        module: Module | None = None,
    ) -> None:
        self.name, self.cases = name, cases
        managers = {n: EPBatchManager(config(c)) for n, c in cases.items()}
        types = []
        for n, case in cases.items():
            types += input_types(case, n, managers[n].config)
            types += managers[n].input_types()
        with Graph(name, input_types=types, module=module) as graph:
            values, ranks = iter(graph.inputs), {}
            for n, manager in managers.items():
                ranks[n] = take_inputs(cases[n], values)
                manager.fetch_buffers([next(values) for _ in manager.input_types()])
            if build_all:
                built = build_all(managers, ranks)
            else:
                built = {n: build(managers[n], ranks[n]) for n in cases}
            self.labels = list(built)
            graph.output(*(v for of in built.values() for r in of for v in r))
        self.comms = {n: EPCommInitializer(m.config) for n, m in managers.items()}
        if module is None:
            self.start(session, session.load(graph))

    def start(self, session: InferenceSession, model: Model) -> None:
        self.model = model
        for comm in self.comms.values():
            comm.ep_init(session)

    def inputs(self, given: Mapping[str, Inputs]) -> list[Buffer]:
        inputs = []
        for name, comm in self.comms.items():
            inputs += flatten(given[name], comm.config) + comm.model_inputs()
        return inputs

    def run(self, given: Mapping[str, Inputs]) -> dict:
        """Runs all cases once; returns what ranks got, by label."""
        inputs = self.inputs(given)
        try:
            outputs = iter(self.model.execute(*inputs))
            for comm in self.comms.values():
                comm.check()
        except Exception:
            self.reset()  # the next run fails for a reason of its own, if at all
            raise
        names = [label if label in self.cases else label[0] for label in self.labels]
        cases = [self.cases[name] for name in names]
        return {x: take_outputs(c, outputs) for x, c in zip(self.labels, cases)}

    def reset(self) -> None:
        for comm in self.comms.values():
            comm.reset()

    def close(self) -> None:
        for comm in self.comms.values():
            comm.close()


def as_bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def assert_same_bits(where: str, got: np.ndarray, want: np.ndarray) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), where
    np.testing.assert_array_equal(as_bits(got), as_bits(want), where)


def assert_padded(where: str, got: SimpleNamespace, want: PaddedResult) -> None:
    assert_same_bits(f"{where}: recv_counts", got.recv_counts, want.recv_counts)
    for name in ("recv_ranges", "src_info", "rows", "scales"):
        need = getattr(want, name)
        if need is None:
            continue
        have = getattr(got, name)
        assert have.shape == need.shape, f"{where}: {name}: {have.shape}"
        for expert, n_rows in enumerate(want.recv_counts):
            there = slice(None) if name == "recv_ranges" else slice(n_rows)
            mine = (expert, slice(None), there) if name == "scales" else (expert, there)
            here = f"{where}: {name} of local expert {expert}"
            assert_same_bits(here, have[mine], need[mine])
    assert (got.kept_src_info == got.src_info).all()


def assert_dispatched(where: str, got: Sequence, want: Sequence) -> None:
    for rank, (g, w) in enumerate(zip(got, want, strict=True)):
        here = f"{where}, rank {rank}"
        if isinstance(w, PaddedResult):
            assert_padded(here, g, w)
            continue
        n = len(w.rows)
        # First what says which row is which.
        assert_same_bits(f"{here}: row_offsets", g.row_offsets, w.row_offsets)
        assert_same_bits(f"{here}: expert_ids", g.expert_ids, w.expert_ids)
        assert_same_bits(f"{here}: src_info", g.src_info[:n], w.src_info)
        assert_same_bits(f"{here}: rows", g.rows[:n], w.rows)
        if w.scales is not None:
            assert_same_bits(f"{here}: scales", g.scales.T[:n], w.scales.T)
        if hasattr(w, "row_scales"):
            assert_same_bits(f"{here}: row scales", g.row_scales[:n], w.row_scales)


def assert_round_trip(where: str, got: Sequence, want: Expected) -> None:
    """Compares dispatch, then combine: of its result a row is a token."""
    assert_dispatched(where, got, want.dispatch)
    for rank, (g, w) in enumerate(zip(got, want.combine, strict=True)):
        assert_same_bits(f"{where}, rank {rank}: combine", g.result, w)
        if want.dropped is not None:
            got_dropped = g.dropped, g.dropped_of_experts
            for have, need in zip(got_dropped, want.dropped[rank]):
                np.testing.assert_array_equal(have, need, f"{where}, rank {rank}")
