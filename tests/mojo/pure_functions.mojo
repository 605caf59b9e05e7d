# SPDX-License-Identifier: Apache-2.0
"""Positions, schedules, splits and words of GPU kernels, which are pure functions.

Prints OK, or raises. Run by `checks.mojo`.
"""
from max.gpu import WARP_SIZE
from max_ep.combine_sums.roles import sum_receive_schedule
from max_ep.protocol.addressing import Addressing
from max_ep.protocol.counters import Counters
from max_ep.device.schedule import chunk_of, InlineSplit, Schedule
from max_ep.dispatch_by_expert.send import SendSchedule
from max_ep.dispatch_by_rank.row_offsets import pair_of_lane
from max_ep.protocol.entries import (
    entry_word,
    expert_of_entry,
    position_of_entry,
    value_of_word,
    value_word,
)
from max_ep.dispatch_by_rank.index_large import run_of_block
from max_ep.dispatch_by_rank.roles import (
    chunks_at_once_shift,
    N_INDEX_WARPS,
    N_WARPS_MIN,
    token_receive_schedule,
)
from max_ep.protocol.flags import (
    count_of,
    flag_word,
    generation_of,
    is_not_before,
    next_generation,
)
from max_ep.formats.quantized_sums import QuantizedSums
from max_ep.formats.table import NumbersOf
from max_ep.formats.unused_words import unused_bytes, unused_scales, unused_values
from max_ep.protocol.layout import Group, N_CHUNKS
from max_ep.protocol.token_format import BytePointer, LaneBytes, SENTINEL
from std.testing import assert_equal, assert_not_equal, assert_true

comptime NUM_THREADS = 512

comptime GROUP_OF[n_ranks: Int] = Group(
    n_experts=n_ranks,
    n_ranks=n_ranks,
    max_tokens_per_rank=1,
    top_k=1,
    addressing=Addressing.BY_RANK,
)


def check_chunks_at_once() raises:
    """Chunks that are sent at once are whole steps, also of a token of 3 chunks."""
    comptime group = GROUP_OF[2]
    comptime for n_steps in [1, 2, 3, N_CHUNKS, 28]:
        comptime n_chunks = min(N_CHUNKS, n_steps)
        for n_senders in range(1, NUM_THREADS // 32 + 1):
            for n_tokens in [257, 4096]:
                var shift = chunks_at_once_shift[group, n_steps](n_tokens, n_senders)
                assert_equal(n_chunks >> shift << shift, n_chunks)


def check_schedules() raises:
    """Each item is one warp's; index warps have none of few."""
    for n_warps in [N_WARPS_MIN, NUM_THREADS // 32]:
        for n_blocks in [1, 7, 132]:
            var n_received = List[Int](
                length=(n_warps - N_INDEX_WARPS) * n_blocks, fill=0
            )
            var n_added = List[Int](length=3 * n_warps * n_blocks, fill=0)
            for warp in range(n_warps):
                var received = token_receive_schedule(warp, n_warps)
                assert_equal(received.stride * n_blocks, len(n_received))
                var added = sum_receive_schedule(warp, n_warps)
                for block in range(n_blocks):
                    var item = Schedule.item(received.first, block, n_blocks)
                    if warp < n_warps - N_INDEX_WARPS:
                        n_received[item] += 1
                    else:
                        assert_true(item >= len(n_received))
                    for i in range(3):
                        var round = added.first + i * added.stride
                        n_added[Schedule.item(round, block, n_blocks)] += 1
            for n in n_received:
                assert_equal(n, 1)
            for n in n_added:
                assert_equal(n, 1)


def check_choices_by_expert() raises:
    """The items of a token are all of its choices, in order."""
    for top_k in [1, 3, 8]:
        for n_tokens in [0, 1, 5, 300]:
            var schedule = SendSchedule.of(n_tokens, top_k, n_blocks=132)
            var choice = 0
            for item in range(schedule.n_items):
                var token_idx = schedule.token(item)
                var first_k = schedule.first_k(item, top_k)
                assert_equal(token_idx * top_k + first_k, choice)
                choice += schedule.first_k(item, top_k, 1) - first_k
            assert_equal(choice, n_tokens * top_k)


def check_split[n_steps: Int]() raises:
    """The chunks of a token are all of its steps, in order."""
    for are_more in [True, False]:
        var split = InlineSplit[n_steps](are_more)
        var step = 0
        for number in range(5 * split.n_chunks()):
            var chunk = split.chunk(number)
            assert_equal(chunk.whole * n_steps + chunk.begin, step)
            assert_true(chunk.begin < chunk.end)
            assert_true(chunk.end - chunk.begin <= split.most_steps)
            assert_equal(chunk.whole * split.n_chunks() + chunk.idx, number)
            step += chunk.end - chunk.begin
        assert_equal(step, 5 * n_steps)


def check_bundles[n_steps: Int]() raises:
    """What a warp sends at once is, together, all steps, in order."""
    for n_bundles in [1, 2, N_CHUNKS]:
        var step = 0
        for i in range(n_bundles):
            var chunk = chunk_of[n_steps](7, i, n_bundles)
            assert_equal(chunk.whole, 7)
            assert_equal(chunk.begin, step)
            step = chunk.end
        assert_equal(step, n_steps)


def check_runs_of_blocks() raises:
    """Runs are all choices, in order; the last of several blocks has none."""
    for n_blocks in [1, 2, 7, 132]:
        for n_choices in [0, 1, 131, 132, 4097]:
            var choice = 0
            for block in range(n_blocks):
                var begin, end = run_of_block(n_choices, block, n_blocks)
                assert_equal(begin, choice)
                assert_true(end == begin or block < max(n_blocks - 1, 1))
                choice = end
            assert_equal(choice, n_choices)


def check_peers_and_pairs() raises:
    """Each rank comes once, the own one last; each pair has one place in a warp."""
    comptime group = Group(n_experts=5, n_ranks=5, max_tokens_per_rank=1, top_k=1)
    for my_rank in range(5):
        for n in range(1, 6):
            var rank = group.rank_of_relative(my_rank, n)
            assert_equal(rank, (my_rank + n) % 5)
            assert_equal(group.relative_rank(my_rank, rank), n % 5)
    var n_of = List[Int](length=8 * WARP_SIZE, fill=0)
    for lane in range(WARP_SIZE):
        for i in range(8):
            n_of[pair_of_lane(512, i, lane) - 512] += 1
            assert_equal(pair_of_lane(0, i, lane) % 2, i % 2)
    for n in n_of:
        assert_equal(n, 1)


def check_words() raises:
    """What is put into a word comes out of it, and touches nothing else."""
    for generation in [UInt32(1), UInt32(7), UInt32.MAX]:
        for count in [0, 1, 0xFFFF_FFFF]:
            var word = flag_word(generation, count)
            assert_equal(generation_of(word), generation)
            assert_equal(count_of(word), count)
        for expert in [0, 1, 255, 65534]:
            for position in [0, 3, 65535]:
                var entry = entry_word(generation, expert, position)
                assert_equal(generation_of(entry), generation)
                assert_equal(expert_of_entry(entry), expert)
                assert_equal(position_of_entry(entry), position)
        for weight in [Float32(0), Float32(-0.25), Float32(3e38)]:
            var word = value_word(generation, weight)
            assert_equal(generation_of(word), generation)
            assert_equal(value_of_word[DType.float32](word), weight)
        for expert in [Int32(-1), Int32(0), Int32.MAX, Int32.MIN]:
            var word = value_word(generation, expert)
            assert_equal(generation_of(word), generation)
            assert_equal(value_of_word[DType.int32](word), expert)


def check_two_dispatches_are_kept() raises:
    """What is kept of one generation and the next stands apart, also as they wrap."""
    comptime group = Group(n_experts=1, n_ranks=2, max_tokens_per_rank=3, top_k=2)
    var counters = Counters[group]({unsafe_from_address = 4096})
    for first in [UInt32(1), UInt32(2), UInt32.MAX]:
        var second = next_generation(first)
        assert_true(counters.n_tokens_of(first) != counters.n_tokens_of(second))
        var of_first = Int(counters.choices(first))
        var of_second = Int(counters.choices(second))
        var slots = Int(counters.slots())
        for distance in [of_first - of_second, of_first - slots, of_second - slots]:
            assert_true(abs(distance) >= 4 * group.n_choices())


def check_generations() raises:
    """They wrap from the largest to 2, and are compared across that."""
    assert_equal(next_generation(0), 1)
    assert_equal(next_generation(1), 2)
    assert_equal(next_generation(UInt32.MAX), 2)
    for generation in [UInt32(2), UInt32(1000), UInt32.MAX]:
        var next = next_generation(generation)
        assert_true(is_not_before(generation, generation))
        assert_true(is_not_before(next, generation))
        assert_true(not is_not_before(generation, next))


def check_scales_of_lanes[block: Int]() raises:
    """Each lane of a warp finds the scale of its block, as a CPU rank does."""
    comptime Sums = QuantizedSums[block, 512]
    var sum = List[Float32](length=512, fill=0)
    for i in range(512):
        sum[i] = Float32(i + 1) * Float32(1 << (i // block))
    var message = List[LaneBytes](length=33, fill=0)
    var bytes = BytePointer(unsafe_from_address=Int(message.unsafe_ptr()))
    Sums.encode(bytes, sum)
    for lane in range(32):
        var values = bytes.unsafe_load[width=16](16 * lane)
        var scale = Sums.scale_of_lane(message[32], lane)
        var zero = SIMD[DType.float32, 16](0)
        var found = Sums.add_values[16](zero, values, scale)
        assert_equal(found, Sums.add[16](zero, bytes, 16 * lane))
        assert_true(abs(found[5] / sum[16 * lane + 5] - 1) < 0.07)
    _ = message^


def check_unused_words[name: StaticString]() raises:
    """No values, scales or bytes look as if they had not arrived: what is unused is
    replaced by what is used."""
    comptime Numbers = NumbersOf[name]
    for word in [unused_values[Numbers](), unused_bytes[Numbers]()]:
        var known = Numbers.known_values(word)
        assert_not_equal(known, word)
        assert_equal(Numbers.known_values(known), known)
    for word in [unused_scales[Numbers](), unused_bytes[Numbers]()]:
        var known = Numbers.known_scales(word)
        assert_not_equal(known, word)
        assert_equal(Numbers.known_scales(known), known)


def main() raises:
    check_bundles[28]()
    check_bundles[5]()
    check_runs_of_blocks()
    check_peers_and_pairs()
    check_words()
    check_generations()
    check_two_dispatches_are_kept()
    check_chunks_at_once()
    check_schedules()
    check_choices_by_expert()
    check_split[28]()
    check_split[15]()
    check_split[5]()
    check_scales_of_lanes[128]()
    check_scales_of_lanes[32]()
    check_unused_words["fp8_power_of_two"]()
    check_unused_words["mxfp8"]()
    check_unused_words["nvfp4_dynamic"]()
    check_unused_words["mxfp4_forwarded"]()
    # docs/decisions/0026-what-no-token-has.md
    assert_equal(unused_values[NumbersOf["nvfp4"]](), 0x8888_8888)
    assert_equal(unused_scales[NumbersOf["mxfp8"]](), 0xFEFE_FEFE)
    assert_equal(unused_scales[NumbersOf["nvfp4"]](), SENTINEL)
    print("OK")
