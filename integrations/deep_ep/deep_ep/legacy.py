# SPDX-License-Identifier: Apache-2.0
"""Where NeMo looks for the interface of V1."""

from max_ep.torch import Buffer, Config

__all__ = ["Buffer", "Config"]
