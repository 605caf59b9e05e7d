# SPDX-License-Identifier: Apache-2.0
"""Products of few tokens on one GPU: ``python -m bench.few_rows``.

Times Qwen3-30B-A3B's products with today's kernels (variant 0) and with those of
``mojo/max_ep_experts/few_rows.mojo``, with several constants. Each launch reads other
weights, more of them than L2 holds; a chain of launches is captured. Results are first
compared with products in float64.

On a machine without GPUs ``--compile-for sm_90a --out DIR`` compiles the two graphs; on
the GPU host ``--from DIR``, or nothing: then it compiles them there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops

from max_ep.extension import extension_path, run_mojo

HIDDEN, WIDE, N_EXPERTS, TOP_K, MOE_DIM = 2048, 4096, 128, 8, 768
GPU = "cuda"
SHAPES = {
    "qkv": (5120, 2048, 24),
    "output": (2048, 4096, 24),
    "router": (128, 2048, 256),
}
"""n, k, and how many weights a chain has."""
N_LAYERS = 16
MAX_ROWS, MAX_TOKENS = 2, 4
"""As in ``few_rows.mojo``."""
# As in few_rows_bench/ops.mojo.
DENSE = [
    "today",
    "8 warps, 8 slices, 4 rows, 1 step",
    "the same without PDL",
    "8 warps, 4 slices, 4 rows, 2 steps",
    "8 warps, 2 slices, 4 rows, 4 steps",
    "4 warps, 2 slices, 4 rows, 4 steps",
    "8 warps, 1 slice, 2 rows, 8 steps",
    "8 warps, 2 slices, 2 rows, 4 steps",
    "8 warps, 8 slices, 8 rows, 1 step",
    "4 warps, 4 slices, 4 rows, 2 steps",
    "4 warps, 2 slices, 2 rows, 4 steps",
    "16 warps, 4 slices, 4 rows, 2 steps",
]
DOWN = [
    "today",
    "4 rows, 1 step",
    "the same without PDL",
    "4 rows, 3 steps",
    "2 rows, 3 steps",
    "8 rows, 1 step",
    "8 rows, 3 steps",
]
OF_NORM = [
    "two kernels",
    "8 warps, 4 rows",
    "the same without PDL",
    "8 warps, 8 rows",
    "8 warps, 2 rows",
    "4 warps, 4 rows",
    "4 warps, 8 rows",
    "4 warps, 2 rows",
]
BF16, F32, I32 = DType.bfloat16, DType.float32, DType.int32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compile-for", metavar="ARCH")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--from", dest="mefs", type=Path, metavar="DIR")
    parser.add_argument(
        "--limit-s", type=float, default=100, help="no case begins later"
    )
    options = parser.parse_args()
    if options.compile_for:
        from max_ep.bench.peer_graphs import use_virtual_devices

        use_virtual_devices(options.compile_for, 1)
    from max.driver import Accelerator
    from max.engine import InferenceSession

    more: dict[str, Any] = {}
    if options.compile_for:
        options.out.mkdir(parents=True, exist_ok=True)
        more["export_mefs"] = options.out
    elif options.mefs:
        more["precompiled_mefs"] = options.mefs
    session = InferenceSession(devices=[Accelerator()], **more)
    models = {}
    for name, graph in graphs():
        begin = time.perf_counter()
        models[name] = session.load(graph)
        print(f"{name}: loaded in {time.perf_counter() - begin:.0f} s", flush=True)
    is_wrong = False
    if not options.compile_for:
        bench = Bench(models, session.devices[0], options.limit_s)
        bench.run()
        is_wrong = bench.is_wrong
    sys.stdout.flush()
    os._exit(int(is_wrong))


def graphs() -> list[tuple[str, Graph]]:
    folder = Path(tempfile.gettempdir()) / "few_rows_bench"
    folder.mkdir(exist_ok=True)
    package = folder / "few_rows_bench.mojoc"
    source = Path(__file__).with_name("few_rows_bench")
    run_mojo("precompile", str(source), "-I", ".", "-o", str(package))
    packages = [extension_path("max_ep_experts"), package]
    gpu, cpu = DeviceRef.GPU(0), DeviceRef.CPU()
    variants = [TensorType(I32, [], cpu)]
    types = [
        TensorType(BF16, ["rows", "k"], gpu),
        TensorType(BF16, ["layers", "n", "k"], gpu),
    ]
    with Graph(
        "dense", input_types=types + variants, custom_extensions=packages
    ) as dense:
        result = TensorType(BF16, ["layers", "rows", "n"], gpu)
        values = [v.tensor for v in dense.inputs]
        dense.output(*ops.custom("bench.dense", gpu, values, [result]))
    rows = TensorType(BF16, ["rows", HIDDEN], gpu)
    types = [rows, rows, TensorType(BF16, [HIDDEN], gpu)]
    types += [TensorType(BF16, ["layers", "n", HIDDEN], gpu)]
    with Graph(
        "norms", input_types=types + variants, custom_extensions=packages
    ) as norms:
        results = [TensorType(BF16, ["layers", "rows", "n"], gpu), rows, rows]
        values = [v.tensor for v in norms.inputs]
        how = dict(n_columns=HIDDEN)
        norms.output(*ops.custom("bench.norms", gpu, values, results, how))
    hidden, moe_dim, n = HIDDEN, MOE_DIM, N_EXPERTS
    types = [
        TensorType(BF16, ["rows", hidden], gpu),
        TensorType(BF16, ["rows", WIDE], gpu),
        TensorType(I32, ["layers", "rows", TOP_K], gpu),
        TensorType(F32, ["layers", "rows", TOP_K], gpu),
        TensorType(BF16, [n, 2 * moe_dim, hidden], gpu),
        TensorType(BF16, [n, hidden, moe_dim], gpu),
        TensorType(BF16, ["layers", SHAPES["qkv"][0], hidden], gpu),
        TensorType(BF16, ["layers", hidden, WIDE], gpu),
        TensorType(BF16, ["layers", n, hidden], gpu),
    ]
    with Graph(
        "layers", input_types=types + 3 * variants, custom_extensions=packages
    ) as layers:
        values = [v.tensor for v in layers.inputs]
        rows, count = values[0].shape[0], values[2].shape[0]
        each = rows * TOP_K
        results = [
            TensorType(BF16, [count, rows, hidden], gpu),
            TensorType(BF16, [count, each, moe_dim], gpu),
            TensorType(BF16, [each, hidden], gpu),
            TensorType(DType.uint32, [n + 1], gpu),
            TensorType(I32, [n], gpu),
            TensorType(I32, [each], gpu),
            TensorType(I32, [each], gpu),
            TensorType(BF16, [rows, SHAPES["qkv"][0]], gpu),
        ]
        found = ops.custom("bench.layers", gpu, values, results)
        layers.output(*found[:2])
    return [("dense", dense), ("norms", norms), ("layers", layers)]


class Bench:
    def __init__(self, models: dict[str, Any], device: Any, limit_s: float) -> None:
        from max.driver import Buffer

        from max_ep.bench.clock import Clock

        self.models, self.end = models, time.perf_counter() + limit_s
        self.device, self.buffer = device, Buffer.from_dlpack
        handle = self.device.default_queue.native_stream_handle
        stream = torch.cuda.ExternalStream(handle) if handle else None
        self.clock = Clock([stream or torch.cuda.default_stream()])
        self.key, self.gb_s, self.is_wrong = 0, 0.0, False
        self.found: list[tuple[str, float, str]] = []
        torch.manual_seed(0)

    def run(self) -> None:
        self.gb_s = copied_gb_s()
        name = torch.cuda.get_device_name()
        print(
            f"{name}: a copy moves {self.gb_s:.0f} GB/s, read and written", flush=True
        )
        for what in (self.norms, self.whole, self.dense, self.experts):
            try:
                what()
            except Exception as e:
                print(f"FAILED: {type(e).__name__}: {e}"[:600], flush=True)
                self.is_wrong = True
        print("Best three of each:")
        for case in dict.fromkeys(case for case, *_ in self.found):
            best = sorted(us_what for of, *us_what in self.found if of == case)[:3]
            for us, what in best:
                print(f"  {us:8.2f} us {what}")

    # ---------------------------------------------------------------------- timing

    def time(
        self, model: str, tensors: list, variants: list[int]
    ) -> tuple[float, list]:
        """Returns seconds of a replay, and results."""
        from max_ep.bench.clock import back_to_back

        torch.cuda.synchronize()
        inputs = [self.buffer(x) for x in tensors]
        inputs += [self.buffer(torch.tensor(v, dtype=torch.int32)) for v in variants]
        self.key += 1
        run = self.models[model]
        run.execute(*inputs)
        self.device.synchronize()
        outputs = run.capture(self.key, *inputs)
        self.device.synchronize()
        found = [torch.from_dlpack(x) for x in outputs]
        for x in found:
            x.fill_(float("nan"))
        torch.cuda.synchronize()

        def replay() -> None:
            run.replay(self.key, *inputs)

        replay()
        self.device.synchronize()
        found = [x.clone() for x in found]
        seconds = back_to_back(self.clock, replay, 2, 30, self.device.synchronize)
        torch.cuda.synchronize()
        del outputs
        run.release_captured_graph(self.key)
        return float(sorted(seconds[:, 0])[len(seconds) // 2]) / 2, found

    def say(self, what: str, us: float, n_bytes: float, error: str) -> None:
        share = n_bytes / us / 1e3 / self.gb_s
        print(f"{what:66} {us:8.2f} us {100 * share:5.0f} %  {error}", flush=True)
        if "WRONG" in error:
            self.is_wrong = True
        else:
            self.found.append((what.partition(":")[0], us, what))

    def is_late(self) -> bool:
        return time.perf_counter() > self.end

    # ----------------------------------------------------------------------- cases

    def dense(self) -> None:
        for shape, (n, k, n_layers) in SHAPES.items():
            weights = draw(n_layers, n, k) * k**-0.5
            for n_tokens in (1, 2, 4, 16):
                x = draw(n_tokens, k)
                want = (weights[:3].double() @ x.double().T).mT
                for variant in range(len(DENSE) if n_tokens <= MAX_TOKENS else 1):
                    if self.is_late():
                        return
                    seconds, (y,) = self.time("dense", [x, weights], [variant])
                    at = torch.tensor([0, 1, 2, n_layers - 1])
                    last = (weights[-1:].double() @ x.double().T).mT
                    wrong = error(y[at], torch.cat([want, last]))
                    what = f"{shape}, {n_tokens} tokens: {DENSE[variant]}"
                    self.say(what, seconds / n_layers * 1e6, 2 * n * k, wrong)
            del weights

    def norms(self) -> None:
        """A sum, its norm and a product, each layer with another weight."""
        for shape in ("qkv", "router"):
            n, k, n_layers = SHAPES[shape]
            weights, of_norm = draw(n_layers, n, k) * k**-0.5, draw(k)
            for n_tokens in (1, 2, 4):
                x, more = draw(n_tokens, k), draw(n_tokens, k)
                total = x + more
                wide = total.double()
                scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6)
                want_normed = (wide * scale).bfloat16() * of_norm
                given = [x, more, of_norm, weights]
                for variant in range(len(OF_NORM)):
                    seconds, found = self.time("norms", given, [variant])
                    y, total_found, normed = found
                    want = (weights.double() @ normed.double().T).mT
                    wrong = f"{error(y, want)} {error(normed, want_normed)}"
                    wrong += " WRONG: sum" * (not torch.equal(total_found, total))
                    what = f"norm and {shape}, {n_tokens} tokens: {OF_NORM[variant]}"
                    self.say(what, seconds / n_layers * 1e6, 2 * n * k, wrong)

    def given(self, n_tokens: int) -> list:
        ids = torch.rand(N_LAYERS, n_tokens, N_EXPERTS, device=GPU).argsort(-1)
        self.ids = ids[..., :TOP_K].int().contiguous()
        self.weights = torch.rand(N_LAYERS, n_tokens, TOP_K, device=GPU)
        self.x, wide = draw(n_tokens, HIDDEN), draw(n_tokens, WIDE)
        return [self.x, wide, self.ids, self.weights, *self.held()]

    def held(self) -> list:
        if not hasattr(self, "_held"):
            n = N_EXPERTS
            self._held = [
                draw(n, 2 * MOE_DIM, HIDDEN) * HIDDEN**-0.5,
                draw(n, HIDDEN, MOE_DIM) * MOE_DIM**-0.5,
                draw(N_LAYERS, SHAPES["qkv"][0], HIDDEN),
                draw(N_LAYERS, HIDDEN, WIDE),
                draw(N_LAYERS, n, HIDDEN),
            ]
        return self._held

    def wanted(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What experts activate and add up of two tokens, in float64."""
        (gate_up, down), results, each = self.held()[:2], [], []
        for layer, token in self.places():
            total = torch.zeros(HIDDEN, device=GPU).double()
            for expert, weight in zip(
                self.ids[layer, token], self.weights[layer, token]
            ):
                both = gate_up[expert].double() @ self.x[token].double()
                gate, up = both.chunk(2)
                each.append(torch.nn.functional.silu(gate) * up)
                total += weight.double() * (down[expert].double() @ each[-1])
            results.append(total)
        return each, results

    def places(self) -> list[tuple[int, int]]:
        """Returns layer and token of what is checked."""
        return [(0, 0), (N_LAYERS - 1, self.ids.shape[1] - 1)]

    def weights_read(self) -> tuple[float, float]:
        """Bytes of the experts that a layer has chosen, of gate and up, and of down."""
        n = sum(len(x.unique()) for x in self.ids) / N_LAYERS
        return 4 * n * MOE_DIM * HIDDEN, 2 * n * MOE_DIM * HIDDEN

    def one(self, what: str, given: list, variants: list[int], n_bytes: float) -> None:
        seconds, (y, activated) = self.time("layers", given, variants)
        _, of_gate_up, of_down = variants
        (each, results), wrong = self.wanted(), ""
        if of_gate_up > 0:
            rows = activated.unflatten(1, (-1, TOP_K))
            found = torch.cat([rows[at] for at in self.places()])
            wrong = error(found, torch.stack(each))
        if min(of_gate_up, of_down) >= 0:
            found = torch.stack([y[at] for at in self.places()])
            wrong = f"{wrong} {error(found, torch.stack(results))}"
            wrong += " WRONG: NaN" * bool(y.isnan().any())
        self.say(what, seconds / N_LAYERS * 1e6, n_bytes, wrong)

    def experts(self) -> None:
        for n_tokens in (1, 2, 4):
            given = self.given(n_tokens)
            of_gate_up, of_down = self.weights_read()
            for i in range(1, len(DENSE)):
                if self.is_late():
                    return
                what = f"gate, up of {n_tokens} tokens: {DENSE[i]}"
                self.one(what, given, [-1, i, -1], of_gate_up)
            for i in range(1, len(DOWN)):
                what = f"down of {n_tokens} tokens: {DOWN[i]}"
                self.one(what, given, [-1, -1, i], of_down)
            for i in range(1, len(DOWN)):
                what = f"both of {n_tokens} tokens: first; {DOWN[i]}"
                self.one(what, given, [-1, 1, i], of_gate_up + of_down)

    def whole(self) -> None:
        """Experts alone, then with three products before them."""
        for n_tokens in (1, 2, 4, 16, 64):
            given = self.given(n_tokens)
            n_bytes = sum(self.weights_read())
            dense = 2 * sum(n * k for n, k, _ in SHAPES.values())
            for is_new in range(2 if n_tokens <= MAX_TOKENS else 1):
                of_dense = is_new if n_tokens <= MAX_ROWS else 0
                kind = ["today's", "new"][is_new]
                what = f"experts of {n_tokens} tokens: {kind}"
                self.one(what, given, [-1, is_new, is_new], n_bytes)
                what = f"dense and experts of {n_tokens} tokens: {kind}"
                self.one(what, given, [of_dense, is_new, is_new], n_bytes + dense)
                if is_new:
                    late = [2 * of_dense, 2, 2]
                    self.one(f"{what} without PDL", given, late, n_bytes + dense)


def draw(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device=GPU, dtype=torch.bfloat16)


def error(found: torch.Tensor, want: torch.Tensor) -> str:
    """Says by how much results are off; wrong ones in capitals."""
    off = float((found.double() - want).abs().max() / want.abs().max())
    return f"off by {off:.1e}" if off < 8e-3 else f"WRONG: off by {off:.1e}"


def copied_gb_s() -> float:
    a = torch.empty(1 << 32, dtype=torch.uint8, device=GPU)
    b = torch.empty_like(a)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        b.copy_(a)
    begin.record()
    for _ in range(10):
        b.copy_(a)
    end.record()
    torch.cuda.synchronize()
    return 10 * 2 * a.numel() / begin.elapsed_time(end) / 1e6


if __name__ == "__main__":
    main()
