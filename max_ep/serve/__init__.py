# SPDX-License-Identifier: Apache-2.0
"""MoE models served by MAX with dispatch and combine of max_ep.

Run ``max serve --custom-architectures max_ep.serve ...``; see
docs/serving.md, and what to install there.
"""

from .architectures import SERVED

ARCHITECTURES = SERVED
"""What MAX registers, in place of its own architectures of these names."""
