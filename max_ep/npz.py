# SPDX-License-Identifier: Apache-2.0
"""Reads ``.npz`` files of placements and statistics, and refuses others in words."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from zipfile import ZipFile

import numpy as np

T = TypeVar("T")

_MOST_UNPACKED = 1 << 28
"""Most bytes of an array in a compressed file."""


def read_npz(path: str | Path, kind: Callable[..., T], maker: str, *names: str) -> T:
    """Makes a ``kind`` of the arrays of these names; an array without dimensions is one
    number. Raises a ``ValueError`` for what ``maker`` has not written."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):  # a device may have no end
                raise ValueError("it is a device or a pipe")
            with ZipFile(file) as packed:
                arrays = {name: packed.getinfo(f"{name}.npy") for name in names}
            for name, info in arrays.items():
                if info.file_size > max(about.st_size, _MOST_UNPACKED):
                    raise ValueError(f"{name} would take {info.file_size} bytes")
            with np.load(file) as saved:
                found = {name: saved[name] for name in names}
        return kind(**{n: x if x.ndim else x[()] for n, x in found.items()})
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"{str(path) or 'no file'} cannot be read: {reason}; name a file of {maker}"
        ) from error
    except Exception as error:  # NumPy and zipfile have many for a damaged file
        is_name = isinstance(error, KeyError)  # whose text is quoted
        reason = error.args[0] if is_name else str(error) or type(error).__name__
        raise ValueError(
            f"{path} is no file of {maker}: {reason}; name one that it wrote"
        ) from error


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file; of a pipe it does not wait for the other end."""
    return os.open(path, flags | os.O_NONBLOCK)
