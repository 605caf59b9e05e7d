# SPDX-License-Identifier: Apache-2.0
"""Written next."""

OPS: dict = {}
