# SPDX-License-Identifier: Apache-2.0
"""Protocol `expert_slots`: one message for each (token, choice)."""
