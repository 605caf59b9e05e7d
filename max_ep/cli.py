# SPDX-License-Identifier: Apache-2.0
"""The command ``max-ep``: demo, plan, stats, doctor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Words behind ``max-ep``; None: those of the process.

    Returns:
        The exit status: 0 if all is well.
    """
    parser = argparse.ArgumentParser(
        prog="max-ep", description="Expert parallelism for MAX graphs."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="run a text through MoE layers on four CPU ranks")
    plan = commands.add_parser(
        "plan", help="show which protocol is taken, and what each buffer takes"
    )
    plan.add_argument("--ranks", type=int, required=True, help="ranks of the group")
    plan.add_argument("--experts", type=int, required=True, help="experts of the group")
    plan.add_argument("--top-k", type=int, required=True, help="experts of a token")
    plan.add_argument("--hidden", type=int, required=True, help="elements of a token")
    plan.add_argument(
        "--tokens", type=int, required=True, help="most tokens a rank sends at a time"
    )
    plan.add_argument(
        "--dispatch",
        choices=("bfloat16", "float32", "fp8"),
        default="bfloat16",
        help="format on the way to the experts (default: %(default)s)",
    )
    plan.add_argument(
        "--combine",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="format on the way back (default: %(default)s)",
    )
    plan.add_argument(
        "--layout",
        choices=("packed", "padded"),
        default="packed",
        help="how dispatched rows stand (default: %(default)s)",
    )
    plan.add_argument(
        "--protocol",
        choices=("auto", "by_rank", "by_expert"),
        default="auto",
        help="wire protocol (default: %(default)s)",
    )
    plan.add_argument(
        "--combine-mode",
        choices=("rows", "sums"),
        default="rows",
        help="whether combine sends rows or partial sums (default: %(default)s)",
    )
    plan.add_argument(
        "--partial",
        choices=("bfloat16", "float32"),
        help="format of a partial sum (default: that of --combine)",
    )
    plan.add_argument(
        "--shared-expert",
        action="store_true",
        help="with a fused shared expert (EPConfig.fused_shared_expert)",
    )
    stats = commands.add_parser(
        "stats", help="show who waited for whom, and which experts got how much"
    )
    stats.add_argument("file", help="what max_ep.stats.Statistics.save wrote")
    stats.add_argument("--plot", help="also draw it, to this file (needs matplotlib)")
    commands.add_parser("doctor", help="check this machine")
    options = parser.parse_args(arguments)

    # Imported late: no command waits for what only another one needs.
    if options.command == "demo":
        from .demo import run_demo

        return run_demo()
    if options.command == "plan":
        from .plan import run_plan

        return run_plan(options)
    if options.command == "stats":
        from .stats import run_stats

        return run_stats(options)
    from .doctor import run_doctor

    return run_doctor()


if __name__ == "__main__":
    sys.exit(main())
