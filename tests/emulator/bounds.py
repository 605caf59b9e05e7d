# SPDX-License-Identifier: Apache-2.0
"""Bounds of the numbers in a translated kernel save masks and changes of sign."""

from __future__ import annotations

import ast
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

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


def walk(x: ast.AST) -> Iterator[ast.AST]:
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


def statements(block: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Visits statements, and those in them."""
    for x in block:
        yield x
        yield from statements(getattr(x, "body", ()))
        yield from statements(getattr(x, "orelse", ()))


def _is_mask(x: int | None) -> bool:
    return x is not None and x > 0 and x & (x + 1) == 0


class Numbers:
    """Bounds of what registers ever hold; makes expressions simpler by them."""

    def __init__(self, blocks: list[list[ast.stmt]]) -> None:
        self.bounds: dict[str, Bounds] = {}
        users: dict[str, list[ast.Assign]] = defaultdict(list)
        todo = []
        for node in statements([x for block in blocks for x in block]):
            if type(node) is ast.Assign:
                todo.append(node)
                for x in walk(node.value):
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
            names = [self.of(n) for n in walk(x) if type(n) is ast.Name]
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
