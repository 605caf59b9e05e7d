# SPDX-License-Identifier: Apache-2.0
"""Runs, checks and times the chains of ``bench.gpu_graphs_max`` on GPUs.

One class does all three: what is timed are the buffers that were checked.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import Accelerator, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model

from . import gpu_shapes
from .gpu_graphs_max import (
    ep_config,
    graph_of,
    library,
    takes_weights,
)
from .gpu_shapes import LAYER_FACTORS, ROUTED_FORMS, Case, Config, summary

_N_FACTORS = len(LAYER_FACTORS)


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


def torch_device(rank: int) -> str:
    """Names a rank's GPU."""
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
        self._models: dict[tuple[str, bool], Model] = {}
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
            comm.ep_init(self.compiling_session())
        return comm

    def compiling_session(self) -> InferenceSession:
        """Makes a session for set-up graphs that are not among the compiled ones."""
        return InferenceSession(devices=self.devices)

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

    def _model(self, form: str, *, is_check: bool = False) -> Model:
        """Loads a chain, or the one that is compared with the oracle, once."""
        key = (form, is_check and not self.config.is_dispatcher)
        if key not in self._models:
            graph = graph_of(self.config, form, is_check=key[1])
            self._models[key] = self._session.load(graph)
        return self._models[key]

    def _inputs(self, form: str, data: Data) -> list[Buffer]:
        from .gpu_checks import from_bits

        n = self.config.n_ranks
        # Kept until the copies are done: a freed source may be overwritten.
        sources = []

        def put(arrays: list) -> list[Buffer]:
            here = [Buffer.from_dlpack(array) for array in arrays]
            sources.extend(here)
            return [buffer.to(device) for buffer, device in zip(here, self.devices)]

        inputs = put([from_bits(x) for x in data.x]) + put(data.ids)
        if takes_weights(self.config, form):
            for weights in data.weights:
                inputs += put(weights)
        if form in ROUTED_FORMS:
            inputs += put([from_bits(gpu_shapes.gate(self.config.shape))] * n)
            inputs += put([np.zeros(1, np.int32)] * n)
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
        n_sums = 0 if form == "dispatch" else n
        sums, kept = outputs[:n_sums], outputs[n_sums:]
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
                stack_tokens(data.x, torch_device(rank)),
                exact=exact,
                # MAX lets each expert's FP8 rows begin at a multiple of four.
                filled_to=4 if is_fp8 and not config.is_ours else 1,
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
        config, layers = self.config, self.config.n_layers(form)
        for rank in range(config.n_ranks):
            device = torch_device(rank)
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
        """Runs a short chain eagerly on other inputs and compares its first layer."""
        import torch

        data = make_data(case, seed, exact_weights=False)
        model = self._model(form, is_check=True)
        outputs = model.execute(*self._inputs(form, data))
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
        n_replays: int,
        with_profiler: bool,
    ) -> dict:
        """Measures one case in one form.

        Args:
            case: The case.
            form: One of :data:`gpu_graphs_max.FORMS`.
            n_samples: Chains timed, in each mode.
            note: Told which step begins, so that a hang has a name.
            n_replays: Replays of a captured chain that are timed together.
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
        model, layers = self._model(form), self.config.n_layers(form)
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

            def replay() -> None:
                for _ in range(n_replays):
                    model.replay(key, *inputs)

            seconds = self._sample(replay, n_samples)
            result["captured"] = summary(seconds, layers * n_replays)
            self._check_chain(case, form, data, outputs)
            if with_profiler:
                note("profiler")
                result["kernels"] = self._kernel_times(
                    lambda: model.replay(key, *inputs), layers
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

    def _kernel_times(
        self, run: Callable[[], object], n_layers: int, n_runs: int = 3
    ) -> dict | str:
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
            count = n_runs * n_layers
            found = {phase: max(t) / count for phase, t in per_phase.items()}
            return found if any(found.values()) else "no kernel is called by a phase"
        except Exception as e:
            return f"{type(e).__name__}: {e}"

    def close(self) -> None:
        """Frees what the library lets go of."""
        self._models = {}
        if hasattr(self._comm, "close"):
            self._comm.close()
