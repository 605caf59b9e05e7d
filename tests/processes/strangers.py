# SPDX-License-Identifier: Apache-2.0
"""A group of one user starts, and another user of the machine attacks it.

    sudo python -m tests.processes.strangers GROUP

`test_strangers.py` runs it. It needs no MAX: processes change their user once all is
imported. Prints what the attackers got and what became of the group.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context

from max_ep.memory.symmetric_memory import SharedMemory
from max_ep.processes import presence
from max_ep.processes.meeting import Hello, Owner
from max_ep.processes.membership import MEMBER, Membership, notes_of
from max_ep.processes.messages import said
from max_ep.processes.notes import Notes
from max_ep.processes.sockets import call, found, group_name, listen, process_at

USER, OTHER = 1234, 65534
N_NODES, REGION_BYTES, TIMEOUT_S = 3, 4096, 60.0
SECRET = b"the tokens of the first user"
FORK = get_context("fork")


def become(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    # As a program that this user has started.
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)


# ----------------------------------------------------------------------- the group


def fingerprint(group: str) -> str:
    return f"group={group}"


def member(group: str, node: int, pipe) -> None:
    """Starts, waits for a line of its parent, and says what it sees of the others."""
    become(USER)
    presence.show(group, node)
    time.sleep(0.5)  # the attackers see it
    notes = notes_of(group, N_NODES, TIMEOUT_S)
    memory = SharedMemory(group, node, N_NODES, 1, REGION_BYTES, fingerprint(group))
    begin = time.monotonic()
    joins = notes is not None
    if not joins:
        addresses = memory.connect(TIMEOUT_S, makes_notes=True)
        notes = memory.take_notes()
        ctypes.memmove(addresses[node], SECRET, len(SECRET))
    known = group, node, N_NODES, memory.owner, TIMEOUT_S
    members = Membership(*known, Notes(notes, N_NODES))
    members.publish(state=MEMBER)
    members.hand_on()
    pipe.send((joins, time.monotonic() - begin, os.getpid()))
    pipe.recv()
    seen = {n: note.owner.pid for n, note in members.notes().items()}
    texts = [] if joins else [ctypes.string_at(a, len(SECRET)) for a in addresses]
    pipe.send((seen, all(text == SECRET for text in texts)))
    pipe.recv()


def start(group: str, node: int):
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=member, args=(group, node, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


# ------------------------------------------------------------------- the other user


def attack(kind: Callable[[str, int], None], group: str, out: int) -> None:
    become(OTHER)
    # Before anything is there; and the folder of notes of earlier versions.
    with contextlib.suppress(OSError):
        os.mkdir(f"/dev/shm/max_ep-{group}-members")
    with contextlib.suppress(KeyboardInterrupt):
        kind(group, out)


def report(out: int, what: str) -> None:
    os.write(out, f"{what}\n".encode())


def messages(group: str) -> list[bytes]:
    """What a process of the group would say, and nonsense."""
    owner = Owner(os.getpid(), "", fingerprint(group))
    other = Owner(os.getpid(), "", "group=another")
    mine = [said(Hello(node, of)) for node in range(N_NODES) for of in (owner, other)]
    return [*mine, b"[" * 9999, json.dumps([1]).encode(), b"notes"]


def receive(line: socket.socket, out: int, where: str) -> None:
    """Reports what it gets, but from an attacker."""
    with contextlib.suppress(OSError):
        line.setblocking(False)
        text, theirs, *_ = socket.recv_fds(line, 1 << 16, 4)
        if (text or theirs) and process_at(line).user != OTHER:
            report(out, f"got {text[:40]!r} and {len(theirs)} descriptors at {where}")


def squat(group: str, out: int) -> None:
    """Has sockets of all names of the group; accepts none, or answers as a member."""
    texts, memory = messages(group), Notes.make(N_NODES)
    kinds = [f"{n}/{kind}" for n in range(N_NODES) for kind in ("meet", "notes", "is")]
    names = [f"{group_name(group)}-{kind}" for kind in kinds]
    silent = [listen(name, "is nothing") for name in names for _ in range(2)]
    answering = [listen(name, "is nothing") for name in names for _ in range(2)]
    with contextlib.suppress(OSError):  # names of earlier versions
        for node in range(N_NODES):
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line.bind(f"\0max_ep/0/{group}-{node}")
            line.listen()
            silent.append(line)
    open_ = []
    while True:
        for listener in answering:
            with contextlib.suppress(OSError):
                line, _ = listener.accept()
                for text in texts:
                    socket.send_fds(line, [text], [memory, memory])
                open_.append(line)
        for line in open_:
            receive(line, out, "a squatted name")
        time.sleep(0.002)


def intrude(group: str, out: int) -> None:
    """Calls all sockets, says what a member would, and keeps some lines."""
    texts, memory, open_ = messages(group), os.memfd_create("x"), []
    os.ftruncate(memory, 2 * REGION_BYTES)
    while True:
        for name in found(
            *(
                f"{group_name(group)}-{n}/{k}"
                for n in range(N_NODES)
                for k in ("meet", "notes", "is")
            )
        ):
            for text in texts:
                if line := call(name):
                    with contextlib.suppress(OSError):
                        socket.send_fds(line, [text], [memory])
                    open_.append(line)
        for line in open_:
            receive(line, out, "a line")
        for line in open_[:-300]:
            line.close()
        del open_[:-300]
        time.sleep(0.002)


def flood(group: str, out: int) -> None:
    """Calls without a pause."""
    while True:
        names = found(*(f"{group_name(group)}-{n}/meet" for n in range(N_NODES)))
        for name in names:
            for _ in range(1000):
                if line := call(name):
                    line.close()


def read_memory(group: str, out: int) -> None:
    """Opens what `/proc` shows of the first user's processes."""
    while True:
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}").st_uid != USER:
                    continue
                for name in ("fd", "map_files"):
                    with contextlib.suppress(OSError):
                        os.listdir(f"/proc/{pid}/{name}")
                        report(out, f"listed /proc/PID/{name}")
                for place in ("mem", *(f"fd/{i}" for i in range(40))):
                    with contextlib.suppress(OSError):
                        os.close(os.open(f"/proc/{pid}/{place}", os.O_RDWR))
                        report(out, f"opened /proc/PID/{place}")
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGTERM)
                    report(out, "sent a signal")
        time.sleep(0.01)


def main(group: str) -> None:
    got, out = os.pipe()
    attacks = [
        FORK.Process(target=attack, args=(kind, group, out), daemon=True)
        for kind in (squat, intrude, flood, read_memory)
    ]
    for process in attacks:
        process.start()
    time.sleep(1)
    members = [start(group, node) for node in range(N_NODES)]
    answers = [pipe.recv() for _, pipe in members]
    pids = {node: pid for node, (*_, pid) in enumerate(answers)}
    assert not any(joins for joins, *_ in answers), answers
    print(f"started after {max(s for _, s, _ in answers):.2f} s")
    # One is killed; its successor gets the notes from the others.
    process, _ = members[1]
    process.kill()
    process.join()
    members[1] = start(group, 1)
    joins, _, pids[1] = members[1][1].recv()
    assert joins, "the group runs"
    for _, pipe in members:
        pipe.send("look")
    for node, (_, pipe) in enumerate(members):
        seen, is_whole = pipe.recv()
        assert seen == pids, (node, seen, pids)
        assert is_whole, node
    for process in (*attacks, *(process for process, _ in members)):
        process.kill()
        process.join()
    os.close(out)
    with open(got) as lines:
        found = sorted({*lines})
    assert not found, found
    os.rmdir(f"/dev/shm/max_ep-{group}-members")
    print("the other user got nothing")


if __name__ == "__main__":
    main(sys.argv[1])
