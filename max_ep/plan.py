# SPDX-License-Identifier: Apache-2.0
"""``max-ep plan``: memory of a configuration, before anything is allocated."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping

from max.nn.comm.ep import ep_config as max_ep_config

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
    partial = BY_SHORT_NAME.get(options.partial_dtype)
    if partial is not None and partial.make_quant_config is not None:
        fields["partial_dtype"] = None
        fields["combine_quant_config"] = partial.make_quant_config()
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
    print(
        f"Memory of one rank of {config.n_ranks}, protocol {config.protocol}, combine "
        f"{config.combine_mode}"
    )

    def row(name: str, shape: str, n_bytes: int) -> None:
        first, *more = shape.split("\n")
        print(f"{name:<22}{first:<27}{n_bytes:>18,}{human(n_bytes):>13}")
        for line in more:
            print(f"{'':22}{line}")

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
    print()
    row("symmetric region", "aligned", sizes.region_bytes)
    row("local counters", "Int32", 4 * sizes.counters_words)
    n_rows = config.n_output_rows
    rows = f"{n_local} x {config.expert_capacity}" if config.is_padded else f"{n_rows}"
    row(
        "dispatch output",
        f"{rows} x {config.hidden_size}\n{config.output_layout}, in the graph",
        n_rows * config.hidden_size * config.output_dtype.size_in_bytes,
    )
    header = SOURCE_INFO_BYTES
    token = f"{message - header:,} B on the wire to its experts"
    print(f"\nA token takes {token}, and a header of {header} B.")
    if config.n_ranks == 1:
        print("MAX's EP needs two ranks or more.")
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
    print(f"MAX's EP would take {theirs:,} B ({human(theirs)}), by its own estimate.")
    return 0
