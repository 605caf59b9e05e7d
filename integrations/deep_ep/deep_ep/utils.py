# SPDX-License-Identifier: Apache-2.0
"""Where Megatron-core looks for the events."""

from max_ep.torch import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
