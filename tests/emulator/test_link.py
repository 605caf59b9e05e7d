# SPDX-License-Identifier: Apache-2.0
"""Faults of what kernels put to other hosts, and of what they await: each shows.

The calls of a kernel are changed on their way, or a line of its assembly
(`mutations.py`).
"""

import functools
import random
import re
from collections.abc import Callable

import pytest

from tests.children import ALL_CASES, slow
from tests.codegen.assembly import parse_ptx
from tests.emulator import Mutation, Trials, mutations
from tests.emulator.emulated_world import World, text_of
from tests.emulator.link import End
from tests.emulator.mutations import SEED
from tests.emulator.races import Race
from tests.emulator.steps import check_step, draw, run_steps

GENERATION = 1 << 32
PUT, SIGNAL = End.put, End.signal


def run(seed: int = 0, name: str = "hosts_sums") -> None:
    steps = [([5, 2, 4, 0], 0), ([0, 5, 1, 3], 0), ([2, 1, 5, 5], 2), ([5, 5, 0, 1], 1)]
    world = World(name)
    world.seed = 100 * seed
    world.link.seed(seed)
    run_steps(world, steps)


def signal_before_its_put(end, memory, to, from_, n, *more):
    *signal, rank = more
    if signal:
        SIGNAL(end, memory, *signal, rank)
    PUT(end, memory, to, from_, n, rank)


def put_of_less(end, memory, to, from_, n, *more):
    PUT(end, memory, to, from_, max(n - 8, 8), *more)


def put_to_another_rank(end, memory, to, from_, n, *more):
    PUT(end, memory, to, from_, n, *more[:-1], more[-1] ^ 1)


def put_to_another_place(end, memory, to, from_, n, *more):
    PUT(end, memory, to + 16, from_, n, *more)


def put_from_another_place(end, memory, to, from_, n, *more):
    PUT(end, memory, to, from_ + 16, n, *more)


def put_of_the_generation_before(end, memory, to, from_, n, *more):
    if len(more) > 1:
        flag, word, *rest = more
        more = flag, word - GENERATION, *rest
    PUT(end, memory, to, from_, n, *more)


def put_without_its_signal(end, memory, to, from_, n, *more):
    PUT(end, memory, to, from_, n, more[-1])


def signal_of_the_generation_before(end, memory, to, word, how, rank):
    SIGNAL(end, memory, to, word - GENERATION, how, rank)


def signal_to_another_place(end, memory, to, word, how, rank):
    SIGNAL(end, memory, to + 8, word, how, rank)


def no_fence(end, memory):
    pass


FAULTS: dict[str, list[Callable]] = {
    "put": [
        signal_before_its_put,
        put_of_less,
        put_to_another_rank,
        put_to_another_place,
        put_from_another_place,
        put_of_the_generation_before,
        put_without_its_signal,
    ],
    "signal": [signal_of_the_generation_before, signal_to_another_place],
    "fence": [no_fence],
}


@pytest.mark.parametrize(
    "call, fault",
    [
        pytest.param(call, fault, id=fault.__name__)
        for call, faults in FAULTS.items()
        for fault in faults
    ],
)
def test_a_fault_shows(call, fault, monkeypatch):
    monkeypatch.setattr(End, call, fault)
    with pytest.raises((AssertionError, IndexError, Race, RuntimeError)):
        run()


def mutations_of(world: str) -> set[Mutation]:
    texts = (text_of(f"{phase}.{world}") for phase in ("dispatch", "combine"))
    return set().union(*(mutations(parse_ptx(text)) for text in texts))


@pytest.mark.parametrize("name, n_parts", [("hosts_sums", 4), ("hosts_relay", 2)])
def test_a_token_crosses_once(name, n_parts, monkeypatch):
    """To each rank of another host that has its experts, or with relays to each host.
    As many partial sums come back."""
    world, sent = World(name), {"tokens": 0, "sums": 0}
    sizes = world.sizes

    def count(end, memory, to, from_, n, *more):
        is_sum = to - world.regions[end._rank] >= sizes.combine_recv
        sent["sums" if is_sum else "tokens"] += n == 2 * sizes.hidden
        PUT(end, memory, to, from_, n, *more)

    monkeypatch.setattr(End, "put", count)
    given = draw(sizes, [5, 2, 4, 1], 0)
    check_step(world, world.dispatch(*given), *given)
    n = 0
    for rank, ids in given[1].items():
        for of_token in ids:
            parts = {x // sizes.n_local * n_parts // 4 for x in of_token if x >= 0}
            n += sum(part * 2 // n_parts != rank // 2 for part in parts)
    assert sent == {"tokens": n, "sums": n} and n > 4


def test_a_weight_may_come_after_its_entry(monkeypatch):
    """If choices are many, each block puts the entries of its own. Fails if a receiver
    looks at the first half of 16 bytes only."""
    world = World("hosts_many")

    def put(end, memory, to, from_, n, *more):
        PUT(end, memory, to, from_, n, *more)
        if len(more) > 1:  # what has a signal may come in any order
            return
        under_way = end._link._pending[-1]
        words = [
            (to + i, from_ + i, part[i : i + 8])
            for to, from_, part in under_way.pieces
            for i in range(0, len(part), 8)
        ]
        # The last is carried first.
        under_way.pieces = sorted(words, key=lambda word: word[0] % 16 == 0)

    monkeypatch.setattr(End, "put", put)
    given = draw(world.sizes, [130, 3], 0, n_wrong=0.95)
    check_step(world, world.dispatch(*given), *given)


CHANGED = "not waited for", "wanted"
"""How `mutations.py` calls what has a wait pass too early."""
ORDERED = "relaxed", "scope", "not stored", "one place too far"
NO_WAITS = re.compile("avoid_sentinel|is_mate")
"""Lines that compare what nobody awaits: sums that look empty, and hosts of ranks."""


@pytest.mark.parametrize(
    "name, base, kinds, least",
    [
        ("hosts_sums", "sums", CHANGED, 6),
        pytest.param("hosts_relay", "hosts_sums", (*CHANGED, *ORDERED), 17, marks=slow),
    ],
)
def test_waits_of_several_hosts_matter(name, base, kinds, least):
    """What is staged is used again before it was put; what has not come is read. Of a
    relay also each order, and each place that it writes."""
    tried = sorted(
        x
        for x in mutations_of(name) - mutations_of(base)
        if x.kind.startswith(kinds) and not NO_WAITS.search(str(x))
    )
    assert len(tried) >= least
    if not ALL_CASES:
        tried = random.Random(f"{SEED} {name}").sample(tried, 2)
    trials = Trials(tried)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "trials", trials)
        for seed in range(4):
            if len(trials.caught) < len(tried):
                trials.run(functools.partial(run, seed, name))
    left = [x for x in tried if x not in trials.caught]
    assert not left, "\n".join(map(str, left))
