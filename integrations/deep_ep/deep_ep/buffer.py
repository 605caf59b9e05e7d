# SPDX-License-Identifier: Apache-2.0
"""Where callers of DeepEP 1 look for its buffer."""

from max_ep.torch import Buffer, Config

__all__ = ["Buffer", "Config"]
