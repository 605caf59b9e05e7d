# SPDX-License-Identifier: Apache-2.0
"""Where callers of DeepEP 2 look for how ranks are connected: on one host."""

from max_ep.torch import get_logical_domain_size, get_physical_domain_size

__all__ = ["get_logical_domain_size", "get_physical_domain_size"]
