# SPDX-License-Identifier: Apache-2.0
"""DeepEP's legacy interface over the kernels of max_ep: see ``max_ep.torch``."""

from max_ep.torch import Buffer, Config, EventHandle, EventOverlap

from . import utils

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "utils"]
