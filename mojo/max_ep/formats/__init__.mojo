# SPDX-License-Identifier: Apache-2.0
"""Token formats beyond the plain one, a file each."""
