# SPDX-License-Identifier: Apache-2.0
"""Where Megatron-core looks for the events."""

from . import envs, event
from .event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "envs", "event"]
