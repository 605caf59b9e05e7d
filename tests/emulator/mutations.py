# SPDX-License-Identifier: Apache-2.0
"""Breaks a kernel on purpose, at one line of its source at a time.

A mutation changes all instructions that the compiler made of a line, in one chain of
calls. What a line does is made weaker, left out, or moved by one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.codegen.assembly import Kernel, Op

WEAKER = {
    "acq_rel": ["acquire", "release"],
    "acquire": ["relaxed"],
    "release": ["relaxed"],
    "relaxed": [""],
    "volatile": [""],
}
NARROWER = {"sys": "gpu", "gpu": "cta"}
BOUNDS = {"lt": "le", "gt": "ge", "lo": "ls", "hi": "hs"}
BOUNDS |= {looser: stricter for stricter, looser in BOUNDS.items()}
SCRATCH = {32: "%r99999", 64: "%rd99999"}
"""Registers that no compiler uses."""
OUTER = "device/kernel.mojo"
"""Calls all phases."""


@dataclass(frozen=True, order=True)
class Mutation:
    kind: str
    place: tuple[str, ...]
    """The line of source and its callers, the innermost first."""

    def __str__(self) -> str:
        return f"{self.kind}: {' < '.join(self.place)}"


def place_of(op: Op) -> tuple[str, ...]:
    """Leaves out what is not ours, and what is called for all phases. Of what is called
    from everywhere two lines of callers are enough; how a failure is recorded is the
    same for all."""
    ours = [x.partition("/max_ep/")[2] for x in op.place if "/max_ep/" in x]
    ours = [x for x in ours if not x.startswith(OUTER)]
    n = 0
    while n < len(ours) and ours[n].startswith("protocol/"):
        n += 1
        if ours[n - 1].startswith("protocol/failures"):
            return tuple(ours[:n])
    return tuple(ours[: n + 2])


def mutations(kernel: Kernel) -> dict[Mutation, dict[int, list[Op]]]:
    """Returns what each mutation makes of some of a kernel's operations."""
    found: dict[Mutation, dict[int, list[Op]]] = defaultdict(dict)
    awaited = _awaited(kernel)
    for i, op in enumerate(kernel.ops):
        if place := place_of(op):
            for kind, made in _changes(op, awaited):
                found[Mutation(kind, place)][i] = made
    for i, exit_ in _exits(kernel):
        op = kernel.ops[i]
        if place := place_of(op):
            made = replace(op, text="bra", predicate="", successors=[exit_])
            found[Mutation("not waited for", place)][i] = [made]
    return found


def _changes(op: Op, awaited: set[str]) -> Iterator[tuple[str, list[Op]]]:
    """Yields what an operation may become."""
    name, rest = re.fullmatch(r"(\S+)\s*(.*)", op.text, re.S).groups()
    how, *kinds = name.split(".")

    def named(*words: str) -> list[Op]:
        return [replace(op, text=f"{'.'.join([how, *words])} {rest}")]

    if op.what in ("load", "store", "atomic"):
        if op.space in ("param", "local"):
            return
        order = next((x for x in kinds if x in WEAKER), "")
        for weaker in WEAKER.get(order, [] if order else ()):
            if weaker or op.what != "atomic":
                words = [x for x in kinds if weaker or x not in ("sys", "gpu", "cta")]
                words = [weaker if x == order else x for x in words]
                yield f"{weaker or 'plain'} instead of {order}", named(*filter(None, words))
        scope = next((x for x in kinds if x in NARROWER), "")
        if order in ("acq_rel", "acquire", "release") and scope:
            words = [NARROWER[scope] if x == scope else x for x in kinds]
            yield f"scope {NARROWER[scope]} instead of {scope}", named(*words)
        place, end = re.search(r"\[([^\]]*)\]", rest)[1], rest.index("]")
        base, _, offset = place.partition("+")
        moved = f"[{base}+{int(offset or 0) + op.n_bytes}]"
        yield "one element on", [replace(op, text=op.text.replace(f"[{place}]", moved))]
        if op.what == "store":
            yield "left out", []
            value = rest[end + 1 :].lstrip(", ").strip()
            if "{" not in value and op.n_bytes in (4, 8) and op.space != "shared":
                yield from _older(op, value, 8 * op.n_bytes, "stored")
        elif how == "red":
            yield "left out", []
    elif how == "bar" or how == "barrier":
        yield "left out", []
    elif how == "setp":
        compare, kind = kinds[0], kinds[-1]
        if compare in BOUNDS and kind[0] != "f":
            yield "bound", named(BOUNDS[compare], *kinds[1:])
        of = [x.strip() for x in rest.split(",")][1:]
        fixed = [x for x in of if x not in awaited]
        if len(of) == 2 and len(fixed) == 1 and kind[0] in "bsu":
            yield from _older(op, fixed[0], int(kind[1:]), "wanted")


def _older(op: Op, value: str, bits: int, what: str) -> Iterator[tuple[str, list[Op]]]:
    """Yields an operation with the generation before, in the lower or upper half."""
    for by, half in ((1, "lower"), (1 << 32, "upper")):
        if by >> bits:
            continue
        begin, _, end = op.text.rpartition(value)
        name = f"{what}: generation before" + f", {half} half" * (bits == 64)
        if value[0] == "%" and value[1:3] != "p_" and value.strip("%rsd").isdigit():
            scratch = SCRATCH[bits]
            less = replace(op, text=f"add.s{bits} {scratch}, {value}, {-by}", what="")
            yield name, [less, replace(op, text=begin + scratch + end)]
        elif re.fullmatch(r"-?\d+", value):
            yield name, [replace(op, text=f"{begin}{int(value) - by}{end}")]


def _awaited(kernel: Kernel) -> set[str]:
    """Finds the registers that depend on what was loaded with an order."""
    found: set[str] = set()
    size = -1
    while size != len(found):
        size = len(found)
        for op in kernel.ops:
            name, *rest = re.split(r"[\s,{}\[\]|]+", op.text)
            how = name.partition(".")[0]
            registers = [x.partition("+")[0] for x in rest if x[:1] == "%"]
            if how in ("setp", "st", "bra", "shfl", "vote", "selp") or not registers:
                continue
            if how == "ld" and (op.order or "b128" in name):
                found.update(registers[:-1] if how == "ld" else registers)
            elif how in ("ld", "atom", "red"):
                continue
            elif how == "mov" and "word" in rest:
                found.update(registers)
            elif how in ("mov", "shr", "and", "cvt", "sub", "add", "shl", "or", "xor"):
                if found.intersection(registers[1:]):
                    found.add(registers[0])
    return found


def _exits(kernel: Kernel) -> Iterator[tuple[int, int]]:
    """Finds the branches out of loops that poll, and where they lead."""
    polls = kernel.find(lambda op: op.what == "load" and bool(op.order))
    for loop in kernel.smallest_loops(polls):
        for i in loop.body:
            op = kernel.ops[i]
            out = [x for x in op.successors if x not in loop.body]
            if op.predicate and len(out) == 1 and len(op.successors) == 2:
                yield i, out[0]
