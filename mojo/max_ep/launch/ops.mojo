# SPDX-License-Identifier: Apache-2.0
"""The MAX custom ops: each launches a phase on its tensors, without logic of its own.

The parameter `config` describes the group (`op_config.mojo`).

Every op takes `order`, a mutable tensor that it never accesses. MAX runs ops that
share a mutable tensor in graph order, and other ops concurrently.

A dispatch has eight results in every format and form: rows, scales, `row_offsets`,
`expert_ids`, `src_info`, and for an all-gather routing map, probabilities and number of
rows. Results that a format, layout or form lacks are empty.
"""
import extensibility
from extensibility import (
    _MutableInputTensor as MutableInputTensor,
    _MutableInputVariadicTensors as MutableInputVariadicTensors,
    InputTensor,
    OutputTensor,
)
from max.gpu.host import DeviceContext

from ..formats.forwarded import JoinWords, QuantizeTokens
from ..formats.table import NumbersOf
from ..protocol.arguments import (
    combined_tokens,
    CombinedTokens,
    dispatched_rows,
    DispatchedRows,
    given_rows,
    given_tokens,
    GivenTokens,
    InputScales,
    n_choices_of,
)
from ..protocol.call import Call, check_shape, check_size, Form, imm, mut_, peer_buffers
from ..protocol.kernel_argument import unused
from ..protocol.token_format import BytePointer, OutputTensors
from ..row_limit.missing import CountDropped, FindDegraded
from ..work.for_each import for_each
from .launch import launch_combine, launch_dispatch
from .op_config import check_entry, CombineGroup, FormatOfOp, group_of
from .setup import init
from .watch import launch_watch

comptime WordsTensor = MutableInputTensor[dtype=DType.int32, rank=1, ...]
"""Words that an op changes: counters, or the order of the ops."""

comptime PointersTensor = InputTensor[dtype=DType.uint64, rank=1, ...]

comptime Int32Matrix = InputTensor[dtype=DType.int32, rank=2, ...]
"""Ids of choices, or `src_info`."""

comptime Float32Matrix = InputTensor[dtype=DType.float32, rank=2, ...]


def _bytes_of(tensor: InputTensor) -> BytePointer:
    return BytePointer(unsafe_from_address=Int(tensor.unsafe_ptr()))


def _bytes_of(tensor: OutputTensor) -> BytePointer:
    return BytePointer(unsafe_from_address=Int(tensor.unsafe_ptr()))


@extensibility.register("max_ep.init")
struct Init:
    """Prepares a rank's region and counters; hands out the addresses."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        device_ptrs: OutputTensor[dtype=DType.uint64, rank=2, ...],
        my_rank: OutputTensor[dtype=DType.int32, rank=1, ...],
        counters_0: WordsTensor,
        counters_1: WordsTensor,
        setup: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        init[target](
            device_ptrs.to_tile_tensor(),
            my_rank.to_tile_tensor(),
            counters_0.to_tile_tensor(),
            counters_1.to_tile_tensor(),
            setup.to_tile_tensor(),
            ctx,
        )


@extensibility.register("max_ep.join_quantized")
struct JoinQuantized:
    """Joins values and scales to tokens that dispatch forwards."""

    @staticmethod
    def execute[
        target: StaticString, hidden_size: Int, format: StaticString
    ](
        joined: OutputTensor[dtype=DType.uint8, rank=2, ...],
        values: InputTensor[rank=2, ...],
        scales: InputTensor[rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime Join = JoinWords[NumbersOf[format], hidden_size]
        for_each[target](
            values.dim_size(0) * Join.words_per_token,
            Join(_bytes_of(joined), _bytes_of(values), _bytes_of(scales)),
            ctx,
        )


@extensibility.register("max_ep.quantize_dynamic")
struct QuantizeDynamic:
    """Quantizes tokens to NVFP4, each with a scale of its own, for dispatch."""

    @staticmethod
    def execute[
        target: StaticString, hidden_size: Int
    ](
        joined: OutputTensor[dtype=DType.uint8, rank=2, ...],
        tokens: InputTensor[rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var work = QuantizeTokens[tokens.dtype, hidden_size](
            _bytes_of(joined), {unsafe_from_address = Int(tokens.unsafe_ptr())}
        )
        for_each[target](tokens.dim_size(0), work, ctx)


@extensibility.register("max_ep.ready")
struct Ready:
    """Does nothing, once the host has launched what makes these values, and all that
    changes an order. What is behind it in one of the orders is launched later."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        orders: MutableInputVariadicTensors[dtype=DType.int32, rank=1, ...],
        a: InputTensor[...],
        b: InputTensor[...],
        c: InputTensor[...],
        d: InputTensor[...],
        ctx: DeviceContext,
    ) raises:
        pass


@extensibility.register("max_ep.dispatch")
struct Dispatch:
    """Sends tokens to their experts (`dispatch_async`), completes receiving
    (`dispatch_wait`), or both in one launch (`dispatch`).

    The first has empty results. The second reads no inputs, and no `send_ptrs`.
    """

    @staticmethod
    def execute[
        target: StaticString,
        op: StaticString,
        config: StaticString,
        format: StaticString,
        has_input_scales: Bool,
    ](
        output_tokens: OutputTensor[rank=2, ...],
        output_scales: OutputTensor[rank=2, ...],
        row_offsets: OutputTensor[rank=1, ...],
        expert_ids: OutputTensor[dtype=DType.int32, ...],
        src_info: OutputTensor[dtype=DType.int32, rank=2, ...],
        routing_map: OutputTensor[dtype=DType.int32, rank=2, ...],
        probs: OutputTensor[dtype=DType.float32, rank=2, ...],
        n_gathered: OutputTensor[dtype=DType.int32, rank=1, ...],
        atomic_counters: WordsTensor,
        order: WordsTensor,
        input_tokens: InputTensor[rank=2, ...],
        topk_ids: Int32Matrix,
        input_scales: InputTensor[dtype=DType.float32, rank=1, ...],
        router_weights: Float32Matrix,
        send_ptrs: PointersTensor,
        recv_ptrs: PointersTensor,
        recv_count_ptrs: PointersTensor,
        ctx: DeviceContext,
    ) raises:
        @__parameter
        @always_inline
        def scale_of[dtype: DType](expert_id: Int) -> Scalar[dtype]:
            var idx = expert_id if input_scales.dim_size(0) > 1 else 0
            return input_scales.unsafe_ptr()[unsafe_offset=idx].cast[dtype]()

        comptime form = Form.of(op)
        check_entry[format, config]()
        comptime Format = FormatOfOp[format, config]
        comptime group = group_of(config, dispatch_msg_bytes=Format.msg_bytes)
        var call = Call[group].of[target](
            op,
            atomic_counters.to_tile_tensor(),
            recv_ptrs.to_tile_tensor(),
            recv_count_ptrs.to_tile_tensor(),
        )
        var given = unused[GivenTokens[input_tokens.dtype]]()
        comptime if form.sends:
            var sends = send_ptrs.to_tile_tensor()
            call.send_bufs = peer_buffers[group](op, "send_ptrs", sends)
            given = given_tokens[Format, target](
                call, input_tokens.to_tile_tensor(), topk_ids.to_tile_tensor()
            )
            comptime if group.has_sums:
                var weights = router_weights.to_tile_tensor()
                comptime n_choices = n_choices_of[Format]()
                check_shape(op, "router_weights", weights, given.n_tokens, n_choices)
                given.router_weights = imm(weights)
        var dispatched = unused[DispatchedRows[group, Format]]()
        comptime if form.receives:
            var outputs = OutputTensors(
                _bytes_of(output_tokens), _bytes_of(output_scales)
            )
            outputs.scales_columns = output_scales.dim_size(1)
            outputs.routing_map = _bytes_of(routing_map).unsafe_bitcast[Int32]()
            outputs.probs = _bytes_of(probs).unsafe_bitcast[Float32]()
            outputs.n_gathered = _bytes_of(n_gathered).unsafe_bitcast[Int32]()
            dispatched = dispatched_rows[Format](
                call,
                Format.Rows.of(outputs),
                row_offsets.to_tile_tensor(),
                expert_ids.to_tile_tensor(),
                src_info.to_tile_tensor(),
            )
        comptime scales = InputScales(scale_of) if has_input_scales else None
        launch_dispatch[Format, target, form, scales](call, given, dispatched, ctx)


@extensibility.register("max_ep.combine")
struct Combine:
    """Sends rows back (`combine_async`), reduces them (`combine_wait`), or both in one
    launch (`combine`).

    The first has an empty result. The second reads no `src_info` and no `send_ptrs`.
    """

    @staticmethod
    def execute[
        target: StaticString,
        op: StaticString,
        config: StaticString,
        combine_dtype: DType,
        partial_dtype: DType,
    ](
        output_tokens: OutputTensor[dtype=combine_dtype, rank=2, ...],
        atomic_counters: WordsTensor,
        order: WordsTensor,
        input_tokens: InputTensor[dtype=combine_dtype, rank=2, ...],
        src_info: Int32Matrix,
        router_weights: Float32Matrix,
        send_ptrs: PointersTensor,
        recv_ptrs: PointersTensor,
        recv_count_ptrs: PointersTensor,
        ctx: DeviceContext,
    ) raises:
        comptime form = Form.of(op)
        comptime group = CombineGroup[combine_dtype, partial_dtype, config]
        var call = Call[group].of[target](
            op,
            atomic_counters.to_tile_tensor(),
            recv_ptrs.to_tile_tensor(),
            recv_count_ptrs.to_tile_tensor(),
        )
        comptime if form.sends:
            var sends = send_ptrs.to_tile_tensor()
            call.send_bufs = peer_buffers[group](op, "send_ptrs", sends)
        var given = given_rows[form.sends](
            call, input_tokens.to_tile_tensor(), src_info.to_tile_tensor()
        )
        var combined = unused[CombinedTokens[combine_dtype]]()
        comptime if form.receives:
            combined = combined_tokens[target](
                call,
                output_tokens.to_tile_tensor(),
                router_weights.to_tile_tensor(),
                given,
            )
        launch_combine[partial_dtype, target, form](call, given, combined, ctx)


@extensibility.register("max_ep.degraded")
struct Degraded:
    """Flags the tokens that lack an expert because its rank is masked."""

    @staticmethod
    def execute[
        target: StaticString, config: StaticString
    ](
        degraded: OutputTensor[dtype=DType.bool, rank=1, ...],
        live_share: OutputTensor[dtype=DType.float32, rank=1, ...],
        atomic_counters: WordsTensor,
        order: WordsTensor,
        topk_ids: Int32Matrix,
        router_weights: Float32Matrix,
        ctx: DeviceContext,
    ) raises:
        comptime group = group_of(config)
        var call = Call[group].of_counters[target](
            "degraded", atomic_counters.to_tile_tensor()
        )
        var ids = topk_ids.to_tile_tensor()
        var weights = router_weights.to_tile_tensor()
        var n_tokens = degraded.dim_size(0)
        check_shape(call.op, "topk_ids", ids, n_tokens, group.top_k)
        check_shape(call.op, "router_weights", weights, n_tokens, group.top_k)
        var work = FindDegraded[group](
            mut_(degraded.to_tile_tensor()),
            mut_(live_share.to_tile_tensor()),
            call.counters,
            imm(ids),
            imm(weights),
        )
        for_each[target](n_tokens, work, ctx)


@extensibility.register("max_ep.watch")
struct Watch:
    """Measures how long a rank waits for each peer; changes nothing."""

    @staticmethod
    def execute[
        target: StaticString,
        config: StaticString,
        combine_dtype: DType,
        partial_dtype: DType,
        is_combine: Bool,
    ](
        waits_ns: OutputTensor[dtype=DType.int64, rank=1, ...],
        atomic_counters: WordsTensor,
        order: WordsTensor,
        recv_ptrs: PointersTensor,
        recv_count_ptrs: PointersTensor,
        ctx: DeviceContext,
    ) raises:
        # It stands for dispatch, too, of whose messages it does not know the size.
        comptime group = CombineGroup[combine_dtype, partial_dtype, config]
        var call = Call[group].of[target, checks_places=False](
            "watch",
            atomic_counters.to_tile_tensor(),
            recv_ptrs.to_tile_tensor(),
            recv_count_ptrs.to_tile_tensor(),
        )
        check_size(call.op, "waits_ns", waits_ns.dim_size(0), group.n_ranks)
        launch_watch[target, is_combine](call, mut_(waits_ns.to_tile_tensor()), ctx)


@extensibility.register("max_ep.dropped")
struct Dropped:
    """Counts what did not fit; changes nothing."""

    @staticmethod
    def execute[
        target: StaticString, config: StaticString
    ](
        of_tokens: OutputTensor[dtype=DType.int32, rank=1, ...],
        of_experts: OutputTensor[dtype=DType.int32, rank=1, ...],
        atomic_counters: WordsTensor,
        order: WordsTensor,
        topk_ids: Int32Matrix,
        ctx: DeviceContext,
    ) raises:
        comptime group = group_of(config)
        var call = Call[group].of_counters[target](
            "dropped", atomic_counters.to_tile_tensor()
        )
        var ids = topk_ids.to_tile_tensor()
        var n_tokens = of_tokens.dim_size(0)
        comptime n_experts = group.n_local_experts()
        call.check_n_tokens[target](n_tokens)
        check_shape(call.op, "topk_ids", ids, n_tokens, group.top_k)
        check_size(call.op, "experts", of_experts.dim_size(0), n_experts)
        var work = CountDropped[group](
            mut_(of_tokens.to_tile_tensor()),
            mut_(of_experts.to_tile_tensor()),
            call.counters,
            imm(ids),
            n_tokens,
        )
        for_each[target](n_tokens + n_experts, work, ctx)
