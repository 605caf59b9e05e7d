# SPDX-License-Identifier: Apache-2.0
"""A launch, from a MAX op or a Mojo program to a kernel; set-up and watching."""
