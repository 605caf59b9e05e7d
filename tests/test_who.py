# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom: from words of memory that are written here, without ranks.

`test_processes.py` looks at processes that hang.
"""

import numpy as np
import pytest

from max_ep.cli import main
from max_ep.who import PHASES, Facts, RankWait, Waits, cpu_wait

# 3 ranks with 2, 2 and 1 experts; counts of dispatch, then of combine.
N_RANKS, N_EXPERTS, N_LOCAL = 3, 5, 2
N_PAIRS = N_LOCAL * N_RANKS
FACTS = Facts(N_RANKS, N_EXPERTS, N_LOCAL, 1, 256, 512, 1024, 256, 3, 28)
LAST = 6
"""The last generation of every phase."""


def memory_of() -> np.ndarray:
    """A region in which the flags of all phases are of generation `LAST`."""
    region = np.zeros(FACTS.region_bytes, np.uint8)
    region[FACTS.dispatch_counts_offset :].view(np.uint64)[:] = LAST << 32 | 17
    return region


def look(rank: int, phase: str, changed: dict[tuple[str, int], int]) -> RankWait:
    """Looks at a rank that is in a phase; some flags are of other generations."""
    region = memory_of()
    flags = {
        "dispatch": region[FACTS.dispatch_counts_offset :].view(np.uint64),
        "combine": region[FACTS.combine_counts_offset :].view(np.uint64),
    }
    for (buffer, place), generation in changed.items():
        flags[buffer][place] = generation << 32
    header = np.zeros(32, np.int32)
    header[FACTS.generations_word :][:4] = LAST
    header[FACTS.launch_word] = 1 + PHASES.index(phase)
    header[FACTS.launch_word + 2 :][:2].view(np.int64)[0] = 10**9
    return cpu_wait(FACTS, rank, header, region, now_ns=4 * 10**9)


def arrived(buffer: str, places: range, but: int = -1) -> dict[tuple[str, int], int]:
    return {(buffer, i): LAST + 1 for i in places if i != but}


@pytest.mark.parametrize(
    "phase, rank, changed, missing",
    [
        # Done words follow the counts: of the pairs, of the experts.
        ("dispatch_async", 0, {("dispatch", N_PAIRS + 1): LAST - 1}, [1]),
        ("dispatch_async", 0, {}, []),
        ("dispatch_wait", 0, {}, [0, 1, 2]),
        ("dispatch_wait", 0, arrived("dispatch", range(N_PAIRS), but=5), [2]),
        # Rank 2 has one expert, and awaits nothing of the second.
        ("dispatch_wait", 2, arrived("dispatch", range(N_RANKS)), []),
        ("combine_async", 1, {("combine", N_EXPERTS + 2): LAST - 1}, [2]),
        ("combine_wait", 1, arrived("combine", range(N_EXPERTS), but=3), [1]),
        ("combine_wait", 1, arrived("combine", range(4)), [2]),
    ],
)
def test_missing_ranks(phase, rank, changed, missing):
    wait = look(rank, phase, changed)
    assert (wait.phase, wait.generation, wait.missing) == (phase, LAST + 1, missing)
    assert wait.is_running and wait.since_s == 3


def waits_of(*missing: list[int]) -> Waits:
    return Waits(
        "g", [RankWait(i, PHASES[1], 4, True, 1.0, m) for i, m in enumerate(missing)]
    )


@pytest.mark.parametrize(
    "missing, culprits, said",
    [
        ([[], [], []], [], "No rank waits for another."),
        # 0 waits for 1, which waits for 2: both are late because of 2.
        ([[1], [2], []], [2], "Rank 2 keeps others waiting: it is in dispatch_wait 4"),
        (
            [[2, 3], [2, 3], [], []],
            [2, 3],
            "Rank 2 keeps others waiting (and 3 too)",
        ),
        ([[1], [0], [0, 1]], [], "Ranks 0-2 wait for each other"),
    ],
)
def test_culprit(missing, culprits, said):
    waits = waits_of(*missing)
    assert waits.culprits() == culprits
    assert waits.sentence().startswith(said)


def test_who_without_a_group(capsys):
    assert main(["who", "no-such-group"]) == 1
    assert "no group of CPU processes no-such-group found" in capsys.readouterr().err
