# SPDX-License-Identifier: Apache-2.0
"""The wire protocols as a model: all orders of small worlds, and random ways.

See `docs/model.md`. Tests of mutations fail if the model no longer notices what is
broken on purpose, so they are what gives "holds" its worth.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from max_ep.extension import mojo_dir
from tests.children import ALL_CASES
from tests.model import agreement, faults, worlds
from tests.model.exploration import Machine, Result
from tests.model.launches import HEADER, LOCAL_WORDS, RANK_WORDS, World
from tests.model.memory import Order, Step
from tests.model.mutations import HARMLESS, NAMED, Mutation, Site, made_of

WORLDS = [world for some in worlds.BY_PROTOCOL.values() for world in some]
# How far a mutated world is explored before the next one is tried.
MUTATED_STATES = 300
UNORDERED = Order.PLAIN, Order.STREAMED
N_WALKS = int(os.environ.get("MAX_EP_WALKS", "24"))
"""Random worlds, each with one random way."""


@pytest.fixture(scope="module", autouse=True)
def without_the_rest_of_the_heap() -> Iterator[None]:
    """Spares the collector what other tests keep: states are many small objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def id_of(x: object) -> str:
    return str(getattr(x, "name", x))


def catches(mutation: Mutation, world: World) -> Result | None:
    """What a world shows of a mutation, if it shows something."""
    machine = Machine(replace(world, mutation=mutation))
    result = machine.explore(max_states=MUTATED_STATES, gives_up=True)
    return result if result.failure else None


@cache
def explored(world: World) -> tuple[Result, frozenset[Step]]:
    """What can happen in a world, and which steps are taken there."""
    machine = Machine(world)
    result = machine.explore()
    return result, frozenset(machine.used)


@pytest.mark.parametrize("world", WORLDS, ids=id_of)
def test_protocol_holds(world):
    result, _ = explored(world)
    assert result.failure is None, str(result)
    assert result.n_ends > 0


def test_names_are_those_of_mojo():
    """Compares functions whose steps are taken, calls in `flags.mojo`, and words."""
    sources = {x: x.read_text() for x in (mojo_dir() / "max_ep").rglob("*.mojo")}
    defined = {x for s in sources.values() for x in re.findall(r"\bdef (\w+)", s)}
    flags, counters, link = (
        next(s for path, s in sources.items() if path.name == name)
        for name in ("flags.mojo", "counters.mojo", "link.mojo")
    )
    steps = {step for world in WORLDS for step in explored(world)[1]}
    asked = [step for step in steps if step.call in ("put", "signal", "fence")]
    placed = [*asked, *(step for step in steps if step.place)]
    functions = {step.where.rpartition(" ")[2] for step in placed}
    assert functions - defined == set()
    ordered = {step.call for step in steps if step.order not in UNORDERED}
    ordered |= {step.call for step in asked}
    assert ordered - {*re.findall(r"\bdef (\w+)", flags + link)} == set()
    located = {x.removesuffix("_offset") for x in defined}
    assert RANK_WORDS - located == set()
    header = {x.lower() for x in re.findall(r"    comptime ([A-Z_]+) = \d+", counters)}
    kept = {*HEADER, "blocks_arrived"}
    assert kept - header == LOCAL_WORDS - kept - defined == set()


@pytest.mark.parametrize("world", worlds.REFUSED, ids=id_of)
def test_program_that_must_not_be_run(world):
    """The model finds what is wrong with the orders that `protocol.md` forbids."""
    result = Machine(world).explore(max_states=2000, gives_up=True)
    assert result.failure is not None


@pytest.mark.parametrize("mutation", NAMED, ids=id_of)
def test_named_mutation_is_caught(mutation):
    caught = {}
    for protocol, of_protocol in worlds.BY_PROTOCOL.items():
        if protocol in mutation.not_in:
            continue
        caught[protocol] = any(catches(mutation, world) for world in of_protocol)
    assert caught and all(caught.values()), caught


def test_every_step_matters():
    """Each order made weaker, each wait and store left out, each generation fixed. What
    nothing notices is what `HARMLESS` lists, with reasons, and nothing else."""
    unnoticed = set()
    for of_protocol in worlds.BY_PROTOCOL.values():
        steps: set[Step] = set()
        sites: dict[str, set[Site]] = {}
        for world in of_protocol:
            _, used = explored(world)
            steps |= used
            sites[world.name] = {Site.of(step) for step in used}
        for mutation in made_of(steps):
            # A world that takes no such step is not changed.
            changed = [w for w in of_protocol if mutation.site in sites[w.name]]
            if not any(catches(mutation, world) for world in changed):
                unnoticed.add(mutation.name)
    assert unnoticed == HARMLESS


@pytest.mark.parametrize("world", worlds.TINY, ids=id_of)
def test_choices_alone_find_what_every_order_finds(world):
    """The reduction is sound on worlds that are small enough for both, where every step
    of every rank is taken in every order, stale reads and all."""
    machine = Machine(world)
    result = machine.explore(every_order=True)
    assert result.failure is None, str(result)
    assert result.n_states > 1000
    for mutation in [*NAMED, *made_of(machine.used)[:: 1 if ALL_CASES else 6]]:
        mutated = replace(world, mutation=mutation)
        few = Machine(mutated).explore().failure
        all_ = Machine(mutated).explore(every_order=True).failure
        assert (few is None) == (all_ is None), mutation.name


@pytest.mark.parametrize("seed", range(N_WALKS))
def test_random_worlds(seed):
    """Up to four ranks, three tokens, two blocks, any legal order of ops: one way."""
    result = Machine(worlds.random_world(seed)).walk(seed)
    assert result.failure is None, str(result)


@pytest.mark.parametrize("world", range(len(faults.WORLDS) - (not ALL_CASES)))
def test_masks_hold(world):
    """Every time-out, death and late store; no result is wrong without the flag."""
    faults.WORLDS[world].explore()


@pytest.mark.parametrize("mutation, world", faults.MUTATIONS.items())
def test_mutations_of_masks_are_noticed(mutation, world):
    with pytest.raises(faults.Wrong):
        replace(faults.WORLDS[world], mutation=mutation).explore()


@pytest.mark.parametrize("world", range(len(agreement.WORLDS) if ALL_CASES else 1))
def test_processes_agree(world):
    """Killed, stopped for ever, or late: who goes on has taken the same decision."""
    agreement.WORLDS[world].explore()


@pytest.mark.parametrize("mutation", agreement.MUTATIONS)
def test_mutations_of_agreement_are_noticed(mutation):
    with pytest.raises(agreement.Wrong):
        replace(agreement.WORLDS[0], mutation=mutation).explore()
