# SPDX-License-Identifier: Apache-2.0
"""Layers that a process of PyTorch runs: NCCL's, and those of ``max_ep.torch``.

A layer sends tokens out and takes sums back. Every layer of a chain sends the same
tokens, by ids of its own; experts return what they are given. Layers of other
libraries are in ``other_layers.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

from .. import reference
from ..torch import Buffer, ElasticBuffer
from . import cases
from .cases import LAYER_FACTORS, Case
from .checks import check_chain, check_rows, from_bits, stack_tokens
from .peer_graphs import make_data


class Layers:
    """The chain of one library, on one rank."""

    is_exact = True
    """Whether sums must be right to the bit; otherwise a rank's part is rounded."""

    def __init__(self, case: Case, rank: int, device: torch.device) -> None:
        self.case, self.rank, self.device = case, rank, device
        self.config, self.shape = case.config, case.config.shape
        self._data = make_data(case, 0)
        self.x = from_bits(self._data.x[rank], device)
        self.ids = [torch.from_numpy(i[rank]).to(device) for i in self._data.ids]
        self.weights = [
            torch.from_numpy(w[rank]).to(device) for w in self._data.weights
        ]
        self.open()

    # ------------------------------------------------------- what a library says

    def open(self) -> None:
        """Makes the library's memory."""

    def dispatch(self, layer: int) -> Any:
        """Sends the tokens of a layer; returns what combine needs."""
        raise NotImplementedError

    def combine(self, layer: int, sent: Any) -> torch.Tensor:
        """Returns the sums of a layer: ``[n_tokens, hidden_size]`` bfloat16."""
        raise NotImplementedError

    def delivered(
        self, layer: int, sent: Any
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """Yields rows, in any order, and the numbers of the tokens they must be."""
        raise NotImplementedError

    def wanted(self, layer: int) -> torch.Tensor:
        """Returns the sums that a layer must return, in float64."""
        return self.x.double() * LAYER_FACTORS[layer % len(LAYER_FACTORS)]

    def close(self) -> None:
        """Frees the library's memory."""

    # -------------------------------------------------------------------- running

    def run(self) -> list[torch.Tensor]:
        """Runs all layers; returns the sums of each."""
        layers = range(self.config.n_layers)
        return [self.combine(layer, self.dispatch(layer)) for layer in layers]

    def check_dispatch(self) -> None:
        """Compares what each expert, or each rank, was sent."""
        everyone = stack_tokens(self._data.x, self.device)
        for layer in range(self.config.n_layers):
            sent = self.dispatch(layer)
            self._synchronize()
            where = f"{self.case.name} rank {self.rank}, layer {layer}"
            for rows, numbers in self.delivered(layer, sent):
                check_rows(where, rows, numbers, everyone)
            self.combine(layer, sent)

    def check_sums(self, sums: list[torch.Tensor]) -> None:
        """Compares the sums of all layers."""
        self._synchronize()
        for layer, got in enumerate(sums):
            where = f"{self.case.name} rank {self.rank}, layer {layer}"
            check_chain(where, got, self.wanted(layer), is_exact=self.is_exact)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # ------------------------------------------------------------ for the checks

    def tokens_of_expert(self, layer: int, expert: int) -> np.ndarray:
        """Returns numbers of the tokens that chose an expert of the group."""
        return np.flatnonzero((self._all_ids(layer) == expert).any(axis=1))

    def tokens_of_rank(self, layer: int) -> np.ndarray:
        """Returns numbers of the tokens that chose an expert of this rank."""
        owners = self._all_ids(layer) // self.n_local
        return np.flatnonzero((owners == self.rank).any(axis=1))

    def ranks_of_tokens(self, layer: int) -> torch.Tensor:
        """Returns which ranks own a token's experts: bool ``[n_tokens, n_ranks]``."""
        owners = self.ids[layer] // self.n_local
        ranks = torch.arange(self.config.n_ranks, device=self.device)
        return (owners[:, :, None] == ranks).any(dim=1)

    def _all_ids(self, layer: int) -> np.ndarray:
        return np.concatenate(self._data.ids[layer])

    @property
    def n_local(self) -> int:
        """Experts of a rank."""
        return reference.n_local_experts(self.shape.n_experts, self.config.n_ranks)


class AllGather(Layers):
    """All-gather of every token to every rank, reduce-scatter (average) of what the
    ranks hold for each token. Nobody filters or sorts."""

    def open(self) -> None:
        n_rows = self.config.n_ranks * self.case.n_tokens
        self._all = self.x.new_empty((n_rows, self.shape.hidden_size))

    def dispatch(self, layer: int) -> None:
        dist.all_gather_into_tensor(self._all, self.x)

    def combine(self, layer: int, sent: None) -> torch.Tensor:
        sums = torch.empty_like(self.x)
        dist.reduce_scatter_tensor(sums, self._all, op=dist.ReduceOp.AVG)
        return sums

    def delivered(
        self, layer: int, sent: None
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        yield self._all, np.arange(len(self._all))

    def wanted(self, layer: int) -> torch.Tensor:
        return self.x.double()


class RowsOfRanks(Layers):
    """Layers that deliver one row for each (token, rank), and add up one of each."""

    is_exact = False

    def wanted(self, layer: int) -> torch.Tensor:
        return self.x.double() * self.ranks_of_tokens(layer).sum(1, keepdim=True)


class AllToAll(RowsOfRanks):
    """One row for each (token, rank) that has an expert of it: a gather kernel packs
    them, ``all_to_all_single`` sends them, the same back, and one kernel adds each
    token's rows. The sizes of messages are known in advance, which no router would give
    the host."""

    def open(self) -> None:
        n = self.config.n_ranks
        self._plans = []
        for layer in range(self.config.n_layers):
            rows = cases.rows_between(self.shape, self._data.ids[layer], "dedup")
            of_rank = self.ranks_of_tokens(layer).T.cpu().numpy()
            tokens = np.concatenate([np.flatnonzero(row) for row in of_rank])
            # Where each token's row of each rank is; past the last: there is none.
            place = np.full((self.case.n_tokens, n), len(tokens))
            place.T[of_rank] = np.arange(len(tokens))
            sizes = rows[self.rank].tolist(), rows[:, self.rank].tolist()
            tables = (torch.from_numpy(t).to(self.device) for t in (tokens, place))
            self._plans.append((*tables, *sizes))

    def dispatch(self, layer: int) -> torch.Tensor:
        tokens, _, sent, received = self._plans[layer]
        arrived = self.x.new_empty((sum(received), self.shape.hidden_size))
        packed = torch.index_select(self.x, 0, tokens)
        dist.all_to_all_single(arrived, packed, received, sent)
        return arrived

    def combine(self, layer: int, sent: torch.Tensor) -> torch.Tensor:
        tokens, place, n_sent, n_received = self._plans[layer]
        back = self.x.new_zeros((len(tokens) + 1, self.shape.hidden_size))
        dist.all_to_all_single(back[:-1], sent, n_sent, n_received)
        return embedding_bag(place, back, mode="sum")

    def delivered(
        self, layer: int, sent: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        yield sent, self.tokens_of_rank(layer)


class LowLatency(Layers):
    """``low_latency_dispatch`` and ``low_latency_combine`` of ``Buffer``, with rows:
    with receive hooks if ``split``."""

    def open(self) -> None:
        self.ids = [ids.long() for ids in self.ids]
        self._most = self.config.max_tokens, self.shape.n_experts
        self._how = dict(return_recv_hook=self.case.form == "split")
        self.buffer = self.make_buffer()

    combine_mode = "rows"

    def make_buffer(self) -> Any:
        how = dict(low_latency_mode=True, combine_mode=self.combine_mode)
        return Buffer(dist.group.WORLD, **how)

    def dispatch(self, layer: int) -> Any:
        rows, counts, handle, _, receive = self.buffer.low_latency_dispatch(
            self.x, self.ids[layer], *self._most, use_fp8=False, **self._how
        )
        if receive is not None:
            receive()
        return rows, counts, handle

    def combine(self, layer: int, sent: Any) -> torch.Tensor:
        rows, _, handle = sent
        sums, _, receive = self.buffer.low_latency_combine(
            rows, self.ids[layer], self.weights[layer], handle, **self._how
        )
        if receive is not None:
            receive()
        return sums

    def delivered(
        self, layer: int, sent: Any
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        rows, counts, _ = sent
        for local, n in enumerate(counts.tolist()):
            expert = self.rank * self.n_local + local
            yield rows[local, :n], self.tokens_of_expert(layer, expert)

    def close(self) -> None:
        if hasattr(self.buffer, "check"):
            self.buffer.check()
        self.buffer.destroy()


class LowLatencySums(LowLatency):
    """The same, with sums."""

    is_exact = False
    combine_mode = "sums"


class Elastic(RowsOfRanks):
    """``ElasticBuffer``, whose sizes no host looks at, as graphs need it, with
    ``plain`` or ``expanded`` rows. All multiprocessors may take part
    (``prefer_overlap_with_compute=False``)."""

    def elastic_buffer(self) -> type:
        return ElasticBuffer

    def open(self) -> None:
        self.ids = [ids.long() for ids in self.ids]
        self._most = dict(num_max_tokens_per_rank=self.config.max_tokens)
        self._expands = self.case.form == "expanded"
        self.buffer = self.elastic_buffer()(
            dist.group.WORLD,
            hidden=self.shape.hidden_size,
            num_topk=self.shape.top_k,
            allow_hybrid_mode=False,
            prefer_overlap_with_compute=False,
            explicitly_destroy=True,
            **self._most,
        )

    def dispatch(self, layer: int) -> Any:
        rows, _, _, handle, _ = self.buffer.dispatch(
            self.x,
            self.ids[layer],
            self.weights[layer],
            num_experts=self.shape.n_experts,
            do_cpu_sync=False,
            do_expand=self._expands,
            **self._most,
        )
        return rows, handle

    def combine(self, layer: int, sent: Any) -> torch.Tensor:
        return self.buffer.combine(*sent)[0]

    def delivered(
        self, layer: int, sent: Any
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        rows, handle = sent
        if not self._expands:
            n = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            yield rows[:n], self.tokens_of_rank(layer)
            return
        begin, ends = 0, handle.psum_num_recv_tokens_per_expert.tolist()
        for expert, end in enumerate(ends, self.rank * self.n_local):
            yield rows[begin:end], self.tokens_of_expert(layer, expert)
            begin = end

    def wanted(self, layer: int) -> torch.Tensor:
        if self._expands:  # rows of all choices are added up as they are
            return self.x.double() * self.shape.top_k
        return super().wanted(layer)

    def close(self) -> None:
        self.buffer.destroy()
