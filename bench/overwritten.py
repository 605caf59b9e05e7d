# SPDX-License-Identifier: Apache-2.0
"""Shows which results of a served decoder another kernel writes over.

As ``--custom-architectures bench.overwritten`` (with ``--no-enable-overlap-scheduler``,
on one device) it serves Qwen3-MoE with every layer's results as outputs of the graph.
After each batch the server's log has a line with them in the order of their
addresses: name and layer, how many bytes they begin behind the last attention's
result, their bytes, and which part of these is zero. With random weights few are: a
result that is all zeros has been written over. So docs/results/overwritten.md was made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.graph import TensorValue

from max_ep.serve import one_device
from max_ep.serve import qwen3_moe as qwen3

_taken: list[tuple[str, TensorValue]] = []
_names: list[str] = []
"""Of what was taken, with its layer."""


def _take(name: str, value: TensorValue) -> None:
    layer = sum(before == name for before, _ in _taken)
    _taken.append((name, value))
    _names.append(f"{name}{layer}")


class _Moe(qwen3.OneDeviceMoe):
    def __call__(self, x: TensorValue) -> TensorValue:
        _take("moe_input", x)
        result = super().__call__(x)
        _take("moe_output", result)
        return result


class _Attention(qwen3.Qwen3Attention):
    def __call__(
        self, layer_idx: int, x: TensorValue, *rest: Any, **more: Any
    ) -> TensorValue:
        _take("attention_input", x)
        result = super().__call__(layer_idx, x, *rest, **more)
        _take("attention_output", result)
        return result


class _Block(one_device.TransformerBlock):
    def __call__(
        self, layer_idx: int, x: TensorValue, *rest: Any, **more: Any
    ) -> TensorValue:
        _take("layer_input", x)
        return super().__call__(layer_idx, x, *rest, **more)


class _Decoder(qwen3.OneDeviceDecoder):
    def __call__(self, *args: Any) -> tuple[TensorValue, ...]:
        _taken.clear()
        _names.clear()
        logits = super().__call__(*args)
        return (*logits, *(value for _, value in _taken))


qwen3.OneDeviceMoe = _Moe
qwen3.Qwen3Attention = _Attention
qwen3.OneDeviceDecoder = _Decoder
one_device.TransformerBlock = _Block


class _Model(qwen3.Qwen3MoeModel):
    def execute(self, model_inputs: Any) -> Any:
        outputs = self.model.execute(*model_inputs.buffers)
        n_own = len(outputs) - len(_names)
        places = []
        for name, buffer in zip(_names, outputs[n_own:]):
            n_bytes = buffer.num_elements * buffer.dtype.size_in_bytes
            read = buffer.to(CPU()).view(DType.uint8, [n_bytes]).to_numpy()
            zeros = float(np.mean(read == 0)) if n_bytes else 0.0
            places.append((buffer._data_ptr(), name, n_bytes, zeros))
        base = max(p[0] for p in places if p[1] == _last_attention())
        line = " ".join(
            f"{name}:{address - base:+d}:{n_bytes}:{zeros:.2f}"
            for address, name, n_bytes, zeros in sorted(places)
        )
        print(f"RESULTS {line}", flush=True)
        assert self.batch_processor is not None
        return self.batch_processor.process_outputs(outputs[:n_own])


def _last_attention() -> str:
    return [name for name in _names if name.startswith("attention_output")][-1]


ARCHITECTURES = [replace(qwen3.architecture, pipeline_model=_Model)]
"""What MAX registers, in place of its own architecture of this name."""
