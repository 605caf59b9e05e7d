# SPDX-License-Identifier: Apache-2.0
"""What every served model needs: the group's memory, its graph inputs, its checks.

An architecture mixes :class:`ExpertParallelModel` into MAX's pipeline model and
:class:`ExpertParallelBatches` into MAX's batch processor. MAX's own model builds its
graph; while it does, :func:`using_max_ep` puts our classes where its modules have
MAX's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

from max.driver import Buffer, accelerator_architecture_name, is_virtual_device_mode
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import TensorValue
from max.nn.kernels import grouped_matmul_ragged
from max.nn.moe import moe as max_moe

from ..config import EPConfig
from ..experts import grouped_matmul
from ..initializer import EPCommInitializer
from ..manager import EPBatchManager
from .settings import MoeShape, n_devices, serving_config, uses_max_ep

_CHECK_EVERY_S = 1.0


@contextmanager
def using_max_ep(*modules: ModuleType) -> Iterator[None]:
    """Lets modules of MAX use our ``EPBatchManager`` for a while.

    And MAX's MoE layer a grouped matmul that compiles on this GPU.

    Args:
        modules: Modules that have MAX's class under this name.
    """
    theirs = [(module, "EPBatchManager", EPBatchManager) for module in modules]
    theirs.append((max_moe, "grouped_matmul_ragged", grouped_matmul_anywhere))
    before = [getattr(module, name) for module, name, _ in theirs]
    for module, name, ours in theirs:
        setattr(module, name, ours)
    try:
        yield
    finally:
        for (module, name, _), was in zip(theirs, before):
            setattr(module, name, was)


def grouped_matmul_anywhere(
    hidden_states: TensorValue,
    weight: TensorValue,
    expert_start_indices: TensorValue,
    expert_ids: TensorValue,
    expert_usage_stats: TensorValue,
) -> TensorValue:
    """Runs MAX's ``grouped_matmul_ragged``, or ours where that does not compile.

    That is in bfloat16 on Hopper, see
    docs/decisions/0016-grouped-matmul-on-hopper.md. The arguments are MAX's.
    """
    on_hopper = accelerator_architecture_name().startswith("sm_90")
    if on_hopper and weight.dtype == DType.bfloat16:
        return grouped_matmul(hidden_states, weight, expert_start_indices, expert_ids)
    return grouped_matmul_ragged(
        hidden_states, weight, expert_start_indices, expert_ids, expert_usage_stats
    )


class ExpertParallelModel:
    """To be mixed into a pipeline model of MAX, in front of it."""

    max_modules: ClassVar[tuple[ModuleType, ...]] = ()
    """Where MAX's model gets its ``EPBatchManager`` from."""

    ep_comm_initializer: EPCommInitializer | None = None
    _checked_s = 0.0

    def load_model(self, session: InferenceSession) -> Model:
        """Builds, compiles and loads the graph; see MAX's model."""
        with using_max_ep(*self.max_modules):
            return super().load_model(session)

    @property
    def signal_buffers(self) -> list[Buffer]:
        """MAX's buffers of collectives, which one device has not."""
        return [] if len(self.devices) == 1 else super().signal_buffers

    def _create_ep_config(
        self, state_dict: dict[str, Any] | None = None
    ) -> EPConfig | None:
        """Takes the place of MAX's: returns the group, or None."""
        del state_dict
        if not uses_max_ep(self.pipeline_config):
            return None
        shape = MoeShape.of(self.huggingface_config)
        return serving_config(self.pipeline_config, shape, self.dtype)

    def _init_distributed_runtime(
        self, session: InferenceSession, model_config: Any
    ) -> None:
        if model_config.ep_config is None:
            return
        if is_virtual_device_mode():  # compiles only
            model_config.ep_config.node_id = 0
            return
        self.ep_comm_initializer = EPCommInitializer(model_config.ep_config)
        # A session of its own: --precompiled-mefs has no set-up graph.
        self.ep_comm_initializer.ep_init(InferenceSession(devices=session.devices))
        model_config.ep_config.node_id = self.ep_comm_initializer.config.node_id

    def execute(self, model_inputs: Any) -> Any:
        """Runs a batch; see MAX's model.

        Raises:
            RuntimeError: If a dispatch or a combine has failed on a GPU, about a
                second late at most; says who waited for whom.
        """
        outputs = super().execute(model_inputs)
        now = time.monotonic()
        if self.ep_comm_initializer and now - self._checked_s > _CHECK_EVERY_S:
            self._checked_s = now
            self.ep_comm_initializer.check()
        return outputs


class ExpertParallelBatches:
    """To be mixed into a batch processor of MAX, in front of it."""

    inputs_type: type
    """The model's inputs, with a field ``ep_inputs``."""

    def prepare_initial_token_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Adds the group's graph inputs to those of a batch on one device."""
        inputs = super().prepare_initial_token_inputs(*args, **kwargs)
        if n_devices(self.runtime.pipeline_config) > 1:
            return inputs
        return self.inputs_type(**vars(inputs), ep_inputs=self._ep_inputs())
