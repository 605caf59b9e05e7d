# SPDX-License-Identifier: Apache-2.0
"""``max-ep bench``: dispatch and combine on this machine, beside other systems."""
