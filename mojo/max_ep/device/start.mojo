# SPDX-License-Identifier: Apache-2.0
"""Whether a launch is in order: the header of the rank's counters shows it."""
import max.gpu.primitives.warp as warp
from max.gpu import lane_id, WARP_SIZE
from std.sys import inlined_assembly, is_nvidia_gpu

from ..protocol.counters import Counters, N_HEADER_WORDS, wanted_word, Word
from ..protocol.failures import Failure, record_failure
from ..protocol.kernel_argument import MutPointer
from ..protocol.layout import Group
from .warp import any_lane


@always_inline
def _load_now(word: MutPointer[Int32]) -> Int32:
    """Issues a load here: the compiler would move it to its first use, which is after
    all loads that are in flight with it."""
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            "ld.global.b32 $0, [$1];",
            Int32,
            constraints="=r,l,~{memory}",
            has_side_effect=True,
        ](word)
    return word[]


@always_inline
def header_word(counters: Counters[...]) -> Int32:
    """Issues the load of the header; it overlaps with what is before `Block.begin`.
    Lanes behind the header have 0."""
    comptime assert N_HEADER_WORDS <= WARP_SIZE, "a lane has at most one word"
    comptime if N_HEADER_WORDS < WARP_SIZE:
        if lane_id() >= N_HEADER_WORDS:
            return 0
    return _load_now(counters.at(Int(lane_id())))


@always_inline
def mask_word[group: Group, //](counters: Counters[group]) -> Int32:
    """Issues the load of a lane's word of the mask; it overlaps that of the header."""
    comptime if not group.masks:
        return 0
    comptime assert group.n_ranks <= WARP_SIZE, "a lane has one word"
    return _load_now(counters.masked(min(Int(lane_id()), group.n_ranks - 1)))


@always_inline
def mask_of[group: Group](word: Int32) -> UInt32:
    """Collects the bits of masked ranks from the words of a warp's lanes."""
    comptime if not group.masks:
        return 0
    return warp.vote[DType.uint32](word != 0 and Int(lane_id()) < group.n_ranks)


@always_inline
def check_header[
    group: Group, //
](found: Int32, counters: Counters[group], phase: Int) -> Bool:
    """Returns whether a launch may touch anything but its counters and results.

    The launcher has checked that there are enough counters, so the header may be read
    and a failure recorded there, even if they belong to another configuration.
    """
    comptime assert N_HEADER_WORDS <= WARP_SIZE, "a lane checks one word"
    var lane = Int(lane_id())
    var wanted: Int32 = 0
    if lane < N_HEADER_WORDS:
        wanted = wanted_word(lane, found, group)
    if any_lane(found != wanted):
        if found != wanted:
            record_failure(
                counters,
                Failure.WRONG_COUNTERS,
                phase,
                missing_rank=-1,
                expert_or_row=lane,
                wanted=0,
                found=0,
                a=Int(found),
                b=Int(wanted),
            )
        return False
    return not any_lane(lane == Word.BROKEN and found != 0)
