# SPDX-License-Identifier: Apache-2.0
"""The commands of `max-ep`, and the programs that a reader runs."""
