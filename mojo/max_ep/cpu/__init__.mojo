# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of CPU ranks.

The calling thread waits, MAX's worker threads copy, then the calling thread publishes
counts that announce what the workers have written. Workers never wait or publish.
"""
