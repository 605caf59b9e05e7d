# SPDX-License-Identifier: Apache-2.0
"""``max-ep plan``: memory of a configuration, before anything is allocated."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping

from max.nn.comm.ep import ep_config as max_ep_config
from rich import box
from rich.console import Console
from rich.table import Table

from .config import EPConfig
from .formats import BY_SHORT_NAME
from .limits import SOURCE_INFO_BYTES


def human(n_bytes: int) -> str:
    """Formats a number of bytes, such as ``28.08 MiB``."""
    amount = float(n_bytes)
    for prefix in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or prefix == "GiB":
            break
        amount /= 1024
    return f"{n_bytes} B" if prefix == "B" else f"{amount:.2f} {prefix}"


def _in_options(error: str, names: Mapping[str, str]) -> str:
    """Writes an error of ``EPConfig`` with options in place of its fields."""
    product = r"n_gpus_per_node \* n_nodes = (\d+) ranks"
    error = re.sub(product, r"n_gpus_per_node=\1", error)
    error = re.sub(r"=True\b", "", error.replace("DType.", ""))
    for field, option in names.items():
        error = re.sub(rf"\b{field}='?(\w+)'?", rf"{option} \1", error)
        if "_" in field:  # others are words of plain English, too
            error = re.sub(rf"\b{field}\b", option, error)
    return error


def run_plan(options: argparse.Namespace, names: Mapping[str, str]) -> int:
    """Prints the protocol and the bytes of every buffer; returns 2 for invalid sizes.

    ``options`` has fields of ``EPConfig``, ``names`` what the command line calls them.
    """
    fields = {name: value for name, value in vars(options).items() if name != "command"}
    make_quant_config = BY_SHORT_NAME[options.dispatch_dtype].make_quant_config
    for name in ("dispatch_dtype", "combine_dtype", "partial_dtype"):
        fields[name] = fields[name] and BY_SHORT_NAME[fields[name]].dtype
    try:
        config = EPConfig(
            **fields,
            n_nodes=1,
            # Memory is the same on CPU; the choice of a protocol is that on GPUs.
            target="gpu",
            dispatch_quant_config=make_quant_config() if make_quant_config else None,
        )
    except ValueError as error:
        print(f"max-ep plan: {_in_options(str(error), names)}", file=sys.stderr)
        return 2
    sizes = config.sizes()
    console = Console()
    table = Table(
        title=f"Memory of one rank of {config.n_ranks}, protocol {config.protocol}, "
        f"combine {config.combine_mode}",
        title_justify="left",
        box=box.HORIZONTALS,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    # A cell has its own line breaks: rich would divide a shape anywhere.
    for column, side in (("buffer", "left"), ("shape", "left"), ("bytes", "right")):
        table.add_column(column, justify=side, no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)

    def row(name: str, shape: str, n_bytes: int) -> None:
        table.add_row(name, shape, f"{n_bytes:,}", human(n_bytes))

    n_ranks, n_local = config.n_ranks, sizes.n_local_experts
    tokens, top_k = config.max_tokens_per_rank, config.top_k
    message, back = sizes.dispatch_msg_bytes, sizes.combine_msg_bytes
    send, recv = f"{tokens} x {message} B", f"{n_local} x {n_ranks} x {tokens} x"
    recv += f" {message} B"
    if config.is_by_rank:
        entry = 16 if config.combines_sums else 8
        send, recv = "none", f"{n_ranks} x {tokens} x {top_k} x {entry} B,\n"
        recv += f"{n_ranks} x {tokens} x {message} B,\ninline tokens, flags"
    row("dispatch send", send, sizes.dispatch_send_bytes)
    row("dispatch recv", recv, sizes.dispatch_recv_bytes)
    row("dispatch counts, done", "UInt64", sizes.dispatch_counts_bytes)
    of_token = (
        f"{n_ranks} x {tokens}" if config.combines_sums else f"{tokens} x {top_k}"
    )
    row("combine recv", f"{of_token} x {back} B", sizes.combine_recv_bytes)
    row("combine counts, done", "UInt64", sizes.combine_counts_bytes)
    table.add_section()
    row("symmetric region", "aligned", sizes.region_bytes)
    row("local counters", "Int32", 4 * sizes.counters_words)
    n_rows = config.n_output_rows
    rows = f"{n_local} x {config.expert_capacity}" if config.is_padded else f"{n_rows}"
    row(
        f"dispatch output\n(graph), {config.output_layout}",
        f"{rows} x {config.hidden_size}",
        n_rows * config.hidden_size * config.output_dtype.size_in_bytes,
    )
    console.print(table)
    console.print(
        f"A token takes {message - SOURCE_INFO_BYTES:,} B on the wire to its experts, "
        f"and a header of {SOURCE_INFO_BYTES} B."
    )
    if config.n_ranks == 1:
        console.print("MAX's EP needs two ranks or more.")
        return 0
    theirs = max_ep_config.NUM_GROUPS * max_ep_config.estimate_ep_memory_usage(
        hidden_size=config.hidden_size,
        dispatch_dtype=config.dispatch_dtype,
        combine_dtype=config.combine_dtype,
        max_tokens_per_rank=tokens,
        n_experts=config.n_experts,
        n_nodes=1,
        n_gpus_per_node=config.n_ranks,
        top_k=config.top_k,
    )
    console.print(
        f"MAX's EP would take {theirs:,} B ({human(theirs)}) a rank: "
        f"{max_ep_config.NUM_GROUPS} buffer groups, by its own estimate."
    )
    return 0
