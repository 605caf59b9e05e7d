# SPDX-License-Identifier: Apache-2.0
"""``max-ep plan``: memory of a configuration, before anything is allocated."""

from __future__ import annotations

import argparse
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import fields

from max.nn.comm.ep import ep_config as max_ep_config
from max.support.human_readable_formatter import to_human_readable_bytes as human

from ..config import EPConfig
from ..config.protocol import cost_of_by_expert
from ..formats import BY_NAME
from ..limits import SOURCE_INFO_BYTES
from .network import Layer, Links, report

_FIELDS = {field.name for field in fields(EPConfig)}


def in_options(error: str, names: Mapping[str, str]) -> str:
    """Writes an error with options in place of the arguments that they set."""
    product = r"n_gpus_per_node \* n_nodes = (\d+) ranks"
    error = re.sub(product, r"n_gpus_per_node=\1", error)
    error = re.sub(r"=True\b", "", error.replace("DType.", ""))
    for field, option in names.items():
        error = re.sub(rf"\b{field}='?(-?\w+)'?", rf"{option} \1", error)
        if "_" in field:  # others are words of plain English, too
            error = re.sub(rf"\b{field}\b", option, error)
    return error


def run_plan(options: argparse.Namespace) -> None:
    """Prints the protocol and the bytes of every buffer.

    ``options`` has fields of ``EPConfig``, and ``names``: what the command line calls
    them.
    """
    if options.dispatch_dtype not in BY_NAME:
        unknown, known = options.dispatch_dtype, ", ".join(BY_NAME)
        raise ValueError(f"--dispatch {unknown} is unknown; there are {known}")
    given = {name: value for name, value in vars(options).items() if name in _FIELDS}
    given["n_gpus_per_node"] = _ranks_of_a_host(options)
    dispatch_quant_config = BY_NAME[options.dispatch_dtype].make_quant_config()
    for name in ("dispatch_dtype", "combine_dtype", "partial_dtype"):
        given[name] = given[name] and BY_NAME[given[name]].dtype
    partial = BY_NAME.get(options.partial_dtype)
    if partial is not None and partial.is_quantized:
        if options.combine_mode != "sums":  # EPConfig knows no name for it
            raise ValueError(
                f"--partial {partial.name} with --combine-mode {options.combine_mode}, "
                "which sends no partial sums; leave it out, or pass --combine-mode sums"
            )
        given["partial_dtype"] = None
        given["combine_quant_config"] = partial.make_quant_config()
    try:
        with warnings.catch_warnings(action="ignore"):  # it is printed below
            config = EPConfig(
                **given,
                # Memory is the same on CPU; the choice of a protocol is that on GPUs.
                target="gpu",
                dispatch_quant_config=dispatch_quant_config,
            )
    except ValueError as error:
        raise ValueError(in_options(str(error), options.names)) from None
    sizes = config.sizes()
    print(
        f"Memory of one rank of {config.n_ranks}, protocol {config.protocol}, combine "
        f"{config.combine_mode}"
    )
    note = cost_of_by_expert(config)
    if note and options.protocol == "auto":
        print(in_options(f"protocol='auto' is {note}.", options.names))

    n_rows = shape = config.n_output_rows
    if config.is_padded:
        shape = f"{sizes.n_local_experts} x {config.expert_capacity}"
    row_bytes = config.row_columns * config.output_dtype.size_in_bytes
    for name, n_bytes in {
        "dispatch send": sizes.dispatch_send_bytes,
        "dispatch recv": sizes.dispatch_recv_bytes,
        "dispatch counts, done": sizes.dispatch_counts_bytes,
        "combine recv": sizes.combine_recv_bytes,
        "combine counts, done": sizes.combine_counts_bytes,
        "symmetric region": sizes.region_bytes,
        "local counters": 4 * sizes.counters_words,
        f"dispatch output, {shape} x {config.hidden_size}": n_rows * row_bytes,
    }.items():
        print(f"{name:<40}{n_bytes:>20,}{human(n_bytes):>14}")
    n_bytes = sizes.dispatch_msg_bytes - SOURCE_INFO_BYTES
    print(
        f"A token takes {n_bytes:,} B on the wire to its experts, and a header of "
        f"{SOURCE_INFO_BYTES} B."
    )
    if config.n_nodes > 1:
        print(f"\n{_over_a_network(config, options)}")
        return
    if config.n_ranks == 1:
        print("MAX's EP needs two ranks or more.")
        return
    theirs = max_ep_config.NUM_GROUPS * max_ep_config.estimate_ep_memory_usage(
        hidden_size=config.hidden_size,
        dispatch_dtype=config.dispatch_dtype,
        combine_dtype=config.combine_dtype,
        max_tokens_per_rank=config.max_tokens_per_rank,
        n_experts=config.n_experts,
        n_nodes=1,
        n_gpus_per_node=config.n_ranks,
        top_k=config.top_k,
    )
    print(f"MAX's EP would take {theirs:,} B ({human(theirs)}), by its own estimate.")


def _ranks_of_a_host(options: argparse.Namespace) -> int:
    """Divides the ranks of the group among its hosts."""
    n_ranks, n_hosts = options.n_gpus_per_node, options.n_nodes
    if n_hosts < 1 or n_ranks % n_hosts:
        raise ValueError(
            f"--ranks {n_ranks} with --hosts {n_hosts}: each host has the same number "
            "of ranks; pass a number of hosts, from 1, that divides the ranks"
        )
    for name, value in _links(options).items():
        option = f"{options.names[name]} {value:g}"
        if n_hosts == 1:
            raise ValueError(f"{option} is of several hosts: pass --hosts, too")
        if not 0 < value < math.inf:
            raise ValueError(f"{option}: pass a number above 0")
    return n_ranks // n_hosts


def _links(options: argparse.Namespace) -> dict[str, float]:
    """Names the fields of `Links` that were given."""
    given = {name: getattr(options, name) for name in ("network_gb_s", "latency_us")}
    return {name: value for name, value in given.items() if value is not None}


def _over_a_network(config: EPConfig, options: argparse.Namespace) -> str:
    """Says what a layer of several hosts sends and takes, and what is built of it."""
    layer = Layer(
        n_hosts=config.n_nodes,
        n_ranks=config.n_ranks,
        n_experts=config.n_experts,
        top_k=config.top_k,
        n_tokens=config.max_tokens_per_rank,
        dispatch_bytes=config.sizes().dispatch_msg_bytes,
        combine_bytes=config.sizes().combine_msg_bytes,
    )
    links = Links(**_links(options))
    return (
        f"{report(layer, links)}\n"
        "Between hosts protocol='auto' is by expert, or by rank if combine sends sums; "
        "hierarchical=True is by host (docs/several_hosts.md)."
    )
