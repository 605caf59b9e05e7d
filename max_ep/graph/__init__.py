# SPDX-License-Identifier: Apache-2.0
"""MAX graphs: the EP ops, their manager, and layers."""
