# SPDX-License-Identifier: Apache-2.0
"""From PyTorch, one process a rank: DeepEP's interface over the same kernels."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Buffer
    from .events import Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]


def __getattr__(name: str) -> Any:
    # `max-ep build` needs no torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import api

    return getattr(api, name)
