# SPDX-License-Identifier: Apache-2.0
"""SGLang's dispatchers: normal and low latency, and the one of DeepEP V2."""

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from max_ep.torch import dequantize
from tests.torch.engines import (
    CAP,
    E,
    K,
    close,
    folder,
    fp8_in_blocks,
    given_to,
    leave_out,
    padded_experts,
    plain_layer,
    replace,
)

H = 256


def _server() -> dict[str, Any]:
    """Replaces what dispatchers ask of a server; it says what the batch is."""
    moe = SimpleNamespace(
        deepep_v2_mode="direct", deepep_dispatcher_output_dtype="auto"
    )
    server = dict(extends=False, moe=moe)
    for name in ("", ".srt", ".srt.layers", ".srt.layers.moe", ".kernels",
                 ".srt.layers.moe.token_dispatcher", ".kernels.ops",
                 ".kernels.ops.quantization"):  # fmt: skip
        package = ModuleType(f"sglang{name}")
        package.__path__ = [str(folder() / f"sglang{name}".replace(".", "/"))]
        sys.modules[f"sglang{name}"] = package
    nothing = SimpleNamespace(
        on_deepep_dispatch_normal=lambda *_, **__: None,
        on_deepep_dispatch_low_latency=lambda *_: None,
    )
    resources = SimpleNamespace(buffers={})
    flags = SimpleNamespace(deepep_config="", tbo_enabled=False)
    gemm = dict(
        ENABLE_JIT_DEEPGEMM=True,
        DEEPGEMM_SCALE_UE8M0=False,
        DEEPGEMM_BLACKWELL=False,
        DEEPGEMM_NEED_TMA_ALIGNED_SCALES=False,
    )
    replace("sglang.srt.layers.deep_gemm_wrapper", **gemm)
    sys.modules["sglang.srt.layers"].deep_gemm_wrapper = SimpleNamespace(**gemm)
    replace(
        "sglang.srt.layers.dp_attention",
        get_is_extend_in_batch=lambda: server["extends"],
        is_dp_attention_enabled=lambda: True,
    )
    replace("sglang.srt.layers.moe.topk", TopKOutput=object)
    replace(
        "sglang.srt.eplb.expert_distribution",
        get_global_expert_distribution_recorder=lambda: nothing,
    )
    asked = {
        f"get_{name}": (lambda: None) for name in ("forward", "lora", "model", "spec")
    }
    replace(
        "sglang.srt.runtime_context",
        **asked,
        get_flags=lambda: SimpleNamespace(moe=flags),
        get_exec=lambda: SimpleNamespace(moe=moe),
        get_parallel=lambda: SimpleNamespace(attn_dp_size=2),
        get_resources=lambda: resources,
        get_server_args=lambda: server,
    )
    replace(
        "sglang.srt.utils",
        __path__=[],
        get_bool_env_var=lambda name: False,
        get_cuda_version=lambda: (13, 0),
        is_cuda=torch.cuda.is_available,
        load_json_config=None,
        **{
            f"is_{name}": (lambda: False)
            for name in ("blackwell", "flashinfer_available", "hip", "npu")
        },
    )
    replace("sglang.srt.utils.common", log_info_on_rank0=None)
    replace(
        "sglang.kernels.ops.quantization.fp8_kernel",
        sglang_per_token_group_quant_fp8=fp8_in_blocks,
    )
    leave_out("sglang.srt.eplb", "sglang.srt.configs")
    return server


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"sglang.srt.layers.moe.token_dispatcher.{name}")


def sglang(rank: int, n_ranks: int) -> None:
    os.environ["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = str(CAP)
    os.environ["SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = str(CAP)
    os.environ["SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND"] = "0"
    server = _server()
    _v1(rank, n_ranks, server)
    _v2(rank, n_ranks, server)


def _v1(rank: int, n_ranks: int, server: dict[str, Any]) -> None:
    """Its dispatcher in mode "auto": prefill is normal, decode is low latency."""
    if not torch.cuda.is_available():
        about = SimpleNamespace(multi_processor_count=132)
        torch.cuda.get_device_properties = lambda device: about
    v1 = _module("deepep")
    n_local = E // n_ranks
    sizes = dict(router_topk=K, num_experts=E, num_local_experts=n_local, hidden_size=H)
    for dtype in ("bf16", "fp8"):
        server["moe"].deepep_dispatcher_output_dtype = dtype
        with_hook = v1.DeepEPDispatcher(
            dist.group.WORLD,
            **sizes,
            params_dtype=torch.bfloat16,
            deepep_mode=v1.DeepEPMode.AUTO,
            async_finish=True,
            return_recv_hook=True,
        )
        with_event = v1.DeepEPDispatcher(
            dist.group.WORLD,
            **sizes,
            params_dtype=torch.bfloat16,
            deepep_mode=v1.DeepEPMode.LOW_LATENCY,
            return_recv_hook=False,
        )
        assert with_hook._low_latency_dispatcher.use_fp8 == (dtype == "fp8")
        for seed in range(4):
            server["extends"] = seed % 2 == 1
            dispatcher = with_event if seed == 2 else with_hook
            n = 0 if rank == seed % 4 else CAP - seed
            x, ids, weights = given_to(rank, seed, n, H)
            topk = SimpleNamespace(topk_ids=ids.int(), topk_weights=weights)
            got = dispatcher.dispatch(x, topk)
            rows = got.hidden_states
            if got.hidden_states_scale is not None:
                rows = dequantize(rows, got.hidden_states_scale).bfloat16()
            if server["extends"]:
                is_here = got.topk_ids >= 0
                numbers = rank * n_local + got.topk_ids + 1
                factor = torch.where(is_here, got.topk_weights * numbers, 0).sum(1)
                made = (rows.float() * factor[:, None]).bfloat16()
                combined = v1.DeepEPNormalCombineInput
            else:
                made = padded_experts(rows, got.masked_m, rank * n_local)
                combined = v1.DeepEPLLCombineInput
            y = dispatcher.combine(combined(made, got.topk_ids, got.topk_weights))
            near = close if dtype == "bf16" else _near
            near(y, plain_layer(x, ids, weights))


def _near(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=0.1, atol=0.3)


def _v2(rank: int, n_ranks: int, server: dict[str, Any]) -> None:
    """The dispatcher of DeepEP V2: decode by expert, prefill by token."""
    v2 = _module("deepep_v2")
    n_local = E // n_ranks
    sizes = dict(router_topk=K, num_experts=E, num_local_experts=n_local, hidden_size=H)
    how = dict(params_dtype=torch.bfloat16, use_fp8_dispatch=False)
    dispatcher = v2.DeepEPv2Dispatcher(dist.group.WORLD, **sizes, **how)
    for seed in range(6):
        server["extends"] = seed % 2 == 1
        n = 0 if rank == seed % 4 else CAP - seed
        x, ids, weights = given_to(rank, seed, n, H)
        topk = SimpleNamespace(topk_ids=ids.int(), topk_weights=weights)
        got = dispatcher.dispatch(x, topk)
        rows = got.hidden_states
        if got.is_expanded:
            ends = got.psum_num_recv_tokens_per_expert.tolist()
            made = torch.full_like(rows, float("nan"))
            first = 0
            for i, end in enumerate(ends):
                mine = slice(first, end)
                factor = got.topk_weights[mine, None] * (rank * n_local + i + 1)
                made[mine] = (rows[mine].float() * factor).bfloat16()
                first = -(-end // got.expert_alignment) * got.expert_alignment
        else:
            is_here = got.topk_ids >= 0
            numbers = rank * n_local + got.topk_ids + 1
            factor = torch.where(is_here, got.topk_weights * numbers, 0).sum(1)
            made = (rows.float() * factor[:, None]).bfloat16()
        y = dispatcher.combine(v2.DeepEPv2CombineInput(made, got.topk_weights))
        assert y.shape == x.shape
        close(y, plain_layer(x, ids, weights))
