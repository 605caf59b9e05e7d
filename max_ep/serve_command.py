# SPDX-License-Identifier: Apache-2.0
"""``max-ep serve MODEL``: checks machine and model, and starts ``max serve``.

It loads no MAX, so it refuses an unsupported model at once.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .moe_shape import SUPPORTED, MoeShape, check_place, dense_layers

CUSTOM_ARCHITECTURES = ("--custom-architectures", "max_ep.serve")
"""The flag that makes MAX serve with max_ep."""

CAPTURED_DECODE = "--device-graph-capture"
"""The flag that makes MAX decode through captured graphs."""

_CPU_RANKS = 4


@dataclass(frozen=True)
class Gpu:
    name: str
    n_bytes: int
    is_hopper: bool


def run_serve(options: Any) -> None:
    """Prints what was found and the command; runs it in this process's place."""
    gpus = gpus_of_machine()
    n_gpus = len(gpus) if options.gpus is None else options.gpus
    if not 0 <= n_gpus <= len(gpus):
        raise ValueError(f"--gpus {n_gpus}: this machine has {len(gpus)}")
    config, n_bytes = config_of(options.model)
    n_experts = _check_supported(config, gpus[:n_gpus], n_bytes)
    n_ranks = n_gpus or options.ranks
    if n_ranks is None:
        # The most that have the same number of experts.
        n_ranks = max(n for n in range(1, _CPU_RANKS + 1) if n_experts % n == 0)
    if n_ranks < 1 or n_experts % n_ranks:
        name = "--gpus" if n_gpus else "--ranks"
        raise ValueError(f"{name} {n_ranks} does not divide {n_experts} experts")
    where = f"{n_gpus} of {len(gpus)} x {gpus[0].name}" if n_gpus else "the CPU"
    size = _gigabytes(n_bytes) if n_bytes else "unknown size"
    print(f"machine    {where}")
    print(f"model      {config['architectures'][0]}, {size} of weights")
    print(f"experts    {n_experts}, {n_experts // n_ranks} on each of {n_ranks} ranks")
    chosen = [*CUSTOM_ARCHITECTURES, *device_flags(n_gpus, n_ranks)]
    if n_gpus and CAPTURED_DECODE not in options.flags:
        chosen.append(CAPTURED_DECODE)
    command = ["max", "serve", "--model-path", options.model, *chosen, *options.flags]
    print(f"command    {shlex.join(command)}", flush=True)
    if options.dry_run:
        return
    beside = Path(sys.executable).with_name("max")
    program = str(beside) if beside.exists() else shutil.which("max")
    if not program:
        raise ValueError("there is no `max`; uv pip install 'max[serve]==26.7.*'")
    print("MAX compiles the model, the first time for minutes, then loads it.")
    sys.stdout.flush()
    os.execv(program, command)


def device_flags(n_gpus: int, n_ranks: int) -> list[str]:
    """Returns the flags of ``max serve`` for so many GPUs; 0: for ranks on the CPU."""
    if n_gpus == 0:
        flags = ["--devices", "cpu", "--quantization-encoding", "float32"]
        return [*flags, "--ep-size", str(n_ranks)]
    devices = "gpu:" + ",".join(str(i) for i in range(n_gpus))
    flags = ["--devices", devices, "--quantization-encoding", "bfloat16"]
    if n_gpus > 1:
        flags += ["--data-parallel-degree", str(n_gpus), "--ep-size", str(n_gpus)]
    return flags


def gpus_of_machine() -> list[Gpu]:
    """Asks ``nvidia-smi`` for the visible ones; without it there are no GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return []
    asked = "--query-gpu=name,memory.total,compute_cap"
    command = ["nvidia-smi", asked, "--format=csv,noheader,nounits"]
    if visible:
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return []
    if visible and done.returncode != 0:
        raise ValueError(
            f"nvidia-smi finds no CUDA_VISIBLE_DEVICES={visible!r}; list GPUs by "
            "number or by whole UUID"
        )
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    return [
        Gpu(name, int(mebibytes) << 20, capability.startswith("9."))
        for name, mebibytes, capability in (row for row in rows if len(row) == 3)
    ]


def config_of(model: str) -> tuple[dict[str, Any], int]:
    """Returns ``config.json`` and the bytes of the weights, 0 if unknown, of a folder
    or of a repository of the Hugging Face hub."""
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{model} has no config.json; name a model's folder")
        try:
            config = json.loads((folder / "config.json").read_text())
        except ValueError as error:
            raise ValueError(f"{model}/config.json is not JSON: {error}") from error
        files = folder.glob("*.safetensors")
        return config, sum(file.stat().st_size for file in files)
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        config = json.loads(Path(hf_hub_download(model, "config.json")).read_text())
        try:
            index = hf_hub_download(model, "model.safetensors.index.json")
            metadata = json.loads(Path(index).read_text()).get("metadata", {})
            return config, int(metadata.get("total_size", 0))
        except EntryNotFoundError:
            return config, 0
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{model} is no folder, and the Hugging Face hub does not give it: {reason}"
        ) from error


def _check_supported(config: dict[str, Any], gpus: Sequence[Gpu], n_bytes: int) -> int:
    """Returns the number of experts; refuses what cannot be served, in one sentence."""
    if not isinstance(config, dict):
        raise ValueError("config.json is not one of a model: it holds no names")
    name = (config.get("architectures") or ["no architecture"])[0]
    if name not in SUPPORTED:
        raise ValueError(f"{name} is not supported; there are {', '.join(SUPPORTED)}")
    quantization = config.get("quantization_config")
    if quantization and not quantization.get("weight_block_size"):
        method = quantization.get("quant_method", "quantized")
        raise ValueError(
            f"{name} in {method} is not supported; take a checkpoint in bfloat16 or "
            "blockwise FP8"
        )
    check_place(name, len(gpus))
    for gpu in gpus:
        if not gpu.is_hopper:
            what = "the matmuls need an H100 or H200"
            raise ValueError(f"{what}, this GPU is {gpu.name}")
    try:
        sizes = SimpleNamespace(**config)
        shape, loaded = MoeShape.of(sizes), n_bytes
        if "float32" in (config.get("dtype"), config.get("torch_dtype")):
            loaded //= 2  # on GPUs they are bfloat16
        if quantization:
            keeps_fp8 = shape.keeps_fp8(len(gpus))
            loaded += _widened_bytes(sizes) if keeps_fp8 else n_bytes
        if len(gpus) > 1:
            # Each has all weights but those of the experts.
            replicated = loaded - _expert_bytes(sizes, shape)
            loaded += (len(gpus) - 1) * max(0, replicated)
    except AttributeError as error:
        raise ValueError(f"config.json of {name} is not complete: {error}") from error
    most = sum(gpu.n_bytes for gpu in gpus)
    if gpus and loaded > most:
        weights, memory = f"{_gigabytes(loaded)} of weights", _gigabytes(most)
        raise ValueError(f"{weights} do not fit into {memory} of GPU memory")
    return shape.n_experts


def _widened_bytes(config: Any) -> int:
    """Counts the bytes of attention and dense MLPs in FP8: widened, they double."""
    n_heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // n_heads
    heads = 2 * (n_heads + config.num_key_value_heads) * head_dim
    n_dense = len(dense_layers(config))
    dense = 3 * config.intermediate_size * n_dense if n_dense else 0
    return (heads * config.num_hidden_layers + dense) * hidden


def _expert_bytes(config: Any, shape: MoeShape) -> int:
    """Counts the bytes of all routed experts in bfloat16, at most."""
    n_layers = config.num_hidden_layers + getattr(config, "num_nextn_predict_layers", 0)
    n_layers -= getattr(config, "first_k_dense_replace", 0) + len(dense_layers(config))
    return 2 * n_layers * 3 * shape.n_experts * shape.moe_dim * shape.hidden_size


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB"
