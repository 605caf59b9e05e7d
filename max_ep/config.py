# SPDX-License-Identifier: Apache-2.0
"""EPConfig: what every rank of a group must agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from max.driver import accelerator_api, accelerator_count
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.quant_config import QuantConfig, QuantFormat

from .layout import RegionSizes, region_sizes

NUM_GROUPS = 2
"""Buffer groups of the graph inputs: 0 is dispatch, 1 is combine."""

MAX_TOP_K = 32
"""Largest ``top_k``; a test compares it with ``layout.mojo``."""

MAX_RANKS = 128
"""Largest ``n_ranks``; a test compares it with ``layout.mojo``."""

TOKEN_ALIGN_BYTES = 16
"""A token is a multiple of this; a test compares it with ``layout.mojo``."""

FP8_BLOCK = 128
"""Channels that share a scale; a test compares it with ``blockwise_fp8.mojo``."""

TARGETS = ("cpu", "gpu")
"""Device kinds that have kernels."""

MAX_OF_ENTRY = 65535
"""Most experts, and tokens a rank, with ``rank_slots`` and ``gather``; as in
``entries.mojo``."""

MAX_GATHER_GPUS = 32
"""Most ranks on GPUs with ``gather``: a lane of a warp sends to one."""

MAX_GPU_PAIRS = 3840
"""Most ``n_local_experts * n_ranks`` on GPUs: a launch keeps 12 bytes for each in
the 48 KiB of shared memory that every block has."""

PROTOCOLS = ("expert_slots", "rank_slots", "gather")
"""Wire protocols there are."""

COMBINE_MODES = ("unreduced", "reduced")
"""What combine sends: rows, or partial sums of rows."""

OUTPUT_LAYOUTS = ("packed", "padded")
"""How the rows of a rank may stand in the outputs of dispatch."""

_PLAIN_DTYPES = (DType.bfloat16, DType.float32)

# Fields of MAX's EPConfig that ask for something this library does not do.
_REFUSED = {
    "nvfp4_dyn_global_scales": "NVFP4 dispatch",
    "fuse_ffn_combine_send": "the fused FFN",
    "fused_moe_ready": "the fused FFN",
    "use_allreduce": "all-reduce mode",
    "eplb_enabled": "expert load balancing",
}


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
    of them (docs/decisions/0008-two-row-layouts-and-a-shared-expert.md)."""
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
    """Wire protocol: ``"expert_slots"`` sends a token once for each of its
    experts, ``"rank_slots"`` once to each rank that has one of them, ``"gather"``
    to all ranks that have experts, maybe before the router has decided
    (:meth:`EPBatchManager.ep_send_tokens`). The latter two on GPUs of one host,
    and without input scales; the results are the same, bit for bit. ``"auto"``:
    ``"rank_slots"`` where it can be, for it is faster and takes far less memory
    (docs/decisions/0012-rank-slots-on-gpus.md)."""
    combine_mode: str = "unreduced"
    """What combine sends back: ``"unreduced"``: every expert row, and combine
    takes the router weights; ``"reduced"``: for each token and each rank that
    has an expert of it, one partial sum of weighted rows. Then *dispatch* takes
    the router weights, and the protocol is not ``"expert_slots"``. Fewer bytes,
    and sums that are rounded otherwise (docs/decisions/0011-reduced-combine.md)."""
    partial_dtype: DType | None = None
    """Dtype of a partial sum on the wire, with ``combine_mode="reduced"``:
    bfloat16 or float32; None: ``combine_dtype``."""
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
    run beside it; 0: all of them. What fewer cost was not measured."""
    output_layout: str = "packed"
    """How dispatched rows stand: ``"packed"``: one after another, with
    ``row_offsets``; ``"padded"``: each local expert has ``expert_capacity``
    rows of its own, with ``recv_counts``, as in DeepEP's low-latency mode."""

    def __post_init__(self) -> None:
        if self.target == "auto":
            self.target = "gpu" if accelerator_count() > 0 else "cpu"
        if self.target not in TARGETS:
            raise ValueError(
                f"target={self.target!r} is unknown; there are 'auto', "
                + ", ".join(repr(t) for t in TARGETS)
            )
        if self.combine_mode not in COMBINE_MODES:
            raise ValueError(
                f"combine_mode={self.combine_mode!r} is unknown; there are "
                + ", ".join(repr(mode) for mode in COMBINE_MODES)
            )
        if self.protocol == "auto":
            sizes = (self.n_experts, self.max_tokens_per_rank)
            fits = all(isinstance(n, int) and n <= MAX_OF_ENTRY for n in sizes)
            can = fits and not self.uses_shmem and not self._is_on_amd
            self.protocol = "rank_slots" if can or self.is_reduced else "expert_slots"
        if self.protocol not in PROTOCOLS:
            raise ValueError(
                f"protocol={self.protocol!r} is unknown; there are 'auto', "
                + ", ".join(repr(p) for p in PROTOCOLS)
            )
        if self.is_reduced and not self.has_rank_slots:
            raise ValueError(
                f"combine_mode='reduced' with protocol={self.protocol!r}: the rank "
                "of an expert can add up a token's rows only where 'rank_slots' "
                "or 'gather' tells it which they are; pass one of them, or 'auto', "
                "or combine_mode='unreduced'"
            )
        if self.has_rank_slots and self.uses_shmem:
            raise ValueError(
                f"protocol={self.protocol!r} with target='gpu' and "
                f"n_nodes={self.n_nodes}: it reaches the GPUs of one host only; pass "
                "protocol='expert_slots' (and combine_mode='unreduced')"
            )
        if self.has_rank_slots and self._is_on_amd:
            raise ValueError(
                f"protocol={self.protocol!r} with target='gpu' on AMD GPUs: its "
                "kernels are for NVIDIA's; pass protocol='expert_slots' (and "
                "combine_mode='unreduced')"
            )
        if self.is_gather and self.target == "gpu" and self.n_ranks > MAX_GATHER_GPUS:
            raise ValueError(
                f"protocol='gather' with {self.n_ranks} GPU ranks is above "
                f"{MAX_GATHER_GPUS}, the most it can send to; pass "
                "protocol='rank_slots'"
            )
        for field, what in _REFUSED.items():
            if getattr(self, field):
                raise ValueError(
                    f"{field}={getattr(self, field)!r} is not supported: max_ep "
                    f"has no {what}"
                )
        if self.output_layout not in OUTPUT_LAYOUTS:
            raise ValueError(
                f"output_layout={self.output_layout!r} is unknown; there are "
                + ", ".join(repr(layout) for layout in OUTPUT_LAYOUTS)
            )
        if self.fused_shared_expert and self.is_padded:
            raise ValueError(
                "fused_shared_expert=True needs output_layout='packed': padded "
                "rows are those of the local experts, and the shared expert's "
                "would have no place there. Compute it beside the routed ones "
                "and add it, as graphs/moe_layer.py does"
            )
        self._check_sizes()
        self._check_dtypes()
        self._check_hidden_size()

    def _check_sizes(self) -> None:
        for field in (
            "hidden_size",
            "top_k",
            "n_experts",
            "max_tokens_per_rank",
            "n_gpus_per_node",
            "n_nodes",
            "ranks_per_gpu",
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field}={value!r} must be an integer >= 1")
        if self.top_k > MAX_TOP_K:
            raise ValueError(
                f"top_k={self.top_k} is above {MAX_TOP_K}, the most a token may have"
            )
        if self.top_k > self.n_experts:
            raise ValueError(
                f"top_k={self.top_k} is above n_experts={self.n_experts}: a "
                "token's experts are distinct"
            )
        if self.n_ranks > MAX_RANKS:
            raise ValueError(
                f"n_gpus_per_node * n_nodes = {self.n_ranks} ranks, at most "
                f"{MAX_RANKS} are supported"
            )
        if self.n_gpus_per_node % self.ranks_per_gpu != 0:
            raise ValueError(
                f"ranks_per_gpu={self.ranks_per_gpu} must divide n_gpus_per_node="
                f"{self.n_gpus_per_node}, the ranks of this process"
            )
        if self.uses_shmem and self.ranks_per_gpu > 1:
            raise ValueError(
                f"ranks_per_gpu={self.ranks_per_gpu} with n_nodes={self.n_nodes}: "
                "SHMEM has one rank on each GPU; pass ranks_per_gpu=1"
            )
        if not -1 <= self.node_id < self.n_nodes:
            raise ValueError(
                f"node_id={self.node_id} must be in [0, n_nodes={self.n_nodes}), or -1"
            )
        if not 0 < self.timeout_s <= 24 * 3600:
            raise ValueError(
                f"timeout_s={self.timeout_s} must be above 0 and at most a day"
            )

        if not isinstance(self.n_sms, int) or self.n_sms < 0:
            raise ValueError(
                f"n_sms={self.n_sms!r} must be an integer >= 0; 0 is all there are"
            )
        n_pairs = math.ceil(self.n_experts / self.n_ranks) * self.n_ranks
        if self.target == "gpu" and n_pairs > MAX_GPU_PAIRS:
            raise ValueError(
                f"n_experts={self.n_experts} on {self.n_ranks} GPU ranks is above "
                f"{MAX_GPU_PAIRS}, the most that fit into a block's shared memory"
            )
        for field in ("n_experts", "max_tokens_per_rank"):
            if self.has_rank_slots and getattr(self, field) > MAX_OF_ENTRY:
                raise ValueError(
                    f"{field}={getattr(self, field)} is above {MAX_OF_ENTRY}, the "
                    f"most that protocol={self.protocol!r} can tell apart; pass "
                    "protocol='expert_slots'"
                )

    def _check_dtypes(self) -> None:
        if self.combine_dtype not in _PLAIN_DTYPES:
            raise ValueError(
                f"combine_dtype={self.combine_dtype} must be bfloat16 or float32"
            )
        if self.partial_dtype is not None:
            if not self.is_reduced:
                raise ValueError(
                    f"partial_dtype={self.partial_dtype} with combine_mode="
                    f"{self.combine_mode!r}: only reduced combine sends partial "
                    "sums; pass None, or combine_mode='reduced'"
                )
            if self.partial_dtype not in _PLAIN_DTYPES:
                raise ValueError(
                    f"partial_dtype={self.partial_dtype} must be bfloat16 or "
                    "float32, or None for combine_dtype"
                )
        quant = self.dispatch_quant_config
        if self.dispatch_dtype in _PLAIN_DTYPES:
            if quant is not None:
                raise ValueError(
                    f"dispatch_quant_config given with dispatch_dtype="
                    f"{self.dispatch_dtype}; pass None, or dispatch_dtype="
                    "float8_e4m3fn"
                )
            return
        if self.dispatch_dtype != DType.float8_e4m3fn:
            raise ValueError(
                f"dispatch_dtype={self.dispatch_dtype} must be bfloat16, "
                "float32 or float8_e4m3fn"
            )
        if quant is None:
            raise ValueError(
                "dispatch_dtype=float8_e4m3fn needs a dispatch_quant_config: "
                "max_ep.blockwise_fp8_quant_config() makes the supported one"
            )
        if (
            quant.format != QuantFormat.BLOCKSCALED_FP8
            or quant.input_scale.block_size != (1, FP8_BLOCK)
            or quant.input_scale.dtype != DType.float32
        ):
            raise ValueError(
                f"dispatch_quant_config has format {quant.format}, scales of "
                f"{quant.input_scale.dtype} for blocks of "
                f"{quant.input_scale.block_size}; supported is "
                f"{QuantFormat.BLOCKSCALED_FP8} with float32 scales for blocks "
                f"of (1, {FP8_BLOCK})"
            )

    def _check_hidden_size(self) -> None:
        if self.is_quantized and self.hidden_size % FP8_BLOCK != 0:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of "
                f"{FP8_BLOCK} for FP8 dispatch; pad it"
            )
        for field in ("dispatch_dtype", "combine_dtype", "partial_dtype"):
            if getattr(self, field) is None:
                continue
            element_bytes = getattr(self, field).size_in_bytes
            if self.hidden_size * element_bytes % TOKEN_ALIGN_BYTES != 0:
                raise ValueError(
                    f"hidden_size={self.hidden_size} of {getattr(self, field)} "
                    f"({field}) is {self.hidden_size * element_bytes} bytes, "
                    f"which must be a multiple of {TOKEN_ALIGN_BYTES}; pad it "
                    f"to a multiple of {TOKEN_ALIGN_BYTES // element_bytes}"
                )

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
    def is_reduced(self) -> bool:
        """Whether combine sends partial sums, and dispatch takes the weights."""
        return self.combine_mode == "reduced"

    @property
    def is_gather(self) -> bool:
        """Whether a token goes to all ranks that have experts."""
        return self.protocol == "gather"

    @property
    def has_rank_slots(self) -> bool:
        """Whether a rank gets a token once, in a place of its number."""
        return self.protocol in ("rank_slots", "gather")

    @property
    def combine_wire_dtype(self) -> DType:
        """Dtype of what combine sends: rows, or partial sums."""
        return self.combine_dtype if self.partial_dtype is None else self.partial_dtype

    @property
    def adds_unsent_rows(self) -> bool:
        """Whether ``combine_wait`` takes the expert rows, which are not all sent."""
        return self.fused_shared_expert or self.is_reduced

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
    def _is_on_amd(self) -> bool:
        return self.target == "gpu" and accelerator_api() == "hip"

    @property
    def uses_shmem(self) -> bool:
        """Whether ranks reach those of other processes through SHMEM."""
        return self.target == "gpu" and self.n_nodes > 1

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
            self.protocol + ("_reduced" if self.is_reduced else ""),
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


def estimate_ep_memory_usage(
    *,
    hidden_size: int,
    dispatch_dtype: DType,
    combine_dtype: DType,
    max_tokens_per_rank: int,
    n_experts: int,
    n_nodes: int,
    n_gpus_per_node: int,
    top_k: int,
    use_allreduce: bool = False,
    dispatch_element_dtype: DType | None = None,
) -> int:
    """Returns the bytes of one rank's symmetric region, with ``protocol="auto"``.

    The arguments are those of ``max.nn.comm.ep.ep_config.estimate_ep_memory_usage``;
    a node is a host with GPUs, as there, and what SHMEM puts from is not counted.
    ``use_allreduce`` and ``dispatch_element_dtype`` must have their defaults.
    ``max-ep plan`` prints the parts, beside what MAX's EP would take.
    """
    if dispatch_element_dtype is not None:
        raise ValueError(
            f"dispatch_element_dtype={dispatch_element_dtype} is for packed "
            "dtypes, which max_ep does not send"
        )
    quantized = dispatch_dtype == DType.float8_e4m3fn
    return EPConfig(
        dispatch_dtype=dispatch_dtype,
        combine_dtype=combine_dtype,
        hidden_size=hidden_size,
        top_k=top_k,
        n_experts=n_experts,
        max_tokens_per_rank=max_tokens_per_rank,
        n_gpus_per_node=n_gpus_per_node,
        n_nodes=n_nodes,
        use_allreduce=use_allreduce,
        dispatch_quant_config=blockwise_fp8_quant_config() if quantized else None,
        target="cpu",
        protocol="expert_slots" if n_nodes > 1 else "auto",
    ).estimate_memory_usage()
