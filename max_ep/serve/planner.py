# SPDX-License-Identifier: Apache-2.0
"""The memory plan: what dispatch and combine need, before MAX sizes the KV cache."""

from __future__ import annotations

from typing import Any

from max.driver import CPU, Accelerator, is_virtual_device_mode
from max.pipelines.kv_cache.memory_planner import PagedMemoryPlanner

from .. import EPConfig
from ..moe_shape import MoeShape, check_place
from .settings import n_gpus, rank_bytes, serving_config, uses_max_ep


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

    def estimate_activation_memory(
        self, pipeline_config: Any, huggingface_config: Any
    ) -> int:
        """Returns the bytes of all devices: symmetric memory and expert rows."""
        check_place(huggingface_config.architectures[0], n_gpus(pipeline_config))
        if not uses_max_ep(pipeline_config):
            return 0
        shape = MoeShape.of(huggingface_config)
        config = serving_config(pipeline_config, shape, self._config.dtype)
        _check_fits(config, shape, pipeline_config)
        return sum(rank_bytes(config, shape)) * config.n_gpus_per_node


def _check_fits(config: EPConfig, shape: MoeShape, pipeline_config: Any) -> None:
    """Refuses a group that is larger than a device's free memory."""
    if is_virtual_device_mode():
        return
    n_here, devices = 1, [Accelerator(i) for i in range(n_gpus(pipeline_config))]
    if not devices:
        n_here, devices = config.n_gpus_per_node, [CPU()]
    free = min(int(device.stats["free_memory"]) for device in devices)
    regions, rows = (n_here * n_bytes for n_bytes in rank_bytes(config, shape))
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
