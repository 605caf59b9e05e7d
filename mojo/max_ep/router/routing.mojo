# SPDX-License-Identifier: Apache-2.0
"""The router's top-k: softmax, the largest logits, and their weights, in one launch."""
from max.gpu import lane_id, WARP_SIZE
from max.gpu.primitives import warp
from std.math import ceildiv, exp
from std.memory import bitcast
from std.sys import is_gpu, is_nvidia_gpu, llvm_intrinsic

from ..protocol.failures import as_no_expert
from ..protocol.kernel_argument import ImmPointer, KernelArgument, MutPointer
from ..protocol.layout import MAX_TOP_K
from ..work.for_each import Work

comptime _NONE = UInt32(0)
"""Key of what has been chosen, or is no expert."""
comptime _SIGN = UInt32(1 << 31)


@fieldwise_init
struct Replicas(KernelArgument, TrivialRegisterPassable):
    """The physical experts that are replicas of a layer's logical experts."""

    var log2phy: ImmPointer[Int32]
    """Table `[n_logical][max_replicas]`."""
    var logcnt: ImmPointer[Int32]
    """Replicas of each expert, `[n_logical]`."""
    var n_logical: Int32
    var max_replicas: Int32
    """Columns of `log2phy`."""

    @always_inline
    def physical(self, expert: Int32, choice: Int) -> Int32:
        """Returns a replica for a choice, `token * top_k + k`; ids below 0 stay."""
        if expert < 0:
            return expert
        if expert >= self.n_logical:
            return as_no_expert(expert)
        var n = self.logcnt.unsafe_load[invariant=False](Int(expert))
        var replica = Int32(UInt32(choice) % UInt32(max(n, 1)))
        return self.log2phy.unsafe_load[invariant=False](
            Int(expert * self.max_replicas + replica)
        )


@always_inline
def _key(logit: Float32) -> UInt32:
    """Makes a number that sorts as a logit does, NaN as the largest."""
    var bits = bitcast[DType.uint32](logit + 0)  # no negative zero
    if logit != logit:
        return UInt32.MAX
    return max(~bits if bits & _SIGN != 0 else bits | _SIGN, _NONE + 1)


@always_inline
def _logit(key: UInt32) -> Float32:
    return bitcast[DType.float32](key ^ _SIGN if key & _SIGN != 0 else ~key)


@always_inline
def _largest_of_lanes(n: UInt32) -> UInt32:
    comptime if is_nvidia_gpu():
        return llvm_intrinsic["llvm.nvvm.redux.sync.umax", UInt32](n, Int32(-1))
    return warp.max(n)


@fieldwise_init
struct ChooseExperts[
    dtype: DType, n_experts: Int, top_k: Int, renormalize: Bool, balanced: Bool
](Work):
    """Chooses the experts of a token, at most `MAX_TOP_K`: a lane has one.

    With `renormalize` the weights add up to one.
    """

    comptime by_warp = True
    comptime overlaps = True

    var ids: MutPointer[Int32]
    """Result `[n_tokens][top_k]`, by falling logit, equal ones by id."""
    var weights: MutPointer[Float32]
    """Result `[n_tokens][top_k]`."""
    var logits: ImmPointer[Scalar[Self.dtype]]
    """`[n_tokens][n_experts]`."""
    var replicas: Replicas
    """Which stand for the experts, if `balanced`."""

    @always_inline
    def do(self, i: Int):
        comptime assert (
            1 <= Self.top_k <= min(Self.n_experts, MAX_TOP_K)
        ), "max_ep: top_k must be in [1, min(MAX_TOP_K, n_experts)]"
        comptime if is_gpu():
            self._choose_with_warp(i)
        else:
            self._choose(i)

    @always_inline
    def _key_of(self, token: Int, expert: Int) -> UInt32:
        var logit = self.logits.unsafe_load[invariant=False](
            token * Self.n_experts + expert
        )
        return _key(logit.cast[DType.float32]())

    @always_inline
    def _put(self, token: Int, choice: Int, id: Int32, weight: Float32):
        var place = token * Self.top_k + choice
        var chosen = id
        comptime if Self.balanced:
            chosen = self.replicas.physical(id, place)
        self.ids[unsafe_offset=place] = chosen
        self.weights[unsafe_offset=place] = weight

    @always_inline
    def _choose_with_warp(self, token: Int):
        comptime n_mine = ceildiv(Self.n_experts, WARP_SIZE)
        var lane = Int(lane_id())
        # A lane has every `WARP_SIZE`-th expert.
        var keys = Array[UInt32, n_mine](fill=_NONE)
        comptime for i in range(n_mine):
            var expert = i * WARP_SIZE + lane
            if expert < Self.n_experts:
                keys[i] = self._key_of(token, expert)
        var largest = Float32(0)
        var others = Float32(0)
        var my_id = Int32(0)
        var my_logit = Float32(0)
        comptime for choice in range(Self.top_k):
            var key = keys[0]
            var expert = lane
            comptime for i in range(1, n_mine):
                if keys[i] > key:
                    key = keys[i]
                    expert = i * WARP_SIZE + lane
            var best = _largest_of_lanes(key)
            # Among equal ones take the first: the largest of what falls as ids rise.
            var rank = UInt32(Self.n_experts - expert) if key == best else UInt32(0)
            var chosen = Self.n_experts - Int(_largest_of_lanes(rank))
            if choice == 0:
                largest = _logit(best)
                comptime if not Self.renormalize:
                    comptime for i in range(n_mine):
                        if keys[i] != _NONE:
                            others += exp(_logit(keys[i]) - largest)
            comptime for i in range(n_mine):
                if chosen == i * WARP_SIZE + lane:
                    keys[i] = _NONE
            if lane == choice:
                my_id = Int32(chosen)
                my_logit = _logit(best)
        var mine = exp(my_logit - largest) if lane < Self.top_k else Float32(0)
        var sum = warp.sum(mine if Self.renormalize else others)
        if lane < Self.top_k:
            self._put(token, lane, my_id, mine / sum)

    def _choose(self, token: Int):
        """Chooses the same with one thread of a CPU."""
        var keys = List[UInt32](length=Self.n_experts, fill=_NONE)
        for expert in range(Self.n_experts):
            keys[expert] = self._key_of(token, expert)
        var ids = Array[Int32, Self.top_k](fill=0)
        var weights = Array[Float32, Self.top_k](fill=0)
        var largest = Float32(0)
        var sum = Float32(0)
        for choice in range(Self.top_k):
            var chosen = 0
            for expert in range(1, Self.n_experts):
                if keys[expert] > keys[chosen]:
                    chosen = expert
            var logit = _logit(keys[chosen])
            if choice == 0:
                largest = logit
            # A CPU's `exp` makes a number of NaN.
            var below = logit - largest
            weights[choice] = exp(below) if below == below else below
            ids[choice] = Int32(chosen)
            sum += weights[choice]
            keys[chosen] = _NONE
        comptime if not Self.renormalize:
            for key in keys:
                if key != _NONE:
                    sum += exp(_logit(key) - largest)
        for choice in range(Self.top_k):
            self._put(token, choice, ids[choice], weights[choice] / sum)


@fieldwise_init
struct ToReplicas(Work):
    """Replaces logical experts by replicas."""

    var physical: MutPointer[Int32]
    """Result `[n_tokens][top_k]`."""
    var ids: ImmPointer[Int32]
    """Logical experts `[n_tokens][top_k]`."""
    var replicas: Replicas

    @always_inline
    def do(self, i: Int):
        self.physical[unsafe_offset=i] = self.replicas.physical(
            self.ids[unsafe_offset=i], i
        )
