# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine on CPU ranks of one process."""
