# SPDX-License-Identifier: Apache-2.0
"""Breaks a kernel on purpose, at one line of its source at a time.

A mutation changes all instructions that the compiler made of a line, in one chain of
calls: an order is made weaker, a scope narrower, a wait is left out, or it is content
with the generation before; a store is left out, an access goes one place too far, a
bound is off by one, or what was awaited is not compared.
"""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from max_ep.extension import mojo_dir, sources_hash
from tests.codegen.assembly import Kernel, Op

SEED = os.environ.get("MAX_EP_FUZZ_SEED", sources_hash())
"""Says which mutations are tried if not all are."""
WEAKER = {
    "acq_rel": ["acquire", "release"],
    "acquire": ["relaxed"],
    "release": ["relaxed"],
}
NARROWER = {"sys": "gpu", "gpu": "cta"}
NOT_STORED = "not stored"
TOO_FAR = "one place too far"
OFF_BY_ONE = "bound off by one"
NOT_COMPARED = "what was awaited is not compared"
PLAIN = {
    NOT_STORED,
    TOO_FAR,
    OFF_BY_ONE,
    *(f"{NOT_COMPARED}: {said}" for said in ("never", "always")),
}
"""Mutations of other things than orders and waits."""
_COMPARES = r"[=!]=|[<>]| in range\(|\bmin\(|\bmax\("
"""What a line has that compares."""
_ALMOST = dict(lt="le", le="lt", gt="ge", ge="gt") | dict(
    lo="ls", ls="lo", hi="hs", hs="hi"
)
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
        lines = [f"{x} `{line_of(x)}`" for x in self.place]
        return f"{self.kind}: {' < '.join(lines)}"


@functools.cache
def _lines(file: str) -> list[str]:
    return (mojo_dir() / "max_ep" / file).read_text().splitlines()


def line_of(place: str) -> str:
    """Returns the text of a place, which is a file and the number of a line."""
    file, _, number = place.rpartition(":")
    return _lines(file)[int(number) - 1].strip()


def place_of(op: Op, n_callers: int = 2) -> tuple[str, ...]:
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
    return tuple(ours[: n + n_callers])


def mutations(kernel: Kernel) -> dict[Mutation, dict[int, list[Op]]]:
    """Returns what each mutation makes of some of a kernel's operations."""
    found: dict[Mutation, dict[int, list[Op]]] = defaultdict(dict)
    awaited = _awaited(kernel)
    for i, op in enumerate(kernel.ops):
        if place := place_of(op):
            for kind, made in _changes(op, awaited):
                found[Mutation(kind, place)][i] = made
        # Line 0: the compiler has made one of what stands on several.
        place = place_of(op, 1)
        if place and not place[0].endswith(":0"):
            for kind, made in _plain_changes(op, awaited):
                if kind != OFF_BY_ONE or re.search(_COMPARES, line_of(place[0])):
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

    order = next((x for x in kinds if x in WEAKER), "")
    if order:
        for weaker in WEAKER[order]:
            words = [weaker if x == order else x for x in kinds]
            yield f"{weaker} instead of {order}", named(*words)
        if scope := next((x for x in kinds if x in NARROWER), ""):
            words = [NARROWER[scope] if x == scope else x for x in kinds]
            yield f"scope {NARROWER[scope]} instead of {scope}", named(*words)
    elif how == "setp":
        kind = kinds[-1]
        of = [x.strip() for x in rest.split(",")][1:]
        fixed = [x for x in of if x not in awaited]
        if len(of) == 2 and len(fixed) == 1 and kind[0] in "bsu":
            yield from _older(op, fixed[0], int(kind[1:]))


def _plain_changes(op: Op, awaited: set[str]) -> Iterator[tuple[str, list[Op]]]:
    """Yields what an operation without an order, or a store, may become."""
    name, rest = re.fullmatch(r"(\S+)\s*(.*)", op.text, re.S).groups()
    how, *kinds = name.split(".")
    if op.what in ("load", "store", "atomic") and op.space not in ("param", "local"):
        if op.what == "store" or how == "red":
            yield NOT_STORED, []
        elif op.what == "atomic":
            bits, load = kinds[-1], rest.partition("]")[0] + "]"
            yield NOT_STORED, [replace(op, text=f"ld.relaxed.gpu.{bits} {load}")]
        begin, place, end = re.fullmatch(r"(.*?\[)(.*?)(\].*)", op.text, re.S).groups()
        of, _, offset = place.partition("+")
        place = f"{of}+{int(offset or 0) + op.n_bytes}"
        yield TOO_FAR, [replace(op, text=begin + place + end)]
    elif how == "setp" and kinds[-1][0] in "bsu":
        to, *of = [x.strip() for x in rest.split(",")]
        if awaited.intersection(of):
            for number, said in enumerate(("never", "always")):
                made = replace(op, text=f"mov.pred {to}, {number}")
                yield f"{NOT_COMPARED}: {said}", [made]
        elif kinds[0] in _ALMOST:
            made = f"{'.'.join([how, _ALMOST[kinds[0]], *kinds[1:]])} {rest}"
            yield OFF_BY_ONE, [replace(op, text=made)]
        else:
            made = _shifted(op, of[1], int(kinds[-1][1:]), 1)
            if made:
                yield OFF_BY_ONE, made


def _older(op: Op, value: str, bits: int) -> Iterator[tuple[str, list[Op]]]:
    """Yields an operation with the generation before, in the lower or upper half."""
    for by, half in ((1, "lower"), (1 << 32, "upper")):
        if by >> bits:
            continue
        name = "wanted: generation before" + f", {half} half" * (bits == 64)
        if made := _shifted(op, value, bits, -by):
            yield name, made


def _shifted(op: Op, value: str, bits: int, by: int) -> list[Op]:
    """Adds to the last operand that is a value; nothing if it cannot be."""
    begin, _, end = op.text.rpartition(value)
    if value[0] == "%" and value[1:3] != "p_" and value.strip("%rsd").isdigit():
        scratch = SCRATCH[bits]
        more = replace(op, text=f"add.s{bits} {scratch}, {value}, {by}", what="")
        return [more, replace(op, text=begin + scratch + end)]
    if re.fullmatch(r"-?\d+", value):
        return [replace(op, text=f"{begin}{int(value) + by}{end}")]
    return []


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
                found.update(registers[:-1])
            elif how in ("ld", "atom", "red"):
                continue
            elif how == "mov" and "word" in rest:
                found.update(registers)
            elif how in ("mov", "shr", "and", "cvt", "sub", "add", "shl", "or", "xor"):
                if found.intersection(registers[1:]):
                    found.add(registers[0])
    return found


def _exits(kernel: Kernel) -> Iterator[tuple[int, int]]:
    """Finds the branches out of loops that only poll, and where they lead."""
    polls = kernel.find(lambda op: op.what == "load" and bool(op.order))
    for loop in kernel.smallest_loops(polls):
        ops = [kernel.ops[i] for i in loop.body]
        if any(
            op.what == "atomic" or op.what == "store" and not op.order for op in ops
        ):
            continue
        for i in loop.body:
            op = kernel.ops[i]
            out = [x for x in op.successors if x not in loop.body]
            if op.predicate and len(out) == 1 and len(op.successors) == 2:
                yield i, out[0]
