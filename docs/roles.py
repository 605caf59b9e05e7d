# SPDX-License-Identifier: Apache-2.0
"""Writes the roles of docstrings (``:func:`name```) as plain code on the API page."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    """Leaves the name of a role, in backquotes."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = obj.docstring.value.replace("``", "`")
            obj.docstring.value = re.sub(r":\w+:(?=`)", "", text)
