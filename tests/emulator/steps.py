# SPDX-License-Identifier: Apache-2.0
"""Steps of an emulated group: what ranks are given, and what they must get."""

import numpy as np

from max_ep.quantize import bfloat16_to_float32
from tests.codegen.kernels import counter_word, mojo_constant
from tests.emulator.emulated_world import bf16, rows_of

MASKED_MS = 150
N_FAILURE_WORDS = int(mojo_constant("N_FAILURE_WORDS", "max_ep/protocol/counters.mojo"))


def code_of(name: str) -> int:
    """Finds what a failure record says, by its name."""
    return int(mojo_constant(name, "max_ep/protocol/failures.mojo"))


SEND, RECEIVE, DROPPED = map(code_of, ("SEND", "RECEIVE", "DROPPED"))


def draw(sizes, counts, seed, n_wrong=0.15, experts=None):
    """Draws tokens, ids some of which are of nobody, and weights."""
    rng = np.random.default_rng(seed)
    tokens, ids, weights = {}, {}, {}
    for rank, n in enumerate(counts):
        tokens[rank] = rng.integers(-60, 60, (n, sizes.hidden)).astype(float)
        of = range(sizes.n_experts) if experts is None else experts
        draws = [rng.permutation(of)[: sizes.top_k] for _ in range(n)]
        ids[rank] = np.array(draws, int).reshape(n, sizes.top_k)
        wrong = rng.random(ids[rank].shape) < n_wrong
        ids[rank] = np.where(wrong, -1, ids[rank])
        # Sums have more bits than bfloat16 has, and few enough for float32.
        weights[rank] = rng.choice([0.5, 1.75, 2.25, -1.125], ids[rank].shape)
    return tokens, ids, weights


def check_rows(world, outputs, tokens, ids) -> set[tuple[int, int, int]]:
    """Returns the choices that have a row."""
    stays = set()
    for rank, output in outputs.items():
        offsets, rows, info = output.read()
        wanted = rows_of(rank, ids, world.sizes)
        ends = np.cumsum([0, *map(len, wanted)])
        np.testing.assert_array_equal(offsets, ends, f"offsets of rank {rank}")
        flat = [x for of_expert in wanted for x in of_expert]
        for i, (src, token, k) in enumerate(flat):
            where = f"rank {rank}, row {i}: token {token}, k {k} of rank {src}"
            np.testing.assert_array_equal(info[i], [token, k], where)
            np.testing.assert_array_equal(rows[i], tokens[src][token], where)
        stays |= set(flat)
    return stays


def rounded(x: np.ndarray) -> np.ndarray:
    """Rounds to bfloat16."""
    return bfloat16_to_float32(np.frombuffer(bf16(x), np.uint16)).reshape(x.shape)


def _result(world, rank, token, made, owners) -> np.ndarray:
    """Adds up a token's weighted rows, `made` by the ranks `owners`, and rounds where
    kernels do: numbers are so short that nothing else is lost."""
    s = world.sizes
    of_ranks = np.zeros((s.n_ranks, s.hidden))
    np.add.at(of_ranks, owners, made)
    total = of_ranks[rank].copy()
    if not world.has_sums:
        total = of_ranks.sum(0)
    elif "late" in world.name:
        total = rounded(total)
    n_of_host = 2 if "relay" in world.name else 1
    for first in range(0, s.n_ranks if world.has_sums else 0, n_of_host):
        host = [*range(first, first + n_of_host)]
        parts = {r: rounded(of_ranks[r]) for r in host if r != rank}
        if n_of_host > 1 and rank not in host:
            adds = host[rank % n_of_host]
            del parts[adds]
            parts = {adds: rounded(of_ranks[adds] + sum(parts.values()))}
        total += sum(parts.values())
    if s.is_shared:
        total = rounded(total) + rounded(token + s.n_experts)
    return rounded(total)


def check_results(world, results, tokens, ids, weights, stays=None):
    """`stays`: the choices that have a row, if not all have."""
    for rank, result in results.items():
        for token, row in enumerate(world.numbers(*result)):
            given, made, owners = tokens[rank][token], [], []
            for k, expert in enumerate(ids[rank][token]):
                if 0 <= expert < world.sizes.n_experts and (
                    stays is None or (rank, token, k) in stays
                ):
                    made.append(weights[rank][token, k] * rounded(given + expert))
                    owners.append(expert // world.sizes.n_local)
            made = np.reshape(made, (len(owners), world.sizes.hidden))
            wanted = _result(world, rank, given, made, np.array(owners, int))
            # Where sums are quantized: of up to three numbers of up to 2.25 * 67.
            atol = 3 * 2.25 * 67 * 2**-4 if world.name.endswith("fp8_sums") else 0
            close = dict(rtol=2**-6 if atol else 0, atol=atol)
            where = f"rank {rank}, token {token}"
            np.testing.assert_allclose(row, wanted, **close, err_msg=where)


def check_step(world, outputs, tokens, ids, weights):
    """Compares rows, then the results of a combine of those choices that have one."""
    stays = check_rows(world, outputs, tokens, ids)
    results = world.combine(outputs, weights)
    check_results(world, results, tokens, ids, weights, stays)


def check_header(world, ranks, step):
    """All has ended, and nobody has failed."""
    for rank in ranks:
        for phase in ("DISPATCH", "COMBINE"):
            assert world.word(rank, f"{phase}_SENT") == step
            assert world.word(rank, f"{phase}_RECEIVED") == step
        for name in ("BROKEN", "FAILURE", "BLOCKS_ARRIVED"):
            assert world.word(rank, name) == 0, name


def failure(world, rank) -> list[int]:
    """What a rank has recorded: code, phase, missing rank, expert or row, the wanted
    and the found generation, and two numbers."""
    at = world.counters[rank] + 4 * counter_word("FAILURE")
    return world.memory.array(at, np.int32, N_FAILURE_WORDS).tolist()


def check_pairs(world, ids):
    """Counters hold row and number of each pair of expert and source, for combine, and
    at their end how many rows there are, and how many the largest pair has."""
    s = world.sizes
    for rank, counters in enumerate(world.counters):
        at = counters + 4 * counter_word("N_HEADER_WORDS")
        found = world.memory.array(at, np.int32, s.n_local * s.n_ranks + 1, 2)
        rows = rows_of(rank, ids, s)
        row, numbers = sum(map(len, rows[: s.is_shared])), [0]
        wanted = []
        for of_expert in rows[s.is_shared :]:
            for src in range(s.n_ranks):
                numbers.append(sum(x[0] == src for x in of_expert))
                wanted.append([row, numbers[-1]])
                row += numbers[-1]
        np.testing.assert_array_equal(found, [*wanted, [row, max(numbers)]])


def check_done_words(world, dispatched, combined):
    """All ranks have published which generations they have read."""
    s, wanted = world.sizes, dispatched << 32 | combined
    for region in world.regions:
        first = region + s.dispatch_counts + 8 * s.n_local * s.n_ranks
        done = [world.memory.load(first + 8 * i, 8) for i in range(s.n_ranks)]
        assert done == [wanted] * s.n_ranks


def run_steps(world, steps, n_wrong=0.15, seed=0):
    """Runs steps: a dispatch of so many tokens, and several combines, or none. Then
    nothing but done words keeps a rank from overwriting what another has not read."""
    runs = []
    with world.without_waiting():
        for i, (counts, n_combines) in enumerate(steps):
            given = draw(world.sizes, counts, seed + i, n_wrong)
            outputs = world.dispatch(*given)
            combines = range(n_combines)
            results = [world.combine(outputs, given[2]) for _ in combines]
            runs.append((given, outputs, results))
    for (tokens, ids, weights), outputs, results in runs:
        check_rows(world, outputs, tokens, ids)
        for result in results:
            check_results(world, result, tokens, ids, weights)
    check_pairs(world, ids)
