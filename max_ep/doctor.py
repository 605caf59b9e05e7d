# SPDX-License-Identifier: Apache-2.0
"""``max-ep doctor``: what this machine has, what would be used, what is missing."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
import textwrap
from importlib import metadata
from pathlib import Path

from .memory.shmem_parts import missing_parts
from .memory.symmetric_memory import shared_memory_free
from .plan import human

_WANTED_MAX = "26.7."
_WANTED_SHARED_MEMORY = 1 << 30


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _check_shared_memory() -> tuple[bool, str]:
    free = shared_memory_free()
    if free < 0:
        return True, "size unknown (no /dev/shm); needed for one process a rank"
    left = sorted(path.name for path in Path("/dev/shm").glob("max_ep-*"))
    text = f"{human(free)} free in /dev/shm"
    if left:
        text += (
            f"; {len(left)} segments of groups that run or died before they "
            f"were complete: {', '.join(left[:4])}. If none runs, remove them"
        )
    if free < _WANTED_SHARED_MEMORY:
        text += (
            ", little for one process a rank; enlarge it with `mount -o "
            "remount,size=...` or `docker run --shm-size=...`"
        )
    return free >= _WANTED_SHARED_MEMORY, text


def _wrapped(text: str, indent: int = 0) -> str:
    """Fits a text into the terminal's lines (80 characters if there is none)."""
    return textwrap.fill(
        text,
        shutil.get_terminal_size().columns,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _missing_for_serving() -> list[str]:
    """Returns the packages that ``max[serve]`` asks for and that are not here."""
    asked = [
        re.match(r"[\w.-]+", requirement)[0]
        for requirement in metadata.requires("max") or []
        if re.search(r"extra == .serve.", requirement)
    ]
    return [name for name in asked if not _version(name)]


def run_doctor() -> int:
    """Prints a line for each thing that matters.

    Returns:
        0 if graphs on CPU ranks can run, else 1.
    """
    from max.driver import Accelerator, accelerator_count

    from .cache import cache_dir
    from .extension import mojo_dir, run_mojo
    from .memory.gpu import out_of_reach

    can_run = True

    def say(what: str, is_good: bool, text: str, is_needed: bool = True) -> None:
        nonlocal can_run
        mark = "ok  " if is_good else ("FAIL" if is_needed else "note")
        can_run = can_run and (is_good or not is_needed)
        print(_wrapped(f"{mark} {what:<16} {text}", indent=22))

    python = sys.version_info
    say(
        "python",
        (3, 10) <= python[:2] <= (3, 14),
        f"{platform.python_version()} (3.10 to 3.14)",
    )
    version = _version("max")
    say(
        "max",
        version.startswith(_WANTED_MAX),
        f"{version or 'missing'} (needs {_WANTED_MAX}*: pip install 'max==26.7.*')",
    )
    try:
        say("mojo", True, run_mojo("--version").strip())
    except Exception as error:
        say("mojo", False, f"{error}; reinstall max, which brings it")
    try:
        say("mojo sources", True, str(mojo_dir()))
    except FileNotFoundError as error:
        say("mojo sources", False, str(error))
    cache = cache_dir()
    parent = next(p for p in (cache, *cache.parents) if p.exists())
    say(
        "compile cache",
        os.access(parent, os.W_OK),
        f"{cache} (MAX_EP_CACHE_DIR puts it elsewhere)",
    )
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    say("cpu", True, f"{n_cores or os.cpu_count()} cores for MAX's workers")
    n_gpus = accelerator_count()
    say(
        "gpu",
        True,
        "none" if n_gpus == 0 else f"{n_gpus}, one rank each with target='gpu'",
        is_needed=False,
    )
    if n_gpus > 1:
        try:
            pairs = out_of_reach([Accelerator(i) for i in range(n_gpus)])
        except Exception as error:
            pairs = [f"GPUs that cannot be asked ({error})"]
        say(
            "peer access",
            not pairs,
            "each GPU reaches the others' memory"
            if not pairs
            else f"ranks of one host need it; without: {'; '.join(pairs)}. Hide GPUs "
            "with CUDA_VISIBLE_DEVICES, or use ranks_per_gpu",
            is_needed=False,
        )
    missing = missing_parts()
    say(
        "shmem",
        not missing,
        "GPU ranks of several hosts can join"
        if not missing
        else f"only GPU ranks of several hosts need it: lacks {', '.join(missing)} "
        "(pip install 'max_ep[shmem]')",
        is_needed=False,
    )
    is_good, text = _check_shared_memory()
    say("shared memory", is_good, text, is_needed=False)
    missing = _missing_for_serving() if can_run else []
    say(
        "serving",
        can_run and not missing,
        "`max serve` can run"
        if can_run and not missing
        else f"`max serve` cannot run; lacks {', '.join(missing[:3]) or 'max'}"
        f"{', ...' * (len(missing) > 3)} (uv pip install 'max[serve]==26.7.*')",
        is_needed=False,
    )
    has_torch = importlib.util.find_spec("torch") is not None
    say(
        "torch",
        has_torch,
        f"{_version('torch')}"
        if has_torch
        else "missing; the demo compares with NumPy instead (pip install torch)",
        is_needed=False,
    )
    print()
    if can_run:
        target = "gpu" if n_gpus else "cpu"
        print(f"target='auto' would use: {target}.")
        print(
            _wrapped(
                "protocol='auto' is by_rank where that works, otherwise by_expert; "
                "`max-ep plan` shows it for GPUs."
            )
        )
    else:
        print("Graphs cannot run; fix what is marked FAIL.")
    return 0 if can_run else 1
