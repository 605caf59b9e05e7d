# SPDX-License-Identifier: Apache-2.0
"""What GPU phases share: a warp, a block, the schedule of their work."""
