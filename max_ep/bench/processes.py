# SPDX-License-Identifier: Apache-2.0
"""Compiles or measures configurations, each in a process of its own.

The process is killed after a limit: a hang costs the rest of its rows only.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cases import FROM_TORCH, LIBRARIES, Case, Config
from .runs import write


def in_child(function: Callable, arguments: tuple, limit_s: float) -> str:
    """Runs a function in a process of its own; says why it did not end, or nothing."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_child, args=(function, arguments))
    process.start()
    process.join(limit_s)
    if process.exitcode == 0:
        return ""
    if process.exitcode is not None:
        return f"the process ended with {process.exitcode}"
    try:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
    except ProcessLookupError:
        process.kill()
    process.join()
    return f"killed after {limit_s:.0f} s"


def _child(function: Callable, arguments: tuple) -> None:
    os.setsid()
    function(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    # With virtual devices the interpreter's own exit aborts now and then.
    os._exit(0)


def compile_graphs(config: Config, forms: list[str], arch: str, folder: Path) -> None:
    """Compiles for GPUs that need not be there; the graphs are in a folder of the
    configuration's name."""
    from .peer_graphs import compile_peer, use_virtual_devices

    use_virtual_devices(arch, config.n_ranks)
    for line in compile_peer(config, forms, folder / config.name):
        print(f"  {line}")


def set_up_max(config: Config) -> None:
    """Lets MAX compile, into its cache, the graphs that its initializer runs."""
    from max.engine import InferenceSession

    from .peer_graphs import peer_of

    peer = peer_of(config)
    peer.join(InferenceSession(devices=peer.devices))


def build_library(config: Config, arch: str) -> None:
    """Compiles the kernels that ``max_ep.torch`` needs, as ``max-ep build``."""
    from ..torch.calls import ElasticCall, LowLatencyCall
    from ..torch.library import build

    shape = config.shape
    sizes = dict(hidden=shape.hidden_size, experts=shape.n_experts, top_k=shape.top_k)
    group = dict(ranks=config.n_ranks, tokens=config.max_tokens, target=arch)
    how = LIBRARIES[config.peer]
    if how == "plain":
        settings = ElasticCall(**sizes, **group).rows()
    else:
        settings = LowLatencyCall(**sizes, **group, combine_mode=how).settings()
    print(build(settings))


def build_one_sided() -> None:
    """Compiles what FlashInfer otherwise compiles when it is first called."""
    from .other_layers import OneSided

    OneSided.build()


def measure(todo: list[Case], options: Any, results: Path) -> None:
    """Measures cases of one configuration, or of one peer from PyTorch; ``options`` has
    ``samples``, ``replays``, ``eager``, and ``mefs``: compiled graphs, or None."""
    from .peer_graphs import peer_of

    if todo[0].config.peer in FROM_TORCH:
        from . import peer_torch

        peer_torch.run(todo, options, results)
        return
    peer = peer_of(todo[0].config)
    peer.open(options.mefs)
    for case in todo:
        try:
            result = peer.measure(case, options.samples, options.replays, options.eager)
        except Exception as e:
            result = {"error": f"{type(e).__name__}: {e} / {e.__cause__}"[:800]}
        write(results, case, result)
    peer.close()
