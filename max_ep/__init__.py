# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel dispatch and combine for MAX graphs.

It has the names of ``max.nn.comm.ep`` and some of its own; ``__init__.pyi`` lists them.
They are imported on first use, so ``max_ep.torch`` and the command line load no MAX.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

# A submodule of the same name: imported here, so that the function wins.
from .first_import import guard
from .launch import LaunchError as LaunchError
from .launch import launch as launch

guard()

_HOME_OF = {
    alias.name: "." * statement.level + (statement.module or "")
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name], __name__), name)
    globals()[name] = value
    return value


__version__ = "0.1.0"
