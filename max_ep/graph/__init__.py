# SPDX-License-Identifier: Apache-2.0
"""What stands in a MAX graph: EP ops, the manager over them, and layers."""
