# SPDX-License-Identifier: Apache-2.0
"""The tool that compares machine code sees what is planted, and nothing else."""

import re
import shutil
import sys

from tests.children import MOJO_PROGRAMS, ran, slow
from tests.codegen import same_code

PROGRAM = """
from emitting import emit
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from std.atomic import Atomic, Ordering
from std.utils import StaticTuple

comptime Words = Pointer[UInt32, MutUntrackedOrigin]

def {helper}[order: Ordering](words: Words, n: UInt32):
    # ORDER: as given, for the test.
    Atomic[UInt32].store[ordering=order](words, n)

def constant_kernel(words: Words):
    words[unsafe_offset=Int(thread_idx.x)] = {constant}

def kept_kernel(words: Words):
    {helper}[Ordering.RELEASE](words, 5)

def order_kernel(words: Words):
    {helper}[Ordering.{order}](words, 5)

def argument_kernel(words: Words{argument}):
    words[unsafe_offset=Int(thread_idx.x)] = 7

@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32({bound}))
)
def bound_kernel(words: Words):
    words[unsafe_offset=Int(thread_idx.x)] = 7

def branch_kernel(words: Words):
    if words[] {compare} 3:
        words[] = 1

def main() raises:
    emit[constant_kernel]("constant")
    emit[kept_kernel]("kept")
    emit[order_kernel]("order")
    emit[argument_kernel]("argument")
    emit[bound_kernel]("bound")
    emit[branch_kernel]("{branch}")
"""
# What is planted: in the base, and after it.
PLANTED = {
    "helper": ("first", "another_name"),
    "order": ("RELEASE", "RELAXED"),
    "constant": ("3", "4"),
    "argument": ("", ", unused: Int32"),
    "bound": ("512", "480"),
    "compare": ("<", ">="),
    "branch": ("branch", "renamed"),
}
FOUND = dict.fromkeys(
    ("order", "constant", "argument", "bound", "renamed"), "different"
)


@slow
def test_planted_changes(tmp_path):
    for i, name in enumerate(("base", "new")):
        programs = tmp_path / name / "tests" / "mojo"
        programs.mkdir(parents=True)
        (tmp_path / name / "mojo").mkdir()
        shutil.copy(MOJO_PROGRAMS / "emitting.mojo", programs)
        text = PROGRAM
        for what, values in PLANTED.items():
            text = text.replace(f"{{{what}}}", values[i])
        (programs / "codegen_planted.mojo").write_text(text)
    command = [sys.executable, same_code.__file__, tmp_path / "base"]
    command += [tmp_path / "new", "--cache", tmp_path / "cache"]
    done = ran(*command, "--rename", "(.*)branch=\\1renamed")
    assert done.returncode == 1, done.stderr
    verdicts = re.findall(r"^(\S+) +codegen_planted/sm_90a\.(\w+)$", done.stdout, re.M)
    assert {name: verdict for verdict, name in verdicts} == FOUND
    done = ran(*command[:2], tmp_path / "new", *command[3:])
    assert done.returncode == 0, done.stdout
