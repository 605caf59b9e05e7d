# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of PyTorch's rows as they are given, in the emulator: plain, and expanded
and aligned, with biases."""

import itertools

import numpy as np
import pytest

from tests.children import ALL_CASES, slow
from tests.emulator.emulated_world import World, bf16, of_bf16
from tests.emulator.steps import rounded

N_SCALES, ALIGN = 3, 4
"""As `emulated.mojo` has them."""
TOP_K = {"plain": 3, "plain_many": 17, "expanded": 4}
"""The router's choices; as many experts are on each rank."""
TOP_K |= {f"hosts_{name}": n for name, n in TOP_K.items()}
TOP_K["hosts_relay_plain"] = 3
TOP_K["expanded_wide"] = 4
TOP_K["plain_one"] = 1  # an expert is a rank: counts that go ahead


GRIDS = [("plain_many", 1), ("expanded", 5)]
"""Groups, and how many blocks they have."""
if ALL_CASES:
    GRIDS = [*itertools.product(["plain_many", "expanded", "hosts_plain"], [1, 5])]
RARE = ["hosts_plain", "hosts_plain_many"]


def aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


class Given:
    """What all ranks send, and what each must get."""

    def __init__(self, world: World, counts: list[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.world, self.is_plain = world, "expanded" not in world.name
        counts = [*counts, 6][: world.sizes.n_ranks]  # of two hosts have four
        self.top_k = top_k = TOP_K[world.name]
        self.n_local = top_k if self.is_plain else world.sizes.n_local
        self.tokens, self.scales, self.ids, self.weights = [], [], [], []
        for n in counts:
            hidden = world.sizes.hidden
            # Three times as much is rounded.
            self.tokens.append(rng.integers(-255, 256, (n, hidden)).astype(float))
            scales = rng.integers(-(2**31), 2**31, (n, N_SCALES))
            self.scales.append(scales.astype(np.int32))
            n_experts = world.sizes.n_ranks * self.n_local
            drawn = [rng.permutation(n_experts)[:top_k] for _ in range(n)]
            ids = np.array(drawn, np.int64).reshape(n, top_k)
            ids[rng.random(ids.shape) < 1 - 2.4 / top_k] = -1
            self.ids.append(ids)
            self.weights.append(rng.random(ids.shape).astype(np.float32))

    def places(self, rank: int) -> tuple[dict[int, tuple[int, int, int]], list[int]]:
        """Returns source, token and choice of each row, and the first table."""
        local = range(rank * self.n_local, (rank + 1) * self.n_local)
        rows: dict[int, tuple[int, int, int]] = {}
        if self.is_plain:
            ends = []
            for src, ids in enumerate(self.ids):
                for token in np.flatnonzero(np.isin(ids, local).any(1)):
                    rows[len(rows)] = (src, int(token), rank)
                ends.append(len(rows))
            return rows, ends
        ends, first = [], 0
        for expert in local:
            found = [
                (src, *map(int, place))
                for src, ids in enumerate(self.ids)
                for place in np.argwhere(ids == expert)
            ]
            rows |= {first + i: one for i, one in enumerate(found)}
            ends.append(first + len(found))
            first = aligned(first + len(found))
        return rows, ends

    def n_rows(self, rank: int) -> int:
        rows, ends = self.places(rank)
        return len(rows) + 3 if self.is_plain else max(aligned(ends[-1]), ALIGN)

    def dispatch(self, in_columns: bool) -> None:
        world, memory, s = self.world, self.world.memory, self.world.sizes
        params = {}
        self.out = {}
        for rank in range(s.n_ranks):
            n, n_rows = len(self.tokens[rank]), self.n_rows(rank)
            row_bytes = 2 * s.hidden
            sent = np.zeros((n, row_bytes + 16), np.uint8)
            flat = np.frombuffer(bf16(self.tokens[rank]), np.uint8)
            sent[:, :row_bytes] = flat.reshape(n, row_bytes)
            as_bytes = self.scales[rank].view(np.uint8)
            sent[:, row_bytes : row_bytes + 4 * N_SCALES] = as_bytes
            world.n_tokens[rank] = n
            sizes = dict(
                rows=n_rows * row_bytes,
                scales=4 * n_rows * N_SCALES,
                ids=4 * n_rows * self.top_k,
                local_ids=8 * n_rows * self.top_k,
                weights=4 * n_rows * self.top_k,
                ends=4 * max(s.n_ranks, self.n_local),
                counts=4 * self.n_local * (1 + s.n_ranks),
                src_info=8 * n_rows,
                kept=max(8, 8 * n * self.top_k),
                made=n_rows * row_bytes,
            )
            out = {name: memory.allocate(n) for name, n in sizes.items()}
            self.out[rank] = out
            steps = [1, n_rows] if in_columns else [N_SCALES, 1]
            params[rank] = [
                memory.put(sent.tobytes()),
                memory.put(self.ids[rank].tobytes()),
                memory.put(self.weights[rank].tobytes()),
                n,
                out["kept"],
                out["rows"],
                out["scales"],
                *steps,
                out["ids"],
                out["local_ids"],
                rank * self.n_local,
                out["weights"],
                n_rows,
                out["ends"],
                out["counts"],
                out["src_info"],
                *world.buffers(rank, s.dispatch_recv, s.dispatch_counts),
            ]
        world.run("dispatch", params)
        self.in_columns = in_columns

    def check_rows(self) -> None:
        world, memory, hidden = self.world, self.world.memory, self.world.sizes.hidden
        for rank, out in self.out.items():
            rows, ends = self.places(rank)
            n_rows = self.n_rows(rank)
            kept = memory.array(out["kept"], np.int64, *self.ids[rank].shape)
            np.testing.assert_array_equal(kept, self.ids[rank])
            got = of_bf16(memory, out["rows"], n_rows, hidden)
            shape = (N_SCALES, n_rows) if self.in_columns else (n_rows, N_SCALES)
            scales = memory.array(out["scales"], np.int32, *shape)
            scales = scales.T if self.in_columns else scales
            assert memory.array(out["ends"], np.int32, len(ends)).tolist() == ends
            n = n_rows * (self.top_k if self.is_plain else 1)
            weights = memory.array(out["weights"], np.float32, n).reshape(n_rows, -1)
            ids = memory.array(out["ids"], np.int32, n_rows, self.top_k)
            local_ids = memory.array(out["local_ids"], np.int64, n_rows, self.top_k)
            if self.is_plain:
                assert (ids[len(rows) :] == -1).all()
                assert (local_ids[len(rows) :] == -1).all()
            else:
                firsts = [0, *map(aligned, ends[:-1])]
                counts = [end - first for end, first in zip(ends, firsts)]
                pairs = [
                    sum(src == s and f <= row < e for row, (src, *_) in rows.items())
                    for f, e in zip(firsts, ends)
                    for s in range(world.sizes.n_ranks)
                ]
                table = memory.array(out["counts"], np.int32, len(counts) + len(pairs))
                assert table.tolist() == counts + pairs
            info = memory.array(out["src_info"], np.int32, n_rows, 2)
            for row, (src, token, k) in rows.items():
                np.testing.assert_array_equal(got[row], self.tokens[src][token])
                np.testing.assert_array_equal(scales[row], self.scales[src][token])
                assert info[row].tolist() == [token, k]
                of_token = self.weights[src][token]
                wanted = of_token if self.is_plain else of_token[k : k + 1]
                np.testing.assert_array_equal(weights[row], wanted)
                if self.is_plain:
                    want = self.ids[src][token]
                    assert ids[row].tolist() == want.tolist()
                    is_here = want // self.n_local == rank
                    local = np.where(is_here, want % self.n_local, -1)
                    assert local_ids[row].tolist() == local.tolist()

    def combine(self, n_biases: int) -> None:
        """Each row comes back as it is; rows of no token are NaN."""
        world, memory, s = self.world, self.world.memory, self.world.sizes
        params, self.results = {}, {}
        rng = np.random.default_rng(n_biases)
        self.biases = {}
        for rank, out in self.out.items():
            n, n_rows = len(self.tokens[rank]), self.n_rows(rank)
            made = np.full((n_rows, s.hidden), np.nan)
            for row, (src, token, _) in self.places(rank)[0].items():
                made[row] = self.tokens[src][token]
            memory.bytes[out["made"] : out["made"] + 2 * made.size] = bf16(made)
            biases = [rng.integers(-9, 9, (n, s.hidden)) * 1.0 for _ in range(2)]
            self.biases[rank] = sum(biases[:n_biases], np.zeros((n, s.hidden)))
            self.results[rank] = memory.allocate(max(1, 2 * n * s.hidden))
            places = [memory.put(bf16(one)) for one in biases]
            params[rank] = [out["made"], n_rows, self.results[rank], n, 0]
            params[rank] += [n_biases, *places]
            params[rank] += world.buffers(rank, s.combine_recv, s.combine_counts)
        world.run("combine", params)

    def check_results(self) -> None:
        """The sum of each rank is rounded, this one's as well."""
        for rank, result in self.results.items():
            ids, want = self.ids[rank], self.biases[rank]
            for owner in range(self.world.sizes.n_ranks):
                is_there = (ids >= 0) & (ids // self.n_local == owner)
                n_rows = is_there.any(1) if self.is_plain else is_there.sum(1)
                want = want + rounded(self.tokens[rank] * n_rows[:, None])
            got = of_bf16(self.world.memory, result, len(ids), self.world.sizes.hidden)
            np.testing.assert_array_equal(got, rounded(want))


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[slow] * (x in RARE)) for x in TOP_K]
)
def test_given_rows(name: str) -> None:
    """Few choices, whose ids lanes hold, more, whose ids blocks share, and so many that
    blocks index them in turn."""
    world = World(name)
    steps = [[5, 2, 0], [70, 1, 9], [0, 3, 1], [2, 66, 40]]
    if name == "expanded_wide":
        steps = steps[:1]
    elif not ALL_CASES:
        steps = [[5, 2, 0], [0, 3, 26]] if name.startswith("hosts") else steps[:3]
    for i, counts in enumerate(steps):
        given = Given(world, counts, i)
        with world.without_waiting():
            given.dispatch(in_columns=i % 2 == 1)
        given.check_rows()
        with world.without_waiting():
            given.combine(n_biases=i % 3)
        given.check_results()


@pytest.mark.parametrize("name, n_blocks", GRIDS)
def test_any_grid_will_do(name: str, n_blocks: int) -> None:
    """A caller bounds the multiprocessors (``num_sms``): one block does all, or several
    have little."""
    world = World(name)
    world.n_blocks = n_blocks
    steps = [[3, 70, 9], [1, 0, 2]]
    for i, counts in enumerate(steps if ALL_CASES else steps[n_blocks > 1 :][:1]):
        given = Given(world, counts, i)
        with world.without_waiting():
            given.dispatch(in_columns=False)
        given.check_rows()
        with world.without_waiting():
            given.combine(n_biases=0)
        given.check_results()


def test_all_gather() -> None:
    """Every rank gets every token, with what its router chose."""
    world, top_k = World("gather"), 4
    memory, s, rng = world.memory, world.sizes, np.random.default_rng(0)
    for counts in ([5, 2, 0], [0, 20, 9]):
        n_rows = sum(counts) + 2
        tokens = [rng.integers(-30, 30, (n, s.hidden)) * 1.0 for n in counts]
        ids = [rng.integers(-1, 9, (n, top_k)).astype(np.int32) for n in counts]
        probs = [rng.random((n, top_k)).astype(np.float32) for n in counts]
        out, params = {}, {}
        for rank, n in enumerate(counts):
            given = bf16(tokens[rank]), ids[rank].tobytes(), probs[rank].tobytes()
            sizes = 2 * n_rows * s.hidden, *2 * [4 * n_rows * top_k], 4
            out[rank] = [memory.allocate(n_bytes) for n_bytes in sizes]
            tables = [memory.allocate(n_bytes) for n_bytes in (8, 4, 8 * n_rows)]
            buffers = world.buffers(rank, s.dispatch_recv, s.dispatch_counts)
            params[rank] = [*map(memory.put, given), n, 0, *out[rank], n_rows]
            params[rank] += [*tables, *buffers]
        world.run("dispatch", params)
        for rows, found_ids, found_probs, n_gathered in out.values():
            got = of_bf16(memory, rows, n_rows, s.hidden)[:-2]
            np.testing.assert_array_equal(got, np.concatenate(tokens))
            got = memory.array(found_ids, np.int32, n_rows, top_k)
            np.testing.assert_array_equal(got[:-2], np.concatenate(ids))
            assert (got[-2:] == -1).all()
            got = memory.array(found_probs, np.float32, n_rows, top_k)[:-2]
            np.testing.assert_array_equal(got, np.concatenate(probs))
            assert memory.load(n_gathered, 4) == sum(counts)
