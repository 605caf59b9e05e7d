# SPDX-License-Identifier: Apache-2.0
"""``sanitize.sh`` fails unless a checker ran and found nothing.

The checker here is a stand-in that runs its target and says what it is given.
"""

import sys

from tests.children import ROOT, ran
from tests.errors import refused

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
    # Plugins that are installed take longer than the test.
    given |= dict(SUMMARY=CLEAN, SKIP_TARGET="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    given |= variables
    return ran(ROOT / "tests/gpu/sanitize.sh", check, target, timeout=60, **given)


@refused("""
"memcheck" | --tool=memcheck; pool 0; nothing found; 1 passed
"racecheck", SUMMARY=CLEAN_RACES | --tool=racecheck; pool on; nothing found; 1 passed
"poison", test=SHOWS_MODE | poison-all
"control", SKIP_TARGET="1", SUMMARY=CLEAN.replace("0", "1") | synccheck finds
""")
def test_what_passes(tmp_path, arguments, words):
    done = eval(f"sanitize(tmp_path, {arguments})", globals(), dict(tmp_path=tmp_path))
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words.split("; ")), done.stdout


@refused("""
"memcheck", SUMMARY="ERROR SUMMARY: 2 errors" | findings
"racecheck", SUMMARY=CLEAN_RACES.replace("0 w", "1 w") | findings
"memcheck", SUMMARY="" | has not said
"memcheck", STATUS="99" | ended with 99
"memcheck", test="assert False", STATUS="0" | did not pass: 1 failed
"memcheck", test="import os; os._exit(0)" | come to their end
"memcheck", SKIP_TARGET="1" | come to their end
"control", SKIP_TARGET="1" | memcheck did not find the overrun
""")
def test_what_fails(tmp_path, arguments, words):
    done = eval(f"sanitize(tmp_path, {arguments})", globals(), dict(tmp_path=tmp_path))
    assert done.returncode == 1
    assert words in done.stderr
