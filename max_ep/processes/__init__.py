# SPDX-License-Identifier: Apache-2.0
"""How processes of one machine find, hear and agree with each other."""
