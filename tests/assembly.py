# SPDX-License-Identifier: Apache-2.0
"""Reads the assembly of a GPU kernel: its memory accesses and the ways through it.

PTX becomes a list of operations with their successors. It is checked against what the
compiler promises; what the hardware makes of that, only a test on a GPU can show.
"""

from __future__ import annotations

import operator
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import networkx
from same_code import sections


@dataclass
class Op:
    text: str
    what: str = ""
    """load, store, atomic, fence, barrier (of the block), some_barrier (of some of its
    warps), warp_barrier, vote, launch_wait (for the kernel before), launch_next (lets
    the kernel after it begin); empty for what has nothing to do with memory."""
    n_bytes: int = 0  # Bytes that one lane moves
    space: str = ""
    """global, shared, local, param, or generic: that is found out at run time."""
    order: str = ""
    """relaxed, acquire, release, acq_rel, volatile; empty if it has none."""
    scope: str = ""  # block, device, system; empty if it has no order
    is_read_only: bool = False  # Whether a cache may serve it that is not kept coherent
    predicate: str = ""
    """The register that says whether it runs, with `!` if it must not be set."""
    successors: list[int] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """Its name in tests, such as `load acquire system`."""
        return " ".join(word for word in (self.what, self.order, self.scope) if word)

    @property
    def is_plain(self) -> bool:
        """Whether it is an ordinary access to memory that others can reach."""
        return (
            self.what in ("load", "store")
            and self.space in ("global", "generic")
            and not self.order
        )

    @property
    def result(self) -> str:
        """What it sets: a register, or several; empty if nothing."""
        found = re.match(r"\S+\s+(%\w+(?:\|%\w+)?|\{[^}]*\}),", self.text)
        return found[1] if found else ""

    @property
    def address(self) -> str:
        """What it has as its address: a register, maybe an offset."""
        return self.text[self.text.index("[") + 1 : self.text.index("]")]

    def moves_16(self, what: str) -> bool:
        return self.is_plain and self.what == what and self.n_bytes == 16


class Kernel:
    """The operations of a kernel; the first is where it starts."""

    def __init__(self, ops: list[Op]) -> None:
        self.ops = ops
        self._graph = networkx.DiGraph()
        self._graph.add_nodes_from(range(len(ops)))
        self._before: list[list[int]] = [[] for _ in ops]
        for i, op in enumerate(ops):
            for after in op.successors:
                self._before[after].append(i)
                self._graph.add_edge(i, after)
        # The predicates that each operation sets, and where registers are written.
        found = [_PTX_SET.match(op.text) for op in ops]
        self._sets = [set(filter(None, x.groups())) if x else set() for x in found]
        self._written_at: dict[str, list[int]] = defaultdict(list)
        for i, op in enumerate(ops):
            if found := _PTX_WRITTEN.match(op.text):
                for register in re.findall(r"%\w+", found[1]):
                    self._written_at[register].append(i)

    def find(self, where: Callable[[Op], bool]) -> set[int]:
        return {i for i, op in enumerate(self.ops) if where(op)}

    def find_kind(self, *kinds: str) -> set[int]:
        return self.find(lambda op: op.kind in kinds)

    def reach(
        self,
        starts: Iterable[int],
        without: Collection[int] = (),
        within: Collection[int] | None = None,
    ) -> set[int]:
        """Finds what may run after some operations. No way may cross `without`, or
        leave `within`."""
        reached: set[int] = set()
        todo = [after for start in starts for after in self.ops[start].successors]
        while todo:
            i = todo.pop()
            if i in reached or i in without or within is not None and i not in within:
                continue
            reached.add(i)
            todo += self.ops[i].successors
        return reached

    def reach_from_start(self, without: Collection[int]) -> set[int]:
        """Finds what may run although some operations have not."""
        return set() if 0 in without else {0} | self.reach([0], without)

    def reach_knowing(
        self, known: dict[str, bool], without: Collection[int] = ()
    ) -> set[int]:
        """Finds what may run from the start, with an eye to what PTX predicates are. A
        way that passes `if is_waiting:` twice, once as if it held and once as if it did
        not, is none. So predicates that are set to constants are followed, and those
        that are made of them, for as long as somebody may ask for them."""
        live = self._live(self._made_of_constants() - set(known))
        start = (0, frozenset[tuple[str, bool]]())
        seen, todo = {start}, [start]
        while todo:
            i, state = todo.pop()
            if i in without:
                continue
            op, values = self.ops[i], dict(state)
            successors, now = op.successors, values | known
            holds = now.get(op.predicate.lstrip("@!"))
            if len(successors) == 2 and holds is not None:
                # What comes next, and where a branch leads.
                successors = [successors[holds != ("!" in op.predicate)]]
            for register in self._sets[i]:
                values[register] = None if op.predicate else self._value_set(i, now)
            for after in successors:
                kept = {r: v for r, v in values.items() if r in live[after]}
                then = (after, frozenset(x for x in kept.items() if x[1] is not None))
                if then not in seen:
                    seen.add(then)
                    todo.append(then)
        return {i for i, _ in seen if i not in without}

    def _made_of_constants(self) -> set[str]:
        """Finds the predicates that are constants somewhere, or made of such."""
        made: set[str] = set()
        n_before = -1
        while len(made) > n_before:
            n_before = len(made)
            for i, op in enumerate(self.ops):
                found = _PTX_LOGIC.fullmatch(op.text)
                if found and made & set(found["of"].split(", ")):
                    made |= self._sets[i]
                elif _PTX_CONSTANT.fullmatch(op.text):
                    made |= self._sets[i]
        return made

    def _live(self, registers: set[str]) -> list[set[str]]:
        """Finds which of some predicates may be asked for, at each operation."""
        live: list[set[str]] = [set() for _ in self.ops]
        todo = list(range(len(self.ops)))
        while todo:
            i = todo.pop()
            op = self.ops[i]
            asked = set(re.findall(r"%p\d+", op.text)) - self._sets[i]
            asked.add(op.predicate.lstrip("@!"))
            later = set().union(*(live[after] for after in op.successors))
            now = asked & registers | later - (set() if op.predicate else self._sets[i])
            if now != live[i]:
                live[i] = now
                todo += self._before[i]
        return live

    def _value_set(self, place: int, values: dict[str, bool]) -> bool | None:
        """Finds what an operation sets a predicate to; None if it may be either."""
        text = self.ops[place].text
        if constant := _PTX_CONSTANT.fullmatch(text):
            return constant[1] == "-1"
        if not (found := _PTX_LOGIC.fullmatch(text)):
            return None
        of = [values.get(register) for register in found["of"].split(", ")]
        if found["how"] == "not":
            return None if of[0] is None else not of[0]
        decides = found["how"] == "or"
        return decides if decides in of else None if None in of else not decides

    def value(self, operand: str, known: dict[str, int]) -> int | None:
        """Computes what an operand of PTX holds, from what registers hold. Only by what
        adds, shifts, compares and chooses: so generations are used. None if it is made
        of something else, or set in several places."""
        if operand in known:
            return known[operand]
        if re.fullmatch(r"-?\d+", operand):
            return int(operand)
        places = self._written_at[operand]
        if len(places) != 1 or self.ops[places[0]].predicate:
            return None
        return self._computed(self.ops[places[0]], operand, known)

    def _computed(self, op: Op, register: str, known: dict[str, int]) -> int | None:
        """Computes what an operation sets a register to."""
        name, rest = op.text.split(maxsplit=1)
        how, *kinds = name.split(".")
        if rest.startswith("{"):  # the halves of a word
            halves, _, source = rest.partition("}, ")
            word = self.value(source, known) if how == "mov" else None
            shift = 32 * halves.strip("{ ").split(", ").index(register)
            return None if word is None else word >> shift & 0xFFFF_FFFF
        of = [self.value(x.strip(), known) for x in rest.split(",")[1:]]
        if how == "setp" and None not in of and kinds[0] in _PTX_COMPARE:
            half = 1 << int(kinds[1][1:]) - 1
            if kinds[1][0] == "s":
                of = [(x + half) % (2 * half) - half for x in of]
            return int(_PTX_COMPARE[kinds[0]](*of))
        if how not in _PTX_ARITHMETIC or None in of:
            return None
        mask = (1 << (64 if "64" in kinds[0] else 32)) - 1
        return _PTX_ARITHMETIC[how](*of) & mask

    def run(self, place: int, known: dict[str, int]) -> dict[str, int]:
        """Runs what follows an operation, up to a branch; returns what is set."""
        found: dict[str, int] = {}
        while len(self.ops[place].successors) == 1:
            (place,) = self.ops[place].successors
            op = self.ops[place]
            for register in re.findall(r"%\w+", op.result):
                value = (
                    None
                    if op.predicate
                    else self._computed(op, register, known | found)
                )
                found.pop(register, None)
                if value is not None:
                    found[register] = value
        return found

    def smallest_loops(
        self, around: Collection[int], within: Collection[int] | None = None
    ) -> Iterator[Loop]:
        """Finds the smallest loops around some operations."""
        for loop in self.loops(within):
            inside = loop.body - {loop.entry}
            smaller = [inner.body for inner in self.loops(inside)]
            if loop.body.difference(*smaller) & set(around):
                yield loop
            yield from self.smallest_loops(around, inside)

    def loops(self, within: Collection[int] | None = None) -> list[Loop]:
        """Finds the loops that are in no other loop."""
        graph = self._graph if within is None else self._graph.subgraph(within).copy()
        loops = []
        for body in networkx.strongly_connected_components(graph):
            if len(body) > 1 or graph.has_edge(*body, *body):
                entries = {j for j in body if not body.issuperset(self._before[j])}
                assert len(entries) == 1, "a loop that is entered at several places"
                loops.append(Loop(self, body, entries.pop()))
        return loops


@dataclass
class Loop:
    """A loop of a kernel, with the loops in it."""

    kernel: Kernel
    body: set[int]
    entry: int

    def find(self, where: Callable[[Op], bool]) -> set[int]:
        return {i for i in self.body if where(self.kernel.ops[i])}

    def find_kind(self, *kinds: str) -> set[int]:
        return self.find(lambda op: op.kind in kinds)

    def reach_in_round(self, starts: Iterable[int]) -> set[int]:
        """Finds what may run after some operations in the same round of the loop."""
        return self.kernel.reach(starts, {self.entry}, self.body)

    def reach_from_entry(self, without: Collection[int]) -> set[int]:
        """Finds what may run in a round although some operations have not."""
        if self.entry in without:
            return set()
        return self.kernel.reach([self.entry], {self.entry, *without}, self.body)


_SCOPES = {"sys": "system", "gpu": "device", "cta": "block", "cluster": "cluster"}
_ORDERS = ("relaxed", "acquire", "release", "acq_rel", "volatile", "sc")
_PTX_ACCESS = {"ld": "load", "st": "store", "atom": "atomic", "red": "atomic"}
_PTX_BARRIERS = {
    "bar.sync": "barrier",
    "barrier.sync": "barrier",
    "bar.warp": "warp_barrier",
    "vote.sync": "vote",
    "griddepcontrol.wait": "launch_wait",
    "griddepcontrol.launch_dependents": "launch_next",
}


_PTX_CONSTANT = re.compile(r"mov\.pred\s+%p\d+, (0|-1)")
_PTX_LOGIC = re.compile(r"(?P<how>not|and|or)\.pred\s+%p\d+, (?P<of>.*)")
_PTX_SET = re.compile(r"\S+\s+(%p\d+)(?:\|(%p\d+))?,")
_PTX_WRITTEN = re.compile(r"\S+\s+(%\w+|\{[^}]*\})")
_PTX_ARITHMETIC: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "cvt": lambda a: a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "neg": lambda a: -a,
    "or": lambda a, b: a | b,
    "and": lambda a, b: a & b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "selp": lambda a, b, choice: a if choice else b,
}
_PTX_COMPARE = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_PTX_UNKNOWN = "cp ldu multimem mbarrier suld sust sured ldmatrix stmatrix".split()
_PTX_ENDS = ("bra", "brx", "ret", "exit", "trap")


def _ptx_op(text: str) -> Op:
    name = text.split()[0]
    words = [word.partition("::")[0] for word in name.split(".")]
    order = next((word for word in words if word in _ORDERS), "")
    scope = next((_SCOPES[word] for word in words if word in _SCOPES), "")
    if words[0] in ("fence", "membar"):
        return Op(text, "fence", order=order, scope=scope)
    # Accesses that this file does not know, and would overlook.
    assert words[0] not in _PTX_UNKNOWN, text
    if words[0] not in _PTX_ACCESS:
        what = _PTX_BARRIERS.get(".".join(words[:2]), "")
        # With a number of threads it is not the whole block's.
        return Op(text, "some_barrier" if what == "barrier" and "," in text else what)
    n_lanes = next((int(w[1:]) for w in words if re.fullmatch(r"v\d", w)), 1)
    space = [w for w in words if w in ("global", "shared", "local", "param")]
    return Op(
        text,
        _PTX_ACCESS[words[0]],
        n_lanes * int(re.sub(r"\D", "", words[-1])) // 8,
        space[0] if space else "generic",
        order or ("relaxed" if words[0] in ("atom", "red") else ""),
        scope,
        is_read_only="nc" in words,
    )


def parse_ptx(text: str) -> Kernel:
    body = text[text.index("\n{\n") + 3 : text.rindex("\n}")]
    body = re.sub(r"//.*", "", body)
    ops: list[Op] = []
    goes_on: list[bool] = []
    targets: list[str] = []
    labels: dict[str, int] = {}
    tables: dict[str, list[str]] = {}
    for statement in body.split(";"):
        statement = statement.strip()
        label = ""
        # Braces stand around inline assembly that has registers of its own.
        while found := re.match(r"(?:([\w$]+):|[{}])\s*", statement):
            if found[1]:
                label = found[1]
                labels[label] = len(ops)
            statement = statement[found.end() :]
        if statement.startswith(".branchtargets"):
            tables[label] = re.findall(r"\$\w+", statement)
        if not statement or statement.startswith("."):
            continue
        predicate, statement = re.fullmatch(
            r"(@!?%?p\d*\b)?\s*(.*)", statement, re.S
        ).groups()
        name = statement.split()[0].partition(".")[0]
        assert name != "call", "a call: its accesses are not seen here"
        ops.append(_ptx_op(statement))
        ops[-1].predicate = predicate or ""
        goes_on.append(bool(predicate) or name not in _PTX_ENDS)
        targets.append(statement.split()[-1] if name in ("bra", "brx") else "")
    for i, (op, target) in enumerate(zip(ops, targets)):
        op.successors = [i + 1] if goes_on[i] else []
        if target:
            op.successors += [labels[t] for t in tables.get(target, [target])]
    return Kernel(ops)


def amd_resources(text: str) -> dict[str, int]:
    found = re.findall(r"^ +-? *\.(\w+): +(\d+)$", text, re.M)
    return {name: int(value) for name, value in found}


def nvidia_resources(cubin: bytes) -> tuple[int, int]:
    """Reads what the assembler notes of a thread: how many registers it has, and how
    many bytes of local memory, for arrays and for registers that were spilled."""
    frame_size, register_count, sized = 0x11, 0x2F, 4
    numbers: dict[int, int] = {}
    for name, _, info in sections(cubin):
        at = 0
        while name == b".nv.info" and at < len(info):
            form, kind, size = struct.unpack_from("<2BH", info, at)
            if form == sized and kind in (frame_size, register_count):
                (number,) = struct.unpack_from("<I", info, at + 8)
                numbers[kind] = max(number, numbers.get(kind, 0))
            at += 4 + (size if form == sized else 0)
    return numbers[register_count], numbers[frame_size]
