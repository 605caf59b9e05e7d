# SPDX-License-Identifier: Apache-2.0
"""Tests of errors: tables of what is refused, and the words that an error must have."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest


def refused(table: str) -> pytest.MarkDecorator:
    """Runs a test with each line of a table: arguments, `|`, words, of an error."""
    rows = [line.rsplit(" | ", 1) for line in table.strip().splitlines()]
    return pytest.mark.parametrize("arguments, words", rows)


def arguments_of(text: str, known: dict[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments that stand in a table."""
    return eval(f"dict({text})", known)


@contextlib.contextmanager
def raises(error: Any, words: str) -> Iterator[Any]:
    """Expects an error whose text has all the words; `; ` stands between them."""
    with pytest.raises(error) as caught:
        yield caught
    text = str(caught.value)
    missing = [word for word in words.split("; ") if word not in text]
    assert not missing, f"the error does not say {missing}; it says: {text}"
