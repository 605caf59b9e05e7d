# SPDX-License-Identifier: Apache-2.0
"""The memory plan: what dispatch and combine take, before MAX sizes the KV cache."""

from __future__ import annotations

from typing import Any

from max.driver import CPU, Accelerator, is_virtual_device_mode
from max.pipelines.kv_cache.memory_planner import PagedMemoryPlanner

from ..config import EPConfig
from .settings import (
    MoeShape,
    activation_bytes,
    is_on_cpu,
    n_devices,
    serving_config,
    uses_max_ep,
)


class ExpertParallelPlanner(PagedMemoryPlanner):
    """Adds a group's memory to the plan of a paged model.

    MAX asks it before it reads weights, so a group that cannot be is refused here.
    """

    _always_signal_buffers = True

    def estimate_signal_buffer_memory(
        self, pipeline_config: Any, arch_config: Any | None = None
    ) -> int:
        """Returns the bytes of MAX's signal buffers, which one device has not."""
        if n_devices(pipeline_config) == 1:
            return 0
        return super().estimate_signal_buffer_memory(pipeline_config, arch_config)

    def estimate_activation_memory(
        self, pipeline_config: Any, huggingface_config: Any
    ) -> int:
        """Returns the bytes of all devices: symmetric memory and expert rows."""
        if not uses_max_ep(pipeline_config):
            return 0
        shape = MoeShape.of(huggingface_config)
        config = serving_config(pipeline_config, shape, self._config.dtype)
        _check_fits(config, shape, pipeline_config)
        per_rank = config.estimate_memory_usage() + activation_bytes(config, shape)
        return per_rank * config.n_gpus_per_node


def _check_fits(config: EPConfig, shape: MoeShape, pipeline_config: Any) -> None:
    """Refuses a group that is larger than a device's free memory."""
    if is_virtual_device_mode():
        return
    on_cpu = is_on_cpu(pipeline_config)
    regions, rows = config.estimate_memory_usage(), activation_bytes(config, shape)
    n_here = config.n_gpus_per_node if on_cpu else 1
    devices = [CPU()] if on_cpu else map(Accelerator, range(n_devices(pipeline_config)))
    free = min(int(device.stats["free_memory"]) for device in devices)
    if n_here * (regions + rows) > free:
        raise ValueError(
            f"dispatch and combine need {n_here * (regions + rows) / 2**30:.1f} GiB on "
            f"a device for --max-batch-input-tokens "
            f"{pipeline_config.runtime.max_batch_input_tokens} "
            f"({n_here * regions / 2**30:.1f} of symmetric memory, "
            f"{n_here * rows / 2**30:.1f} of expert rows), and "
            f"{free / 2**30:.1f} GiB are free; lower "
            + (
                "--max-batch-input-tokens"
                if pipeline_config.runtime.enable_chunked_prefill
                else "--max-batch-input-tokens or --max-length, or turn chunked "
                "prefill on"
            )
        )
