# SPDX-License-Identifier: Apache-2.0
"""What a rank owns, how its peers find it, and how large it is."""
