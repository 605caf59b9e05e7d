# SPDX-License-Identifier: Apache-2.0
"""Wrong calls from PyTorch that would read or write where nothing is, and what a call
cannot do. The kernels do nothing: each call is refused before them.
"""

from __future__ import annotations

import copy
import ctypes
import pickle
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from max_ep.torch import Buffer, ElasticBuffer
from tests.errors import raises

E, H = 8, 512


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory was given back, as training programs do."""
    gone = tensor.clone()
    gone.untyped_storage().resize_(0)
    return gone


def test_tensors_without_memory_are_refused(launches: dict[str, Any]) -> None:
    """Fails if a kernel is given address 0; also where the shapes are known already."""
    n_launches = 0

    def launch(_: bytes) -> int:
        nonlocal n_launches
        n_launches += 1
        return 0

    launches["dispatch"] = launches["combine"] = launch
    buffer = Buffer(dist.group.WORLD, device="cpu")
    elastic = ElasticBuffer(dist.group.WORLD, None, 0, 4, device="cpu")
    x, ids = torch.zeros(3, H).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    weights, rows_weights = torch.ones(3, 2), torch.ones(3, 2)
    names = "num_tokens_per_rank", "", "num_tokens_per_expert", "is_token_in_rank"
    layout = dict(zip(names, buffer.get_dispatch_layout(ids, E)))
    del layout[""]
    low = dict(x=x, topk_idx=ids, num_max_dispatch_tokens_per_rank=4, num_experts=E)
    low["use_fp8"] = False
    rows, _, of_low, *_ = buffer.low_latency_dispatch(**low)
    back = dict(x=rows, topk_idx=ids, topk_weights=weights, handle=of_low, out=x)
    sent = dict(layout, x=x, topk_idx=ids, topk_weights=weights, num_worst_tokens=3)
    received, *_, of_normal, _ = buffer.dispatch(**sent)
    again = dict(x=received, handle=of_normal, topk_weights=rows_weights, bias=x)
    given = dict(x=x, topk_idx=ids, topk_weights=weights, num_experts=E)
    given["do_cpu_sync"] = False
    plain, *_, of_elastic, _ = elastic.dispatch(**given)
    of_rows = torch.ones(len(plain), 2)
    summed = dict(x=plain, handle=of_elastic, topk_weights=of_rows)
    y = torch.zeros(3, H).bfloat16()
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (buffer.low_latency_dispatch, low),
        (buffer.low_latency_combine, back),
        (buffer.dispatch, sent),
        (buffer.dispatch, dict(x=x, handle=of_normal)),
        (buffer.combine, again),
        (elastic.dispatch, given),
        (elastic.dispatch, given | dict(do_expand=True)),
        (elastic.dispatch, dict(x=x, handle=of_elastic)),
        (elastic.combine, dict(summed, bias=y)),
    ]
    n_refused = 0
    for call, right in calls:
        call(**right)  # whose shapes are known then
        n_launches = 0
        for name, value in right.items():
            if isinstance(value, torch.Tensor):
                with raises(ValueError, f"{name} has no memory: its storage was freed"):
                    call(**right | {name: freed(value)})
                n_refused += 1
        assert n_launches == 0
    assert n_refused == 26
    buffer.destroy()
    elastic.destroy()


def test_what_comes_fits_into_the_tables(launches: dict[str, Any]) -> None:
    """Fails if a token that has an expert twice makes more rows than the tables, which
    are allocated before the rows are counted, have places for."""
    n_tokens = 5

    def dispatch(arguments: bytes) -> int:
        fields = struct.unpack("19q", arguments)
        if fields[5] == 1:  # counts that go ahead
            ctypes.memmove(fields[6], fields[3], 16)
            ctypes.c_int32.from_address(fields[8]).value = 1
        return 0

    launches["dispatch"] = dispatch
    buffer = ElasticBuffer(dist.group.WORLD, None, 0, 8, device="cpu")
    ids = torch.tensor([[0, 1, 1, 0]] * n_tokens)
    x = torch.zeros(n_tokens, H).bfloat16()
    how = dict(num_experts=2, do_expand=True, expert_alignment=4)
    rows, *_, handle, _ = buffer.dispatch(x, ids, **how)
    assert len(rows) == 2 * 12
    sizes = handle._routing.sizes
    begin, end = sizes.at[3:5]
    assert end - begin >= 8 * sizes.n_rows
    assert handle._routing.src_info.shape == (len(rows), 2)
    buffer.destroy()


def test_ranks_compare_what_must_be_alike(
    launches: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if ranks meet of which one sends no weights, so that the others' experts
    multiply by 0, or of which one expands rows with another alignment."""
    buffer = ElasticBuffer(dist.group.WORLD, None, 0, 4, device="cpu")
    x, ids = torch.zeros(3, H).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    names: list[str] = []

    def exchange(what: str, note: Any = None) -> list[Any]:
        if what.startswith("ElasticBuffer.dispatch"):
            names.append(what)
            raise KeyboardInterrupt
        return [note]

    monkeypatch.setattr(buffer._comm, "exchange", exchange)
    for weights in (None, torch.ones(3, 2)):
        for expands, alignment in ((False, 1), (True, 1), (True, 4)):
            how = dict(num_experts=E, do_expand=expands, expert_alignment=alignment)
            with pytest.raises(KeyboardInterrupt):
                buffer.dispatch(x, ids, weights, **how)
    assert len({*names}) == 6
    without = [", topk_weights=None" in name for name in names]
    assert without == 3 * [True] + 3 * [False]
    fours = [", expert_alignment=4" in name for name in names]
    assert fours == 2 * [False, False, True]
    buffer.destroy()


def test_what_a_compiled_call_cannot_do_is_refused(
    launches: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a compiled call measures no waits in silence."""
    buffer = Buffer(dist.group.WORLD, device="cpu")
    x, ids = torch.zeros(3, H).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    waits = torch.zeros(1, dtype=torch.int64)
    both = dict(async_finish=True, return_recv_hook=True)
    rows, _, handle, *_ = buffer.low_latency_dispatch(x, ids, 4, E, use_fp8=False)
    to = partial(buffer.low_latency_dispatch, x, ids, 4, E)
    given = rows, ids, torch.ones(3, 2), handle
    back = partial(buffer.low_latency_combine, *given)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for call, name in ((to, "dispatch"), (back, "combine")):
        name += "_wait_recv_cost_stats"
        with raises(NotImplementedError, f"{name} is not compiled"):
            call(**{name: waits})
        with raises(ValueError, "async_finish and return_recv_hook exclude"):
            call(**both)
        with raises(ValueError, "async_finish='no' must be True or False"):
            call(async_finish="no")
    buffer.destroy()


def test_a_hook_receives_or_raises(launches: dict[str, Any]) -> None:
    """Fails if a result that nobody has written is taken for one, after `reset()`."""
    buffer = Buffer(dist.group.WORLD, device="cpu")
    x, ids = torch.zeros(3, H).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    how = dict(return_recv_hook=True)
    given = x, ids, 4, E, None, None, False
    *_, received = buffer.low_latency_dispatch(*given, **how)
    received()
    rows, _, handle, _, hook = buffer.low_latency_dispatch(*given, **how)
    hook()
    back = rows, ids, torch.ones(3, 2), handle
    of_combine = buffer.low_latency_combine(*back, **how)[2]
    replaced = buffer.low_latency_combine(*back, **how)[2]
    of_combine()  # the next combine has received for it
    of_dispatch = buffer.low_latency_dispatch(*given, **how)[4]
    buffer.reset()
    received()
    of_combine()
    for lost in (replaced, of_dispatch):
        with raises(ValueError, "hook has not received, and reset() has taken"):
            lost()
    buffer.destroy()


def test_buffers_and_handles_stay_in_their_process(launches: dict[str, Any]) -> None:
    """A copy would free, or use, memory that is not its own; also a copy of a model
    that holds a buffer."""
    buffer = Buffer(dist.group.WORLD, device="cpu")
    elastic = ElasticBuffer(dist.group.WORLD, None, 0, 4, device="cpu")
    x, ids = torch.zeros(3, H).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    of_low = buffer.low_latency_dispatch(x, ids, 4, E, use_fp8=False)[2]
    of_elastic = elastic.dispatch(x, ids, num_experts=E, do_cpu_sync=False)[3]
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(ids, E)
    layout = per_rank, None, mask, per_expert
    of_normal = buffer.dispatch(x, None, *layout, num_worst_tokens=3)[4]
    for one in (buffer, elastic, of_low, of_elastic, of_normal):
        for copied in (copy.deepcopy, pickle.dumps):
            with raises(TypeError, "max_ep: a Buffer, an Ela; cannot be pickled"):
                copied(one)
    buffer.destroy()
    elastic.destroy()
