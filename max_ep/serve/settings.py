# SPDX-License-Identifier: Apache-2.0
"""The group of a served model, from MAX's serving flags and the environment.

Where MAX has no flag, there is an environment variable. The memory planner and the
model call the same function, so what is planned is what is allocated.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import numpy as np
from max.driver import CPU, Accelerator, is_virtual_device_mode
from max.dtype import DType
from max.nn.comm.ep.ep_config import calculate_ep_max_tokens_per_rank
from max.pipelines.kv_cache.memory_planner import PagedMemoryPlanner

from .. import EPConfig, blockwise_fp8_quant_config
from ..balance import Placement, default_replicas, plan
from ..checkpoint import BIASES, check_place, loaded_bytes, why_not_balanced
from ..checkpoint.decoder import Decoder, LatentAttention
from ..experts import gather_takes, gpu_takes
from ..limits import (
    BALANCE_VARIABLE,
    FP8_BLOCK,
    PROTOCOLS,
    timeout_s_of_environment,
)
from ..plural import counted
from .held import HeldExperts
from .hopper import is_hopper
from .source import config_of, decoder_of, is_downloaded, stored_in

PROTOCOL_VARIABLE = "MAX_EP_PROTOCOL"
"""Environment variable for :attr:`EPConfig.protocol`; unset or empty: ``auto``."""

PLACEMENT_VARIABLE = "MAX_EP_PLACEMENT"
"""Environment variable for a file of :meth:`Placement.save`; unset or empty: experts
have no replicas."""


_NOT_OURS = {
    "ep_use_allreduce": "tokens go to the ranks of their experts; leave it out",
    "eplb_profile": "max_ep counts rows by ep_received; leave it out",
    "eplb_redundant_experts_per_gpu": "replicas are those of a placement; make one by "
    f"max-ep balance, and name its file in {PLACEMENT_VARIABLE}",
}
"""Flags of MAX that would ask for nothing, and what to use."""


def n_gpus(pipeline_config: Any) -> int:
    """Returns how many GPUs serve; 0: the CPU does."""
    specs = pipeline_config.model.device_specs
    return 0 if specs[0].device_type == "cpu" else len(specs)


def serving_config(pipeline_config: Any, model: Decoder, dtype: DType) -> EPConfig:
    """Returns the group that serves a model.

    On GPUs a rank is a GPU. On the CPU ``--ep-size`` ranks share it and run one after
    another. Combine returns sums where the protocol can do that. ``dtype`` is that of
    the model, and on the wire, unless experts stay in FP8: bfloat16 or float32.
    """
    runtime = pipeline_config.runtime
    for flag, why in _NOT_OURS.items():
        if getattr(runtime, flag, None):
            raise ValueError(f"--{flag.replace('_', '-')} with max_ep.serve: {why}")
    overlaps = runtime.enable_overlap_scheduler and not runtime.disable_overlap
    if pipeline_config.sampling.enable_penalties and overlaps:
        raise ValueError(
            "penalties (repetition_penalty in generation_config.json, or "
            "--enable-penalties) do not count the last token where MAX's scheduler "
            "overlaps steps; pass --disable-overlap"
        )
    degree, n = pipeline_config.model.data_parallel_degree, n_gpus(pipeline_config)
    n_ranks = n or runtime.ep_size
    if n and runtime.ep_size != n:
        raise ValueError(
            f"--ep-size {runtime.ep_size} on {n} GPU{'s' * (n > 1)}: max_ep serves on "
            f"one host with a rank on each GPU; pass --ep-size {n}, or serve the model "
            "without max_ep"
        )
    if n > 1 and degree != n:
        raise ValueError(
            f"--data-parallel-degree {degree} with --ep-size {runtime.ep_size} on "
            f"{counted(n, 'GPU')}: max_ep serves with one replica a GPU; pass "
            f"--data-parallel-degree {n}"
        )
    n_experts = model.moe.n_experts
    if n_experts % n_ranks:
        remedy = "serve on a number of GPUs" if n else "pass an --ep-size"
        raise ValueError(
            f"{counted(n_experts, 'expert')} cannot be loaded on --ep-size "
            f"{counted(n_ranks, 'rank')}: every rank has the same number of experts; "
            f"{remedy} that divides {n_experts}"
        )
    n_tokens = runtime.max_batch_input_tokens
    if not runtime.enable_chunked_prefill:
        # A whole prompt may come on top of a full batch.
        n_tokens += pipeline_config.model.max_length or 0
    is_fp8 = model.keeps_fp8(n)
    config = EPConfig(
        dispatch_dtype=DType.float8_e4m3fn if is_fp8 else dtype,
        dispatch_quant_config=blockwise_fp8_quant_config() if is_fp8 else None,
        combine_dtype=dtype,
        hidden_size=model.hidden_size,
        top_k=model.moe.top_k,
        n_experts=n_experts,
        max_tokens_per_rank=calculate_ep_max_tokens_per_rank(
            max_batch_input_tokens=n_tokens,
            ep_size=n_ranks,
            data_parallel_degree=degree,
        ),
        n_gpus_per_node=n_ranks,
        n_nodes=1,
        fused_shared_expert=model.moe.dispatches_shared,
        target="gpu" if n else "cpu",
        protocol=_protocol(),
        timeout_s=timeout_s_of_environment(),
    )
    config = _placed(config)
    if balance_s():
        why_not = why_not_balanced(config_of(pipeline_config), n_ranks)
        config = _balanced(config, model, why_not)
    if config.eplb_enabled and model.moe.is_clamped:
        raise ValueError(f"{PLACEMENT_VARIABLE} is set, and {BIASES}; unset it")
    return replace(config, combine_mode="sums") if config.is_by_rank else config


def _placed(config: EPConfig) -> EPConfig:
    """Gives experts the replicas of the placement that the environment names."""
    path = os.environ.get(PLACEMENT_VARIABLE)
    if not path:
        return config
    try:
        placement = Placement.load(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{PLACEMENT_VARIABLE}={path} cannot be read: {error}. Name a file of "
            "`max-ep balance --out`"
        ) from error
    n_physical = placement.phy2log.shape[1]
    have = placement.n_ranks, placement.n_logical
    if n_physical % config.n_ranks != 0 or have != (config.n_ranks, config.n_experts):
        raise ValueError(
            f"{PLACEMENT_VARIABLE}={path} has {counted(have[1], 'expert')} on "
            f"{counted(have[0], 'rank')}, {n_physical} with replicas; served are "
            f"{config.n_experts} on {config.n_ranks}. It must be of the same, and all "
            "ranks have as many replicas: plan again (max-ep balance)"
        )
    return _with_placement(config, placement)


def _with_placement(config: EPConfig, placement: Placement) -> EPConfig:
    n_layers, n_physical = placement.phy2log.shape
    return replace(
        config,
        n_experts=n_physical,
        num_logical_experts=placement.n_logical,
        num_moe_layers=n_layers,
        max_replicas=int(placement.logcnt.max()),
        eplb_enabled=True,
        eplb_phy2log_plan=placement.phy2log,
    )


def balance_s() -> float:
    """Returns the seconds that the environment says; 0: experts stay."""
    text = os.environ.get(BALANCE_VARIABLE) or "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < float("inf"):
        raise ValueError(
            f"{BALANCE_VARIABLE}={text!r} must be seconds between two looks at what "
            "experts receive; unset it, and experts stay where they are"
        )
    return seconds


def _balanced(config: EPConfig, model: Decoder, why_not: str) -> EPConfig:
    """Gives experts replicas that may move: those of the placement that the environment
    names, or as many as ``max-ep balance`` gives, spread evenly."""
    if why_not:
        raise ValueError(f"{BALANCE_VARIABLE} is set, but {why_not}; unset it")
    if not config.eplb_enabled:
        n, n_ranks = config.n_experts, config.n_ranks
        n_more = default_replicas(n, n_ranks)
        placed = plan(np.zeros((1, n)), n_ranks, n_more, top_k=config.top_k)
        n_layers = len(model.layers) - len(model.dense_layers)
        placement = Placement(np.tile(placed.phy2log, (n_layers, 1)), n_ranks)
        config = _with_placement(config, placement)
    return replace(config, max_replicas=config.n_ranks)


def place_experts(state_dict: dict[str, Any], config: EPConfig) -> dict[str, Any]:
    """Names the weights of experts by their physical ones; replicas share arrays."""
    if not config.eplb_enabled:
        return state_dict
    experts: dict[int, list[tuple[str, int, str]]] = {}
    placed = {}
    for name in state_dict:
        found = re.fullmatch(r"(.*?\blayers\.(\d+)\..*\bexperts\.)(\d+)(\..*)", name)
        if found is None:
            placed[name] = state_dict[name]
            continue
        before, layer, expert, after = found.groups()
        experts.setdefault(int(layer), []).append((before, int(expert), after))
    if len(experts) != config.num_moe_layers:
        raise ValueError(
            f"{PLACEMENT_VARIABLE} has {counted(config.num_moe_layers, 'layer')}, the "
            f"model {len(experts)} with experts"
        )
    for layer, row in zip(sorted(experts), config.eplb_phy2log_plan):
        for before, expert, after in experts[layer]:
            weight = state_dict[f"{before}{expert}{after}"]
            for physical in np.flatnonzero(row == expert):
                placed[f"{before}{physical}{after}"] = weight
    return placed


def _protocol() -> str:
    name, known = os.environ.get(PROTOCOL_VARIABLE) or "auto", ("auto", *PROTOCOLS)
    if name not in known:
        raise ValueError(
            f"{PROTOCOL_VARIABLE}={name!r} is no protocol; set it to one of "
            f"{', '.join(known)}, or unset it"
        )
    return name


def gathers(config: EPConfig, model: Decoder) -> bool:
    """Returns whether experts gather their tokens, in place of dispatch and combine:
    on one Hopper GPU in bfloat16, without replicas, in our decoder."""
    return (
        config.target == "gpu"
        and config.n_ranks == 1
        and config.dispatch_dtype == config.combine_dtype == DType.bfloat16
        and not (config.eplb_enabled or config.fused_shared_expert)
        and not model.moe.is_clamped
        and not isinstance(model.layers[0].attention, LatentAttention)
        and gather_takes(config.n_experts, *model.expert_sizes[0])
        and gpu_takes(*model.expert_sizes[1])
        and is_hopper()
    )


def rank_bytes(config: EPConfig, model: Decoder) -> tuple[int, int]:
    """Returns a rank's bytes of symmetric memory, and those of its MoE layers."""
    if not gathers(config, model):
        return config.estimate_memory_usage(), activation_bytes(config, model)
    per_row = (model.hidden_size + model.moe.dim) * config.combine_dtype.size_in_bytes
    # An int32 for each row, its token, and one for each choice, its row.
    per_row += 2 * DType.int32.size_in_bytes
    return 0, config.max_tokens_per_rank * config.top_k * per_row


def activation_bytes(config: EPConfig, model: Decoder) -> int:
    """Returns the bytes of the rows that a rank may receive, which layers share: as
    dispatched, as products of gate and up (not stored where one kernel has all of
    SwiGLU), and as results."""
    hidden, dim = model.hidden_size, model.moe.dim
    if config.is_quantized:
        # In bytes, and scales of four for a block.
        in_fp8 = (hidden + dim) * (FP8_BLOCK + 4) // FP8_BLOCK
        results = hidden * config.combine_dtype.size_in_bytes
        return config.n_output_rows * (in_fp8 + results)
    fits = all(gpu_takes(*size) for size in model.expert_sizes)
    per_row = 2 * hidden + (1 if config.target == "gpu" and fits else 3) * dim
    return config.n_output_rows * per_row * config.dispatch_dtype.size_in_bytes


class ExpertParallelPlanner(PagedMemoryPlanner):
    """Adds a group's memory to the plan of a paged model.

    MAX calls it before it reads weights, so it refuses a group that cannot run.
    """

    _always_signal_buffers = True

    def estimate_signal_buffer_memory(
        self, pipeline_config: Any, arch_config: Any | None = None
    ) -> int:
        """Returns the bytes of MAX's signal buffers; one device has none."""
        if n_gpus(pipeline_config) < 2:
            return 0
        return super().estimate_signal_buffer_memory(pipeline_config, arch_config)

    def estimate_weights_size(self, pipeline_config: Any) -> int:
        """Returns the bytes of all devices as weights are loaded: files may be
        narrower, and have once what each GPU has."""
        n = n_gpus(pipeline_config)
        return (n or 1) * sum(loaded_bytes(config_of(pipeline_config), n))

    def estimate_activation_memory(
        self, pipeline_config: Any, huggingface_config: Any
    ) -> int:
        """Returns the bytes of all devices: symmetric memory and expert rows."""
        n, dtype = n_gpus(pipeline_config), self._config.dtype
        check_place(config_of(pipeline_config)["architectures"][0], n)
        _check_dtype(dtype, n)
        if is_downloaded(pipeline_config):
            stored_in(pipeline_config, n)
        model = decoder_of(pipeline_config)
        config = serving_config(pipeline_config, model, dtype)
        _check_fits(config, model, pipeline_config)
        held = 0
        if balance_s():
            held = HeldExperts(config, model, dtype).more_bytes
        return (sum(rank_bytes(config, model)) + held) * config.n_gpus_per_node


def _check_dtype(dtype: DType, n_gpus: int) -> None:
    """Refuses a dtype that MAX would serve, but whose answers nobody compared."""
    served = DType.bfloat16 if n_gpus else DType.float32
    if dtype != served:
        where = "GPUs" if n_gpus else "the CPU"
        raise ValueError(
            f"{dtype.name} is not served on {where}; pass --quantization-encoding "
            f"{served.name}, and rename weight files whose names say another"
        )


def _check_fits(config: EPConfig, model: Decoder, pipeline_config: Any) -> None:
    """Refuses a group that is larger than a device's free memory."""
    if is_virtual_device_mode():
        return
    n_here, devices = 1, [Accelerator(i) for i in range(n_gpus(pipeline_config))]
    if not devices:
        n_here, devices = config.n_gpus_per_node, [CPU()]
    free = min(int(device.stats["free_memory"]) for device in devices)
    regions, rows = (n_here * n_bytes for n_bytes in rank_bytes(config, model))
    if regions + rows <= free:
        return
    runtime = pipeline_config.runtime
    remedy = "lower --max-batch-input-tokens"
    if not runtime.enable_chunked_prefill:
        remedy += " or --max-length, or turn chunked prefill on"
    raise ValueError(
        f"dispatch and combine need {(regions + rows) / 2**30:.1f} GiB on a device "
        f"for --max-batch-input-tokens {runtime.max_batch_input_tokens} "
        f"({regions / 2**30:.1f} of symmetric memory, {rows / 2**30:.1f} of expert "
        f"rows), and {free / 2**30:.1f} GiB are free; {remedy}"
    )
