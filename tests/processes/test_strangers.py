# SPDX-License-Identifier: Apache-2.0
"""Two users of one machine: the second cannot end, stall, redirect or read a group."""

import os
import sys
import uuid

import pytest

from tests.children import WHERE_WE_IMPORT, names_of, printed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two users")
def test_another_user_does_nothing_to_a_group():
    """It squats names, answers and calls as a member would, calls without a pause, and
    looks into /proc. Without the kernel's word on who is there the group fails."""
    group = f"strangers-{uuid.uuid4().hex[:8]}"
    program = sys.executable, "-m", "tests.processes.strangers", group
    assert "the other user got nothing" in printed(*program, PYTHONPATH=WHERE_WE_IMPORT)
    assert names_of(group) == []
