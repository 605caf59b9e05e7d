# SPDX-License-Identifier: Apache-2.0
"""Matmuls, routers and the other layers around dispatch and combine."""
