# SPDX-License-Identifier: Apache-2.0
"""The top-k of a router, and replicas of balanced experts."""
