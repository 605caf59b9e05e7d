# SPDX-License-Identifier: Apache-2.0
"""From PyTorch: `max_ep.torch` and DeepEP's calls."""
