# SPDX-License-Identifier: Apache-2.0
"""One process of a SHMEM group; `test_shmem.py` starts several with `mpirun`.

    shmem_member.py GPUS_PER_PROCESS

Each process stands for a host: it reaches the ranks of the others by puts, not
by the addresses that it could have on one machine. It runs every case whose
group has this many ranks, with every routing, and compares what its own ranks
got with the oracle.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

N_LOCAL = int(sys.argv[1])
N_NODES = int(os.environ["OMPI_COMM_WORLD_SIZE"])
NODE_ID = int(os.environ["OMPI_COMM_WORLD_RANK"])
N_RANKS = N_NODES * N_LOCAL

# SHMEM must see the peers' GPUs on a shared machine; one's own come first.
_MINE = range(NODE_ID * N_LOCAL, (NODE_ID + 1) * N_LOCAL)
_OTHERS = [i for i in range(N_RANKS) if i not in _MINE]
os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(i) for i in [*_MINE, *_OTHERS])
# One host: no network, and no multicast.
os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")

from cases import (  # noqa: E402
    CASES,
    LAYOUT_CASES,
    ROUTINGS,
    Case,
    Expected,
    Inputs,
    expected,
    make_inputs,
)
from harness import (  # noqa: E402
    assert_round_trip,
    flatten,
    fused_round_trip,
    input_types,
    round_trip,
    take_inputs,
    take_outputs,
)
from max.driver import CPU, Accelerator  # noqa: E402
from max.dtype import DType  # noqa: E402
from max.engine import InferenceSession  # noqa: E402
from max.graph import Graph  # noqa: E402

from max_ep import EPBatchManager, EPCommInitializer  # noqa: E402

_TWO = [
    Case("shmem_padded", 2, 5, 3, 80, 7, output_layout="padded"),
    Case("shmem_shared", 2, 6, 2, 128, 7, "fp8", fused_shared_expert=True),
    Case("shmem_large", 2, 12, 8, 2048, 160),
]
_FOUR = [
    Case("shmem_float32", 4, 9, 3, 80, 7, "float32", DType.float32, DType.float32),
    Case("shmem_scaled", 4, 9, 3, 256, 7, "fp8", scales="each"),
    Case("shmem_large_fp8", 4, 64, 8, 7168, 128, "fp8"),
]


def cases() -> dict[str, Case]:
    """The cases of this many ranks that send the dispatched rows back."""
    every = [*CASES.values(), *LAYOUT_CASES.values(), *_TWO, *_FOUR]
    return {c.name: c for c in every if c.n_ranks == N_RANKS and c.sends_rows_back}


def mine(of_all: list) -> list:
    return [of_all[rank] for rank in _MINE]


def main() -> None:
    gpus = [Accelerator(i) for i in range(N_LOCAL)]
    session = InferenceSession(devices=[CPU(), *gpus])
    n_checked = 0
    for build in (round_trip, fused_round_trip):
        types, managers = [], {}
        # What is built and bound is that of this process's ranks alone.
        local = {n: replace(c, n_ranks=N_LOCAL) for n, c in cases().items()}
        for name, case in cases().items():
            config = case.config(
                target="gpu", n_nodes=N_NODES, n_gpus_per_node=N_LOCAL, timeout_s=5
            )
            managers[name] = EPBatchManager(config)
            types += input_types(local[name], config=config)
            types += managers[name].input_types()
        with Graph(f"shmem_{build.__name__}", input_types=types) as graph:
            values, outputs = iter(graph.inputs), []
            for name, manager in managers.items():
                ranks = take_inputs(local[name], values)
                n_values = len(manager.input_types())
                manager.fetch_buffers([next(values) for _ in range(n_values)])
                outputs += [v for r in build(manager, ranks) for v in r]
            graph.output(*outputs)
        model = session.load(graph)
        comms = {n: EPCommInitializer(m.config) for n, m in managers.items()}
        for comm in comms.values():
            comm.ep_init(session)
            assert comm.config.node_id == NODE_ID
        for routing in ROUTINGS:
            given = {n: make_inputs(c, routing) for n, c in cases().items()}
            inputs = []
            for name, comm in comms.items():
                g = given[name]
                own = Inputs(
                    mine(g.tokens), mine(g.ids), mine(g.weights), g.input_scales, None
                )
                inputs += flatten(own, comm.config) + comm.model_inputs()
            outputs = iter(model.execute(*inputs))
            for comm in comms.values():
                comm.check()
            for name, case in cases().items():
                got = take_outputs(local[name], outputs)
                want = expected(case, given[name])
                here = Expected(mine(want.dispatch), mine(want.combine))
                where = f"process {NODE_ID}, {build.__name__}, {name}, {routing}"
                assert_round_trip(where, got, here)
                n_checked += 1
        for comm in comms.values():
            comm.close()
    print(f"process {NODE_ID}: {n_checked} runs are the oracle's", flush=True)


if __name__ == "__main__":
    main()
