# SPDX-License-Identifier: Apache-2.0
"""What another process has written, in JSON: taken field by field, or not at all."""

from __future__ import annotations

import functools
import json
import math
import types
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_Message = TypeVar("_Message")
_fields_of = functools.cache(get_type_hints)


def said(message: Any) -> bytes:
    """Writes a dataclass down, in one line."""
    return json.dumps(asdict(message)).encode()


def taken(kind: type[_Message], text: bytes) -> _Message | None:
    """Returns the dataclass that a text describes. None: it has another form, whatever
    it is; a field more or less, or of another type, is another form."""
    try:
        return _made(kind, json.loads(text))
    except (TypeError, ValueError, RecursionError, MemoryError):
        return None


def _made(kind: Any, value: Any) -> Any:
    """Returns a value of JSON as one of a type; a ``TypeError`` if it is none."""
    if is_dataclass(kind):
        fields = _fields_of(kind)
        if isinstance(value, dict) and set(value) == set(fields):
            return kind(**{name: _made(fields[name], value[name]) for name in fields})
    elif get_origin(kind) is list:
        (of,) = get_args(kind)
        if isinstance(value, list):
            return [_made(of, item) for item in value]
    elif get_origin(kind) is types.UnionType:  # of a type and None
        first, _ = get_args(kind)
        return None if value is None else _made(first, value)
    elif kind is float:
        # A bool is an int; JSON has NaN and integers of any length.
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    elif kind is int:
        if type(value) is int and abs(value) < 2**63:
            return value
    elif type(value) is kind:
        return value
    raise TypeError(f"{kind} is wanted")
