# SPDX-License-Identifier: Apache-2.0
"""The model follows the code: words, atomics and their orders, calls, phases.

Each test fails if the Mojo sources gain or lose something that the model, or a table
here that says why it may lack it, does not know. Then read `docs/model.md`, "When the
code changes".
"""

from __future__ import annotations

import re

import pytest
from model import cpu, expert_slots, rank_slots, sources, worlds
from model.exploration import Machine
from model.launches import BLOCK_WORDS, CALLS, LOCAL_WORDS, PUT_BACK, RANK_WORDS
from model.memory import EMPTY, Order, Step
from model.mutations import COUNTED_IN

DEALS_OUT = "deals out numbers, or adds up what is read behind a barrier"
FIRST_LOOK = "a first look of the wait in `_await_16`; the model has one"
LATER_LOOK = "a later look of the wait that `_look_at_steps` begins; the model has one"
FAILS = "how launches fail is not modelled: a wait that does not end is an error"
HOSTS = "ranks of several hosts are not modelled"
WATCHES = "looks, and nothing is built on what it sees: the wait behind it looks again"

ATOMICS_LEFT_OUT = {"raise_to": FAILS, "order_before_put": HOSTS}

CALLS_LEFT_OUT = {
    ("expert_slots/device_steps.mojo: take_turn", "block_add"): DEALS_OUT,
    ("expert_slots/dispatch.mojo: _count_choices", "block_add"): DEALS_OUT,
    ("rank_slots/index.mojo: _count_id", "block_add"): DEALS_OUT,
    ("rank_slots/index.mojo: _index_by_blocks", "block_publish"): FAILS,
    ("rank_slots/index.mojo: _index_by_blocks", "block_peek"): FAILS,
    ("rank_slots/combine_receive.mojo: _look_at_partial", "peek_16"): FIRST_LOOK,
    ("rank_slots/dispatch_receive.mojo: _await_steps", "peek_16"): LATER_LOOK,
    ("rank_slots/row_counts.mojo: _count_rows", "block_publish"): FAILS,
    # Of the count that is missing, to say so.
    ("rank_slots/row_counts.mojo: _read_counts", "peek_number"): FAILS,
    ("failures.mojo: note_failure", "raise_to"): FAILS,
    ("transport.mojo: put_flag", "order_before_put"): HOSTS,
    ("watch.mojo: _is_there", "peek"): WATCHES,
    ("watch.mojo: _is_there", "peek_16"): WATCHES,
    ("watch.mojo: watch_cpu", "peek"): WATCHES,
}
# How often a function calls an atomic, where it is more than once and not modelled
# call by call: a third call would be a step that the model lacks.
CALLED_OFTEN = {
    ("rank_slots/dispatch_send.mojo: _store_steps", "put_16"): 2,  # values, scales
    # COUNTED, FAILED.
    ("rank_slots/dispatch_receive.mojo: _are_counted", "block_peek"): 2,
    # Again, for its value; and for rows of the shared expert, beside a sending half.
    ("rank_slots/dispatch.mojo: _receive", "block_peek"): 3,
    ("rank_slots/dispatch.mojo: _await_send_tokens", "look_at"): 2,  # and again
    ("rank_slots/device_steps.mojo: await_readers", "peek"): 2,
    ("rank_slots/row_counts.mojo: read_numbers", "peek_number"): 2,
    # COUNTED, FAILED.
    ("rank_slots/row_counts.mojo: lay_out_rows", "block_peek"): 2,
    ("rank_slots/row_counts.mojo: _count_rows", "block_arrive"): 2,  # SUMMED, COUNTED
    ("rank_slots/row_counts.mojo: _count_rows", "block_publish"): 2,  # FAILED
    ("cpu/dispatch.mojo: _publish_counts", "publish"): 2,
    ("expert_slots/device_steps.mojo: await_done_words", "peek"): 2,
    ("expert_slots/device_steps.mojo: await_message", "peek"): 2,
    ("expert_slots/dispatch.mojo: read_counts", "peek_number"): 2,
    ("expert_slots/dispatch.mojo: _receive_half", "block_peek"): 2,
    ("cpu/rank.mojo: await_readers", "peek"): 2,
    ("cpu_copy.mojo: for_each_chunk", "drain_stores"): 2,  # inline, in a worker
    ("watch.mojo: _is_there", "peek"): 2,  # a count, or a row's flag
}

WORDS_LEFT_OUT = {"dispatch_put": HOSTS, "combine_put": HOSTS}
# Not located by `layout.mojo`: they stand inside of a message.
WORDS_INSIDE = {"dispatch_message_flag", "combine_message_flag"}

HEADER_LEFT_OUT = {
    "magic": "does not change",
    "my_rank": "does not change",
    "timeout_ms": "does not change",
    "layout": "does not change",
    "n_dropped": "a tally",
    "src_info_hash": "CPU ranks: a check of arguments",
    "broken": FAILS,
    "failure": FAILS,
    "n_fields": "a size",
    "n_header_words": "a size",
    "n_failure_words": "a size",
}

CONTROL_LEFT_OUT = {
    "FAILED": FAILS,
    "GAVE_UP": FAILS,
    "NO_NUMBERS": FAILS,
    "NEXT_ITEM": DEALS_OUT,
    "NEXT_TURN": DEALS_OUT,
    "NEXT_PART": DEALS_OUT,
    "NEXT_ROW": DEALS_OUT,
    "SEND": "the name of a phase",
    "RECEIVE": "the name of a phase",
    "NUMBERS_WARP": "an agent: numbers warp",
    "TELLING_WARP": "an agent: telling warp",
    "COUNTING_WARP": "an agent: counting warp",
    "FIRST_SENDER": "an agent: sender",
    "N_INDEX_WARPS": "a number",
    "N_CONTROL": "a number",
    "N_WARPS_MIN": "a number",
}
# Words that are noted, but not by name in the model.
NOTES_LEFT_OUT = {"broken": FAILS, "src_info_hash": "CPU ranks: a check of arguments"}

# At the begin, beside a sending half or not, or at the end of a launch; of a pair and
# of all of them.
NOTED_OFTEN = {
    ("rank_slots/combine.mojo: combine_wait_kernel", "combine_received"): 3,
    ("rank_slots/dispatch.mojo: dispatch_wait_kernel", "dispatch_received"): 3,
    ("rank_slots/row_counts.mojo: lay_out_rows", "pair_rows"): 2,
    ("expert_slots/dispatch.mojo: read_counts", "pair_rows"): 2,
    ("cpu/plan.mojo: lay_out_rows", "pair_rows"): 2,
}

# The model takes these for granted: one of its agents is a warp that is in step, or a
# block behind its barrier. Where one is missing, lanes or warps are out of step.
BARRIERS = {
    ("expert_slots/combine.mojo: _reduce_tokens", "syncwarp"): 1,
    ("expert_slots/combine.mojo: _send_rows", "syncwarp"): 1,
    ("expert_slots/combine.mojo: _share_pairs", "barrier"): 1,
    ("expert_slots/combine.mojo: combine_wait_kernel", "barrier"): 1,
    ("expert_slots/device_steps.mojo: await_done_words", "syncwarp"): 1,
    ("expert_slots/device_steps.mojo: is_last_block", "barrier"): 1,
    ("expert_slots/device_steps.mojo: publish_done", "syncwarp"): 1,
    ("expert_slots/dispatch.mojo: _index_choices", "syncwarp"): 3,
    ("expert_slots/dispatch.mojo: _receive_half", "syncwarp"): 1,
    ("expert_slots/dispatch.mojo: _send", "barrier"): 1,
    ("expert_slots/dispatch.mojo: _send_half", "syncwarp"): 1,
    ("expert_slots/dispatch.mojo: dispatch_kernel", "barrier"): 1,
    ("expert_slots/dispatch.mojo: dispatch_wait_kernel", "barrier"): 1,
    ("expert_slots/dispatch.mojo: read_counts", "syncwarp"): 3,
    ("rank_slots/device_steps.mojo: await_readers", "syncwarp"): 1,
    ("rank_slots/device_steps.mojo: note_readers", "syncwarp"): 1,
    ("rank_slots/device_steps.mojo: publish_reads", "syncwarp"): 1,
    ("rank_slots/device_steps.mojo: start_launch", "barrier"): 1,
    ("rank_slots/dispatch.mojo: _receive", "syncwarp"): 2,
    ("rank_slots/dispatch.mojo: _send", "syncwarp"): 1,
    ("rank_slots/dispatch_send.mojo: _send_tokens_in_chunks", "syncwarp"): 1,
    ("rank_slots/index.mojo: _index_by_blocks", "index_barrier"): 4,
    ("rank_slots/row_counts.mojo: _count_rows", "syncwarp"): 3,
    ("rank_slots/row_counts.mojo: _read_counts", "syncwarp"): 1,
    ("watch.mojo: watch_kernel", "barrier"): 3,  # of a launch of its own
}
# Each kernel of `rank_slots` begins with it: launches may overlap.
AWAITS_LAUNCH_BEFORE = "await_launch_before"

# What those do instead whose halves overlap.
_DISPATCH_ASYNC = "rank_slots/dispatch.mojo: dispatch_async_kernel"
_DISPATCH_WAIT = "rank_slots/dispatch.mojo: dispatch_wait_kernel"
_COMBINE_ASYNC = "rank_slots/combine.mojo: combine_async_kernel"
_COMBINE_WAIT = "rank_slots/combine.mojo: combine_wait_kernel"
WAITING_HALVES = (_DISPATCH_WAIT, _COMBINE_WAIT)
HALVES_OVERLAP = {
    (_DISPATCH_ASYNC, "await_kernels_before"): 1,
    (_DISPATCH_ASYNC, "let_next_begin"): 1,
    (_COMBINE_ASYNC, "await_kernels_before"): 1,
    (_COMBINE_ASYNC, "let_next_begin"): 1,
    # At each of their ends.
    (_DISPATCH_WAIT, "await_kernels_before"): 2,
    (_DISPATCH_WAIT, "let_next_begin"): 1,
    (_DISPATCH_WAIT, "header_word_beside"): 1,
    (_DISPATCH_WAIT, "await_sending_half"): 1,
    (_COMBINE_WAIT, "await_kernels_before"): 2,
    (_COMBINE_WAIT, "let_next_begin"): 1,
    (_COMBINE_WAIT, "header_word_beside"): 1,
    (_COMBINE_WAIT, "await_sending_half"): 1,
    ("rank_slots/device_steps.mojo: await_launch_before", "let_next_begin"): 1,
    ("rank_slots/device_steps.mojo: await_launch_before", "await_kernels_before"): 1,
    ("rank_slots/device_steps.mojo: is_last_to_start", "arrive_in_half"): 1,
}

# Of `gather`, what waits for the second stream, and what does so behind itself if its
# own tokens are in it: MAX may give their memory to what follows.
SECOND_STREAM = {
    ("gpu_launch.mojo: launch_send_tokens", "_await_sent_tokens"): 1,
    ("gpu_launch.mojo: launch_send_tokens", "fork"): 1,
    ("gpu_launch.mojo: launch_dispatch_async", "_check_sent_tokens"): 1,
    ("gpu_launch.mojo: launch_dispatch_async", "join"): 1,
    ("gpu_launch.mojo: launch_dispatch_wait", "_await_sent_tokens"): 1,
    ("gpu_launch.mojo: launch_dispatch", "_check_sent_tokens"): 1,
    ("gpu_launch.mojo: launch_dispatch", "join"): 1,
    ("gpu_launch.mojo: launch_combine_async", "_await_sent_tokens"): 1,
    ("gpu_launch.mojo: launch_combine_wait", "_await_sent_tokens"): 1,
    ("gpu_launch.mojo: launch_combine", "_await_sent_tokens"): 1,
    ("gpu_launch.mojo: _await_sent_tokens", "join"): 1,
    ("gpu_launch.mojo: _check_sent_tokens", "join"): 1,
    ("gpu_setup.mojo: clear_gpu", "join"): 1,
    # A dispatch leaves multiprocessors to a `send_tokens` that has not begun.
    ("gpu_launch.mojo: launch_send_tokens", "_n_side_blocks"): 1,
    ("gpu_launch.mojo: _n_dispatch_blocks", "_n_side_blocks"): 1,
    ("gpu_launch.mojo: launch_dispatch_async", "_n_dispatch_blocks"): 1,
    ("gpu_launch.mojo: launch_dispatch", "_n_dispatch_blocks"): 1,
}

# What a function does in this order; between two of them may be more.
_STARTS = (
    "header_word(",
    # Of an all-gather the choices say which ranks there are.
    "Choices[",
    "n_ranks if token_fmt_type.n_carried > 0 else 0",
    "_look_ahead[",
    "share_choices[",
    "receivers[",
    "](ahead.id, word)",
    "start_launch[",
)
_MOVES = (
    "if tokens_are_sent:",
    "_await_send_tokens(",
    "set_n_tokens(",
)
# The kernels before have ended when the next may begin.
_SENDS_BESIDE = (
    "comptime if halves_overlap:",
    "await_kernels_before()",
    "let_next_begin()",
    "else:",
    "await_launch_before()",
)
_WAITS_BESIDE = (
    "comptime if halves_overlap:",
    "let_next_begin()",
    "word = header_word_beside(ep_counters)",
    "else:",
    "await_launch_before()",
    "word = header_word(ep_counters)",
    "start_launch[",
)
# A launch that cannot go leaves no row of an earlier one.
_HAS_NO_ROWS = (
    "if not launch.can_go:",
    "write_no_rows(",
    "token_fmt_type.end_choices(",
    "rows, 0, Int(n_rows_max), Int(thread_idx.x), num_threads",
    "return",
)
IN_THIS_ORDER = {
    "rank_slots/dispatch.mojo: _tell_dispatch": (
        "tokens_sent_on_gpu()",
        "if arrive(word) == Int(grid_dim.x) - 1:",
        "leave_word(word, TOKENS_SENT + Int32(n_tokens))",
    ),
    "rank_slots/dispatch.mojo: _await_send_tokens": (
        "tokens_sent_on_gpu()",
        "look_at(word)",
        "while found < TOKENS_SENT:",
        "look_at(word)",
        "word[] = 0",
    ),
    "rank_slots/dispatch.mojo: send_tokens_kernel": (
        "header_word(",
        "start_launch[",
        "_tell_dispatch(",
        "publish_earlier_reads[",
        "send_by_number[",
    ),
    _DISPATCH_ASYNC: (
        *_SENDS_BESIDE,
        *_STARTS,
        "if is_last_to_start[halves_overlap](launch, ep_counters, COUNTING_WARP):",
        *_MOVES,
        # Last: a waiting half that sees it moves what was received.
        "comptime if halves_overlap:",
        "leave_word(",
        "ep_counters.dispatch_sent_word(),",
        "generation.cast[DType.int32](),",
        "else:",
        "set_dispatch_sent(",
        "publish_earlier_reads[",
    ),
    "rank_slots/dispatch.mojo: dispatch_kernel": (
        *_STARTS,
        *_HAS_NO_ROWS,
        "is_last_to_start(",
        *_MOVES,
        "set_dispatch_sent(",
        "set_dispatch_received(",
    ),
    _DISPATCH_WAIT: (
        *_WAITS_BESIDE,
        *_HAS_NO_ROWS[:-1],
        "comptime if halves_overlap:",
        "await_kernels_before()",
        _HAS_NO_ROWS[-1],
        "comptime tells_at_end = shares_gpu or not layout.is_reduced()",
        "if not tells_at_end:",
        "is_last_to_start[halves_overlap, is_wait=True](",
        "comptime if halves_overlap:",
        "if await_sending_half(",
        "ep_counters.dispatch_sent_word(), generation, launch",
        "set_dispatch_received(generation)",
        "else:",
        "set_dispatch_received(generation)",
        # Its own number of tokens comes as that of the others.
        "_receive[",
        "False,",
        "waits_for_number=halves_overlap,",
        "](",
        "comptime if halves_overlap:",
        "await_kernels_before()",
        "if tells_at_end:",
        "is_last_block(",
        "set_dispatch_received(generation)",
        "publish_reads[",
    ),
    _COMBINE_ASYNC: (
        *_SENDS_BESIDE,
        "header_word(",
        "start_launch[",
        "if is_last_to_start[halves_overlap](launch, ep_counters, n_warps - 2):",
        "set_combine_of(launch.before.dispatch_received)",
        "comptime if halves_overlap:",
        "leave_word(",
        "ep_counters.combine_sent_word(),",
        "generation.cast[DType.int32](),",
        "else:",
        "set_combine_sent(generation)",
        "publish_earlier_reads[",
    ),
    _COMBINE_WAIT: (
        *_WAITS_BESIDE,
        "if not launch.can_go or has_too_few_rows(",
        "comptime if halves_overlap:",
        "await_kernels_before()",
        "return",
        "if not shares_gpu:",
        "is_last_to_start[halves_overlap, is_wait=True](",
        "comptime if halves_overlap:",
        "if await_sending_half(",
        "ep_counters.combine_sent_word(), generation, launch",
        "set_combine_received(generation)",
        "else:",
        "set_combine_received(generation)",
        "var answered = launch.before.combine_of",
        "comptime if halves_overlap:",
        "answered = launch.before.dispatch_received",
        "_receive[",
        "answered,",
        "comptime if halves_overlap:",
        "await_kernels_before()",
        "if shares_gpu:",
        "is_last_block(",
    ),
    "rank_slots/combine_checks.mojo: is_bad_answer": (
        "if launch.before.dispatch_received != dispatch_generation:",
        "return True",
        "dispatch_sent != dispatch_generation",
        "next_generation(dispatch_generation)",
        "return True",
    ),
    "rank_slots/combine.mojo: _receive": ("is_bad_answer(", "add_tokens["),
    "rank_slots/device_steps.mojo: is_last_to_start": (
        "comptime if halves_overlap:",
        "return arrive_in_half[is_wait](counters.blocks_done(), Int(grid_dim.x))",
        "arrive(counters.blocks_done()) != Int(grid_dim.x) - 1",
        "blocks_done()[] = 0",
    ),
    # To the model the halves are two words.
    "flags.mojo: arrive_in_half": (
        "comptime shift = Int32(16 if is_wait else 0)",
        "Word.fetch_add[ordering=Ordering.ACQUIRE_RELEASE](",
        "counter, Int32(1) << shift",
        "if (found >> shift) & 0xFFFF != Int32(n_blocks - 1):",
        "return False",
        "Word.fetch_add[ordering=Ordering.RELAXED](",
        "counter, -(Int32(n_blocks) << shift)",
        "return True",
    ),
    "rank_slots/device_steps.mojo: let_next_begin": (
        '"griddepcontrol.launch_dependents;"',
        'constraints="~{memory}"',
    ),
    "rank_slots/device_steps.mojo: await_kernels_before": (
        '"griddepcontrol.wait;"',
        'constraints="~{memory}"',
    ),
    "rank_slots/device_steps.mojo: header_word_beside": (
        "return look_at(counters.words.unsafe_offset(Int(lane_id())))",
    ),
    "rank_slots/device_steps.mojo: await_sending_half": (
        "while look_at(sent).cast[DType.uint32]() != generation:",
        "launch.deadline.has_passed()",
        "return False",
        "return True",
    ),
    # What tokens of an all-gather carry goes to all ranks, and is awaited there.
    "rank_slots/index.mojo: id_in_memory": (
        "comptime if Self.n_ranks_all > 0:",
        "return Int32(UInt32(choice) % UInt32(Self.n_ranks_all))",
        "return self.ids[unsafe_offset=choice]",
    ),
    "rank_slots/index.mojo: weight": (
        "comptime if layout.is_reduced() and Self.n_ranks_all == 0:",
        "if self.are_shared() and self.n_choices <= _N_SHARED_WEIGHTS:",
        "return self.weight_in_memory[layout](choice)",
    ),
    "rank_slots/index.mojo: weight_in_memory": (
        "comptime if Self.n_ranks_all > 0:",
        "return 1",
        "return self.weights[unsafe_offset=choice]",
    ),
    # A CPU rank is one worker of one, and shows neither.
    "formats/with_choices.mojo: end_choices": (
        "n_rows * Self.n_carried + worker,",
        "n_rows_max * Self.n_carried,",
        "n_workers,",
    ),
    "rank_slots/index.mojo: share_choices": (
        "if not choices.are_shared():",
        "return",
        # The router has given others than these, and maybe fewer.
        "has_weights = layout.is_reduced() and n_ranks_all == 0",
        "for first in range(me, choices.n_choices, n_at_once * num_threads):",
        "ids[i] = choices.id_in_memory(min(first + i * num_threads, last))",
        "comptime if has_weights:",
        "if last < _N_SHARED_WEIGHTS:",
        "weights[i] = choices.weights[",
        "unsafe_offset=min(first + i * num_threads, last)",
        "var choice = first + i * num_threads",
        "if choice <= last:",
        "choices.shared_ids[unsafe_offset=choice] = ids[i]",
        "_count_own(n_of_expert, ids[i])",
        "comptime if has_weights:",
        "if last < _N_SHARED_WEIGHTS:",
        "var choice = first + i * num_threads",
        "if choice <= last:",
        "choices.shared_weights[unsafe_offset=choice] = bitcast[",
        "](weights[i])",
        "sum_of_lanes(n_of_expert[i])",
        "choices.counted[",
        "unsafe_offset=i * WARP_SIZE + me // WARP_SIZE",
        "] = Int32(n)",
    ),
    # What a block counts on the way is what it tells.
    "rank_slots/index.mojo: _count_own": (
        "if id == Int32(Int(block_idx.x) + i * Int(grid_dim.x)):",
        "n_of_expert[i] += 1",
    ),
    # Each of few choices and each expert is one warp's.
    "rank_slots/index.mojo: _index_one_by_one": (
        "n_counted = _n_counted[layout]()",
        "for turn in range(n_counted):",
        "var expert = Int(block_idx.x) + turn * Int(grid_dim.x)",
        "if indexer == N_INDEX_WARPS - 1 - turn and expert < n_experts:",
        "var n = choices.counted_of_block(turn, lane)",
        "_tell_count[",
        "expert,",
        "n,",
        "min(n_counted * Int(grid_dim.x), n_experts)",
        "+ Int(block_idx.x)",
        "+ indexer * Int(grid_dim.x)",
        "n_experts + choices.n_choices",
        "N_INDEX_WARPS * Int(grid_dim.x)",
        "var choice = item - n_experts",
        "var id = Int32(item)",
        "var end = choices.n_choices",
        "if choice >= 0:",
        "id = choices.shared_ids[unsafe_offset=choice]",
        "weight = choices.weight[layout](choice)",
        "end = choice",
        "_count_equal(choices.shared_ids, id, end, lane)",
        "_tell_item[",
        "Item(item, id, weight, n_equal)",
    ),
    "rank_slots/index.mojo: _tell_item": (
        "var choice = item.number - n_experts",
        "if choice >= 0:",
        "_enter_choice[",
        "item.id,",
        "item.weight,",
        "item.n_equal,",
        "launch.lane,",
        "WARP_SIZE,",
        "elif launch.lane == 0:",
        "_tell_count[layout](",
        "item.number, item.n_equal, generation, counts, launch",
    ),
    # Fewest of them: the first item of a warp is found before the header is read.
    "rank_slots/dispatch.mojo: _look_ahead": (
        "part.load[layout, token_fmt_type](elements, tokens, choices)",
        "if indexer >= 0 and choices.are_in_lanes():",
        "load_ids(lane_ids, choices)",
        "Int(block_idx.x) + indexer * Int(grid_dim.x),",
    ),
    "rank_slots/index.mojo: load_ids": (
        "comptime for i in range(N_LANE_IDS):",
        "var choice = i * WARP_SIZE + Int(lane_id())",
        "if choice < choices.n_choices:",
        "ids[i] = choices.id_in_memory(choice)",
    ),
    "rank_slots/index.mojo: of": (
        "var choice = number - n_experts",
        "var id = Int32(number)",
        "var end = choices.n_choices",
        "if choice >= 0:",
        "end = min(end, choice)",
        "id = choices.id_in_memory(choice)",
        "weight = choices.weight_in_memory[layout](choice)",
        "comptime for i in range(N_LANE_IDS):",
        "if i * WARP_SIZE + Int(lane_id()) < end and ids[i] == id:",
        "n_equal += 1",
        "sum_of_lanes(n_equal)",
    ),
    "rank_slots/index.mojo: _index_lanes": (
        "var item = first_item",
        "while item.number < n_experts + choices.n_choices:",
        "_tell_item[",
        "lane_ids, choices, item.number + N_INDEX_WARPS * Int(grid_dim.x)",
    ),
    "rank_slots/index.mojo: counted_of_block": (
        "if lane < Int(block_dim.x) // WARP_SIZE:",
        "unsafe_offset=turn * WARP_SIZE + lane",
        "sum_of_lanes(",
    ),
    "rank_slots/index.mojo: _count_equal": (
        "var whole = end // _IDS_AT_ONCE * _IDS_AT_ONCE",
        "range(lane * _IDS_AT_ONCE, whole, WARP_SIZE * _IDS_AT_ONCE)",
        "width=_IDS_AT_ONCE, alignment=MESSAGE_ALIGN",
        "comptime for i in range(_IDS_AT_ONCE):",
        "if some[i] == id:",
        "n_equal += 1",
        "if whole + lane < end and ids[unsafe_offset=whole + lane] == id:",
        "n_equal += 1",
        "sum_of_lanes(n_equal)",
    ),
    "rank_slots/index.mojo: _write_entry": (
        "for i in range(lane, layout.n_ranks, n_lanes):",
        "var rank = my_rank + 1 + i",
    ),
    "rank_slots/index.mojo: send_carried": (
        "next_generation(launch.before.dispatch_sent)",
        "(Int(block_idx.x) + indexer * Int(grid_dim.x)) * WARP_SIZE",
        "+ launch.lane",
        "n_tokens * n_carried,",
        "N_INDEX_WARPS * Int(grid_dim.x) * WARP_SIZE",
        "divmod_32(place, n_carried)",
        "id_word(generation, choices.ids[unsafe_offset=place])",
        "weight_word(generation, choices.weights[unsafe_offset=place])",
        "launch.my_rank, token_idx, k, n_carried",
        "for i in range(layout.n_ranks):",
        "put_16(bytes_at(recv_bufs[unsafe_offset=rank] + offset), words)",
    ),
    # What is looked at first is a part that there is, and used if it is the first.
    "rank_slots/dispatch_receive.mojo: of": (
        "turns = Turns.of_receivers(launch.warp_idx, n_warps)",
        "Turns.item(turns.first, Int(block_idx.x), Int(grid_dim.x))",
        "var most = launch.before.most_received",
        "early_cut[n_steps_of[token_fmt_type]()](most)",
        "var n_items = most * layout.n_ranks * cut.n_parts()",
        "cut.are_more\n",
        "and n_items <= turns.n_dealt(Int(grid_dim.x))\n",
        "and item < n_items",
    ),
    "rank_slots/dispatch_receive.mojo: look": (
        "if not self.is_likely or self.is_looked_at:",
        "return",
        "if any_lane(is_missing):",
        "return",
        "_look_at_steps[",
        "self.is_looked_at = True",
    ),
    "rank_slots/dispatch_receive.mojo: _await_words": (
        "if bytes[1] == generation:",
        "return bytes",
        "launch.deadline.has_passed()",
    ),
    "rank_slots/dispatch_receive.mojo: _place_carried": (
        "for k in range(launch.lane, n_carried, WARP_SIZE):",
        "layout.carried_choice_offset(src_rank, token_idx, k, n_carried)",
        "is_late or carried[1] != generation",
        "rows, row, k, id_of_word(words[0]), weight_of_word(words[1])",
        "return not any_lane(is_late)",
    ),
    "rank_slots/dispatch_receive.mojo: receive_tokens": (
        "are_dealt\n",
        "and cut.are_more\n",
        "and first_look.is_likely\n",
        "and item == first_look.item\n",
        "if is_looked_at and not (is_first and first_look.is_looked_at):",
        "var entry = first_look.entry",
        "if not is_first:",
        "entry = _look_at_words[",
        "var k = count_trailing_zeros(wanted)",
        "if wanted != 0 and not _place_carried[",
        "Int(warp.shuffle_idx(row, k))",
        "counters.set_broken()",
    ),
    "rank_slots/dispatch.mojo: _receive": (
        "var n_shared = n_own_tokens if fused_shared_expert else 0",
        "comptime if fused_shared_expert and waits_for_number:",
        "while block_peek(control.unsafe_offset(TOKENS_READY)) == 0:",
        "n_shared = Int(n_tokens_of[unsafe_offset=launch.my_rank])",
        "lay_out_rows[",
        "n_shared,",
        "if are_there:",
        "for src_rank in range(layout.n_ranks):",
        "n_rows += Int(n_tokens_of[unsafe_offset=src_rank])",
        "token_fmt_type.end_choices(",
        "n_rows_max,",
        "Int(block_idx.x) * WARP_SIZE + launch.lane,",
        "Int(grid_dim.x) * WARP_SIZE,",
    ),
    # Each of many choices is counted once, and told by the last block.
    "rank_slots/index.mojo: _index_by_blocks": (
        "var is_last = block_idx.x == grid_dim.x - 1",
        "ceildiv(n_choices, max(Int(grid_dim.x) - 1, 1))",
        "_read_choice[layout](choices, begin + me, end)",
        "if begin < end or is_last:",
        "range(me, begin, n_threads * _MANY_IDS)",
        "if first + i * n_threads < begin:",
        "choices.id_in_memory(first + i * n_threads)",
        "_count_id[n_experts](n_before, ids[i], launch.lane)",
        "position = Int32(n_before[unsafe_offset=Int(id)])",
        "range(0, (indexer + 1) * WARP_SIZE, _EARLIER_IDS)",
        "if earlier[k] == id and i + j + k < me:",
        "_count_id[n_experts](n_before, id, launch.lane)",
        "_read_choice[layout](choices, choice + n_threads, end)",
        "if is_last:",
        "_tell_count[",
    ),
    "rank_slots/index.mojo: _tell_count": (
        "min(n_listed, layout.max_tokens_per_rank)",
    ),
    # A block's first parts, one a warp, then each warp's next ones.
    "rank_slots/dispatch_send.mojo: _send_early_tokens": (
        "if not first_part.is_sent:",
        "var number = first_part.number",
        "await_readers[",
        # A wait for speed alone.
        "comptime if waits_for_index:",
        "if not choices.are_in_lanes() and n_tokens <= _ENTRIES_FIRST:",
        "var receivers = first_receivers",
        "number += n_senders * Int(grid_dim.x)",
        "if number >= n_all:",
        "piece = cut.piece(number)",
        "choices.id_of_lane[layout](piece.whole, launch.lane)",
    ),
    # Parts that are sent at once have a flag each.
    "rank_slots/dispatch_send.mojo: _send_tokens_in_chunks": (
        "parts_at_once_shift[layout, n_steps](n_tokens, n_senders)",
        "deal.unit(sender)",
        "if first_part >= n_all:",
        "await_readers[",
        "for first in range(0, n_receivers << shift, WARP_SIZE):",
        "var mine = (first + lane) >> shift",
        "var part = (unit << shift) + (lane & ((1 << shift) - 1))",
        # Each turn is taken once; those before it were the senders' first.
        "take_turn(launch.control.unsafe_offset(NEXT_TURN), lane)",
        "first_part, shift = deal.unit(n_senders + turn)",
        "if first_part >= n_all:",
    ),
    "rank_slots/index.mojo: _enter_choice": (
        "var has_place = is_expert and position < layout.max_tokens_per_rank",
        "if lane == 0:",
        "id if has_place else NO_EXPERT",
        "Int(id) if is_expert else NO_ENTRY_EXPERT",
        "position if has_place else NO_POSITION",
        "if id != NO_EXPERT and lane == 0:",
        "note_failure(",
    ),
    "rank_slots/combine_send.mojo: send_partials": (
        "var turn = sender",
        "var unit = Int(block_idx.x) + turn * n_blocks",
        "if unit >= most * n_others * cut.n_parts():",
        "if not are_few:",
        "turn = n_senders + take_turn(",
        "launch.control.unsafe_offset(NEXT_TURN), lane",
        "else:",
        "turn += n_senders",
        "sum_to_send[layout](piece.whole)",
        "source_rank(my_rank, source, n_ranks)",
        "recv_bufs[unsafe_offset=src_rank]",
        "layout.partial_offset(my_rank, token_idx)",
    ),
    # A launch that has failed publishes nothing, and breaks its rank.
    "expert_slots/device_steps.mojo: is_last_block": (
        "barrier()",
        "arrive(counters.blocks_done()) == Int(grid_dim.x) - 1",
        "blocks_done()[] = 0",
        "if is_fatal(counters.failure()[]):",
        "counters.set_broken()",
        "else:",
        "all_done = 1",
    ),
    # Whatever a launch looks at must be as `reset` says, to its last word.
    "gpu_setup.mojo: clear_kernel": (
        "layout.dispatch_counts_bytes() // FLAG_BYTES",
        "layout.combine_counts_bytes() // FLAG_BYTES",
        "_fill(recv, layout.entry_offset(layout.n_ranks, 0), 0)",
        "if layout.sends_to_all():",
        "var tokens = layout.token_offset(0, 0)",
        "layout.token_offset(layout.n_ranks, 0) - tokens,",
        "layout.chunk_flag_offset(layout.n_ranks, 0, 0)",
        "- layout.chunk_flag_offset(0, 0, 0)",
        "layout.early_token_offset(layout.n_ranks, 0) - early",
        "EMPTY",
        "layout.dispatch_recv_bytes() // layout.dispatch_msg_bytes",
        "_fill(recv, layout.combine_recv_bytes(), EMPTY)",
        "range(first, layout.n_choices(), n_threads)",
    ),
    "gpu_launch.mojo: launch_send_tokens": ("_await_sent_tokens[", "fork("),
    # All blocks of a launch must be resident, on a part of a device, too.
    "gpu_launch.mojo: _n_blocks": (
        "var n = min(",
        "n_sms_of_device()",
        "context.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)",
        "n = min(n, n_sms)",
    ),
    "gpu_launch.mojo: _n_dispatch_blocks": (
        "comptime if tokens_are_sent:",
        "n - _n_side_blocks[n_sms](context)",
    ),
    "side_stream.mojo: fork": (
        "context.stream().record_event(event)",
        "side.enqueue_wait_for(event)",
        "are_forked[device] = True",
    ),
    "side_stream.mojo: join": (
        "streams[device].value().record_event(event)",
        "context.stream().enqueue_wait_for(event)",
        "are_forked[device] = False",
    ),
    # The number covers nothing; the count behind it does (I2).
    "cpu/dispatch.mojo: _publish_counts": (
        "layout.dispatch_n_tokens_offset(rank.my_rank)",
        "layout.dispatch_count_offset(",
        "set_dispatch_sent(rank.generation)",
    ),
    "cpu/dispatch.mojo: cpu_dispatch_async": (
        "for_each_chunk(",
        "_publish_counts(",
        "raise_if_dropped(",
    ),
}

# Who sets `BROKEN_WORD`, and how often: whoever gives up, or the last block for all.
BREAKS_ITS_RANK = {
    "rank_slots/combine_receive.mojo: add_tokens": 1,
    "rank_slots/combine_checks.mojo: has_too_few_rows": 1,
    "rank_slots/combine_checks.mojo: is_bad_answer": 3,
    "rank_slots/combine_checks.mojo: is_nothing_dispatched": 1,
    "rank_slots/device_steps.mojo: await_readers": 1,
    "rank_slots/dispatch.mojo: _await_send_tokens": 1,
    "rank_slots/dispatch.mojo: _receive": 1,
    "rank_slots/dispatch_receive.mojo: receive_tokens": 4,
    "rank_slots/row_counts.mojo: _count_rows": 2,
    "expert_slots/combine.mojo: combine_async_kernel": 1,
    "expert_slots/combine.mojo: combine_kernel": 1,
    "expert_slots/device_steps.mojo: is_last_block": 1,
    "expert_slots/dispatch.mojo: dispatch_wait_kernel": 1,
}

# The files of the model that have what `mojo/max_ep/` has in a folder, for GPUs.
MODULES = {
    "rank_slots": ["rank_slots.py", "rank_combine.py", "rank_steps.py"],
    "expert_slots": ["expert_slots.py"],
}

# Ops that are there for the graph alone.
DO_NOTHING = {f'"max_ep.{op}_{n}"' for op in ("claim", "look") for n in (1, 4, 5)}

# Shared memory that is not a control word.
BLOCK_ARRAYS = {"sums", "n_tokens_of", "block_pair_rows"}


@pytest.fixture(scope="module")
def steps() -> set[Step]:
    """All steps that any world takes."""
    found: set[Step] = set()
    for world in worlds.all_worlds():
        machine = Machine(world)
        machine.explore(max_states=300, gives_up=True)
        found |= machine.used
    return found


def test_atomics_and_their_orders() -> None:
    """An order, a scope or an atomic that changes in `flags.mojo` is noticed."""
    does = {"write": "store", "await": "load", "arrive": "fetch_add", "drain": "fence"}
    known = {
        name: (
            does[kind],
            # A fence on x86; see its `# ORDER:`.
            {"SEQUENTIAL"}
            if kind == "drain"
            else {order.name} | {o.name for o in [PUT_BACK.get(name)] if o},
            scope,
        )
        for name, (kind, order, scope) in CALLS.items()
    }
    found = sources.atomics()
    assert set(found) - set(known) == set(ATOMICS_LEFT_OUT)
    assert known == {name: found[name] for name in known}


def test_every_call_of_an_atomic_is_a_step(steps: set[Step]) -> None:
    """A flag that a kernel gains or loses is noticed, and where it is."""
    names = set(sources.atomics()) | set(sources.ALIASES)
    in_code = sources.calls_of(names)
    sites = {(where, sources.ALIASES.get(call, call)) for where, call in in_code}
    in_model = {(s.where, s.call) for s in steps if s.call in CALLS}
    assert sites - in_model == set(CALLS_LEFT_OUT)
    assert in_model <= sites


def test_no_function_calls_an_atomic_once_more() -> None:
    names = set(sources.atomics()) | set(sources.ALIASES)
    counts: dict[tuple[str, str], int] = {}
    for (where, call), n in sources.calls_of(names).items():
        site = (where, sources.ALIASES.get(call, call))
        counts[site] = counts.get(site, 0) + n
    assert {site: n for site, n in counts.items() if n > 1} == CALLED_OFTEN


def test_a_step_has_the_order_of_its_call(steps: set[Step]) -> None:
    for step in steps:
        if step.call in CALLS:
            assert step.order == CALLS[step.call][1], step
        elif step.call == "put_back":
            assert step.order == PUT_BACK["arrive_in_half"], step
        else:
            assert step.order in (Order.PLAIN, Order.STREAMED), step


def test_steps_name_functions_that_there_are(steps: set[Step]) -> None:
    for where in {s.where for s in steps if s.kind != "join"}:
        file, function = where.split(": ")
        assert function in sources.functions(file), where


def test_words_of_symmetric_memory(steps: set[Step]) -> None:
    assert sources.located_words() - set(RANK_WORDS) == set(WORDS_LEFT_OUT)
    assert set(RANK_WORDS) - sources.located_words() == WORDS_INSIDE
    assert set(RANK_WORDS) <= {s.place[0] for s in steps if s.place}


def test_words_that_a_rank_keeps(steps: set[Step]) -> None:
    words = sources.header_words() | sources.counter_arrays() | {"pair_rows"}
    assert words - set(LOCAL_WORDS) == set(HEADER_LEFT_OUT)
    assert set(LOCAL_WORDS) <= words
    assert set(LOCAL_WORDS) <= {s.place[0] for s in steps if s.place}


def test_words_of_a_block() -> None:
    words = sources.control_words()
    assert words - BLOCK_WORDS == set(CONTROL_LEFT_OUT)
    assert BLOCK_WORDS - words == BLOCK_ARRAYS


def test_phases() -> None:
    """A kernel without an op in the model, or the other way round, is noticed."""
    modelled = {f"rank_slots: {op}_kernel" for op in rank_slots.OPS}
    modelled |= {f"expert_slots: {op}_kernel" for op in expert_slots.OPS}
    modelled |= {f"cpu: {op}" for op in cpu.OPS}
    assert sources.phases() == modelled
    assert set(sources.named_phases()) == set(worlds.SPLIT)


@pytest.mark.parametrize("protocol", ["rank_slots", "expert_slots"])
def test_functions_call_the_same_ones(protocol: str) -> None:
    """A kernel that no longer waits, or tells, or does so elsewhere, is noticed.

    Of GPU ranks, with functions that only one side has seen through.
    """
    files = [f"{protocol}/dispatch.mojo", f"{protocol}/combine.mojo"]
    files += [f"{protocol}/device_steps.mojo", "expert_slots/device_steps.mojo"]
    if protocol == "rank_slots":
        parts = ["dispatch_send", "dispatch_receive", "index", "row_counts"]
        parts += ["combine_send", "combine_receive", "combine_checks", "partial_sums"]
        files += [f"rank_slots/{part}.mojo" for part in parts]
    in_code = sources.mojo_calls(files)
    in_model = sources.model_calls(MODULES[protocol])
    ops = (rank_slots if protocol == "rank_slots" else expert_slots).OPS
    named: dict[str, list[str]] = {}
    for where in in_code:
        name = where.split(": ")[1].removesuffix("_kernel")
        named.setdefault(name, []).append(where)
    # Names that two files have, such as `_finish`, are seen through.
    both = {
        name: places[0]
        for name, places in named.items()
        if name in in_model and len(places) == 1
    }
    assert set(ops) <= set(both)
    model_edges = {(both[a], both[b]) for a, b in sources.edges(in_model, set(both))}
    assert sources.edges(in_code, set(both.values())) == model_edges


def test_what_is_noted_in_the_counters(steps: set[Step]) -> None:
    """A generation that a kernel no longer moves, or moves elsewhere, is noticed."""
    in_code = {
        (where, word)
        for where, word in sources.notes_of_counters()
        if word not in NOTES_LEFT_OUT
    }
    often = {note: n for note, n in sources.notes_of_counters().items() if n > 1}
    assert {n: often[n] for n in often if n[1] not in NOTES_LEFT_OUT} == NOTED_OFTEN
    noted = {word for _, word in in_code}
    in_model = {
        (s.where, s.place[0])
        for s in steps
        if s.kind == "write" and s.call == "store" and s.place[0] in noted
    }
    assert in_code == in_model


def test_a_launch_has_one_deadline() -> None:
    """For all its waits: else it waits as long for each of them."""
    for file in sources.protocol_files():
        for function, code in sources.functions(file).items():
            before, *more = code.split("Deadline.after(")
            assert len(more) <= 1, (file, function)
            if more:
                assert not sources.is_repeated(before), (file, function)


def test_who_gives_up_breaks_its_rank() -> None:
    """Else its later launches would go on with what did not come."""
    notes = sources.notes_of_counters()
    found = {where: n for (where, word), n in notes.items() if word == "broken"}
    assert found == BREAKS_ITS_RANK


def test_what_was_read_is_put_back(steps: set[Step]) -> None:
    in_model = {s.where for s in steps if s.kind == "write" and s.value == EMPTY}
    assert sources.put_backs() == in_model


def test_words_that_blocks_count_in_are_put_back(steps: set[Step]) -> None:
    in_model = {s.where for s in steps if s.call == "store" and _is_counted_in(s)}
    assert sources.put_back_to_zero() == in_model


def _is_counted_in(step: Step) -> bool:
    return step.place[0] in COUNTED_IN


def test_what_waits_for_the_second_stream() -> None:
    names = {name for _, name in SECOND_STREAM}
    assert dict(sources.calls_of(names)) == SECOND_STREAM


@pytest.mark.parametrize("where", IN_THIS_ORDER)
def test_functions_do_things_in_this_order(where: str) -> None:
    file, function = where.split(": ")
    rest = sources.functions(file)[function]
    for said in IN_THIS_ORDER[where]:
        assert said in rest, said
        rest = rest[rest.index(said) + len(said) :]


def test_who_waits_for_readers_of_what() -> None:
    names = {"await_readers", "note_readers"}
    in_model = sources.model_directions(MODULES["rank_slots"], names)
    assert len(in_model) == 10
    assert sources.directions(names) == in_model


def test_barriers_that_the_model_takes_for_granted() -> None:
    names = {"syncwarp", "barrier", "index_barrier"}
    assert dict(sources.calls_of(names)) == BARRIERS


def test_what_halves_that_overlap_do_instead() -> None:
    names = {name for _, name in HALVES_OVERLAP}
    assert dict(sources.calls_of(names)) == HALVES_OVERLAP


@pytest.mark.parametrize("kernel", WAITING_HALVES)
def test_a_waiting_half_ends_behind_its_sending_half(kernel: str) -> None:
    """At each end: the next launch takes it that both have ended."""
    file, function = kernel.split(": ")
    code = sources.functions(file)[function]
    cannot_go, goes, at_end = re.split(r"\breturn\b", code)
    awaits = r"comptime if halves_overlap:\s+await_kernels_before\(\)\s+"
    assert re.search(awaits + "$", cannot_go)
    received = re.split(awaits, goes)
    assert len(received) == 2 and "_receive[" in received[0]
    tells = r"comptime if \w+:\s+if not is_last_block\(ep_counters\):\s+"
    assert re.fullmatch(tells, received[1])


def test_kernels_await_the_launch_before() -> None:
    kernels = {
        f"rank_slots/{'combine' if 'combine' in op else 'dispatch'}.mojo: {op}_kernel"
        for op in rank_slots.OPS
    }
    calls = sources.calls_of({AWAITS_LAUNCH_BEFORE})
    assert dict(calls) == {(kernel, AWAITS_LAUNCH_BEFORE): 1 for kernel in kernels}


@pytest.mark.parametrize("file", ["ops.mojo", "all_gather_ops.mojo"])
def test_ops_hand_on_what_they_are_given(file: str) -> None:
    """A parameter that a launcher has a default for is missed by no compiler.

    CPU ranks do as well without some, such as `shares_gpu` and `n_sms`.
    """
    # `order` is there for the graph; an all-gather has no scales.
    left_out = {"order"}
    if file == "all_gather_ops.mojo":
        left_out |= {"has_input_scales", "input_scales"}
    ops = sources.source(file).split("@extensibility.register(")[1:]
    assert len(ops) >= 4
    for op in ops:
        name = op.partition(")")[0]
        given, _, body = op.partition("def execute[")[2].partition(" raises:\n")
        names = set(re.findall(r"(?:^        |, )(\w+):", given, re.MULTILINE))
        assert {"target", "ctx"} <= names, name
        if name in DO_NOTHING:
            assert re.search(r'"""\s+pass\s+$', body), name
            continue
        assert {n for n in names if not re.search(rf"\b{n}\b", body)} <= left_out, name
