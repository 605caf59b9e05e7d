# SPDX-License-Identifier: Apache-2.0
"""One of several processes that drive GPUs; `test_shmem.py` starts them.

    mpirun -np N_PROCESSES python -m tests.gpu.shmem_member GPUS_PER_PROCESS WHAT
    MAX_EP_GROUP=NAME MAX_EP_NODE_ID=i python -m tests.gpu.shmem_member 1 N_PROCESSES

With `mpirun` each process stands for a host: it reaches the ranks of the others by
puts. Without, they are processes of one host and map each other's memory. Each runs
every case whose group has this many ranks, with every routing, and compares what its
own ranks got with the oracle.
"""

from __future__ import annotations

import os
import sys

N_LOCAL = int(sys.argv[1])
IS_ONE_HOST = "MAX_EP_GROUP" in os.environ
N_NODES = int(sys.argv[2] if IS_ONE_HOST else os.environ["OMPI_COMM_WORLD_SIZE"])
NODE_ID = int(os.environ["MAX_EP_NODE_ID" if IS_ONE_HOST else "OMPI_COMM_WORLD_RANK"])
N_RANKS = N_NODES * N_LOCAL

# SHMEM must see the peers' GPUs on a shared machine; one's own come first.
_MINE = range(NODE_ID * N_LOCAL, (NODE_ID + 1) * N_LOCAL)
_OTHERS = [i for i in range(N_RANKS) if i not in _MINE]
os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(i) for i in [*_MINE, *_OTHERS])
# One host: no network, and no multicast.
os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")

from max.driver import CPU, Accelerator  # noqa: E402
from max.dtype import DType  # noqa: E402
from max.engine import InferenceSession  # noqa: E402

from max_ep import EPConfig  # noqa: E402
from tests.harness import Groups, assert_round_trip, fused_round_trip, round_trip  # noqa: E402
from tests.hosts.part import Part  # noqa: E402
from tests.oracle.cases import (  # noqa: E402
    BY_RANK_CASES,
    CAPPED_ON_TWO,
    CASES,
    LAYOUT_CASES,
    SUMS_CASES,
    Case,
    in_protocols,
)
from tests.oracle.drawn import ROUTINGS, Inputs, make_inputs  # noqa: E402
from tests.oracle.oracle import Expected, expected  # noqa: E402

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
_RELAY = dict(protocol="by_rank", combine_mode="sums", hierarchical=True)
_RELAYED = [
    Case("shmem_relay", 4, 23, 5, 80, 12, **_RELAY, fused_shared_expert=True),
    Case("shmem_relay_fp8", 4, 23, 9, 256, 7, partial="fp8", **_RELAY),
    Case("shmem_relay_large", 4, 64, 8, 2048, 160, **_RELAY),
]


# The cases of this many ranks.
_BY_RANK = [x for x in in_protocols([*_TWO, *_FOUR]).values() if not x.scales]
_EVERY = [*CASES.values(), *LAYOUT_CASES.values(), *_TWO, *_FOUR]
if not IS_ONE_HOST:
    capped = in_protocols(CAPPED_ON_TWO).values()
    _EVERY += [*BY_RANK_CASES.values(), *SUMS_CASES.values(), *_BY_RANK]
    _EVERY += [*_RELAYED, *(x for x in capped if x.protocol == "by_rank")]
WHAT = "by_expert-rows" if IS_ONE_HOST else sys.argv[2]
"""Protocol and combine of the cases, and whether ranks relay."""


def kind(case: Case) -> str:
    return f"{case.protocol}-{case.combine_mode}{'-relayed' * case.hierarchical}"


ALL = {
    c.name: c
    for c in _EVERY
    if c.n_ranks == N_RANKS and kind(c) == WHAT and not c.use_allreduce
}


def config_of(local: Case) -> EPConfig:
    where = dict(target="gpu", n_nodes=N_NODES, n_gpus_per_node=N_LOCAL)
    return ALL[local.name].config(**where, timeout_s=5)


def mine(of_all: list) -> list:
    return [of_all[rank] for rank in _MINE]


def main() -> None:
    gpus = [Accelerator(i) for i in range(N_LOCAL)]
    session = InferenceSession(devices=[CPU(), *gpus])
    # What is built and bound is that of this process's ranks alone.
    local = {name: Part.of(case, N_LOCAL) for name, case in ALL.items()}
    n_checked = 0
    for build in (round_trip, fused_round_trip):
        name, how = f"shmem_{build.__name__}", dict(config=config_of, build=build)
        groups = Groups(session, name, local, **how)
        for comm in groups.comms.values():
            assert comm.config.node_id == NODE_ID
        for routing in ROUTINGS:
            given = {name: make_inputs(case, routing) for name, case in ALL.items()}
            own = {
                name: Inputs(
                    mine(g.tokens),
                    mine(g.ids),
                    mine(g.weights),
                    g.input_scales,
                    g.expert_rows and mine(g.expert_rows),
                )
                for name, g in given.items()
            }
            got = groups.run(own)
            for name, case in ALL.items():
                want = expected(case, given[name], N_LOCAL)
                here = Expected(mine(want.dispatch), mine(want.combine))
                where = f"process {NODE_ID}, {build.__name__}, {name}, {routing}"
                assert_round_trip(where, got[name], here)
                n_checked += 1
        groups.close()
    print(f"process {NODE_ID}: {n_checked} runs are the oracle's", flush=True)


if __name__ == "__main__":
    main()
