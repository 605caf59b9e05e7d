# SPDX-License-Identifier: Apache-2.0
"""Registers of a translated kernel whose values are never needed at once share a name:
Python is slow where a function has many names."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from .bounds import REGISTER, statements, walk


@dataclass
class Statement:
    """The registers that a statement reads, may write, and surely writes."""

    made: ast.stmt
    names: list[ast.Name]
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)

    @property
    def is_sure(self) -> bool:
        return isinstance(self.made, ast.Assign)

    def __post_init__(self) -> None:
        for x in self.names:
            (self.reads if type(x.ctx) is ast.Load else self.writes).add(x.id)
        if not self.is_sure:
            self.reads |= self.writes


def _statement(made: ast.stmt) -> Statement:
    names = [x for x in walk(made) if type(x) is ast.Name]
    return Statement(made, [x for x in names if REGISTER.fullmatch(x.id)])


def goes_on(x: ast.stmt) -> bool:
    """Returns whether a statement says which block comes next."""
    return type(x) is ast.Assign and getattr(x.targets[0], "id", "") == "b"


def successors(block: Iterable[ast.stmt]) -> list[int]:
    """The blocks after one: numbers that `b` may get."""
    next_ones = [x.value for x in statements(block) if goes_on(x)]
    return [y.value for x in next_ones for y in walk(x) if type(y) is ast.Constant]


def may_stay(block: list[ast.stmt]) -> bool:
    """Returns whether a block may leave `b` as it is: with a mutation, perhaps."""
    return not goes_on(block[-1]) and type(block[-1]) not in (ast.Return, ast.Raise)


class Lives:
    """Where the values of registers are needed."""

    def __init__(self, blocks: list[list[ast.stmt]]) -> None:
        self.blocks = [[_statement(x) for x in block] for block in blocks]
        after = [
            [*successors(block), *([i] if may_stay(block) else [])]
            for i, block in enumerate(blocks)
        ]
        self.live: list[set[str]] = [set() for _ in blocks]
        """What is needed where a block begins."""
        needs, makes = [], []
        for block in self.blocks:
            reads: set[str] = set()
            writes: set[str] = set()
            for x in block:
                reads |= x.reads - writes
                writes |= x.writes
            needs.append(reads)
            makes.append(writes)
        before: list[list[int]] = [[] for _ in blocks]
        for i, of in enumerate(after):
            for j in of:
                before[j].append(i)
        todo = [*range(len(blocks))]
        while todo:
            i = todo.pop()
            live = set().union(*(self.live[j] for j in after[i])) - makes[i] | needs[i]
            if live != self.live[i]:
                self.live[i] = live
                todo += before[i]
        self.after = after

    def places(self) -> dict[str, int]:
        """Returns for each register the places after which its value is needed, or
        where it is written, as bits; place 0 is the start."""
        found: dict[str, int] = dict.fromkeys(self.live[0], 1)
        begin = 1
        for i, block in enumerate(self.blocks):
            end = begin + len(block)
            live = set().union(*(self.live[j] for j in self.after[i]))
            ends = dict.fromkeys(live, end)
            for place in range(end - 1, begin - 1, -1):
                x = block[place - begin]
                for name in x.writes:
                    last = ends.pop(name, place + 1)
                    found[name] = found.get(name, 0) | (1 << last) - (1 << place)
                for name in x.reads:
                    ends.setdefault(name, place)
            for name, last in ends.items():
                found[name] = found.get(name, 0) | (1 << last) - (1 << begin)
            begin = end
        return found

    def share(self) -> dict[str, str]:
        """Gives registers names that they share."""
        of = self.places()
        liked = {}
        for block in self.blocks:
            for x in block:
                if type(x.made) is ast.Assign and type(x.made.value) is ast.Name:
                    liked[x.made.targets[0].id] = x.made.value.id
        taken: list[int] = []
        number: dict[str, int] = {}
        for name in sorted(of, key=lambda x: of[x] & -of[x]):
            wanted = number.get(liked.get(name, ""), -1)
            if wanted < 0 or taken[wanted] & of[name]:
                wanted = next(
                    (i for i, x in enumerate(taken) if not x & of[name]), len(taken)
                )
            if wanted == len(taken):
                taken.append(0)
            taken[wanted] |= of[name]
            number[name] = wanted
        return {name: f"x{i}" for name, i in number.items()}
