# SPDX-License-Identifier: Apache-2.0
"""The benchmarks, without what they measure."""
