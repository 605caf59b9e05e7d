# SPDX-License-Identifier: Apache-2.0
"""Reads the assembly of a GPU kernel: its memory accesses and the ways through it.

PTX becomes a list of operations with their successors. It is checked against what the
compiler promises; what the hardware makes of that, only a test on a GPU can show.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import networkx

from tests.codegen.same_code import attributes, sections


@dataclass
class Op:
    text: str
    what: str = ""
    """load, store, atomic, fence, launch_wait (for the kernel before), launch_next
    (lets the kernel after it begin); empty for all else."""
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
    place: tuple[str, ...] = ()
    """Its line of source and those that it is called from, if the compiler said so."""

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


class Kernel:
    """The operations of a kernel; the first is where it starts."""

    def __init__(self, ops: list[Op]) -> None:
        self.ops = ops

    @functools.cached_property
    def _graph(self) -> networkx.DiGraph:
        graph = networkx.DiGraph()
        graph.add_nodes_from(range(len(self.ops)))
        for i, op in enumerate(self.ops):
            for after in op.successors:
                graph.add_edge(i, after)
        return graph

    def find(self, where: Callable[[Op], bool]) -> set[int]:
        return {i for i, op in enumerate(self.ops) if where(op)}

    def find_kind(self, *kinds: str) -> set[int]:
        return self.find(lambda op: op.kind in kinds)

    def reach_from_start(self, without: Collection[int]) -> set[int]:
        """Finds what may run although some operations have not."""
        reached: set[int] = set()
        todo = [0]
        while todo:
            i = todo.pop()
            if i not in reached and i not in without:
                reached.add(i)
                todo += self.ops[i].successors
        return reached

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
                before = self._graph.predecessors
                entries = {j for j in body if not body.issuperset(before(j))}
                assert len(entries) == 1, "a loop that is entered at several places"
                loops.append(Loop(body, entries.pop()))
        return loops


@dataclass
class Loop:
    """A loop of a kernel, with the loops in it."""

    body: set[int]
    entry: int


_SCOPES = {"sys": "system", "gpu": "device", "cta": "block", "cluster": "cluster"}
_ORDERS = ("relaxed", "acquire", "release", "acq_rel", "volatile", "sc")
_PTX_ACCESS = {"ld": "load", "st": "store", "atom": "atomic", "red": "atomic"}
_PTX_LAUNCHES = {
    "griddepcontrol.wait": "launch_wait",
    "griddepcontrol.launch_dependents": "launch_next",
}
_PTX_UNKNOWN = "cp ldu multimem mbarrier suld sust sured ldmatrix stmatrix".split()
_PTX_ENDS = ("bra", "brx", "ret", "exit", "trap")


def _ptx_op(text: str) -> Op:
    name = text.split()[0]
    words = [word.partition("::")[0] for word in name.split(".")]
    order = next((word for word in words if word in _ORDERS), "")
    scope = next((_SCOPES[word] for word in words if word in _SCOPES), "")
    if order == "volatile":
        scope = "system"  # PTX defines it as relaxed there.
    if words[0] in ("fence", "membar"):
        return Op(text, "fence", order=order, scope=scope)
    # Accesses that this file does not know, and would overlook.
    assert words[0] not in _PTX_UNKNOWN, text
    if words[0] not in _PTX_ACCESS:
        return Op(text, _PTX_LAUNCHES.get(".".join(words[:2]), ""))
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


_LOC = r"\.loc\s+(\d+) (\d+) (\d+)(?:, function_name \S+, inlined_at (.*))?\n\s*"


def parse_ptx(text: str) -> Kernel:
    sources = dict(re.findall(r"\.file\s+(\d+) \"(.*)\"", text))
    text = text.partition("\n\t.section")[0]
    body = text[text.index("\n{\n") + 3 : text.rindex("\n}")]
    body = re.sub(r"//.*", "", body)
    places: dict[str, tuple[str, ...]] = {}
    place: tuple[str, ...] = ()
    ops: list[Op] = []
    goes_on: list[bool] = []
    targets: list[str] = []
    labels: dict[str, int] = {}
    tables: dict[str, list[str]] = {}
    for statement in body.split(";"):
        statement = statement.strip()
        label = ""
        # Braces stand around inline assembly that has registers of its own.
        while found := re.match(rf"(?:([\w$]+):|[{{}}]|{_LOC})\s*", statement):
            if found[2]:
                file, line, column, caller = found.groups()[1:]
                place = f"{sources[file]}:{line}", *places.get(caller, ())
                places[f"{file} {line} {column}"] = place
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
        ops[-1].place = place
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
    frame_size, register_count = 0x11, 0x2F
    numbers = {frame_size: 0, register_count: 0}
    (info,) = (info for name, _, info in sections(cubin) if name == b".nv.info")
    for kind, body in attributes(info):
        if kind in numbers:
            (number,) = struct.unpack_from("<I", body, 8)
            numbers[kind] = max(number, numbers[kind])
    return numbers[register_count], numbers[frame_size]
