# SPDX-License-Identifier: Apache-2.0
"""Lets one process compile the library that MAX makes for itself.

The first ``import max.nn`` of an environment compiles ``kv_cache_ops``, straight into
the file that other processes load. Some of them read it unfinished: "file too short".
With :func:`guard` one process compiles it, and the others wait. An unfinished file that
a killed process left is made again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import struct
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from .cache import lock_in_cache, one_at_a_time, say

_PACKAGE = "max._kv_cache_ops"
_LIBRARY = f"{_PACKAGE}.kv_cache_ops"


class _Guard:
    """Finds MAX's library as MAX's own importer does, in one process at a time."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name != _LIBRARY or not path:
            return None
        from mojo.importer import MojoImporter

        with one_at_a_time(_lock_beside(Path(path[0])), "MAX's kv_cache_ops"):
            spec = MojoImporter().find_spec(name, path, target)
            if spec is not None and not _is_whole_library(spec.origin):
                say(f"{spec.origin} is damaged; it is made again")
                _remove(spec.origin)
                spec = MojoImporter().find_spec(name, path, target)
        return spec


def guard() -> None:
    """From now on, no import of this process reads MAX's library unfinished."""
    if not any(isinstance(finder, _Guard) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Guard())


def prepare() -> None:
    """Has MAX's library compiled if it is missing, without an import of MAX."""
    package = importlib.util.find_spec(_PACKAGE)
    if package is not None:
        _Guard().find_spec(_LIBRARY, package.submodule_search_locations)


def _lock_beside(sources: Path) -> Path:
    """Returns the lock of the place where MAX keeps the library: beside the sources, or
    if this user may not write there, in a cache of the user."""
    folder = sources / "__mojocache__"
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder / "max_ep.lock"
    return lock_in_cache("kv_cache_ops")


def _remove(path: str) -> None:
    try:
        os.remove(path)
    except OSError as error:
        raise ImportError(
            f"max_ep: MAX's library {path} is damaged, and this user cannot remove it: "
            f"{error.strerror}. Reinstall max, or let its owner remove the file"
        ) from error


def _is_whole_library(path: str) -> bool:
    """Returns whether a 64-bit ELF file reaches to the end of its last table."""
    with open(path, "rb") as file:
        header = file.read(64)
        n_bytes = os.fstat(file.fileno()).st_size
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return False
    (table,) = struct.unpack_from("<Q", header, 40)
    entry_bytes, n_entries = struct.unpack_from("<HH", header, 58)
    return 0 < table + entry_bytes * n_entries <= n_bytes
