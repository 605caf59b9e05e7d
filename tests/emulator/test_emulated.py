# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of small groups, run in an emulator and compared row by row.

A wrong index, bound, role or generation shows as wrong rows. What nothing orders is a
race: a missing barrier, a flag before its data, a write to what was not read yet. All
ranks' launches run at once, warps in an order that a seed draws.
"""

import numpy as np
import pytest

from max_ep.quantize import (
    quantize_blockwise_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
)
from tests.children import slow
from tests.codegen.kernels import counter_word
from tests.emulator.emulated_world import World, rows_of
from tests.emulator.memory import POISON
from tests.emulator.steps import (
    DROPPED,
    MASKED_MS,
    N_FAILURE_WORDS,
    SEND,
    check_done_words,
    check_header,
    check_results,
    check_rows,
    check_step,
    draw,
    failure,
    run_steps,
)
from tests.oracle.row_layouts import kept_rows, scales_of_tiles


@pytest.mark.parametrize(
    "name",
    ["shared", "expert_shared", "fp8_sums", pytest.param("mxfp8_sums", marks=slow)],
)
def test_variants(name):
    world = World(name)
    run_steps(world, [([5, 2, 4], 0), ([0, 5, 1], 2)])
    check_header(world, range(3), 2)


@pytest.mark.parametrize(
    "name",
    ["sums", "rows", "expert", "late", pytest.param("late_split", marks=slow)],
)
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


@slow
def test_many_tokens_between_hosts():
    """More choices than blocks share, and tokens of which one host has few."""
    world = World("hosts_many")
    run_steps(world, [([65, 5], 1), ([257, 1], 1)], n_wrong=0.985)
    check_header(world, range(2), 2)


HOSTS = ["hosts_sums", "hosts_rows", "hosts_expert", "hosts_relay"]
RARE = ["hosts_fp8_sums", "hosts_late", "hosts_late_split"]
RARE += ["hosts_relay_fp8_sums", "hosts_relay_late_split"]


@pytest.mark.parametrize(
    "name", HOSTS + [pytest.param(name, marks=slow) for name in RARE]
)
def test_ranks_of_several_hosts(name):
    """What crosses between them comes late, in pieces, in any order."""
    world = World(name)
    n_ranks, most = world.sizes.n_ranks, world.sizes.max_tokens
    counts = [[most, 2, 4, 0, 1, 2], [0, most, 1, 3, 2, 0], [2, 1, most, most, 0, 3]]
    steps = [(n[:n_ranks], i) for i, n in enumerate(counts)]
    # So few that several warps of a block stage a sum.
    steps += [([2, 1, 0, 2, 0, 1][:n_ranks], 1)]
    run_steps(world, steps)
    assert world.polled == world.awaited(), "Mojo lists what no kernel awaits"
    check_header(world, range(n_ranks), len(steps))


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


_QUANTIZE = {
    "fp8": quantize_blockwise_fp8,
    "nvfp4": quantize_nvfp4,
    "mxfp4": quantize_mxfp4,
}


@pytest.mark.parametrize(
    "name", ["fp8", "nvfp4", "nvfp4_tiles", "nvfp4_short", "mxfp4_short"]
)
def test_tokens_are_quantized(name):
    """Bit for bit as the oracle; the last scales of a token do not fill 16 bytes."""
    world = World(name)
    tokens, ids, weights = draw(world.sizes, [5, 3, 4], 0)
    tokens[0][:, :16] = 0
    tokens[0][:, 16:32] = 6 * 2.0**-9  # The smallest scale of nvfp4 is 2**-9.
    outputs = world.dispatch(tokens, ids, weights)
    for rank, output in outputs.items():
        offsets, _, info = output.read()
        flat = [x for of_expert in rows_of(rank, ids, world.sizes) for x in of_expert]
        assert [tuple(x) for x in info.tolist()] == [x[1:] for x in flat]
        given = np.stack([tokens[src][token] for src, token, _ in flat])
        quantize = _QUANTIZE[name.partition("_")[0]]
        values, scales = (x.view(np.uint8) for x in quantize(given.astype(np.float32)))
        found = world.memory.array(output.rows, np.uint8, *values.shape)
        np.testing.assert_array_equal(found, values)
        if name == "fp8":
            n_blocks, n = world.sizes.hidden // 128, output.n_rows_max
            shape = n_blocks, n, 4
            of_blocks = world.memory.array(output.scales, np.uint8, *shape)
            found = of_blocks.transpose(1, 0, 2).reshape(n, -1)
        elif name == "nvfp4_tiles":
            n_blocks = scales.shape[1]
            shape = output.n_rows_max // 128 + world.sizes.n_local, n_blocks // 4
            tiles = world.memory.array(output.scales, np.uint8, *shape, 32, 4, 4)
            found = scales_of_tiles(tiles, offsets, n_blocks)
        else:
            n, *row = scales.shape
            found, behind = np.split(
                world.memory.array(output.scales, np.uint8, n + 1, *row), [n]
            )
            assert (behind == POISON).all()
        np.testing.assert_array_equal(found, scales)


def test_quantized_tokens_are_forwarded():
    """Values and scales arrive as they are given; the last scales of a token do not
    fill 16 bytes. This rank's own tokens are read where they are given."""
    world = World("nvfp4_forwarded")
    n_tokens, n_values, n_scales = [5, 3, 4], 576, 72
    tokens, ids, weights = draw(world.sizes, n_tokens, 0)
    for rank, n in enumerate(n_tokens):
        draw_of = np.random.default_rng(rank)
        x = draw_of.normal(size=(n, 2 * n_values)).astype(np.float32)
        values, scales = (of.view(np.uint8) for of in quantize_nvfp4(x))
        tokens[rank] = np.zeros((n, world.sizes.hidden), np.uint8)
        tokens[rank][:, :n_values] = values
        tokens[rank][:, n_values:][:, :n_scales] = scales
    for rank, output in world.dispatch(tokens, ids, weights).items():
        info = output.read()[-1]
        flat = [x for of_expert in rows_of(rank, ids, world.sizes) for x in of_expert]
        assert [tuple(x) for x in info.tolist()] == [x[1:] for x in flat]
        given = np.stack([tokens[src][token] for src, token, _ in flat])
        found = world.memory.array(output.rows, np.uint8, len(flat), n_values)
        np.testing.assert_array_equal(found, given[:, :n_values])
        found = world.memory.array(output.scales, np.uint8, len(flat), n_scales)
        np.testing.assert_array_equal(found, given[:, n_values:][:, :n_scales])


def test_tokens_in_chunks():
    """Choices that blocks share, then so many that blocks index them; launches that
    only send or receive. Of one source all tokens are inline, of the other none."""
    world = World("many")
    run_steps(world, [([65, 5], 1), ([257, 1], 1)], n_wrong=0.985)
    check_header(world, range(2), 2)


def test_choices_of_an_expert_stand_together():
    """The last choice of a token, and the first of the next. Blocks share so many, and
    count the choices before each. Fails if they count one too few."""
    world = World("many")
    tokens, ids, weights = draw(world.sizes, [20, 1], 0, n_wrong=1)
    for token in range(19):
        ids[0][token, -1] = ids[0][token + 1, 0] = token % 4
    ids[0][19, -1] = 4
    check_step(world, world.dispatch(tokens, ids, weights), tokens, ids, weights)
    check_header(world, range(2), 1)


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


def test_parts_of_a_sum_are_counted_in_all_rounds():
    """So few sums that warps of a block stage parts of each, and a block has two for
    other hosts. Fails if a part is counted for the sum of another round."""
    world = World("hosts_sums")
    run_steps(world, [([2, 2, 2, 2], 1)], n_wrong=0)
    check_header(world, range(4), 1)


@pytest.mark.parametrize("name", ["masks", pytest.param("masks_rows", marks=slow)])
def test_a_rank_is_masked_and_comes_back(name):
    world = World(name, timeout_ms=MASKED_MS)
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


@pytest.mark.parametrize("name", ["masks", "masks_rows"])
def test_a_masked_rank_is_sent_nothing(name):
    """It is masked after its tokens have come. What is recorded of them may be of an
    older dispatch."""
    world = World(name, timeout_ms=MASKED_MS)
    tokens, ids, weights = draw(world.sizes, [3, 2, 4], 0, n_wrong=0)
    outputs = world.dispatch(tokens, ids, weights)
    for rank in (0, 1):
        at = world.counters[rank] + 4 * world.sizes.masked
        world.memory.stores[4](at + 4 * 2, 1)
    first = world.regions[2] + world.sizes.combine_recv
    recv = slice(first, world.regions[2] + world.sizes.combine_counts)
    before = bytes(world.memory.bytes[recv])
    world.combine({rank: outputs[rank] for rank in (0, 1)}, weights)
    assert bytes(world.memory.bytes[recv]) == before


@pytest.mark.parametrize("name", ["masks", "masks_rows"])
def test_what_a_masked_rank_sends_is_left_out(name):
    """It is masked after all has come from it, but for the combine, whose rows or sums
    are there already."""
    world = World(name, timeout_ms=MASKED_MS)
    tokens, ids, weights = draw(world.sizes, [3, 2, 4], 0, n_wrong=0)
    outputs = world.dispatch(tokens, ids, weights)
    stays = check_rows(world, outputs, tokens, ids)
    world.combine({rank: outputs[rank] for rank in (1, 2)}, weights)
    world.memory.stores[4](world.counters[0] + 4 * (world.sizes.masked + 1), 1)
    results = world.combine({0: outputs[0]}, weights)
    left = {x for x in stays if ids[x[0]][x[1:]] // world.sizes.n_local != 1}
    check_results(world, results, tokens, ids, weights, left)


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


@pytest.mark.parametrize(
    "name, more",
    [
        ("drops", []),
        pytest.param("drops_rows", [], marks=slow),
        pytest.param("hosts_drops", [3], marks=slow),
    ],
)
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


@pytest.mark.parametrize("name, most", [("late_split", 20), ("keeps", 5)])
def test_rows_may_change_after_they_are_sent(name, most):
    """Where weights come late, a launch that only sends keeps its rank's own sums; of
    rows it sends its rank's own, too."""
    world = World(name)
    given = draw(world.sizes, [most, 3, 4], 0)
    outputs = world.dispatch(*given)
    stays, run = check_rows(world, outputs, *given[:2]), world.run

    def change(phase, params):
        run(phase, params)
        for output in outputs.values() if phase.startswith("combine_async") else []:
            n_bytes = 2 * output.n_rows_max * world.sizes.hidden
            world.memory.bytes[output.made : output.made + n_bytes] = b"\xff" * n_bytes

    world.run = change
    check_results(world, world.combine(outputs, given[2]), *given, stays)


@pytest.mark.parametrize(
    "name", ["long", "wide", pytest.param("hosts_relay_long", marks=slow)]
)
def test_more_than_goes_at_once(name):
    """Tokens of more steps than a lane loads at once, more pairs and experts than a
    warp has lanes for, more choices than rows in flight. Fails if the second round of a
    loop is wrong."""
    world = World(name)
    n_ranks = world.sizes.n_ranks
    run_steps(world, [([1, 0, 2] if n_ranks == 3 else [1, 0, 1, 0], 1)], n_wrong=0)
    check_header(world, range(n_ranks), 1)


@pytest.mark.parametrize("name", ["hosts_sums", "hosts_rows"])
def test_hosts_that_nvlink_joins(name):
    """Where SHMEM has mapped other hosts' memory, a warp copies what it would put."""
    world = World(name)
    world.link.is_nvlink = True
    run_steps(world, [([5, 2, 1, 0], 1)])
    check_header(world, range(world.sizes.n_ranks), 1)


@slow
def test_more_weights_than_threads():
    """A block publishes late weights in two rounds. Fails if the second is lost."""
    world = World("late_wide")
    world.n_blocks = 1
    run_steps(world, [([12, 1, 2], 1)], n_wrong=0.9)
    check_header(world, range(3), 1)


@slow
def test_as_many_tokens_as_are_inline():
    """A source has as many, another one more. Fails if a source and its receiver do not
    agree on which tokens are their own flags."""
    world = World("many")
    run_steps(world, [([256, 257], 1)], n_wrong=0.985)
    check_header(world, range(2), 1)


@pytest.mark.parametrize("name", ["padded", "padded_expert"])
def test_rows_are_padded(name):
    """Each expert has rows of its own, and tables say which of them are whose."""
    world = World(name)
    s = world.sizes
    for step, counts in enumerate([[5, 2, 4], [0, 5, 1]]):
        given = draw(s, counts, step)
        n_rows = s.n_local * s.n_ranks * s.max_tokens
        outputs = world.dispatch(*given, n_rows_max=n_rows)
        check_step(world, outputs, *given)
        for rank, output in outputs.items():
            shape = s.n_local, s.n_ranks, 2
            ranges = world.memory.array(output.expert_ids, np.int32, *shape)
            for found, of_expert in zip(ranges, rows_of(rank, given[1], s)):
                sources = [x[0] for x in of_expert]
                n_of = [sources.count(src) for src in range(s.n_ranks)]
                np.testing.assert_array_equal(found[:, 1], n_of)
                np.testing.assert_array_equal(found[:, 0], np.cumsum([0, *n_of[:-1]]))
    check_header(world, range(s.n_ranks), 2)


def test_tokens_are_scaled_for_each_expert():
    """`scale_of` in `emulated.mojo`: another power of two for each. Fails if a scale is
    that of another expert, as of one that has the same number on another rank."""
    world = World("expert_scaled")
    for step, counts in enumerate([[5, 2, 4], [0, 5, 1]]):
        tokens, ids, weights = draw(world.sizes, counts, step)
        for rank, output in world.dispatch(tokens, ids, weights).items():
            _, rows, info = output.read()
            of_experts = rows_of(rank, ids, world.sizes)
            experts = world.sizes.experts_of(rank)
            flat = [(e, *row) for e, of in zip(experts, of_experts) for row in of]
            assert info.tolist() == [[token, k] for _, _, token, k in flat]
            scaled = [tokens[src][token] * 2.0**e for e, src, token, _ in flat]
            np.testing.assert_array_equal(rows, scaled)
