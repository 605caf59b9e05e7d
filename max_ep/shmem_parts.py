# SPDX-License-Identifier: Apache-2.0
"""What SHMEM needs, and which of it is installed. It loads no library."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from importlib import metadata
from pathlib import Path

from . import install

BITCODE_PACKAGE = "nvidia-nvshmem-cu13"
"""PyPI package whose device bitcode is built into the kernels."""

_DEVICE_FUNCTIONS = "libnvshmem_device.bc", "libnvshmem_device_sm_80.bc"
"""NVSHMEM up to 3.6.5 has one file for all architectures, later ones a file for each.
Functions for sm_80 run on every later GPU; those for sm_90 need PTX ISA 8.6, and Mojo
emits 8.5 (docs/upstream.md)."""

_MAPS = Path("/proc/self/maps")

MPI_LIBRARY_VARIABLE = "MAX_EP_MPI_LIBRARY"
"""Environment variable that names Open MPI's ``libmpi.so.40``."""


def _first_file(*places: Path) -> Path | None:
    return next((place for place in places if place.is_file()), None)


def _find(package: str, path: str) -> Path | None:
    """Returns a file of an installed namespace package, or None."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else ()
    return _first_file(*(Path(folder, path) for folder in folders))


def bitcode_path() -> Path | None:
    """Returns NVSHMEM's device bitcode, or None if it is not installed."""
    found = (_find("nvidia", f"nvshmem/lib/{name}") for name in _DEVICE_FUNCTIONS)
    return next(filter(None, found), None)


def versions(by_store: bool) -> str:
    """Says which NVSHMEM the device functions and the host library are of, for
    processes that meet in a store, or through MPI."""
    path, host = bitcode_path(), wheel_library() if by_store else host_library()
    assert path is not None and host is not None
    device = metadata.version(BITCODE_PACKAGE)
    return (
        f"device functions of NVSHMEM {device} ({path.name}), host library "
        f"{_version_of(host)}"
    )


def host_library() -> Path | None:
    """Returns MAX's NVSHMEM host library, or None."""
    return _find("modular", "lib/libnvshmem_host.so.3")


def wheel_library() -> Path | None:
    """Returns the host library of :data:`BITCODE_PACKAGE`, or None. MAX's has no plug-
    in that lets processes meet without MPI, and hangs with that of the wheel."""
    return _find("nvidia", "nvshmem/lib/libnvshmem_host.so.3")


def _version_of(library: Path) -> str:
    said = re.search(rb"NVSHMEM v(\d[\d.]*)", library.read_bytes())
    return said[1].decode() if said else "of an unknown version"


def library_to_join() -> Path:
    """Returns the host library for processes that meet in a store: that of the wheel,
    or another that this process has loaded, as torch may, if it is of that version."""
    own = wheel_library()
    assert own is not None
    maps = _MAPS.read_text().splitlines()
    names = {line.split(None, 5)[-1] for line in maps if "/libnvshmem_host.so" in line}
    for other in map(Path, sorted(names)):
        if not other.is_file() or other.samefile(own):
            continue
        versions = _version_of(own), _version_of(other)
        if versions[0] != versions[1]:
            raise RuntimeError(
                f"max_ep: this process has loaded {other}, NVSHMEM {versions[1]}, and "
                f"{BITCODE_PACKAGE} is {versions[0]}; install the version that is "
                f"loaded, {BITCODE_PACKAGE}=={versions[1]}"
            )
        return other
    return own


def mpi_library() -> Path | None:
    """Returns Open MPI's library, or None if it is not found."""
    if MPI_LIBRARY_VARIABLE in os.environ:
        return _first_file(Path(os.environ[MPI_LIBRARY_VARIABLE]))
    more = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders = [Path(sys.prefix, "lib"), *filter(None, more)]
    return _first_file(*(Path(folder, "libmpi.so.40") for folder in folders))


def missing_parts(by_store: bool = False) -> list[str]:
    """Returns what SHMEM lacks on this machine; empty if it can be used, by processes
    that meet in a store, or through MPI."""
    parts = {f"the device bitcode of {BITCODE_PACKAGE}": bitcode_path()}
    if by_store:
        parts[f"the libnvshmem_host.so.3 of {BITCODE_PACKAGE}"] = wheel_library()
    else:
        named = f"Open MPI's libmpi.so.40 ({MPI_LIBRARY_VARIABLE} names it)"
        parts["MAX's libnvshmem_host.so.3 (package max-shmem-libs)"] = host_library()
        parts[named] = mpi_library()
    return [name for name, path in parts.items() if path is None]


def check_installed(by_store: bool = False) -> None:
    """Raises with what is missing, if SHMEM cannot be used here."""
    if missing := missing_parts(by_store):
        raise RuntimeError(
            "max_ep: GPU ranks of several hosts go through SHMEM, which lacks "
            f"{' and '.join(missing)}; {install.SHMEM}"
        )
