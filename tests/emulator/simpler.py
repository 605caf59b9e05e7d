# SPDX-License-Identifier: Apache-2.0
"""Makes the statements of a translated kernel cheaper; what they do stays the same.

Bounds of numbers save masks and changes of sign. Registers whose values are never
needed at once share a name: Python is slow where a function has many names.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

REGISTER = re.compile(r"(?:r|rd|rs|p)\d+")
_ACCESS = re.compile(r"\w+_(?:load|get)_(\d)")
_STEPS = [(1 << n) - 1 for n in (1, 5, 10, 16, 24, 31, 32, 40, 48, 63, 64)]
_BITS = dict.fromkeys(("to_bits", "f16_to_bits", "permuted", "fp8_to_f16x2"), 32)
_BITS |= dict(add_bf16x2=32, mul_bf16x2=32, to_bf16=16, to_fp8=8)
_BITS |= dict(tid=16, ctaid=16, ntid=16, nctaid=16)
_FOLDED = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_LEAVES = (ast.Name, ast.Constant)
_LINEAR = (ast.Add, ast.Sub, ast.Mult, ast.BitAnd, ast.BitOr, ast.BitXor)

Bounds = tuple[int, int] | None
"""The least and the largest number; none if little is known."""


def _known(x: ast.expr) -> int | None:
    return x.value if type(x) is ast.Constant and type(x.value) is int else None


def _constant(value: int) -> ast.Constant:
    return ast.Constant(value, lineno=1, col_offset=0)


def _walk(x: ast.AST) -> Iterator[ast.AST]:
    """Visits statements and expressions; faster than `ast.walk`."""
    todo = [x]
    for x in todo:
        yield x
        if type(x) in _LEAVES:
            continue
        for name in x._fields:
            value = getattr(x, name)
            if isinstance(value, list):
                todo += [y for y in value if isinstance(y, (ast.expr, ast.stmt))]
            elif isinstance(value, (ast.expr, ast.stmt)):
                todo.append(value)


def _statements(block: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Visits statements, and those in them."""
    for x in block:
        yield x
        yield from _statements(getattr(x, "body", ()))
        yield from _statements(getattr(x, "orelse", ()))


def _is_mask(x: int | None) -> bool:
    return x is not None and x > 0 and x & (x + 1) == 0


class Numbers:
    """Bounds of what registers ever hold; makes expressions simpler by them."""

    def __init__(self, blocks: list[list[ast.stmt]]) -> None:
        self.bounds: dict[str, Bounds] = {}
        users: dict[str, list[ast.Assign]] = defaultdict(list)
        todo = []
        for node in _statements([x for block in blocks for x in block]):
            if type(node) is ast.Assign:
                todo.append(node)
                for x in _walk(node.value):
                    if type(x) is ast.Name:
                        users[x.id].append(node)
        todo.reverse()
        while todo:
            node = todo.pop()
            found = self.of(node.value)
            for target in getattr(node.targets[0], "elts", node.targets):
                if self._widen(target.id, found):
                    todo += users[target.id]

    def _widen(self, name: str, found: Bounds) -> bool:
        """Returns whether a register may hold more than was known."""
        before = self.bounds.get(name, (0, 1 if name[0] == "p" else 0xFFFF))
        self.bounds[name] = before
        if before is None or found and 0 <= found[0] and found[1] <= before[1]:
            return False
        is_far = found is None or found[0] < 0 or found[1] > _STEPS[-1]
        most = None if is_far else next(x for x in _STEPS if x >= found[1])
        self.bounds[name] = None if most is None else (0, most)
        return True

    def of(self, x: ast.expr) -> Bounds:
        kind = type(x)
        if kind is ast.Constant:
            return (x.value, x.value) if isinstance(x.value, int) else None
        if kind is ast.Name:
            if x.id in _BITS:
                return 0, (1 << _BITS[x.id]) - 1
            if REGISTER.fullmatch(x.id):
                return self.bounds.get(x.id, (0, 1 if x.id[0] == "p" else 0xFFFF))
            return self.bounds.get(x.id)
        if kind in (ast.Compare, ast.BoolOp):
            return 0, 1
        if kind is ast.BinOp:
            return self._of_binary(x)
        if kind is ast.IfExp:
            return _joined([self.of(x.body), self.of(x.orelse)])
        if kind is ast.UnaryOp:
            return (0, 1) if type(x.op) is ast.Not else None
        if kind is ast.Yield:  # What lanes exchange are registers.
            names = [self.of(n) for n in _walk(x) if type(n) is ast.Name]
            return _joined([(0, _STEPS[6]), *names])
        if kind is ast.Call:
            return self._of_call(x)
        if kind is ast.Subscript and x.value.id == "params":
            _, begin, end = (y.value for y in x.slice.elts)
            return 0, (1 << 8 * (end - begin)) - 1
        return None

    def _of_call(self, x: ast.Call) -> Bounds:
        if type(x.func) is ast.Attribute:
            is_count = x.func.attr == "bit_count"
            return (0, 128) if is_count else None
        if found := _ACCESS.fullmatch(x.func.id):
            return 0, (1 << 8 * int(found[1])) - 1
        if x.func.id in _BITS:
            return 0, (1 << _BITS[x.func.id]) - 1
        if x.func.id in ("min", "max"):
            of = [self.of(y) for y in x.args]
            if None not in of:
                choose = min if x.func.id == "min" else max
                return choose(y[0] for y in of), choose(y[1] for y in of)
        return None

    def _of_binary(self, x: ast.BinOp) -> Bounds:
        a, b, how = self.of(x.left), self.of(x.right), type(x.op)
        if how is ast.BitAnd:
            ends = [y[1] for y in (a, b) if y and y[0] >= 0]
            return (0, min(ends)) if ends else None
        if a is None or b is None:
            return None
        if how is ast.Add:
            return a[0] + b[0], a[1] + b[1]
        if how is ast.Sub:
            return a[0] - b[1], a[1] - b[0]
        if how is ast.Mult:
            products = [m * n for m in a for n in b]
            return min(products), max(products)
        if a[0] < 0 or b[0] < 0:
            return None
        if how in (ast.BitOr, ast.BitXor):
            return 0, (1 << max(a[1], b[1]).bit_length()) - 1
        if how is ast.LShift and b[1] <= 64:
            return 0, a[1] << b[1]
        if how is ast.RShift:
            return 0, a[1] >> min(b[0], 128)
        if how in (ast.FloorDiv, ast.Mod):
            return 0, a[1]
        return None

    def are_in(self, x: ast.expr, end: int) -> bool:
        """Returns whether a number is at least 0 and less than `end`."""
        bounds = self.of(x)
        return bounds is not None and bounds[0] >= 0 and bounds[1] < end

    def simpler(self, x: ast.AST) -> ast.AST:
        """Makes an expression, or a statement, simpler."""
        if type(x) in _LEAVES:
            return x
        for name in x._fields:
            value = getattr(x, name)
            if isinstance(value, list):
                value[:] = [
                    self.simpler(y) if isinstance(y, ast.AST) else y for y in value
                ]
            elif isinstance(value, (ast.expr, ast.stmt)):
                setattr(x, name, self.simpler(value))
        if type(x) is ast.BinOp:
            return self._binary(x)
        if type(x) is ast.Compare:
            self._compare(x)
        return x

    def _binary(self, x: ast.BinOp) -> ast.expr:
        a, b, how = _known(x.left), _known(x.right), type(x.op)
        if a is not None and b is not None and how in _FOLDED:
            return _constant(_FOLDED[how](a, b))
        if b == 0 and how in (ast.Add, ast.Sub, ast.LShift, ast.RShift, ast.BitOr):
            return x.left
        if b == 1 and how is ast.Mult:
            return x.left
        if how is ast.Sub and self._of_sign(x) and self.are_in(x.left.left, b):
            return x.left.left
        if how is ast.BitAnd and _is_mask(b):
            if self.are_in(x.left, b + 1):
                return x.left
            x.left = self._modulo(x.left, b)
            if self.are_in(x.left, b + 1):
                return x.left
        return x

    def _of_sign(self, x: ast.expr) -> int:
        """Returns h if an expression is `(x ^ h) - h`."""
        if type(x) is ast.BinOp and type(x.op) is ast.Sub:
            half, flipped = _known(x.right), x.left
            if half and type(flipped) is ast.BinOp and type(flipped.op) is ast.BitXor:
                return half if _known(flipped.right) == half else 0
        return 0

    def _modulo(self, x: ast.expr, mask: int) -> ast.expr:
        """Makes what only has to be right in the bits of a mask."""
        value = _known(x)
        if value is not None:
            value &= mask
            return _constant(value - mask - 1 if value > mask >> 1 else value)
        if type(x) is not ast.BinOp:
            return x
        if (half := self._of_sign(x)) and 2 * half & mask == 0:
            return self._modulo(x.left.left, mask)
        if type(x.op) is ast.BitAnd and _is_mask(b := _known(x.right)):
            if b & mask == mask:
                return self._modulo(x.left, mask)
        if type(x.op) in _LINEAR:
            x.left, x.right = self._modulo(x.left, mask), self._modulo(x.right, mask)
            b = _known(x.right)
            if type(x.op) is ast.Add and b is not None and b < 0:
                x.op, x.right = ast.Sub(), _constant(-b)
        elif type(x.op) is ast.LShift:
            x.left = self._modulo(x.left, mask)
        return x

    def _compare(self, x: ast.Compare) -> None:
        """Compares without the sign what has none."""
        sides = [x.left, x.comparators[0]]
        for half in (1 << 63, 1 << 31, 1 << 15):
            made = [self._without_sign(y, half) for y in sides]
            if None not in made and made != sides:
                x.left, x.comparators[0] = made

    def _without_sign(self, x: ast.expr, half: int) -> ast.expr | None:
        if (value := _known(x)) is not None:
            return _constant(value - half)
        is_flipped = type(x) is ast.BinOp and type(x.op) is ast.BitXor
        if is_flipped and _known(x.right) == half and self.are_in(x.left, half):
            return x.left
        return None


def _joined(of: list[Bounds]) -> Bounds:
    if None in of:
        return None
    return min(x[0] for x in of), max(x[1] for x in of)


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
    names = [x for x in _walk(made) if type(x) is ast.Name]
    return Statement(made, [x for x in names if REGISTER.fullmatch(x.id)])


def _goes_on(x: ast.stmt) -> bool:
    """Returns whether a statement says which block comes next."""
    return type(x) is ast.Assign and getattr(x.targets[0], "id", "") == "b"


def successors(block: Iterable[ast.stmt]) -> list[int]:
    """The blocks after one: numbers that `b` may get."""
    goes_on = [x.value for x in _statements(block) if _goes_on(x)]
    return [y.value for x in goes_on for y in _walk(x) if type(y) is ast.Constant]


def _may_stay(block: list[ast.stmt]) -> bool:
    """Returns whether a block may leave `b` as it is: with a mutation, perhaps."""
    return not _goes_on(block[-1]) and type(block[-1]) not in (ast.Return, ast.Raise)


class Lives:
    """Where the values of registers are needed."""

    def __init__(self, blocks: list[list[ast.stmt]]) -> None:
        self.blocks = [[_statement(x) for x in block] for block in blocks]
        after = [
            [*successors(block), *([i] if _may_stay(block) else [])]
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
            needs.append(reads), makes.append(writes)
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
    return {y.id for y in _walk(x) if type(y) is ast.Name}


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
    ends = [block[-1] for block in blocks if _goes_on(block[-1])]
    n_before = Counter(j for block in blocks for j in successors(block))
    stays = {i for i, block in enumerate(blocks) if i == 0 or _may_stay(block)}
    inside = {j for j in successors(ends) if n_before[j] == 1} - stays
    kept: dict[int, list[ast.stmt]] = {}
    todo = [i for i in range(len(blocks)) if i not in inside]

    def followed(block: list[ast.stmt], depth: int) -> list[ast.stmt]:
        if not _goes_on(block[-1]):
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
