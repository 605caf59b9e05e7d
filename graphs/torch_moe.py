# SPDX-License-Identifier: Apache-2.0
"""An MoE layer in PyTorch whose experts are spread over ranks, and a training step.

    torchrun --nproc-per-node 4 graphs/torch_moe.py

Each rank has its own tokens and its share of the experts. Output and gradients are
compared with those of a plain layer that has all experts and the tokens of all ranks.
The backward pass of dispatch is combine, that of combine is dispatch.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from max_ep.torch import Buffer

N_EXPERTS, TOP_K, HIDDEN, INNER, N_TOKENS = 8, 3, 128, 64, 48


class Dispatch(torch.autograd.Function):
    """Tokens to the ranks of their experts, one row for each rank."""

    @staticmethod
    def forward(ctx: Any, buffer: Buffer, x: torch.Tensor, ids: Any, weights: Any):
        per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(ids, N_EXPERTS)
        rows, row_ids, row_weights, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=mask,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(row_ids)
        ctx.set_materialize_grads(True)
        return rows, row_ids, row_weights, handle

    @staticmethod
    def backward(ctx: Any, grad_rows: torch.Tensor, _: Any, grad_weights: Any, __: Any):
        grad_x, grad_topk, _ = ctx.buffer.combine(
            grad_rows.contiguous(), ctx.handle, topk_weights=grad_weights.contiguous()
        )
        return None, grad_x, None, grad_topk


class Combine(torch.autograd.Function):
    """Rows back to their tokens, added up."""

    @staticmethod
    def forward(ctx: Any, buffer: Buffer, rows: torch.Tensor, handle: Any):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(rows.contiguous(), handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return None, ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None


class Layer(torch.nn.Module):
    """A router and SwiGLU experts, from `first` on."""

    def __init__(self, first: int, n_experts: int) -> None:
        super().__init__()
        everything = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> torch.nn.Parameter:
            drawn = torch.randn(shape, generator=everything) / shape[-1] ** 0.5
            if len(shape) == 3:
                drawn = drawn[first : first + n_experts]
            return torch.nn.Parameter(drawn.clone())

        self.router = weights(N_EXPERTS, HIDDEN)
        self.up = weights(N_EXPERTS, 2 * INNER, HIDDEN)
        self.down = weights(N_EXPERTS, HIDDEN, INNER)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = F.linear(x, self.router).softmax(-1).topk(TOP_K, -1)
        return ids, weights / weights.sum(-1, keepdim=True)

    def experts(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):
        """Adds up what the experts make of each row; an id of -1 is none of them."""
        y = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down)):
            row, k = (ids == expert).nonzero(as_tuple=True)
            gate, value = F.linear(x[row], up).chunk(2, -1)
            made = F.linear(F.silu(gate) * value, down)
            y = y.index_add(0, row, made * weights[row, k, None])
        return y


def spread(layer: Layer, buffer: Buffer, x: torch.Tensor) -> torch.Tensor:
    """The layer with its experts on all ranks."""
    ids, weights = layer.route(x)
    rows, row_ids, row_weights, handle = Dispatch.apply(buffer, x, ids, weights)
    return Combine.apply(buffer, layer.experts(rows, row_ids, row_weights), handle)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = "cuda" if on_gpu else "cpu"
    dist.init_process_group("gloo")
    buffer = Buffer(dist.group.WORLD)

    # Ranks with different numbers of tokens.
    data = torch.Generator().manual_seed(1)
    sizes = [N_TOKENS - 5 * r for r in range(n_ranks)]
    all_x = torch.randn(sum(sizes), HIDDEN, generator=data).split(sizes)
    x = all_x[rank].to(device, copy=True).requires_grad_()
    n_local = N_EXPERTS // n_ranks
    layer = Layer(rank * n_local, n_local).to(device)
    y = spread(layer, buffer, x)
    y.square().sum().backward()

    plain = Layer(0, N_EXPERTS).to(device)
    plain_x = torch.cat(all_x).to(device).requires_grad_()
    plain_y = plain.experts(plain_x, *plain.route(plain_x))
    plain_y.square().sum().backward()
    own = slice(rank * n_local, (rank + 1) * n_local)
    router = layer.router.grad.cpu()
    dist.all_reduce(router)
    for name, got, want in (
        ("output", y, plain_y.split(sizes)[rank]),
        ("gradient of the tokens", x.grad, plain_x.grad.split(sizes)[rank]),
        ("gradient of the router", router, plain.router.grad.cpu()),
        ("gradient of up", layer.up.grad, plain.up.grad[own]),
        ("gradient of down", layer.down.grad, plain.down.grad[own]),
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=name)
    buffer.check()
    if rank == 0:
        print(
            f"{n_ranks} ranks on {device}: output and gradients are the plain layer's"
        )
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
