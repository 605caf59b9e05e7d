# SPDX-License-Identifier: Apache-2.0
"""What every served model needs: the group's memory, its graph inputs, its checks.

An architecture puts :class:`ExpertParallelModel` in front of MAX's pipeline model. That
builds its graph, while :func:`using_max_ep` replaces names in MAX's modules.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

from max.driver import Buffer, is_virtual_device_mode
from max.engine import InferenceSession, Model
from max.graph.graph import default_custom_extensions_scope

from .. import EPBatchManager, EPCommInitializer, EPConfig, experts, extension_path
from ..config.protocol import cost_of_by_expert
from ..moe_shape import MoeShape
from .hopper import REPLACED, PlacedMoE, forward_layers, is_hopper
from .settings import gathers, n_gpus, serving_config, uses_max_ep
from .source import config_of, fill

_CHECK_EVERY_S = 1.0

_OF_MODELS = {
    "EPBatchManager": EPBatchManager,
    "MoE": PlacedMoE,
    "forward_moe_sharded_layers": forward_layers,
}
"""Names that MAX's models import, and what replaces them."""

_logger = logging.getLogger("max.pipelines.max_ep")  # MAX shows only such names


@contextmanager
def using_max_ep(*modules: ModuleType, **names: Any) -> Iterator[None]:
    """Replaces names in MAX's modules: those of ``hopper.py`` everywhere, and in
    ``modules``, of models, the manager, the way through MoE layers, and ``names``."""
    ours = [
        (module, name, value)
        for module in modules
        for name, value in (_OF_MODELS | names).items()
        if hasattr(module, name)
    ]
    ours += REPLACED
    before = [getattr(module, name) for module, name, _ in ours]
    for module, name, value in ours:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(ours, before):
            setattr(module, name, value)


class CheckedConfig:
    """Base class in front of a config of MAX: refuses a ``config.json``, and adds what
    MAX reads and transformers does not write."""

    @classmethod
    def initialize(cls, pipeline_config: Any, *args: Any, **more: Any) -> Any:
        checked = config_of(pipeline_config)
        fill(pipeline_config.model.huggingface_config, checked)
        return super().initialize(pipeline_config, *args, **more)


class ExpertParallelModel:
    """Base class in front of a pipeline model of MAX."""

    max_modules: ClassVar[tuple[ModuleType, ...]] = ()
    """Modules of MAX in which names are replaced; see :func:`using_max_ep`."""

    @property
    def max_names(self) -> dict[str, Any]:
        """Names in these modules, and what replaces them for this model alone."""
        return {}

    ep_comm_initializer: EPCommInitializer | None = None
    _checked_s = 0.0

    def load_model(self, session: InferenceSession) -> Model:
        # MAX finds the ops of a subgraph only if the whole graph has their package.
        packages = [extension_path()]
        if n_gpus(self.pipeline_config) == 0 or is_hopper():
            packages.append(extension_path(experts.PACKAGE))
        ops = default_custom_extensions_scope(*packages)
        with using_max_ep(*self.max_modules, **self.max_names), ops:
            return super().load_model(session)

    @property
    def signal_buffers(self) -> list[Buffer]:
        """MAX's buffers of collectives; one device has none."""
        return [] if len(self.devices) == 1 else super().signal_buffers

    def _create_model_config(self, state_dict: dict[str, Any]) -> Any:
        config = super()._create_model_config(state_dict)
        config.ep_config = self._create_ep_config()
        return config

    def _create_ep_config(self, *_: Any) -> EPConfig | None:
        """Replaces MAX's: returns the group, or None."""
        if not uses_max_ep(self.pipeline_config):
            return None
        shape = MoeShape.of(self.huggingface_config)
        return serving_config(self.pipeline_config, shape, self.dtype)

    def _init_distributed_runtime(
        self, session: InferenceSession, model_config: Any
    ) -> None:
        config = model_config.ep_config
        if config is None:
            _logger.info("max_ep: not used; without --ep-size MAX splits each expert")
            return
        shape = MoeShape.of(self.huggingface_config)
        is_alone = gathers(config, shape.moe_dim)
        if is_alone or is_virtual_device_mode():  # virtual ones compile only
            config.node_id = 0
            if is_alone:
                _logger.info("max_ep: all experts on one GPU; they gather their tokens")
            return
        if note := cost_of_by_expert(config):  # before memory is asked for
            _logger.warning(
                f"max_ep: protocol {note}. In serving: lower --max-batch-input-tokens, "
                "or set MAX_EP_PROTOCOL=by_expert"
            )
        self.ep_comm_initializer = EPCommInitializer(config)
        # A session of its own: --precompiled-mefs has no set-up graph.
        self.ep_comm_initializer.ep_init(InferenceSession(devices=session.devices))
        n, mib = config.n_gpus_per_node, config.estimate_memory_usage() / 2**20
        _logger.info(
            f"max_ep: {n} rank{'s' * (n > 1)} on {config.target.upper()}, protocol "
            f"{config.protocol}, {config.max_tokens_per_rank} tokens a rank, "
            f"{mib:.1f} MiB of symmetric memory each, time-out {config.timeout_s:g} s"
        )

    def prepare_initial_token_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a step's inputs, and checks the group about once a second.

        Every step begins here, also one that replays a captured graph.
        """
        now = time.monotonic()
        if self.ep_comm_initializer and now - self._checked_s > _CHECK_EVERY_S:
            self._checked_s = now
            self.ep_comm_initializer.check()
        return super().prepare_initial_token_inputs(*args, **kwargs)
