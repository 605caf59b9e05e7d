# SPDX-License-Identifier: Apache-2.0
"""Compiles, checks and times peers whose layers are MAX graphs.

A peer is a subclass of :class:`GraphPeer`: it builds graphs and compares results.
The rest is the same for all: a timed graph is a chain of layers, each layer's result
is the next layer's input. It returns only the last result, which is exact: MAX copies
what a graph returns, and rows of 4096 tokens are 940 MB. So what dispatch delivers is
compared in a second, short graph of the same ops.

Graphs are built from types alone, with the number of tokens left open. So they
compile where there is no GPU, once for many token counts.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from max.driver import CPU, Accelerator, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType

from .. import reference
from ..plural import counted
from . import cases as _cases
from .cases import LAYER_FACTORS, Case, Config
from .checks import check_chain, from_bits
from .clock import Clock, back_to_back, from_idle, summary

CHECKED_LAYERS = 2
"""Layers of the short graph, whose first layer is compared with the oracle."""

STAMP = "compiled.json"
"""Stands beside compiled graphs and says what they were made of."""


@dataclass
class Data:
    """One seed's inputs of all ranks, on the host."""

    x: list[np.ndarray]
    ids: list[list[np.ndarray]]
    """``[n_layers][n_ranks]`` of ``[n_tokens, top_k]`` int32: each layer has its own.
    A compiler would make what depends on equal ids once for all layers."""
    weights: list[list[np.ndarray]]
    """``[n_layers][n_ranks]`` of ``[n_tokens, top_k]`` float32."""
    routes: list[reference.DispatchResult]
    """The rows that the first layer delivers to each rank."""


@functools.lru_cache(maxsize=3)
def make_data(case: Case, seed: int) -> Data:
    """Makes the inputs of a case, of which a chain's result is exact."""
    shape, n, layers = case.config.shape, case.config.n_ranks, case.config.n_layers
    ids, weights = [], []
    for i in range(max(layers, CHECKED_LAYERS)):
        drawn = seed * layers + i
        ids.append(_cases.expert_ids(shape, case.routing, n, case.n_tokens, drawn))
        weights.append([_cases.exact_weights(shape, n, of_rank) for of_rank in ids[-1]])
        for rank, w in enumerate(weights[-1]):
            w *= np.float32(LAYER_FACTORS[i % len(LAYER_FACTORS)])
            if case.config.is_quantized:
                # What experts return is the same for all tokens, so weights
                # distinguish them.
                w *= 2.0 ** ((rank + np.arange(len(w))) % 3)[:, np.newaxis]
    x = _cases.tokens(shape, n, case.n_tokens, seed)
    return Data(x, ids, weights, _cases.routes(shape, ids[0]))


class GraphPeer:
    """One configuration of a library; :meth:`open` allocates its memory."""

    has_check_graph = True
    """Whether dispatch is compared in a graph of its own."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._models: dict[tuple[str, bool], Model] = {}
        self._n_captures = 0

    # ------------------------------------------------------- what a subclass says

    def graph(self, form: str, *, is_check: bool) -> Graph:
        """Builds the chain that is timed, or the short one that is compared."""
        raise NotImplementedError

    def set_up(self, session: InferenceSession) -> Any:
        """Makes the library's memory; returns what has ``model_inputs``, or None."""
        return None

    def compile_set_up(self, session: InferenceSession) -> None:
        """Compiles what :meth:`set_up` runs, where no memory can be had."""

    def make_data(self, case: Case, seed: int) -> Any:
        """Makes the inputs of a case."""
        return make_data(case, seed)

    def make_inputs(self, form: str, data: Any) -> list[list[Any]]:
        """Returns the graph's inputs, lists of one host array or buffer a rank: tokens,
        then ids and weights of each layer."""
        of_layers = [of for layer in zip(data.ids, data.weights) for of in layer]
        return [[from_bits(x) for x in data.x], *of_layers]

    def group_inputs(self, form: str) -> list[Buffer]:
        """Returns what the graph takes of the library's memory."""
        return list(self._comm.model_inputs()) if self._comm else []

    def check_layer(self, case: Case, data: Any, outputs: list[Buffer]) -> None:
        """Compares what the short graph returns with the oracle."""
        raise NotImplementedError

    def check_chain(self, case: Case, data: Data, outputs: list[Buffer]) -> None:
        """Compares the timed chain's result with what exact arithmetic gives."""
        layers = self.config.n_layers
        for rank in range(self.config.n_ranks):
            x = from_bits(data.x[rank], self.torch_device(rank)).double()
            where = f"{case.name} rank {rank}, {counted(layers, 'layer')}"
            want = x * _cases.chain_factor(layers)
            check_chain(where, self.tensor(outputs[rank], rank), want)

    # -------------------------------------------------------------------- running

    def open(self, mefs: Path | None) -> None:
        """Allocates memory; graphs come from ``mefs``, or are compiled when needed."""
        more = {"precompiled_mefs": _checked_folder(self.config, mefs)} if mefs else {}
        self._session = InferenceSession(devices=self.devices, **more)
        try:
            self.join(self._session)
        except RuntimeError as e:
            if "no precompiled artifact" not in str(e):
                raise
            self.join(InferenceSession(devices=self.devices))

    def join(self, session: InferenceSession) -> None:
        """Allocates memory, of graphs that are compiled elsewhere."""
        self._comm = self.set_up(session)

    @functools.cached_property
    def devices(self) -> list[Device]:
        """One a rank."""
        n = self.config.n_ranks
        if self.config.target == "cpu":
            return [CPU()] * n
        return [Accelerator(i) for i in range(n)]

    def torch_device(self, rank: int) -> str:
        """Names where a rank's tensors are."""
        return "cpu" if self.config.target == "cpu" else f"cuda:{rank}"

    def close(self) -> None:
        """Frees what the library lets go of."""
        self._models = {}
        if hasattr(self._comm, "close"):
            self._comm.close()

    def tensor(self, buffer: Buffer, rank: int) -> Any:
        """Returns a result as a torch tensor; FP8 as its bits."""
        if buffer.dtype in (DType.float8_e4m3fn, DType.float8_e8m0fnu):
            buffer = buffer.view(DType.uint8, list(buffer.shape))
        is_host = buffer.is_host
        with contextlib.nullcontext() if is_host else torch.cuda.device(rank):
            return torch.from_dlpack(buffer)

    def _synchronize(self) -> None:
        for device in self.devices:
            device.synchronize()

    def _finish(self) -> None:
        self._synchronize()
        if hasattr(self._comm, "check"):
            self._comm.check()

    def _model(self, form: str, *, is_check: bool = False) -> Model:
        key = (form, is_check and self.has_check_graph)
        if key not in self._models:
            graph = self.graph(form, is_check=key[1])
            self._models[key] = self._session.load(graph)
        return self._models[key]

    def _inputs(self, form: str, data: Any) -> list[Buffer]:
        # Kept until the copies are done: a freed source may be overwritten.
        sources, inputs = [], []
        for values in self.make_inputs(form, data):
            here = [
                v if isinstance(v, Buffer) else Buffer.from_dlpack(v) for v in values
            ]
            sources += here
            inputs += [b.to(device) for b, device in zip(here, self.devices)]
        self._synchronize()
        return [*inputs, *self.group_inputs(form)]

    def _check(self, case: Case, seed: int) -> None:
        """Runs the short graph eagerly on other inputs and compares its first layer."""
        data = self.make_data(case, seed)
        outputs = self._model(case.form, is_check=True).execute(
            *self._inputs(case.form, data)
        )
        self._finish()
        self.check_layer(case, data, outputs)
        torch.cuda.empty_cache()

    def start(self, case: Case) -> tuple[list[Buffer], Callable[[list[Buffer]], None]]:
        """Returns the inputs of the timed graph, and what compares its outputs."""
        data = self.make_data(case, 0)

        def check(outputs: list[Buffer]) -> None:
            self._finish()
            self.check_chain(case, data, outputs)

        return self._inputs(case.form, data), check

    def measure(
        self, case: Case, n_samples: int, n_replays: int, is_eager_timed: bool
    ) -> dict[str, float]:
        """Checks and times a case: median and p95 in µs a layer.

        ``us``: replays of a captured graph without a pause, by events, on the rank
        that took longest; ``idle_us``: one replay that idle GPUs begin with;
        ``eager_us``: launches one by one, by the host's clock. The CPU has the last
        alone, as ``us``.
        """
        self._check(case, seed=1)
        inputs, check = self.start(case)
        model, layers = self._model(case.form), self.config.n_layers
        check(model.execute(*inputs))
        is_cpu = self.config.target == "cpu"
        times: dict[str, float] = {}
        if is_cpu or is_eager_timed:
            seconds = self._sample(lambda: model.execute(*inputs), n_samples)
            times = summary(seconds, layers, "" if is_cpu else "eager_")
        if is_cpu:
            check(model.execute(*inputs))
            return times
        self._n_captures += 1
        key = self._n_captures
        outputs = model.capture(key, *inputs)
        try:
            self._finish()
            for rank in range(self.config.n_ranks):  # old results must not pass
                self.tensor(outputs[rank], rank).zero_()
                torch.cuda.synchronize(rank)

            replay = functools.partial(model.replay, key, *inputs)
            replay()
            check(outputs)
            clock, meet = Clock(self._streams()), self._synchronize
            idle = from_idle(clock, replay, n_samples, meet).max(axis=1)
            steady = back_to_back(clock, replay, n_replays, n_samples, meet)
            check(outputs)
        finally:
            del outputs
            model.release_captured_graph(key)
        self._check(case, seed=2)
        times |= summary(idle, layers, "idle_")
        return summary(steady.max(axis=1), layers * n_replays) | times

    def _streams(self) -> list[torch.cuda.Stream]:
        """Returns the stream on which each device runs graphs."""
        handles = [d.default_queue.native_stream_handle for d in self.devices]
        return [
            torch.cuda.ExternalStream(handle, device=i)
            if handle
            else torch.cuda.default_stream(i)
            for i, handle in enumerate(handles)
        ]

    def _sample(self, run: Callable[[], object], n_samples: int) -> list[float]:
        """Times ``run`` with all devices idle before and after; in seconds."""
        seconds = []
        gc.collect()
        gc.disable()
        try:
            for i in range(-max(3, n_samples // 6), n_samples):
                self._synchronize()
                begin = time.perf_counter()
                run()
                self._synchronize()
                if i >= 0:
                    seconds.append(time.perf_counter() - begin)
        finally:
            gc.enable()
        self._finish()
        return seconds


def types(config: Config, dtype: DType, dims: list) -> list[TensorType]:
    """Returns one input type a rank."""
    is_cpu = config.target == "cpu"
    devices = [
        DeviceRef.CPU() if is_cpu else DeviceRef.GPU(i) for i in range(config.n_ranks)
    ]
    return [TensorType(dtype, dims, device) for device in devices]


def token_types(config: Config) -> list[TensorType]:
    """Returns the types of tokens, and of ids and weights of each layer."""
    choices = ["n_tokens", config.shape.top_k]
    inputs = types(config, DType.bfloat16, ["n_tokens", config.shape.hidden_size])
    layer = types(config, DType.int32, choices) + types(config, DType.float32, choices)
    return inputs + max(config.n_layers, CHECKED_LAYERS) * layer


def peer_of(config: Config) -> GraphPeer:
    """Returns a peer. Layers of experts are in the developers' folder ``bench``."""
    own_file = config.peer in ("all_gather", "max_layer", *_cases.EXPERTS)
    package = "bench" if config.peer in _cases.EXPERTS else __package__
    name = f"{package}.peer_{config.peer if own_file else 'ep'}"
    return importlib.import_module(name).Peer(config)


# ---------------------------------------------------------- compiled in advance


def use_virtual_devices(arch: str, n_ranks: int) -> None:
    """Makes this process see GPUs that are not there; call it first of all."""
    import max.driver

    max.driver.set_virtual_device_api("cuda")
    max.driver.set_virtual_device_target_arch(arch)
    max.driver.set_virtual_device_count(n_ranks)


def compile_peer(config: Config, forms: list[str], folder: Path) -> list[str]:
    """Compiles a configuration's graphs into a folder of their own: set-up graphs of
    MAX's EP all have one name and one signature. Returns a line for each."""
    for old in folder.glob("*"):
        old.unlink()
    peer = peer_of(config)
    devices = [Accelerator(i) for i in range(config.n_ranks)]
    session = InferenceSession(devices=devices, export_mefs=folder)
    lines = []

    def attempt(what: str, function: Callable[..., object], *arguments: Any) -> None:
        begin, error = time.perf_counter(), ""
        try:
            function(*arguments)
        except Exception as e:
            error = f" FAILED: {e} {str(e.__cause__)[:2000]}"
        lines.append(f"{what} {time.perf_counter() - begin:.0f} s{error}")

    def load(form: str, is_check: bool) -> None:
        session.load(peer.graph(form, is_check=is_check))

    for form in forms:
        attempt(f"{form}, timed", load, form, False)
        if peer.has_check_graph:
            attempt(f"{form}, checked", load, form, True)
    attempt("set-up", peer.compile_set_up, session)
    if not any("FAILED" in line for line in lines):
        stamp = {"sources": _sources(config), "forms": forms}
        (folder / STAMP).write_text(json.dumps(stamp) + "\n")
    return lines


def _sources(config: Config) -> str:
    """Names what graphs were compiled from; ours change with the checkout."""
    if config.peer.startswith("max"):
        return "MAX"
    from ..extension import sources_hash

    return sources_hash()


def is_compiled(config: Config, folder: Path, forms: list[str]) -> bool:
    """Returns whether a folder has this checkout's graphs of these forms."""
    path = folder / config.name / STAMP
    if not path.exists():
        return False
    stamp = json.loads(path.read_text())
    return stamp["sources"] == _sources(config) and set(forms) <= set(stamp["forms"])


def _checked_folder(config: Config, mefs: Path) -> Path:
    if not is_compiled(config, mefs, []):
        raise RuntimeError(
            f"{mefs / config.name} does not hold graphs of this checkout: compile them "
            "with --compile-for, or run without --from"
        )
    return mefs / config.name
