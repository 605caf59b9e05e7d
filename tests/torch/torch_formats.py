# SPDX-License-Identifier: Apache-2.0
"""What processes of `test_torch_formats.py` do: quantized tokens in all interfaces."""

import traceback
from typing import Any

import torch
import torch.distributed as dist

from max_ep.torch import Buffer, ElasticBuffer, dequantize, quantize
from tests.errors import raises
from tests.torch.torch_member import open_group

E, K, H, CAP = 8, 3, 256, 16


def tokens_of(rank: int, seed: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(10 * seed + rank)
    n = (CAP, 5, 0, 11)[(rank + seed) % 4]
    size = 2.0 ** torch.randint(-9, 3, (n, 1), generator=draw)
    x = torch.randn(n, H, generator=draw) * size
    x[:1, :40] = 0
    ids = torch.rand(n, E, generator=draw).topk(K, -1).indices
    ids[torch.rand(n, K, generator=draw) < 0.2] = -1
    return x.bfloat16(), ids, torch.rand(n, K, generator=draw) + 0.1


class Rank:
    def __init__(self, rank: int, n_ranks: int, name: str) -> None:
        self.rank, self.n_ranks, self.name = rank, n_ranks, name
        self.n_local = E // n_ranks
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def given(self, seed: int) -> None:
        """Draws tokens; those of all ranks, quantized, are what must arrive."""
        self.all = [tokens_of(rank, seed) for rank in range(self.n_ranks)]
        mine = [t.to(self.device) for t in self.all[self.rank]]
        self.x, self.ids, self.weights = mine
        self.pairs = [quantize(x, self.name) for x, *_ in self.all]

    def sent(self, is_given: bool) -> tuple[Any, dict[str, Any]]:
        """Returns `x` and arguments: a pair, or what dispatch quantizes."""
        if is_given:
            return quantize(self.x, self.name), {}
        return self.x, dict(format=self.name)

    def check(self, rows: Any, row: Any, src: int, token: int) -> None:
        """Compares the bits of a row and its scales with those of a token."""
        for got, want in zip(rows, self.pairs[src]):
            got, want = got[row].cpu(), want[token]
            assert got.dtype == want.dtype
            bits = [t.contiguous().view(torch.uint8) for t in (got, want)]
            assert torch.equal(*bits), (row, src, token)

    def layer(self) -> torch.Tensor:
        """Returns what experts, which multiply by a number, make of this rank's."""
        factors = (self.weights * (1 + self.ids) * (self.ids >= 0)).sum(1, True)
        return dequantize(*quantize(self.x, self.name)) * factors

    def close(self, y: torch.Tensor) -> None:
        torch.testing.assert_close(y.float(), self.layer(), rtol=2**-5, atol=2**-5)

    def plain(self) -> list[tuple[int, int]]:
        """Lists source and token of rows by token, in their order."""
        local = range(self.rank * self.n_local, (self.rank + 1) * self.n_local)
        return [
            (src, token)
            for src, (_, ids, _) in enumerate(self.all)
            for token in range(len(ids))
            if any(int(e) in local for e in ids[token])
        ]

    def by_expert(self, expert: int) -> list[tuple[int, int]]:
        return [
            (src, token)
            for src, (_, ids, _) in enumerate(self.all)
            for token in (ids == expert).any(1).nonzero().flatten().tolist()
        ]

    def of_experts(self, rows: Any, ids: Any, weights: Any) -> torch.Tensor:
        """Returns the sums of plain rows."""
        numbers = self.rank * self.n_local + ids + 1
        factors = torch.where(ids >= 0, weights * numbers, 0).sum(1, True)
        return (dequantize(*rows) * factors).bfloat16()


def low_latency(here: Rank, buffer: Buffer, is_given: bool) -> None:
    x, how = here.sent(is_given)
    for hook_wanted in (False, True):
        how["return_recv_hook"] = hook_wanted
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, here.ids, CAP, E, **how
        )
        if hook:
            hook()
        made = dequantize(*rows)
        for i in range(here.n_local):
            expert = here.rank * here.n_local + i
            want = here.by_expert(expert)
            assert counts[i] == len(want)
            for row, (src, token) in enumerate(want):
                here.check(rows, (i, row), src, token)
            made[i] *= expert + 1
        given = made.bfloat16(), here.ids, here.weights, handle
        here.close(buffer.low_latency_combine(*given)[0])


def normal(here: Rank, buffer: Buffer, is_given: bool) -> None:
    x, how = here.sent(is_given)
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(here.ids, E)
    how |= dict(num_tokens_per_rank=per_rank, is_token_in_rank=is_in_rank)
    how |= dict(num_tokens_per_expert=per_expert)
    how |= dict(topk_idx=here.ids, topk_weights=here.weights)
    rows, ids, weights, _, handle, _ = buffer.dispatch(x, **how)
    for row, (src, token) in enumerate(here.plain()):
        here.check(rows, row, src, token)
    made = here.of_experts(rows, ids, weights)
    here.close(buffer.combine(made, handle)[0])


def elastic(here: Rank, buffer: ElasticBuffer, is_given: bool) -> None:
    for expands in (False, True):
        x, how = here.sent(is_given)
        how |= dict(num_experts=E, do_expand=expands)
        rows, ids, weights, handle, _ = buffer.dispatch(
            x, here.ids, here.weights, **how
        )
        places = enumerate(here.plain())
        if expands:
            mine = range(here.rank * here.n_local, (here.rank + 1) * here.n_local)
            found = [here.by_expert(e) for e in mine]
            places = enumerate([one for expert in found for one in expert])
            of = [e + 1 for e, there in zip(mine, found) for _ in there]
            factors = weights * torch.tensor(of, device=weights.device)
            made = (dequantize(*rows) * factors[:, None]).bfloat16()
        else:
            made = here.of_experts(rows, ids, weights)
        for row, (src, token) in places:
            here.check(rows, row, src, token)
        here.close(buffer.combine(made, handle)[0])
        # A repeated layout, without the host's wait.
        x, how = here.sent(is_given)
        again, *_ = buffer.dispatch(x, handle=handle, **how)
        for first, second in zip(rows, again):
            assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def wrong(here: Rank, buffer: Buffer, more: ElasticBuffer) -> None:
    """What no format has is refused before anything is sent, in words."""
    pair = quantize(here.x, here.name)
    less = (pair[0], pair[1][:, 1:])
    for call in (
        lambda x, **how: buffer.low_latency_dispatch(x, here.ids, CAP, E, **how),
        lambda x, **how: more.dispatch(x, here.ids, num_experts=E, **how),
    ):
        for x, how, words in (
            (here.x, dict(format="fp4"), "format='fp4' must be None or one of fp8, mx"),
            (pair, dict(format=here.name), "x is a pair, which is quantized already"),
            (
                (pair[0], pair[1].double()),
                {},
                "dispatch takes torch.float8_e4m3fn with",
            ),
            (pair[:1], {}, "x is a tuple of 1; pass rows, or (rows, scales)"),
        ):
            with raises((TypeError, ValueError), words):
                call(x, **how)
        if here.name != "fp8":
            with raises(ValueError, "of 256 elements there must be one for"):
                call(less)
    with raises(ValueError, "columns; nvfp4 needs a multiple of 16"):
        quantize(here.x[:, :40], "nvfp4")


def member(rank: int, n_ranks: int, store: str, name: str) -> str:
    """Runs all interfaces; returns what went wrong."""
    open_group(rank, n_ranks, store)
    here = Rank(rank, n_ranks, name)
    buffer = Buffer(dist.group.WORLD, timeout_s=60)
    more = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=CAP, timeout_s=60)
    try:
        for seed, is_given in ((1, False), (2, True)):
            here.given(seed)
            for scenario, with_ in (
                (low_latency, buffer),
                (normal, buffer),
                (elastic, more),
            ):
                scenario(here, with_, is_given)
        wrong(here, buffer, more)
    except Exception:
        return traceback.format_exc()
    finally:
        buffer.destroy()
        more.destroy()
        dist.destroy_process_group()
    return ""
