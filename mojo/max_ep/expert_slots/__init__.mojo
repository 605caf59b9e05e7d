# SPDX-License-Identifier: Apache-2.0
"""Protocol `expert_slots`: one message for each (token, choice).

`host_dispatch.mojo` and `host_combine.mojo` hold the kernels of CPU ranks.
"""
