# SPDX-License-Identifier: Apache-2.0
"""``max-ep doctor``: checks the machine, and names what is missing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
import textwrap
from importlib import metadata
from typing import Any

from .memory.shmem import missing_parts

_WANTED_MAX = "26.7."


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def run_doctor(_: Any = None) -> int:
    """Prints a line per check; returns 0 if graphs can run on CPU, else 1."""
    from max.driver import Accelerator, accelerator_count

    from .cache import cache_dir
    from .extension import mojo_dir, run_mojo
    from .memory.gpu import out_of_reach

    can_run, width = True, shutil.get_terminal_size().columns

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
    version = _version("max")
    text = f"{version or 'missing'} (needs {_WANTED_MAX}*: pip install 'max==26.7.*')"
    say("max", version.startswith(_WANTED_MAX), text)
    for what, ask, remedy in (
        ("mojo", lambda: run_mojo("--version"), "; reinstall max, which brings it"),
        ("mojo sources", mojo_dir, ""),
    ):
        try:
            say(what, True, str(ask()).strip())
        except Exception as error:
            say(what, False, f"{error}{remedy}")
    cache = cache_dir()
    parent = next(p for p in (cache, *cache.parents) if p.exists())
    text, can_write = f"{cache} (MAX_EP_CACHE_DIR puts it elsewhere)", True
    try:  # os.access does not know of folders in which nobody may make files
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        text, can_write = f"{text}: {error.strerror}", False
    say("compile cache", can_write, text)
    say("cpu", True, f"{len(os.sched_getaffinity(0))} cores for MAX's workers")
    n_gpus = accelerator_count()
    say("gpu", True, f"{n_gpus}, one rank each with target='gpu'" if n_gpus else "none")
    if n_gpus > 1:
        try:
            pairs = out_of_reach([Accelerator(i) for i in range(n_gpus)])
        except Exception as error:
            pairs = [f"GPUs that cannot be asked ({error})"]
        text = "each GPU reaches the others' memory"
        if pairs:
            text = (
                f"ranks of one host need it; without: {'; '.join(pairs)}. Hide GPUs "
                "with CUDA_VISIBLE_DEVICES, or use ranks_per_gpu"
            )
        say("peer access", not pairs, text, is_needed=False)
    missing = missing_parts()
    text = "GPU ranks of several hosts can join"
    if missing:
        text = (
            f"only GPU ranks of several hosts need it: lacks {', '.join(missing)} "
            "(pip install 'max_ep[shmem]')"
        )
    say("shmem", not missing, text, is_needed=False)
    of_serve = [
        x for x in metadata.requires("max") or [] if re.search("extra == .serve.", x)
    ]
    names = [re.match(r"[\w.-]+", requirement)[0] for requirement in of_serve]
    missing = [name for name in names if not _version(name)] if can_run else ["max"]
    text = "`max serve` can run"
    if missing:
        text = (
            f"`max serve` cannot run; lacks {', '.join(missing[:3])}"
            f"{', ...' * (len(missing) > 3)} (uv pip install 'max[serve]==26.7.*')"
        )
    say("serving", not missing, text, is_needed=False)
    version = _version("torch")
    text = version or "PyTorch programs need it: pip install torch"
    say("torch", bool(version), text, is_needed=False)
    print()
    if can_run:
        print(f"target='auto' would use: {'gpu' if n_gpus else 'cpu'}.")
        print("'auto' is by_rank where that works; for GPUs see `max-ep plan`.")
    else:
        print("Graphs cannot run; fix what is marked FAIL.")
    return 0 if can_run else 1
