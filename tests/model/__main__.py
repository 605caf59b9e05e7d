# SPDX-License-Identifier: Apache-2.0
"""Prints the whole trace of a mutation: `python -m tests.model WORLD MUTATION`.

A mutation that is not there lists those that are.
"""

import sys
from dataclasses import replace

from . import worlds
from .exploration import Machine
from .mutations import NAMED, made_of


def main(world_name: str, mutation_name: str) -> int:
    """Runs the command line."""
    of_all = (world for some in worlds.BY_PROTOCOL.values() for world in some)
    world = next(world for world in of_all if world.name == world_name)
    machine = Machine(world)
    machine.explore(max_states=300, gives_up=True)
    known = {m.name: m for m in [*NAMED, *made_of(machine.used)]}
    if mutation_name not in known:
        print("\n".join(known))
        return 1
    print(Machine(replace(world, mutation=known[mutation_name])).explore())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
