# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of small groups that fail: what is lost, wrong or too much is named, and
never used.
"""

import numpy as np
import pytest

from max_ep.quantize import quantize_nvfp4
from max_ep.waits import named, place
from tests.codegen.kernels import counter_word, mojo_constant
from tests.emulator.emulated_world import FORMS, World, bf16, rows_of, words
from tests.emulator.memory import POISON
from tests.emulator.steps import (
    MASKED_MS,
    RECEIVE,
    SEND,
    check_results,
    check_rows,
    code_of,
    draw,
    failure,
)

LATE_MS = 100
"""A warp polls once in a millisecond."""
OTHER_GENERATION = 3
COMBINE_ASYNC = int(mojo_constant("COMBINE_ASYNC", "max_ep/protocol/peer_words.mojo"))
BAD_SOURCE, NO_COUNT, NO_MESSAGE = map(
    code_of, ("BAD_SOURCE", "NO_COUNT", "NO_MESSAGE")
)
NOT_READ = code_of("NOT_READ")
OTHER_ROWS, TOO_MANY_ROWS = code_of("OTHER_ROWS"), code_of("TOO_MANY_ROWS")
WRONG_COUNTERS, WRONG_EXPERT = code_of("WRONG_COUNTERS"), code_of("WRONG_EXPERT")


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


@pytest.mark.parametrize("name", ["sums", "expert", "rows"])
def test_nothing_is_sent_to_who_has_not_read(name):
    """Rank 0 has not read dispatch 1: rank 1 gives up, and writes nothing to others but
    what it has read itself."""
    world = World(name, timeout_ms=MASKED_MS, finds_races=False)
    given, memory = draw(world.sizes, [3, 2, 3], 1), world.memory
    world.combine(world.dispatch(*given), given[2])
    done = named(world.words.gpu, "done word of dispatch")
    memory.stores[8](world.regions[1] + place(done, 0, 0), 0)
    memory.stores[4](world.counters[1] + 4 * counter_word("DISPATCH_DRAINED"), 0)

    def read(rank: int) -> bytes:
        region = memory.bytes[world.regions[rank] :][: world.sizes.region]
        region[place(done, 1, 0) : place(done, 2, 0)] = bytes(8)
        return bytes(region)

    before = read(0), read(2)
    world.dispatch(*given, FORMS[name][:1], ranks=[1])
    assert failure(world, 1)[:6] == [NOT_READ, SEND, 0, -1, 1, 0]
    assert world.word(1, "BROKEN")
    assert before == (read(0), read(2))


@pytest.mark.parametrize("name", ["sums", "expert", "rows"])
def test_a_late_reader_is_awaited(name):
    """Rank 1 learns after so many polls that each of its warps has read the clock that
    rank 0 has read what it sent last."""
    world = World(name, timeout_ms=MASKED_MS, finds_races=False)
    given, memory, clock = draw(world.sizes, [3, 2, 3], 1), world.memory, world.clock
    world.combine(world.dispatch(*given), given[2])
    done = named(world.words.gpu, "done word of dispatch")
    at, load, end = world.regions[1] + place(done, 0, 0), memory.load_8, 0
    memory.load_8 = lambda x: 0 if x == at and clock.ns < end else load(x)
    for drained in ("DISPATCH_DRAINED", "COMBINE_DRAINED"):
        memory.stores[4](world.counters[1] + 4 * counter_word(drained), 0)
        end = clock.ns + LATE_MS * 1_000_000
        if drained == "DISPATCH_DRAINED":
            outputs = world.dispatch(*given)
        else:
            results = world.combine(outputs, given[2])
        assert clock.ns > end
        assert not any(failure(world, rank)[0] for rank in range(3))
    check_rows(world, outputs, *given[:2])
    check_results(world, results, *given)


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


@pytest.mark.parametrize("name", ["late", "late_split"])
def test_a_weight_that_does_not_come_is_named(name):
    """The owner of a row gives up, and says which rank owes the weight."""
    world = World(name, timeout_ms=MASKED_MS, finds_races=False)
    given = draw(world.sizes, [3, 0, 0], 0, n_wrong=0)
    outputs = world.dispatch(*given)
    world.combine({1: outputs[1], 2: outputs[2]}, given[2])
    code, phase, missing_rank, _, wanted, *_ = failure(world, 1)
    assert (code, phase, missing_rank, wanted) == (NO_MESSAGE, COMBINE_ASYNC, 0, 1)
