# SPDX-License-Identifier: Apache-2.0
"""Rules for a value that JSON holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

NEEDED: Any = object()
"""In place of a default: there must be a value."""

_MOST = 2**31 - 1


class Rule(NamedTuple):
    """Which values of a field are served."""

    takes: Callable[[Any], bool]
    served: str
    """These values, in words."""
    default: Any = None
    """That of transformers."""


def shown(value: Any) -> str:
    """Returns a value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def named(name: str) -> str:
    """Returns a name as an error shows it, in one line."""
    return name if name.isprintable() and name and len(name) < 120 else shown(name)


def is_whole(value: Any, least: int = 1, most: int = _MOST) -> bool:
    return type(value) is int and least <= value <= most


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def whole(default: Any = NEEDED, least: int = 1, most: int = _MOST) -> Rule:
    """Takes integers in ``[least, most]``."""
    served = f"an integer in [{least}, {most}]"
    return Rule(lambda v: is_whole(v, least, most), served, default)


def number(default: Any = NEEDED) -> Rule:
    """Takes numbers above 0."""
    return Rule(is_number, "a number above 0", default)


def within(least: float, most: float) -> Rule:
    """Takes numbers in ``[least, most]``."""
    return Rule(
        lambda v: type(v) in (int, float) and least <= v <= most,
        f"a number from {least} to {most}",
    )


def flag(default: bool) -> Rule:
    return Rule(lambda v: type(v) is bool, "true or false", default)


def only(*values: Any, default: Any = NEEDED) -> Rule:
    """Takes these values; the first is the default, if no other is given."""

    def takes(value: Any) -> bool:
        # In Python True is 1, in JSON it is not.
        same = [v for v in values if isinstance(v, bool) == isinstance(value, bool)]
        return any(value == v for v in same)

    default = values[0] if default is NEEDED else default
    return Rule(takes, " or ".join(shown(v) for v in values), default)


def needed(rule: Rule) -> Rule:
    """Returns a rule for a field that must be there."""
    return rule._replace(default=NEEDED)


def optional(rule: Rule) -> Rule:
    """Takes null, too, which is the default."""

    def takes(value: Any) -> bool:
        return value is None or rule.takes(value)

    return Rule(takes, f"{rule.served}, or null", None)


def each(rule: Rule, default: Any = NEEDED) -> Rule:
    """Takes lists of what ``rule`` takes."""

    def takes(value: Any) -> bool:
        return isinstance(value, list) and all(map(rule.takes, value))

    return Rule(takes, f"a list, each element {rule.served}", default)


def free(default: Any = None, *types: type) -> Rule:
    """Takes everything, or what transformers takes: values of these types. The field
    does not change results."""
    names = " or ".join(kind.__name__ for kind in types)
    return Rule(lambda v: not types or type(v) in types, names or "anything", default)


def real(default: Any) -> Rule:
    """Takes numbers above 0 with a point: transformers refuses integers there."""
    return Rule(
        lambda v: type(v) is float and is_number(v),
        "a number above 0 with a decimal point",
        default,
    )
