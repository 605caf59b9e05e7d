# SPDX-License-Identifier: Apache-2.0
"""Faults of what kernels put to other hosts, and of what they await: each shows.

The calls of a kernel are changed on their way, or a line of its assembly
(`mutations.py`).
"""

import functools
from collections.abc import Callable

import pytest

from tests.codegen.assembly import parse_ptx
from tests.emulator import Mutation, Trials, mutations
from tests.emulator.emulated_world import World, text_of
from tests.emulator.link import End
from tests.emulator.races import Race
from tests.emulator.steps import run_steps

GENERATION = 1 << 32
PUT, SIGNAL = End.put, End.signal


def run(seed: int = 0) -> None:
    steps = [([5, 2, 4, 0], 0), ([0, 5, 1, 3], 0), ([2, 1, 5, 5], 2), ([5, 5, 0, 1], 1)]
    world = World("hosts_sums")
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


def test_waits_of_several_hosts_matter():
    """What is staged is used again before it was put; what has not come is read."""
    tried = sorted(
        x
        for x in mutations_of("hosts_sums") - mutations_of("sums")
        if x.kind.startswith(("not waited for", "wanted"))
    )
    trials = Trials(tried)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "trials", trials)
        for seed in range(4):
            if len(trials.caught) < len(tried):
                trials.run(functools.partial(run, seed))
    left = [x for x in tried if x not in trials.caught]
    assert len(tried) >= 6 and not left, "\n".join(map(str, left))
