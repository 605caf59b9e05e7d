# SPDX-License-Identifier: Apache-2.0
"""Where callers of DeepEP 2 look for the events."""

from max_ep.torch import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
