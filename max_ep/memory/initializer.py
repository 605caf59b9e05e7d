# SPDX-License-Identifier: Apache-2.0
"""EPCommInitializer: allocates each rank's symmetric memory, and frees it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import numpy as np
from max.driver import CPU, Accelerator, Buffer, Device, accelerator_count
from max.dtype import DType
from max.engine import InferenceSession, Model

from ..agreement import agreed
from ..balance import Placement
from ..config import EPConfig, check_is_config
from ..config.checks import check_tables
from ..extension import run_mojo
from ..limits import GROUP_VARIABLE, NODE_VARIABLE
from ..plural import counted
from ..processes import presence
from ..processes.meeting import check_group
from ..processes.rendezvous import named_store
from ..processes.store import store_of_environment
from ..waits import RankWait, Waits, Words, gpu_wait
from .answering import answer_for, waits_of_processes
from .gpu import GpuMemory
from .gpu_shared import GpuSharedMemory, reader
from .local_ranks import LocalRanks, devices_of_ranks
from .masked_ranks import MaskedRanks
from .setup_graph import setup_model
from .shmem import ShmemMemory, group_in, mpi_rank
from .symmetric_memory import LocalMemory, SharedMemory
from .wires import StoredMemory

_Memory = (
    LocalMemory
    | SharedMemory
    | StoredMemory
    | GpuMemory
    | GpuSharedMemory
    | ShmemMemory
)


class EPCommInitializer:
    """Allocates the memory of this process's ranks and joins the group.

    Use it as a context manager, or call :meth:`close`; the memory is also
    freed when the process ends, in whatever way.

    Example:
        >>> with EPCommInitializer(config) as comm:
        ...     comm.ep_init(session)
        ...     model.execute(*inputs, *comm.model_inputs())
    """

    def __init__(self, config: EPConfig, group: str | None = None) -> None:
        """Takes what to allocate; :meth:`ep_init` does it.

        A ``node_id`` of -1, and the name of a ``group`` of several processes that is
        None, are taken from the environment. GPU processes read it from there only.
        """
        check_is_config(config, "EPCommInitializer")
        if group and config.uses_shmem:
            raise ValueError(
                f"group={group!r}: GPU processes of one host take their group's name "
                f"from {GROUP_VARIABLE}; without it ranks reach each other through "
                "SHMEM, which has no groups"
            )
        self.config = config
        self._group = group
        self._hide = self._show()
        self._memory: _Memory | None = None
        self._devices: list[Device] = []
        self._ranks: MaskedRanks | None = None
        self._placement: list[Buffer] = []

    def __enter__(self) -> EPCommInitializer:
        return self

    def __exit__(self, exception: object, *_: object) -> None:
        try:
            if exception is None and self._ranks is not None:
                self.check()
        finally:
            self.close()

    def ep_init(self, session: InferenceSession, setup: Model | None = None) -> None:
        """Allocates the memory, waits for the other processes and joins them.

        With ``on_timeout="mask"``, a process of a group that already runs waits until
        the others call :meth:`reconcile`, and joins them then.

        Args:
            session: Compiles and runs the set-up graph.
            setup: That graph's model, if it was compiled with others
                (``memory.setup_graph.setup_graph``).

        Raises:
            MemoryError: If the memory cannot be allocated.
            TimeoutError: If a process of the group does not come in time.
            ValueError: If a process has another configuration, or GPUs are missing.
            RuntimeError: If called twice.
            TypeError: If ``session`` is none.
        """
        if self._memory is not None:
            raise RuntimeError(
                "EPCommInitializer.ep_init was called before; close() first"
            )
        if not (setup or isinstance(session, InferenceSession)):
            raise TypeError(
                f"session is a {type(session).__name__}; pass an InferenceSession"
            )
        config = self.config
        if config.node_id < 0:
            config.node_id = self._find_node_id()
        # First, for MAX's compiler does not say that a GPU is missing.
        self._devices = _devices(config)
        model = setup_model(session, config, setup)
        self._memory = self._allocate(config.estimate_memory_usage())
        try:
            local = LocalRanks(config, self._devices, model, self._memory)
            self._ranks = MaskedRanks(local, self._memory)
            self._ranks.meet_peers()
        except BaseException:
            self.close()
            raise
        if config.target == "gpu" or config.n_nodes > 1:
            answer_for(self)
        if config.eplb_phy2log_plan is not None and not self._placement:
            plan = Placement(config.eplb_phy2log_plan, config.n_ranks)
            log2phy, n_local = plan.log2phy(config.max_replicas), config.n_gpus_per_node
            self.set_eplb_placement([log2phy] * n_local, [plan.logcnt] * n_local)

    def _name(self) -> str | None:
        """Returns the name of the group, if it has one."""
        return self._group or os.environ.get(GROUP_VARIABLE)

    def _show(self) -> Callable[[], None]:
        """Says to the others of the group, who may wait, that this process is there;
        returns what takes it back."""
        group, node = self._name(), self.config.node_id
        if self.config.n_nodes == 1 or self.config.uses_shmem or group is None:
            return lambda: None
        check_group(group)
        named = group, node if node >= 0 else os.environ.get(NODE_VARIABLE, "")
        presence.show(*named)
        return functools.partial(presence.hide, *named)

    def _find_node_id(self) -> int:
        """Returns which process this is, if the configuration does not say it."""
        if self.config.n_nodes == 1:
            return 0
        if self.config.uses_shmem and not store_of_environment():
            return mpi_rank()[0]
        text = os.environ.get(NODE_VARIABLE, "")
        if not text.isdecimal() or int(text) >= self.config.n_nodes:
            raise ValueError(
                f"EPConfig.node_id is -1; pass the number of this process, or set "
                f"{NODE_VARIABLE} (max_ep.launch does): {NODE_VARIABLE}={text} must be "
                f"in [0, n_nodes={self.config.n_nodes})"
            )
        return int(text)

    def _allocate(self, region_bytes: int) -> _Memory:
        config, same = self.config, self._fingerprint()
        node, n_local = (config.node_id, config.n_nodes), config.n_gpus_per_node
        times, store = (config.timeout_s, config.start_timeout_s), None
        if config.spans_hosts and not config.masks:
            store = named_store()
        if config.uses_shmem:
            group = store and group_in(store, *node, config.start_timeout_s)
            return ShmemMemory(n_local, *node, region_bytes, same, *times, group)
        if store is not None:
            of_rank = region_bytes, same, *times, config.sizes()
            return StoredMemory(store, n_local, *node, *of_rank)
        if config.n_nodes == 1:
            if config.target == "gpu":
                return GpuMemory(devices_of_ranks(config, self._devices), region_bytes)
            return LocalMemory(n_local, region_bytes)
        group = self._name()
        if not group:
            raise ValueError(
                f"n_nodes={counted(config.n_nodes, 'process')} need the name of their "
                "group: pass EPCommInitializer(config, group=...), or set "
                f"{GROUP_VARIABLE} (max_ep.launch does)"
            )
        if config.target == "gpu":
            return GpuSharedMemory(group, *node, region_bytes, same)
        status_bytes = -(-4 * config.sizes().counters_words // 256) * 256
        return SharedMemory(group, *node, n_local, region_bytes, same, status_bytes)

    def who_waits(self) -> Waits:
        """Says what each rank does and whom it waits for, also while a launch hangs.

        For another thread; ``max-ep who`` does the same from another process.
        ``print`` it. CPU ranks of one process run in turn and never wait.

        Raises:
            RuntimeError: Before :meth:`ep_init` or after :meth:`close`.
        """
        local = self._open("who_waits").local
        if isinstance(self._memory, SharedMemory):
            return waits_of_processes(self.config.sizes(), self._memory)
        waits = []
        for i, device in enumerate(local.rank_devices):
            waits.append(RankWait(local.rank_of(i)))
            if self.config.target == "gpu" and not self.config.use_allreduce:
                counters = local.counters[0][i]._data_ptr()
                words = Words(
                    reader(device.id, counters), reader(device.id, local.regions[i])
                )
                waits[i] = gpu_wait(self.config.sizes(), local.rank_of(i), words)
        return Waits(self._group or f"of process {os.getpid()}", waits)

    def _fingerprint(self) -> str:
        """Says what must be the same in all processes."""
        return ", ".join(f"{name}={said}" for name, said in agreed(self.config).items())

    def _open(self, method: str) -> MaskedRanks:
        """Returns the ranks of the group, for a method of users."""
        if self._ranks is None:
            raise RuntimeError(
                f"EPCommInitializer.{method} before ep_init, or after close(); call "
                "ep_init(session) first"
            )
        return self._ranks

    def check(self) -> None:
        """Waits for the devices, and raises if a launch on a GPU has failed.

        A GPU kernel cannot raise. It records what went wrong (a peer that did not come,
        ids out of range), combine results become NaN, and later launches do nothing. A
        ``RuntimeError`` says who waited for whom, in which phase, expert and
        generation. Leaving the ``with`` block checks too. On CPU the ops raise by
        themselves.
        """
        local = self._open("check").local
        if self.config.target == "cpu":
            return
        local.synchronize()
        sizes, texts = self.config.sizes(), []
        for rank, counters in enumerate(local.counters[0]):
            words = counters.to(CPU()).to_numpy()
            record = words[sizes.failure_word :][: sizes.n_failure_words]
            if record[0] != 0:
                # The text lives in `failures.mojo`.
                said = map(str, (local.rank_of(rank), self.config.timeout_ms, *record))
                texts.append(run_mojo("run", "-I", ".", "failure_text.mojo", *said))
        if texts:
            raise RuntimeError("\n".join(map(str.strip, texts)))

    def model_inputs(self) -> list[Buffer]:
        """Returns the graph's EP inputs, in the order of ``input_types()``.

        Raises:
            RuntimeError: Before :meth:`ep_init` or after :meth:`close`.
            ValueError: If experts are balanced and there is no placement.
        """
        ranks = self._open("model_inputs")
        if self.config.eplb_enabled and not self._placement:
            raise ValueError(
                "eplb_enabled=True needs a placement: call set_eplb_placement(log2phy, "
                "logcnt), or give EPConfig an eplb_phy2log_plan"
            )
        counters = [buffer for group in ranks.local.counters for buffer in group]
        return counters + ranks.pointer_inputs + self._placement

    def reset(self) -> None:
        """Puts all ranks back before generation 1, after a run that failed.

        An error in one op ends a run early: some ranks have sent, others have not.
        This makes the memory usable again, if all ranks are in this process. No run may
        be going on.

        Raises:
            RuntimeError: If the ranks are in several processes: what the
                others have done cannot be undone from here.
        """
        if self.config.n_nodes > 1:
            raise RuntimeError(
                "EPCommInitializer.reset works where all ranks are in one process; "
                f"with n_nodes={self.config.n_nodes} close() and ep_init() in each"
            )
        self._open("reset").local.reset()

    def active_ranks(self) -> list[int]:
        """Returns the ranks that no rank of this process masks. No run may go on."""
        return self._open("active_ranks").active_ranks()

    def mask(self, *ranks: int) -> None:
        """Masks ranks for the ranks of this process: they no longer wait for them.

        Peers learn it from :meth:`reconcile`, or by their own time-out. A rank does not
        mask itself. No run may go on.

        Raises:
            ValueError: If one is not in ``[0, n_ranks)``, or ranks do not mask.
        """
        self._open("mask").mask(*ranks)

    def readmit(self, rank: int) -> None:
        """Takes a masked rank in again, where all ranks are in this process.

        As :meth:`reset`, but ranks that are masked stay so. With several processes
        :meth:`reconcile` takes ranks in.

        Raises:
            RuntimeError: If the ranks are in several processes.
            ValueError: As of :meth:`mask`.
        """
        self._open("readmit").readmit(rank)

    def reconcile(self) -> list[int]:
        """Agrees with the other processes on who goes on; returns the active ranks.

        All processes call it after the same step. A process that was killed, is late,
        or is masked by one that stays is out (``membership.decide`` has the rule).
        Processes that wait in :meth:`ep_init` or :meth:`rejoin` are in from the next
        step on. Raises :class:`RankExpelled` if the others go on without this process:
        it can launch nothing before it has called :meth:`rejoin`.
        """
        return self._open("reconcile").reconcile()

    def rejoin(self) -> list[int]:
        """Joins the group again after :class:`RankExpelled`; returns active ranks.

        Waits until the other processes call :meth:`reconcile`.
        """
        return self._open("rejoin").rejoin()

    def set_eplb_placement(
        self, log2phy: Sequence[Buffer], logcnt: Sequence[Buffer]
    ) -> None:
        """Sets where experts are, for the graphs that run from now on.

        The weights must be there. A captured graph keeps the buffers that it was
        captured with: change those in place.

        Args:
            log2phy: Physical experts, int32 ``[num_moe_layers, num_logical_experts,
                max_replicas]``, one buffer (or NumPy array) a local rank, the same on
                all ranks.
            logcnt: How many those are, ``[num_moe_layers, num_logical_experts]``.

        Raises:
            ValueError: If tables are missing, or have other dtypes, shapes or contents.
        """
        config = self.config
        if not config.eplb_enabled:
            raise ValueError("set_eplb_placement needs EPConfig.eplb_enabled=True")
        self._devices = self._devices or _devices(config)
        shape = [config.num_moe_layers, config.num_logical_experts, config.max_replicas]
        placement = []
        given_tables = ("log2phy", log2phy, shape), ("logcnt", logcnt, shape[:2])
        for name, given, wanted in given_tables:
            if len(given) != config.n_gpus_per_node:
                raise ValueError(
                    f"{name} has {counted(len(given), 'table')}; there must be one for "
                    f"each of the {counted(config.n_gpus_per_node, 'local rank')}"
                )
            for table, device in zip(given, devices_of_ranks(config, self._devices)):
                if isinstance(table, np.ndarray):
                    table = Buffer.from_numpy(np.ascontiguousarray(table)).to(device)
                if table.dtype != DType.int32 or list(table.shape) != wanted:
                    raise ValueError(
                        f"{name} has a table of {table.dtype} {list(table.shape)}; it "
                        f"must be int32 {wanted}"
                    )
                placement.append(table)
        tables = [table.to(CPU()).to_numpy() for table in placement]
        n = config.n_gpus_per_node
        check_tables(config, tables[:n], tables[n:])
        self._placement = placement

    def close(self) -> None:
        """Frees the memory; graphs that still hold its addresses raise."""
        self._hide()
        ranks, self._ranks = self._ranks, None
        try:
            if ranks is not None:
                ranks.close()
        finally:
            ranks = None  # its counters may stand in the memory
            if self._memory is not None:
                memory, self._memory = self._memory, None
                memory.close()


def _devices(config: EPConfig) -> list[Device]:
    """Returns the devices of this process, or says what is missing."""
    if config.target == "cpu":
        return [CPU()]
    n_wanted, n_there = config.n_local_devices, accelerator_count()
    if n_there < n_wanted:
        raise ValueError(
            f"target='gpu' with n_gpus_per_node={config.n_gpus_per_node} and "
            f"ranks_per_gpu={config.ranks_per_gpu} needs {counted(n_wanted, 'GPU')}, "
            f"this machine shows {n_there}; put more ranks on one, or pass target='cpu'"
        )
    return [Accelerator(i) for i in range(n_wanted)]
