# SPDX-License-Identifier: Apache-2.0
"""From PyTorch: ranks of several hosts, which processes stand for.

Those of CPUs share a store, as `torchrun` has one, and nothing else that one machine
has; NVSHMEM reaches those of GPUs.
"""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from max_ep import LaunchError, launch
from max_ep.limits import LINK_VARIABLE
from max_ep.torch.hosts import check_hosts, ranks_per_host
from tests.children import slow
from tests.errors import raises, refused
from tests.torch import torch_elastic, torch_hosts, torch_member

pytestmark = pytest.mark.usefixtures("all_cores")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the store of a launch is; it ends with the test."""
    monkeypatch.setenv("MAX_EP_TORCH_DEVICE", "cpu")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv(LINK_VARIABLE, "2:7")
    kept = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield f"tcp://127.0.0.1:{kept.port}"


@slow
def test_calls_over_two_hosts(store: str) -> None:
    """Rows and results are those of one host, bit for bit, also after a reset. Fails if
    that leaves what was staged."""
    launch(torch_hosts.member, 4, (4, store), timeout_s=600)


@slow
@pytest.mark.parametrize("link", ["2:3", "1:5"])
@pytest.mark.parametrize("interface", ["Buffer", "ElasticBuffer"])
def test_scenarios_over_hosts(
    interface: str, link: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that ranks of one host do."""
    monkeypatch.setenv(LINK_VARIABLE, link)
    monkeypatch.setenv("MAX_EP_TIMEOUT_S", "60")
    if interface == "Buffer":
        names = ["low_latency", "rows", "normal", "other_arguments"]
        given = 4, store, names, ["bf16", "ue8m0"]
        done = launch(torch_member.member, 4, given, timeout_s=1800)
        errors = [{n: error for n, (error, _) in x.items() if error} for x in done]
    else:
        names = [x.__name__ for x in torch_elastic.SCENARIOS]
        given = 4, store, names
        errors = launch(torch_elastic.member, 4, given, timeout_s=1800)
    assert errors == [{}] * 4, "\n".join(t for x in errors for t in x.values())


@pytest.fixture
def gpu_store(store: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same for two GPUs of one machine, each of which stands for a host."""
    monkeypatch.setenv("MAX_EP_TORCH_DEVICE", "cuda")
    monkeypatch.setenv(LINK_VARIABLE, "1:0")
    # There is no network, and no multicast.
    monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", "none")
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    return store


@pytest.mark.parametrize(
    "per_host", [pytest.param(n, marks=pytest.mark.gpu(2 * n)) for n in (1, 2)]
)
def test_calls_over_gpus_of_two_hosts(
    per_host: int, gpu_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Low-latency calls, each after a reset. Two ranks of a host map each other."""
    monkeypatch.setenv(LINK_VARIABLE, f"{per_host}:0")
    n = 2 * per_host
    launch(torch_hosts.member, n, (n, gpu_store), timeout_s=600)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "name", ["low_latency", "sums", "rows", "normal", "compiled", "captured"]
)
def test_buffers_over_gpus_of_two_hosts(name: str, gpu_store: str) -> None:
    """Rows and results are those of one host, bit for bit, captured, too."""
    given = 2, gpu_store, [name], ["bf16", "ue8m0"]
    for rank, done in enumerate(launch(torch_member.member, 2, given, timeout_s=600)):
        assert not done[name][0], f"rank {rank}: {done[name][0]}"


@pytest.mark.gpu(2)
def test_elastic_buffers_over_gpus_of_two_hosts(gpu_store: str) -> None:
    """Plain and expanded rows."""
    names = [x.__name__ for x in torch_elastic.SCENARIOS]
    done = launch(torch_elastic.member, 2, (2, gpu_store, names), timeout_s=900)
    assert done == [{}] * 2, "\n".join(text for x in done for text in x.values())


@pytest.mark.gpu(2)
@pytest.mark.parametrize("interface", ["calls", "Buffer", "ElasticBuffer"])
def test_relays_of_hosts_that_share_gpus(
    interface: str, gpu_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts of two ranks on two GPUs: bits and errors are those of four GPUs."""
    monkeypatch.setenv(LINK_VARIABLE, "2:0")
    monkeypatch.setenv("MAX_EP_TIMEOUT_S", "60")
    scenarios = [x.__name__ for x in torch_elastic.SCENARIOS]
    member, *given = {
        "calls": (torch_hosts.member, gpu_store),
        "Buffer": (
            torch_member.member,
            gpu_store,
            ["sums", "rows", "normal"],
            ["bf16"],
        ),
        "ElasticBuffer": (torch_elastic.member, gpu_store, scenarios),
    }[interface]
    shared = functools.partial(torch_hosts.on_a_shared_gpu, member)
    done = launch(shared, 4, (4, *given), timeout_s=900)
    if interface == "Buffer":
        done = [{n: error for n, (error, _) in x.items() if error} for x in done]
    assert done == [None if interface == "calls" else {}] * 4


@slow
@pytest.mark.parametrize("calls", ["low-latency", "normal", "plain", "expanded"])
def test_libraries_link_with_nvshmem(calls: str, run_cli: Callable[..., str]) -> None:
    """Libraries for GPUs of several hosts have its functions, and no others. Plain and
    expanded rows are relayed."""
    sizes = "--ranks 4 --experts 8 --top-k 3 --hidden 256 --tokens 32".split()
    command = "build", "--torch", "sm_90a", "--dispatch", calls, *sizes
    for hosts in ("1", "2"):
        paths = run_cli(*command, "--hosts", hosts).split()
        for path in map(Path, paths):
            has_nvshmem = b"nvshmemi_device_state_d" in path.read_bytes()
            assert has_nvshmem == (hosts == "2")
            assert path.parent.name.startswith("shmem-") == has_nvshmem


def failures(store: str, fault: str) -> dict[int, str]:
    """Runs with a fault till each process has failed; returns what they say."""
    with pytest.raises(LaunchError) as caught:
        launch(torch_hosts.member, 4, (4, store, fault), timeout_s=600)
    return caught.value.failures


@slow
def test_a_link_without_fences_is_noticed(store: str) -> None:
    """Counts come before what they announce."""
    assert failures(store, "no fences")


@slow
def test_who_is_killed_is_named(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rank of its host, and by those that only the link reaches."""
    monkeypatch.setitem(launch.__globals__, "_GRACE_S", 600.0)
    said = failures(store, "killed")
    assert "died without a result (exit code -9)" in said.pop(torch_hosts.KILLED)
    assert sorted(said) == [0, 1, 3]
    for rank, text in said.items():
        assert re.search(rf"on rank {rank}: timed out .* from rank \d", text), text
    assert any(f"from rank {torch_hosts.KILLED}" in text for text in said.values())


@refused("""
cpu, None, False, False | NotImplementedError; comm=
cpu, 1, True, False | NotImplementedError; enable_shrink
cuda, None, False, False | NotImplementedError; comm=
cuda, 1, True, False | NotImplementedError; enable_shrink
cuda, 1, False, True | NotImplementedError; a process for each GPU
""")
def test_what_several_hosts_cannot_have(arguments, words, monkeypatch):
    monkeypatch.setenv(LINK_VARIABLE, "2:1")
    device, *given = arguments.split(", ")
    with raises(NotImplementedError, words.partition("; ")[2]):
        check_hosts(torch.device(device), *map(eval, given))


def test_gpus_of_several_hosts_need_nvshmem(monkeypatch):
    monkeypatch.setattr("max_ep.shmem_parts.wheel_library", lambda: None)
    with pytest.raises(RuntimeError, match="lacks the libnvshmem_host.so.3 of nvidia"):
        check_hosts(torch.device("cuda"), 1, False)


def test_cpu_ranks_of_several_hosts_need_the_variable(monkeypatch):
    monkeypatch.delenv(LINK_VARIABLE, raising=False)
    with raises(NotImplementedError, f"for tests set {LINK_VARIABLE}"):
        check_hosts(torch.device("cpu"), 1, False)


def test_hosts_have_as_many_ranks():
    assert ranks_per_host("aabb") == 2 and ranks_per_host("abcd") == 1
    for names in ("aab", "abab", "abba"):
        with raises(ValueError, "as many ranks as the others"):
            ranks_per_host(names)
