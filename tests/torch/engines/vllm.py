# SPDX-License-Identifier: Apache-2.0
"""vLLM's managers, and what they prepare and finalize: low latency, high throughput,
and DeepEP V2."""

import importlib
import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from max_ep.torch import dequantize
from tests.torch.engines import (
    CAP,
    E,
    K,
    close,
    fp8_in_blocks,
    given_to,
    leave_out,
    padded_experts,
    plain_layer,
)

H = 2048
"""The smallest that its low-latency class takes."""
_ABSENT = (
    "vllm.v1.structured_output",
    "vllm.multimodal",
    "vllm._C",
    "aiohttp",
    "cbor2",
    "cloudpickle",
    "cpuinfo",
    "einops",
    "openai_harmony",
    "triton_kernels.matmul",
)
_LAYERS = "vllm.model_executor.layers.fused_moe"


def _load(rank: int, n_ranks: int) -> SimpleNamespace:
    """Imports its modules, on a platform with these ranks and one rank of each DP."""
    leave_out(*_ABSENT)
    os.environ |= {"EP_DISABLE_GIN": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    platforms = importlib.import_module("vllm.platforms")
    interface = importlib.import_module("vllm.platforms.interface")

    class Platform(interface.Platform):
        """Has all-to-all backends, and none of vLLM's compiled kernels."""

        _enum = interface.PlatformEnum.CUDA
        device_type = "cuda"

        def is_cuda(self) -> bool:
            return False

    platforms.current_platform = Platform()
    importlib.import_module("vllm.utils.import_utils")._get_runtime_nccl_version = (
        lambda: 23004
    )
    state = importlib.import_module("vllm.distributed.parallel_state")
    state.get_dp_group = lambda: SimpleNamespace(rank_in_group=rank, world_size=n_ranks)
    state.get_tp_group = lambda: SimpleNamespace(rank_in_group=0, world_size=1)
    state.in_the_same_node_as = lambda group, source_rank: [True] * n_ranks
    found = SimpleNamespace(
        managers=importlib.import_module(
            "vllm.distributed.device_communicators.all2all"
        ),
        utils=importlib.import_module(f"{_LAYERS}.all2all_utils"),
        config=importlib.import_module(f"{_LAYERS}.config"),
        reduce=importlib.import_module(f"{_LAYERS}.topk_weight_and_reduce"),
        fused=importlib.import_module(f"{_LAYERS}.utils"),
    )
    for name in ("ll", "ht", "v2"):
        module = importlib.import_module(f"{_LAYERS}.prepare_finalize.deepep_{name}")
        setattr(found, name, module)
    logging.disable(logging.WARNING)
    _replace_kernels(found)
    return found


def _replace_kernels(vllm: SimpleNamespace) -> None:
    """Puts torch in the place of vLLM's own kernels, which its wheel compiles."""

    def add_up(rows: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(rows.float().sum(1))

    vllm.reduce.ops.moe_sum = add_up

    vllm.fused.per_token_group_quant_fp8 = fp8_in_blocks

    def mxfp8(x: torch.Tensor, *_: Any) -> tuple[Any, Any]:
        blocks = x.float().unflatten(1, (-1, 32))
        most = blocks.abs().amax(2, keepdim=True).clamp(1e-4) / 448
        exponents = most.log2().ceil()
        values = (blocks / exponents.exp2()).to(torch.float8_e4m3fn)
        return values.flatten(1), (exponents.squeeze(2) + 127).to(torch.uint8)

    vllm.fused.mxfp8_e4m3_quantize = mxfp8

    def globalize(ids: Any, ends: Any, first: int, n_experts: int) -> torch.Tensor:
        is_row = torch.arange(len(ids)) < ends[-1]
        ids.copy_(torch.where(is_row[:, None] & (ids >= 0), ids + first, -1))
        return ids

    if torch.cuda.is_available():
        return
    vllm.v2._globalize_recv_topk_idx = globalize  # it is in Triton
    metadata = vllm.v2.mk.ExpertTokensMetadata

    def unpinned(counts: list[int], device: Any) -> Any:
        on_host = torch.tensor(counts, dtype=torch.int32)
        return metadata(expert_num_tokens=on_host, expert_num_tokens_cpu=on_host)

    metadata.make_from_list = staticmethod(unpinned)


def _moe(rank: int, n_ranks: int, kind: str) -> SimpleNamespace:
    """What a layer's configuration says to `maybe_make_prepare_finalize`."""
    flags = {f"use_deepep_{k}_kernels": k == kind for k in ("ll", "ht", "v2")}
    parallel = SimpleNamespace(
        use_passthrough_all2all=False, use_all2all_kernels=True, sp_size=1
    )
    return SimpleNamespace(
        **flags,
        moe_parallel_config=parallel,
        dp_size=n_ranks,
        max_num_tokens=CAP,
        hidden_dim=H,
        num_experts=E,
        num_local_experts=E // n_ranks,
        experts_per_token=K,
    )


def _rows_in_bfloat16(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    if scales is None:
        return rows
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return dequantize(rows, scales).bfloat16()


def _by_choice(rows: torch.Tensor, ids: torch.Tensor, mine: range) -> torch.Tensor:
    """Rows of each choice `[rows, top_k, hidden]`; of experts elsewhere 0."""
    is_here = ((ids >= mine.start) & (ids < mine.stop))[..., None]
    made = rows.float()[:, None] * (ids + 1)[..., None]
    return torch.where(is_here, made, 0).bfloat16()


def _layers(
    rank: int,
    vllm: SimpleNamespace,
    made_by: SimpleNamespace,
    quant: Any,
    of_experts: Callable[..., torch.Tensor],
) -> None:
    """Runs two layers at a time, as two micro-batches do: both are dispatched before
    the first is combined."""
    current = [0]
    for module in (vllm.ll, vllm.ht, vllm.v2):
        module.dbo_current_ubatch_id = lambda: current[0]
    reduce = vllm.reduce.TopKWeightAndReduceDelegate()
    is_quantized = quant.quant_dtype is not None
    for seed in range(4):
        pair = []
        for batch in (0, 1):
            current[0] = batch
            n = 0 if rank == seed else CAP - 3 * seed - batch
            x, ids, weights = given_to(rank, 2 * seed + batch, n, H)
            given = (x, weights, ids, E, None, False, quant)
            if seed % 2:
                got = made_by.prepare(*given)
            else:
                receiver = made_by.prepare_async(*given)
                if isinstance(receiver, tuple):
                    hook, receiver = receiver
                    hook()
                got = receiver()
            pair.append((x, ids, weights, got))
        for batch, (x, ids, weights, got) in enumerate(pair):
            current[0] = batch
            made, row_ids, row_weights = of_experts(*got)
            if row_ids is None:
                row_ids, row_weights = ids, weights
            y = torch.full_like(x, float("nan"))
            given = (y, made, row_weights, row_ids, False, reduce)
            if seed % 2:
                made_by.finalize(*given)
            else:
                receiver = made_by.finalize_async(*given)
                receivers = receiver if isinstance(receiver, tuple) else (receiver,)
                for receive in receivers:
                    receive()
            near = _near if is_quantized else close
            near(y, plain_layer(x, ids, weights))


def _near(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=0.1, atol=0.4)


def vllm(rank: int, n_ranks: int) -> None:
    loaded = _load(rank, n_ranks)
    n_local = E // n_ranks
    mine = range(rank * n_local, (rank + 1) * n_local)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def padded(rows: Any, scales: Any, meta: Any, ids: Any, weights: Any) -> Any:
        rows = _rows_in_bfloat16(rows, scales)
        return padded_experts(rows, meta.expert_num_tokens, mine.start), ids, weights

    def by_choice(rows: Any, scales: Any, meta: Any, ids: Any, weights: Any) -> Any:
        rows = _rows_in_bfloat16(rows, scales)
        return _by_choice(rows, ids, mine), ids, weights

    make = loaded.config.FusedMoEQuantConfig.make
    plain = make(None)
    blocks = make(torch.float8_e4m3fn, block_shape=[128, 128])
    mxfp8 = make("mxfp8", block_shape=[1, 32], is_scale_swizzled=False)
    world = dist.group.WORLD
    parallel = SimpleNamespace(enable_fault_tolerance=False)
    model = SimpleNamespace(enforce_eager=True)
    settings = SimpleNamespace(parallel_config=parallel, model_config=model)
    loaded.managers.get_current_vllm_config = lambda: settings
    loaded.utils.get_current_vllm_config = lambda: settings
    n_most = torch.full((n_ranks,), CAP)
    data = SimpleNamespace(num_tokens_across_dp_cpu=n_most)
    loaded.v2.get_forward_context = lambda: SimpleNamespace(dp_metadata=data)

    def layers(kind: str, manager: Any, quant: Any, of_experts: Any) -> None:
        moe = _moe(rank, n_ranks, kind)
        made_by = loaded.utils.maybe_make_prepare_finalize(
            moe, quant, all2all_manager=manager
        )
        _layers(rank, loaded, made_by, quant, of_experts)

    manager = loaded.managers.DeepEPLLAll2AllManager(world)
    for quant in (plain, blocks):
        layers("ll", manager, quant, padded)
    manager.destroy()
    manager = loaded.managers.DeepEPHTAll2AllManager(world)
    manager.set_num_sms(20)
    for quant in (plain, blocks):
        layers("ht", manager, quant, by_choice)
    manager.destroy()
    manager = loaded.managers.DeepEPV2All2AllManager(world)
    if device == "cpu":
        manager._gin_checked = True  # it makes a CUDA tensor
    for eager in (True, False):
        model.enforce_eager = eager
        for quant in (plain, blocks, mxfp8):
            layers("v2", manager, quant, by_choice)
    assert manager.max_sms_used() > 0
    manager.destroy()
