# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes and times of several hosts, against draws and published times."""

import numpy as np
import pytest

from max_ep.cli.network import Layer, Links, ways

FP8_BYTES = 7168 + 56 * 4 + 16
BFLOAT16_BYTES = 14336 + 16


@pytest.mark.parametrize("n_hosts, top_k", [(2, 8), (4, 2), (8, 6)])
def test_copies_of_a_token_are_those_that_are_drawn(n_hosts, top_k):
    """A wrong count of ranks or hosts of a token fails."""
    n_local, n_experts, n_tokens = 4, 64, 4000
    n_ranks = n_hosts * n_local
    layer = Layer(n_hosts, n_ranks, n_experts, top_k, n_tokens, 1, 1)
    rng = np.random.default_rng(5)
    ids = rng.random((n_tokens, n_experts)).argpartition(top_k)[:, :top_k]
    me = rng.integers(n_ranks, size=n_tokens)
    my_host = me // n_local
    has_rank, has_host = np.zeros((2, n_tokens, n_ranks), bool)
    np.put_along_axis(has_rank, ids // (n_experts // n_ranks), True, 1)
    has_host = has_rank.reshape(n_tokens, n_hosts, n_local).any(2)
    is_mine = np.arange(n_hosts) == my_host[:, None]
    is_here = np.repeat(is_mine, n_local, axis=1)
    is_me = np.arange(n_ranks) == me[:, None]
    is_rail = np.arange(n_ranks) % n_local == (me % n_local)[:, None]
    of_choices = ids // (n_experts // n_ranks)
    at_home = of_choices // n_local == my_host[:, None]
    drawn = {
        "by expert": (~at_home, at_home & (of_choices != me[:, None])),
        "by rank": (has_rank & ~is_here, has_rank & is_here & ~is_me),
        "by host": (has_host & ~is_mine, has_rank & ~is_rail),
    }
    for way in ways(layer):
        across, inside = (copies.sum() / n_tokens for copies in drawn[way.name])
        assert way.across == pytest.approx(across, rel=0.05), way.name
        assert way.inside == pytest.approx(inside, rel=0.05), way.name


PUBLISHED_US = {
    2: (118, 195),
    4: (155, 273),
    8: (173, 314),
    16: (192, 369),
    32: (194, 360),
}
"""Dispatch in FP8 and combine in bfloat16 of DeepEP's low-latency kernels, 128 tokens a
rank, hosts of eight H800s with a ConnectX-7 each: the table of its first README."""


@pytest.mark.parametrize("n_hosts", PUBLISHED_US)
def test_published_times_are_predicted(n_hosts):
    """With two numbers for ten times: 45 GB/s and 30 µs. docs/several_hosts.md states
    the error."""
    layer = Layer(n_hosts, 8 * n_hosts, 256, 8, 128, FP8_BYTES, BFLOAT16_BYTES)
    by_expert, *_ = ways(layer)
    predicted = by_expert.times_us(layer, Links(45.0, 30.0))
    assert predicted == pytest.approx(PUBLISHED_US[n_hosts], rel=0.09)


SIZES = "--ranks 16 --experts 256 --top-k 8 --hidden 7168 --tokens 128 --dispatch fp8"


def test_plan_of_hosts(run_cli):
    """The command prints the numbers of the model, and which fields choose a way."""
    command = ["plan", *SIZES.split(), "--hosts", "2", "--network", "45"]
    said = run_cli(*command)
    assert "hierarchical=True is by host" in said
    rows = {row[:9]: row.split()[2:] for row in said.splitlines()}
    assert rows["by expert"] == ["3.79", "7.35", "114", "193"]
    assert rows["by rank  "] == ["3.09", "5.99", "99", "163"]
    assert rows["by host  "] == ["0.94", "1.83", "55", "75"]


@pytest.mark.parametrize(
    "words, error",
    [
        ("--hosts 3", "--ranks 16 with --hosts 3: each host has the same number"),
        ("--hosts 2 --network 0", "--network 0: pass a number above 0"),
        ("--network 45", "--network 45 is of several hosts: pass --hosts"),
        ("--latency 5", "--latency 5 is of several hosts: pass --hosts"),
        ("--hosts 2 --latency nan", "--latency nan: pass a number above 0"),
    ],
)
def test_hosts_that_cannot_be(run_cli, words, error):
    assert error in run_cli("plan", *SIZES.split(), *words.split(), status=1)
