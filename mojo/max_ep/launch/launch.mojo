# SPDX-License-Identifier: Apache-2.0
"""Launches a phase on one rank, on a GPU or on the CPU."""
from max.gpu.host.info import is_gpu
from std.sys import size_of

from ..combine_rows.kernel import CombineRows
from ..combine_sums.kernel import CombineSums
from ..cpu.combine import cpu_combine_async, cpu_combine_wait
from ..cpu.dispatch import cpu_dispatch_async, cpu_dispatch_wait
from ..cpu.rank import CpuRank
from ..device.kernel import enqueue, Queue
from ..dispatch_by_expert.kernel import DispatchByExpert
from ..dispatch_by_rank.kernel import DispatchByRank
from ..protocol.arguments import (
    CombinedTokens,
    DispatchedRows,
    GivenRows,
    GivenTokens,
    InputScales,
)
from ..protocol.call import Call, check_dispatch, check_group, Form, mapped_buffers
from ..protocol.counters import Word
from ..protocol.failures import place_of
from ..protocol.flags import now_ns
from ..protocol.layout import Group, MESSAGE_ALIGN
from ..protocol.peer_words import PHASES
from ..protocol.token_format import TokenFormat


def _begin[group: Group, //](call: Call[group], phase: Int) raises -> CpuRank[group]:
    """Begins a phase of this CPU rank, by its number in `PHASES`.

    A wait for what this rank has not sent could never be met, and before a send it has
    read: its own tokens may stand where the next ones go.
    """
    var phases = materialize[PHASES]()
    var place = place_of(phase, call.counters.my_rank())
    var first = Word.DISPATCH_SENT + phase // 2 * 2
    var sent = call.counters.generation(first)
    var is_read = sent == call.counters.generation(first + 1)
    if phase % 2 == 0 and not is_read:
        raise Error(
            t"{place} again, before its {phases[phase + 1]} has read generation {sent}."
            t" Wait on every rank before sending again.{call.caller.next}"
        )
    if phase % 2 == 1 and is_read:
        raise Error(
            t"{place} before its {phases[phase - 1]}: after generation {sent} this"
            t" rank has sent nothing. Send first, and wait once for what was sent."
        )
    _record(call, 1 + phase)
    return CpuRank(call, phase)


def _record(call: Call, launch: Int):
    """Records what this CPU rank does from now on, as `Word.LAUNCH` says."""
    call.counters.at(Word.LAUNCH_SINCE).unsafe_bitcast[Int64]()[] = Int64(now_ns())
    call.counters.at(Word.LAUNCH)[] = Int32(launch)


def launch_dispatch[
    input_type: DType,
    group: Group,
    //,
    Format: TokenFormat,
    target: StaticString,
    form: Form,
    input_scales: InputScales = None,
](
    call: Call[group],
    given: GivenTokens[input_type],
    dispatched: DispatchedRows[group, Format],
    queue: Queue,
) raises:
    check_dispatch[group, Format, target, Bool(input_scales)]()
    comptime if not is_gpu[target]():
        comptime if form.sends:
            cpu_dispatch_async[Format, input_scales](given, _begin(call, 0))
            _record(call, -1)
        comptime if form.receives:
            cpu_dispatch_wait(dispatched, _begin(call, 1))
            _record(call, -2)
    elif group.is_by_rank():
        enqueue[form.sends, form.receives](
            DispatchByRank(given, dispatched, call.buffers()), queue
        )
    else:
        var put_bufs = mapped_buffers[group, UInt8](call.send_bufs)
        enqueue[form.sends, form.receives, input_scales](
            DispatchByExpert(given, dispatched, call.buffers(), put_bufs^), queue
        )


def launch_combine[
    dtype: DType,
    group: Group,
    //,
    partial_dtype: DType,
    target: StaticString,
    form: Form,
    keeps_rows: Bool = False,
](
    call: Call[group], given: GivenRows, combined: CombinedTokens[dtype], queue: Queue
) raises:
    check_group[group, target, MESSAGE_ALIGN // size_of[Scalar[dtype]]()]()
    comptime if not is_gpu[target]():
        comptime if form.sends:
            cpu_combine_async[dtype, partial_dtype](given, combined, _begin(call, 2))
            _record(call, -3)
        comptime if form.receives:
            cpu_combine_wait[partial_dtype](combined, given.rows, _begin(call, 3))
            _record(call, -4)
    elif group.has_sums:
        enqueue[form.sends, form.receives](
            CombineSums[group, dtype, partial_dtype](
                given.rows, combined, call.buffers()
            ),
            queue,
        )
    else:
        var put_bufs = mapped_buffers[group, UInt8](call.send_bufs)
        enqueue[form.sends, form.receives](
            CombineRows[group, dtype, keeps_rows](
                given, combined, call.buffers(), put_bufs^
            ),
            queue,
        )
