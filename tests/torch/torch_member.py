# SPDX-License-Identifier: Apache-2.0
"""What processes of `test_torch.py` do, on CPU or GPU tensors."""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from max_ep import extension, reference
from max_ep.torch import Buffer, Config, ElasticBuffer, library
from tests.children import ALL_CASES
from tests.oracle.row_layouts import pad

E, K, H, CAP = 8, 3, 256, 32
TIMEOUT_S = float(os.environ.get("MAX_EP_TIMEOUT_S") or 3)
"""How long a group waits in which a rank is missing."""
N_NORMAL = 2048
"""Tokens that memory of normal calls is made for. An `ElasticBuffer` of as many shares
their library."""
COMPILE_S = 60.0
"""How much longer than another a rank may compile on a busy machine."""


def builds_more(buffer: Buffer) -> bool:
    """Returns whether to make calls that need more than three libraries: of low-latency
    calls, of rows with their choices, and of numbers."""
    return ALL_CASES or buffer._comm.is_gpu


def tokens_of(rank: int, generation: int, hidden: int = H) -> tuple[torch.Tensor, ...]:
    """Tokens, ids (some -1) and weights of a rank, the same on every rank."""
    generator = torch.Generator().manual_seed(100 * generation + rank)
    n = (CAP, 7, 0, 19)[(rank + generation) % 4]
    x = torch.randn(n, hidden, generator=generator).bfloat16()
    ids = torch.rand(n, E, generator=generator).topk(K, -1).indices
    ids[torch.rand(n, K, generator=generator) < 0.2] = -1
    return x, ids, torch.rand(n, K, generator=generator)


def bits(x: torch.Tensor) -> np.ndarray:
    """Shows bfloat16 to NumPy, as the oracle has it."""
    return x.cpu().view(torch.uint16).numpy()


def open_group(rank: int, n_ranks: int, store: str) -> None:
    """``store``: a file, or where a store is that runs already."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    where = store if "://" in store else f"file://{store}"
    dist.init_process_group("gloo", where, rank=rank, world_size=n_ranks)


def open_buffer(
    group: Any = None, timeout_s: float = COMPILE_S, **options: Any
) -> Buffer:
    return Buffer(group or dist.group.WORLD, timeout_s=timeout_s, **options)


def given_to(buffer: Buffer, generation: int = 0) -> list[torch.Tensor]:
    return [t.to(buffer._comm.device) for t in tokens_of(buffer.rank, generation)]


def layout_of(buffer: Buffer, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(ids, E)
    return dict(
        num_tokens_per_rank=per_rank,
        is_token_in_rank=mask,
        num_tokens_per_expert=per_expert,
    )


def check_low_latency(buffer: Buffer, generation: int, kind: str, hook: bool) -> Any:
    """A dispatch and a combine, against the oracle; returns what has to be repeated."""
    rank, n_ranks = buffer.rank, buffer.group_size
    device = buffer._comm.device
    all_ = [
        tokens_of(r, generation, 512 if kind == "ue8m0" else H) for r in range(n_ranks)
    ]
    x, ids, weights = (t.to(device) for t in all_[rank])
    is_pow2 = kind in ("round", "ue8m0")
    stats = torch.zeros(E // n_ranks, dtype=torch.int32, device=device)
    waits = torch.zeros(n_ranks, dtype=torch.int64, device=device)
    got, counts, handle, event, receive = buffer.low_latency_dispatch(
        x, ids, CAP, E, stats, waits if hook else None, kind != "bf16", is_pow2,
        kind == "ue8m0", async_finish=not hook, return_recv_hook=hook,
    )  # fmt: skip
    receive() if hook else event.current_stream_wait()
    given = [bits(t) for t, *_ in all_]
    quantize = None
    if kind != "bf16":
        given = [t.float().numpy() for t, *_ in all_]
        quantize = lambda t: reference.quantize_blockwise_fp8(t, is_pow2)  # noqa: E731
    results = reference.dispatch(
        given, [i.numpy() for _, i, _ in all_], E, quantize=quantize
    )
    want = pad(results[rank], n_ranks, n_ranks * CAP)
    rows, scales = got if kind != "bf16" else (got, None)
    assert counts.tolist() == want.recv_counts.tolist() == stats.tolist()
    src_info, ranges, cap, hidden, n_experts = handle
    assert (cap, n_experts, len(handle)) == (CAP, E, 5)
    begins, sizes = ranges.cpu() >> 32, ranges.cpu() & 0xFFFFFFFF
    assert np.array_equal(torch.stack([begins, sizes], 2).numpy(), want.recv_ranges)
    for e, n in enumerate(want.recv_counts):
        own = rows[e, :n].cpu()
        own = own.view(torch.uint8).numpy() if quantize else bits(own)
        assert np.array_equal(own, want.rows[e, :n])
        assert np.array_equal(src_info[e, :n].cpu(), want.src_info[e, :n, 0])
        if quantize:
            scale = want.scales[e, :, :n].T
            if kind == "ue8m0":
                exponents = (scale.view(np.int32) >> 23).astype(np.uint8)
                scale = np.ascontiguousarray(exponents).view(np.int32)
            got_scales = scales[e, :n].cpu().numpy()
            where = f"{kind}, generation {generation}, expert {e}, hook={hook}"
            assert np.array_equal(got_scales, scale), (where, got_scales, scale)
    is_plain = kind == "bf16"
    y_rows = rows * 2 if is_plain else torch.zeros_like(rows, dtype=torch.bfloat16)
    if generation % 2:
        buffer.get_next_low_latency_combine_buffer(handle).copy_(y_rows)
    out = torch.empty(len(x), hidden, dtype=torch.bfloat16, device=device)
    for _ in range(2):  # DeepEP's own test combines twice
        y, event, receive = buffer.low_latency_combine(
            y_rows, ids, weights, handle, zero_copy=bool(generation % 2), out=out,
            async_finish=not hook, return_recv_hook=hook,
        )  # fmt: skip
        receive() if hook else event.current_stream_wait()
        assert y is out
    if kind == "bf16":
        doubled = [2 * reference.bfloat16_to_float32(r.rows) for r in results]
        given_weights = [w.numpy() for *_, w in all_]
        sums = reference.combine(doubled, results, given_weights)
        if buffer._low_latency._sums:
            to_bf16 = lambda t: reference.bfloat16_to_float32(  # noqa: E731
                reference.float32_to_bfloat16(t)
            )
            how = dict(round_partial=to_bf16, round_sum=to_bf16, rounds_own=True)
            sums = reference.combine_sums(doubled, results, given_weights, **how)
        assert np.array_equal(bits(y), reference.float32_to_bfloat16(sums[rank]))
    return y.cpu().clone()


def low_latency(buffer: Buffer, kinds: list[str]) -> None:
    for kind in kinds:
        runs = [check_low_latency(buffer, g, kind, bool(g // 2 % 2)) for g in range(4)]
        for g, first in enumerate(runs):
            again = check_low_latency(buffer, g, kind, not g // 2 % 2)
            assert torch.equal(first, again), f"generation {g} is not repeated"


def sums(other: Buffer) -> None:
    """Combine of sums, whose weights come with combine."""
    try:
        buffer = open_buffer(combine_mode="sums")
    except ValueError:
        assert other._comm.is_gpu and other._comm.shares_gpu
        return
    low_latency(buffer, ["bf16"])
    for generation in range(4):
        x, ids, weights = given_to(buffer, generation)
        got, want = doubled(buffer, x, ids, weights), want_doubled(x, ids, weights)
        torch.testing.assert_close(got.float(), want, rtol=2**-6, atol=2**-6)
    buffer.destroy()


def rows(_: Buffer) -> None:
    """Combine of rows."""
    buffer = open_buffer(combine_mode="rows")
    low_latency(buffer, ["bf16"])
    buffer.destroy()


def check_tokens_per_host(buffer: Buffer, ids: torch.Tensor) -> None:
    """Over one host there is no such count."""
    found, n_hosts = buffer.get_dispatch_layout(ids, E)[1], buffer._comm.n_hosts
    hosts = [{i * n_hosts // E for i in row if i >= 0} for row in ids.tolist()]
    want = [sum(host in x for x in hosts) for host in range(n_hosts)]
    assert (found is None) if n_hosts == 1 else (found.tolist() == want)


def normal(buffer: Buffer, is_fp8: bool = False) -> None:
    """Rows, ids and weights by source, and sums, also of an older handle."""
    rank, n_ranks = buffer.rank, buffer.group_size
    device, n_local = buffer._comm.device, E // buffer.group_size
    handles = []
    for generation in range(2):
        all_ = [tokens_of(r, generation) for r in range(n_ranks)]
        x, ids, weights = (t.to(device) for t in all_[rank])
        layout = layout_of(buffer, ids)
        per_rank, mask, per_expert = layout.values()
        goes = [((i // n_local == rank) & (i >= 0)).any(1) for _, i, _ in all_]
        assert mask[:, rank].tolist() == goes[rank].tolist()
        assert per_rank.tolist() == mask.sum(0).tolist()
        check_tokens_per_host(buffer, ids)
        assert per_expert.tolist() == [int((ids == e).sum()) for e in range(E)]
        given: Any = x
        if is_fp8:
            values = x.float().repeat(1, 2).to(torch.float8_e4m3fn)
            scales = torch.arange(4.0, device=device) + x[:, :1].float()
            given = (values, scales.T.contiguous().T)
        with_ids = dict(layout, topk_idx=ids, topk_weights=weights)
        rows, recv_ids, recv_weights, counts, handle, _ = buffer.dispatch(
            given, **with_ids, expert_alignment=4, previous_event=buffer.capture()
        )
        want = torch.cat([t[m] for (t, *_), m in zip(all_, goes)]).to(device)
        want_ids = (
            torch.cat([i[m] for (_, i, _), m in zip(all_, goes)]) - rank * n_local
        )
        want_ids[(want_ids < 0) | (want_ids >= n_local)] = -1
        want_weights = torch.cat([w[m] for (*_, w), m in zip(all_, goes)])
        want_weights[want_ids < 0] = 0
        assert torch.equal(recv_ids.cpu(), want_ids)
        assert torch.equal(recv_weights.cpu(), want_weights)
        n_of = [int((want_ids == e).sum()) for e in range(n_local)]
        assert counts == [-(-n // 4) * 4 for n in n_of]
        ends = torch.tensor([int(m.sum()) for m in goes]).cumsum(0)
        assert handle[0][:, rank].tolist() == ends.tolist()
        sources = torch.cat([m.nonzero()[:, 0] for m in goes])
        assert handle[3].tolist() == sources.tolist()
        if is_fp8:
            want_scales = torch.arange(4.0, device=device) + want[:, :1].float()
            assert torch.equal(rows[1], want_scales)
            repeated = want.float().repeat(1, 2).to(torch.float8_e4m3fn)
            assert torch.equal(rows[0].view(torch.uint8), repeated.view(torch.uint8))
            continue
        assert torch.equal(rows, want)
        handles.append((handle, rows, mask, x))
        worst = buffer.dispatch(x, **with_ids, num_worst_tokens=CAP * n_ranks)
        assert worst[3] == [] and len(worst[0]) == CAP * n_ranks
        assert torch.equal(worst[0][: len(want)], want)
        assert torch.equal(worst[1][: len(want)].cpu(), want_ids)
        assert bool((worst[1][len(want) :] == -1).all())
        later = dict(async_finish=True, allocate_on_comm_stream=True)
        event = buffer.capture()
        few = dict(config=Config(num_sms=8))
        has_ids = not builds_more(buffer)
        how = with_ids if has_ids else layout
        plain = buffer.dispatch(x, **how, **later, **few, previous_event=event)
        used = {region._n_sms for channel in buffer._channels.opened.values()
                for region in channel.regions}  # fmt: skip
        assert used == {0, 64}  # no fewer
        with plain[5]:
            pass
        assert torch.equal(plain[0], want) and plain[3] == n_of
        if has_ids:
            assert torch.equal(plain[1].cpu(), want_ids)
        else:
            assert plain[1] is None
        repeated = buffer.dispatch(x * 2, handle=handle)
        assert torch.equal(repeated[0], want * 2) and repeated[1] is None
    # The older handle last: a backward pass goes that way.
    for handle, rows, mask, x in handles[::-1] if builds_more(buffer) else handles[-1:]:
        n = mask.sum(1, keepdim=True)
        of_rows = None
        if builds_more(buffer):
            of_rows = torch.rand(len(rows), K, device=device)
        y, sums, _ = buffer.combine(rows, handle, topk_weights=of_rows)
        assert torch.equal(y, (x.float() * n).bfloat16())
        assert sums is None if of_rows is None else sums.shape == (len(x), K)
        bias = torch.ones_like(x, requires_grad=True)
        both = buffer.combine(rows, handle, bias=(bias, bias))[0]
        assert not both.requires_grad  # a gradient of the bias alone would be wrong
        # In float32, before the sum is rounded.
        torch.testing.assert_close(both, (x.float() * n + 2).bfloat16())


def doubled(
    buffer: Buffer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """A layer whose experts double; what was sent is written over at once."""
    x = x.clone()
    rows, _, handle, _, hook = buffer.low_latency_dispatch(
        x, ids, CAP, E, use_fp8=False, return_recv_hook=True
    )
    x.zero_()
    hook()
    rows = rows * 2
    y, _, hook = buffer.low_latency_combine(
        rows, ids, weights, handle, return_recv_hook=True
    )
    rows.zero_()
    hook()
    return y


def doubled_normal(
    buffer: Buffer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The same by normal calls; the host waits for nothing."""
    how = dict(layout_of(buffer, ids), num_worst_tokens=CAP * buffer.group_size)
    rows, _, row_weights, _, handle, _ = buffer.dispatch(
        x, **how, topk_idx=ids, topk_weights=weights
    )
    y = rows.float() * 2 * row_weights.sum(1, keepdim=True)
    return buffer.combine(y.bfloat16(), handle)[0]


def want_doubled(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return 2 * x.float() * weights.masked_fill(ids < 0, 0).sum(1, keepdim=True)


def compiled(_: Buffer) -> None:
    """`torch.compile` keeps the calls in one graph, in order."""
    buffer = open_buffer()
    layer = torch.compile(doubled, fullgraph=True, backend="aot_eager", dynamic=True)
    for generation in range(4):
        given = given_to(buffer, generation)
        assert torch.equal(layer(buffer, *given), doubled(buffer, *given))
    normal_layer = torch.compile(doubled_normal, backend="aot_eager")
    assert torch.equal(normal_layer(buffer, *given), doubled_normal(buffer, *given))
    buffer.destroy()


def captured(buffer: Buffer) -> None:
    """A graph is replayed with other tokens, and eager calls between."""
    device = buffer._comm.device
    x = torch.zeros(CAP, H, dtype=torch.bfloat16, device=device)
    ids = torch.arange(K, device=device).repeat(CAP, 1)
    weights = torch.zeros(CAP, K, device=device)
    for layer in (doubled, doubled_normal):
        layer(buffer, x, ids, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(buffer, x, ids, weights)
        for generation in range(6):
            generator = torch.Generator().manual_seed(100 * generation + buffer.rank)
            x.copy_(torch.randn(CAP, H, generator=generator))
            ids.copy_(torch.rand(CAP, E, generator=generator).topk(K, -1).indices)
            ids[generation::7, 0] = -1
            weights.copy_(torch.rand(CAP, K, generator=generator))
            graph.replay()
            bound = 2**-6 if layer is doubled_normal else 2**-7
            want = want_doubled(x, ids, weights)
            torch.testing.assert_close(y.float(), want, rtol=bound, atol=bound)
            again = layer(buffer, x, ids, weights)
            assert torch.equal(y, again), f"generation {generation}"


def other_arguments(buffer: Buffer) -> str:
    """Rank 1 calls with another size; every rank says so, and goes on."""
    x, ids, _ = given_to(buffer)
    try:
        n = CAP + 1 if buffer.rank == 1 else CAP + 2
        buffer.low_latency_dispatch(x, ids, n, E, use_fp8=False)
    except ValueError as error:
        check_low_latency(buffer, 0, "bf16", False)
        return str(error)
    raise AssertionError("nothing was raised")


SCENARIOS: dict[str, Callable[..., Any]] = {
    "low_latency": low_latency,
    "sums": sums,
    "rows": rows,
    "normal": normal,
    "normal_fp8": lambda buffer: normal(buffer, True),
    "compiled": compiled,
    "captured": captured,
    "other_arguments": other_arguments,
}


def member(
    rank: int, n_ranks: int, store: str, names: list[str], kinds: list[str]
) -> dict[str, tuple[str, Any]]:
    """Runs scenarios; returns of each the error, "" if there is none, and a value."""
    open_group(rank, n_ranks, store)
    buffer = open_buffer()
    outcomes: dict[str, tuple[str, Any]] = {}
    for name in names:
        try:
            more = [kinds] if name == "low_latency" else []
            outcomes[name] = ("", SCENARIOS[name](buffer, *more))
        except Exception:
            outcomes[name] = (traceback.format_exc(), None)
            break
    buffer.destroy()
    dist.destroy_process_group()
    return outcomes


def ahead(rank: int, store: str) -> str:
    """A layer of each interface where nothing can be compiled; returns what a call
    without a library says."""

    def fail(*_: Any) -> str:
        raise RuntimeError("nothing can be compiled")

    extension.run_mojo = library.run_mojo = fail
    open_group(rank, 2, store)
    buffer = open_buffer(timeout_s=COMPILE_S)
    given = tokens_of(1, 0)
    want = want_doubled(*given)
    for layer in (doubled, *[doubled_normal] * ALL_CASES):
        torch.testing.assert_close(
            layer(buffer, *given).float(), want, rtol=0.03, atol=0.03
        )
    x, ids, weights = given
    if ALL_CASES:
        elastic = ElasticBuffer(buffer.group, None, 0, 16, timeout_s=COMPILE_S)
        rows, _, of_rows, handle, _ = elastic.dispatch(x, ids, weights, num_experts=E)
        y, back, _ = elastic.combine(rows, handle, of_rows)
        n_ranks = sum((ids // (E // 2) == r).any(1) for r in range(2))
        assert torch.equal(y, (x.float() * n_ranks[:, None]).bfloat16())
        assert torch.equal(back, weights.masked_fill(ids < 0, 0))
    try:
        buffer.low_latency_dispatch(x, ids, CAP - 1, E, format="mxfp8")
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
    return "compiled"


PHASES = ("dispatch", "dispatch_wait", "combine", "combine_wait")


def killed(rank: int, store: str, phase: str) -> None:
    """Rank 1 dies before it makes a phase's launch; rank 0 goes on until it raises."""
    open_group(rank, 2, store)
    buffer = open_buffer(timeout_s=TIMEOUT_S)
    check_low_latency(buffer, 0, "bf16", False)
    x, ids, weights = given_to(buffer, 1)

    def look() -> None:
        while buffer.who_waits().ranks[0].missing != [1]:
            time.sleep(0.05)

    def reach(reached: str) -> None:
        if rank == 1 and reached == phase:
            if buffer._comm.is_gpu:
                torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)

    looks = threading.Thread(target=look, daemon=True)
    looks.start()
    try:
        while True:
            reach("dispatch")
            got, _, handle, _, receive = buffer.low_latency_dispatch(
                x, ids, CAP, E, use_fp8=False, return_recv_hook=True
            )
            reach("dispatch_wait")
            receive()
            reach("combine")
            *_, receive = buffer.low_latency_combine(
                got, ids, weights, handle, return_recv_hook=True
            )
            reach("combine_wait")
            receive()
            buffer.check()
    finally:
        looks.join(1)
        assert not looks.is_alive(), "who_waits() named nobody"
