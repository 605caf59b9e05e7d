# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of CPU ranks: the shortest correct telling of the protocol.

The four phases are plain loops, for both protocols, rows and sums: read these files
first.

The calling thread waits, MAX's worker threads copy, then the calling thread publishes
counts that announce what the workers have written. Workers never wait or publish.
"""
