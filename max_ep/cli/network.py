# SPDX-License-Identifier: Apache-2.0
"""Bytes and time of a layer whose ranks are on several hosts, for ``max-ep plan``.

A token chooses ``top_k`` of ``n_experts`` experts, each set as likely as any other.
Three ways are compared. *By expert* sends a message for each choice, and a row of each
choice back. *By rank* sends a message to each rank that has an expert of the token, and
each sends a partial sum back. *By host* (``EPConfig.hierarchical``) sends one message
to each host, where the rank of the same number relays it to the others, and adds up
their partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

from ..plural import counted


@dataclass(frozen=True)
class Links:
    """What a rank sends through at a time, and what each step costs."""

    network_gb_s: float = 50.0
    """Bandwidth of a rank's network card, 10^9 bytes a second."""
    latency_us: float = 30.0
    """Time of a dispatch or combine of one token between hosts."""
    nvlink_gb_s: float = 350.0
    """Bandwidth between GPUs of a host."""
    nvlink_latency_us: float = 4.0
    """Time of a dispatch or combine of one token inside a host."""


@dataclass(frozen=True)
class Layer:
    """One dispatch and one combine of each rank."""

    n_hosts: int
    n_ranks: int
    n_experts: int
    top_k: int
    n_tokens: int
    """Tokens of a rank."""
    dispatch_bytes: int
    """Bytes of a message of dispatch."""
    combine_bytes: int
    """Bytes of a row or a partial sum."""

    def share_with_choice(self, n_parts: int) -> float:
        """Returns how likely a token has an expert on one of ``n_parts`` equal parts of
        the group."""
        elsewhere = self.n_experts - max(1, self.n_experts // n_parts)
        return 1 - comb(elsewhere, self.top_k) / comb(self.n_experts, self.top_k)


@dataclass(frozen=True)
class Way:
    """What a token's copies are, in one way to send them."""

    name: str
    across: float
    """Messages of a token that leave its host."""
    inside: float
    """Messages between GPUs of one host that a rank sends for each token of its own."""
    is_relayed: bool = False
    """Whether a message takes a step across hosts and a second one inside a host."""

    def megabytes(self, layer: Layer) -> tuple[float, float]:
        """Returns the 10^6 bytes that a rank sends over the network in a dispatch and
        in a combine."""
        n = layer.n_tokens * self.across / 1e6
        return n * layer.dispatch_bytes, n * layer.combine_bytes

    def times_us(self, layer: Layer, links: Links) -> tuple[float, float]:
        """Returns the times of a dispatch and of a combine. Both links work at once."""

        def time_us(message_bytes: int) -> float:
            sent = layer.n_tokens * message_bytes / 1e3
            network_us = sent * self.across / links.network_gb_s
            inside_us = sent * self.inside / links.nvlink_gb_s
            step_us = links.nvlink_latency_us * self.is_relayed
            return links.latency_us + step_us + max(network_us, inside_us)

        return time_us(layer.dispatch_bytes), time_us(layer.combine_bytes)


def ways(layer: Layer) -> Iterator[Way]:
    """Yields the three ways."""
    n_local = layer.n_ranks // layer.n_hosts
    share_across = 1 - 1 / layer.n_hosts
    share_inside = (n_local - 1) / layer.n_ranks
    k = layer.top_k
    yield Way("by expert", k * share_across, k * share_inside)
    n_ranks = layer.n_ranks * layer.share_with_choice(layer.n_ranks)
    yield Way("by rank", n_ranks * share_across, n_ranks * share_inside)
    n_hosts = layer.n_hosts * layer.share_with_choice(layer.n_hosts)
    inside = n_ranks * (1 - 1 / n_local)  # all but those of the same number
    yield Way("by host", n_hosts * share_across, inside, is_relayed=True)


def report(layer: Layer, links: Links) -> str:
    """Returns a table of the three ways."""
    lines = [
        f"{counted(layer.n_tokens, 'token')} a rank, {counted(layer.n_hosts, 'host')} "
        f"of {counted(layer.n_ranks // layer.n_hosts, 'rank')}, {links.network_gb_s:g} "
        f"GB/s a rank, {links.latency_us:g} us a step",
        f"{'':<11}{'over the network, MB a rank':>29}{'predicted time, us':>29}",
        f"{'':<11}" + f"{'dispatch':>14}{'combine':>15}" * 2,
    ]
    for way in ways(layer):
        numbers = *way.megabytes(layer), *way.times_us(layer, links)
        columns = "".join(
            f"{x:>{width}.{digits}f}"
            for x, width, digits in zip(numbers, (14, 15) * 2, (2, 2, 0, 0))
        )
        lines.append(f"{way.name:<11}{columns}")
    return "\n".join(lines)
