# SPDX-License-Identifier: Apache-2.0
"""Tests, in folders by subject; what several folders use stands here."""
