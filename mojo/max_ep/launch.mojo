# SPDX-License-Identifier: Apache-2.0
"""Launches a phase on one rank, on a GPU or on the CPU.

`device/phase.mojo` decides the grid.
"""
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
    p2p_buffers,
)
from .combine_rows.phase import CombineRows
from .combine_sums.phase import CombineSums
from .cpu.combine import cpu_combine_async, cpu_combine_wait
from .cpu.dispatch import cpu_dispatch_async, cpu_dispatch_wait
from .cpu.rank import CpuRank
from .device.phase import enqueue, InputScales, Queue
from .dispatch_by_expert.phase import DispatchByExpert
from .dispatch_by_rank.phase import DispatchByRank
from .layout import Group, MESSAGE_ALIGN
from .token_format import TokenFormat

comptime RANK_OF_COUNTERS = Int32(-1)
"""A launch finds its rank in the counters, in device memory."""


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
    elif group.is_by_rank():
        enqueue[form.sends, form.receives](
            DispatchByRank[group, Format, input_type](
                input_tokens=given.tokens,
                topk_ids=given.topk_ids,
                router_weights=given.router_weights,
                n_tokens=Int32(given.n_tokens),
                rows=dispatched.rows,
                n_rows_max=Int32(dispatched.n_rows_max),
                tables=dispatched.tables,
                src_info=dispatched.src_info,
                recv_bufs=p2p_buffers[UInt8, group.n_ranks](call.recv_bufs),
                counts=p2p_buffers[UInt64, group.n_ranks](call.counts),
                counters=call.counters,
            ),
            queue,
        )
    else:
        comptime n = group.n_ranks_per_node
        enqueue[form.sends, form.receives, input_scales](
            DispatchByExpert[group, Format, input_type](
                tokens=given.tokens,
                topk_ids=given.topk_ids,
                n_tokens=Int32(given.n_tokens),
                rows=dispatched.rows,
                n_rows_max=Int32(dispatched.n_rows_max),
                tables=dispatched.tables,
                src_info=dispatched.src_info,
                put_bufs=p2p_buffers[UInt8, n](call.send_bufs),
                recv_bufs=p2p_buffers[UInt8, n](call.recv_bufs),
                counts=p2p_buffers[UInt64, n](call.counts),
                counters=call.counters,
                my_rank=RANK_OF_COUNTERS,
            ),
            queue,
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
    call: Call[group],
    given: GivenRows,
    combined: CombinedTokens[dtype],
    queue: Queue,
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
    elif group.has_sums():
        enqueue[form.sends, form.receives](
            CombineSums[group, dtype, partial_dtype](
                expert_rows=given.rows.rows,
                n_rows=Int32(given.rows.n_rows),
                output_tokens=combined.tokens,
                n_tokens=Int32(combined.n_tokens),
                recv_bufs=p2p_buffers[UInt8, group.n_ranks](call.recv_bufs),
                counts=p2p_buffers[UInt64, group.n_ranks](call.counts),
                counters=call.counters,
            ),
            queue,
        )
    else:
        comptime n = group.n_ranks_per_node
        enqueue[form.sends, form.receives](
            CombineRows[group, dtype, keeps_rows](
                expert_rows=given.rows.rows,
                n_rows=Int32(given.rows.n_rows),
                src_info=given.src_info,
                output_tokens=combined.tokens,
                n_tokens=Int32(combined.n_tokens),
                router_weights=combined.router_weights,
                put_bufs=p2p_buffers[UInt8, n](call.send_bufs),
                recv_bufs=p2p_buffers[UInt8, n](call.recv_bufs),
                counts=p2p_buffers[UInt64, n](call.counts),
                counters=call.counters,
                my_rank=RANK_OF_COUNTERS,
            ),
            queue,
        )
