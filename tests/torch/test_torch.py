# SPDX-License-Identifier: Apache-2.0
"""From PyTorch: DeepEP's Buffer, one process a rank, against the oracle.

What a launch of processes does is in `torch_member.py`. On GPUs: `pytest -m gpu -k
torch`, where ranks that are more than GPUs share them.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from max_ep import LaunchError, launch
from tests.children import ALL_CASES, ROOT, ran, slow
from tests.torch import deep_ep_programs, torch_member, torch_misuse, torch_shrink
from tests.torch.torch_member import PHASES

pytestmark = pytest.mark.usefixtures("all_cores")

MORE_RANKS = [2, *(pytest.param(n, marks=slow) for n in (1, 4, 8))]

# Each number of ranks, format and call compiles libraries of its own.
NORMAL = ["normal"] * ALL_CASES
HEALTHY = [
    "low_latency",
    "sums",
    "compiled",
    "normal",
    *["rows", "normal_fp8"] * ALL_CASES,
]
KINDS = ["bf16", "round", "ue8m0"] if ALL_CASES else ["bf16"]
RUNS = {
    1: (["low_latency", *NORMAL], ["bf16"]),
    2: (HEALTHY, KINDS),
    4: (["low_latency", "sums", *NORMAL, "other_arguments"], ["bf16", "fp8"]),
    8: (["low_latency", *NORMAL], ["bf16"]),
}


slow_on_cpu = pytest.mark.parametrize(
    "place",
    [pytest.param("cpu", marks=slow), pytest.param("gpu", marks=pytest.mark.gpu(1))],
    indirect=True,
)


@pytest.mark.parametrize(
    "n_ranks, place",
    [
        (2, "cpu"),
        *(pytest.param(n, "cpu", marks=slow) for n in (1, 4, 8)),
        *(pytest.param(n, "gpu", marks=pytest.mark.gpu(1)) for n in (1, 2, 4, 8)),
    ],
    indirect=["place"],
)
def test_scenarios(
    n_ranks: int, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks also have a peer with other arguments; on GPUs they have torch's
    expandable segments."""
    if n_ranks == 4:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    names, kinds = RUNS[n_ranks]
    names = [*names, *["captured"] * (place == "gpu")]
    arguments = (n_ranks, str(tmp_path / "store"), names, kinds)
    outcomes = launch(torch_member.member, n_ranks, arguments, timeout_s=600)
    for rank, outcome in enumerate(outcomes):
        for name, (error, _) in outcome.items():
            assert not error, f"rank {rank}, {name}:\n{error}"
        if n_ranks == 4:
            text, culprit = outcome["other_arguments"][1], 0 if rank == 1 else 1
            said = rf"max_ep: rank {culprit} calls the first low_latency_dispatch\("
            assert re.match(said, text), text
            assert text.count("num_max_dispatch_tokens_per_rank=3") == 2


@pytest.mark.parametrize(
    "phase, place",
    [
        ("dispatch_wait", "cpu"),
        *(pytest.param(p, "cpu", marks=slow) for p in PHASES if p != "dispatch_wait"),
        *(pytest.param(p, "gpu", marks=pytest.mark.gpu(1)) for p in PHASES),
    ],
    indirect=["place"],
)
def test_killed(phase: str, place: str, tmp_path: Path, monkeypatch) -> None:
    """The survivor ends by its time-out and names the dead; the next run works."""
    monkeypatch.setitem(launch.__globals__, "_GRACE_S", 600.0)
    with pytest.raises(LaunchError) as caught:
        launch(torch_member.killed, 2, (str(tmp_path / phase), phase), timeout_s=300)
    text = caught.value.failures[0]
    assert re.search(r"timed out after 3000 ms waiting .* from rank 1", text), text
    assert caught.value.failures[1] == "died without a result (exit code -9)"


@slow_on_cpu
@pytest.mark.parametrize("n_ranks", MORE_RANKS)
def test_deep_ep(
    place: str, n_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of vLLM, SGLang and Megatron-core, as far as they call it."""
    monkeypatch.setenv("MAX_EP_TIMEOUT_S", "600")
    arguments = n_ranks, str(tmp_path / "store")
    launch(deep_ep_programs.member, n_ranks, arguments, timeout_s=600)


@pytest.mark.parametrize("n_ranks", MORE_RANKS[:-1])
def test_misuse(place: str, n_ranks: int, tmp_path: Path) -> None:
    launch(torch_misuse.member, n_ranks, (n_ranks, str(tmp_path / "store")))


@slow
@pytest.mark.parametrize("place", ["cpu"], indirect=True)
def test_torch_moe(place: str) -> None:
    """The command of the documents, with 2 ranks in place of 4."""
    page = (ROOT / "docs/pytorch.md").read_text()
    command = "torchrun --nproc-per-node 4 graphs/torch_moe.py"
    assert command in page
    words = command.replace("4", "2").split()[1:]
    run = sys.executable, "-m", "torch.distributed.run"
    patient = dict(OMP_NUM_THREADS="1", MAX_EP_TIMEOUT_S="600")
    done = ran(*run, *words, cwd=ROOT, **patient)
    assert "output and gradients are the plain layer's" in done.stdout, done.stderr


def test_build_for_a_gpu(run_cli: Callable[..., str]) -> None:
    """The command of the documents, for a GPU that need not be there."""
    page = (ROOT / "docs/pytorch.md").read_text()
    (command,) = re.findall(r"^max-ep (build --torch .*)$", page, re.M)
    path = Path(run_cli(*command.split()).strip())
    assert path.is_file() and "sm_90a" in path.name


@pytest.mark.parametrize("place", ["cpu"], indirect=True)
def test_what_is_built_ahead_is_not_compiled(
    place: str, run_cli: Callable[..., str], tmp_path: Path
) -> None:
    """Each interface works where nothing can be compiled, and an error names the
    command for what is missing. Fails if a call asks for another library than the
    command has built.

    The libraries are those of two ranks in the scenarios, here and in
    `test_torch_elastic.py`; the scenarios build not all of them if there are few.
    """
    group = "--torch cpu --ranks 2 --experts 8 --top-k 3 --hidden 256".split()
    more = [("normal", 4, 32), ("elastic", 3, 16)] * ALL_CASES
    for calls, n, tokens in (("low-latency", 1, 32), *more):
        words = "--dispatch", calls, "--tokens", tokens
        paths = run_cli("build", *group, *words).split()
        assert len({*paths}) == n and all(Path(path).is_file() for path in paths)
    said = launch(torch_member.ahead, 2, (str(tmp_path / "store"),), timeout_s=600)
    for text in said:
        assert text.startswith("nothing can be compiled\n`max-ep build --torch cpu ")
        assert " --tokens 31 --format mxfp8 --combine-mode sums`" in text


def test_no_max_is_loaded() -> None:
    """Nor the compiler of torch, which takes a second."""
    slow = "{'max', 'torch._dynamo'}.intersection(sys.modules)"
    program = f"import sys, max_ep.torch; sys.exit(len({slow}))"
    assert ran(sys.executable, "-c", program).returncode == 0


@slow_on_cpu
def test_shrink(place: str, tmp_path: Path) -> None:
    """Ranks fail at the first dispatch, combine and clean; the rest goes on, and waits
    once for each that it has not masked."""
    timeout_s = 2.0
    n, store = torch_shrink.N_RANKS, str(tmp_path / "store")
    done = launch(torch_shrink.member, n, (store, timeout_s))
    times = [done[rank] for rank in (0, 4)]
    assert [len(x) for x in done] == [7, 0, 0, 0, 6]
    for of_rank in times:
        *fast, updated, cleaned = of_rank[:6]
        assert max(fast) < timeout_s, of_rank
        assert min(updated, cleaned) >= timeout_s, of_rank
