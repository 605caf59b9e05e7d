# SPDX-License-Identifier: Apache-2.0
"""The kernels of a configuration as a shared library: built once, then loaded.

``mojo/max_ep_c/api.mojo`` is built with ``-D`` for each field of :class:`Settings`.
Libraries are kept beside the precompiled packages (:func:`max_ep.cache.kept`), under
the hash of the sources: of several processes one builds, the others wait and say so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from ..cache import kept
from ..extension import built_folder, extension_path, run_mojo, sizes_in

_RUNTIME = (
    "libMSupportGlobals.so",
    "libAsyncRTRuntimeGlobals.so",
    "libKGENCompilerRTShared.so",
    "libAsyncRTMojoBindings.so",
)
"""What a library needs of the installed ``max-core``; each may need those before."""

I32, I64, BYTES = ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p
_FUNCTIONS = {
    "sizes": (I32, [I64, I32]),
    "open": (I64, [I32, I32, I32, I64, I64]),
    "connect": (None, [I64, I64]),
    "use_sms": (None, [I64, I32]),
    "clear": (I32, [I64]),
    "close": (None, [I64]),
    "last_error": (I32, [I64, I64, I32]),
    "failure": (I32, [I64, I64]),
    "dispatch": (I32, [BYTES]),
    "combine": (I32, [BYTES]),
    "watch": (I32, [I64, I64, I32, I64]),
}


_NAMES = {
    "experts": "num_experts",
    "tokens": "num_max_dispatch_tokens_per_rank",
    "packed_scales": "use_ue8m0",
    "masks": "enable_shrink",
}
"""What callers of ``low_latency_dispatch`` know as arguments of other names."""


@dataclass(frozen=True)
class Settings:
    """A configuration, with the names of ``api.mojo``. All fields are in the library's
    name, and ranks compare all: no field may differ."""

    target: str  # "cpu", or a GPU's architecture such as "sm_90a"
    format: str
    hidden: int
    combine: str
    combine_hidden: int
    experts: int
    ranks: int
    top_k: int
    tokens: int
    packed_scales: bool = False
    wide_ids: bool = False
    masks: bool = False
    rows: str = "padded"
    scales: int = 0
    partial: str = "bfloat16"
    alignment: int = 0
    sums: bool = False
    """Padded rows: whether their rank adds up those of a token."""
    mapped: int = 0
    """Ranks of a host, if there are several; a link or SHMEM reaches the others."""
    relays: bool = False
    """Whether tokens and sums cross once to each other host, where a rank relays them.
    """

    @property
    def uses_shmem(self) -> bool:
        return self.mapped > 0 and self.target != "cpu"

    def defines(self) -> list[str]:
        options = []
        for name, value in asdict(self).items():
            if name == "target":
                value = "cpu" if value == "cpu" else "gpu"
            if value is True:
                options += ["-D", name.upper()]
            elif value is not False:
                options += ["-D", f"{name.upper()}={value}"]
        if self.target != "cpu":
            options += ["--target-accelerator", self.target]
            if platform.machine() == "x86_64":  # may run on another CPU than this
                options += ["--target-cpu", "x86-64-v2"]
        return options

    def facts(self) -> str:
        """Says every field, as callers know it: what all ranks must have alike."""
        names = _NAMES if self.wide_ids else {}
        facts = asdict(self).items()
        return ", ".join(f"{names.get(name, name)}={value}" for name, value in facts)

    def name(self) -> str:
        words = [str(value) for value in asdict(self).values()]
        host = _host_name() if self.target == "cpu" else platform.machine()
        return "-".join(["torch", *words, host])


@functools.cache
def _host_name() -> str:
    """Returns a name for the kind of CPU: code of CPU ranks is compiled for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    words = ("model name", "flags", "CPU part", "Features")
    about = sorted({line for line in lines if line.startswith(words)})
    text = "\n".join([platform.machine(), *about])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def build(settings: Settings) -> Path:
    """Returns the library of a configuration; compiles it if there is none."""

    def make(path: Path) -> None:
        # Precompiled sources save a third of the time.
        where = "-I", str(extension_path(with_shmem=settings.uses_shmem).parent)
        command = ("build", "--emit", "shared-lib", *where, "max_ep_c/api.mojo")
        run_mojo(*command, *settings.defines(), "-o", str(path))

    return kept(built_folder(settings.uses_shmem) / f"{settings.name()}.so", make)


def build_all(wanted: Sequence[Settings]) -> list[Path]:
    with ThreadPoolExecutor(len(wanted)) as pool:
        return list(pool.map(build, wanted))


@functools.cache
def load(settings: Settings) -> SimpleNamespace:
    """Returns the functions of a library, by their names without ``max_ep_``; ``sizes``
    is what that function says."""
    # By full path: a library names the folder it was built with.
    folder = Path(str(metadata.distribution("max-core").locate_file("modular/lib")))
    for name in _RUNTIME:
        ctypes.CDLL(str(folder / name))
    path, functions = build(settings), SimpleNamespace()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # such as where a file system forbids it
        raise RuntimeError(
            f"max_ep: the library is whole, but does not load: {error}. Set "
            "MAX_EP_CACHE_DIR to a folder on a file system without noexec"
        ) from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"max_ep_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(functions, name, function)
    functions.sizes = sizes_in(text_of(functions.sizes))
    return functions


def text_of(ask: Callable[[int, int], int]) -> str:
    """Returns what a function of a library copies to an address, of any length."""
    n_bytes = ask(0, 0)
    buffer = ctypes.create_string_buffer(n_bytes)
    ask(ctypes.addressof(buffer), n_bytes)
    return buffer.raw.decode()


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
