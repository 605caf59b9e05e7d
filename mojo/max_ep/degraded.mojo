# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a rank lack an expert because its rank is masked.

The op stands behind the combine of the tokens: it reads the mask as that left it.
"""
from layout import TileTensor
from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.host.info import is_gpu
from std.math import ceildiv

from .arguments import Call, check_shape, check_size, imm, mut_, RouterWeights
from .counters import EPLocalSyncCounters
from .device.phase import Queue
from .layout import Group

comptime _NUM_THREADS = 128


@always_inline
def _of_token[
    group: Group
](
    token_idx: Int,
    degraded: Pointer[Scalar[DType.bool], MutUntrackedOrigin],
    live_share: Pointer[Float32, MutUntrackedOrigin],
    counters: EPLocalSyncCounters[group.n_experts],
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
):
    """Looks at a token's choices; those without an expert do not count."""
    var all = Float32(0)
    var live = Float32(0)
    var is_degraded = False
    for k in range(group.top_k):
        var choice = group.choice(token_idx, k)
        var expert_id = Int(topk_ids[unsafe_offset=choice])
        if expert_id < 0 or expert_id >= group.n_experts:
            continue
        var weight = router_weights[unsafe_offset=choice]
        all += weight
        if counters.is_masked(group, expert_id // group.n_local_experts()):
            is_degraded = True
        else:
            live += weight
    degraded[unsafe_offset=token_idx] = is_degraded
    live_share[unsafe_offset=token_idx] = live / all if is_degraded and all > 0 else 1


def degraded_kernel[
    group: Group
](
    degraded: Pointer[Scalar[DType.bool], MutUntrackedOrigin],
    live_share: Pointer[Float32, MutUntrackedOrigin],
    counters: EPLocalSyncCounters[group.n_experts],
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
    n_tokens: Int32,
):
    """Looks at one token with each thread. Launch: a thread for each token."""
    var token_idx = Int(block_idx.x * block_dim.x + thread_idx.x)
    if token_idx < Int(n_tokens):
        _of_token[group](
            token_idx, degraded, live_share, counters, topk_ids, router_weights
        )


def launch_degraded[
    group: Group, //, target: StaticString
](
    call: Call[group],
    degraded: TileTensor[DType.bool, ...],
    live_share: TileTensor[DType.float32, ...],
    topk_ids: TileTensor[DType.int32, ...],
    router_weights: RouterWeights,
    queue: Queue,
) raises:
    """Flags the tokens with a choice on a masked rank."""
    var n_tokens = Int(degraded.dim[0]())
    var counters = call.counters
    check_shape(call.op, "topk_ids", topk_ids, n_tokens, group.top_k)
    check_size(call.op, "rows of router_weights", router_weights.n_tokens, n_tokens)
    check_size(call.op, "columns of router_weights", router_weights.top_k, group.top_k)
    comptime if is_gpu[target]():
        comptime kernel = degraded_kernel[group]
        var function = queue.context.compile_function[kernel]()
        if n_tokens > 0:
            queue.stream().enqueue_function(
                function,
                mut_(degraded),
                mut_(live_share),
                counters,
                imm(topk_ids),
                router_weights.weights,
                Int32(n_tokens),
                grid_dim=ceildiv(n_tokens, _NUM_THREADS),
                block_dim=_NUM_THREADS,
            )
    else:
        for token_idx in range(n_tokens):
            _of_token[group](
                token_idx,
                mut_(degraded),
                mut_(live_share),
                counters,
                imm(topk_ids),
                router_weights.weights,
            )
