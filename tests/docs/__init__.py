# SPDX-License-Identifier: Apache-2.0
"""The documents, and what they say about MAX and Mojo."""
