# SPDX-License-Identifier: Apache-2.0
"""Makes the statements of a translated kernel cheaper; what they do stays the same."""

from __future__ import annotations

import ast
from collections import Counter

from .bounds import Numbers, walk
from .lives import Lives, goes_on, may_stay, successors


def simplified(blocks: list[list[str]]) -> tuple[list[list[ast.stmt]], dict[str, str]]:
    """Returns statements for the same, and the names of registers that are read before
    they are written."""
    made = [ast.parse("\n".join(block)).body for block in blocks]
    numbers = Numbers(made)
    made = [[numbers.simpler(x) for x in _at_once(block)] for block in made]
    made = [[y for x in block for y in _rounded(x)] for block in made]
    lives = Lives(made)
    names = lives.share()
    out = []
    for block in lives.blocks:
        out.append([])
        for x in block:
            for name in x.names:
                name.id = names[name.id]
            if not _is_copy(x.made):
                out[-1].append(x.made)
    return out, {name: names[name] for name in lives.live[0]}


def _exchange(x: ast.stmt) -> tuple[str, ast.Name, ast.expr] | None:
    """Returns name, result and what is given, of an exchange with one of each."""
    if type(x) is ast.Assign and type(x.value) is ast.Yield:
        (to,), given = x.targets, x.value.value
        if type(to) is ast.Name and type(given) is ast.Tuple:
            return given.elts[0].value, to, given.elts[1]
    return None


def _at_once(block: list[ast.stmt]) -> list[ast.stmt]:
    """Makes one exchange of those that follow each other and use no result of it."""
    out: list[ast.stmt] = []
    group: list[tuple[str, ast.Name, ast.expr]] = []
    for x in block:
        made = _exchange(x)
        if made is None or {y[1].id for y in group} & {made[1].id, *_names(made[2])}:
            group = []
        if made is not None:
            group.append(made)
            if len(group) > 1:
                names, to, given = zip(*group)
                place = names[0].rpartition(" ")[2]
                (x,) = ast.parse(f"() = yield 'several {place}', ({names}, ())").body
                x.targets[0].elts = list(to)
                x.value.value.elts[1].elts[1].elts = list(given)
                out.pop()
        out.append(x)
    return out


def _names(x: ast.AST) -> set[str]:
    return {y.id for y in walk(x) if type(y) is ast.Name}


def _rounded(x: ast.stmt) -> list[ast.stmt]:
    """Rounds to float32 without a call."""
    if type(x) is not ast.Assign or type(x.value) is not ast.Call:
        return [x]
    if getattr(x.value.func, "id", "") != "to_bits":
        return [x]
    stores, loads = ast.parse("cell[0] = 0\nx = cell_bits[0]").body
    stores.value, loads.targets = x.value.args[0], x.targets
    return [stores, loads]


def _is_copy(x: ast.stmt) -> bool:
    """Returns whether a statement changes nothing."""
    return (
        type(x) is ast.Assign
        and type(x.value) is type(x.targets[0]) is ast.Name
        and x.value.id == x.targets[0].id
    )


MOST_DEEP = 12
"""How many blocks may stand in each other."""


def chosen(blocks: list[list[ast.stmt]]) -> list[ast.stmt]:
    """Makes a choice of a block by `b`. A block that only the end of one other leads to
    stands there."""
    ends = [block[-1] for block in blocks if goes_on(block[-1])]
    n_before = Counter(j for block in blocks for j in successors(block))
    stays = {i for i, block in enumerate(blocks) if i == 0 or may_stay(block)}
    inside = {j for j in successors(ends) if n_before[j] == 1} - stays
    kept: dict[int, list[ast.stmt]] = {}
    todo = [i for i in range(len(blocks)) if i not in inside]

    def followed(block: list[ast.stmt], depth: int) -> list[ast.stmt]:
        if not goes_on(block[-1]):
            return block
        *before, last = block
        if type(last.value) is ast.IfExp:
            (choice,) = ast.parse("if x:\n b = 0\nelse:\n b = 0").body
            choice.test, of = last.value.test, [last.value.body, last.value.orelse]
            choice.body[0].value, choice.orelse[0].value = of
            choice.body = followed(choice.body, depth + 1)
            choice.orelse = followed(choice.orelse, depth + 1)
            return [*before, choice]
        place = last.value.value
        if place not in inside:
            return block
        if depth >= MOST_DEEP:
            todo.append(place)
            return block
        return before + followed(blocks[place], depth + 1)

    while todo:
        place = todo.pop()
        kept[place] = followed(blocks[place], 0)
    return _choice(kept, sorted(kept))


def _choice(blocks: dict[int, list[ast.stmt]], of: list[int]) -> list[ast.stmt]:
    if len(of) == 1:
        return blocks[of[0]]
    middle = len(of) // 2
    (choice,) = ast.parse(f"if b < {of[middle]}: pass").body
    choice.body = _choice(blocks, of[:middle])
    choice.orelse = _choice(blocks, of[middle:])
    return [choice]
