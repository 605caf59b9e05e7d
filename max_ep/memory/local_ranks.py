# SPDX-License-Identifier: Apache-2.0
"""The ranks of this process: where they run, and what they keep between launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import Model

from ..config import EPConfig
from ..limits import NUM_GROUPS
from .symmetric_memory import SharedMemory

_SEND = 0  # index in [send, recv, counts]


class LocalRanks:
    """Regions and counters of the ranks of this process, prepared for their peers."""

    def __init__(
        self, config: EPConfig, devices: Sequence[Device], model: Model, memory: Any
    ) -> None:
        self.config, self.devices, self._model = config, devices, model
        self.rank_devices = devices_of_ranks(config, devices)
        self.regions: list[int] = memory.local_addresses()
        """The address of each rank's region."""
        self.counters = self._allocate_counters(memory)
        """``[NUM_GROUPS][rank]``; ops use group 0."""
        self.offsets = self.prepare(was_used=False)
        """Offsets of the buffers in a region, ``[NUM_GROUPS, 3]``."""
        if config.spans_hosts:
            # What is sent to other hosts is put from behind the region.
            sizes = config.sizes()
            put = sizes.region_bytes
            self.offsets[:, _SEND] = put, put + sizes.dispatch_put_bytes

    def _allocate_counters(self, memory: Any) -> list[list[Buffer]]:
        """Makes zeroed counters of each group and rank. Those that ops use stand in
        shared memory, where there is some: other processes look at them."""
        shape, devices = [self.config.sizes().counters_words], self.rank_devices
        counters = [
            [Buffer.zeros(shape, DType.int32, device) for device in devices]
            for _ in range(NUM_GROUPS)
        ]
        if isinstance(memory, SharedMemory):
            words = np.frombuffer(memory.status, np.int32)
            for rank, of_rank in enumerate(np.split(words, len(devices))):
                counters[0][rank] = Buffer.from_numpy(of_rank[: shape[0]])
        return counters

    def prepare(
        self,
        *,
        was_used: bool,
        readmitted: int = -1,
        generations: Sequence[int] = (0, 0),
    ) -> np.ndarray:
        """Runs ``max_ep.init`` on every local rank; returns offsets of the buffers in a
        region, ``[NUM_GROUPS, 3]``. Clears only what a ``readmitted`` rank wrote, and
        goes on with the ``generations`` that the group has dispatched and combined."""
        config, sizes = self.config, self.config.sizes()
        dispatched, combined = generations
        # What a device was asked before (zeros in the counters) comes first.
        self.synchronize()
        # A run of the set-up graph prepares one rank on each device.
        n_devices = config.n_local_devices
        per_device = config.n_gpus_per_node // n_devices
        for i in range(per_device):
            inputs: list[Buffer | np.ndarray] = []
            for device in range(n_devices):
                rank = device * per_device + i
                known = vars(sizes) | dict(
                    region=self.regions[rank],
                    rank=0 if config.use_allreduce else self.rank_of(rank),
                    timeout_ms=config.timeout_ms,
                    was_used=was_used,
                    readmitted=readmitted,
                    dispatched=dispatched,
                    combined=combined,
                )
                inputs += [group[rank] for group in self.counters]
                setup = [known[name] for name in sizes.setup]
                inputs.append(np.array(setup, np.int64))
            device_ptrs, *_ = self._model.execute(*inputs)
        self.synchronize()
        # The addresses are those of the first device's last rank; offsets are the same
        # in all regions.
        return device_ptrs.to_numpy() - np.uint64(self.regions[per_device - 1])

    def reset(self) -> None:
        """Puts all ranks back before generation 1. No run may be going on."""
        # A kernel that still waits, on another GPU, could write to a rank that
        # is cleared already.
        self.synchronize()
        self.prepare(was_used=True)

    def rank_of(self, local_rank: int) -> int:
        return self.config.node_id * self.config.n_gpus_per_node + local_rank

    def synchronize(self) -> None:
        for device in self.devices:
            device.synchronize()


def devices_of_ranks(config: EPConfig, devices: Sequence[Device]) -> list[Device]:
    """Returns the device of each local rank."""
    per_device = config.n_gpus_per_node // len(devices)
    return [device for device in devices for _ in range(per_device)]
