# SPDX-License-Identifier: Apache-2.0
"""What a process does before it meets its group: those who wait for it say so.

It is in the name of a socket (``sockets.py``), so a process need not answer: it may be
in a call that takes minutes.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from .sockets import about, found, group_name, listen, owner_of

_shown: dict[str, tuple[str, socket.socket]] = {}
"""By group and node: what it does, and its socket."""


def _name(group: str, node: int | str) -> str:
    return f"{group_name(group)}-{node}/is"


def show(group: str, node: int | str, doing: str = "is loading") -> None:
    """Says to the others of a group what this process, a node of it, does now."""
    _show(_name(group, node), doing)


def hide(group: str, node: int | str) -> None:
    """Says no more: the process has come, or gone."""
    _hide(_name(group, node))


def _show(name: str, doing: str) -> None:
    _hide(name)
    with contextlib.suppress(RuntimeError):  # it is only for what others print
        _shown[name] = doing, listen(name, doing)


def _hide(name: str) -> None:
    _, listener = _shown.pop(name, ("", None))
    if listener is not None:
        listener.close()


@contextlib.contextmanager
def doing(what: str, group: str | None = None, node: str = "") -> Iterator[None]:
    """Says meanwhile that this process does something, in all groups that it joins, and
    in one that it may join."""
    before = {name: of for name, (of, _) in _shown.items()}
    if group and node:
        before.setdefault(_name(group, node), "")
    for name in before:
        _show(name, what)
    try:
        yield
    finally:
        for name in set(before) & set(_shown):
            if before[name]:
                _show(name, before[name])
            else:
                _hide(name)


def what_does(group: str, node: int) -> str:
    """Returns what a process that has not come yet does; "": it is not there."""
    for name in found(_name(group, node)):
        process = owner_of(name)
        if process is None:  # many have asked
            return about(name)
        if process.is_mine:
            return f"{about(name)} ({process})"
    return ""


def _end_in_child() -> None:
    """A forked process is not the one that was shown."""
    for name in [*_shown]:
        _hide(name)


os.register_at_fork(after_in_child=_end_in_child)
