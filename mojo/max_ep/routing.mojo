# SPDX-License-Identifier: Apache-2.0
"""The router's top-k: softmax, the largest logits, and their weights, in one launch.

Results are the inputs of dispatch: int32 ids and float32 weights. With balanced
experts, the ids are those of replicas.
"""
from max.algorithm import sync_parallelize
from max.gpu import block_idx, thread_idx, WARP_SIZE
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from max.gpu.primitives import warp
from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv, exp
from std.memory import bitcast
from std.sys import is_nvidia_gpu, llvm_intrinsic

from .for_each import Work
from .kernel_argument import KernelArgument
from .layout import MAX_TOP_K

comptime _NUM_THREADS = 128
comptime _NONE = UInt32(0)
"""Key of what has been chosen, or is no expert."""
comptime _SIGN = UInt32(1 << 31)


comptime _OUT_OF_RANGE = Int32(-2)
"""What a wrong id becomes; dispatch drops and reports it."""


@fieldwise_init
struct Replicas(KernelArgument, TrivialRegisterPassable):
    """The physical experts that are replicas of a layer's logical experts."""

    var log2phy: Pointer[Int32, ImmUntrackedOrigin]
    """Table `[n_logical][max_replicas]`."""
    var logcnt: Pointer[Int32, ImmUntrackedOrigin]
    """Replicas of each expert, `[n_logical]`."""
    var n_logical: Int32
    """Logical experts."""
    var max_replicas: Int32
    """Columns of `log2phy`."""

    @always_inline
    def physical(self, expert: Int32, choice: Int) -> Int32:
        """Returns a replica for a choice, `token * top_k + k`; ids below 0 stay."""
        if expert < 0:
            return expert
        if expert >= self.n_logical:
            return _OUT_OF_RANGE
        var count = UInt32(max(self.logcnt[unsafe_offset=Int(expert)], 1))
        var replica = Int32(UInt32(choice) % count)
        return self.log2phy[unsafe_offset=Int(expert * self.max_replicas + replica)]


@always_inline
def _key(logit: Float32) -> UInt32:
    """Makes a number that sorts as a logit does, NaN as the largest."""
    var bits = bitcast[DType.uint32](logit + 0)  # no negative zero
    if logit != logit:
        return UInt32.MAX
    return max(~bits if bits & _SIGN != 0 else bits | _SIGN, _NONE + 1)


@always_inline
def _logit(key: UInt32) -> Float32:
    """Finds the logit of a key."""
    return bitcast[DType.float32](key ^ _SIGN if key & _SIGN != 0 else ~key)


@always_inline
def _largest_of_lanes(n: UInt32) -> UInt32:
    comptime if is_nvidia_gpu():
        return llvm_intrinsic["llvm.nvvm.redux.sync.umax", UInt32](n, Int32(-1))
    return warp.max(n)


def softmax_top_k_kernel[
    dtype: DType, n_experts: Int, top_k: Int, renormalize: Bool, balanced: Bool = False
](
    ids: Pointer[Int32, MutUntrackedOrigin],
    weights: Pointer[Float32, MutUntrackedOrigin],
    logits: Pointer[Scalar[dtype], ImmUntrackedOrigin],
    n_tokens: Int32,
    replicas: Replicas,
):
    """Chooses with a warp for each token.

    Launch: blocks of `_NUM_THREADS` threads, a warp for each token.

    Parameters:
        dtype: Element type of the logits.
        n_experts: Experts.
        top_k: How many to choose, at most `MAX_TOP_K`: a lane has one.
        renormalize: Whether a token's weights add up to one.
        balanced: Whether ids are those of replicas.

    Args:
        ids: Result `[n_tokens][top_k]`, by falling logit, equal ones by id.
        weights: Result `[n_tokens][top_k]`.
        logits: `[n_tokens][n_experts]`.
        n_tokens: Tokens.
        replicas: The layer's replicas, if `balanced`.
    """
    comptime n_mine = ceildiv(n_experts, WARP_SIZE)
    var warp_idx, lane = divmod(Int(thread_idx.x), WARP_SIZE)
    var token = Int(block_idx.x) * (_NUM_THREADS // WARP_SIZE) + warp_idx
    if token >= Int(n_tokens):
        return
    # A lane has every `WARP_SIZE`-th expert.
    var keys = Array[UInt32, n_mine](fill=_NONE)
    comptime for i in range(n_mine):
        var expert = i * WARP_SIZE + lane
        if expert < n_experts:
            keys[i] = _key(
                logits[unsafe_offset=token * n_experts + expert].cast[DType.float32]()
            )
    var largest = Float32(0)
    var others = Float32(0)
    var my_id = Int32(0)
    var my_logit = Float32(0)
    comptime for choice in range(top_k):
        var key = keys[0]
        var expert = lane
        comptime for i in range(1, n_mine):
            if keys[i] > key:
                key = keys[i]
                expert = i * WARP_SIZE + lane
        var best = _largest_of_lanes(key)
        # Of equal ones the first: the largest of what falls as ids rise.
        var rank = UInt32(n_experts - expert) if key == best else UInt32(0)
        var chosen = n_experts - Int(_largest_of_lanes(rank))
        if choice == 0:
            largest = _logit(best)
            comptime if not renormalize:
                comptime for i in range(n_mine):
                    if keys[i] != _NONE:
                        others += exp(_logit(keys[i]) - largest)
        comptime for i in range(n_mine):
            if chosen == i * WARP_SIZE + lane:
                keys[i] = _NONE
        if lane == choice:
            my_id = Int32(chosen)
            my_logit = _logit(best)
    var mine = exp(my_logit - largest) if lane < top_k else Float32(0)
    var sum = warp.sum(mine if renormalize else others)
    if lane < top_k:
        comptime if balanced:
            my_id = replicas.physical(my_id, token * top_k + lane)
        ids[unsafe_offset=token * top_k + lane] = my_id
        weights[unsafe_offset=token * top_k + lane] = mine / sum


def _choose_on_host[
    dtype: DType
](
    ids: Pointer[Int32, MutUntrackedOrigin],
    weights: Pointer[Float32, MutUntrackedOrigin],
    logits: Pointer[Scalar[dtype], ImmUntrackedOrigin],
    n_experts: Int,
    top_k: Int,
    renormalize: Bool,
):
    """Chooses for one token, as `softmax_top_k_kernel`."""
    var keys = List[UInt32](length=n_experts, fill=_NONE)
    for expert in range(n_experts):
        keys[expert] = _key(logits[unsafe_offset=expert].cast[DType.float32]())
    var sum = Float32(0)
    for choice in range(top_k):
        var chosen = 0
        for expert in range(1, n_experts):
            if keys[expert] > keys[chosen]:
                chosen = expert
        ids[unsafe_offset=choice] = Int32(chosen)
        weights[unsafe_offset=choice] = _logit(keys[chosen])
        keys[chosen] = _NONE
    var largest = weights[unsafe_offset=0]
    for choice in range(top_k):
        var below = weights[unsafe_offset=choice] - largest
        # The host's `exp` makes a number of NaN.
        var weight = exp(below) if below == below else below
        weights[unsafe_offset=choice] = weight
        sum += weight
    if not renormalize:
        for expert in range(n_experts):
            if keys[expert] != _NONE:
                sum += exp(_logit(keys[expert]) - largest)
    for choice in range(top_k):
        weights[unsafe_offset=choice] /= sum


@fieldwise_init
struct Router[dtype: DType](TrivialRegisterPassable):
    """What a router's op is given, and where its choice goes."""

    var ids: Pointer[Int32, MutUntrackedOrigin]
    """Result `[n_tokens][top_k]`."""
    var weights: Pointer[Float32, MutUntrackedOrigin]
    """Result `[n_tokens][top_k]`."""
    var logits: Pointer[Scalar[Self.dtype], ImmUntrackedOrigin]
    """Logits `[n_tokens][n_experts]`."""
    var n_tokens: Int
    """Tokens."""
    var replicas: Replicas
    """The layer's replicas, if experts are balanced."""


def launch_softmax_top_k[
    target: StaticString,
    dtype: DType,
    n_experts: Int,
    top_k: Int,
    renormalize: Bool,
    balanced: Bool,
](router: Router[dtype], context: DeviceContext) raises:
    """Chooses for all tokens, on CPU or GPU."""
    comptime assert (
        1 <= top_k <= min(n_experts, MAX_TOP_K)
    ), "max_ep: top_k must be in [1, min(MAX_TOP_K, n_experts)]"
    var n_tokens = router.n_tokens
    if n_tokens == 0:
        return
    comptime if is_gpu[target]():
        comptime kernel = softmax_top_k_kernel[
            dtype, n_experts, top_k, renormalize, balanced
        ]
        var function = context.compile_function[kernel]()
        context.enqueue_function(
            function,
            router.ids,
            router.weights,
            router.logits,
            Int32(n_tokens),
            router.replicas,
            grid_dim=ceildiv(
                n_tokens, _NUM_THREADS // context.default_device_info.warp_size
            ),
            block_dim=_NUM_THREADS,
        )
    else:
        var n_chunks = min(n_tokens, parallelism_level(None))

        def run_chunk(chunk: Int) {imm}:
            for token in range(
                chunk * n_tokens // n_chunks, (chunk + 1) * n_tokens // n_chunks
            ):
                var first = token * top_k
                var ids = router.ids.unsafe_offset(first)
                _choose_on_host[dtype](
                    ids,
                    router.weights.unsafe_offset(first),
                    router.logits.unsafe_offset(token * n_experts),
                    n_experts,
                    top_k,
                    renormalize,
                )
                comptime if balanced:
                    for k in range(top_k):
                        ids[unsafe_offset=k] = router.replicas.physical(
                            ids[unsafe_offset=k], first + k
                        )

        sync_parallelize(run_chunk, n_chunks)


@fieldwise_init
struct ToReplicas(Work):
    """Replaces logical experts by replicas."""

    var physical: Pointer[Int32, MutUntrackedOrigin]
    """Result `[n_tokens][top_k]`."""
    var ids: Pointer[Int32, ImmUntrackedOrigin]
    """Logical experts `[n_tokens][top_k]`."""
    var replicas: Replicas
    """The layer's replicas."""

    @always_inline
    def do(self, i: Int):
        self.physical[unsafe_offset=i] = self.replicas.physical(
            self.ids[unsafe_offset=i], i
        )
