# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of small groups, run in an emulator and compared row by row.

A wrong index, bound, role or generation shows as wrong rows. What nothing orders is a
race: a missing barrier, a flag before its data, a write to what was not read yet. All
ranks' launches run at once, warps in an order that a seed draws.
"""

import numpy as np
import pytest

from max_ep.quantize import quantize_blockwise_fp8, quantize_nvfp4
from max_ep.waits import named, place
from tests.codegen.kernels import counter_word, mojo_constant
from tests.emulator.emulated_world import FORMS, World, bf16, rows_of, words
from tests.emulator.memory import POISON
from tests.oracle.row_layouts import kept_rows

MASKED_MS = 150
OTHER_GENERATION = 3
COMBINE_ASYNC = int(mojo_constant("COMBINE_ASYNC", "max_ep/protocol/peer_words.mojo"))
N_FAILURE_WORDS = int(mojo_constant("N_FAILURE_WORDS", "max_ep/protocol/counters.mojo"))
SEND, RECEIVE, DROPPED, BAD_SOURCE, NO_COUNT, NO_MESSAGE = (
    int(mojo_constant(name, "max_ep/protocol/failures.mojo"))
    for name in "SEND RECEIVE DROPPED BAD_SOURCE NO_COUNT NO_MESSAGE".split()
)
OTHER_ROWS, TOO_MANY_ROWS, WRONG_COUNTERS, WRONG_EXPERT = (
    int(mojo_constant(name, "max_ep/protocol/failures.mojo"))
    for name in "OTHER_ROWS TOO_MANY_ROWS WRONG_COUNTERS WRONG_EXPERT".split()
)


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
        weights[rank] = rng.choice([0.5, 1, 2, -1], ids[rank].shape)
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


def check_results(world, results, tokens, ids, weights, stays=None):
    """`stays`: the choices that have a row, if not all have."""
    for rank, result in results.items():
        for token, row in enumerate(world.numbers(*result)):
            wanted = np.zeros(world.sizes.hidden)
            if world.sizes.is_shared:
                wanted += tokens[rank][token] + world.sizes.n_experts
            for k, expert in enumerate(ids[rank][token]):
                if 0 <= expert < world.sizes.n_experts and (
                    stays is None or (rank, token, k) in stays
                ):
                    wanted += weights[rank][token, k] * (tokens[rank][token] + expert)
            close = dict(rtol=2**-6, atol=1.5, err_msg=f"rank {rank}, token {token}")
            if world.name.endswith(
                "fp8_sums"
            ):  # of up to three numbers of up to 2 * 67
                close["atol"] = 3 * 2 * 67 * 2**-4
            np.testing.assert_allclose(row, wanted, **close)


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


@pytest.mark.parametrize("name", ["shared", "expert_shared", "fp8_sums"])
def test_variants(name):
    world = World(name)
    run_steps(world, [([5, 2, 4], 0), ([0, 5, 1], 2)])
    check_header(world, range(3), 2)


@pytest.mark.parametrize("name", ["sums", "rows", "expert", "late", "late_split"])
def test_rows_and_results(name):
    world = World(name)
    # A warp that sends takes several of the most tokens.
    most = world.sizes.max_tokens
    steps = [([most, 2, 4], 0), ([0, most, 1], 0), ([2, 1, most], 3)]
    # Sums: whoever receives polls for who sends next. Rows: so few that several warps
    # send a row.
    steps += [([1, 0, 1], 1), ([0, 1, 2], 1)]
    run_steps(world, steps)
    assert world.polled == world.awaited(), "Mojo lists what no kernel awaits"
    check_header(world, range(3), len(steps))
    # The last launch says what those before it have read. Where ranks share a GPU, a
    # wait says so at its end.
    check_done_words(world, len(steps), len(steps) - (name != "expert"))
    tokens, ids, weights = draw(world.sizes, [5, 5, 5], 2)
    ids[1][2:4] = world.sizes.n_experts  # Nobody's; one of them is recorded.
    given = tokens, ids, weights
    check_step(world, world.dispatch(*given), *given)
    no_one = [DROPPED, SEND, 1, world.sizes.n_experts, len(steps) + 1, 0]
    record = failure(world, 1)
    assert record in [[*no_one, token, k] for token in (2, 3) for k in range(3)]
    assert failure(world, 0) == failure(world, 2) == [0] * N_FAILURE_WORDS
    world.finds_races = False
    if name == "sums":
        # What is worse stays recorded. Others would do nothing more.
        worse = world.counters[1] + 4 * counter_word("FAILURE")
        world.memory.stores[4](worse, DROPPED + 1)
        check_step(world, world.dispatch(*given), *given)
        assert failure(world, 1) == [DROPPED + 1, *record[1:]]
    # More choices of an expert than it has places for: the later ones are dropped.
    ids[0][:] = 4
    check_step(world, world.dispatch(*given, n_rows_max=30), *given)


def test_many_tokens_between_hosts():
    """More choices than blocks share, and tokens of which one host has few."""
    world = World("hosts_many")
    run_steps(world, [([65, 5], 1), ([257, 1], 1)], n_wrong=0.985)
    check_header(world, range(2), 2)


@pytest.mark.parametrize(
    "name",
    ["hosts_sums", "hosts_rows", "hosts_expert", "hosts_fp8_sums"]
    + ["hosts_late", "hosts_late_split"],
)
def test_ranks_of_several_hosts(name):
    """What crosses between them comes late, in pieces, in any order."""
    world = World(name)
    most = world.sizes.max_tokens
    steps = [([most, 2, 4, 0], 0), ([0, most, 1, 3], 1), ([2, 1, most, most], 2)]
    run_steps(world, steps)
    assert world.polled == world.awaited(), "Mojo lists what no kernel awaits"
    check_header(world, range(4), len(steps))


def test_data_that_looks_missing_arrives():
    """As other NaN: 16 bytes whose last word is `SENTINEL` have not come."""
    world = World("sums")
    tokens, ids, weights = draw(world.sizes, [5, 2, 4], 0)
    for of_rank in tokens.values():
        of_rank[:, 6:8] = np.uint32(0xFFFF_FFFF).view(np.float32)
    outputs = world.dispatch(tokens, ids, weights)
    check_rows(world, outputs, tokens, ids)
    results = world.combine(outputs, weights)
    check_results(world, results, tokens, ids, weights)


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_tokens_are_quantized(name):
    """Bit for bit as the oracle; the last scales of a token do not fill 16 bytes."""
    world = World(name)
    tokens, ids, weights = draw(world.sizes, [5, 3, 4], 0)
    tokens[0][:, :16] = 0
    tokens[0][:, 16:32] = 6 * 2.0**-9  # The smallest scale of nvfp4 is 2**-9.
    outputs = world.dispatch(tokens, ids, weights)
    for rank, output in outputs.items():
        _, _, info = output.read()
        flat = [x for of_expert in rows_of(rank, ids, world.sizes) for x in of_expert]
        assert [tuple(x) for x in info.tolist()] == [x[1:] for x in flat]
        given = np.stack([tokens[src][token] for src, token, _ in flat])
        quantize = dict(fp8=quantize_blockwise_fp8, nvfp4=quantize_nvfp4)[name]
        values, scales = (x.view(np.uint8) for x in quantize(given.astype(np.float32)))
        found = world.memory.array(output.rows, np.uint8, *values.shape)
        np.testing.assert_array_equal(found, values)
        if name == "fp8":
            n_blocks, n = world.sizes.hidden // 128, output.n_rows_max
            shape = n_blocks, n, 4
            of_blocks = world.memory.array(output.scales, np.uint8, *shape)
            found = of_blocks.transpose(1, 0, 2).reshape(n, -1)
        else:
            found = world.memory.array(output.scales, np.uint8, *scales.shape)
        np.testing.assert_array_equal(found, scales)


def test_tokens_in_chunks():
    """Choices that blocks share, then so many that blocks index them; launches that
    only send or receive. Of one source all tokens are inline, of the other none."""
    world = World("many")
    steps = [([65, 5], 2), ([257, 1], 0), ([257, 2], 1)]
    run_steps(world, steps, n_wrong=0.985)
    check_header(world, range(2), 3)


def test_all_blocks_share_work():
    """Each launch counts from 0, in the half that the one before has cleared."""
    world = World("work")
    steps = [([257, 1, 0], 1), ([1, 0, 2], 1), ([257, 0, 1], 1)]
    run_steps(world, steps, n_wrong=0.97)
    check_header(world, range(3), 3)
    # Sums, sums to send, tokens to send: each the half of step 4, then of step 3.
    at = world.counters[0] + 4 * (world.sizes.masked - 6 * 32)
    halves = [world.memory.load(at + 4 * 32 * i, 4) for i in range(6)]
    assert halves[::2] == [0] * 3
    assert halves[1] > 0 and halves[5] > 0  # Rank 0 has many tokens, its peers few.


def test_all_warps_send_by_expert():
    """A block has more tokens than warps that send. Fails if the last of these warps
    sends nothing."""
    world = World("expert_shared")
    world.n_blocks = 1
    run_steps(world, [([world.sizes.max_tokens] * 3, 1)], n_wrong=0)
    check_header(world, range(3), 1)


def test_parts_of_a_row_are_counted_in_all_rounds():
    """So few rows that warps share each, and so many that each block has four. Fails
    if a part is counted for the row of the next round."""
    world = World("expert")
    world.n_blocks = 3
    tokens, ids, weights = draw(world.sizes, [0, 2, 0], 1, n_wrong=0)
    ids[1][:] = [2, 1, 0][: world.sizes.top_k]  # of rank 0, which has three
    check_step(world, world.dispatch(tokens, ids, weights), tokens, ids, weights)
    check_header(world, range(3), 1)


def test_a_rank_is_masked_and_comes_back():
    world = World("masks", timeout_ms=MASKED_MS)
    run_steps(world, [([5, 2, 4], 1)])
    here = [0, 1]
    for step in (1, 2):
        given = draw(world.sizes, [4, 5, 0], step)
        begin = world.clock.ns
        outputs = world.dispatch(*given, ranks=here)
        # It sends no heartbeats, so it is masked as soon as it is late.
        n_ms = (world.clock.ns - begin) // 1_000_000
        assert (n_ms >= MASKED_MS) == (step == 1) and n_ms < 2 * MASKED_MS
        check_step(world, outputs, *given)
        check_header(world, here, step + 1)
        assert [world.masked(rank) for rank in here] == [[0, 0, 1]] * 2
    for rank in here:
        # MAX may give either set of counters to a launch.
        world.memory.stores[4](world.spare[rank] + 4 * (world.sizes.masked + 2), 1)
    for rank in here:
        world.set_up(rank, readmitted=2, timeout_ms=MASKED_MS, done=(3, 3))
        assert world.masked(rank) == world.masked(rank, world.spare) == [0, 0, 0]
    world.set_up(2, timeout_ms=MASKED_MS, done=(3, 3))
    run_steps(world, [([3, 5, 5], 1)], seed=3)
    check_header(world, range(3), 4)


def test_two_ranks_are_masked_at_once():
    """One load reads the counts of both. That of the first stays 0 while the second is
    awaited; what stands in memory is of the generation before."""
    world = World("masks", timeout_ms=MASKED_MS)
    run_steps(world, [([5, 5, 5], 1)])
    for step in (1, 2):
        given = draw(world.sizes, [4, 0, 0], step)
        check_step(world, world.dispatch(*given, ranks=[0]), *given)
        check_header(world, [0], step + 1)
        assert world.masked(0) == [0, 1, 1]


def test_a_rank_that_waits_is_not_masked():
    """Rank 2 waits long for rank 1, which rank 0 has masked. Rank 0 waits for rank 2,
    and hears that it lives."""
    world = World("masks", timeout_ms=MASKED_MS)
    world.set_up(2, timeout_ms=3 * MASKED_MS)
    at = world.counters[0] + 4 * world.sizes.masked
    world.memory.stores[4](at + 4, 1)
    tokens, ids, weights = draw(world.sizes, [5, 0, 5], 1, n_wrong=0)
    with world.without_waiting():
        outputs = world.dispatch(tokens, ids, weights, ranks=[0, 2])
        world.combine(outputs, weights)
    assert world.clock.ns // 1_000_000 >= 3 * MASKED_MS
    assert world.masked(0) == world.masked(2) == [0, 1, 0]
    check_header(world, outputs, 1)


@pytest.mark.parametrize("name, more", [("drops", []), ("hosts_drops", [3])])
def test_rows_that_do_not_fit_are_dropped(name, more):
    world = World(name)
    sizes = world.sizes
    run_steps(world, [([5, 2, 4, *more], 0), ([0, 5, 1, *more], 2)])
    experts = [0, 1, 90, 179, 269]  # So many that several warps count rows.
    for step, n_rows in enumerate([40, 7]):
        tokens, ids, weights = draw(sizes, [5, 4, 5, *more], step, experts=experts)
        outputs = world.dispatch(tokens, ids, weights, n_rows_max=n_rows)
        stays = set()
        for rank, output in outputs.items():
            wanted = rows_of(rank, ids, sizes)
            pairs = [
                [x for x in of_expert if x[0] == src]
                for of_expert in wanted
                for src in range(sizes.n_ranks)
            ]
            numbers = kept_rows(np.array([*map(len, pairs)]), n_rows)
            flat = [x for pair, n in zip(pairs, numbers) for x in pair[:n]]
            stays |= set(flat)
            _, rows, info = output.read()
            assert [tuple(x) for x in info] == [(token, k) for _, token, k in flat]
            for row, (src, token, _) in zip(rows, flat):
                np.testing.assert_array_equal(row, tokens[src][token])
        results = world.combine(outputs, weights)
        check_results(world, results, tokens, ids, weights, stays)
        check_header(world, range(sizes.n_ranks), step + 3)
        for rank in outputs:  # How many rows a token has, and an expert has dropped.
            n = sizes.max_tokens, sizes.n_local
            n_behind = sum(n) + bool(world.link)  # which has a word at the end
            at = world.counters[rank] + 4 * (sizes.counters - n_behind)
            of_tokens, of_experts = np.split(
                world.memory.array(at, np.int32, sum(n)), n[:1]
            )
            for token in range(len(ids[rank])):
                here = [x for x in stays if x[:2] == (rank, token)]
                assert of_tokens[token] == len(here)
            for expert, wanted in enumerate(rows_of(rank, ids, sizes)):
                assert of_experts[expert] == len({*wanted} - stays)


@pytest.mark.parametrize("name", ["sums", "rows", "expert", "expert_shared"])
def test_rows_that_do_not_fit_are_refused(name):
    """A refused dispatch writes no rows. A combine takes no fewer than there are."""
    world = World(name)
    # Without tokens a rank awaits nobody, once it has refused to send.
    tokens, ids, weights = draw(world.sizes, [0, 4, 5], 3, n_wrong=0)
    outputs = world.dispatch(tokens, ids, weights)
    world.finds_races = False
    n_rows = outputs[0].n_rows_max
    world.combine({0: outputs[0]}, weights, n_rows=n_rows - 1)
    row = 0 if world.has_sums else n_rows - 1
    given = n_rows, n_rows - 1
    assert failure(world, 0) == [TOO_MANY_ROWS, 2 + SEND, 0, row, 1, 0, *given]
    assert world.word(0, "BROKEN")
    world = World(name)
    tokens, ids, weights = draw(world.sizes, [5, 4, 5], 3, n_wrong=0)
    outputs = world.dispatch(tokens, ids, weights, n_rows_max=3)
    given = len(sum(rows_of(0, ids, world.sizes), [])), 3
    assert failure(world, 0) == [TOO_MANY_ROWS, RECEIVE, 0, 0, 1, 0, *given]
    assert not outputs[0].read()[0].any()
    if not world.has_sums:
        # A rank finds its own rows when it adds them up.
        world = World(name, finds_races=False)
        tokens, ids, weights = draw(world.sizes, [0, 0, 2], 3)
        ids[2][:] = [world.sizes.n_experts - 1, -1, -1]
        outputs = world.dispatch(tokens, ids, weights)
        n_rows = outputs[2].n_rows_max
        world.combine({2: outputs[2]}, weights, n_rows=n_rows - 1)
        given = n_rows, n_rows - 1
        assert failure(world, 2) == [
            TOO_MANY_ROWS,
            2 + RECEIVE,
            2,
            n_rows - 1,
            1,
            0,
            *given,
        ]


@pytest.mark.parametrize("name", FORMS)
def test_a_broken_rank_does_nothing(name):
    """Nor does one whose counters are those of another group, which it records."""
    for word, number in (("BROKEN", 1), ("GROUP", -1)):
        # Two threads fill the halves of a word: the detector has no smaller ones.
        world = World(name, finds_races=False)
        memory = world.memory
        at = world.counters[0] + 4 * counter_word(word)
        memory.stores[4](at, number & 0xFFFF_FFFF)
        tokens, ids, weights = draw(world.sizes, [2, 0, 0], 1)
        regions = [bytes(memory.bytes[x:][: world.sizes.region]) for x in world.regions]
        outputs = world.dispatch(tokens, ids, weights, ranks=[0])
        assert not outputs[0].read()[0].any()
        if name not in ("fp8", "nvfp4"):
            results = world.combine(outputs, weights)
            assert np.isnan(world.numbers(*results[0])).all()
        for at, before in zip(world.regions, regions):
            assert memory.bytes[at : at + len(before)] == before
        if word == "GROUP":
            found = [WRONG_COUNTERS, -1, counter_word("GROUP"), 0, 0, number]
            record = failure(world, 0)
            assert [record[0], *record[2:7]] == found


@pytest.mark.parametrize("n_tokens", [4, 257])
def test_what_does_not_come_is_not_used(n_tokens):
    """Part of a token, or the flag of a chunk, is lost on the way."""
    world = World("many", timeout_ms=MASKED_MS, finds_races=False)
    sizes, memory = world.sizes, world.memory
    tokens, ids, weights = draw(sizes, [n_tokens, 1], 7, n_wrong=0.985)
    ids[0][3, 0] = sizes.n_experts - 1  # It has a row on the other rank.
    world.dispatch(tokens, ids, weights, ["_async"])
    begin, end = world.regions[1], world.regions[1] + sizes.dispatch_counts
    if n_tokens == 4:
        lost = bf16(tokens[0][3])[-16:]
        at = memory.bytes.index(lost, begin, end)
        memory.bytes[at : at + 16] = b"\xff" * 16
    else:
        flag = words(1 << 32)
        places = [
            at for at in range(begin, end, 8) if memory.bytes[at : at + 8] == flag
        ]
        memory.bytes[places[-1] : places[-1] + 8] = words(0)
    world.dispatch(tokens, ids, weights, ["_wait"], ranks=[1])
    code, phase, missing_rank, _, wanted, *_ = failure(world, 1)
    assert (code, phase, missing_rank, wanted) == (NO_MESSAGE, RECEIVE, 0, 1)
    assert world.word(1, "BROKEN")


@pytest.mark.parametrize(
    "name, kind",
    [("many", "number of tokens"), ("many", "count"), ("many", "entry")]
    + [("expert", "count"), ("expert", "message")],
)
def test_a_lost_word_is_named(name, kind):
    """The first of rank 0, which rank 1 awaits, is of another generation: it gives up.
    Without all counts and numbers no token has a row, not even its own."""
    world = World(name, timeout_ms=MASKED_MS, finds_races=False)
    sizes, word = world.sizes, named(world.words.gpu, kind)
    ids = {rank: np.full((3, sizes.top_k), -1) for rank in range(sizes.n_ranks)}
    ids[0][:, 0] = ids[1][:, 0] = sizes.n_local  # the first expert of rank 1
    tokens, _, weights = draw(sizes, [3] * sizes.n_ranks, 1)
    world.dispatch(tokens, ids, weights, ["_async"])
    at = world.regions[1] + place(word, 0, 0)
    world.memory.stores[8](at, OTHER_GENERATION << 32)
    outputs = world.dispatch(tokens, ids, weights, ["_wait"], ranks=[1])
    code = NO_COUNT if kind in ("count", "number of tokens") else NO_MESSAGE
    expert = sizes.n_local if kind in ("count", "message") else -1
    assert failure(world, 1) == [code, RECEIVE, 0, expert, 1, OTHER_GENERATION, 0, 0]
    assert world.word(1, "BROKEN")
    # By expert ranks share a GPU, and advance at the end.
    assert world.word(1, "DISPATCH_RECEIVED") == (name == "many")
    assert kind != "count" or not outputs[1].read()[0].any()
    n_bytes = 2 * outputs[1].n_rows_max * sizes.hidden
    rows = world.memory.array(outputs[1].rows, np.uint8, n_bytes)
    assert code != NO_COUNT or (rows == POISON).all()


@pytest.mark.parametrize("name", ["shared", "expert_shared"])
def test_a_rank_alone_has_no_rows(name):
    """Where others do not come. Fails if the offset of a shared expert is not written
    then."""
    world = World(name, timeout_ms=MASKED_MS, finds_races=False)
    outputs = world.dispatch(*draw(world.sizes, [2, 2, 2], 1), ranks=[1])
    assert failure(world, 1)[:2] == [NO_COUNT, RECEIVE]
    assert not outputs[1].read()[0].any()


def test_scales_that_do_not_come_are_not_used():
    """The values of the token are there. Fails if its scales are not awaited."""
    world = World("nvfp4", timeout_ms=MASKED_MS, finds_races=False)
    tokens, ids, weights = draw(world.sizes, [1, 0, 0], 1, n_wrong=0)
    ids[0][0, 0] = world.sizes.n_local  # the first expert of rank 1
    world.dispatch(tokens, ids, weights, ranks=[0, 2])
    _, scales = quantize_nvfp4(tokens[0].astype(np.float32))
    begin, memory = world.regions[1], world.memory
    at = memory.bytes.index(scales.tobytes()[:12], begin, begin + world.sizes.region)
    memory.bytes[at : at + 16] = b"\xff" * 16
    world.dispatch(tokens, ids, weights, ranks=[1])
    assert failure(world, 1)[:3] == [NO_MESSAGE, RECEIVE, 0]


@pytest.mark.parametrize("word, number", [(0, 5), (0, -1), (1, 3), (1, -1)])
def test_sources_that_cannot_be_are_refused(word, number):
    """A token, or a k, that its rank has no place for."""
    world = World("rows", timeout_ms=MASKED_MS, finds_races=False)
    tokens, ids, weights = draw(world.sizes, [2, 2, 2], 9, n_wrong=0)
    outputs = world.dispatch(tokens, ids, weights)
    for i in range(outputs[1].n_rows_max):
        at = outputs[1].src_info + 8 * i + 4 * word
        world.memory.stores[4](at, number & 0xFFFF_FFFF)
    world.combine(outputs, weights)
    assert world.word(1, "FAILURE") == BAD_SOURCE


def test_a_row_of_another_expert_is_refused():
    """Its flag says which expert has made it; here that of token 1 is wrong."""
    world = World("expert", finds_races=False)
    tokens, ids, weights = draw(world.sizes, [2, 0, 0], 1)
    ids[0][:] = [expert := world.sizes.n_local, -1, -1]
    outputs = world.dispatch(tokens, ids, weights)
    world.combine(outputs, weights, ["_async"])
    row = place(named(world.words.gpu, "row"), 0, world.sizes.top_k)
    world.memory.stores[8](world.regions[0] + row, 1 << 32 | expert + 1)
    results = world.combine(outputs, weights, ["_wait"])
    assert failure(world, 0) == [WRONG_EXPERT, 2 + RECEIVE, 1, expert, 1, 1, 1, 0]
    assert np.isnan(world.numbers(*results[0])[1]).all()


def test_sums_are_those_of_the_last_dispatch():
    """Another one between both halves of a combine has other rows."""
    world = World("many", finds_races=False)
    tokens, ids, weights = draw(world.sizes, [3, 5], 1)
    outputs = world.dispatch(tokens, ids, weights)
    world.combine(outputs, weights, ["_async"])
    world.dispatch(tokens, ids, weights)
    world.combine(outputs, weights, ["_wait"])
    assert [world.word(rank, "FAILURE") for rank in range(2)] == [OTHER_ROWS] * 2


def test_rows_may_change_after_they_are_sent():
    """Where weights come late, a launch that only sends keeps its rank's own sums."""
    world = World("late_split")
    given = draw(world.sizes, [20, 3, 7], 0)
    outputs = world.dispatch(*given)
    stays, run = check_rows(world, outputs, *given[:2]), world.run

    def change(phase, params):
        run(phase, params)
        for output in outputs.values() if phase.startswith("combine_async") else []:
            n_bytes = 2 * output.n_rows_max * world.sizes.hidden
            world.memory.bytes[output.made : output.made + n_bytes] = b"\xff" * n_bytes

    world.run = change
    check_results(world, world.combine(outputs, given[2]), *given, stays)


@pytest.mark.parametrize("name", ["late", "late_split"])
def test_a_weight_that_does_not_come_is_named(name):
    """The owner of a row gives up, and says which rank owes the weight."""
    world = World(name, timeout_ms=MASKED_MS, finds_races=False)
    given = draw(world.sizes, [3, 0, 0], 0, n_wrong=0)
    outputs = world.dispatch(*given)
    world.combine({1: outputs[1], 2: outputs[2]}, given[2])
    code, phase, missing_rank, _, wanted, *_ = failure(world, 1)
    assert (code, phase, missing_rank, wanted) == (NO_MESSAGE, COMBINE_ASYNC, 0, 1)
