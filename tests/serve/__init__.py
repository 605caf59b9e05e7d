# SPDX-License-Identifier: Apache-2.0
"""Models that MAX serves with `max_ep.serve`."""
