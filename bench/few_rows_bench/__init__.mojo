# SPDX-License-Identifier: Apache-2.0
"""Ops of `bench.few_rows`: the same product again and again, of other weights each time,
by today's kernels or by those of few rows with other constants.
"""
