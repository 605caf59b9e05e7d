# SPDX-License-Identifier: Apache-2.0
"""Wrong calls of `Buffer` and `ElasticBuffer`, drawn: one argument of a right call is
of another kind. Each is refused in our words, before other ranks are waited for or
anything is launched."""

from typing import Any

import numpy as np
import torch

from max_ep.torch import Buffer, Config, ElasticBuffer, dequantize
from max_ep.torch import get_logical_domain_size as domain_size
from tests.errors import raises
from tests.torch import elastic_case
from tests.torch.torch_member import (
    CAP,
    COMPILE_S,
    N_NORMAL,
    E,
    H,
    given_to,
    layout_of,
)

Calls = dict[str, tuple[Any, dict[str, Any], dict[str, list[Any]]]]
"""A function for each name, its right arguments, and wrong ones."""

NO_TENSORS = [3, 2.5, "a", b"x", [1], {}, object(), np.zeros((2, 3))]
NO_SIZES = [None, "a", 2.5, float("nan"), True, [8], -1, 0, 2**40, torch.tensor(8)]
NO_FLAGS = ["no", None, 0.5, [], torch.ones(1)]
NO_ASKING = ["no", 0.5, torch.ones(1)]  # where None and [] ask for nothing
NO_EVENTS = [1, "a", torch.ones(1)]


def tensors_like(good: torch.Tensor) -> list[Any]:
    """Other things, and tensors of another dtype, shape, place, or order."""
    rows = good.repeat(2, *[1] * (good.ndim - 1))
    wrong = [
        *NO_TENSORS,
        good.double(),
        good[None],
        good.to("meta"),
        good.flatten()[:0],
    ]
    if good.ndim > 1:
        wrong += [rows.transpose(0, 1), good[:, :0], torch.cat([good, good], 1)[:, ::2]]
    return wrong if len(good) else [*NO_TENSORS, good.double(), good.to("meta")]


def shifted(good: torch.Tensor) -> torch.Tensor:
    """The same elements, where no 16 bytes begin."""
    moved = good.new_empty(good.numel() + 1)[1:].view(good.shape)
    return moved.copy_(good)


def calls_of(buffer: Buffer) -> Calls:
    x, ids, weights = given_to(buffer, (4 - buffer.rank) % 4)  # on no rank none
    n_ranks, n_local = buffer.group_size, E // buffer.group_size
    stats = torch.zeros(n_local, dtype=torch.int32, device=x.device)
    waits = torch.zeros(n_ranks, dtype=torch.int64, device=x.device)
    good = dict(x=x, topk_idx=ids, num_max_dispatch_tokens_per_rank=CAP, num_experts=E)
    rows, _, handle, *_ = buffer.low_latency_dispatch(**good, use_fp8=False)
    layout = layout_of(buffer, ids)
    sent = dict(layout, x=x, topk_idx=ids, topk_weights=weights)
    received, *_, normal, _ = buffer.dispatch(**sent)
    sizes = [ids.new_full((1,), n, device="cpu") for n in (0, -1, 2**40)]
    no_items = [(normal[0], n, *normal[2:]) for n in sizes]
    names = "cumulative_local_expert_recv_stats", "dispatch_wait_recv_cost_stats"
    combined = dict(x=rows, topk_idx=ids, topk_weights=weights, handle=handle)
    no_handles = [*NO_TENSORS, None, (), (1, 2), [None] * 6, x, Buffer]
    far = ids.clone()
    far[0, 0] = 2**40
    mask = layout["is_token_in_rank"]
    flags = dict.fromkeys(("use_fp8", "round_scale", "use_ue8m0"), NO_FLAGS)
    later = dict.fromkeys(("async_finish", "return_recv_hook"), NO_FLAGS[:1])
    when = dict(previous_event=NO_EVENTS, async_finish=NO_ASKING)
    when["allocate_on_comm_stream"] = NO_ASKING
    how = dict(when, config=[24, "a", {}, Config])
    no_dtypes = ["bfloat16", 3, np.float32]
    no_groups = ["a", 3, object(), [buffer.group]]
    no_devices = ["0", "gpu", 3.5, -1, [], "meta", "cuda:99"]
    return {
        "low_latency_dispatch": (
            buffer.low_latency_dispatch,
            good | dict(use_fp8=False),
            dict(
                x=[None, shifted(x), *tensors_like(x)],
                topk_idx=[None, *tensors_like(ids)],
                num_max_dispatch_tokens_per_rank=NO_SIZES,
                num_experts=NO_SIZES,
                **dict(zip(names, (tensors_like(stats), tensors_like(waits)))),
                **flags,
                **later,
                use_nvfp4=[True],
                x_global_scale=[x],
                x_ori=[x],
                nobody_has_this=[None, 1],
            ),
        ),
        "low_latency_combine": (
            buffer.low_latency_combine,
            combined,
            dict(
                x=[None, shifted(rows), *tensors_like(rows)],
                topk_idx=[None, *tensors_like(ids)],
                topk_weights=[None, *tensors_like(weights)],
                handle=no_handles,
                out=[shifted(x), *tensors_like(x)],
                **later,
                zero_copy=[True],
                combine_wait_recv_cost_stats=tensors_like(waits),
                overlap=[True],
                src_signals=[waits],
                block_m=[64],
                x_ori=[x],
            ),
        ),
        "get_dispatch_layout": (
            buffer.get_dispatch_layout,
            dict(topk_idx=ids, num_experts=E),
            dict(
                topk_idx=[None, *tensors_like(ids)[: len(NO_TENSORS) + 3]],
                num_experts=NO_SIZES,
                **when,
            ),
        ),
        "dispatch": (
            buffer.dispatch,
            sent,
            dict(
                x=[
                    shifted(x),
                    None,
                    (x,),
                    (x, x, x),
                    (x, None, 3),
                    *tensors_like(x)[:8],
                ],
                # The host does not look at ids on a GPU.
                topk_idx=[*([] if x.is_cuda else [far]), *tensors_like(ids)],
                topk_weights=[None, *tensors_like(weights)],
                num_tokens_per_rank=[None, *tensors_like(stats)],
                num_tokens_per_expert=[None, *tensors_like(layout["is_token_in_rank"])],
                is_token_in_rank=[None, *tensors_like(mask)],
                handle=[h for h in no_handles if h is not None],
                expert_alignment=NO_SIZES[:-2],
                num_worst_tokens=["a", 2.5, -1, None, torch.tensor(8)],
                **how,
            ),
        ),
        "combine": (
            buffer.combine,
            dict(x=received, handle=normal),
            dict(
                x=[None, shifted(received), *tensors_like(received)],
                handle=[*no_handles, *no_items],
                topk_weights=NO_TENSORS,
                bias=[*NO_TENSORS, (x, "a"), shifted(x)],
                **how,
            ),
        ),
        "Buffer": (
            Buffer,
            dict(group=buffer.group),
            dict(
                group=[None, *no_groups],
                timeout_s=["a", 0, -1, float("nan"), float("inf"), True, [3]],
                device=no_devices,
                num_nvl_bytes=["a", 2.5, -1, None, True],
                combine_mode=["a", 3, True, ["sums"]],
            ),
        ),
        "of mpi": (Buffer, dict(group=None), dict(comm=["a", 3, object()])),
        "set_num_sms": (
            Buffer.set_num_sms,
            dict(new_num_sms=20),
            dict(new_num_sms=["a", 3, 2.0, None, -2, True, [2], torch.tensor(2)]),
        ),
        "get_nvl_buffer_size_hint": (
            Config().get_nvl_buffer_size_hint,
            dict(hidden_bytes=512, num_ranks=8),
            dict(hidden_bytes=["a", None, -1, 2.5], num_ranks=["a", None, 0]),
        ),
        "get_local_buffer_tensor": (
            buffer.get_local_buffer_tensor,
            dict(dtype=torch.bfloat16),
            dict(dtype=no_dtypes, size=[x.shape], offset=[1]),
        ),
        "get_next_low_latency_combine_buffer": (
            buffer.get_next_low_latency_combine_buffer,
            dict(handle=handle),
            dict(handle=no_handles),
        ),
        "dequantize": (
            dequantize,
            dict(
                rows=torch.zeros(2, 128).to(torch.float8_e4m3fn),
                scales=torch.ones(2, 1),
            ),
            dict(
                rows=[*NO_TENSORS, x.double()], scales=[*NO_TENSORS, torch.ones(2, 3)]
            ),
        ),
    }


def elastic_calls_of(buffer: ElasticBuffer) -> Calls:
    case = elastic_case.Case(buffer, (4 - buffer.rank_idx) % 4)
    x, ids, weights = case.x, case.ids, case.weights
    no_handles = [*NO_TENSORS, (), (1, 2), x, ElasticBuffer]
    flags = dict.fromkeys(
        ("do_expand", "do_zero_padding", "do_handle_copy"), NO_FLAGS
    ) | dict(do_cpu_sync=[*NO_FLAGS[:1], *NO_FLAGS[2:]])
    flags["use_tma_aligned_col_major_sf"] = NO_FLAGS
    names = "previous_event", "previous_event_before_epilogue"
    when = dict.fromkeys(names, NO_EVENTS) | dict(allocate_on_comm_stream=NO_ASKING)
    when["async_with_compute_stream"] = NO_ASKING
    no_sms = ["a", 2.5, -1, True, [8], torch.tensor(8)]
    stats = torch.zeros(case.n_local, dtype=torch.int32, device=x.device)
    far = [ids + 2**40, ids.clamp(max=0) - 2] if not x.is_cuda else []
    pair = x.to(torch.float8_e4m3fn), torch.ones(len(x), 2, device=x.device)
    no_pairs = [(x,), (x, x, x), (x, None), (x, pair[1]), pair[:1], [*pair, x]]
    no_pairs += [(pair[0], s) for s in (pair[1].double(), pair[1][1:], pair[1][:, :0])]
    good = dict(x=x, topk_idx=ids, topk_weights=weights, num_experts=E)
    sizes = dict(num_max_tokens_per_rank=[1, *NO_SIZES[1:]], num_sms=no_sms)
    sizes["expert_alignment"] = NO_SIZES[1:7]
    rows, recv_ids, recv_weights, handle, _ = case.dispatch()
    no_sizes = ["a", 2.5, -1, True]
    no_groups = ["a", 3, object(), [buffer.group]]
    group = dict(group=buffer.group, num_max_tokens_per_rank=8)
    return {
        "ElasticBuffer.dispatch": (
            buffer.dispatch,
            good,
            dict(
                x=[None, shifted(x), *no_pairs, *unlike(x), x.half(), x[:, :4], x[1:]],
                topk_idx=[ids.int(), *far, *unlike(ids)],
                topk_weights=[weights.bfloat16(), weights[1:], *unlike(weights)],
                cumulative_local_expert_recv_stats=tensors_like(stats),
                num_experts=[7, *NO_SIZES][buffer.num_ranks == 1 :],
                handle=no_handles,
                format=["a", 3, [1]],
                **sizes,
                **flags,
                **when,
            ),
        ),
        "ElasticBuffer.dispatch of a handle": (
            buffer.dispatch,
            dict(x=x, handle=handle),
            dict(
                x=[x[1:], x.float(), x[:, :4], shifted(x)],
                topk_idx=[ids],
                topk_weights=[weights[1:], weights.double(), weights[:, :2]],
                num_experts=["a", 2 * E],
                num_max_tokens_per_rank=["a", 3],
                expert_alignment=["a", 3],
                do_cpu_sync=[True],
                do_expand=[True],
            ),
        ),
        "ElasticBuffer.combine": (
            buffer.combine,
            dict(x=rows, handle=handle),
            dict(
                x=[None, shifted(rows), rows.float(), rows[:, :4], *unlike(rows)],
                handle=[None, *no_handles],
                topk_weights=[recv_weights.double(), recv_weights[:, :2], *NO_TENSORS],
                bias=[x.float(), x[1:], (x, x, x), (x, "a"), shifted(x), *NO_TENSORS],
                num_sms=no_sms,
                **when,
            ),
        ),
        "ElasticBuffer": (
            ElasticBuffer,
            group,
            dict(
                group=[None, *no_groups],
                num_max_tokens_per_rank=[None, 70000, *no_sizes],
                hidden=[None, *no_sizes],
                num_topk=[None, *no_sizes],
                num_bytes=no_sizes,
                timeout_s=["a", 0, True],
                device=["0", "gpu", 3.5],
            ),
        ),
        "get_buffer_size_hint": (
            ElasticBuffer.get_buffer_size_hint,
            dict(group, hidden=256),
            dict(group=no_groups, hidden=no_sizes, num_max_tokens_per_rank=no_sizes),
        ),
        "get_logical_domain_size": (domain_size, {}, dict(group=no_groups)),
    }


def unlike(good: torch.Tensor) -> list[Any]:
    """What is wrong also where strides do not matter."""
    kind = good.shape, good.dtype, good.device
    return [
        one
        for one in tensors_like(good)
        if not isinstance(one, torch.Tensor)
        or (one.shape, one.dtype, one.device) != kind
    ]


def wrong_calls(buffer: Buffer) -> None:
    """Draws them for both classes."""
    refused_alone(buffer, calls_of(buffer), 300)
    most = dict(num_max_tokens_per_rank=N_NORMAL, timeout_s=COMPILE_S)
    elastic = ElasticBuffer(buffer.group, **most)
    refused_alone(elastic, elastic_calls_of(elastic), 250)
    elastic.destroy()
    if buffer.group_size > 1:
        more_rows_than_places(buffer)


def more_rows_than_places(buffer: Buffer) -> None:
    """Other ranks have more tokens than `num_worst_tokens` of the first is for."""
    device, n = buffer._comm.device, 2 if buffer.rank == 0 else 5
    x = torch.ones(n, H, device=device).bfloat16()
    ids = torch.tensor([[0, 1, -1]] * n, device=device)
    sent = dict(
        layout_of(buffer, ids),
        topk_idx=ids,
        topk_weights=torch.ones(n, 3, device=device),
    )

    def call() -> None:
        buffer.dispatch(x, **sent, num_worst_tokens=n * buffer.group_size)
        buffer.check()

    if buffer.rank != 0:
        call()
    else:
        said = f"the tensors hold {2 * buffer.group_size}; pass a larger num_worst"
        with raises(RuntimeError, said + "_tokens, or the same num_max_tokens"):
            call()
    buffer.reset()


def refused_alone(buffer: Buffer | ElasticBuffer, calls: Calls, least: int) -> None:
    """Texts begin with our name and say more than a type. There are more calls than
    ``least``."""
    wrong, n_calls = [], 0
    n_exchanges = buffer._comm.board.n_exchanges
    for name, (call, good, bad) in calls.items():
        for argument, values in bad.items():
            for value in values:
                n_calls += 1
                said = "it worked"
                try:
                    call(**{**good, argument: value})
                except (TypeError, ValueError, NotImplementedError) as error:
                    said = str(error)
                except Exception as error:
                    said = repr(error)
                if not said.startswith("max_ep: ") or len(said) < 20:
                    kind = getattr(value, "shape", value)
                    wrong.append(f"{name}({argument}={type(value)} {kind}): {said}")
    assert not wrong, "\n".join(wrong)
    assert n_calls > least
    assert buffer._comm.board.n_exchanges == n_exchanges, "ranks have waited"
