# SPDX-License-Identifier: Apache-2.0
"""Sums up what racecheck has found: a line for each pair of instructions.

Takes what `tests/sanitize.sh racecheck` prints with `PRINT_LIMIT=0` and
`SANITIZER_ARGUMENTS=--racecheck-report=all`: a hazard for each byte and block.

    python tests/hazards.py LOG
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

_ACCESS = r".*(?:Read|Write) Thread \((\d+),0,0\) at (\S+)\+(0x\w+)\n"
_HAZARD = re.compile(
    r"(\w+) hazard detected at __shared__ (0x\w+) .*\n" + _ACCESS + _ACCESS
)


def summed_up(log: str) -> list[str]:
    """Says where hazards are, of which warps, and how many."""
    found = defaultdict(list)
    for hazard in _HAZARD.findall(log):
        kind, address, first, kernel, at, then, _, then_at = hazard
        pair = kernel, kind, at, then_at
        found[pair].append((int(address, 16), int(first) // 32, int(then) // 32))
    n = sum(map(len, found.values()))
    assert n == log.count(" hazard detected at "), "a hazard was not understood"
    lines = [f"{n} hazards"]
    for (kernel, kind, at, then_at), hazards in sorted(found.items()):
        addresses, first, then = (sorted(set(x)) for x in zip(*hazards))
        lines.append(
            f"{kernel} {kind} {addresses[0]:#x}..{addresses[-1]:#x}: "
            f"{at} of warps {first}, {then_at} of warps {then}: {len(hazards)}"
        )
    return lines


if __name__ == "__main__":
    print(*summed_up(Path(sys.argv[1]).read_text(errors="replace")), sep="\n")
