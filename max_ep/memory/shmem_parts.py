# SPDX-License-Identifier: Apache-2.0
"""Finds what SHMEM needs on a machine; see ``shmem.py``."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path

BITCODE_PACKAGE = "nvidia-nvshmem-cu13"
"""PyPI package whose device bitcode is built into the kernels."""

MPI_LIBRARY_VARIABLE = "MAX_EP_MPI_LIBRARY"
"""Environment variable that names Open MPI's ``libmpi.so.40``."""


def _find(package: str, path: str) -> Path | None:
    """Returns a file of an installed namespace package, or None."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else ()
    places = [Path(folder, path) for folder in folders]
    return next((place for place in places if place.is_file()), None)


def bitcode_path() -> Path | None:
    """Returns NVSHMEM's device bitcode, or None if it is not installed."""
    return _find("nvidia", "nvshmem/lib/libnvshmem_device.bc")


def host_library() -> Path | None:
    """Returns MAX's NVSHMEM host library, or None."""
    return _find("modular", "lib/libnvshmem_host.so.3")


def mpi_library() -> Path | None:
    """Returns Open MPI's library, or None if it is not found."""
    if MPI_LIBRARY_VARIABLE in os.environ:
        path = Path(os.environ[MPI_LIBRARY_VARIABLE])
        return path if path.is_file() else None
    folders = [Path(sys.prefix) / "lib"]
    folders += [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    for folder in folders:
        if (folder / "libmpi.so.40").is_file():
            return folder / "libmpi.so.40"
    return None


def missing_parts() -> list[str]:
    """Returns what SHMEM lacks on this machine; empty if it can be used."""
    missing = []
    if bitcode_path() is None:
        missing.append(f"the device bitcode of {BITCODE_PACKAGE}")
    if host_library() is None:
        missing.append("MAX's libnvshmem_host.so.3 (package max-shmem-libs)")
    if mpi_library() is None:
        missing.append(f"Open MPI's libmpi.so.40 ({MPI_LIBRARY_VARIABLE} names it)")
    return missing


def check_installed() -> None:
    """Raises with what is missing, if SHMEM cannot be used here."""
    missing = missing_parts()
    if missing:
        raise RuntimeError(
            "max_ep: n_nodes > 1 with target='gpu' goes through SHMEM, which lacks "
            + " and ".join(missing)
            + "; pip install 'max_ep[shmem]'"
        )


def bitcode_version() -> str:
    """Returns the version of the installed bitcode package."""
    return metadata.version(BITCODE_PACKAGE)
