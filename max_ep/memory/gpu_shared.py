# SPDX-License-Identifier: Apache-2.0
"""GPU memory of one process that other processes of the host map, by driver calls.

The handle of ``cuMemCreate`` is passed as a file descriptor through a unix socket. The
memory exists as long as a process maps it, so a peer that dies leaves no dangling
mapping. It does not depend on the settings of torch's allocator.
"""

from __future__ import annotations

import array
import ctypes
import functools
import socket
import time
from collections.abc import Collection
from typing import Any

from .board import Board
from .symmetric_memory import Owner

_GRANULARITY = 2 << 20
_POSIX_DESCRIPTOR, _PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 1, 3
_U64, _SIZE = ctypes.c_uint64, ctypes.c_size_t


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    return driver


def _use_context(device: int) -> None:
    """Makes the device's primary context current, if none is."""
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if not context:
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _call("cuCtxSetCurrent", context)


def _call(name: str, *arguments: Any) -> None:
    """Calls the driver; raises what it says."""
    result = getattr(_driver(), name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        said = (text.value or b"?").decode()
        if name == "cuMemCreate":
            raise MemoryError(f"max_ep: no GPU memory for a region: {said}")
        raise RuntimeError(
            f"max_ep: {name}: {said}. Ranks on one host write into each other's "
            "memory: the GPUs need peer access (`nvidia-smi topo -p2p w`)"
        )


class GpuSharedMemory:
    """A block of this GPU's memory, and everybody's."""

    def __init__(self, board: Board, n_bytes: int, device: int) -> None:
        """Allocates this rank's block; its contents are undefined."""
        self._board = board
        self._device = device
        self._n_bytes = -(-n_bytes // _GRANULARITY) * _GRANULARITY
        self._mapped: list[tuple[int, int]] = []
        self._absent: set[int] = set()
        _use_context(device)
        handle, what = _U64(), _Properties()
        what.type, what.handle_types = _PINNED, _POSIX_DESCRIPTOR
        what.location = _Location(_ON_DEVICE, device)
        size = _SIZE(self._n_bytes)
        _call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(what), _U64(0))
        self._handle = handle
        self._mine = self._map(handle)

    @classmethod
    def join(
        cls,
        group: str,
        rank: int,
        n_ranks: int,
        timeout_s: float,
        n_bytes: int,
        fingerprint: str,
    ) -> GpuSharedMemory:
        """Does so on the first GPU, if all processes of a group agree.

        No other group alive on this machine may have the name ``group``; all of its
        processes must give the same ``fingerprint``.
        """
        board = Board(group, rank, n_ranks, timeout_s)
        board.exchange(f"ep_init with {fingerprint}")
        return cls(board, n_bytes, 0)

    def _map(self, handle: ctypes.c_uint64) -> int:
        """Maps a block for this GPU; returns where."""
        address, size, zero = _U64(), _SIZE(self._n_bytes), _U64(0)
        reserve = (ctypes.byref(address), size, _SIZE(0), zero, zero)
        _call("cuMemAddressReserve", *reserve)
        _call("cuMemMap", address, size, _SIZE(0), handle, zero)
        self._mapped.append((address.value, handle.value))
        access = _Access(_Location(_ON_DEVICE, self._device), _READ_WRITE)
        _call("cuMemSetAccess", address, size, ctypes.byref(access), _SIZE(1))
        return address.value

    handle = -1
    """No process can map this memory later."""

    @property
    def group(self) -> str:
        """Returns the name of the group."""
        return self._board.name

    @property
    def owner(self) -> Owner:
        """Returns who made this memory."""
        return self._board.owner

    def local_addresses(self) -> list[int]:
        """Returns the address of this rank's block."""
        return [self._mine]

    def connect(self, timeout_s: float, absent: Collection[int] = ()) -> list[int]:
        """Returns the address of every rank's block, in this process.

        Ranks that are ``absent`` are not waited for; in place of theirs stands its own.
        """
        self._absent = {*absent}
        descriptor = ctypes.c_int()
        kind = ctypes.c_int(_POSIX_DESCRIPTOR)
        export = (ctypes.byref(descriptor), self._handle, kind, _U64(0))
        _call("cuMemExportToShareableHandle", *export)
        try:
            received = self._exchange(descriptor.value, timeout_s)
        finally:
            socket.close(descriptor.value)
        addresses = [self._mine] * self._board.n_ranks
        try:
            for peer, fd in received.items():
                handle = _U64()
                take = (ctypes.byref(handle), ctypes.c_void_p(fd), kind)
                _call("cuMemImportFromShareableHandle", *take)
                addresses[peer] = self._map(handle)
        finally:
            for fd in received.values():
                socket.close(fd)
        return addresses

    def _exchange(self, descriptor: int, timeout_s: float) -> dict[int, int]:
        """Gives this rank's descriptor to the others; returns theirs, by rank."""
        board = self._board
        received: dict[int, int] = {}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as box:
            box.bind(f"\0{board.name}.{board.rank}")
            box.setblocking(False)
            absent = self._absent or None
            board.exchange("map GPU memory", self._n_bytes, absent)  # all listen
            try:
                self._trade(box, descriptor, received, timeout_s)
                # Nobody binds the name again before.
                board.exchange("have GPU memory", None, absent)
            except BaseException:
                for descriptor in received.values():
                    socket.close(descriptor)
                raise
        return received

    def _trade(
        self,
        box: socket.socket,
        descriptor: int,
        received: dict[int, int],
        timeout_s: float,
    ) -> None:
        """Sends and receives in one loop: a box takes few messages, so that ranks
        which only send would wait for each other."""
        board = self._board
        right = array.array("i", [descriptor])
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, right)]
        gone = {board.rank, *self._absent}
        to_send = [peer for peer in range(board.n_ranks) if peer not in gone]
        to_receive = set(to_send)
        deadline = time.monotonic() + timeout_s
        while to_send or to_receive:
            try:
                if to_send:
                    place = f"\0{board.name}.{to_send[0]}"
                    box.sendmsg([bytes([board.rank])], control, 0, place)
                    del to_send[0]
            except OSError:  # full, or its owner has gone
                to_send.append(to_send.pop(0))
            try:
                body, extra, *_ = box.recvmsg(1, socket.CMSG_SPACE(4))
                received[body[0]] = array.array("i", extra[0][2][:4])[0]
                to_receive.discard(body[0])
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"max_ep: rank {board.rank} waited {timeout_s} s for ranks "
                        f"{sorted(to_receive.union(to_send))} to give and take GPU "
                        "memory"
                    ) from None
                time.sleep(0.0005)

    def close(self) -> None:
        """Unmaps all blocks, which no kernel may use; peers keep what they map."""
        mapped, self._mapped = self._mapped, []
        for address, handle in mapped:
            _call("cuMemUnmap", _U64(address), _SIZE(self._n_bytes))
            _call("cuMemAddressFree", _U64(address), _SIZE(self._n_bytes))
            _call("cuMemRelease", _U64(handle))
