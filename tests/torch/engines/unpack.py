# SPDX-License-Identifier: Apache-2.0
"""Unpacks the Python files of wheels: `python -m tests.torch.engines.unpack FROM TO`.

Compiled parts take gigabytes, and no class under test needs them.
"""

import sys
import zipfile
from pathlib import Path


def unpack(wheels: Path, to: Path) -> None:
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            names = packed.namelist()
            suffixes = (".py", ".json", "/METADATA")
            packed.extractall(to, [name for name in names if name.endswith(suffixes)])


if __name__ == "__main__":
    unpack(*map(Path, sys.argv[1:]))
