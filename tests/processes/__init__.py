# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own: meeting, waiting, failing, joining."""
