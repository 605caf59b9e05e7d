# SPDX-License-Identifier: Apache-2.0
"""Parts of `max_ep.torch` that need no second process: the C ABI, streams, settings."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import re
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from max_ep.cli import build
from max_ep.extension import mojo_dir
from max_ep.torch import (
    Buffer,
    ElasticBuffer,
    EventOverlap,
    calls,
    channel,
    channels,
    dequantize,
    library,
    sums,
)
from max_ep.torch.joining import checked_device
from max_ep.torch.normal_layout import in_int32
from max_ep.torch.streams import Pinned, Streams, When
from tests.children import ROOT
from tests.errors import raises, refused

API = (mojo_dir() / "max_ep_c/api.mojo").read_text()
C_TYPES = {"Int": ctypes.c_int64, "Int64": ctypes.c_int64, "Int32": ctypes.c_int32}


def test_a_library_that_does_not_load_is_said(tmp_path, monkeypatch) -> None:
    """As on a file system with noexec."""
    path = tmp_path / "library.so"
    path.write_bytes(b"no library, but what the loader says")
    monkeypatch.setattr(library, "build", lambda settings: path)
    words = f"the library is whole, but does not load: {path}; MAX_EP_CACHE_DIR; noexec"
    with raises(RuntimeError, words):
        library.load.__wrapped__(None)


def test_c_abi_is_what_python_declares() -> None:
    """Each exported function: its arguments and their widths, and its result."""
    pattern = r"@export\ndef max_ep_(\w+)\((.*?)\) abi\(\"C\"\)(?: -> (\w+))?:"
    exported = {
        name: (
            C_TYPES[result] if result else None,
            [C_TYPES[kind] for kind in re.findall(r"\w+: (\w+)", arguments)],
        )
        for name, arguments, result in re.findall(pattern, API, re.DOTALL)
    }
    assert API.count("@export") == len(exported)
    declared = {
        name: (result, [ctypes.c_int64 if a is library.BYTES else a for a in arguments])
        for name, (result, arguments) in library._FUNCTIONS.items()
    }
    assert exported == declared  # bytes go as their address


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4", "mxfp4"])
def test_dequantize_is_the_oracles(name: str) -> None:
    """All bits of values and of 8-bit scales, and scales that stand transposed."""
    from max_ep.formats import BY_NAME

    wire = BY_NAME[name]
    rng = np.random.default_rng(3)
    bits = rng.permuted(np.tile(np.arange(256, dtype=np.uint8), (12, 2)), axis=1)
    shape = 12, 512 * wire.values_per_byte // wire.scale_block
    scales = rng.normal(size=shape).astype(np.float32)
    has_float_scales = wire.scale_dtype.name == "float32"
    if not has_float_scales:
        scales = np.resize(rng.permutation(256), shape).astype(np.uint8)
    given = torch.from_numpy(scales.T.copy()).T
    if not has_float_scales:
        given = given.view(getattr(torch, wire.scale_dtype.name))
    rows = torch.from_numpy(bits)
    rows = rows if wire.values_per_byte == 2 else rows.view(torch.float8_e4m3fn)
    with np.errstate(over="ignore"):
        want = wire.dequantize(bits, scales)
    got = dequantize(rows.reshape(3, 4, -1), given.reshape(3, 4, -1))
    assert got.dtype == torch.float32 and got.shape == (3, 4, want.shape[1])
    np.testing.assert_array_equal(got.reshape(want.shape).numpy(), want)
    with pytest.raises(ValueError, match="there must be one for"):
        dequantize(rows, given[:, 1:])
    with pytest.raises(TypeError, match="dequantize takes"):
        dequantize(rows, given.double())


def test_dequantize_takes_packed_scales() -> None:
    """Four UE8M0 in a word, as ``Buffer`` gives them with ``use_ue8m0``."""
    rows = torch.randn(6, 1024).to(torch.float8_e4m3fn)
    exponents = torch.randint(100, 150, (6, 8), dtype=torch.uint8)
    packed = exponents.view(torch.int32).T.contiguous().T
    want = dequantize(rows, torch.exp2(exponents.float() - 127))
    assert torch.equal(dequantize(rows, packed), want)


@refused("""
"gpu" | device='gpu' is no device; pass 'cpu', 'cuda' or
"0" | device='0' is no device; pass 'cpu', 'cuda' or
3.5 | device=3.5 is no device; pass 'cpu', 'cuda' or
"meta" | device='meta' is not a CPU or an NVIDIA GPU
"cuda" | device='cuda', and torch finds no GPU; pass 'cpu'
None, MAX_EP_TORCH_DEVICE="gpu" | MAX_EP_TORCH_DEVICE='gpu' is no device
""")
def test_devices_that_are_not_there(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before ranks meet; named as the user named them."""

    def device(wanted: Any, **variables: str) -> Any:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return checked_device(wanted)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device(None, MAX_EP_TORCH_DEVICE="") == torch.device("cpu")
    with raises(ValueError, words):
        eval(f"device({arguments})", {"device": device})


def test_a_gpu_before_hopper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="='cuda:2', and torch finds 2 GPUs"):
        checked_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ValueError, match="is sm_80; kernels need sm_90 or newer"):
        checked_device("cuda:1")


@refused("""
--torch sm90 | --torch sm90 must be cpu, sm_90, sm_90a
--torch sm_80 | --torch sm_80 must be cpu, sm_90
--torch sm_91 | --torch sm_91 must be cpu, sm_90
--experts 0 | --experts 0 must be an integer from 1 to 65535
--experts 4000 --torch sm_90a | --experts 4000 must be an integer from 1 to 3840
--experts 9 | --experts 9 is no multiple of --ranks 2
--top-k 9 | --top-k 9 must be an integer from 1 to 8
--tokens 70000 | --tokens 70000 must be an integer from 1 to 65535
--ranks 64 --experts 64 --dispatch normal | --ranks 64 must be an integer from 1 to 32
--hidden 0 | --hidden 0 must be an integer from 1 to 536870911
--hidden 260 | --hidden 260 must be a multiple of 8 with --format bf
--hidden 640 --dispatch fp8-ue8m0 | --hidden 640 must be a multiple of 512
""")
def test_build_refuses_what_no_call_takes(
    arguments: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    run_cli: Callable[..., str],
) -> None:
    """In one line, before it compiles."""
    monkeypatch.setattr(build, "build_all", lambda wanted: [])
    given = "--torch cpu --ranks 2 --experts 8 --top-k 2 --hidden 256 --tokens 8"
    run_cli("build", *given.split())
    run_cli("build", *given.split(), "--torch", "sm_103a")
    said = run_cli("build", *given.split(), *arguments.split(), status=1)
    assert said.startswith(f"max-ep build: {words}") and said.count("\n") == 1


class Stream:
    """A stream that writes down what it waits for."""

    current: Stream
    log: list[str] = []

    def __init__(self, name: str, number: int, is_captured: bool = False) -> None:
        self.name, self.cuda_stream, self.is_captured = name, number, is_captured

    def wait_stream(self, other: Stream) -> None:
        Stream.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Streams of a GPU that is not there."""

    @contextlib.contextmanager
    def use(stream: Stream) -> Any:
        before, Stream.current = Stream.current, stream
        yield
        Stream.current = before

    raw = "_cuda_getCurrentRawStream"
    cuda_stream = lambda index: Stream.current.cuda_stream  # noqa: E731
    monkeypatch.setattr(torch._C, raw, cuda_stream, raising=False)
    is_captured = lambda: Stream.current.is_captured  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_captured)
    made = Streams(torch.device("cpu", 0))
    made.is_gpu, made.comm = True, Stream("comm", 9)
    Stream.log, Stream.current = [], Stream("A", 0)
    return made


def test_launches_are_in_one_order(streams: Streams) -> None:
    """A call on another stream waits for the launches on that of the call before."""
    a, b = Stream.current, Stream("B", 5)
    for Stream.current in (a, a, b, b, a):
        assert streams.current() == Stream.current.cuda_stream
    assert Stream.log == ["B waits for A", "A waits for B"]
    # What a graph captures waits for nothing before the capture, nor is it waited for.
    Stream.log, Stream.current = [], Stream("C", 7, is_captured=True)
    streams.current()
    fork = Stream("D", 8, is_captured=True)
    Stream.current = fork
    streams.current()
    Stream.current = a
    streams.current()
    assert Stream.log == ["D waits for C"]


def test_asynchronous_work_waits(streams: Streams) -> None:
    """For the caller's stream, where results are allocated, and for the event."""
    event: Any = EventOverlap()
    event.current_stream_wait = lambda: Stream.log.append(
        f"{Stream.current.name} waits for the event"
    )
    used: list[Any] = []
    tensor: Any = SimpleNamespace(record_stream=lambda stream: used.append(stream.name))
    ran: list[str] = []

    def work() -> None:
        ran.append(Stream.current.name)

    streams.run(work, [tensor, None], When(None, True))
    assert Stream.log == ["comm waits for A"]
    Stream.log = []
    streams.run(work, [tensor], When(event, True))
    assert Stream.log == ["comm waits for A", "comm waits for the event"]
    Stream.log = []
    there = When(event, True, True)
    with streams.allocating(there):
        streams.run(work, [tensor], there)
    assert Stream.log == ["comm waits for the event"]
    assert ran == ["comm"] * 3 and used == ["comm", "A"] * 3
    Stream.log = []
    streams.run(work, [tensor], When(event))
    assert Stream.log == ["A waits for the event"] and ran[-1] == "A"


def test_reads_of_the_host_share_no_memory(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a copy begins where numbers lie that nobody has read, or if each takes
    memory of its own."""
    made: list[tuple[Any, ...]] = []

    def new_pinned(dtype: torch.dtype, *lengths: int) -> Pinned:
        made.append(lengths)
        whole = torch.empty(sum(lengths), dtype=dtype)
        event: Any = SimpleNamespace(record=lambda _: None, synchronize=lambda: None)
        return Pinned(whole, whole.split(lengths), event)

    monkeypatch.setattr("max_ep.torch.streams.new_pinned", new_pinned)
    one, other = torch.tensor([1, 2]), torch.tensor([3])
    reads = [streams.to_host(one, other), streams.to_host(other, one)]
    reads += [streams.to_host(10 * one, other) for _ in range(2)]
    found = [[1, 2, 3], [3, 1, 2], [10, 20, 3], [10, 20, 3]]
    assert [read() for read in reads] == found
    for n in range(3):
        assert streams.to_host(n * one, other)() == [n, 2 * n, 3]
    assert made == [(2, 1), (1, 2), (2, 1), (2, 1)]


def test_a_number_of_rows_is_not_used_after_a_failure() -> None:
    """Fails if only what a launch made is read, and not whether it has failed."""

    def check_regions() -> None:
        raise RuntimeError("rank 1 did not come")

    cpu = Streams(torch.device("cpu"))
    comm = SimpleNamespace(streams=cpu, check_regions=check_regions)
    routing: Any = SimpleNamespace(
        sizes=SimpleNamespace(comm=comm),
        ends=torch.tensor([2, 5], dtype=torch.int32),
        region=SimpleNamespace(failed=torch.zeros(1, dtype=torch.int32)),
    )
    assert sums.begin_count(routing)() == 5
    routing.region.failed[0] = 3
    with raises(RuntimeError, "rank 1 did not come"):
        sums.begin_count(routing)()


def test_ids_beyond_32_bits_are_no_experts():
    """2**32 + 3 would be 3 if its upper half were cut off."""
    ids = torch.tensor([-1, 3, 2**32 + 3, 2**31, -(2**40)])
    found = torch.empty(5, dtype=torch.int32)
    in_int32(ids, found)
    assert found.tolist() == [-1, 3, 2**31 - 1, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize(
    "module, names",
    {
        "deep_ep": "Buffer Config ElasticBuffer EPHandle EventHandle EventOverlap "
        "topk_idx_t get_physical_domain_size get_logical_domain_size __version__",
        "deep_ep.buffer": "Buffer",
        "deep_ep.legacy": "Buffer",
        "deep_ep.buffers.legacy": "Buffer",
        "deep_ep.buffers.elastic": "ElasticBuffer",
        "deep_ep.utils": "EventHandle EventOverlap",
        "deep_ep.utils.event": "EventHandle EventOverlap",
        "deep_ep.utils.envs": "get_physical_domain_size init_dist init_seed dist_print",
        "deep_ep.utils.gate": "get_unbalanced_scores",
        "deep_ep.utils.math": "align calc_diff ceil_div count_bytes hash_tensor "
        "inplace_unique per_token_cast_back per_token_cast_to_fp8 safe_div",
        "deep_ep.utils.refs": "dispatch combine ordered_accumulate "
        "generate_pre_combine_data",
        "deep_ep.utils.testing": "bench bench_kineto",
        "deep_ep_cpp": "Config EventHandle",
    }.items(),
)
def test_modules_that_engines_look_for(
    module: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "integrations/deep_ep"))
    found = importlib.import_module(module)
    assert all(hasattr(found, name) for name in names.split())


def test_what_test_programs_of_deep_ep_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the last, short block has no scale, if packed scales must have the shape
    of rows, if one number stays twice, or if a sum is put where a rank's first choice
    is."""
    monkeypatch.syspath_prepend(str(ROOT / "integrations/deep_ep"))
    of = importlib.import_module("deep_ep.utils")
    x = torch.arange(200.0).repeat(3, 1).bfloat16()
    rows, scales = of.math.per_token_cast_to_fp8(x)
    assert rows.shape == (3, 200) and scales.shape == (3, 2)
    back = of.math.per_token_cast_back(rows, scales)
    assert 0 < of.math.calc_diff(back, x) < 1e-3
    # test_low_latency.py views four UE8M0 in a word as if each was a word.
    rows = torch.ones(4, 512).to(torch.float8_e4m3fn)
    words = (127 + torch.arange(16, dtype=torch.uint8)).view(torch.int32)
    back = of.math.per_token_cast_back(rows, words.view(1, 4))
    assert back[:, ::128].flatten().tolist() == [2.0**i for i in range(16)]
    ranks = torch.tensor([[2, 0, 2, -1], [1, 1, 1, 1]])
    of.math.inplace_unique(ranks, 3)
    assert ranks.tolist() == [[2, 0, -1, -1], [1, -1, -1, -1]]
    y = torch.tensor([1.0, 2, 4, 8]).view(1, 4, 1).bfloat16()
    sums = of.refs._summed(y, torch.tensor([[0, 1, 0, 1]]))
    assert sums.flatten().tolist() == [0, 0, 5, 10]
    scores = of.gate.get_unbalanced_scores(4000, 8, 4, 1, 2.0)
    per_rank = torch.bincount(scores.argmax(1) // 2)
    assert 1.7 < per_rank[0] / per_rank[1:].float().mean() < 2.3


def test_hook_after_a_wait_runs_once() -> None:
    """Fails if a later wait calls it again."""
    calls: list[int] = []
    event = EventOverlap()
    event.register_hook_after_wait(lambda: calls.append(1))
    event.current_stream_wait()
    event.current_stream_wait()
    assert calls == [1]


def test_memory_is_for_few_numbers_of_tokens() -> None:
    """So that few kernels are built, and never for fewer tokens than are asked for."""
    found = [calls.memory_for(n) for n in (0, 1, 2, 100, 4096, 4097, 65535)]
    assert found == [1, 1, 2, 128, 4096, 8192, 65535]


SIZES = dict(target="cpu", ranks=4, experts=8, top_k=3, hidden=512, tokens=100)
CALLS = [
    calls.LowLatencyCall(**SIZES),
    calls.LowLatencyCall(**SIZES, format="nvfp4", pair=True, hosts=2),
    calls.LowLatencyCall(**SIZES, format="fp8", round_scale=True, use_ue8m0=True),
    calls.LowLatencyCall(**SIZES, enable_shrink=True, combine_mode="rows"),
    calls.NormalCall(**SIZES, num_nvl_bytes=1 << 20),
    calls.NormalCall(**SIZES | dict(tokens=5000), format="fp8", scales=1),
    calls.NormalCall(**SIZES | dict(top_k=0), format="float32"),
    calls.NormalCall(**SIZES | dict(top_k=9)),
    calls.ElasticCall(**SIZES, format="mxfp8", do_expand=True, expert_alignment=16),
    calls.ElasticCall(**SIZES, allow_multiple_reduction=False, scales=7, format="fp8"),
]


NAMES = {
    calls.LowLatencyCall: "low_latency_dispatch(",
    calls.NormalCall: "dispatch or combine(",
    calls.ElasticCall: "ElasticBuffer.dispatch or combine(",
}


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_ranks_that_differ_hear_of_the_call_they_make(call: calls.Call) -> None:
    """Fails if a call of ElasticBuffer is named as one of Buffer, as it was."""
    for settings in call.libraries():
        assert settings.words().startswith(NAMES[type(call)])


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_an_error_says_which_command_builds_the_library(
    call: calls.Call, monkeypatch: pytest.MonkeyPatch, run_cli: Callable[..., str]
) -> None:
    """The command that a call names builds what the call needs. Fails if an argument is
    left out of it, or has another name or default on the command line."""
    built: list[library.Settings] = []
    monkeypatch.setattr(build, "build_all", lambda wanted: built.extend(wanted) or [])
    words = call.command().split()
    assert words.pop(0) == "max-ep"
    run_cli(*words)
    assert built == call.libraries() and len({*built}) == len(built)


@refused("""
--dispatch fast | --dispatch fast must be one of low-latency, normal, elastic
--dispatch normal --pair | --pair is not for --dispatch normal
--dispatch plain --combine-mode rows | --combine-mode is not for --dispatch elastic
--dispatch elastic --format int8 | --format int8 must be one of bfloat16, fp8, mxfp8
--dispatch normal --format uint9 | --format uint9 must be one of bfloat16, fp8, mxfp8
--dispatch elastic --format nvfp4 --hidden 48 | --hidden 48 must be a multiple of 32
--pair | --pair needs --format, one of fp8, mxfp8, nvfp4, mxfp4
--round-scale | --round-scale needs --format fp8, and no --pair
--format fp8 --use-ue8m0 | --use-ue8m0 needs --round-scale
--enable-shrink --combine-mode sums | --enable-shrink masks no rank with --combine
--enable-shrink --hosts 2 | --enable-shrink masks no rank with --hosts
--hosts 3 --torch sm_90a | --hosts 3 must be an integer from 1 to 2
--hosts 3 --ranks 4 | --ranks 4 is no multiple of --hosts 3
--dispatch expanded --expert-alignment 0 | --expert-alignment 0 must be an integer
""")
def test_build_refuses_arguments_of_other_calls(
    arguments: str, words: str, run_cli: Callable[..., str]
) -> None:
    given = "--torch cpu --ranks 2 --experts 8 --top-k 2 --hidden 256 --tokens 8"
    said = run_cli("build", *given.split(), *arguments.split(), status=1)
    assert said.startswith(f"max-ep build: {words}") and said.count("\n") == 1


def calls_of(work: Callable[[], None]) -> int:
    """Counts the functions of Python that are called."""
    events = []
    gc.collect()  # so that nothing is collected meanwhile
    sys.setprofile(lambda _, event, __: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
    return events.count("call")


@pytest.fixture
def launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Callable[..., int]]]:
    """A group of this process, and functions that do nothing in the place of the
    kernels'; a test may replace them before it opens a buffer."""
    sizes = SimpleNamespace(
        region_bytes=1 << 20,
        counters_words=64,
        failure_word=0,
        n_failure_words=8,
        masked_word=16,
    )
    functions = {name: lambda *_: 0 for name in library._FUNCTIONS}
    functions |= dict(open=lambda *_: 1, sizes=sizes)
    monkeypatch.setattr(channel, "load", lambda _: SimpleNamespace(**functions))
    monkeypatch.setattr(channels, "build_all", lambda _: None)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        yield functions
    finally:
        dist.destroy_process_group()


def test_an_eager_layer_makes_few_calls(launches: dict[str, Any]) -> None:
    """Calls of Python are most of what a layer of few tokens costs the host."""
    buffer = Buffer(dist.group.WORLD, device="cpu")
    elastic = ElasticBuffer(dist.group.WORLD, None, 0, 1, device="cpu")
    x, ids = torch.zeros(1, 512).bfloat16(), torch.zeros(1, 2, dtype=torch.int64)
    weights = torch.ones(1, 2)

    def low_latency() -> None:
        rows, _, handle, *_ = buffer.low_latency_dispatch(x, ids, 1, 8, use_fp8=False)
        buffer.low_latency_combine(rows, ids, weights, handle)

    def of_elastic(expands: bool) -> None:
        how = dict(num_experts=8, do_cpu_sync=False, do_expand=expands)
        rows, *_, handle, _ = elastic.dispatch(x, ids, weights, **how)
        elastic.combine(rows, handle)

    *_, handle, _ = elastic.dispatch(x, ids, num_experts=8, do_cpu_sync=False)

    def again() -> None:
        rows, *_ = elastic.dispatch(x, handle=handle)
        elastic.combine(rows, handle)

    for layer, most in (
        (low_latency, 31),
        (lambda: of_elastic(False), 50),
        (lambda: of_elastic(True), 50),
        (again, 45),
    ):
        layer()  # opens the channel
        assert 10 < calls_of(layer) <= most
    # What was checked is known by all that was checked.
    with raises(ValueError, "x has 2 rows"):
        elastic.dispatch(torch.zeros(2, 512).bfloat16(), handle=handle)
    with raises(ValueError, "num_sms=0.0"):
        elastic.dispatch(x, handle=handle, num_sms=0.0)
    with raises(ValueError, "x has rows of 8 bytes"):
        elastic.dispatch(x[:, :4].contiguous(), handle=handle)
    buffer.destroy()
    elastic.destroy()


def test_rows_go_before_the_host_waits_for_their_number(
    launches: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the GPU has nothing to do while ranks tell each other their counts, if
    they tell each other what the device knows, or if the host waits for rows where
    words before them have their number."""
    done: list[str] = []

    def dispatch(arguments: bytes) -> int:
        done.append("dispatch")
        fields = struct.unpack("19q", arguments)
        numbers = fields[9] or fields[8]  # first row and rows, or where they end
        words = (0, 2) if fields[9] else (2,)
        (ctypes.c_int32 * len(words)).from_address(numbers)[:] = words
        return 0

    launches["dispatch"] = dispatch
    buffer = Buffer(dist.group.WORLD, device="cpu")
    elastic = ElasticBuffer(dist.group.WORLD, None, 0, 4, device="cpu")
    x, ids = torch.zeros(3, 512).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    ids[0] = -1
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, 8)

    def normal() -> Any:
        layout = per_rank, None, is_in_rank, per_expert
        return buffer.dispatch(x, None, *layout)

    def plain() -> Any:
        return elastic.dispatch(x, ids, num_experts=8)

    def normal_with_ids() -> Any:
        layout = per_rank, None, is_in_rank, per_expert
        return buffer.dispatch(x, None, *layout, ids, torch.ones(3, 2))

    def noted(of: Any, name: str) -> None:
        function = getattr(of, name)

        def call(*given: Any) -> Any:
            done.append(name)
            return function(*given)

        monkeypatch.setattr(of, name, call)

    for one in (buffer, elastic):
        noted(one._comm, "exchange")
        noted(one._comm.streams, "to_host")
    for call, wanted in (
        (normal, "exchange to_host dispatch to_host exchange"),
        (normal_with_ids, "exchange dispatch to_host dispatch"),
        (plain, "exchange dispatch to_host"),
    ):
        call()  # opens the channel
        done.clear()
        rows, *_ = call()
        assert " ".join(done) == wanted
        assert rows.shape == (2, 512) and not rows.requires_grad
    buffer.destroy()
    elastic.destroy()
