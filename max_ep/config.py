# SPDX-License-Identifier: Apache-2.0
"""EPConfig: what every rank of a group must agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from max.driver import accelerator_api, accelerator_count
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.quant_config import QuantConfig, QuantFormat

from .config_checks import (
    check_choices,
    check_dtypes,
    check_hidden_size,
    check_protocol,
    check_sizes,
    refusal_by_rank,
)
from .layout import RegionSizes, region_sizes
from .limits import FP8_BLOCK


@dataclass
class EPConfig:
    """Sizes of an expert-parallel group; the same on every rank.

    The fields up to ``num_logical_experts`` are those of
    ``max.nn.comm.ep.EPConfig`` in MAX 26.7, under the same names and with the
    same meanings; those that ask for what this library does not do are refused
    unless they have their default. The fields behind them are this library's.

    A *rank* is one of ``n_gpus_per_node * n_nodes`` members; each process
    drives ``n_gpus_per_node`` of them. ``n_nodes=1`` puts all ranks into one
    process. With ``target="cpu"`` a "node" is a process, so
    ``n_gpus_per_node=1, n_nodes=4`` is one process for each of four ranks.

    Raises:
        ValueError, TypeError: On construction, if a field is out of range.
    """

    dispatch_dtype: DType
    """Dtype on the wire: bfloat16, float32, or float8_e4m3fn with
    ``dispatch_quant_config``."""
    combine_dtype: DType
    """Dtype of expert rows and results: bfloat16 or float32."""
    hidden_size: int
    """Elements of a token; a multiple of 16 bytes, of 128 for FP8."""
    top_k: int
    """Experts of a token, ``[1, min(32, n_experts)]``."""
    n_experts: int
    """Experts of the group; the ranks need not divide it."""
    max_tokens_per_rank: int
    """Tokens one rank may dispatch at a time."""
    n_gpus_per_node: int
    """Ranks one process drives."""
    n_nodes: int
    """Processes of the group."""
    node_id: int = -1
    """This process, ``[0, n_nodes)``; -1: found out by ``ep_init``."""
    dispatch_quant_config: QuantConfig | None = None
    """How to quantize: blockwise FP8 with blocks of (1, 128)."""
    nvfp4_dyn_global_scales: bool = False
    fused_shared_expert: bool = False
    """Every rank also computes a shared expert, on all of its own tokens: they
    stand in front of its dispatched rows, and combine adds what the expert made
    of them (docs/decisions/0008-row-layouts-and-a-shared-expert.md)."""
    fuse_ffn_combine_send: bool = False
    moe_dim: int = 0
    fused_moe_ready: bool = False
    use_allreduce: bool = False
    max_batch_size: int = 0
    eplb_enabled: bool = False
    num_moe_layers: int = 0
    max_replicas: int = 1
    eplb_phy2log_plan: Any = None
    num_logical_experts: int = 0

    target: str = "auto"
    """Device kind of the tensors: ``"cpu"``, ``"gpu"``, or ``"auto"``: what
    this machine has."""
    protocol: str = "auto"
    """How dispatch addresses a token. ``"by_rank"`` sends it once to each rank that
    holds one of its experts; it needs a CPU group or the NVIDIA GPUs of one host, and
    takes no input scales. ``"by_expert"`` sends it once for each of its experts, and
    works everywhere. The results are the same, bit for bit. ``"auto"`` is
    ``"by_rank"`` where that works, otherwise ``"by_expert"``."""
    combine_mode: str = "rows"
    """What combine sends back. ``"rows"``: every expert row; combine takes the router
    weights. ``"sums"``: one partial sum of weighted rows for each token and each rank
    that holds an expert of it. Sums are fewer bytes, and are rounded differently
    (docs/decisions/0011-combine-sums.md). They need ``"by_rank"``, and *dispatch*
    takes the router weights."""
    partial_dtype: DType | None = None
    """Dtype of a partial sum on the wire, with ``combine_mode="sums"``: bfloat16 or
    float32; None: ``combine_dtype``."""
    timeout_s: float = 30.0
    """How long a launch waits for its peers before it fails. Nothing waits
    where all ranks of the group run one after another (``timeout_ms`` is 0)."""
    fp8_power_of_two_scales: bool = False
    """Round FP8 scales up to powers of two."""
    ranks_per_gpu: int = 1
    """Local ranks that share a GPU. Above 1 one GPU stands in for several: its
    ranks run one after another, so the fused forms are refused."""
    n_sms: int = 0
    """Most multiprocessors of a GPU that an EP op occupies, so that other kernels
    run beside it; 0: all of them. With tokens sent first at least 2. What fewer cost
    was not measured."""
    output_layout: str = "packed"
    """How dispatched rows stand: ``"packed"``: one after another, with
    ``row_offsets``; ``"padded"``: each local expert has ``expert_capacity``
    rows of its own, with ``recv_counts``, as in DeepEP's low-latency mode."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.target == "auto":
            self.target = "gpu" if accelerator_count() > 0 else "cpu"
        check_sizes(self)
        check_dtypes(self)
        check_hidden_size(self)
        if self.protocol == "auto":
            can_be = self.combines_sums or not refusal_by_rank(self)
            self.protocol = "by_rank" if can_be else "by_expert"
        check_protocol(self)

    n_carried: ClassVar[int] = 0
    """Choices of the router that travel with a token to all ranks, in an all-gather
    (``AllGatherConfig`` in ``gather.py``); 0: this is no all-gather."""

    # ------------------------------------------------------------ derived facts

    @property
    def n_ranks(self) -> int:
        """Ranks of the group."""
        return self.n_gpus_per_node * self.n_nodes

    @property
    def n_local_experts(self) -> int:
        """Experts each rank has room for: ``n_experts / n_ranks``, rounded up.

        The last ranks hold fewer if the ranks do not divide the experts.
        """
        return math.ceil(self.n_experts / self.n_ranks)

    @property
    def is_padded(self) -> bool:
        """Whether each local expert has rows of its own."""
        return self.output_layout == "padded"

    @property
    def expert_capacity(self) -> int:
        """The most rows one local expert can receive."""
        return self.n_ranks * self.max_tokens_per_rank

    @property
    def n_output_rows(self) -> int:
        """Rows of the tensors that dispatch delivers and combine takes.

        Packed: ``get_max_recv_tokens()``, and ``max_tokens_per_rank`` more with
        a fused shared expert. Padded: ``n_local_experts * expert_capacity``.
        """
        if self.is_padded:
            return self.n_local_experts * self.expert_capacity
        n_shared = self.max_tokens_per_rank if self.fused_shared_expert else 0
        return self.get_max_recv_tokens() + n_shared

    @property
    def is_quantized(self) -> bool:
        """Whether dispatch quantizes."""
        return self.dispatch_dtype == DType.float8_e4m3fn

    @property
    def combines_sums(self) -> bool:
        """Whether combine sends partial sums, and dispatch takes the weights."""
        return self.combine_mode == "sums"

    @property
    def is_by_rank(self) -> bool:
        """Whether a rank gets a token once, whatever number of its experts it has."""
        return self.protocol == "by_rank"

    @property
    def mojo_protocol(self) -> str:
        """Protocol and combine mode as ``protocol_of`` (``layout.mojo``) names them."""
        if self.n_carried:
            return "gather_reduced"
        if not self.is_by_rank:
            return "expert_slots"
        return "rank_slots_reduced" if self.combines_sums else "rank_slots"

    @property
    def combine_wire_dtype(self) -> DType:
        """Dtype of what combine sends: rows, or partial sums."""
        return self.combine_dtype if self.partial_dtype is None else self.partial_dtype

    @property
    def adds_unsent_rows(self) -> bool:
        """Whether ``combine_wait`` takes the expert rows, which are not all sent."""
        return self.fused_shared_expert or self.combines_sums

    @property
    def token_format(self) -> str:
        """Name of the wire format, as ``layout_query.mojo`` takes it."""
        return {
            DType.bfloat16: "bfloat16",
            DType.float32: "float32",
            DType.float8_e4m3fn: "blockwise_fp8",
        }[self.dispatch_dtype]

    @property
    def output_dtype(self) -> DType:
        """Dtype of dispatched rows.

        ``dispatch_dtype``, but uint8 for FP8 on CPU: MAX has no float8 tensors
        there, so the rows carry the bits.
        """
        if self.is_quantized and self.target == "cpu":
            return DType.uint8
        return self.dispatch_dtype

    @property
    def runs_ranks_in_turn(self) -> bool:
        """Whether ranks of one process run one after another on a device."""
        if self.target == "cpu":
            return self.n_gpus_per_node > 1
        return self.ranks_per_gpu > 1

    @property
    def is_on_amd(self) -> bool:
        """Whether the GPUs are AMD's."""
        return self.target == "gpu" and accelerator_api() == "hip"

    @property
    def uses_shmem(self) -> bool:
        """Whether ranks reach those of other processes through SHMEM."""
        return self.target == "gpu" and self.n_nodes > 1

    @property
    def n_given_choices(self) -> int:
        """Columns of the ``topk_ids`` and weights that dispatch is given."""
        return self.n_carried or self.top_k

    @property
    def n_local_devices(self) -> int:
        """Devices of this process."""
        if self.target == "cpu":
            return 1
        return self.n_gpus_per_node // self.ranks_per_gpu

    @property
    def timeout_ms(self) -> int:
        """How long a launch may wait; 0 where no time would help.

        The ranks of one device run one after another and all send before any
        waits, so without other devices a wait is met at once or never. A rank
        that has a GPU of its own may use the fused forms, in which some blocks
        of a launch wait for others, also where it is the only rank.
        """
        in_turn = self.target == "cpu" or self.runs_ranks_in_turn
        if self.n_nodes == 1 and self.n_local_devices == 1 and in_turn:
            return 0
        return max(1, int(self.timeout_s * 1000))

    def device(self, device_id: int) -> DeviceRef:
        """Returns where the tensors of a local rank live.

        Args:
            device_id: Local rank, ``[0, n_gpus_per_node)``.
        """
        if not 0 <= device_id < self.n_gpus_per_node:
            raise ValueError(
                f"device_id={device_id} must be in [0, n_gpus_per_node="
                f"{self.n_gpus_per_node})"
            )
        if self.target == "cpu":
            return DeviceRef.CPU()
        return DeviceRef.GPU(device_id // self.ranks_per_gpu)

    def sizes(self) -> RegionSizes:
        """Returns the sizes of one rank's memory, as Mojo lays it out."""
        return region_sizes(
            self.token_format,
            self.combine_wire_dtype.size_in_bytes,
            self.hidden_size,
            self.n_experts,
            self.n_ranks,
            self.max_tokens_per_rank,
            self.top_k,
            self.mojo_protocol,
            self.n_carried,
        )

    def get_max_recv_tokens(self) -> int:
        """Returns the most rows one rank can receive.

        Every token of every rank, once for each local expert it can have. The
        tensors may have more rows: ``n_output_rows``.
        """
        return (
            self.n_ranks
            * self.max_tokens_per_rank
            * min(self.top_k, self.n_local_experts)
        )

    def estimate_memory_usage(self) -> int:
        """Returns the bytes of one rank's symmetric region.

        MAX's method of this name answers for one of two buffer groups; this is
        the whole, with what SHMEM puts from if it is used.
        """
        sizes = self.sizes()
        return sizes.region_bytes + (sizes.put_bytes if self.uses_shmem else 0)


def blockwise_fp8_quant_config() -> QuantConfig:
    """Returns the ``dispatch_quant_config`` of blockwise FP8 dispatch."""
    from max.nn.quant_config import (
        InputScaleSpec,
        ScaleGranularity,
        ScaleOrigin,
        WeightScaleSpec,
    )

    return QuantConfig(
        input_scale=InputScaleSpec(
            granularity=ScaleGranularity.BLOCK,
            origin=ScaleOrigin.DYNAMIC,
            dtype=DType.float32,
            block_size=(1, FP8_BLOCK),
        ),
        weight_scale=WeightScaleSpec(
            granularity=ScaleGranularity.BLOCK,
            dtype=DType.float32,
            block_size=(FP8_BLOCK, FP8_BLOCK),
        ),
        mlp_quantized_layers=set(),
        attn_quantized_layers=set(),
        format=QuantFormat.BLOCKSCALED_FP8,
    )
