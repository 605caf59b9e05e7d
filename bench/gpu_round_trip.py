# SPDX-License-Identifier: Apache-2.0
"""Round trips on GPUs beside other libraries: ``python -m bench.gpu_round_trip``.

On a machine without GPUs, compile the graphs (about a minute a configuration)::

    python -m bench.gpu_round_trip --compile-for sm_90a --out DIR --ranks 2

and on the GPU host, with the same checkout and the same options::

    python -m bench.gpu_round_trip --from DIR --ranks 2 --commit HASH --out FILE
    python -m bench.report --add FILE

Without ``--from`` the GPU host compiles. The permutation of one rank::

    --ranks 1 --tokens 128 1024 4096 8192 --peers sums rows max_layer --forms fused

and layers of experts behind their router, and both products alone (``peer_experts.py``
says how weights are kept out of the cache)::

    --ranks 1 --tokens 1 4 16 64 512 1024 4096 --shapes h2048_e128_k8 \
        --peers experts grouped_mm

Each configuration runs in a process of its own (``bench/processes.py``).
docs/measurements.md says what is measured, ``bench/cases.py`` what peers and forms are.
"""

from __future__ import annotations

import argparse

from . import processes
from .cases import (
    DTYPES,
    EXPERTS,
    FORMS,
    ROUTINGS,
    SHAPES,
    TOKENS,
    Case,
    Config,
    max_tokens_for,
)

_ON_ONE = ("max_layer", *EXPERTS)
_BFLOAT16_ONLY = ("all_gather", *_ON_ONE, *processes.FROM_TORCH)


def main() -> None:
    options = _options()
    kind = "experts" if options.peers[0] in EXPERTS else "gpu"
    processes.run(kind, cases_of(options), options)


def _options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def several(name: str, default: tuple, kind: type = str, **more: object) -> None:
        parser.add_argument(name, nargs="+", default=list(default), type=kind, **more)

    several("--ranks", (2,), int, help="GPUs used, one rank each")
    several("--tokens", TOKENS, int, help="tokens a rank")
    several("--shapes", tuple(SHAPES)[:1], choices=list(SHAPES))
    several("--dtypes", DTYPES[:1], choices=DTYPES)
    several("--routings", ROUTINGS[:1], choices=ROUTINGS)
    several("--peers", [p for p in FORMS if p not in EXPERTS], choices=list(FORMS))
    several("--forms", (), help="default: all of a peer")
    options = processes.parse(parser, arguments)
    if len({peer in EXPERTS for peer in options.peers}) > 1:
        parser.error("--peers: experts have a section of their own; run them alone")
    if not cases_of(options):
        parser.error("there is no such case; layers on one GPU need --ranks 1")
    return options


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Lists the cases, small ones first, so that a short run sees most."""
    cases = [
        Case(
            Config(peer, n_ranks, shape, dtype, max_tokens_for(n, peer)),
            form,
            n,
            routing,
        )
        for n_ranks in options.ranks
        for shape in options.shapes
        for dtype in options.dtypes
        for peer in options.peers
        if _can_run(peer, n_ranks, dtype)
        for n in sorted(options.tokens)
        for form in FORMS[peer]
        if not options.forms or form in options.forms
        for routing in options.routings
    ]
    return sorted(cases, key=lambda case: case.config.max_tokens)


def _can_run(peer: str, n_ranks: int, dtype: str) -> bool:
    """MAX's EP needs two ranks, layers of experts have one, for which NCCL has nothing
    to do."""
    if peer in _BFLOAT16_ONLY and dtype != "bfloat16":
        return False
    if (peer, dtype) == ("given", "bfloat16") or (peer == "packed" and dtype != "fp8"):
        return False  # there are no scales, or none that can be packed
    if peer == "max" and dtype not in ("bfloat16", "fp8"):
        return False  # its other formats are not for Hopper
    if peer in _ON_ONE:
        return n_ranks == 1
    return n_ranks > 1 or peer not in ("max", "nccl", "all_gather")


if __name__ == "__main__":
    main()
