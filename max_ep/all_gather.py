# SPDX-License-Identifier: Apache-2.0
"""All-gather and reduce-scatter of tokens, for experts that need no permutation.

``AllGatherTokenDispatcher`` has the interface of Megatron-core's
``InferenceCUDAGraphTokenDispatcher``: every rank gets all tokens, and its experts work
on them with the routing map, as fused MoE kernels do.

An all-gather is a dispatch in which each rank is an expert and each token chooses all
of them. Its routing metadata travels with it. The reduce-scatter is the combine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max.dtype import DType
from max.graph import BufferType, TensorType, TensorValue, Value

from .config import EPConfig
from .graph.checks import check_one_a_rank, check_same_rows, check_value
from .graph.manager import EPBatchManager
from .limits import MAX_TOP_K, checked_int
from .memory.initializer import EPCommInitializer
from .plural import counted


class AllGatherTokenDispatcher:
    """Gathers tokens, routing map and probabilities, and scatters sums.

    docs/all_gather.md has an example, and where tokens stand. Lists have an entry for
    each local rank. A wrong dtype raises a ``TypeError``, a wrong shape, device or
    order of calls a ``ValueError``.
    """

    def __init__(
        self,
        hidden_size: int,
        top_k: int,
        max_tokens_per_rank: int,
        n_gpus_per_node: int,
        n_nodes: int = 1,
        dtype: DType = DType.bfloat16,
        **options: Any,
    ) -> None:
        """Makes the configuration of the group.

        ``hidden_size`` are the elements of a token, ``top_k`` its experts,
        ``n_gpus_per_node`` the ranks of this process, ``n_nodes`` the processes; at
        most 32 ranks, no GPUs of other hosts. ``dtype`` of tokens and sums is bfloat16
        or float32. ``options`` are further fields of :class:`EPConfig`: ``node_id``,
        ``target``, ``timeout_s``, ``n_sms``, ``ranks_per_gpu``.
        """
        n_gpus_per_node = checked_int("n_gpus_per_node", n_gpus_per_node)
        n_ranks = n_gpus_per_node * checked_int("n_nodes", n_nodes)
        if n_ranks > MAX_TOP_K:
            product = f"n_gpus_per_node * n_nodes = {counted(n_ranks, 'rank')}"
            raise ValueError(f"{product}; an all-gather has at most {MAX_TOP_K}")
        self.top_k = top_k = checked_int("top_k", top_k)
        self.config = EPConfig(
            dispatch_dtype=dtype,
            combine_dtype=dtype,
            hidden_size=hidden_size,
            top_k=n_ranks,
            n_experts=n_ranks,
            max_tokens_per_rank=max_tokens_per_rank,
            n_gpus_per_node=n_gpus_per_node,
            n_nodes=n_nodes,
            protocol="by_rank",
            combine_mode="sums",
            router_top_k=top_k,
            **options,
        )
        self._manager = EPBatchManager(self.config)
        self._ranks = list(range(n_gpus_per_node))
        self._routing_map: list[TensorValue] = []
        self._n_gathered: list[TensorValue] = []

    @property
    def routing_map(self) -> list[TensorValue]:
        """The map that the last :meth:`token_dispatch` gathered:
        ``[global_tokens, top_k]`` int32 for each local rank."""
        return self._of_dispatch("routing_map", self._routing_map)

    @property
    def n_gathered(self) -> list[TensorValue]:
        """Tokens of all ranks in that dispatch: ``[1]`` int32 for each local rank."""
        return self._of_dispatch("n_gathered", self._n_gathered)

    def _of_dispatch(self, what: str, values: list[TensorValue]) -> list[TensorValue]:
        if not values:
            raise ValueError(f"{what} before token_dispatch; call that first")
        return values

    @property
    def global_tokens(self) -> int:
        """Rows of what is gathered."""
        return self.config.get_max_recv_tokens()

    def initializer(self) -> EPCommInitializer:
        """Makes what allocates the memory; its ``model_inputs()`` are the EP inputs."""
        return EPCommInitializer(self.config)

    def input_types(self) -> list[TensorType | BufferType]:
        """Returns the types of the EP inputs, to be declared by the graph."""
        return self._manager.input_types()

    def fetch_buffers(self, input_vals: Sequence[Value]) -> None:
        """Takes the graph's inputs that :meth:`input_types` declares, in order."""
        self._routing_map, self._n_gathered = [], []
        self._manager.fetch_buffers(input_vals)

    def token_dispatch(
        self,
        hidden_states: Sequence[TensorValue],
        probs: Sequence[TensorValue],
        routing_map: Sequence[TensorValue],
    ) -> tuple[list[TensorValue], list[TensorValue]]:
        """Gathers tokens, probabilities and routing map on every rank.

        Args:
            hidden_states: ``[local_tokens, hidden_size]`` of ``dtype``, of each
                local rank, with ``local_tokens <= max_tokens_per_rank``.
            probs: ``[local_tokens, top_k]`` float32.
            routing_map: ``[local_tokens, top_k]`` int32: each token's
                experts; -1: none.

        Returns:
            Tokens ``[global_tokens, hidden_size]`` and probabilities
            ``[global_tokens, top_k]`` float32 of each local rank. Sets
            :attr:`routing_map` to the gathered one, and :attr:`n_gathered`.
        """
        lists = dict(hidden_states=hidden_states, probs=probs, routing_map=routing_map)
        check_one_a_rank(len(self._ranks), **lists)
        config = self.config
        for rank, tokens in zip(self._ranks, hidden_states):
            device, shape = config.device(rank), [None, config.hidden_size]
            check_value(tokens, "hidden_states", config.dispatch_dtype, shape, device)
            dtypes = dict(probs=DType.float32, routing_map=DType.int32)
            for what, dtype in dtypes.items():
                values = lists[what]
                check_value(values[rank], what, dtype, [None, self.top_k], device)
                check_same_rows("hidden_states", tokens, what, values[rank])
        gathered = self._manager.ep_dispatch_all(
            hidden_states, routing_map, self._ranks, router_weights=probs
        )
        rows, self._routing_map, all_probs, self._n_gathered = (
            [of_rank[i] for of_rank in gathered] for i in range(4)
        )
        return rows, all_probs

    def dispatch_postprocess(
        self, hidden_states: Sequence[TensorValue], probs: Sequence[TensorValue]
    ) -> tuple[list[TensorValue], None, list[TensorValue]]:
        """Hands everything on: no token is permuted, none counted (None)."""
        return list(hidden_states), None, list(probs)

    def combine_preprocess(
        self, expert_output: Sequence[TensorValue]
    ) -> list[TensorValue]:
        """Hands the experts' rows on: they stand as the gathered tokens do."""
        return list(expert_output)

    def token_combine(self, hidden_states: Sequence[TensorValue]) -> list[TensorValue]:
        """Adds up all ranks' rows of each token, on the token's rank.

        ``hidden_states`` are ``[global_tokens, hidden_size]`` of each local rank, with
        probabilities applied; what follows the last token is not read. Returns
        ``[local_tokens, hidden_size]``: sums in float32, this rank's row first and then
        the others in rank order, rounded once.
        """
        check_one_a_rank(len(self._ranks), hidden_states=hidden_states)
        self._of_dispatch("token_combine", self._routing_map)
        config, shape = self.config, [self.global_tokens, self.config.hidden_size]
        for rank, rows in zip(self._ranks, hidden_states):
            device = config.device(rank)
            check_value(rows, "hidden_states", config.combine_dtype, shape, device)
        return self._manager.ep_combine_all(hidden_states, None, self._ranks)
