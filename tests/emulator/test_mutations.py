# SPDX-License-Identifier: Apache-2.0
"""Each line of a GPU kernel that orders, waits, stores or compares is made wrong; a
test notices.

Each mutation changes the assembly of one line of the source, with its callers. Checks
of `test_emulated*.py` run until one fails. Part of them is drawn for each state of the
sources; `make test-all` has all of them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest

from tests.children import ALL_CASES
from tests.codegen.assembly import parse_ptx
from tests.emulator import Mutation, Trials, mutations, steps
from tests.emulator import test_emulated as checks
from tests.emulator import test_emulated_failures as failures
from tests.emulator.emulated_world import FORMS, World, text_of
from tests.emulator.harmless import HARMLESS
from tests.emulator.mutations import PLAIN, SEED

TRIED = "sums expert rows shared fp8_sums nvfp4".split()
"""Worlds whose orders and waits are all noticed, but for those of `harmless.py`."""
TRIED_PLAIN = [*TRIED, "expert_shared", "fp8", "drops"]
"""The same for stores, places, bounds and compares."""
N_OF_WORLD = 10**6
"""How many of a world's mutations are tried."""
if not ALL_CASES:
    # They have most.
    TRIED, N_OF_WORLD = TRIED[:2], 2
    TRIED_PLAIN = random.Random(SEED).sample(TRIED, 1)


def two_steps(name: str) -> None:
    """Notices most, in little time."""
    world = World(name)
    steps.run_steps(world, [([3, 2, 4], 1), ([1, 0, 1], 1)])
    steps.check_header(world, range(3), 2)


CHECKS: list[tuple[str, Callable[[], None]]] = [
    (name, functools.partial(check, *given))
    for name, check, *given in (
        *((name, two_steps, name) for name in ("sums", "expert")),
        ("sums", checks.test_rows_and_results, "sums"),
        ("expert", checks.test_rows_and_results, "expert"),
        ("rows", checks.test_rows_and_results, "rows"),
        ("fp8_sums", checks.test_variants, "fp8_sums"),
        ("expert_shared", checks.test_variants, "expert_shared"),
        ("shared", checks.test_variants, "shared"),
        ("sums", checks.test_data_that_looks_missing_arrives),
        ("nvfp4", checks.test_tokens_are_quantized, "nvfp4"),
        ("fp8", checks.test_tokens_are_quantized, "fp8"),
        ("drops", checks.test_rows_that_do_not_fit_are_dropped, "drops", []),
        ("masks", checks.test_two_ranks_are_masked_at_once),
        ("masks", checks.test_a_rank_that_waits_is_not_masked),
        ("masks", checks.test_a_rank_is_masked_and_comes_back, "masks"),
        ("many", checks.test_tokens_in_chunks),
        ("many", failures.test_what_does_not_come_is_not_used, 4),
        ("many", failures.test_what_does_not_come_is_not_used, 257),
        ("many", failures.test_sums_are_those_of_the_last_dispatch),
        ("many", failures.test_a_lost_word_is_named, "many", "number of tokens"),
        ("many", failures.test_a_lost_word_is_named, "many", "count"),
        ("many", failures.test_a_lost_word_is_named, "many", "entry"),
        ("expert", failures.test_a_lost_word_is_named, "expert", "count"),
        ("expert", failures.test_a_lost_word_is_named, "expert", "message"),
        *(
            (name, failures.test_a_late_reader_is_awaited, name)
            for name in ("sums", "expert", "rows")
        ),
        ("expert", failures.test_a_row_of_another_expert_is_refused),
        ("rows", failures.test_sources_that_cannot_be_are_refused, 0, 5),
        ("rows", failures.test_sources_that_cannot_be_are_refused, 1, 3),
        ("work", checks.test_all_blocks_share_work),
        ("expert_shared", checks.test_all_warps_send_by_expert),
        ("expert_shared", failures.test_a_rank_alone_has_no_rows, "expert_shared"),
        ("shared", failures.test_a_rank_alone_has_no_rows, "shared"),
        ("nvfp4", failures.test_scales_that_do_not_come_are_not_used),
        ("expert", checks.test_parts_of_a_row_are_counted_in_all_rounds),
        *(
            (name, failures.test_rows_that_do_not_fit_are_refused, name)
            for name in ("sums", "rows", "expert", "expert_shared")
        ),
        *((name, failures.test_a_broken_rank_does_nothing, name) for name in FORMS),
    )
]
WORLDS = list(dict.fromkeys(name for name, _ in CHECKS))


@functools.cache
def mutations_of(world: str) -> frozenset[Mutation]:
    """All mutations of the kernels of a world."""
    found: set[Mutation] = set()
    for phase in ("dispatch", "combine"):
        for form in FORMS[world]:
            if phase == "dispatch" or world not in ("fp8", "nvfp4"):
                found |= {*mutations(parse_ptx(text_of(f"{phase}{form}.{world}")))}
    return frozenset(found)


def owned_by(world: str) -> list[Mutation]:
    """The mutations that no world before this one has."""
    before = WORLDS[: WORLDS.index(world)]
    return sorted(mutations_of(world).difference(*map(mutations_of, before)))


def drawn(world: str, are_plain: bool) -> list[Mutation]:
    owned = [
        m
        for m in owned_by(world)
        if (m.kind in PLAIN) == are_plain and not any(x.has(m) for x in HARMLESS)
    ]
    assert owned, "nothing is tried"
    n = min(N_OF_WORLD // (1 + are_plain), len(owned))
    return random.Random(f"{SEED} {world}").sample(owned, n)


def unnoticed(tried: list[Mutation], world: str) -> list[Mutation]:
    """Runs checks until all mutations are noticed, those of their own world first."""
    trials = Trials(tried)
    for name, check in sorted(CHECKS, key=lambda x: x[0] != world):
        left = [m for m in tried if m not in trials.caught]
        if mutations_of(name).isdisjoint(left):
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(World, "trials", trials)
            trials.run(check)
    return [m for m in tried if m not in trials.caught]


@pytest.mark.parametrize("world", TRIED)
def test_orders_and_waits_matter(world):
    """Fails where a world or a check is missing; see `harmless.py` for the others."""
    left = unnoticed(drawn(world, are_plain=False), world)
    assert not left, "\n".join(map(str, left))


@pytest.mark.parametrize("world", TRIED_PLAIN)
def test_stores_places_and_bounds_matter(world):
    """A store is left out, an access goes one place too far, a bound is off by one, or
    what was awaited is not compared."""
    left = unnoticed(drawn(world, are_plain=True), world)
    assert not left, "\n".join(map(str, left))


@pytest.mark.parametrize("entry", HARMLESS, ids=lambda x: f"{x.file}: {x.line}")
def test_harmless_is_what_is_there_and_not_noticed(entry):
    """An entry that has no line any more is stale, as is one that a check notices."""
    of_worlds = {
        world: [m for m in owned_by(world) if entry.has(m)] for world in WORLDS
    }
    assert any(of_worlds.values()), "no kernel has such a line"
    if ALL_CASES:
        left = [unnoticed(tried, world) for world, tried in of_worlds.items() if tried]
        assert any(left), "it is noticed"
