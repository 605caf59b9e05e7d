# SPDX-License-Identifier: Apache-2.0
"""Prints what MAX makes of two exchanges whose halves overlap: calls and copies.

Takes an empty folder, and whether row tables go to a matmul, `read` or `unread`. GPUs
are virtual, and no kernel is compiled: MAX stops at the Mojo code of the graph. A
program of its own, since virtual devices are for a whole process.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import NoReturn

import max.driver
from cases import CASES
from max.driver import Accelerator
from max.dtype import DType
from max.engine import CompilationStopped, InferenceSession
from max.graph import Graph, TensorType, ops
from max.nn.kernels import grouped_matmul_ragged

from max_ep import EPBatchManager

CASE = CASES["two_ranks"]


def build(tables_are_read: bool) -> Graph:
    """Builds them for both ranks; the results are the sums of the second one."""
    config = CASE.config(target="gpu", protocol="rank_slots", combine_mode="reduced")
    manager = EPBatchManager(config)
    ranks = range(config.n_gpus_per_node)
    types = [
        TensorType(dtype, ["n_tokens", columns], config.device(rank))
        for dtype, columns in (
            (DType.bfloat16, config.hidden_size),
            (DType.int32, config.top_k),
            (DType.float32, config.top_k),
        )
        for rank in ranks
    ]
    with Graph("halves", input_types=[*types, *manager.input_types()]) as graph:
        manager.fetch_buffers(graph.inputs[len(types) :])
        given = [value.tensor for value in graph.inputs[: len(types)]]
        n = len(ranks)
        x, ids, weights = (given[i : i + n] for i in range(0, len(given), n))
        for _ in range(2):
            for rank in ranks:
                manager.ep_dispatch_async(
                    x[rank], ids[rank], rank, router_weight=weights[rank]
                )
            for rank in ranks:
                rows, offsets, experts, stats, *_ = manager.ep_dispatch_wait(rank)
                if tables_are_read:
                    matrices = ops.broadcast_to(
                        ops.constant(1.0, DType.bfloat16, config.device(rank)),
                        [3, config.hidden_size, config.hidden_size],
                    )
                    rows = grouped_matmul_ragged(
                        rows, matrices, offsets, experts, stats
                    )
                manager.ep_combine_async(rows, rank)
            x = [manager.ep_combine_wait(None, rank) for rank in ranks]
        graph.output(*x)
    return graph


def main() -> NoReturn:
    """Prints the calls of a device's function in order, one a line."""
    folder, tables = sys.argv[1:]
    max.driver.set_virtual_device_api("cuda")
    max.driver.set_virtual_device_target_arch("sm_90a")
    max.driver.set_virtual_device_count(CASE.n_ranks)
    InferenceSession.debug.ir_output_dir = folder
    InferenceSession.debug.pre_jit = True
    session = InferenceSession(
        devices=[Accelerator(rank) for rank in range(CASE.n_ranks)],
        export_mefs=Path(folder) / "mefs",
    )
    try:
        session.load(build(tables == "read"))
    except CompilationStopped:
        pass
    (code,) = Path(folder).glob("*.mojo")
    for line in code.read_text().splitlines():
        call = re.match(r" +(?:\w[\w.]*\.)?(__\w+|\w+device_to_device)\b", line)
        if call:
            print(call[1])
    sys.stdout.flush()
    # MAX's threads of a compilation that was stopped may end the process by an abort
    # ("terminate called without an active exception") if it ends as usual.
    os._exit(0)


if __name__ == "__main__":
    main()
