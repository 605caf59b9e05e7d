# SPDX-License-Identifier: Apache-2.0
"""Launches a phase on one rank, on a GPU or on the CPU.

`device/phase.mojo` decides the grid.
"""
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from std.sys import size_of

from .arguments import (
    Call,
    check_dispatch,
    check_group,
    CombinedTokens,
    DispatchedRows,
    Form,
    GivenRows,
    GivenTokens,
)
from .cpu.combine import cpu_combine_async, cpu_combine_wait
from .cpu.dispatch import cpu_dispatch_async, cpu_dispatch_wait
from .cpu.rank import CpuRank
from .layout import Group, MESSAGE_ALIGN
from .token_format import TokenFormat

comptime InputScales = Optional[
    def[dtype: DType](Int) capturing -> Scalar[dtype]
]
"""Gives the factor of a token for an expert id, or None."""


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
    context: DeviceContext,
) raises:
    """Launches dispatch, or one half of it; CPU ranks run it here."""
    check_dispatch[group, Format, target, Bool(input_scales)]()
    comptime if not is_gpu[target]():
        comptime if form.sends:
            cpu_dispatch_async[Format, input_scales](
                given,
                CpuRank[group](
                    "dispatch_async",
                    call.counters.dispatch_sent(),
                    call.counters,
                    call.recv_bufs,
                    call.counts,
                ),
            )
        comptime if form.receives:
            cpu_dispatch_wait(
                dispatched,
                CpuRank[group](
                    "dispatch_wait",
                    call.counters.dispatch_received(),
                    call.counters,
                    call.recv_bufs,
                    call.counts,
                ),
            )
    else:
        raise Error("not yet")


def launch_combine[
    dtype: DType,
    group: Group,
    //,
    partial_dtype: DType,
    target: StaticString,
    form: Form,
](
    call: Call[group],
    given: GivenRows,
    combined: CombinedTokens[dtype],
    context: DeviceContext,
) raises:
    """Launches combine, or one half of it; CPU ranks run it here."""
    check_group[group, target, MESSAGE_ALIGN // size_of[Scalar[dtype]]()]()
    comptime if not is_gpu[target]():
        comptime if form.sends:
            cpu_combine_async[dtype, partial_dtype](
                given,
                CpuRank[group](
                    "combine_async",
                    call.counters.combine_sent(),
                    call.counters,
                    call.recv_bufs,
                    call.counts,
                ),
            )
        comptime if form.receives:
            cpu_combine_wait[partial_dtype](
                combined,
                given.rows,
                CpuRank[group](
                    "combine_wait",
                    call.counters.combine_received(),
                    call.counters,
                    call.recv_bufs,
                    call.counts,
                ),
            )
    else:
        raise Error("not yet")
