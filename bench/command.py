# SPDX-License-Identifier: Apache-2.0
"""How a benchmark says, in what it saves, by which command it ran."""

from __future__ import annotations

import shlex
import sys


def said_command(module: str) -> str:
    """Returns the command line, without a machine's folders.

    Args:
        module: What ``python -m`` ran.
    """
    arguments = ["DIR" if a.startswith("/") else a for a in sys.argv[1:]]
    return shlex.join(["python", "-m", module, *arguments])
