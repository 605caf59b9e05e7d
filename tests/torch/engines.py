# SPDX-License-Identifier: Apache-2.0
"""The engines' own classes over our `deep_ep`: what processes of `test_engines.py` do.

Their packages are installed without what they depend on (`make test-engines`). Modules
that have nothing to do with `deep_ep` are replaced.
"""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.children import ROOT
from tests.torch.torch_member import open_group

E, K, H, CAP = 8, 3, 256, 16
"""As in `torch_elastic.py`: the same kernels."""


def folder() -> Path:
    """Where the engines' packages are."""
    return Path(os.environ["MAX_EP_ENGINES"])


def module_of(file: str, name: str) -> ModuleType:
    """Loads one file of an engine, without the packages around it."""
    spec = importlib.util.spec_from_file_location(name, folder() / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def given_to(rank: int, seed: int, n: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(10 * seed + rank)
    x = torch.randn(n, H, generator=draw).bfloat16()
    ids = torch.rand(n, E, generator=draw).topk(K, -1).indices
    return x, ids, torch.rand(n, K, generator=draw) + 0.1


def experts(rows: torch.Tensor, counts: list[int], first: int) -> torch.Tensor:
    """Multiplies the rows of each expert by its number and 1; keeps those behind."""
    of = torch.arange(first, first + len(counts), device=rows.device) + 1
    factors = of.repeat_interleave(torch.tensor(counts, device=rows.device))
    made = rows[: len(factors)] * factors[:, None].to(rows.dtype)
    return torch.cat([made, rows[len(factors) :]])


def plain_layer(x: Any, ids: Any, weights: Any) -> torch.Tensor:
    factors = (weights * (ids + 1) * (ids >= 0)).sum(1, keepdim=True)
    return x.float() * factors


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=2**-5, atol=2**-3)


def torchtitan(rank: int, n_ranks: int) -> None:
    """`dispatch_tokens` and `combine_tokens` of 0.3: training, then inference."""
    titan = module_of("torchtitan/distributed/deepep/deepep.py", "titan_deepep")
    if not torch.cuda.is_available():
        # It registers its operators for CUDA only.
        torch.library.impl(titan._lib, "dispatch", "CPU")(titan._dispatch_op_impl)
        torch.library.impl(titan._lib, "combine", "CPU")(titan._combine_op_impl)
    sizes = dict(hidden=H, num_max_tokens_per_rank=CAP, num_topk=K)
    buffer = titan.get_buffer(dist.group.WORLD, **sizes)
    assert titan.get_buffer(dist.group.WORLD, **sizes) is buffer
    n_local = E // n_ranks
    layers = []
    for seed in (1, 2):
        x, ids, weights = given_to(rank, seed, CAP)
        x.requires_grad_()
        weights.requires_grad_()
        rows, counts, state = titan.dispatch_tokens(
            x, ids, weights, n_local, E, num_tokens_per_rank=CAP
        )
        made = experts(rows, counts.tolist(), rank * n_local)
        y = titan.combine_tokens(made, state)
        titan.sync_combine()
        close(y.detach(), plain_layer(x, ids, weights).detach())
        layers.append((x, ids, weights, y))
    for x, ids, weights, y in layers:
        y.float().sum().backward()
        got = x.grad.clone(), weights.grad.clone()
        x.grad = weights.grad = None
        plain_layer(x, ids, weights).sum().backward()
        close(got[0], x.grad)
        torch.testing.assert_close(got[1], weights.grad, rtol=0.05, atol=2.0)
    with torch.no_grad():
        for seed in (3, 4):
            x, ids, weights = given_to(rank, seed, 12)
            rows, counts, state = titan.dispatch_tokens(
                *(x, ids, weights, n_local, E),
                num_tokens_per_rank=12,
                cudagraphable=True,
            )
            made = experts(rows, counts.tolist(), rank * n_local)
            y = titan.combine_tokens(made, state)
            titan.sync_combine()
            close(y, plain_layer(x, ids, weights))
    buffer.destroy()


def _sglang() -> tuple[ModuleType, dict[str, Any]]:
    """Loads the dispatcher of V2; what it asks of a server is in the dictionary."""
    server = dict(extends=False)
    for name in ("", ".srt", ".srt.layers", ".srt.layers.moe", ".kernels",
                 ".srt.layers.moe.token_dispatcher", ".kernels.ops",
                 ".kernels.ops.quantization"):  # fmt: skip
        package = ModuleType(f"sglang{name}")
        package.__path__ = [str(folder() / f"sglang{name}".replace(".", "/"))]
        sys.modules[f"sglang{name}"] = package
    resources = SimpleNamespace(buffers={})
    moe = SimpleNamespace(deepep_v2_mode="direct")
    parallel = SimpleNamespace(attn_dp_size=2)

    class ScaleFormat(SimpleNamespace):
        pass

    replaced = {
        "srt.layers.dp_attention": dict(
            get_is_extend_in_batch=lambda: server["extends"]
        ),
        "srt.layers.moe.topk": dict(TopKOutput=object),
        "srt.layers.moe.utils": dict(
            DeepEPv2Fp8ScaleFormat=ScaleFormat,
            get_deepep_v2_fp8_scale_format=lambda: ScaleFormat(
                tma_aligned=False, ue8m0=False
            ),
        ),
        "srt.runtime_context": dict(
            get_exec=lambda: SimpleNamespace(moe=moe),
            get_parallel=lambda: parallel,
            get_resources=lambda: resources,
        ),
        "kernels.ops.quantization.fp8_kernel": dict(
            sglang_per_token_group_quant_fp8=None
        ),
    }
    for name, attributes in replaced.items():
        module = ModuleType(f"sglang.{name}")
        vars(module).update(attributes)
        sys.modules[f"sglang.{name}"] = module
    name = "sglang.srt.layers.moe.token_dispatcher.deepep_v2"
    return importlib.import_module(name), server


def sglang(rank: int, n_ranks: int) -> None:
    """`DeepEPv2Dispatcher` of 0.5.23: decode by expert, prefill by token."""
    os.environ["SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = str(CAP)
    os.environ["SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND"] = "0"
    v2, server = _sglang()
    n_local = E // n_ranks
    sizes = dict(router_topk=K, num_experts=E, num_local_experts=n_local, hidden_size=H)
    how = dict(params_dtype=torch.bfloat16, use_fp8_dispatch=False)
    dispatcher = v2.DeepEPv2Dispatcher(dist.group.WORLD, **sizes, **how)
    for seed in range(6):
        server["extends"] = seed % 2 == 1
        n = 0 if rank == seed % 4 else CAP - seed
        x, ids, weights = given_to(rank, seed, n)
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


ENGINES: dict[str, Callable[[int, int], None]] = dict(
    torchtitan=torchtitan, sglang=sglang
)


def member(rank: int, n_ranks: int, store: str, name: str) -> str:
    """Runs an engine's classes; returns what went wrong."""
    sys.path.insert(0, str(ROOT / "integrations/deep_ep"))
    open_group(rank, n_ranks, store)
    try:
        ENGINES[name](rank, n_ranks)
    except Exception:
        return traceback.format_exc()
    finally:
        dist.destroy_process_group()
    return ""
