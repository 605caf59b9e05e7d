# SPDX-License-Identifier: Apache-2.0
"""Where callers of DeepEP 2 look for the interface of V1."""

from max_ep.torch import Buffer, Config

__all__ = ["Buffer", "Config"]
