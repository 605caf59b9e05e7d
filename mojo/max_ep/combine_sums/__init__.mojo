# SPDX-License-Identifier: Apache-2.0
"""Combine that sends one partial sum for each token and rank."""
