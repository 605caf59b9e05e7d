# SPDX-License-Identifier: Apache-2.0
"""The Mojo side as a Mojo program sees it: launchers, and FP8 rounding."""

from pathlib import Path

from max_ep.extension import run_mojo

PROGRAMS = Path(__file__).resolve().parent / "mojo"


def run(name: str) -> str:
    return run_mojo("run", "-I", ".", str(PROGRAMS / name)).strip()


def test_launchers_with_input_scales() -> None:
    assert run("launchers.mojo") == "OK"


def test_output_layouts_at_their_edges() -> None:
    assert run("output_layouts.mojo") == "OK"


def test_fp8_rounding_agrees_with_mojo() -> None:
    assert int(run("fp8_rounding.mojo")) > 40_000_000
