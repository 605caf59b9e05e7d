# SPDX-License-Identifier: Apache-2.0
"""``max-ep build``: compiles the libraries of ``max_ep.torch`` ahead."""

from ..torch.library import run_build as run_build
