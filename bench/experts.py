# SPDX-License-Identifier: Apache-2.0
"""Layers of experts on one GPU: ``python -m bench.experts``.

On a machine without GPUs, compile the graphs (a few minutes)::

    python -m bench.experts --compile-for sm_90a --out DIR

and on the GPU host, with the same checkout::

    python -m bench.experts --from DIR --commit HASH --out FILE
    python -m bench.report --add FILE

Without ``--from`` the GPU host compiles. Layers behind their router are timed, and both
grouped products alone, beside those of torch; ``EXPERTS`` in ``bench/cases.py`` lists
them. Sizes are those of Qwen3-30B-A3B, in bfloat16. ``bench/peer_experts.py`` says what
is checked, and how weights are kept out of the cache.
"""

from __future__ import annotations

import argparse

from . import processes
from .cases import EXPERTS, Case, Config

TOKENS = (1, 4, 16, 64, 512, 1024, 4096)
MAX_TOKENS = 4096
"""``max_tokens_per_rank`` at all sizes, as in a server."""
SHAPE = "h2048_e128_k8"


def main() -> None:
    """Measures, or compiles."""
    options = _options()
    processes.run("experts", "bench.experts", cases_of(options), options)


def _options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", nargs="+", default=list(TOKENS), type=int)
    options = processes.parse(parser, "experts.json", arguments)
    if not all(0 < n <= MAX_TOKENS for n in options.tokens):
        parser.error(f"--tokens must be from 1 to {MAX_TOKENS}")
    return options


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Lists the cases, those of torch last; torch has nothing to compile."""
    peers = ["experts"] if options.compile_for else list(EXPERTS)
    return [
        Case(Config(peer, 1, SHAPE, "bfloat16", MAX_TOKENS), form, n, "uniform")
        for peer in peers
        for n in sorted(options.tokens)
        for form in EXPERTS[peer]
    ]


if __name__ == "__main__":
    main()
