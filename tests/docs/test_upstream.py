# SPDX-License-Identifier: Apache-2.0
"""Faults and gaps of MAX and Mojo that we work around: docs/upstream.md has the list.

Each block of that page shows that its fault is still there. If one fails with a new
MAX, the workaround may go.
"""

import re
import signal
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from tests.children import ROOT, WHERE_WE_IMPORT, ran, slow
from max.graph import KernelLibrary

from max_ep import extension_path, softmax_top_k
from max_ep.extension import run_mojo

PAGE = (ROOT / "docs" / "upstream.md").read_text()
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n### ")[1:]}
_PROGRAMS = {
    title: re.search(r"^```\w+\n(.*?)^```", text, re.M | re.S)
    for title, text in SECTIONS.items()
}
SHOWN = {title: found[1] for title, found in _PROGRAMS.items() if found}
"""The program of each section."""

IN_PROCESS = {
    "The first import of several processes": [],
    "A kernel library is shared by later graphs": [],
    "Ops of a subgraph": [],
    "Grouped matmul": [slow],
    "Float8": [],
    "A collective asks for a GPU": [],
    "Parts of NVSHMEM": [],
    "The gate renormalizes": [],
    "Two files with one tensor": [],
    "A token that the model does not have": [slow],
    "The memory plan has no experts": [],
    "Fields of the configuration are ignored": [],
    "The gate is bfloat16": [],
    "MiniMax-M2 wants quantized weights": [],
    "Sparse attention": [],
}
IN_MOJO = {
    "Casts to float8": [slow],
    "Matmul writes behind its result": [pytest.mark.gpu(1)],
    "PTX 8.5": [slow],
}
FORK, MATMUL = "A fork of a process that has used MAX", "Matmul"
ON_HOPPER, CUT = "Grouped matmul in bfloat16", "A file that is cut"
IN_A_CHILD = dict.fromkeys((FORK, ON_HOPPER, MATMUL), [slow]) | {CUT: []}


def programs(names: dict[str, list]) -> list:
    return [pytest.param(name, marks=marks, id=name) for name, marks in names.items()]


def pipeline_config() -> MagicMock:
    """What MAX reads a model's configuration with: float32 on the CPU."""
    model = MagicMock(quantization_encoding="float32", device_specs=[])
    model.kv_cache.kv_cache_format = None
    return MagicMock(model=model)


@pytest.mark.parametrize("name", programs(IN_PROCESS))
def test_is_still_there(name, session, monkeypatch, tmp_path):
    """Names that a program does not make are these."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    importer = sys.modules["mojo.importer"]
    monkeypatch.setattr(importer, "_compile_mojo_to_so", importer._compile_mojo_to_so)
    # A library that a program has changed would be that of later tests.
    monkeypatch.setattr(KernelLibrary, "_analysis_cache", {})
    given = dict(
        Path=Path,
        extension_path=extension_path,
        monkeypatch=monkeypatch,
        pipeline_config=pipeline_config(),
        pytest=pytest,
        session=session,
        softmax_top_k=softmax_top_k,
        sys=sys,
    )
    exec(compile(SHOWN[name], name, "exec"), given)


@pytest.mark.parametrize("name", programs(IN_MOJO))
def test_is_still_there_in_mojo(name, tmp_path):
    (tmp_path / "shown.mojo").write_text(SHOWN[name])
    shown = run_mojo("run", str(tmp_path / "shown.mojo"))
    if name == "PTX 8.5":  # NVSHMEM's functions for sm_90 want 8.6
        assert re.findall(r"^\.version (.*)$", shown, re.M) == ["8.5"]
    elif name == "Casts to float8":  # more than 32 instructions for each of 16 elements
        assert len(re.findall(r"^\t[a-z]", shown, re.M)) > 16 * 32
    else:  # the last row, the row behind it, and rows of the next tiles
        assert [float(x) for x in shown.split()] == [2048, 0, 0, 1]


BEFORE = {
    CUT: "from pathlib import Path\n",
    FORK: """
import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

session, x = InferenceSession(devices=[CPU()]), np.ones(4, np.float32)
types = [TensorType(DType.float32, ["n"], DeviceRef.CPU())]
graph = Graph("double", lambda x: x + x, types)
""",
    ON_HOPPER: """
import os
import pytest
from max.driver import (
    CPU, Accelerator, set_virtual_device_api, set_virtual_device_count,
    set_virtual_device_target_arch,
)
set_virtual_device_api("cuda")
set_virtual_device_target_arch("sm_90a")
set_virtual_device_count(1)
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from max.nn.kernels import grouped_matmul_ragged

session = InferenceSession(devices=[CPU(), Accelerator()])
""",
    MATMUL: """
from max.driver import CPU
from max.engine import InferenceSession

session = InferenceSession(devices=[CPU()])
""",
}
"""What stands before a program that has a process of its own."""

AFTER = """
import os
print("shown", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("name", programs(IN_A_CHILD))
def test_is_still_there_in_a_process(name, tmp_path):
    code = BEFORE[name] + SHOWN[name] + AFTER
    # A cache of its own: what is compiled already costs nothing.
    how = dict(PYTHONPATH=WHERE_WE_IMPORT, MODULAR_CACHE_DIR=str(tmp_path))
    done = ran(sys.executable, "-c", code, cwd=tmp_path, **how)
    if name in (CUT, MATMUL):
        ends = {CUT: {signal.SIGSEGV, signal.SIGBUS}, MATMUL: {signal.SIGXCPU}}
        assert -done.returncode in ends[name], done.stderr
    else:
        assert "shown" in done.stdout, done.stderr


def test_each_section_has_a_program_a_place_and_a_workaround():
    places = {"in CI": {}, "in `make test-all`": {}, "on a GPU": {}}
    for title, marks in (IN_PROCESS | IN_MOJO | IN_A_CHILD).items():
        place = "on a GPU" if marks and marks != [slow] else "in CI"
        places["in `make test-all`" if marks == [slow] else place][title] = None
    assert SHOWN.keys() == {title for of in places.values() for title in of}
    for place, titles in places.items():
        assert all(f"Run {place}." in SECTIONS[title] for title in titles), place
    for title, text in SECTIONS.items():
        assert "Workaround: " in text, title
        assert re.search(r"`(max_ep|mojo|tests)/[\w/.]+`", text), title
