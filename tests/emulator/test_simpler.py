# SPDX-License-Identifier: Apache-2.0
"""Translated kernels are made simpler, and compute the same."""

import ast
import builtins
import contextlib
import copy
import math
import random
from types import CodeType

import pytest

from tests.emulator import numbers
from tests.emulator.bounds import REGISTER, Numbers
from tests.emulator.emulated_world import text_of
from tests.emulator.simpler import chosen, simplified
from tests.emulator.translation import Translation


def _code(x: ast.expr) -> CodeType:
    return compile(ast.Expression(x), "given", "eval")


@pytest.mark.parametrize("name", ["dispatch.sums", "dispatch.fp8"])
def test_statements_compute_the_same(name):
    """For small, large and any numbers that a register may hold."""
    draw = random.Random(name)
    given = [ast.parse("\n".join(x)).body for x in Translation(text_of(name)).blocks()]
    found = Numbers(given)
    known = vars(builtins) | vars(numbers)
    n_simpler = 0
    for x in (x for block in given for x in block if type(x) is ast.Assign):
        kinds = {type(y) for y in ast.walk(x)}
        names = {y.id: y for y in ast.walk(x.value) if type(y) is ast.Name}
        names = {of: y for of, y in names.items() if of not in known}
        if ast.Yield in kinds or not all(map(REGISTER.fullmatch, names)):
            continue
        made = found.simpler(copy.deepcopy(x.value))
        n_simpler += ast.dump(made) != ast.dump(x.value)
        wanted, simple = _code(x.value), _code(made)
        least_of, most_of = found.of(x.value) or (-math.inf, math.inf)
        for _ in range(10):
            values = dict(known)
            for of, y in names.items():
                least, most = found.of(y) or (0, (1 << 64) - 1)
                near = [most, most // 2, most // 2 + 1, least, least + 1]
                any_ = draw.randrange(least, most + 1)
                values[of] = draw.choice([any_, draw.choice(near)])
            with contextlib.suppress(ZeroDivisionError):
                value = eval(wanted, values)
                assert eval(simple, values) == value, ast.unparse(x)
                assert least_of <= value <= most_of, ast.unparse(x)
    assert n_simpler > 100


def _run(blocks: list[list[ast.stmt]], **names: int) -> list:
    """Runs blocks from the first on, until one says `stop`."""
    loop = ast.parse("while not stop: pass")
    loop.body[0].body = chosen(blocks)
    names |= dict(b=0, stop=False, seen=[])
    exec(compile(loop, "given", "exec"), names)
    return names["seen"]


@pytest.mark.parametrize("n", [0, 1, 5])
def test_blocks_follow_each_other(n):
    """A loop, a block that two others lead to, and one that leaves `b` as it is."""
    blocks = [
        ["r1 = n", "r2 = r1 + 1", "b = 1"],
        ["seen.append(r1)", "r3 = r2", "b = 2 if r1 > 0 else 4"],
        ["r2 = r3 + 7", "r1 = r1 - 1", "b = 3 if r1 == 2 else 1"],
        ["seen.append((r1, r2))", "b = 1"],
        ["seen.append(r2)", "b = 5"],
        ["r2 = r2 - 1", "if r2 < 3: b = 6"],
        ["seen.append('end')", "stop = True", "return"],
    ]
    made, unset = simplified(blocks)
    made[-1].pop()
    r, seen = n, []
    r2 = r + 1
    while True:
        seen.append(r)
        if r <= 0:
            break
        r2, r = r2 + 7, r - 1
        if r == 2:
            seen.append((r, r2))
    assert not unset
    assert _run(made, n=n) == [*seen, r2, "end"]
