# SPDX-License-Identifier: Apache-2.0
"""Asks Mojo for sizes; the formulas live in ``layout.mojo`` alone.

``layout_query.mojo`` is run once per configuration; the answers are kept
beside the precompiled package, under the hash of the sources.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from dataclasses import dataclass, fields

from ..extension import cache_dir, make_cache_folder, run_mojo, sources_hash


@dataclass(frozen=True)
class RegionSizes:
    """Sizes of one rank's memory, in bytes unless the name says otherwise."""

    counters_words: int  # int32 words of EPLocalSyncCounters
    failure_word: int  # first of them in the failure record
    n_failure_words: int  # words of the failure record
    setup_words: int  # int64 words that max_ep.init takes
    protocol: int  # as layout.mojo numbers it
    n_local_experts: int
    dispatch_msg_bytes: int
    combine_msg_bytes: int
    dispatch_send_bytes: int
    dispatch_recv_bytes: int
    dispatch_counts_bytes: int
    combine_recv_bytes: int
    combine_counts_bytes: int
    region_bytes: int
    dispatch_put_bytes: int  # of put_bytes
    put_bytes: int  # behind the region, where SHMEM is used


@functools.cache
def region_sizes(
    token_format: str,
    combine_element_bytes: int,
    hidden_size: int,
    n_experts: int,
    n_ranks: int,
    max_tokens_per_rank: int,
    top_k: int,
    protocol: str,
    router_top_k: int = 0,
) -> RegionSizes:
    """Returns the sizes of a configuration.

    Args:
        token_format: ``"bfloat16"``, ``"float32"`` or ``"blockwise_fp8"``.
        combine_element_bytes: Bytes of an element of what combine sends.
        hidden_size: Elements of a token.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        top_k: Experts of a token.
        protocol: :attr:`EPConfig.mojo_protocol`.
        router_top_k: Router choices that travel with a token of an all-gather.
    """
    question = [token_format] + [
        str(n)
        for n in (
            combine_element_bytes,
            hidden_size,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            top_k,
        )
    ]
    question += [protocol, str(router_top_k)]
    folder = cache_dir() / sources_hash()
    answer = folder / ("layout-" + "-".join(question) + ".json")
    if answer.is_file():
        sizes = json.loads(answer.read_text())
    else:
        printed = run_mojo("run", "-I", ".", "layout_query.mojo", *question)
        lines = (line.split() for line in printed.splitlines())
        sizes = {name: int(value) for name, value in lines}
        make_cache_folder(folder)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as written:
            json.dump(sizes, written)
        os.replace(written.name, answer)
    return RegionSizes(**{f.name: sizes[f.name] for f in fields(RegionSizes)})
