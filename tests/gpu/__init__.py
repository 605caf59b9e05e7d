# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine on GPU ranks, and what is run there by hand."""
