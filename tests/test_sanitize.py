# SPDX-License-Identifier: Apache-2.0
"""``tests/sanitize.sh`` fails unless a checker ran and found nothing.

The checker here is a stand-in that runs its target and says what it is given.
"""

import sys

import pytest
from children import HERE, ran

STAND_IN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do echo "option $1"; shift; done
echo "pool ${MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE:-on}"
[ -n "$SKIP_TARGET" ] || "$@"
status=$?
[ -z "$SUMMARY" ] || echo "========= $SUMMARY"
exit ${STATUS:-$status}
"""
CLEAN = "ERROR SUMMARY: 0 errors"
CLEAN_RACES = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
SHOWS_MODE = "import os; print(os.environ['MODULAR_DEBUG_DEVICE_ALLOCATOR'])"


def sanitize(folder, check, test="pass", **variables):
    """Runs the script on one test whose body is given."""
    stand_in = folder / "compute-sanitizer"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    target = folder / "test_one.py"
    target.write_text(f"def test_one():\n    {test}\n")
    given = dict(PYTHON=sys.executable, COMPUTE_SANITIZER=str(stand_in))
    given |= dict(SUMMARY=CLEAN, SKIP_TARGET="") | variables
    return ran(HERE / "sanitize.sh", check, target, timeout=60, **given)


@pytest.mark.parametrize(
    "check, words, variables",
    [
        ("memcheck", "--tool=memcheck; pool 0; nothing found; 1 passed", {}),
        (
            "racecheck",
            "--tool=racecheck; pool on; nothing found; 1 passed",
            dict(SUMMARY=CLEAN_RACES),
        ),
        ("poison", "poison-all", dict(test=SHOWS_MODE)),
        ("redzone", "out-of-bounds", dict(test=SHOWS_MODE)),
        (
            "control",
            "synccheck finds",
            dict(SKIP_TARGET="1", SUMMARY=CLEAN.replace("0", "1")),
        ),
    ],
)
def test_what_passes(tmp_path, check, words, variables):
    done = sanitize(tmp_path, check, **variables)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words.split("; ")), done.stdout


@pytest.mark.parametrize(
    "check, what, variables",
    [
        ("memcheck", "findings", dict(SUMMARY="ERROR SUMMARY: 2 errors")),
        ("racecheck", "findings", dict(SUMMARY=CLEAN_RACES.replace("0 w", "1 w"))),
        ("memcheck", "has not said", dict(SUMMARY="")),
        ("memcheck", "ended with 99", dict(STATUS="99")),
        (
            "memcheck",
            "did not pass: 1 failed",
            dict(test="assert False", STATUS="0"),
        ),
        ("memcheck", "come to their end", dict(test="import os; os._exit(0)")),
        ("memcheck", "come to their end", dict(SKIP_TARGET="1")),
        (
            "redzone",
            "a write outside",
            dict(test="print('MemoryManager detected a device buffer overflow')"),
        ),
        ("control", "memcheck did not find the overrun", dict(SKIP_TARGET="1")),
    ],
)
def test_what_fails(tmp_path, check, what, variables):
    done = sanitize(tmp_path, check, **variables)
    assert done.returncode == 1
    assert what in done.stderr
