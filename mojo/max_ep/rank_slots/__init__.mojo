# SPDX-License-Identifier: Apache-2.0
"""Protocol `rank_slots`: a message for each (token, destination rank)."""
