# SPDX-License-Identifier: Apache-2.0
"""What ranks are given and must get: cases, inputs, the reference."""
