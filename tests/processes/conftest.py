# SPDX-License-Identifier: Apache-2.0
"""Names of groups, and bare Python processes that are their members."""

import contextlib
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.children import names_of
from tests.processes.memories import HANG, PRELUDE, hear


@pytest.fixture
def group() -> Iterator[str]:
    """A name; nothing of that name may be left when a test is done."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    assert names_of(name) == []


@pytest.fixture
def start(group: str) -> Iterator[Callable[[str], subprocess.Popen]]:
    """Starts a process that runs some code; it prints lines, and reads lines."""
    with contextlib.ExitStack() as stack:

        def start_peer(code: str) -> subprocess.Popen:
            code = PRELUDE + textwrap.dedent(code)
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            peer = subprocess.Popen([sys.executable, "-c", code, group], **pipes)
            stack.enter_context(peer)
            stack.callback(peer.kill)
            return peer

        yield start_peer


@pytest.fixture
def hung(start) -> subprocess.Popen:
    """Node 1, which is there, and answers once it has read a line."""
    peer = start(HANG)
    assert hear(peer) == "there"
    return peer
