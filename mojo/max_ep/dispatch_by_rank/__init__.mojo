# SPDX-License-Identifier: Apache-2.0
"""Dispatch that sends a token once to each rank that has an expert of it."""
