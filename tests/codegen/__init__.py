# SPDX-License-Identifier: Apache-2.0
"""The machine code of GPU kernels: what it must hold, and what changed."""
