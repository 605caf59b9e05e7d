# SPDX-License-Identifier: Apache-2.0
"""The emulator finds races in small programs: `test_emulated.py` rests on it."""

import contextlib

import pytest

from tests.emulator import Clock, Emulated, Launch, Memory, Races, run
from tests.emulator.emulated_world import words
from tests.emulator.races import Race

PROGRAM = """
{{
ld.param.b64 %rd1, [k_param_0];
ld.param.b32 %r1, [k_param_1];
mov.b32 %r2, %tid.x;
add.s32 %r1, %r1, %r2;
mov.b32 %r2, %ctaid.x;
add.s32 %r1, %r1, %r2;
setp.ne.b32 %p1, %r1, 0;
@%p1 bra $OTHER;
{first};
bra $END;
$OTHER: {second};
$END: ret;
}}
"""
WRITE, READ = "st.global.b32 [%rd1], 7", "ld.global.b32 %r2, [%rd1]"
CONSTANT = "ld.global.nc.b32 %r2, [%rd1]"
LANES, BLOCKS, RANKS = (1, 1, 2), (1, 2, 1), (2, 1, 1)
"""How many ranks, blocks and threads there are."""


def publish(order: str, at: int = 256) -> str:
    return f"st.{order}.b32 [%rd1+{at}], 1"


def await_(order: str, at: int = 256) -> str:
    load = f"$L{at}: ld.{order}.b32 %r3, [%rd1+{at}]"
    return f"{load};\nsetp.eq.b32 %p2, %r3, 0;\n@%p2 bra $L{at}"


CTA, GPU, SYS = (
    ([WRITE, publish(f"release.{x}")], [await_(f"acquire.{x}"), READ])
    for x in ("cta", "gpu", "sys")
)


def again(stores: str, loads: str) -> tuple[list[str], list[str]]:
    """A word is stored again when somebody has said that it was read."""
    word = publish("relaxed.sys")
    first = [word, await_(f"{loads}.sys", 384), word]
    return first, [await_("relaxed.sys"), publish(f"{stores}.sys", 384)]


@pytest.mark.parametrize(
    "of, first, second, has_race",
    [
        (LANES, [WRITE], [READ], True),
        (LANES, [WRITE, "bar.sync 0"], ["bar.sync 0", READ], False),
        (LANES, [READ, "bar.sync 0"], ["bar.sync 0", WRITE], False),
        (LANES, ["bar.sync 0", READ], ["bar.sync 0", WRITE], True),
        (LANES, *CTA, False),
        (LANES, CTA[0][::-1], CTA[1], True),
        (LANES, [WRITE, publish("relaxed.cta")], CTA[1], True),
        (LANES, CTA[0], [await_("relaxed.cta"), READ], True),
        (BLOCKS, *CTA, True),
        (BLOCKS, *GPU, False),
        (BLOCKS, GPU[0], [await_("acquire.gpu"), CONSTANT], True),
        (RANKS, *GPU, True),
        (RANKS, *SYS, False),
        (RANKS, *again("relaxed", "acquire"), True),
        (RANKS, *again("release", "relaxed"), True),
        (RANKS, *again("release", "acquire"), False),
    ],
)
def test_races(of, first, second, has_race):
    """Whatever runs first; if there is no race, it has read what was written."""
    n_ranks, *shape = of
    text = PROGRAM.format(first=";\n".join(first), second=";\n".join(second))
    kernel = Emulated(text)
    found = 0
    for seed in range(8):
        memory = Memory(1 << 12)
        at = memory.put(bytes(512))
        queues = [
            [Launch(kernel, [words(at), words(rank)], *shape)]
            for rank in range(n_ranks)
        ]
        with contextlib.suppress(Race):
            run(queues, memory, Clock(), seed, found=Races(*of))
            found += 1
    assert found == 0 if has_race else found == 8


@pytest.mark.parametrize("order", ["", "relaxed.sys."])
@pytest.mark.parametrize("value, lets_equal", [(0, True), (7, True), (0, False)])
def test_stores_of_what_is_there(order, value, lets_equal):
    """A lane reads a zero that another one stores again, or changes."""
    stored = f"st.{order}global.b32 [%rd1], {value}"
    kernel = Emulated(PROGRAM.format(first=READ, second=stored))
    memory = Memory(1 << 12)
    launch = Launch(kernel, [words(memory.put(bytes(512))), words(0)], *LANES[1:])
    found = Races(*LANES, lets_equal=lets_equal)
    is_fine = lets_equal and value == 0
    with contextlib.nullcontext() if is_fine else pytest.raises(Race):
        run([[launch]], memory, Clock(), found=found)
