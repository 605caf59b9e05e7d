# SPDX-License-Identifier: Apache-2.0
"""Code that all GPU phases share: blocks, warps, schedules, launches."""
