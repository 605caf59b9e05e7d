# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of CPU ranks.

A launch is its caller, workers that copy, and the caller again. Only the caller
waits and publishes: counts announce what the workers have written.
"""
