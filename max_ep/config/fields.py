# SPDX-License-Identifier: Apache-2.0
"""The fields of ``EPConfig``, and the facts that follow from them. No checks."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from max.dtype import DType
from max.graph import DeviceRef
from max.nn.quant_config import QuantConfig

from ..extension import region_sizes
from ..formats import TokenFormat, format_of, on_target
from ..limits import GROUP_VARIABLE, START_TIMEOUT_S, is_integer, link_of_environment


@dataclass
class ConfigFields:
    """What ``EPConfig`` holds; its docstring says what a rank, a node is."""

    dispatch_dtype: DType
    """Dtype on the wire: bfloat16, float32, or with ``dispatch_quant_config``
    float8_e4m3fn, or uint8 for two float4_e2m1fn in a byte."""
    combine_dtype: DType
    """Dtype of expert rows and results: bfloat16 or float32."""
    hidden_size: int
    """Elements of a token; a multiple of 16 bytes, and of the blocks of scales."""
    top_k: int
    """Experts of a token, ``[1, min(32, n_experts)]``."""
    n_experts: int
    """Experts of the group; the ranks need not divide it. With ``eplb_enabled`` they
    are the physical ones: each replica counts."""
    max_tokens_per_rank: int
    """Most tokens that one rank dispatches at a time."""
    n_gpus_per_node: int
    """Ranks that one process drives."""
    n_nodes: int
    """Processes of the group."""
    node_id: int = -1
    """This process, ``[0, n_nodes)``; -1: ``ep_init`` finds it out."""
    dispatch_quant_config: QuantConfig | None = None
    """How to quantize: :func:`blockwise_fp8_quant_config`,
    :func:`mxfp8_quant_config`, :func:`nvfp4_quant_config`,
    :func:`mxfp4_quant_config`, or MAX's own config that means the same."""
    nvfp4_dyn_global_scales: bool = False
    """With NVFP4: each token has a scale of its own, of which dispatch delivers the
    inverse behind the scales of blocks, bfloat16 ``[n_rows]``."""
    fused_shared_expert: bool = False
    """Every rank also computes a shared expert on its own tokens. They stand in front
    of its dispatched rows, and combine adds what the expert made of them."""
    fuse_ffn_combine_send: bool = False
    """Changes nothing: combine reads the experts' rows where they are
    (docs/decisions/0029-no-pass-is-left-to-combine.md)."""
    moe_dim: int = 0
    """Changes nothing."""
    fused_moe_ready: bool = False
    """Must be False: MAX sets it itself, on Blackwell GPUs."""
    use_allreduce: bool = False
    """Every rank has all tokens. Dispatch sends nothing; combine returns what the
    rank's own experts add to each token. The caller adds up the ranks' results."""
    max_batch_size: int = 0
    """Changes nothing."""
    eplb_enabled: bool = False
    """Balanced experts: the graph takes ``eplb_log2phy`` and ``eplb_logcnt`` too. The
    four fields that follow are for that only."""
    num_moe_layers: int = 0
    """MoE layers: rows of the tables."""
    max_replicas: int = 1
    """The most replicas of an expert: columns of ``eplb_log2phy``."""
    eplb_phy2log_plan: Any = None
    """The first placement, ``[num_moe_layers, n_experts]``: the logical expert of each
    physical one. With it :meth:`EPCommInitializer.set_eplb_placement` may be left out.
    """
    num_logical_experts: int = 0
    """Experts that the router knows; 0: ``n_experts``."""

    target: str = "auto"
    """Device kind of the tensors: ``"cpu"``, ``"gpu"``, or ``"auto"``: what this
    machine has."""
    protocol: str = "auto"
    """How dispatch addresses a token: ``"by_rank"`` once for each rank that holds one
    of its experts, ``"by_expert"`` once for each of its experts. The latter works
    everywhere, with the same results. ``"auto"``: ``"by_rank"`` where that works."""
    combine_mode: str = "rows"
    """What combine sends back. ``"rows"``: every expert row; combine takes the router
    weights. ``"sums"``: one partial sum of weighted rows for each token and rank, which
    is rounded by itself; needs ``"by_rank"``, and *dispatch* takes the weights."""
    combine_quant_config: QuantConfig | None = None
    """How to quantize partial sums, with ``combine_mode="sums"``:
    :func:`blockwise_fp8_quant_config` or :func:`mxfp8_quant_config`; None: they are of
    ``partial_dtype`` (docs/formats.md)."""
    partial_dtype: DType | None = None
    """Dtype of a partial sum on the wire, with ``combine_mode="sums"``: bfloat16 or
    float32; None: ``combine_dtype``."""
    timeout_s: float = 30.0
    """How long a launch waits for its peers before it fails. Where all ranks of the
    group run one after another, nothing waits (``timeout_ms`` is 0)."""
    start_timeout_s: float = START_TIMEOUT_S
    """How long ``ep_init`` waits for the other processes of the group, which may import
    or compile meanwhile; may differ between processes."""
    on_timeout: str = "raise"
    """What a wait does that is not met in time. ``"raise"``: it fails. ``"mask"``: the
    missing rank is masked, and the others go on (docs/fault_tolerance.md)."""
    fp8_power_of_two_scales: bool = False
    """Round FP8 scales up to powers of two."""
    ranks_per_gpu: int = 1
    """Local ranks that share a GPU. Above 1 they run one after another, so the fused
    forms are refused."""
    n_sms: int = 0
    """Most multiprocessors of a GPU that a dispatch or combine occupies, so that other
    kernels can run beside it; 0: all of them."""
    output_layout: str = "packed"
    """How dispatched rows stand. ``"packed"``: one after another, with
    ``row_offsets``. ``"padded"``: each local expert has ``expert_capacity`` rows of
    its own, with ``recv_counts``, as in DeepEP's low-latency mode."""

    max_output_rows: int | None = None
    """The most rows of routed experts that a rank's tensors hold; None: enough for any
    routing. What does not fit is dropped by a fixed rule, and counted
    (:meth:`EPBatchManager.ep_dropped`,
    docs/decisions/0028-a-cap-on-dispatched-rows.md). Packed rows; on GPUs by rank."""

    scale_layout: str = "auto"
    """How the scales of quantized rows stand: ``"rows"``, ``"transposed"``, ``"tiles"``
    or ``"packed"`` (docs/formats.md#layouts-of-scales). ``"auto"``: ``"transposed"``
    for blockwise FP8, otherwise ``"rows"``."""

    tokens_are_quantized: bool = False
    """Tokens are given as pairs of values and scales, as ``dispatch_quant_config`` has
    them, and are sent as they are."""

    hierarchical: bool = False
    """Over several hosts a token crosses once to each host, and one sum comes back: the
    rank that has the sender's place there relays to the others of its host. With
    ``combine_mode="sums"``. Changes nothing on one host
    (docs/several_hosts.md#one-message-for-each-host)."""

    router_top_k: int = 0
    """In an all-gather, router choices that travel with a token to all ranks; 0: this
    is none. :class:`AllGatherTokenDispatcher` sets it."""

    # ------------------------------------------------------------ derived facts

    @property
    def n_ranks(self) -> int:
        """Ranks of the group."""
        return self.n_gpus_per_node * self.n_nodes

    @property
    def n_local_experts(self) -> int:
        """Places for experts on each rank: ``n_experts / n_ranks``, rounded up."""
        return math.ceil(self.n_experts / self.n_ranks)

    @property
    def exchange_ranks(self) -> int:
        """Ranks among which a launch exchanges tokens."""
        return 1 if self.use_allreduce else self.n_ranks

    @property
    def exchange_experts(self) -> int:
        """Experts of those ranks."""
        return self.n_local_experts if self.use_allreduce else self.n_experts

    @property
    def is_padded(self) -> bool:
        """Whether each local expert has rows of its own."""
        return self.output_layout == "padded"

    @property
    def expert_capacity(self) -> int:
        """The most rows one local expert can receive."""
        return self.exchange_ranks * self.max_tokens_per_rank

    @property
    def n_output_rows(self) -> int:
        """Rows of the tensors that dispatch delivers and combine takes."""
        if self.is_padded:
            return self.n_local_experts * self.expert_capacity
        n_shared = self.max_tokens_per_rank if self.fused_shared_expert else 0
        return self.get_max_recv_tokens() + n_shared

    @property
    def token_format(self) -> TokenFormat:
        """Wire format of a token on the way to its experts."""
        found = format_of(self.dispatch_dtype, self.dispatch_quant_config)
        return found.with_row_scales() if self.nvfp4_dyn_global_scales else found

    @property
    def is_quantized(self) -> bool:
        """Whether dispatched rows come with scales."""
        return self.token_format.is_quantized

    @property
    def output_dtype(self) -> DType:
        """Dtype of dispatched rows: ``dispatch_dtype``, but uint8 for FP8 on CPU."""
        return on_target(self.token_format.dtype, self.target)

    @property
    def scales_dtype(self) -> DType:
        """Dtype of the scales of dispatched rows: uint8 for those of 8 bits on CPU."""
        if self.scale_layout == "packed":
            return DType.int32
        return on_target(self.token_format.scale_dtype, self.target)

    @property
    def row_columns(self) -> int:
        """Elements of the dtype of dispatched rows that a row has."""
        return self.token_format.row_columns(self.hidden_size)

    @property
    def n_scales(self) -> int:
        """Scales of a row."""
        return self.token_format.n_scales(self.hidden_size)

    @property
    def combines_sums(self) -> bool:
        """Whether combine sends partial sums, and dispatch takes the weights."""
        return self.combine_mode == "sums"

    @property
    def masks(self) -> bool:
        """Whether ranks mask a peer that is late; one rank has no peer."""
        return self.on_timeout == "mask" and self.n_ranks > 1

    @property
    def is_by_rank(self) -> bool:
        """Whether dispatch sends a token once per rank, for all its experts there."""
        return self.protocol == "by_rank"

    @property
    def partial_format(self) -> TokenFormat | None:
        """The format of quantized partial sums; None: they are not quantized."""
        config = self.combine_quant_config
        return format_of(DType.float8_e4m3fn, config) if config else None

    @property
    def combine_wire_dtype(self) -> DType:
        """Dtype of what combine sends: rows, or partial sums."""
        if self.partial_format is not None:
            return self.partial_format.dtype
        return self.combine_dtype if self.partial_dtype is None else self.partial_dtype

    @property
    def uses_shmem(self) -> bool:
        """Whether ranks reach those of other processes through SHMEM; those that
        :func:`max_ep.launch` has started map each other's GPU memory."""
        is_one_host = GROUP_VARIABLE in os.environ
        return self.target == "gpu" and self.n_nodes > 1 and not is_one_host

    @property
    def ranks_per_host(self) -> int:
        """Ranks that write into each other's memory; a link reaches the others."""
        if self.uses_shmem:
            return self.n_gpus_per_node
        if self.target == "cpu" and self.n_nodes > 1:
            return link_of_environment(self.n_ranks, self.n_gpus_per_node)[0]
        return self.n_ranks

    @property
    def spans_hosts(self) -> bool:
        """Whether the ranks of the group are on several hosts."""
        return self.ranks_per_host < self.n_ranks

    @property
    def relays(self) -> bool:
        """Whether ranks relay to others of their host."""
        return self.hierarchical and 1 < self.ranks_per_host < self.n_ranks

    @property
    def n_local_devices(self) -> int:
        """Devices of this process."""
        return 1 if self.target == "cpu" else self.n_gpus_per_node // self.ranks_per_gpu

    @property
    def runs_ranks_in_turn(self) -> bool:
        """Whether ranks of one process run one after another on a device."""
        if self.use_allreduce:
            return False  # No rank needs another.
        if self.target == "cpu":
            return self.n_gpus_per_node > 1
        return self.ranks_per_gpu > 1

    @property
    def timeout_ms(self) -> int:
        """How long a launch may wait; 0 where waiting cannot help.

        Ranks that run one after another all send before any waits, so a wait is met at
        once or never. On a GPU of its own a single rank may use the fused forms, in
        which some blocks of a launch wait for others.
        """
        in_turn = self.target == "cpu" or self.runs_ranks_in_turn
        if self.n_nodes == 1 and self.n_local_devices == 1 and in_turn:
            return 0
        return max(1, int(self.timeout_s * 1000))

    def device(self, device_id: int) -> DeviceRef:
        """Returns where the tensors of a local rank, ``[0, n_gpus_per_node)``, are."""
        if not is_integer(device_id) or not 0 <= device_id < self.n_gpus_per_node:
            range_ = f"[0, n_gpus_per_node={self.n_gpus_per_node})"
            raise ValueError(f"device_id={device_id!r} must be an integer in {range_}")
        if self.target == "cpu":
            return DeviceRef.CPU()
        return DeviceRef.GPU(device_id // self.ranks_per_gpu)

    def sizes(self) -> SimpleNamespace:
        """Returns the sizes of one rank's memory; ``layout_query.mojo`` lists them."""
        words = [*self.group_words(), *self.token_format.words()]
        words.append(f"row_scale_bytes={self.token_format.row_scale_bytes}")
        words.append(f"combine_bytes={self.combine_wire_dtype.size_in_bytes}")
        return region_sizes(*words)

    def group_words(self) -> list[str]:
        """Describes what decides a layout, in the words of ``op_config.mojo``."""
        partial = self.partial_format
        numbers = {
            "n_experts": self.exchange_experts,
            "n_ranks": self.exchange_ranks,
            "max_tokens_per_rank": self.max_tokens_per_rank,
            "top_k": self.top_k,
            "hidden_size": self.hidden_size,
            "router_top_k": self.router_top_k,
            "n_mapped": self._n_mapped(),
            "partial_block": partial.scale_block if partial else 0,
        }
        words = ["to_all" if self.router_top_k else self.protocol, self.combine_mode]
        words += [f"{name}={number}" for name, number in numbers.items()]
        words += ["hierarchical"] * self.relays
        return [*words, "masks"] if self.masks else words

    def _n_mapped(self) -> int:
        """Counts the ranks whose memory kernels map. CPU ranks find out when they run:
        one graph serves hosts of any number of ranks."""
        if not self.spans_hosts:
            return self.exchange_ranks
        return 1 if self.target == "cpu" else self.ranks_per_host

    def get_max_recv_tokens(self) -> int:
        """Returns the most rows one rank can receive; see ``n_output_rows``."""
        per_token = min(self.top_k, self.n_local_experts)
        most = self.exchange_ranks * self.max_tokens_per_rank * per_token
        return min(most, self.max_output_rows or most)

    def estimate_memory_usage(self) -> int:
        """Returns the bytes of one rank's symmetric region, of both buffer groups."""
        sizes = self.sizes()
        return sizes.region_bytes + (sizes.put_bytes if self.spans_hosts else 0)
