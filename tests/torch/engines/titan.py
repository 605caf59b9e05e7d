# SPDX-License-Identifier: Apache-2.0
"""torchtitan: `dispatch_tokens` and `combine_tokens`, training and inference."""

import importlib.util
import sys
from types import ModuleType

import torch
import torch.distributed as dist

from tests.torch.engines import (
    CAP,
    E,
    K,
    close,
    experts,
    folder,
    given_to,
    plain_layer,
)

H = 256


def _module() -> ModuleType:
    """Loads one file, without the packages around it."""
    file, name = folder() / "torchtitan/distributed/deepep/deepep.py", "titan_deepep"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def torchtitan(rank: int, n_ranks: int) -> None:
    titan = _module()
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
        x, ids, weights = given_to(rank, seed, CAP, H)
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
            x, ids, weights = given_to(rank, seed, 12, H)
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
