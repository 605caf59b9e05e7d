# SPDX-License-Identifier: Apache-2.0
"""MAX's own Qwen3-MoE, made to run on Hopper: the peer of ``bench.serving``.

MAX 26.7 cannot compile its grouped matmul in bfloat16 there
(docs/decisions/0016-matmuls-on-hopper.md), so its MoE models do not start. With
this module as ``--custom-architectures bench.max_on_hopper`` they do: all is MAX's,
expert parallelism too, but for what ``max_ep/serve/hopper.py`` replaces.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.engine import InferenceSession, Model
from max.pipelines.architectures.qwen3.arch import qwen3_moe_arch
from max.pipelines.architectures.qwen3.model import Qwen3Model

from max_ep.serve.replaced import replaced

from . import graph_times


class Qwen3MoeModel(Qwen3Model):
    """MAX's, with matmuls that are right on Hopper."""

    def load_model(self, session: InferenceSession) -> Model:
        with replaced():
            return super().load_model(session)

    def _init_distributed_runtime(
        self, session: InferenceSession, model_config: Any
    ) -> None:
        # Not from --precompiled-mefs, in which MAX's set-up graphs are not.
        super()._init_distributed_runtime(
            InferenceSession(devices=session.devices), model_config
        )


ARCHITECTURES = [replace(qwen3_moe_arch, pipeline_model=Qwen3MoeModel)]
"""What MAX registers, in place of its own architecture of this name."""

graph_times.install()
