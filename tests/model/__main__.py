# SPDX-License-Identifier: Apache-2.0
"""Explores further than the tests: `python -m tests.model --help`."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from . import worlds
from .exploration import Machine
from .mutations import NAMED, made_of


def explore_all(every_order: bool, limit: int) -> bool:
    """Explores the worlds of the tests, and larger ones."""
    holds = True
    some = worlds.tiny() if every_order else [*worlds.all_worlds(), *worlds.large()]
    for world in some:
        begin = time.monotonic()
        result = Machine(world).explore(every_order, limit, gives_up=True)
        seconds = time.monotonic() - begin
        is_all = result.n_states <= limit
        print(
            f"{world.name}: {result.short()}{'' if is_all else ', not all of them'},"
            f" {seconds:.1f} s",
            flush=True,
        )
        holds = holds and result.failure is None
    return holds


def compare_with_every_order() -> bool:
    """Compares the reduction with every order, with all mutations."""
    agrees = True
    for world in worlds.tiny():
        machine = Machine(world)
        machine.explore(every_order=True)
        mutations = [*NAMED, *made_of(machine.used)]
        for mutation in mutations:
            mutated = replace(world, mutation=mutation)
            few = Machine(mutated).explore().failure
            every = Machine(mutated).explore(every_order=True).failure
            if (few is None) != (every is None):
                print(f"{world.name}: they differ: {mutation.name}")
                agrees = False
        print(f"{world.name}: {len(mutations)} mutations compared", flush=True)
    return agrees


def walk(first_seed: int, seconds: float) -> bool:
    """Makes random worlds, and goes a random way through each."""
    end = time.monotonic() + seconds
    seed, holds = first_seed, True
    while time.monotonic() < end:
        result = Machine(worlds.random_world(seed)).walk(1, seed)
        if result.failure:
            print(f"{worlds.random_world(seed)}\n{result.short()}")
            holds = False
        seed += 1
    print(f"{seed - first_seed} random worlds, from seed {first_seed}")
    return holds


def show(world_name: str, mutation_name: str) -> bool:
    """Prints the trace of a mutation in a world."""
    world = next(w for w in worlds.all_worlds() if w.name == world_name)
    machine = Machine(world)
    machine.explore(max_states=300, gives_up=True)
    known = {m.name: m for m in [*NAMED, *made_of(machine.used)]}
    if mutation_name not in known:
        print("\n".join(known))
        return False
    result = Machine(replace(world, mutation=known[mutation_name])).explore()
    print(result)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    add = parser.add_argument
    add("--deep", action="store_true", help="larger worlds, and all comparisons")
    add("--depth", type=int, default=10**6, help="states of a world at most")
    add("--walk", type=float, default=0, metavar="SECONDS", help="random worlds")
    add("--seed", type=int, default=0, help="of the first random world")
    what = "the whole trace; a mutation that is not there lists those that are"
    add("--show", nargs=2, metavar=("WORLD", "MUTATION"), help=what)
    args = parser.parse_args()
    if args.show:
        return 0 if show(*args.show) else 1
    holds = True
    if args.deep:
        holds = explore_all(True, args.depth) and holds
        holds = explore_all(False, args.depth) and holds
        holds = compare_with_every_order() and holds
    if args.walk:
        holds = walk(args.seed, args.walk) and holds
    if not args.deep and not args.walk:
        parser.print_help()
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
