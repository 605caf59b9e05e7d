# SPDX-License-Identifier: Apache-2.0
"""How a group goes on without some of its ranks, and takes them in again.

:class:`EPCommInitializer` has it: it masks ranks, and agrees with the other processes
(``membership.py``) on who is out and who is in.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from max.driver import CPU, Buffer

from ..limits import NUM_GROUPS, is_integer, link_of_environment
from ..processes.membership import MEMBER, Decision, Membership, RankExpelled, notes_of
from ..processes.notes import Notes, NotesInStore
from ..processes.store import store_of_environment
from ..waits import Words, at_address, named, place
from .link import Link
from .local_ranks import LocalRanks
from .wires import StoredMemory

_SETTLE_S = 10.0
"""How long a link may take to carry what it was asked for."""


class MaskedRanks:
    """Addresses of all ranks, and the masks of those of this process."""

    def __init__(self, local: LocalRanks, memory: Any) -> None:
        self.config, self.local, self._memory = local.config, local, memory
        self._link: Link | None = None
        self._members: Membership | None = None
        """The processes' agreement on who is in the group, if there is one."""
        self._heard: dict[int, tuple[int, float]] = {}
        """Last heartbeats of ranks of other hosts, and when they were seen."""
        n_ranks = self.config.n_ranks
        self._pointers = np.zeros((NUM_GROUPS, 3, n_ranks), np.uint64)
        # Made once: a served step of one client takes a millisecond or two.
        self.pointer_inputs = [
            Buffer.from_numpy(self._pointers[group, kind])
            for kind in range(3)
            for group in range(NUM_GROUPS)
        ]

    def meet_peers(self) -> None:
        """Finds the memory of all ranks, as one that begins or as one that joins."""
        config, memory = self.config, self._memory
        if config.spans_hosts and config.target == "cpu":
            self._make_link()
        if config.n_nodes == 1:
            self._point_to(range(config.n_ranks), self.local.regions)
        elif config.masks:
            self._begin_or_join()
        else:
            regions = memory.connect(config.start_timeout_s)
            self._point_to(range(config.n_ranks), regions)

    def _make_link(self) -> None:
        """Joins other hosts, which tests stand for, by a link."""
        config, local = self.config, self.local
        _, seed = link_of_environment(config.n_ranks, config.n_gpus_per_node)
        ranks, regions = self._ranks([config.node_id]), [0] * config.n_ranks
        for rank, region in zip(ranks, local.regions):
            regions[rank] = region
        if isinstance(self._memory, StoredMemory):
            self._link = self._memory.link
        else:
            self._link = Link(ranks, regions, seed, config.sizes())
        self._tell_of_link()

    def _tell_of_link(self) -> None:
        """Writes into the ranks' counters, which were prepared, where the link is."""
        if self._link is None:
            return
        queues = self._link.queues().values()
        for counters, queue in zip(self.local.counters[0], queues):
            at = counters._data_ptr() + 4 * self.config.sizes().link_word
            ctypes.c_uint64.from_address(at).value = queue

    def _is_far(self, rank: int) -> bool:
        """Returns whether only the link reaches a rank."""
        n, mine = self.config.ranks_per_host, self.local.rank_of(0)
        return self._link is not None and rank // n != mine // n

    def _begin_or_join(self) -> None:
        """Begins a group that masks, with all others, or joins one that runs."""
        config, memory = self.config, self._memory
        known = memory.group, config.node_id, config.n_nodes, memory.owner
        if config.spans_hosts:
            address = store_of_environment()
            notes = NotesInStore(address, memory.group, config.node_id)
        else:
            handed = notes_of(memory.group, config.n_nodes, config.start_timeout_s)
            notes = None if handed is None else Notes(handed, config.n_nodes)
        if notes is not None:
            self._members = Membership(*known, config.timeout_s, notes)
            if self._members.is_running():
                memory.withdraw()
                self._join()
                self._members.hand_on()
                return
            if config.spans_hosts:
                self._members.begin()
            else:  # its processes have ended
                members, self._members = self._members, None
                members.close()
        makes_notes = self._members is None
        regions = memory.connect(config.start_timeout_s, makes_notes=makes_notes)
        self._point_to(range(config.n_ranks), regions)
        if makes_notes:
            notes = Notes(memory.take_notes(), config.n_nodes)
            self._members = Membership(*known, config.timeout_s, notes)
        self._members.publish(state=MEMBER)
        self._members.hand_on()

    def _point_to(self, ranks: Sequence[int], regions: Sequence[int]) -> None:
        """Writes ranks' addresses into the table that the graphs' inputs share."""
        # [group][send, recv, counts][rank]; 0: not reached by an address.
        addresses = np.array(regions, np.uint64)
        for i, rank in enumerate(ranks):
            if self._is_far(rank):
                self._link.reach(rank, regions[i])
                addresses[i] = 0
        pointers = (self.local.offsets[:, :, None] + addresses) * (addresses != 0)
        self._pointers[:, :, list(ranks)] = pointers

    def _mask_words(self, *ranks: int) -> slice:
        """Returns where the masks are in the counters; refuses ranks that are none."""
        if self.config.on_timeout != "mask":
            raise ValueError("masks of ranks need EPConfig.on_timeout='mask'")
        for rank in ranks:
            if not is_integer(rank) or not 0 <= rank < self.config.n_ranks:
                range_ = f"[0, {self.config.n_ranks})"
                raise ValueError(f"rank {rank!r} must be an integer in {range_}")
        first = self.config.sizes().masked_word
        return slice(first, first + self.config.n_ranks)

    def _ranks(self, nodes: Iterable[int]) -> list[int]:
        n = self.config.n_gpus_per_node
        return [node * n + i for node in sorted(nodes) for i in range(n)]

    def active_ranks(self) -> list[int]:
        """Returns the ranks that no rank of this process masks."""
        return np.flatnonzero(~self._masks().any(axis=0)).tolist()

    def _masks(self) -> np.ndarray:
        words = self._mask_words()
        if not self.config.masks:
            return np.zeros((1, 1), bool)
        self.local.synchronize()
        counters = [group.to(CPU()).to_numpy() for group in self.local.counters[0]]
        return np.array([of_rank[words] != 0 for of_rank in counters])

    def mask(self, *ranks: int) -> None:
        """Masks ranks for the ranks of this process."""
        words = self._mask_words(*ranks)
        if not self.config.masks:
            return
        self.local.synchronize()
        for group in self.local.counters:
            for i, counters in enumerate(group):
                mask = counters.to(CPU()).to_numpy()[words].copy()
                mask[[rank for rank in ranks if rank != self.local.rank_of(i)]] = 1
                masked = Buffer.from_numpy(mask).to(counters.device)
                counters[words].inplace_copy_from(masked)
        self.local.synchronize()

    def readmit(self, rank: int) -> None:
        """Takes a masked rank in again, where all ranks are in this process."""
        if self.config.n_nodes > 1:
            raise RuntimeError(
                "readmit works where all ranks are in one process; with several, the "
                "new process calls ep_init(), or an expelled one rejoin(), and all "
                "others reconcile()"
            )
        self._mask_words(rank)
        # The masks of this rank do not count: nobody has answered it.
        others = np.delete(self._masks(), rank, axis=0).any(axis=0)
        self.local.reset()
        self.mask(*(set(np.flatnonzero(others).tolist()) - {rank}))

    def _generations(self) -> list[int]:
        """Returns what dispatch has sent and received, and combine."""
        first = self.config.sizes().generations_word
        words = self.local.counters[0][0].to(CPU()).to_numpy()[first : first + 4]
        return [int(word) % 2**32 for word in words]

    def _heard_s(self, nodes: Iterable[int]) -> float:
        """Returns when the ranks of some nodes have given their last sign of life; of
        other hosts, whose clocks differ, when this was first asked after it came."""
        if self.config.target == "gpu":
            return 0
        beat = named(self.config.sizes().cpu, "heartbeat")
        read = at_address(self.local.regions[0])
        words = Words(read, read)
        ranks = self._ranks(nodes)
        beats_ms = {x: words.flag(place(beat, x, 0)) >> 32 for x in ranks}
        now_s, heard_s = time.monotonic(), []  # after them
        for rank, ms in beats_ms.items():
            if self._is_far(rank):
                if self._heard.get(rank, (-1, 0))[0] != ms:
                    self._heard[rank] = ms, now_s
                heard_s.append(self._heard[rank][1])
            else:
                heard_s.append(now_s - (int(1000 * now_s) - ms) % 2**32 / 1000)
        return max(heard_s)

    def reconcile(self) -> list[int]:
        """Agrees with the other processes on who goes on; returns the active ranks."""
        masked = set(range(self.config.n_ranks)) - set(self.active_ranks())
        if self._members is None:
            return self.active_ranks()
        nodes = {rank // self.config.n_gpus_per_node for rank in masked}
        self._end_puts()
        try:
            decision = self._members.reconcile(
                nodes, self._generations(), self._heard_s
            )
        except RankExpelled:
            self._pointers[:] = 0
            raise
        lost = self._map(decision.joined, decision)
        for rank in self._ranks(decision.joined):
            at = decision.generations[::2]
            self.local.prepare(was_used=True, readmitted=rank, generations=at)
        self._go_on_with(decision, lost)
        return self.active_ranks()

    def rejoin(self) -> list[int]:
        """Joins the group again after :class:`RankExpelled`; returns active ranks."""
        self._mask_words()
        if self._members is None or self._pointers.any():
            raise RuntimeError("rejoin is for a process that was expelled")
        self._join()
        return self.active_ranks()

    def _end_puts(self) -> None:
        """Has nothing come late to other hosts: a rank that joins clears its memory,
        and the others clear what it wrote."""
        if self._link is not None and not self._link.settle(_SETTLE_S):
            raise RuntimeError("max_ep: the link to other hosts carries no more")

    def _join(self) -> None:
        self._end_puts()
        decision = self._members.join(self.config.start_timeout_s)
        self.local.prepare(was_used=True, generations=decision.generations[::2])
        self._tell_of_link()
        mine = self.config.node_id
        self._point_to(self._ranks([mine]), self._memory.local_addresses())
        others = set(range(self.config.n_nodes)) - {mine}
        self._go_on_with(decision, self._map(others, decision))

    def _map(self, nodes: Collection[int], decision: Decision) -> set[int]:
        """Finds the memory of processes; returns those that have not given theirs."""
        lost = set()
        peers = {*nodes} & {*decision.members}
        if peers:
            deadline_s = time.monotonic() + self._members.left_s()
            lost = self._memory.trade(peers, decision.epoch, deadline_s)
        for node in nodes:
            self._point_to(self._ranks([node]), self._memory.map(node))
        return lost

    def _go_on_with(self, decision: Decision, lost: set[int]) -> None:
        """Masks who is out, and does not begin before those who are in can."""
        out = set(range(self.config.n_nodes)) - set(decision.members) | lost
        if decision.joined:
            out |= set(self._members.meet())
        self.mask(*self._ranks(out))

    def close(self) -> None:
        """Graphs that hold the addresses raise from now on."""
        # The graph's inputs share this array: an op that finds address 0 raises
        # instead of following it.
        self._pointers[:] = 0
        if self._link is not None:
            self._link.close()
        try:
            # Kernels that still run write into what is freed next.
            self.local.synchronize()
        finally:
            if self._members is not None:
                self._members.close()
