# SPDX-License-Identifier: Apache-2.0
"""``max_ep.serve``, whose captured graphs ``bench.serving`` can time."""

from __future__ import annotations

from max_ep.serve import ARCHITECTURES

from . import graph_times

__all__ = ["ARCHITECTURES"]

graph_times.install()
