# SPDX-License-Identifier: Apache-2.0
"""What an ``EPConfig`` and FP8 matmuls take, and names of environment variables."""

import contextlib
import os
import reprlib
from numbers import Integral, Real
from typing import Any

NUM_GROUPS = 2
"""Buffer groups of the graph inputs: 0 is dispatch, 1 is combine."""

# What fields of EPConfig may be.
TARGETS = ("cpu", "gpu")
PROTOCOLS = ("by_rank", "by_expert")
COMBINE_MODES = ("rows", "sums")
OUTPUT_LAYOUTS = ("packed", "padded")
SCALE_LAYOUTS = ("transposed", "rows", "tiles", "packed")
ON_TIMEOUT = ("raise", "mask")

# Tests compare these with `layout.mojo`.
MAX_TOP_K = 32
MAX_RANKS = 128
TOKEN_ALIGN_BYTES = 16
"""A token is a multiple of this."""
SOURCE_INFO_BYTES = 16
"""Bytes of a message's source information."""
METADATA_BYTES = 16
"""Bytes of a router choice that travels with a token."""

FP8_BLOCK = 128
"""Elements of a row, and rows and columns of a weight, that share an FP8 scale."""
FP8_COLUMNS = 256
"""In FP8 ``n`` of a weight is a multiple of it."""

MAX_EXPERTS = 2**20
"""Most experts of a group; as in ``layout.mojo``."""

MAX_COUNT = 2**31 - 1
"""Kernels have 32 bits for rows, for choices, and for the bytes of a message."""

MAX_ADDRESS = 2**47
"""Bytes that a process can address."""

MAX_OF_ENTRY = 65535
"""Most experts, and most tokens of a rank, with ``by_rank``; as in ``entries.mojo``."""

MAX_GPU_PAIRS = 3840
"""Most ``n_local_experts * n_ranks`` on GPUs: a launch keeps 12 bytes for each in
the 48 KiB of shared memory that every block has."""

MAX_MASKING_GPUS = 32
"""Most ranks on GPUs with ``on_timeout="mask"``: a lane of a warp reads one word."""

START_TIMEOUT_S = 600.0
"""How long a process waits for the others of its group to start, if not told."""

MAX_TIMEOUT_S = 24 * 3600
"""Longest ``timeout_s``: a day."""

GROUP_VARIABLE = "MAX_EP_GROUP"
"""Environment variable that names the group (set by :func:`max_ep.launch`)."""

NODE_VARIABLE = "MAX_EP_NODE_ID"
"""Environment variable that gives ``node_id`` (set by :func:`max_ep.launch`)."""

BALANCE_VARIABLE = "MAX_EP_BALANCE"
"""Environment variable of served models, for seconds between two looks at what experts
receive; unset or empty: experts stay where they are."""

LINK_VARIABLE = "MAX_EP_LINK"
"""Environment variable for tests of CPU ranks, ``ranks of a host:seed``: processes of
one machine stand for several hosts, which a link joins that is as bad as a network."""

STORE_VARIABLE = "MAX_EP_STORE"
"""Environment variable for the ``HOST:PORT`` of the store that processes of several
hosts share (``max_ep/processes/store.py``)."""

TIMEOUT_VARIABLE = "MAX_EP_TIMEOUT_S"
"""Environment variable for ``timeout_s``; unset or empty: 30. Of programs that make no
``EPConfig``: those of PyTorch, and served models."""


def shown(value: Any) -> str:
    """Writes a value for an error, in a few words however large it is."""
    return reprlib.repr(value).replace("\n", " ")


def is_integer(value: Any) -> bool:
    """Returns whether a value is an integer of Python or NumPy: no bool, no float, and
    no tensor, which would become one silently."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def checked_int(
    name: str, value: Any, least: int = 1, most: int | None = MAX_COUNT, more: str = ""
) -> int:
    """Returns an integer in ``[least, most]`` as Python's ``int``.

    ``most`` is None where something else bounds it. Raises a ``ValueError`` for
    anything else; ``more`` stands at its end.
    """
    is_int = value.__class__ is int or is_integer(value)
    if is_int and least <= value and (most is None or value <= most):
        return int(value)
    is_above = most is not None and is_integer(value) and value > most
    says_most = is_above or most not in (None, MAX_COUNT)
    range_ = f"from {least} to {most}" if says_most else f">= {least}"
    kind = "" if is_integer(value) else f", not {type(value).__name__}"
    given = f"{name}={shown(value)}"
    raise ValueError(f"{given} must be an integer {range_}{kind}{more}")


def checked_timeout_s(seconds: Any, name: str = "timeout_s") -> float:
    """Raises a ``ValueError`` unless a rank can wait so long for another."""
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= MAX_TIMEOUT_S:
        given = f"max_ep: {name}={shown(seconds)}"
        raise ValueError(f"{given} must be seconds, above 0 and at most a day")
    return float(seconds)


def timeout_s_of_environment() -> float:
    """Returns what the environment says."""
    text: Any = os.environ.get(TIMEOUT_VARIABLE) or "30"
    with contextlib.suppress(ValueError):  # which the check names
        text = float(text)
    return checked_timeout_s(text, TIMEOUT_VARIABLE)


def link_of_environment(n_ranks: int, n_local: int) -> tuple[int, int]:
    """Returns how many ranks a host has that tests stand for, and the seed of the link;
    without the variable all ranks."""
    text = os.environ.get(LINK_VARIABLE)
    if not text:
        return n_ranks, 0
    ranks, _, seed = text.partition(":")
    n = int(ranks) if ranks.isdecimal() else 0
    if not seed.isdecimal() or n == 0 or n_ranks % n or n % n_local:
        raise ValueError(
            f"max_ep: {LINK_VARIABLE}={shown(text)} must be RANKS:SEED, the ranks of a "
            f"host, which divide the group's {n_ranks} and which the {n_local} of a "
            "process divide, and a number; unset it: it is for tests"
        )
    return n, int(seed)


def fp8_takes(n: int, k: int) -> bool:
    """Returns whether the FP8 matmuls support weights of ``n`` rows, ``k`` columns."""
    return n % FP8_COLUMNS == k % FP8_BLOCK == 0
