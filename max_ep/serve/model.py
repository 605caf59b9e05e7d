# SPDX-License-Identifier: Apache-2.0
"""What every served model needs: the group's memory, its graph inputs, its checks.

:class:`ExpertParallelModel` stands in front of a pipeline model of MAX, which builds
its graph while the names of ``replaced.py`` are ours. :class:`OurModel` builds our
decoder in place of MAX's.
"""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any, ClassVar

from max.driver import Buffer, is_virtual_device_mode
from max.engine import InferenceSession, Model
from max.graph.graph import default_custom_extensions_scope
from max.pipelines.architectures.qwen3 import model as stock
from max.pipelines.architectures.qwen3.batch_processor import Qwen3BatchProcessor
from max.pipelines.lib.graph_specs import GraphSpec

from .. import EPCommInitializer, EPConfig, experts, extension_path
from ..checkpoint import described
from ..checkpoint.decoder import Decoder
from ..config.protocol import cost_of_by_expert
from ..plural import counted
from .balancer import Balancer
from .decoder import OurDecoder, check_returns
from .hopper import is_hopper
from .replaced import OF_A_MODEL, replaced
from .settings import balance_s, gathers, n_gpus, place_experts, serving_config
from .source import config_of, config_of_model, correct, decoder_of
from .weights import decoder_weights

_CHECK_EVERY_S = 1.0

_logger = logging.getLogger("max.pipelines.max_ep")  # MAX shows only such names


class CheckedConfig:
    """Base class in front of a config of MAX: refuses a ``config.json``, and corrects
    what MAX reads."""

    @classmethod
    def calculate_max_seq_len(cls, huggingface_config: Any, model_config: Any) -> int:
        """Returns the longest sequence; it may be the first that MAX asks for."""
        correct(huggingface_config, config_of_model(model_config))
        return super().calculate_max_seq_len(huggingface_config, model_config)

    @classmethod
    def initialize(cls, pipeline_config: Any, *args: Any, **more: Any) -> Any:
        checked = config_of(pipeline_config)
        correct(pipeline_config.model.huggingface_config, checked)
        return super().initialize(pipeline_config, *args, **more)


class ServingInitializer(EPCommInitializer):
    """Allocates a group's memory, and says in the log what it is."""

    balancer: Balancer | None = None
    """Its inputs come behind those of the group."""

    def model_inputs(self) -> list[Buffer]:
        """Returns the values of the graph's last inputs."""
        own = super().model_inputs()
        return own if self.balancer is None else own + self.balancer.inputs()

    def ep_init(self, session: InferenceSession) -> None:
        """Allocates it in a session of its own: ``--precompiled-mefs`` has no graph
        for that."""
        config = self.config
        if note := cost_of_by_expert(config):  # before memory is asked for
            _logger.warning(
                f"max_ep: protocol {note}. In serving: lower --max-batch-input-tokens, "
                "or set MAX_EP_PROTOCOL=by_expert"
            )
        super().ep_init(InferenceSession(devices=session.devices))
        n, mib = config.n_gpus_per_node, config.estimate_memory_usage() / 2**20
        _logger.info(
            f"max_ep: {counted(n, 'rank')} on {config.target.upper()}, protocol "
            f"{config.protocol}, {counted(config.max_tokens_per_rank, 'token')} a "
            f"rank, {mib:.1f} MiB of symmetric memory each, time-out "
            f"{config.timeout_s:g} s"
        )


class ExpertParallelModel:
    """Base class in front of a pipeline model of MAX."""

    also_replaced: ClassVar[dict[str, Any]] = {}
    """Names of ``replaced.py`` that are replaced for this model alone."""

    ep_comm_initializer: EPCommInitializer | None = None
    _balancer: Balancer | None = None
    _checked_s = 0.0

    def load_model(self, session: InferenceSession) -> Model:
        # MAX finds the ops of a subgraph only if the whole graph has their package.
        packages = [extension_path()]
        if n_gpus(self.pipeline_config) == 0 or is_hopper():
            packages.append(extension_path(experts.PACKAGE))
        ours = dict(zip(OF_A_MODEL, (self._group, ServingInitializer)))
        with (
            replaced(ours | self.also_replaced),
            default_custom_extensions_scope(*packages),
        ):
            return super().load_model(session)

    def _load_state_dict(self) -> dict[str, Any]:
        """Returns weights, those of experts under the names of a placement."""
        weights = super()._load_state_dict()
        self.state_dict = place_experts(weights, self._group())
        return self.state_dict

    def _group(self, **_: Any) -> EPConfig:
        """Takes the place of MAX's ``EPConfig``, whatever its arguments."""
        model = decoder_of(self.pipeline_config)
        group = serving_config(self.pipeline_config, model, self.dtype)
        group.node_id = 0
        return group

    @property
    def signal_buffers(self) -> list[Buffer]:
        """MAX's buffers of collectives; one device has none."""
        return [] if len(self.devices) == 1 else super().signal_buffers

    def prepare_initial_token_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a step's inputs, lets experts move, and checks the group about once a
        second.

        Every step begins here, also one that replays a captured graph.
        """
        now = time.monotonic()
        if self._balancer is not None:
            self._balancer.between_steps()
        if self.ep_comm_initializer and now - self._checked_s > _CHECK_EVERY_S:
            self._checked_s = now
            self.ep_comm_initializer.check()
        return super().prepare_initial_token_inputs(*args, **kwargs)


class OurConfig(CheckedConfig, stock.Qwen3Config):
    """MAX's config of Qwen3 with the fields that our decoder and the cache need."""

    @classmethod
    def initialize(
        cls, pipeline_config: Any, model_config: Any = None, *, max_seq_len: int
    ) -> Any:
        checked = config_of(pipeline_config)
        correct(pipeline_config.model.huggingface_config, checked)
        return cls.initialize_from_config(
            pipeline_config, as_qwen3(described(checked)), max_seq_len=max_seq_len
        )


def as_qwen3(model: Decoder) -> SimpleNamespace:
    """Returns the fields of a ``config.json`` that MAX's config of Qwen3 must have; of
    rotary embeddings nothing is read."""
    attention = model.layers[0].attention
    return SimpleNamespace(
        hidden_size=model.hidden_size,
        intermediate_size=model.mlp_dim,
        vocab_size=model.vocab_size,
        num_hidden_layers=len(model.layers),
        num_attention_heads=attention.n_heads,
        num_key_value_heads=attention.n_kv_heads,
        head_dim=attention.head_dim,
        rope_theta=1e4,
    )


class OurBatches(Qwen3BatchProcessor):
    """MAX's, with the group's graph inputs on one device, too."""

    def _make_inputs(self, **inputs: Any) -> stock.Qwen3Inputs:
        return stock.Qwen3Inputs(**inputs, ep_inputs=self._ep_inputs())


class OurModel(ExpertParallelModel, stock.Qwen3Model):
    """A pipeline model with our decoder."""

    model_config_cls = OurConfig
    batch_processor_cls = OurBatches

    def _load_state_dict(self) -> dict[str, Any]:
        self.state_dict = decoder_weights(self.pipeline_config)
        return self.state_dict

    def _create_model_config(self, state_dict: dict[str, Any]) -> OurConfig:
        check_returns(self)
        config = OurConfig.initialize(
            self.pipeline_config, max_seq_len=self.max_seq_len
        )
        config.return_logits = self.return_logits
        config.ep_config = self._group()
        return config

    def _init_distributed_runtime(
        self, session: InferenceSession, model_config: OurConfig
    ) -> None:
        group = model_config.ep_config
        if gathers(group, decoder_of(self.pipeline_config)):
            _logger.info("max_ep: all experts on one GPU; they gather their tokens")
        elif not is_virtual_device_mode():  # virtual ones compile only
            self.ep_comm_initializer = ServingInitializer(group)
            self.ep_comm_initializer.ep_init(session)

    def graph_specs(self, model_config: OurConfig) -> dict[str, GraphSpec]:
        """Returns our decoder."""
        decoder = OurDecoder(model_config, decoder_of(self.pipeline_config))
        if decoder.held is not None and self.ep_comm_initializer is not None:
            self._balancer = self.ep_comm_initializer.balancer = Balancer(
                self.ep_comm_initializer, decoder.held, self.state_dict, balance_s()
            )
        return decoder.graph_specs(self.state_dict, "max_ep_decoder")
