# SPDX-License-Identifier: Apache-2.0
"""What is broken on purpose, so that the model shows that it would notice.

Some mutations have names (`NAMED`); the others are made of the steps that a world
takes: of each call, wherever it stands and whatever it is of, its order made weaker,
the call left out, or its generation replaced by a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from .launches import RANK_WORDS
from .memory import SENTINEL, Order, Step

Change = Callable[[Step], list[Step]]


def _same(step: Step) -> list[Step]:
    return [step]


def kind_of(step: Step) -> str:
    return step.place[0] if step.place else ""


@dataclass(frozen=True, order=True)
class Site:
    """Steps that are one line of code and one kind of word."""

    where: str
    call: str
    kind: str

    @staticmethod
    def of(step: Step) -> Site:
        return Site(step.where, step.call, kind_of(step))

    def __str__(self) -> str:
        return f"{self.call}({self.kind}) in {self.where}"


@dataclass(frozen=True, eq=False)
class Mutation:
    """Something that is changed in every launch."""

    name: str
    change: Change = _same
    switches: frozenset[str] = frozenset()  # What protocols ask for by `World.has`
    not_in: tuple[str, ...] = ()  # Protocols that have nothing to be mutated so
    site: Site | None = None  # The only steps that it changes; `None`: any


WEAKER = {
    Order.ACQUIRE: (Order.RELAXED,),
    Order.RELEASE: (Order.RELAXED,),
    Order.ACQUIRE_RELEASE: (Order.ACQUIRE, Order.RELEASE),
}


COUNTED_IN = ("blocks_arrived",)
"""Words that blocks count in, and that somebody puts back."""


def made_of(steps: Iterable[Step]) -> list[Mutation]:
    """Makes the mutations of all sites that some steps have."""
    made = []
    by_site: dict[Site, Step] = {}
    for step in steps:
        if step.call not in ("load", "join"):
            by_site.setdefault(Site.of(step), step)
    for site, step in sorted(by_site.items()):
        made += [_weakened(site, order) for order in WEAKER.get(step.order, ())]
        is_shared = kind_of(step) in RANK_WORDS
        if step.call == "store" and not is_shared and site.kind not in COUNTED_IN:
            # A word that only this rank reads.
            continue
        if step.accept == ("anything",):
            continue
        if step.kind == "await" and step.truth is not None:
            made.append(_not_waited_for(site))
        may_be_left_out = "done" in site.kind or site.kind in COUNTED_IN
        if step.kind != "await" or step.truth is None or may_be_left_out:
            made.append(_left_out(site))
        if step.kind == "await" and "done" in site.kind:
            made += [_left_out(site, reader) for reader in (0, 1)]
        if step.kind == "write" and is_shared and step.value != SENTINEL:
            if isinstance(step.value[0], int):
                made.append(_constant(site))
    return made


def _at(site: Site, name: str, changed: Change) -> Mutation:
    """Changes the steps of a site."""

    def change(step: Step) -> list[Step]:
        return changed(step) if Site.of(step) == site else [step]

    return Mutation(name, change, site=site)


def _weakened(site: Site, order: Order) -> Mutation:
    name = f"{order.value} instead of more: {site}"
    return _at(site, name, lambda step: [replace(step, order=order)])


def _left_out(site: Site, reader: int | None = None) -> Mutation:
    def changed(step: Step) -> list[Step]:
        return [] if reader is None or step.place[-1] == reader else [step]

    of = "" if reader is None else f", of reader {reader}"
    return _at(site, f"left out: {site}{of}", changed)


def _not_waited_for(site: Site) -> Mutation:
    """What is there when it is first polled is taken."""
    anything = ("anything",)
    name = f"not waited for: {site}"
    return _at(site, name, lambda step: [replace(step, accept=anything)])


def _constant(site: Site) -> Mutation:
    return _at(site, f"generation 1 for ever: {site}", _with_generation_1)


def _with_generation_1(step: Step) -> list[Step]:
    return [replace(step, value=(1, *step.value[1:]))]


def _without_generation(step: Step) -> list[Step]:
    """Readers take whatever is not zero, writers write 1."""
    if kind_of(step) not in RANK_WORDS or "done" in kind_of(step):
        return [step]
    if step.accept[:1] == ("equals",):
        return [replace(step, accept=("not zero", 0))]
    if (
        step.kind == "write"
        and step.value != SENTINEL
        and isinstance(step.value[0], int)
    ):
        return _with_generation_1(step)
    return [step]


def _reset_by_reader(step: Step) -> list[Step]:
    """The same, and whoever has read a word puts zero back."""
    steps = _without_generation(step)
    if steps[0].accept[:1] == ("not zero",):
        steps.append(reset(step))
    return steps


def reset(step: Step) -> Step:
    """Puts a word back that a step waits for."""
    return Step("write", "reset", step.where, step.place, Order.RELAXED, (0, 0))


NAMED = [
    Mutation("generation tag removed", _without_generation),
    # A launch clears, as it begins, what it is going to wait for.
    Mutation("reset instead of generation", _without_generation, frozenset(["clears"])),
    # One reader alone may do that, and on CPU there is one.
    Mutation("reset by the reader", _reset_by_reader, not_in=("CPU ranks",)),
    *(
        Mutation(name, switches=frozenset([name]))
        for name in (
            "early return of a rank with zero tokens",
            "dispatch and combine sharing a buffer",
        )
    ),
    # Only where two dispatches are under way in one replay.
    Mutation(
        "parity kept per handle",
        switches=frozenset(["parity kept per handle"]),
        not_in=("by rank",),
    ),
]

HARMLESS = {
    # A count is published after it by the same thread, over a link after a fence, and
    # taken before it is read.
    "relaxed instead of more: publish(dispatch_n_tokens) in CPU: _publish_counts",
    "generation 1 for ever: publish(dispatch_n_tokens) in CPU: _publish_counts",
    "relaxed instead of more: signal(dispatch_n_tokens) in CPU: _publish_counts",
    "generation 1 for ever: signal(dispatch_n_tokens) in CPU: _publish_counts",
    "relaxed instead of more: load_acquire_sys(dispatch_n_tokens) in CPU: "
    "_place_tokens",
    # CPU ranks read the choice of a dispatch message, not its generation.
    "generation 1 for ever: store(message_flag) in CPU: send_some",
    # CPU ranks find it after the counts, and do not read it.
    "generation 1 for ever: store(metadata) in CPU: _write_entry",
}
"""Mutations that change nothing that matters, and why."""
