# SPDX-License-Identifier: Apache-2.0
"""Dispatch that sends a message for each choice, to a slot of its expert."""
