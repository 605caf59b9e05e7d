# SPDX-License-Identifier: Apache-2.0
"""Steps, messages and states: what the machine of `machine.py` works on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

Place = tuple[Any, ...]
"""Kind of the word, rank whose memory it is in, and its indices."""

SENTINEL = "SENTINEL"
"""What a place holds whose data is its own flag, when there is none."""


class Order(Enum):
    """How a step is ordered to others of its agent."""

    PLAIN = "plain"
    STREAMED = "streamed"
    RELAXED = "relaxed"
    ACQUIRE = "acquire"
    RELEASE = "release"
    ACQUIRE_RELEASE = "acquire and release"

    @property
    def acquires(self) -> bool:
        return self in (Order.ACQUIRE, Order.ACQUIRE_RELEASE)

    @property
    def releases(self) -> bool:
        return self in (Order.RELEASE, Order.ACQUIRE_RELEASE)


@dataclass(frozen=True)
class Step:
    """One step of an agent, and the line of code that it stands for."""

    kind: str
    """`write`, `read`, `put`, `await`, `poll`, `arrive`, `drain` or `join`."""
    call: str  # The function of `flags.mojo`, or `store` or `load`
    where: str  # File and function of the call
    place: Place = ()  # What is accessed; of a `poll` the first of `places`
    order: Order = Order.PLAIN
    value: Any = None
    """What is written, or must be read; of a wait, what alone it may see."""
    truth: Any = None
    """what the value says, said by the round of the program and not by any
    generation: of a write, what it is of; of a read, what it must be of."""
    accept: tuple[Any, ...] = ()  # Which value ends a wait
    places: tuple[Place, ...] = ()  # All words of a `poll`; what a `put` copies
    skip: int = 0
    """Steps left out: after a `poll` that found nothing, or by all that `arrive`
    but the last of `value`."""
    agents: tuple[int, ...] = ()  # the agents that a `join` waits for

    def __str__(self) -> str:
        said = f"{self.call} {show(self.place)}"
        if self.kind == "write":
            said += f" := {show_value(self.value)}"
        elif self.accept:
            said += f" until {' '.join(map(str, self.accept))}"
        return f"{said} ({self.order.value}; {self.where})"


def show(place: Place) -> str:
    """Names a place: `entry[0][1] on rank 0`."""
    if not place:
        return ""
    kind, rank, *rest = place
    return f"{kind}{''.join(f'[{i}]' for i in rest)} on rank {rank}"


def show_value(value: Any) -> str:
    """Writes a value down, without quotes."""
    if isinstance(value, tuple):
        return "(" + ", ".join(map(show_value, value)) + ")"
    return str(value)


class Violation(Exception):
    """A property does not hold."""

    def __init__(self, prop: str, what: str) -> None:
        super().__init__(what)
        self.prop = prop


UNPUBLISHED = "no read of unpublished or overwritten payload"
OVERWRITTEN = "nothing is overwritten before its reader is done"
WRONG_GENERATION = "no flag or payload of one generation accepted in another"
RAN_PAST = "a word waits for its reader"
ENDS = "every launch ends"


@dataclass(frozen=True)
class Message:
    """What was written to a place once."""

    value: Any
    truth: Any
    view: int  # What an acquire learns
    happened: int = 0  # The bit of the step that wrote it; 0: everybody knows of it
    seen: int = 0  # Its bit among what was seen

    def __str__(self) -> str:
        return show_value(self.value if self.truth is None else self.truth)


@dataclass(frozen=True)
class Cell:
    """A place: what was written to it and not forgotten, and who has read it."""

    messages: tuple[Message, ...]
    reads: int = 0


# A view is a set of steps as bits: bit 2i says that step i has happened before;
# bit 2i + 1 that the message that step i wrote, or a later one, was seen.
HAPPENED, SEEN = 1, 2
BOTH = HAPPENED | SEEN
ALL_HAPPENED = (1 << (1 << 16)) // 3


@dataclass
class RankState:
    launch: int
    base: int
    pcs: list[int] = field(default_factory=list)
    views: list[int] = field(default_factory=list)
    agents: tuple[tuple[Step, ...], ...] = ()
    built: Any = None

    def copy(self) -> RankState:
        return replace(self, pcs=list(self.pcs), views=list(self.views))

    def key(self) -> tuple[Any, ...]:
        return (self.launch, self.base, tuple(self.pcs), tuple(self.views), self.built)


@dataclass
class State:
    """Where all agents stand, and what all places hold."""

    ranks: list[RankState]
    cells: dict[Place, Cell]

    def copy(self) -> State:
        return State([r.copy() for r in self.ranks], dict(self.cells))

    def put(self, place: Place, cell: Cell | None) -> None:
        """Replaces a cell; `None`: by what the place held at first."""
        self.cells.pop(place, None)
        if cell is not None:
            self.cells[place] = cell

    def key(self) -> int:
        """What differs between states."""
        cells = frozenset(self.cells.items())
        return hash((cells, *(rank.key() for rank in self.ranks)))


def both(bits: int) -> int:
    """Completes pairs of bits."""
    return bits | bits >> 1 & ALL_HAPPENED | (bits & ALL_HAPPENED) << 1


def is_true(meant: Any, found: Any) -> bool:
    """Says whether a message is of what it was taken for."""
    if meant is None:
        return True
    if isinstance(meant, tuple) and meant[:1] == ("at least",):
        return found[meant[1]] >= meant[2]
    return meant == found
