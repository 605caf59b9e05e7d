# SPDX-License-Identifier: Apache-2.0
"""GPU memory of several processes: how they hand it on, which needs no GPU."""

from __future__ import annotations

import os
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from max_ep.memory.board import Board
from max_ep.memory.gpu_shared import GpuSharedMemory


def trade(group: str, rank: int, n_ranks: int, folder: Path, timeout_s: float) -> dict:
    """Hands a file's descriptor to all others, as if it were GPU memory."""
    memory = GpuSharedMemory.__new__(GpuSharedMemory)
    memory._board = Board(group, rank, n_ranks, 10.0)
    memory._n_bytes, memory._absent = 1, set()
    file = os.open(folder / str(rank), os.O_RDWR | os.O_CREAT)
    try:
        if timeout_s == 0:  # a rank that does not come
            memory._board.exchange("map GPU memory", 1)
            return {}
        return memory._exchange(file, timeout_s)
    finally:
        os.close(file)
        memory._board.close()


@pytest.mark.parametrize("n_ranks", [2, 12, 20])
def test_descriptors_reach_all(n_ranks: int, tmp_path: Path) -> None:
    """Also of more ranks than a socket queues messages."""
    group = f"test-{uuid.uuid4().hex[:12]}"
    results: list[dict] = [{} for _ in range(n_ranks)]

    def go(rank: int) -> None:
        results[rank] = trade(group, rank, n_ranks, tmp_path, 10.0)

    threads = [
        threading.Thread(target=go, args=(rank,), daemon=True)
        for rank in range(n_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "ranks wait for each other"
    for rank, received in enumerate(results):
        assert sorted(received) == [r for r in range(n_ranks) if r != rank]
        for peer, descriptor in received.items():
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            os.close(descriptor)
            assert path == str(tmp_path / str(peer))


def test_missing_rank_is_named(tmp_path: Path) -> None:
    """And descriptors that came are closed."""
    group = f"test-{uuid.uuid4().hex[:12]}"
    before = set(os.listdir("/proc/self/fd"))
    begin = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        waits = [
            pool.submit(trade, group, rank, 3, tmp_path, 0.0 if rank == 1 else 0.5)
            for rank in range(3)
        ]
    assert time.monotonic() - begin < 8
    for rank in (0, 2):
        with pytest.raises(
            TimeoutError, match=rf"rank {rank} waited 0.5 s .* \[1\] to"
        ):
            waits[rank].result()
    assert set(os.listdir("/proc/self/fd")) <= before
