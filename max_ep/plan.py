# SPDX-License-Identifier: Apache-2.0
"""``max-ep plan``: what a configuration costs, before anything is allocated."""

from __future__ import annotations

import argparse
import sys

from max.nn.comm.ep.ep_config import NUM_GROUPS
from max.nn.comm.ep.ep_config import (
    estimate_ep_memory_usage as max_estimate_ep_memory_usage,
)
from rich.console import Console
from rich.table import Table

from .config import EPConfig
from .formats import BY_SHORT_NAME


def human(n_bytes: int) -> str:
    """Writes a number of bytes for people."""
    amount = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{n_bytes} B" if unit == "B" else f"{amount:.2f} {unit}"


def run_plan(options: argparse.Namespace) -> int:
    """Prints which protocol is taken and why, and the bytes of every buffer of a rank.

    Returns:
        0, or 2 for a configuration that cannot be.
    """
    token_format = BY_SHORT_NAME[options.dispatch]
    dispatch, make_quant_config = token_format.dtype, token_format.make_quant_config
    partial = options.partial
    combine = BY_SHORT_NAME[options.combine].dtype
    try:
        config = EPConfig(
            dispatch_dtype=dispatch,
            combine_dtype=combine,
            hidden_size=options.hidden,
            top_k=options.top_k,
            n_experts=options.experts,
            max_tokens_per_rank=options.tokens,
            n_gpus_per_node=options.ranks,
            n_nodes=1,
            # Memory is the same on CPU; the choice of a protocol is that on GPUs.
            target="gpu",
            output_layout=options.layout,
            protocol=options.protocol,
            combine_mode=options.combine_mode,
            partial_dtype=partial and BY_SHORT_NAME[partial].dtype,
            fused_shared_expert=options.shared_expert,
            dispatch_quant_config=make_quant_config() if make_quant_config else None,
        )
    except ValueError as error:
        print(f"max-ep plan: {error}", file=sys.stderr)
        return 2
    sizes = config.sizes()
    console = Console()
    table = Table(
        title=f"Memory of one rank of {config.n_ranks}, protocol {config.protocol}, "
        f"combine {config.combine_mode}",
        title_justify="left",
    )
    for column, side in (("buffer", "left"), ("shape", "left"), ("bytes", "right")):
        table.add_column(column, justify=side)
    table.add_column("", justify="right")
    n_local, tokens = sizes.n_local_experts, config.max_tokens_per_rank
    message, back = sizes.dispatch_msg_bytes, sizes.combine_msg_bytes
    send, recv = f"{tokens} x", f"{n_local} x {config.n_ranks} x {tokens} x"
    more = ""
    combine_recv = f"{tokens} x {config.top_k} x"
    if config.combines_sums:
        combine_recv = f"{config.n_ranks} x {tokens} x"
    if config.is_by_rank:
        entry = f"{16 if config.combines_sums else 8} B"
        send, recv = "0 x", f"{config.n_ranks} x {tokens} x {config.top_k} x {entry}, "
        recv += f"{config.n_ranks} x {tokens} x"
        more = ", early, flags"
    rows = (
        ("dispatch send", f"{send} {message} B", sizes.dispatch_send_bytes),
        ("dispatch recv", f"{recv} {message} B{more}", sizes.dispatch_recv_bytes),
        ("dispatch counts, done", "UInt64", sizes.dispatch_counts_bytes),
        ("combine recv", f"{combine_recv} {back} B", sizes.combine_recv_bytes),
        ("combine counts, done", "UInt64", sizes.combine_counts_bytes),
    )
    for name, shape, n_bytes in rows:
        table.add_row(name, shape, f"{n_bytes:,}", human(n_bytes))
    table.add_section()
    region = sizes.region_bytes
    table.add_row("symmetric region", "aligned", f"{region:,}", human(region))
    counters = 4 * sizes.counters_words
    table.add_row("local counters", "Int32", f"{counters:,}", human(counters))
    n_rows = config.n_output_rows
    output = n_rows * config.hidden_size * config.output_dtype.size_in_bytes
    shape = f"{n_rows}"
    if config.is_padded:
        shape = f"{n_local} x {config.expert_capacity}"
    table.add_row(
        f"dispatch output (graph), {config.output_layout}",
        f"{shape} x {config.hidden_size}",
        f"{output:,}",
        human(output),
    )
    console.print(table)
    if config.n_ranks == 1:
        console.print("MAX's EP needs two ranks or more.")
        return 0
    theirs = NUM_GROUPS * max_estimate_ep_memory_usage(
        hidden_size=config.hidden_size,
        dispatch_dtype=dispatch,
        combine_dtype=combine,
        max_tokens_per_rank=tokens,
        n_experts=config.n_experts,
        n_nodes=1,
        n_gpus_per_node=config.n_ranks,
        top_k=config.top_k,
    )
    console.print(
        f"MAX's EP would take {theirs:,} B ({human(theirs)}) a rank: "
        f"{NUM_GROUPS} buffer groups, by its own estimate."
    )
    return 0
