# SPDX-License-Identifier: Apache-2.0
"""The command ``max-ep``: demo, plan, bench, stats, balance, build, serve, who,
doctor."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from ..install import OF_MODULES
from ..limits import COMBINE_MODES, OUTPUT_LAYOUTS, PROTOCOLS
from .network import Links

_UNSET = argparse.SUPPRESS


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``max-ep`` with these words, or the process's; returns the exit status."""
    # Either may be closed. A name in a file may have bytes that are no text.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("max-ep: interrupted", file=sys.stderr)
        return 130  # as a shell reports it
    except BrokenPipeError:  # the reader is gone, as with `| head`
        _close(sys.stdout)
        return 141  # as of a program that SIGPIPE ended
    except OSError as error:  # of the flush
        _close(sys.stdout)
        try:
            print(f"max-ep: {_in_words(error)}", file=sys.stderr, flush=True)
        except OSError:  # the same disk is full
            _close(sys.stderr)
        return 1


def _in_words(error: Exception) -> str:
    """Returns the text of an error, and what helps if that does not say it."""
    if isinstance(error, ModuleNotFoundError):
        needed = (error.name or "").partition(".")[0]
        return f"{error}; {OF_MODULES.get(needed, 'see max-ep doctor')}"
    if isinstance(error, OSError) and error.strerror:
        if error.filename is not None:
            return f"{error.filename}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"{error.strerror}; is the disk of the output, or /dev/shm, full?"
    return str(error)


def _close(stream: Any) -> None:
    """Sends nowhere what Python writes once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="max-ep", description="Expert parallelism for Mixture-of-Experts models."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, help: str) -> argparse.ArgumentParser:
        """Adds a command that ``run_NAME`` of the module NAME runs."""
        return commands.add_parser(name, help=help)

    command("demo", "run MoE layers on four CPU ranks, and check the result")
    plan = command("plan", "show the protocol, and the bytes of each buffer")
    about = "compile the kernels of max_ep.torch ahead, for any GPU"
    build = command("build", about)
    # Each `dest` of a plan is a field of EPConfig.
    for option, dest, text in (
        ("--ranks", "n_gpus_per_node", "ranks of the group"),
        ("--experts", "n_experts", "experts of the group"),
        ("--top-k", "top_k", "experts of a token"),
        ("--hidden", "hidden_size", "elements of a token"),
        ("--tokens", "max_tokens_per_rank", "most tokens a rank sends at a time"),
    ):
        size = dict(metavar="N", type=int, required=True, help=text)
        plan.add_argument(option, dest=dest, **size)
        build.add_argument(option, **size)
    plan.add_argument(
        "--dispatch",
        dest="dispatch_dtype",
        metavar="FORMAT",
        default="bfloat16",
        help="format to the experts, such as bfloat16, fp8 or mxfp8: the names of "
        "docs/formats.md (default: %(default)s)",
    )
    plain = ("bfloat16", "float32")
    for option, dest, choices, text in (
        ("--combine", "combine_dtype", plain, "format on the way back"),
        ("--layout", "output_layout", OUTPUT_LAYOUTS, "layout of dispatched rows"),
        ("--protocol", "protocol", ("auto", *PROTOCOLS), "how tokens are addressed"),
        ("--combine-mode", "combine_mode", COMBINE_MODES, "what combine sends"),
    ):
        text += " (default: %(default)s)"
        plan.add_argument(
            option, dest=dest, choices=choices, default=choices[0], help=text
        )
    about = "format of a partial sum (default: that of --combine)"
    formats = (*plain, "fp8", "mxfp8")
    plan.add_argument("--partial", dest="partial_dtype", choices=formats, help=about)
    about = "with a fused shared expert (EPConfig.fused_shared_expert)"
    dest = "fused_shared_expert"
    plan.add_argument("--shared-expert", dest=dest, action="store_true", help=about)
    about = "hosts that the ranks are on (default: %(default)s)"
    plan.add_argument(
        "--hosts", dest="n_nodes", metavar="N", type=int, default=1, help=about
    )
    for option, dest, metavar, text in (
        ("--network", "network_gb_s", "GB/S", "bandwidth of a rank between hosts"),
        ("--latency", "latency_us", "US", "time of one token between hosts"),
    ):
        text += f" (default: {getattr(Links, dest):g})"
        plan.add_argument(option, dest=dest, metavar=metavar, type=float, help=text)
    about = "time dispatch and combine on these GPUs, beside other systems"
    bench = command("bench", about)
    for option, more in (
        ("--gpus", dict(type=int, help="default: 1, 2, 4 or 8; 0: CPU ranks")),
        ("--systems", dict(nargs="+", metavar="NAME", help="default: what is there")),
        ("--tokens", dict(nargs="+", metavar="N", type=int, help="tokens of a rank")),
        ("--shape", dict(help="hidden, experts, top-k, such as h7168_e256_k8")),
        ("--routing", dict(default="uniform", choices=("uniform", "zipf"))),
        ("--layers", dict(metavar="N", type=int, help="layers of a graph")),
        ("--time-limit", dict(metavar="S", type=float, default=600, help="seconds")),
        ("--out", dict(default="max_ep_bench.json", help="a file; a plot beside it")),
    ):
        if "default" in more:
            more["help"] = f"{more.get('help', '')} (default: %(default)s)".strip()
        bench.add_argument(option, **more)
    about = "show waits for each peer, and rows of each expert"
    stats = command("stats", about)
    stats.add_argument("file", help="what max_ep.stats.Statistics.save wrote")
    stats.add_argument("--plot", help="also draw it, to this file (needs matplotlib)")
    about = "place replicas of hot experts, from what max-ep stats reads"
    balance = command("balance", about)
    balance.add_argument("files", nargs="+", help="one for each MoE layer, in order")
    wanted = balance.add_mutually_exclusive_group()
    about = "experts to add (default: an eighth)"
    wanted.add_argument("--replicas", type=int, help=about)
    about = "the placement that was measured, written by --out"
    wanted.add_argument("--current", help=about)
    for option, default, text in (
        ("--top-k", 8, "experts of a token"),
        ("--hosts", 1, "hosts of the ranks"),
        ("--max-replicas", 0, "EPConfig.max_replicas; 0: as many as ranks"),
    ):
        text += " (default: %(default)s)"
        balance.add_argument(option, type=int, default=default, help=text)
    balance.add_argument("--plot", help="also draw it, to this file (needs matplotlib)")
    balance.add_argument("--out", help="an .npz for the placement")
    about = "cpu, or an architecture such as sm_90a"
    name = dict(dest="target", metavar="TARGET", required=True)
    build.add_argument("--torch", help=about, **name)
    about = "low-latency or normal calls of Buffer, or elastic: those of ElasticBuffer "
    about += "(default: %(default)s)"
    how = dict(metavar="CALLS", default="low-latency", help=about)
    build.add_argument("--dispatch", **how)
    # What is not given has the default of `max_ep/torch/calls.py`.
    also = build.add_argument_group("arguments of these calls", argument_default=_UNSET)
    about = (
        "what tokens are quantized to, or given as: bfloat16 (default), fp8, mxfp8, "
        "nvfp4 or mxfp4; normal: also the dtype of x, such as float32"
    )
    also.add_argument("--format", help=about)
    also.add_argument("--hosts", metavar="N", type=int, help="hosts of the ranks")
    about = "low-latency: tokens are given as values and scales"
    also.add_argument("--pair", action="store_true", help=about)
    for option in ("--round-scale", "--use-ue8m0", "--enable-shrink"):
        also.add_argument(option, action="store_true", help="low-latency")
    modes = dict(choices=["rows", "sums"], help="low-latency")
    also.add_argument("--combine-mode", **modes)
    also.add_argument("--do-expand", action="store_true", help="elastic")
    number = dict(metavar="N", type=int)
    also.add_argument("--expert-alignment", **number, help="elastic, with --do-expand")
    yes_or_no = dict(action=argparse.BooleanOptionalAction, help="elastic")
    also.add_argument("--allow-multiple-reduction", **yes_or_no)
    also.add_argument("--allow-hybrid-mode", **yes_or_no)
    also.add_argument("--num-nvl-bytes", **number, help="normal")
    about = "elastic, normal: scales of a token, of 4 bytes each, if they are not as "
    about += "many as the format has"
    also.add_argument("--scales", **number, help=about)
    build.set_defaults(only_of_build=[x.dest for x in also._group_actions])
    about = "serve a model with MAX; other flags go to max serve"
    serve = command("serve", about)
    serve.add_argument("model", help="a folder, or a repository of Hugging Face")
    serve.add_argument("--gpus", type=int, help="default: all; 0: the CPU")
    about = "ranks on the CPU (default: the most, up to 4, that divide the experts)"
    serve.add_argument("--ranks", type=int, help=about)
    about = "only print, also for GPUs that are not there"
    serve.add_argument("--dry-run", action="store_true", help=about)
    about = "move experts while they are served, so that ranks get as many rows"
    serve.add_argument("--balance", action="store_true", help=about)
    who = command("who", "show which rank waits for which, in a hang")
    about = "a process of the group or the one that started it, or the group's name "
    about += "(default: all groups)"
    who.add_argument("target", metavar="PID|GROUP", nargs="?", help=about)
    command("doctor", "check this machine")
    names = {action.dest: action.option_strings[-1] for action in plan._actions}
    plan.set_defaults(names=names)
    options, options.flags = parser.parse_known_args(arguments)
    if options.flags and options.command != "serve":
        parser.error(f"unrecognized arguments: {' '.join(options.flags)}")
    try:
        # Imported late: no command waits for what only another one needs.
        module = importlib.import_module(f".{options.command}", __name__)
        return getattr(module, f"run_{options.command}")(options) or 0
    except BrokenPipeError:
        raise
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"max-ep {options.command}: {_in_words(error)}", file=sys.stderr)
        return 1
