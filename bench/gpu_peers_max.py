# SPDX-License-Identifier: Apache-2.0
"""Chains of dispatch and combine as MAX graphs: for max_ep and for MAX's own EP.

Both have the same Python surface, so the same code builds and runs both; which
one is the module that is passed in. A chain of L layers is one graph: each
layer dispatches the tokens, combines the rows of the experts, and its sums are
the next layer's tokens. The experts are the identity (FP8 rows cannot be
combined as they are: there, every expert of a rank returns one given row, the
same for all tokens). Router weights are powers of two, see ``LAYER_FACTORS``; with
reduced combine they are given to dispatch.

Graphs are built from types alone, with the number of tokens left open, so that
they can be compiled where there is no GPU, once for many token counts.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from max.driver import Accelerator, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue

from . import gpu_shapes
from .gpu_shapes import LAYER_FACTORS, OURS, Case, Config, summary

FORMS = {
    "fused": "ep_dispatch and ep_combine, one op for each GPU",
    "all": "ep_dispatch_all and ep_combine_all, one op for all GPUs",
    "split": "async on all GPUs, then wait on all",
    "dispatch": "ep_dispatch alone, L times",
}
"""What a chain is made of."""

# A rank of max_ep does not send before all have read what it sent last, so
# dispatch may follow dispatch. MAX's EP does not say that it may.
DEFAULT_FORMS = {
    "ours": ("fused", "all", "split", "dispatch"),
    "ours_by_rank": ("fused", "split", "dispatch"),
    "ours_reduced": ("fused", "split", "dispatch"),
    "max": ("fused", "all", "split"),
}

_N_FACTORS = len(LAYER_FACTORS)


def library(peer: str) -> ModuleType:
    """Returns the module behind a peer."""
    return importlib.import_module("max_ep" if peer in OURS else "max.nn.comm.ep")


def ep_config(config: Config) -> Any:
    """Returns the library's ``EPConfig``."""
    from max_ep import blockwise_fp8_quant_config

    is_fp8 = config.dtype == "fp8"
    fields: dict[str, Any] = dict(
        dispatch_dtype=DType.float8_e4m3fn if is_fp8 else DType.bfloat16,
        combine_dtype=DType.bfloat16,
        hidden_size=config.shape.hidden_size,
        top_k=config.shape.top_k,
        n_experts=config.shape.n_experts,
        max_tokens_per_rank=config.max_tokens,
        n_gpus_per_node=config.n_ranks,
        n_nodes=1,
        node_id=0,
        dispatch_quant_config=blockwise_fp8_quant_config() if is_fp8 else None,
    )
    if config.is_ours:
        fields |= dict(target="gpu", timeout_s=5.0, **OURS[config.peer])
    return library(config.peer).EPConfig(**fields)


# ------------------------------------------------------------------------- graphs


def graph_of(config: Config, form: str) -> Graph:
    """Builds a chain.

    Inputs, each a list with one tensor a rank: tokens ``[n_tokens, hidden]``
    bfloat16; ids ``[n_tokens, top_k]`` int32; then one list for each of
    ``LAYER_FACTORS`` of weights ``[n_tokens, top_k]`` float32 (not where neither
    dispatch nor combine takes any), and for FP8 the experts' rows
    ``[max_recv_tokens, hidden]`` bfloat16 (not for ``dispatch``); last the EP
    inputs.

    Outputs, likewise: the last layer's sums and the first layer's (not for
    ``dispatch``); then for each rank what a dispatch returned without its last
    element: rows, for FP8 scales, row offsets, expert ids. It is the first
    layer's; for ``dispatch`` the last's.
    """
    shape, n = config.shape, config.n_ranks
    group = ep_config(config)
    manager = library(config.peer).EPBatchManager(group)

    def types(dtype: DType, dims: list) -> list[TensorType]:
        return [TensorType(dtype, dims, DeviceRef.GPU(i)) for i in range(n)]

    inputs = types(DType.bfloat16, ["n_tokens", shape.hidden_size])
    inputs += types(DType.int32, ["n_tokens", shape.top_k])
    if _takes_weights(config, form):
        for _ in LAYER_FACTORS:
            inputs += types(DType.float32, ["n_tokens", shape.top_k])
    if form != "dispatch" and config.dtype == "fp8":
        rows = [group.get_max_recv_tokens(), shape.hidden_size]
        inputs += types(DType.bfloat16, rows)
    name = f"{config.name}_{form}_l{config.n_layers}"
    with Graph(name, input_types=[*inputs, *manager.input_types()]) as graph:
        values = [value.tensor for value in graph.inputs[: len(inputs)]]
        manager.fetch_buffers(graph.inputs[len(inputs) :])
        x, ids, *rest = (values[i : i + n] for i in range(0, len(values), n))
        weights, expert_rows = rest[:_N_FACTORS], rest[_N_FACTORS:]
        kept: list[tuple[TensorValue, ...]] = []
        first: list[TensorValue] = []
        for layer in range(config.n_layers):
            of_layer = weights[layer % _N_FACTORS] if weights else None
            with_tokens = of_layer if config.is_reduced else None
            outputs = _dispatch(manager, form, x, ids, with_tokens)
            if form == "dispatch":
                kept = outputs
                continue
            rows = expert_rows[0] if expert_rows else [o[0] for o in outputs]
            with_rows = None if config.is_reduced else of_layer
            x = _combine(manager, form, rows, with_rows)
            kept, first = kept or outputs, first or x
        if form == "dispatch":
            x = []
        graph.output(*x, *first, *(value for o in kept for value in o[:-1]))
    return graph


def _takes_weights(config: Config, form: str) -> bool:
    return form != "dispatch" or config.is_reduced


def _dispatch(
    manager: Any,
    form: str,
    x: list[TensorValue],
    ids: list[TensorValue],
    weights: list[TensorValue] | None,
) -> list[tuple[TensorValue, ...]]:
    """Dispatches on all ranks; ``weights``: those that go with the tokens."""
    ranks = list(range(len(x)))

    def more(i: int) -> dict:
        return {} if weights is None else {"router_weight": weights[i]}

    if form == "all":
        return manager.ep_dispatch_all(x, ids, ranks)
    if form == "split":
        for i in ranks:
            manager.ep_dispatch_async(x[i], ids[i], i, **more(i))
        return [manager.ep_dispatch_wait(i) for i in ranks]
    return [manager.ep_dispatch(x[i], ids[i], i, **more(i)) for i in ranks]


def _combine(
    manager: Any,
    form: str,
    rows: list[TensorValue],
    weights: list[TensorValue] | None,
) -> list[TensorValue]:
    """Combines on all ranks; ``weights`` is None if dispatch has them."""
    ranks = list(range(len(rows)))

    def of(i: int) -> TensorValue | None:
        return None if weights is None else weights[i]

    if form == "all":
        return manager.ep_combine_all(rows, weights, ranks)
    if form == "split":
        for i in ranks:
            manager.ep_combine_async(rows[i], i)
        return [manager.ep_combine_wait(of(i), i) for i in ranks]
    return [manager.ep_combine(rows[i], of(i), i) for i in ranks]


# ------------------------------------------------------------- compile, without GPU


def use_virtual_devices(n_ranks: int) -> None:
    """Makes this process see H200s that are not there; call it first of all."""
    import max.driver

    max.driver.set_virtual_device_api("cuda")
    max.driver.set_virtual_device_target_arch("sm_90a")
    max.driver.set_virtual_device_count(n_ranks)


def compile_config(config: Config, forms: tuple[str, ...], folder: Path) -> list[str]:
    """Compiles a configuration's graphs and its set-up graph into a folder.

    One folder holds one configuration: the set-up graphs of MAX's EP all have
    one name and one signature.

    Returns:
        A line for each graph: its name, seconds, and what went wrong if it did.
    """
    devices = [Accelerator(i) for i in range(config.n_ranks)]
    session = InferenceSession(devices=devices, export_mefs=folder)
    said = []
    for form in forms:
        begin = time.perf_counter()
        error = ""
        try:
            session.load(graph_of(config, form))
        except Exception as e:
            error = f" FAILED: {e} {str(e.__cause__)[:2000]}"
        said.append(f"{form} {time.perf_counter() - begin:.0f} s{error}")
    begin = time.perf_counter()
    before = set(folder.glob("*.mef"))
    error = ""
    try:
        with _no_allocation(config.peer):
            comm = library(config.peer).EPCommInitializer(ep_config(config))
            comm.ep_init(session)
    except Exception as e:
        # Running the graph cannot work here; compiling it must have.
        error = f" not exported, the GPU host compiles it: {e!r}"
    exported = set(folder.glob("*.mef")) - before
    said.append(
        f"set-up {time.perf_counter() - begin:.0f} s{'' if exported else error}"
    )
    return said


class _NoBuffer:
    """Stands in for a device buffer where nothing can be allocated."""

    def __init__(self, dtype: DType, shape: list[int], **more: Any) -> None:
        self.dtype, self.shape, self.device = dtype, shape, more.get("device")

    def __getattr__(self, name: str) -> Callable[..., _NoBuffer]:
        return lambda *_, **__: self


@contextlib.contextmanager
def _no_allocation(peer: str) -> Iterator[None]:
    """Lets MAX's ``EPCommInitializer`` get as far as compiling its graph.

    It allocates counters and asks for peer access before, which virtual devices
    refuse. Only for the compile machine.
    """
    if peer != "max":
        yield
        return
    module: Any = importlib.import_module("max.nn.comm.ep.ep_manager")
    kept = {
        name: getattr(module, name) for name in ("Buffer", "enable_all_peer_access")
    }
    module.Buffer, module.enable_all_peer_access = _NoBuffer, lambda: None
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


# --------------------------------------------------------------------------- run


@dataclass
class Data:
    """One seed's inputs of all ranks, on the host."""

    x: list[np.ndarray]
    ids: list[np.ndarray]
    weights: list[list[np.ndarray]]
    """``[len(LAYER_FACTORS)][n_ranks]`` of ``[n_tokens, top_k]`` float32."""
    routes: gpu_shapes.Routes


@functools.lru_cache(maxsize=3)
def make_data(case: Case, seed: int, *, exact_weights: bool) -> Data:
    """Makes the inputs of a case; ``exact_weights``: those of a chain."""
    shape, n = case.config.shape, case.config.n_ranks
    ids = gpu_shapes.expert_ids(shape, case.routing, n, case.n_tokens, seed)
    if exact_weights:
        whole = [gpu_shapes.exact_weights(shape, n, i) for i in ids]
        weights = [[w * np.float32(f) for w in whole] for f in LAYER_FACTORS]
    else:
        random = gpu_shapes.router_weights(shape, n, case.n_tokens, seed)
        weights = [random] * _N_FACTORS
    return Data(
        gpu_shapes.tokens(shape, n, case.n_tokens, seed),
        ids,
        weights,
        gpu_shapes.routes(shape, ids),
    )


def _torch_device(rank: int) -> str:
    return f"cuda:{rank}"


class Runner:
    """One configuration, ready to run cases."""

    def __init__(self, config: Config, mef_dir: Path | None) -> None:
        """Allocates the group's memory; graphs are loaded when first needed.

        Args:
            config: The configuration.
            mef_dir: Folder of compiled graphs; None: compile here.
        """
        self.config = config
        self.devices = [Accelerator(i) for i in range(config.n_ranks)]
        self._session = (
            InferenceSession(devices=self.devices, precompiled_mefs=mef_dir)
            if mef_dir
            else InferenceSession(devices=self.devices)
        )
        self._models: dict[str, Model] = {}
        self._comm = self._join()
        self._expert_rows = self._make_expert_rows()
        self._n_captures = 0

    def _join(self) -> Any:
        module, group = library(self.config.peer), ep_config(self.config)
        comm = module.EPCommInitializer(group)
        try:
            comm.ep_init(self._session)
        except RuntimeError as e:
            if "no precompiled artifact" not in str(e):
                raise
            comm = module.EPCommInitializer(group)
            comm.ep_init(InferenceSession(devices=self.devices))
        return comm

    def _make_expert_rows(self) -> list[Buffer]:
        import torch

        config = self.config
        if config.dtype != "fp8":
            return []
        n_rows = ep_config(config).get_max_recv_tokens()
        made = []
        for rank, device in enumerate(self.devices):
            row = torch.from_numpy(gpu_shapes.expert_row(config.shape, rank))
            rows = row.to(torch.bfloat16).expand(n_rows, -1).contiguous()
            source = Buffer.from_dlpack(rows)
            made.append(source.to(device))
            self.synchronize()
            del source
        return made

    def synchronize(self) -> None:
        """Waits for all devices."""
        for device in self.devices:
            device.synchronize()

    def _finish(self) -> None:
        self.synchronize()
        if hasattr(self._comm, "check"):
            self._comm.check()

    def _model(self, form: str) -> Model:
        if form not in self._models:
            self._models[form] = self._session.load(graph_of(self.config, form))
        return self._models[form]

    def _inputs(self, form: str, data: Data) -> list[Buffer]:
        from .gpu_checks import from_bits

        # Kept until the copies are done: a freed source may be overwritten.
        sources = []

        def put(arrays: list) -> list[Buffer]:
            here = [Buffer.from_dlpack(array) for array in arrays]
            sources.extend(here)
            return [buffer.to(device) for buffer, device in zip(here, self.devices)]

        inputs = put([from_bits(x) for x in data.x]) + put(data.ids)
        if _takes_weights(self.config, form):
            for weights in data.weights:
                inputs += put(weights)
        if form != "dispatch":
            inputs += self._expert_rows
        self.synchronize()
        return [*inputs, *self._comm.model_inputs()]

    # ------------------------------------------------------------------- checks

    def _tensor(self, buffer: Buffer, rank: int) -> Any:
        import torch

        if buffer.dtype == DType.float8_e4m3fn:
            buffer = buffer.view(DType.uint8, list(buffer.shape))
        with torch.cuda.device(rank):
            return torch.from_dlpack(buffer)

    def _check_layer(
        self, case: Case, form: str, data: Data, outputs: list[Buffer]
    ) -> None:
        """Compares the kept dispatch, and the first layer's sums, with the oracle."""
        from .gpu_checks import (
            Delivered,
            check_combine,
            check_dispatch,
            stack_tokens,
        )

        config, n = self.config, self.config.n_ranks
        is_fp8, exact = config.dtype == "fp8", config.is_ours
        sums, kept = (
            ([], outputs)
            if form == "dispatch"
            else (
                outputs[n : 2 * n],
                outputs[2 * n :],
            )
        )
        per_rank = len(kept) // n
        for rank in range(n):
            where = f"{case.name} {form} rank {rank}"
            found = [
                self._tensor(buffer, rank)
                for buffer in kept[rank * per_rank : (rank + 1) * per_rank]
            ]
            rows, *scales, row_offsets, expert_ids = found
            check_dispatch(
                where,
                Delivered(rows, scales[0] if scales else None, row_offsets, expert_ids),
                data.routes.token_numbers[rank],
                data.routes.row_offsets[rank],
                stack_tokens(data.x, _torch_device(rank)),
                exact=exact,
            )
            if sums:
                check_combine(
                    where,
                    config.shape,
                    self._tensor(sums[rank], rank),
                    data.x[rank],
                    data.ids[rank],
                    data.weights[0][rank],
                    n,
                    is_fp8=is_fp8,
                    exact=exact,
                    reduced_on=rank if config.is_reduced else None,
                )

    def _check_chain(
        self, case: Case, form: str, data: Data, outputs: list[Buffer]
    ) -> None:
        """Compares a chain's result with what exact arithmetic gives."""
        from .gpu_checks import check_chain, expected_parts, from_bits

        if form == "dispatch":
            self._check_layer(case, form, data, outputs)
            return
        config, layers = self.config, self.config.n_layers
        for rank in range(config.n_ranks):
            device = _torch_device(rank)
            if config.dtype == "fp8":
                parts = expected_parts(
                    config.shape,
                    device,
                    data.x[rank],
                    data.ids[rank],
                    data.weights[(layers - 1) % _N_FACTORS][rank],
                    config.n_ranks,
                    is_fp8=True,
                )
                want = sum(parts)
            else:
                x = from_bits(data.x[rank], device)
                want = x.double() * gpu_shapes.chain_factor(layers)
            where = f"{case.name} {form} rank {rank}, {layers} layers"
            check_chain(where, self._tensor(outputs[rank], rank), want)

    def _poison(self, form: str, outputs: list[Buffer]) -> None:
        """Clears a captured chain's results, so that old ones cannot pass."""
        import torch

        n = self.config.n_ranks
        stride = len(outputs) // n if form == "dispatch" else 1
        for rank in range(n):
            self._tensor(outputs[rank * stride], rank).zero_()
            torch.cuda.synchronize(rank)

    def check(self, case: Case, form: str, seed: int) -> None:
        """Runs a chain eagerly on other inputs and compares its first layer."""
        import torch

        data = make_data(case, seed, exact_weights=False)
        outputs = self._model(form).execute(*self._inputs(form, data))
        self._finish()
        self._check_layer(case, form, data, outputs)
        torch.cuda.empty_cache()

    # ------------------------------------------------------------------ measure

    def measure(
        self,
        case: Case,
        form: str,
        n_samples: int,
        note: Callable[[str], None],
        *,
        with_profiler: bool,
    ) -> dict:
        """Measures one case in one form.

        Args:
            case: The case.
            form: One of :data:`FORMS`.
            n_samples: Chains timed, in each mode.
            note: Told which step begins, so that a hang has a name.
            with_profiler: Whether to ask CUPTI for the kernels' durations.

        Returns:
            ``captured`` and ``eager``: median and p95 in microseconds a layer;
            ``kernels``: microseconds a layer that dispatch's and combine's
            kernels ran, or why that is not known.
        """
        note("check")
        self.check(case, form, seed=1)
        data = make_data(case, 0, exact_weights=True)
        inputs = self._inputs(form, data)
        model, layers = self._model(form), self.config.n_layers
        result: dict[str, Any] = {}

        note("eager")
        outputs = model.execute(*inputs)
        self._finish()
        self._check_chain(case, form, data, outputs)
        del outputs
        seconds = self._sample(lambda: model.execute(*inputs), n_samples)
        result["eager"] = summary(seconds, layers)

        note("capture")
        self._n_captures += 1
        key = self._n_captures
        outputs = model.capture(key, *inputs)
        try:
            self._finish()
            self._poison(form, outputs)
            note("replay")
            model.replay(key, *inputs)
            self._finish()
            self._check_chain(case, form, data, outputs)
            seconds = self._sample(lambda: model.replay(key, *inputs), n_samples)
            result["captured"] = summary(seconds, layers)
            self._check_chain(case, form, data, outputs)
            if with_profiler:
                note("profiler")
                result["kernels"] = self._kernel_times(
                    lambda: model.replay(key, *inputs)
                )
        finally:
            del outputs
            model.release_captured_graph(key)

        note("check again")
        self.check(case, form, seed=2)
        return result

    def _sample(self, run: Callable[[], object], n_samples: int) -> list[float]:
        """Times ``run`` with all devices idle before and after; in seconds.

        One process drives all GPUs, so the slowest is waited for.
        """
        n_warm_ups = max(3, n_samples // 6)
        seconds = []
        gc.collect()
        gc.disable()
        try:
            for i in range(-n_warm_ups, n_samples):
                self.synchronize()
                begin = time.perf_counter()
                run()
                self.synchronize()
                if i >= 0:
                    seconds.append(time.perf_counter() - begin)
        finally:
            gc.enable()
        self._finish()
        return seconds

    def _kernel_times(self, run: Callable[[], object], n_runs: int = 3) -> dict | str:
        """Asks CUPTI, through torch, how long the kernels of each phase ran.

        Returns:
            ``dispatch`` and ``combine``: microseconds a layer on the GPU where
            the phase took longest, waiting for peers included and gaps between
            launches not; or why there are none.
        """
        try:
            from torch.profiler import ProfilerActivity, profile

            run()
            self.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                for _ in range(n_runs):
                    run()
                self.synchronize()
            per_phase = {"dispatch": [0.0] * 64, "combine": [0.0] * 64}
            for event in profiler.profiler.kineto_results.events():
                for phase, totals in per_phase.items():
                    if phase in event.name().lower():
                        totals[event.device_index()] += event.duration_ns() / 1e3
            count = n_runs * self.config.n_layers
            found = {phase: max(t) / count for phase, t in per_phase.items()}
            return found if any(found.values()) else "no kernel is called by a phase"
        except Exception as e:
            return f"{type(e).__name__}: {e}"

    def close(self) -> None:
        """Frees what the library lets go of."""
        self._models = {}
        if hasattr(self._comm, "close"):
            self._comm.close()
