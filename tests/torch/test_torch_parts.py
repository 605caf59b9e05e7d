# SPDX-License-Identifier: Apache-2.0
"""Parts of `max_ep.torch` that need no second process: the C ABI, formats, settings."""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from max_ep.cli import build
from max_ep.extension import mojo_dir
from max_ep.torch import Buffer, Config, calls, dequantize, library
from max_ep.torch.joining import checked_device
from max_ep.torch.normal_layout import agree, in_int32
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


def test_more_rows_than_there_can_be_take_no_more_memory() -> None:
    """A rank never has more than 32768 tokens; memory would stay for the others."""
    of_group = SimpleNamespace(n_ranks=2)
    for worst, most in ((2**31 - 1, 32768), (65536, 32768), (65535, 32767), (11, 5)):
        assert agree(of_group, "dispatch", 5, True, worst) == (most, worst, True)
    with raises(ValueError, "num_worst_tokens=9 is below 2 ranks x 5 tokens"):
        agree(of_group, "dispatch", 5, True, 9)  # all 10 may come


def test_num_sms_may_be_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``set_num_sms`` does; until then calls use all multiprocessors."""
    assert Buffer.get_dispatch_config(8).asks_for_all
    for n in (24, 20):
        monkeypatch.setattr(Buffer, "num_sms", n)
        assert Buffer.get_combine_config(8) == Config(n)


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


def test_memory_is_for_few_numbers_of_tokens() -> None:
    """So that few kernels are built, and never for fewer tokens than are asked for."""
    found = [calls.memory_for(n) for n in (0, 1, 2, 100, 4096, 4097, 65535)]
    assert found == [1, 1, 2, 128, 4096, 8192, 65535]
    # Normal calls hold rows out and back; over hosts one of each rank is staged, too.
    of_hosts = [calls.first_tokens("sm_90a", 16, n, 1024, 1 << 30) for n in (1, 2)]
    assert of_hosts == [4096, 1024]


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
    calls.ElasticCall(**SIZES, hosts=2),
    calls.ElasticCall(**SIZES, hosts=2, allow_hybrid_mode=False),
]


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


def test_rows_and_their_weights_are_relayed() -> None:
    """Where a host has several ranks: those of normal and elastic calls, unless
    `allow_hybrid_mode` is False."""
    made = calls.NormalCall, calls.ElasticCall
    for hosts, relays in ((1, False), (2, True), (4, False)):
        for call in (kind(**SIZES, hosts=hosts) for kind in made):
            channels = call.rows(), call.again(call.rows()), call.weights()
            assert [channel.relays for channel in channels] == 3 * [relays]
    for call in (CALLS[1], CALLS[-1]):
        assert not any(channel.relays for channel in call.libraries())


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
