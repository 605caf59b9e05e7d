# SPDX-License-Identifier: Apache-2.0
"""A group's configuration: what is refused, agreed on, and asked of Mojo."""
