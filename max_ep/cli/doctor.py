# SPDX-License-Identifier: Apache-2.0
"""``max-ep doctor``: checks the machine, and names what is missing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import textwrap
from importlib import metadata
from typing import Any

from .. import install
from ..cache import cache_dir, check_folder
from ..plural import counted
from ..shmem_parts import missing_parts, versions

_WANTED_MAX = "26.7."


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def run_doctor(_: Any = None) -> int:
    """Prints a line per check; returns 0 if graphs can run on CPU, else 1."""
    can_run, width = True, max(60, shutil.get_terminal_size().columns)

    def say(what: str, is_good: bool, text: str, is_needed: bool = True) -> None:
        nonlocal can_run
        mark = "ok  " if is_good else ("FAIL" if is_needed else "note")
        can_run = can_run and (is_good or not is_needed)
        lines = textwrap.wrap(
            text, width - 22, break_long_words=False, break_on_hyphens=False
        )
        print(f"{mark} {what:<16}", f"\n{'':22}".join(lines))

    fits = (3, 10) <= sys.version_info[:2] <= (3, 14)
    say("python", fits, f"{platform.python_version()} (3.10 to 3.14)")
    version, n_gpus = _version("max"), 0
    text, is_good = version or "missing", version.startswith(_WANTED_MAX)
    try:
        from max.driver import accelerator_count

        n_gpus = accelerator_count()
    except Exception as error:
        text, is_good = f"{text}, which cannot be imported: {error}", False
    say("max", is_good, f"{text} (needs {_WANTED_MAX}*: {install.MAX})")

    def mojo(name: str, *arguments: str) -> str:
        from .. import extension

        return str(getattr(extension, name)(*arguments)).strip()

    for what, name, arguments, remedy in (
        ("mojo", "run_mojo", ["--version"], "; reinstall max, which brings it"),
        ("mojo sources", "mojo_dir", [], ""),
    ):
        try:
            say(what, True, mojo(name, *arguments))
        except Exception as error:
            say(what, False, f"{error}{remedy}")
    try:
        cache = check_folder(cache_dir())
        say("compile cache", True, f"{cache} (MAX_EP_CACHE_DIR puts it elsewhere)")
    except RuntimeError as error:
        say("compile cache", False, str(error))
    cores = counted(len(os.sched_getaffinity(0)), "core")
    say("cpu", True, f"{cores} for MAX's workers")
    say("gpu", True, f"{n_gpus}, one rank each with target='gpu'" if n_gpus else "none")
    if n_gpus > 1:
        say("peer access", *_peer_access(n_gpus), is_needed=False)
    for by_store, how in ((True, "from PyTorch, or MAX_EP_STORE"), (False, "by MPI")):
        missing = missing_parts(by_store)
        if not missing:
            text = f"GPU ranks of several hosts can join {how}: {versions(by_store)}"
        else:
            text = (
                f"only GPU ranks of several hosts need it, that join {how}: lacks "
                f"{', '.join(missing)} ({install.SHMEM})"
            )
        say("shmem", not missing, text, is_needed=False)
    missing = _missing_of_serve() if can_run else ["max"]
    text = "`max serve` can run"
    if missing:
        text = (
            f"`max serve` cannot run; lacks {', '.join(missing[:3])}"
            f"{', ...' * (len(missing) > 3)} ({install.SERVE})"
        )
    say("serving", not missing, text, is_needed=False)
    version = _version("torch")
    text = version or f"PyTorch programs need it: {install.TORCH}"
    say("torch", bool(version), text, is_needed=False)
    print()
    if can_run:
        print(f"target='auto' would use: {'gpu' if n_gpus else 'cpu'}.")
        print("'auto' is by_rank where that works; for GPUs see `max-ep plan`.")
    else:
        print("Graphs cannot run; fix what is marked FAIL.")
    return 0 if can_run else 1


def _peer_access(n_gpus: int) -> tuple[bool, str]:
    """Returns whether each GPU reaches the others' memory, and what to say."""
    from max.driver import Accelerator

    from ..memory.gpu import out_of_reach

    try:
        pairs = out_of_reach([Accelerator(i) for i in range(n_gpus)])
    except Exception as error:
        pairs = [f"GPUs that cannot be asked ({error})"]
    if not pairs:
        return True, "each GPU reaches the others' memory"
    return False, (
        f"ranks of one host need it; without: {'; '.join(pairs)}. Hide GPUs "
        "with CUDA_VISIBLE_DEVICES, or use ranks_per_gpu"
    )


def _missing_of_serve() -> list[str]:
    """Names the packages of MAX's extra for serving that are not installed."""
    wanted = metadata.requires("max") or []
    of_serve = [x for x in wanted if re.search("extra == .serve.", x)]
    names = [re.match(r"[\w.-]+", requirement)[0] for requirement in of_serve]
    return [name for name in names if not _version(name)]
