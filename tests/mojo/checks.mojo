# SPDX-License-Identifier: Apache-2.0
"""Runs the programs that need no GPU; they compile together in half of the time.

Each prints OK, or raises. Run by tests/cpu/test_mojo.py.
"""
import fp8_rounding, launchers, places, pure_functions, shared_expert


def main() raises:
    pure_functions.main()
    places.main()
    fp8_rounding.main()
    launchers.main()
    shared_expert.main()
