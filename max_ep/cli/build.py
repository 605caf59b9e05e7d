# SPDX-License-Identifier: Apache-2.0
"""``max-ep build``: compiles the libraries of ``max_ep.torch`` ahead."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from ..extension import run_mojo
from ..limits import MAX_COUNT, MAX_GPU_PAIRS, MAX_OF_ENTRY, MAX_RANKS, MAX_TOP_K
from ..torch.calls import NAMES, Call, ElasticCall, LowLatencyCall, NormalCall
from ..torch.library import build_all
from ..torch.normal_layout import MOST_TOKENS
from ..torch.quantized import FORMATS

_SHORT: dict[str, tuple[type[Call], dict[str, Any]]] = {
    "bfloat16": (LowLatencyCall, {}),
    "fp8": (LowLatencyCall, dict(format="fp8")),
    "fp8-round": (LowLatencyCall, dict(format="fp8", round_scale=True)),
    "fp8-ue8m0": (
        LowLatencyCall,
        dict(format="fp8", round_scale=True, use_ue8m0=True),
    ),
    "plain": (ElasticCall, {}),
    "expanded": (ElasticCall, dict(do_expand=True)),
    "expanded-128": (ElasticCall, dict(do_expand=True, expert_alignment=128)),
}
"""What else ``--dispatch`` may be: a kind of calls with some of its options."""


def call_of(options: Any) -> Call:
    """Returns the call that a command line describes; refuses one that cannot be."""
    named = {name: (kind, {}) for kind, name in NAMES.items()} | _SHORT
    if options.dispatch not in named:
        known = ", ".join(NAMES.values())
        raise ValueError(f"--dispatch {options.dispatch} must be one of {known}")
    kind, given = named[options.dispatch]
    names = {field.name for field in fields(kind)}
    for name in options.only_of_build:
        if name not in names and hasattr(options, name):
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is not for --dispatch {NAMES[kind]}")
    given = given | {n: getattr(options, n) for n in names if hasattr(options, n)}
    call = kind(**given)
    _check(call)
    return call


def _check(call: Call) -> None:
    """Raises for what no call takes: a compiler would say it in its own words."""
    # The compiler prints pages about an unknown name. Before sm_90 launches cannot
    # overlap.
    listed = re.findall(
        r"^ *(sm_(\d+)\w*)", run_mojo("build", "--print-supported-accelerators"), re.M
    )
    known = [name for name, number in listed if int(number) >= 90]
    if call.target not in ("cpu", *known):
        raise ValueError(f"--torch {call.target} must be cpu, {', '.join(known)}")
    is_normal, is_gpu = isinstance(call, NormalCall), call.target != "cpu"
    is_plain = is_normal or (isinstance(call, ElasticCall) and not call.do_expand)
    experts = call.experts
    for name, least, most in (
        ("ranks", 1, MAX_TOP_K if is_plain else MAX_RANKS),  # there, a token's choices
        ("experts", 1, MAX_GPU_PAIRS if is_gpu else MAX_OF_ENTRY),
        # Normal calls may have no `topk_idx`, and are the same for all experts.
        ("top_k", not is_normal, MAX_TOP_K if is_normal else min(MAX_TOP_K, experts)),
        ("hidden", 1, MAX_COUNT // 4),
        ("tokens", 1, MOST_TOKENS if is_normal else MAX_OF_ENTRY),
        ("hosts", 1, call.ranks),
        ("expert_alignment", 1, MAX_OF_ENTRY),
        ("scales", 0, MAX_OF_ENTRY),
    ):
        n, option = getattr(call, name, None), f"--{name.replace('_', '-')}"
        if n is not None and not least <= n <= most:
            raise ValueError(
                f"{option} {n} must be an integer from {least:d} to {most}"
            )
    if experts % call.ranks != 0:
        what = f"is no multiple of --ranks {call.ranks}"
        raise ValueError(f"--experts {experts} {what}")
    if call.ranks % call.hosts != 0:
        what = f"is no multiple of --hosts {call.hosts}"
        raise ValueError(f"--ranks {call.ranks} {what}")
    if not is_normal and call.format not in ("bfloat16", *FORMATS):
        names = ", ".join(["bfloat16", *FORMATS])
        raise ValueError(f"--format {call.format} must be one of {names}")
    if isinstance(call, LowLatencyCall):
        _check_low_latency(call)
    multiple = call.row_multiple()
    if call.hidden % multiple != 0:
        given = "--use-ue8m0" if multiple == 512 else f"--format {call.format}"
        wanted = f"must be a multiple of {multiple} with {given}"
        raise ValueError(f"--hidden {call.hidden} {wanted}")


def _check_low_latency(call: LowLatencyCall) -> None:
    is_fp8 = call.format == "fp8" and not call.pair
    if call.round_scale and not is_fp8:
        raise ValueError("--round-scale needs --format fp8, and no --pair")
    if call.use_ue8m0 and not call.round_scale:
        raise ValueError("--use-ue8m0 needs --round-scale")
    if call.pair and call.format == "bfloat16":
        raise ValueError(f"--pair needs --format, one of {', '.join(FORMATS)}")
    if call.enable_shrink and call.hosts > 1:
        raise ValueError("--enable-shrink masks no rank with --hosts above 1")
    if call.enable_shrink and call.combine_mode == "sums":
        raise ValueError("--enable-shrink masks no rank with --combine-mode sums")


def run_build(options: Any) -> None:
    """Builds the libraries that a first call needs; prints where they are."""
    wanted = dict.fromkeys(call_of(options).libraries())
    print(*build_all([*wanted]), sep="\n")
