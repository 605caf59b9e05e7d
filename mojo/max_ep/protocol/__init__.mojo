# SPDX-License-Identifier: Apache-2.0
"""What every rank agrees on: the layout of a region, flags, counters, tokens on the wire."""
