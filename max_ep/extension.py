# SPDX-License-Identifier: Apache-2.0
"""Finds the Mojo sources, precompiles them once, and runs Mojo programs.

A checkout holds the sources in ``mojo/``; the wheel carries the same folder as
``max_ep/_mojo``. The path of a precompiled package contains a hash of the sources and
the compiler's version. MAX's compile cache is keyed by the path, so it hits too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from mojo.run import subprocess_run_mojo

from .cache import cache_dir, kept
from .shmem_parts import BITCODE_PACKAGE, bitcode_path, check_installed

if TYPE_CHECKING:
    from max.dtype import DType
    from max.graph import DeviceRef, TensorType, TensorValue, Value

_TIMEOUT_VARIABLE = "MAX_EP_COMPILE_TIMEOUT_S"
"""Seconds that a compilation may take; tests set it, for they keep machines busy."""


@functools.cache
def mojo_dir() -> Path:
    """Returns the folder that holds the Mojo package ``max_ep``."""
    here = Path(__file__).resolve().parent
    for folder in (here / "_mojo", here.parent / "mojo"):
        if (folder / "max_ep" / "__init__.mojo").is_file():
            return folder
    raise FileNotFoundError(
        f"max_ep: no Mojo sources beside {here}; reinstall the package"
    )


@functools.cache
def sources_hash() -> str:
    digest = hashlib.sha256(metadata.version("mojo-compiler").encode())
    for source in sorted(mojo_dir().rglob("*.mojo")):
        digest.update(str(source.relative_to(mojo_dir())).encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def run_mojo(*args: str) -> str:
    """Runs the bundled ``mojo`` in the sources' folder; returns what it printed."""
    timeout_s = float(os.environ.get(_TIMEOUT_VARIABLE) or 300)
    how = dict(capture_output=True, text=True, timeout=timeout_s)
    try:
        done = subprocess_run_mojo(list(args), cwd=mojo_dir(), **how)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"max_ep: mojo {' '.join(args)} took more than {timeout_s:g} s. If the "
            f"machine is slow or busy, set {_TIMEOUT_VARIABLE} to more"
        ) from error
    if done.returncode != 0:
        raise RuntimeError(f"max_ep: mojo {' '.join(args)} failed:\n{done.stderr}")
    return done.stdout


@functools.cache
def region_sizes(*words: str) -> SimpleNamespace:
    """Asks Mojo for sizes, and for places of words: only ``layout.mojo`` knows them.

    Returns what ``layout_query.mojo`` prints, which runs once for a configuration.
    """

    def ask(path: Path) -> None:
        path.write_text(run_mojo("run", "-I", ".", "layout_query.mojo", *words))

    name = hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]
    answer = kept(cache_dir() / sources_hash() / f"layout-{name}.json", ask)
    return sizes_in(answer.read_text())


def sizes_in(text: str) -> SimpleNamespace:
    """Reads what ``sizes_of`` in ``mojo/max_ep/launch/sizes.mojo`` says."""
    return json.loads(text, object_hook=lambda named: SimpleNamespace(**named))


def built_folder(with_shmem: bool = False) -> Path:
    """Returns where what is built of these sources is kept; what has SHMEM's device
    functions is of their version."""
    folder = cache_dir() / sources_hash()
    if not with_shmem:
        return folder
    if bitcode_path() is None:
        check_installed(by_store=True)
    return folder / f"shmem-{metadata.version(BITCODE_PACKAGE)}"


def extension_path(package: str = "max_ep", with_shmem: bool = False) -> Path:
    """Returns the path of a precompiled Mojo package, for ``custom_extensions``.

    Builders of this library load it into the graph by themselves. If it is missing, the
    call compiles it, which takes seconds; other processes wait. ``with_shmem`` builds
    SHMEM's device functions in (``EPConfig.uses_shmem``).
    """
    folder = built_folder(with_shmem)
    options = ["--bitcode-libs", str(bitcode_path())] if with_shmem else []
    # -I: one package may import another. A relative input keeps machine paths out of
    # the bytes.
    command = ("precompile", package, "-I", ".", *options, "-o")
    target = folder / f"{package}.mojoc"
    return kept(target, lambda path: run_mojo(*command, str(path)))


def add_op(
    name: str,
    device: DeviceRef,
    values: Sequence[Value],
    out_types: Sequence[TensorType],
    package: str = "max_ep",
    with_shmem: bool = False,
    **parameters: bool | int | str | DType,
) -> list[TensorValue]:
    """Adds an op of an :func:`extension_path` to the current graph; it changes the
    buffers among its values, if there are any."""
    from max.graph import BufferValue, Graph, KernelLibrary, ops

    path, graph = extension_path(package, with_shmem), Graph.current
    if path not in (paths := graph.kernel_libraries_paths):
        # MAX gives its library to later graphs of the same packages, too. One more
        # package in it would make them others, which MAX's cache does not have.
        graph._kernel_library = KernelLibrary(paths)
        graph._import_kernels([path])
    changes = any(isinstance(value, BufferValue) for value in values)
    call = ops.inplace_custom if changes else ops.custom
    results = call(f"max_ep.{name}", device, values, out_types, parameters)
    return [result.tensor for result in results]
