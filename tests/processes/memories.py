# SPDX-License-Identifier: Apache-2.0
"""Memory of nodes in one process, and in bare Python processes that map it.

No MAX here, so a peer starts in a moment. Where it does not matter that peers are
processes, they are threads. Fixtures: `conftest.py`.
"""

import ctypes
import gc
import subprocess
from concurrent.futures import ThreadPoolExecutor

from max_ep.memory.symmetric_memory import SharedMemory

REGION_BYTES = 3 * 4096 + 256
"""Not a whole number of pages."""

STATUS_BYTES = 256
TIMEOUT_S = 60.0

PRELUDE = """
import sys
from max_ep.memory.symmetric_memory import SharedMemory
group = sys.argv[1]
def say(*words):
    print(*words, flush=True)
"""

HANG = f"""
memory = SharedMemory(group, 1, 2, 1, {REGION_BYTES}, "hidden_size=8", 256)
say("there")
sys.stdin.readline()
memory.connect({TIMEOUT_S})
say("connected")
"""


def hear(peer: subprocess.Popen) -> str:
    return peer.stdout.readline().strip()


def make(group, node_id, n_nodes=2, n_local_ranks=1, fingerprint="hidden_size=8"):
    sizes = n_nodes, n_local_ranks, REGION_BYTES
    return SharedMemory(group, node_id, *sizes, fingerprint, STATUS_BYTES)


def connect_all(memories):
    """Connects all at once; returns the table of each."""
    with ThreadPoolExecutor(len(memories)) as pool:
        return list(pool.map(lambda memory: memory.connect(TIMEOUT_S), memories))


def errors_of(memories, timeout_s) -> list[BaseException]:
    """Connects all at once; returns what each raises."""
    with ThreadPoolExecutor(len(memories)) as pool:
        waits = [pool.submit(memory.connect, timeout_s) for memory in memories]
    return [wait.exception() for wait in waits]


def close_all(memories) -> None:
    for memory in memories:
        memory.close()


def read(address: int, n: int = 8) -> bytes:
    return ctypes.string_at(address, n)


def write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def n_mappings(name: str) -> int:
    gc.collect()  # memory that earlier tests have left
    with open("/proc/self/maps") as maps:
        return sum(name in line for line in maps)
