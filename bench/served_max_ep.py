# SPDX-License-Identifier: Apache-2.0
"""``max_ep.serve``, whose captured graphs ``bench.serving`` can time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max_ep.serve import ARCHITECTURES as _SERVED

from . import graph_times


def _of_this_module(model: type) -> type:
    """Returns a class like a model's. MAX's worker, a process of its own, imports where
    its model is, and nothing else of what ``--custom-architectures`` names."""
    made = type(model.__name__, (model,), {"__module__": __name__})
    return globals().setdefault(model.__name__, made)


ARCHITECTURES: list[Any] = [
    replace(one, pipeline_model=_of_this_module(one.pipeline_model)) for one in _SERVED
]
"""What MAX registers, in place of its own architectures of these names."""

graph_times.install()
