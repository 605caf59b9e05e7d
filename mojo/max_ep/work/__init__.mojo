# SPDX-License-Identifier: Apache-2.0
"""The same work for many items, on a GPU or by the workers of the CPU."""
