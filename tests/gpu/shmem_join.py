# SPDX-License-Identifier: Apache-2.0
"""Joins NVSHMEM by a store, as far as that goes on this machine.

    python -m tests.gpu.shmem_join NODE_ID N_NODES HOST:PORT

Without a GPU the library ends the process, once all have exchanged their addresses.
"""

import os
import sys

from max_ep.memory import shmem
from max_ep.processes.rendezvous import NamedStore

if __name__ == "__main__":
    node, n_nodes, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    group = shmem.StoreGroup(NamedStore(address), node, n_nodes, 60.0)
    by_store = shmem._ByStore(group)
    assert group.meet(b"%d" % node) == [b"%d" % i for i in range(n_nodes)]
    how, mine = by_store.attributes(0, 1)
    theirs = shmem._attributes(0, 0, -1, -1)
    given = node, n_nodes, by_store._id, theirs
    assert by_store.shmem.nvshmemx_set_attr_uniqueid_args(*given) == 0
    assert mine.raw == theirs.raw
    print("attributes are the library's", flush=True)
    by_store.shmem.nvshmemx_hostlib_init_attr(how, mine)
    os._exit(0)
