# SPDX-License-Identifier: Apache-2.0
"""What is timed beside what: each system, what it delivers, and what brings it."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from .. import install

DELIVERS = {
    "experts": "rows sorted by expert, and combine reduces them",
    "ranks": "one row for each (token, rank), which the caller permutes and reduces",
    "all": "every token on every rank",
}


@dataclass(frozen=True)
class System:
    """A row of the table."""

    peer: str
    """One of ``cases.FORMS``."""
    form: str
    """Its form that is timed."""
    name: str
    delivers: str
    """One of :data:`DELIVERS`."""
    package: str = "max"
    """The distribution that brings it."""
    brings: str = install.MAX
    """The command that installs it."""
    ranks: tuple[int, int] = (2, 8)
    """The fewest and the most ranks that it runs with."""
    max_tokens: int = 8192
    """The most tokens of a rank."""

    @property
    def tried(self) -> str:
        """The version whose interface is called, where that is another project's."""
        return install.TRIED.get(self.package, "")

    def version(self) -> str:
        """Returns the version that is installed; nothing if none is."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return ""


_FROM_TORCH = dict(package="torch", brings=install.TORCH)
_DEEP_EP = dict(package="sgl-deep-ep", brings=install.DEEP_EP)

SYSTEMS = (
    System("sums", "fused", "max_ep, `sums`", "experts", ranks=(1, 8)),
    System("rows", "fused", "max_ep, `rows`", "experts", ranks=(1, 8)),
    System(
        "buffer",
        "fused",
        "max_ep, `Buffer` with rows, from PyTorch",
        "experts",
        **_FROM_TORCH,
    ),
    System(
        "buffer_sums",
        "fused",
        "max_ep, `Buffer` from PyTorch",
        "experts",
        **_FROM_TORCH,
    ),
    System(
        "elastic",
        "plain",
        "max_ep, `ElasticBuffer` from PyTorch",
        "ranks",
        **_FROM_TORCH,
    ),
    System("max", "fused", "MAX 26.7", "experts"),
    System(
        "max_layer", "fused", "MAX without expert parallelism", "experts", ranks=(1, 1)
    ),
    System(
        "deepep_v1",
        "fused",
        "DeepEP V1, low latency",
        "experts",
        max_tokens=1024,
        **_DEEP_EP,
    ),
    System("deepep_v2", "plain", "DeepEP V2", "ranks", **_DEEP_EP),
    System(
        "trtllm",
        "fused",
        "TensorRT-LLM, one-sided",
        "ranks",
        package="flashinfer-python",
        brings=install.FLASHINFER,
    ),
    System(
        "nccl_ep",
        "fused",
        "NCCL EP, low latency",
        "ranks",
        package="nccl-extensions",
        brings=install.NCCL_EP,
    ),
    System("all_gather", "all_gather", "max_ep, `AllGatherTokenDispatcher`", "all"),
    System(
        "nccl", "all_gather", "NCCL all-gather, reduce-scatter", "all", **_FROM_TORCH
    ),
)
"""In the order of the table."""

FIRST = ("sums", "max", "nccl")
"""Peers that are measured before the others: a table of them says most."""

OURS = ("sums", "rows", "buffer", "buffer_sums", "elastic", "all_gather")
"""Peers that are max_ep."""

BY_PEER = {system.peer: system for system in SYSTEMS}
