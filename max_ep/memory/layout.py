# SPDX-License-Identifier: Apache-2.0
"""Asks Mojo for sizes; the formulas are in ``layout.mojo`` only.

``layout_query.mojo`` runs once for each configuration. The answers are kept beside the
precompiled package, under the hash of the sources.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields
from pathlib import Path

from ..cache import cache_dir, kept
from ..extension import run_mojo, sources_hash


@dataclass(frozen=True)
class RegionSizes:
    """Sizes of one rank's memory, in bytes unless the name says otherwise."""

    counters_words: int  # int32 words of EPLocalSyncCounters
    masked_word: int  # first of the mask: of n_ranks, if on_timeout is "mask"
    failure_word: int  # first of them in the failure record
    n_failure_words: int  # words of the failure record
    generations_word: int  # first of the four generations
    launch_word: int  # what a CPU rank does; two words on: since when
    n_tokens_word: int
    combine_of_word: int
    choices_word: int
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
    dispatch_counts_offset: int  # in the region
    heartbeats_offset: int  # of each rank
    combine_recv_offset: int
    combine_counts_offset: int
    region_bytes: int
    dispatch_put_bytes: int  # of put_bytes
    put_bytes: int  # behind the region, where SHMEM is used


@functools.cache
def region_sizes(*question: str | int) -> RegionSizes:
    """Returns what ``layout_query.mojo`` answers; ``EPConfig.sizes`` asks."""
    words = [str(word) for word in question]

    def ask(path: Path) -> None:
        printed = run_mojo("run", "-I", ".", "layout_query.mojo", *words)
        lines = (line.split() for line in printed.splitlines())
        path.write_text(json.dumps({name: int(value) for name, value in lines}))

    answer = kept(cache_dir() / sources_hash() / f"layout-{'-'.join(words)}.json", ask)
    sizes = json.loads(answer.read_text())
    return RegionSizes(**{f.name: sizes[f.name] for f in fields(RegionSizes)})
