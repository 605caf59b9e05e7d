# SPDX-License-Identifier: Apache-2.0
"""Runs the PTX of GPU kernels, thread by thread, where there is no GPU.

A kernel becomes a Python generator, which a thread runs up to where it waits: for its
warp, for its block, or for a word that another thread writes. Memory is in order;
`races.py` finds what has no order of its own. What raises, too: an access outside of
what was allocated, lanes of a warp in different exchanges, a launch that does not end.
"""

from .grid import Emulated, Launch, run
from .hopper import TensorMap
from .memory import Clock, Memory
from .mutations import Mutation, mutations
from .races import Races
from .trials import Trials

__all__ = [
    "Clock",
    "Emulated",
    "Launch",
    "Memory",
    "Mutation",
    "Races",
    "TensorMap",
    "Trials",
    "mutations",
    "run",
]
