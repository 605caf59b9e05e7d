# SPDX-License-Identifier: Apache-2.0
"""Where callers look for the buffers of DeepEP 2."""

from . import elastic, legacy

__all__ = ["elastic", "legacy"]
