# SPDX-License-Identifier: Apache-2.0
"""Layers of other libraries, by their own interfaces. Each is imported when it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .cases import expert_row
from .torch_layers import Elastic, Layers, LowLatency, RowsOfRanks


class DeepEPV1(LowLatency):
    """DeepEP's low-latency calls, over NVLink."""

    def make_buffer(self) -> Any:
        from deep_ep import Buffer

        sizes = self.config.max_tokens, self.shape.hidden_size
        n, n_experts = self.config.n_ranks, self.shape.n_experts
        n_bytes = Buffer.get_low_latency_rdma_size_hint(*sizes, n, n_experts)
        return Buffer(
            dist.group.WORLD,
            num_rdma_bytes=n_bytes,
            low_latency_mode=True,
            num_qps_per_rank=self.n_local,
            allow_nvlink_for_low_latency_mode=True,
            explicitly_destroy=True,
        )


class DeepEPV2(Elastic):
    """DeepEP's ``ElasticBuffer``."""

    def elastic_buffer(self) -> type:
        # It looks for a network that the GPUs of one host do not need.
        os.environ.setdefault("EP_DISABLE_GIN", "1")
        from deep_ep import ElasticBuffer

        return ElasticBuffer


class OneSided(Layers):
    """TensorRT-LLM's one-sided all-to-all, of FlashInfer. Experts write what combine
    sends into the workspace; here every expert of a rank returns the same row, which is
    there already. So combine copies nothing."""

    @staticmethod
    def build() -> None:
        """Compiles its kernels, which takes minutes the first time."""
        from flashinfer.jit.comm import gen_nvlink_one_sided_alltoall_module

        gen_nvlink_one_sided_alltoall_module().build_and_load()

    def open(self) -> None:
        import flashinfer.moe_ep as moe_ep

        bootstrap = moe_ep.BootstrapConfig(
            world_size=self.config.n_ranks,
            rank=self.rank,
            # Its handles are exchanged on the host.
            process_group=dist.new_group(backend="gloo"),
        )
        sizes = moe_ep.MoEEpCommParams(
            num_experts=self.shape.n_experts,
            top_k=self.shape.top_k,
            max_tokens_per_rank=self.config.max_tokens,
            hidden_size=self.shape.hidden_size,
        )
        self._all_to_all = moe_ep.NVLinkOneSidedAlltoAll(bootstrap, sizes)
        self._row = torch.from_numpy(expert_row(self.shape, self.rank))
        self._row = self._row.bfloat16().to(self.device)

    def dispatch(self, layer: int) -> Any:
        return self._all_to_all.dispatch(
            self.x,
            self.ids[layer],
            self.weights[layer],
            runtime_max_tokens_per_rank=self.case.n_tokens,
        )

    def combine(self, layer: int, sent: Any) -> torch.Tensor:
        returned = self._all_to_all.get_combine_input_buffer(torch.bfloat16)
        if not torch.cuda.is_current_stream_capturing():
            returned.copy_(self._row.expand_as(returned))
        return self._all_to_all.combine(returned)

    def delivered(
        self, layer: int, sent: Any
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        # Where no token came, no id is an expert's.
        is_there = (sent.topk_ids >= 0).any(dim=1)
        yield sent.hidden_states[is_there], self.tokens_of_rank(layer)

    def wanted(self, layer: int) -> torch.Tensor:
        rows = [expert_row(self.shape, rank) for rank in range(self.config.n_ranks)]
        of_ranks = torch.from_numpy(np.stack(rows)).to(self.device).double()
        return self.ranks_of_tokens(layer).double() @ of_ranks

    def close(self) -> None:
        dist.barrier()  # all have combined
        self._all_to_all.destroy()


class NcclEP(RowsOfRanks):
    """NCCL EP's low-latency algorithm. A layer's handle is made before it is timed."""

    def open(self) -> None:
        import nccl.ep as ep
        from nccl.ep.interop.torch import get_nccl_comm_from_group

        self._ep = ep
        n, size = self.config.n_ranks, self.config.max_tokens
        hidden, top_k = self.shape.hidden_size, self.shape.top_k
        self._group = ep.Group.create(
            get_nccl_comm_from_group(),
            ep.GroupConfig(
                num_experts=self.shape.n_experts,
                max_dispatch_tokens_per_rank=size,
                max_token_bytes=2 * hidden,
                num_topk=top_k,
            ),
        )
        stream = torch.cuda.current_stream()
        self.ids = [ids.long() for ids in self.ids]
        self._handles = [
            self._group.create_handle(
                ep.Layout.RANK_MAJOR, ep.Tensor(ids), stream=stream
            )
            for ids in self.ids
        ]
        new = self.x.new_empty
        self._rows = new((n, size, hidden))
        self._rest = (
            new((n, size, top_k), dtype=torch.float32),
            new((n, size, top_k), dtype=torch.int32),
            new(n, dtype=torch.int32),
        )

    def dispatch(self, layer: int) -> Any:
        ep, (weights, ids, counts) = self._ep, self._rest
        self._handles[layer].dispatch(
            ep.DispatchInputs(
                tokens=ep.Tensor(self.x), topk_weights=ep.Tensor(self.weights[layer])
            ),
            ep.DispatchOutputs(
                tokens=ep.Tensor(self._rows),
                topk_weights=ep.Tensor(weights),
                topk_idx=ep.Tensor(ids),
            ),
            layout_info=ep.LayoutInfo(src_rank_counters=ep.Tensor(counts)),
            stream=torch.cuda.current_stream(),
        )
        return counts

    def combine(self, layer: int, sent: Any) -> torch.Tensor:
        ep, sums = self._ep, torch.empty_like(self.x)
        self._handles[layer].combine(
            ep.CombineInputs(tokens=ep.Tensor(self._rows)),
            ep.CombineOutputs(tokens=ep.Tensor(sums)),
            stream=torch.cuda.current_stream(),
        )
        return sums

    def delivered(
        self, layer: int, sent: Any
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        counts = sent.tolist()
        rows = torch.cat([rows[:n] for rows, n in zip(self._rows, counts)])
        yield rows, self.tokens_of_rank(layer)

    def close(self) -> None:
        for handle in self._handles:
            handle.destroy()
        self._group.destroy()
