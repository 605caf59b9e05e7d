# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory: how it is sized, allocated and mapped by peers."""
