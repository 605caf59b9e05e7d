# SPDX-License-Identifier: Apache-2.0
"""Ranks of several hosts, which processes of one machine stand for."""
