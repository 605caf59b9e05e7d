# SPDX-License-Identifier: Apache-2.0
"""What an ``EPConfig`` may hold: largest sizes, and the choices there are."""

from __future__ import annotations

from max.dtype import DType

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
"""Most experts, and most tokens of a rank, with ``by_rank``; as in ``entries.mojo``."""

MAX_GPU_PAIRS = 3840
"""Most ``n_local_experts * n_ranks`` on GPUs: a launch keeps 12 bytes for each in
the 48 KiB of shared memory that every block has."""

MAX_TIMEOUT_S = 24 * 3600
"""Longest ``timeout_s``: a day."""

PROTOCOLS = ("by_rank", "by_expert")
"""Wire protocols there are."""

COMBINE_MODES = ("rows", "sums")
"""What combine sends: expert rows, or partial sums of them."""

OUTPUT_LAYOUTS = ("packed", "padded")
"""How the rows of a rank may stand in the outputs of dispatch."""

PLAIN_DTYPES = (DType.bfloat16, DType.float32)
