# SPDX-License-Identifier: Apache-2.0
"""Combine that sends a row for each choice."""
