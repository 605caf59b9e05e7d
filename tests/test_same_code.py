# SPDX-License-Identifier: Apache-2.0
"""The tool that compares machine code sees what is planted, and nothing else."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from children import HERE as TESTS
from children import ran

PROGRAM = """
from emitting import emit
from max.gpu import thread_idx
from std.atomic import Atomic, Ordering

comptime Words = Pointer[UInt32, MutUntrackedOrigin]

def {helper}(words: Words, n: UInt32):
    # ORDER: release, for the test.
    Atomic[UInt32].store[ordering=Ordering.{order}](words, n)

def constant_kernel(words: Words):
    words[unsafe_offset=Int(thread_idx.x)] = {constant}

def order_kernel(words: Words):
    {helper}(words, 5)

def argument_kernel(words: Words{argument}):
    words[unsafe_offset=Int(thread_idx.x)] = 7

def branch_kernel(words: Words):
    if words[] {compare} 3:
        words[] = 1

def main() raises:
    emit[constant_kernel]("constant")
    emit[order_kernel]("order")
    emit[argument_kernel]("argument")
    emit[branch_kernel]("{branch}")
"""
BASE = {
    "helper": "first",
    "order": "RELEASE",
    "constant": "3",
    "argument": "",
    "compare": "<",
    "branch": "branch",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def tree(folder: Path, **changes: str) -> Path:
    programs = folder / "tests" / "mojo"
    programs.mkdir(parents=True)
    (folder / "mojo").mkdir()
    shutil.copy(TESTS / "mojo" / "emitting.mojo", programs)
    text = PROGRAM
    for name, value in (BASE | changes).items():
        text = text.replace(f"{{{name}}}", value)
    (programs / "codegen_planted.mojo").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("changes", "options", "found"),
    [
        ({"helper": "another_name"}, [], {}),
        (
            {
                "order": "RELAXED",
                "constant": "4",
                "argument": ", unused: Int32",
                "compare": ">=",
                "branch": "renamed",
            },
            ["--rename", "(.*)branch=\\1renamed"],
            {
                "order": "different",
                "constant": "different",
                "argument": "arguments",
                "renamed": "different",
            },
        ),
    ],
)
def test_planted_changes(tmp_path, cache, changes, options, found):
    trees = tree(tmp_path / "base"), tree(tmp_path / "new", **changes)
    command = [sys.executable, TESTS / "same_code.py", *trees, "--cache", cache]
    done = ran(*command, *options)
    assert done.returncode == bool(found), done.stderr
    verdicts = re.findall(r"^(\S+) +codegen_planted/sm_90a\.(\w+)$", done.stdout, re.M)
    assert {name: verdict for verdict, name in verdicts} == found
