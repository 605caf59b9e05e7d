# SPDX-License-Identifier: Apache-2.0
"""Where Megatron-core looks for the events, and DeepEP's test programs for the rest."""

from . import envs, event, gate, math, refs, testing
from .event import EventHandle, EventOverlap

__all__ = [
    "EventHandle",
    "EventOverlap",
    "envs",
    "event",
    "gate",
    "math",
    "refs",
    "testing",
]
