# SPDX-License-Identifier: Apache-2.0
"""Where NeMo looks for the interface of V2."""

from max_ep.torch import (
    ElasticBuffer,
    EPHandle,
    get_logical_domain_size,
    get_physical_domain_size,
)

__all__ = [
    "EPHandle",
    "ElasticBuffer",
    "get_logical_domain_size",
    "get_physical_domain_size",
]
