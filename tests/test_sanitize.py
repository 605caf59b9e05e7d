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
    "check, summary, pool",
    [
        ("memcheck", CLEAN, "0"),
        ("racecheck", CLEAN_RACES, "on"),
    ],
)
def test_nothing_found(tmp_path, check, summary, pool):
    done = sanitize(tmp_path, check, SUMMARY=summary)
    assert done.returncode == 0, done.stderr
    for words in (f"option --tool={check}", f"pool {pool}", "nothing found; 1 passed"):
        assert words in done.stdout


@pytest.mark.parametrize(
    "what, variables",
    [
        ("findings", dict(SUMMARY="ERROR SUMMARY: 2 errors")),
        (
            "findings",
            dict(SUMMARY="RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"),
        ),
        ("has not said", dict(SUMMARY="")),
        ("ended with 99", dict(STATUS="99")),
        ("did not pass: 1 failed", dict(test="assert False", STATUS="0")),
        ("come to their end", dict(test="import os; os._exit(0)")),
        ("come to their end", dict(SKIP_TARGET="1")),
    ],
)
def test_what_fails(tmp_path, what, variables):
    done = sanitize(tmp_path, "memcheck", **variables)
    assert done.returncode == 1
    assert what in done.stderr


def test_max_guards(tmp_path):
    ours = "import os; print(os.environ['MODULAR_DEBUG_DEVICE_ALLOCATOR'])"
    done = sanitize(tmp_path, "poison", test=ours)
    assert done.returncode == 0 and "poison-all" in done.stdout
    done = sanitize(tmp_path, "redzone", test=ours)
    assert done.returncode == 0 and "out-of-bounds" in done.stdout
    said = "print('MemoryManager detected a device buffer overflow after')"
    done = sanitize(tmp_path, "redzone", test=said)
    assert done.returncode == 1 and "a write outside" in done.stderr


def test_control_wants_the_planted_errors_found(tmp_path):
    done = sanitize(tmp_path, "control", SKIP_TARGET="1")
    assert done.returncode == 1
    assert "memcheck did not find the overrun" in done.stderr
    done = sanitize(
        tmp_path, "control", SKIP_TARGET="1", SUMMARY=CLEAN.replace("0", "1")
    )
    assert done.returncode == 0 and "synccheck finds" in done.stdout
