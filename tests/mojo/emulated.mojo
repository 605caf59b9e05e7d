# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels of small groups, which `tests/emulator` runs without a GPU.

Prints each group's name, what is where in its memory, and its words. Run by
tests/emulator/test_emulated.py.
"""
from emitting import ALL_CASES, emit
from max_ep.combine_rows.kernel import CombineRows
from max_ep.combine_sums.kernel import CombineSums
from max_ep.protocol.addressing import Addressing
from max_ep.protocol.arguments import InputScales
from max_ep.protocol.counters import local_sync_counters_words, masked_word
from max_ep.device.kernel import Kernel, kernel_entry
from max_ep.dispatch_by_expert.kernel import DispatchByExpert
from max_ep.dispatch_by_rank.kernel import DispatchByRank
from max_ep.formats.block_scaled import BlockScaledTokenFormat
from max_ep.formats.blockwise_fp8 import BlockwiseFP8TokenFormat
from max_ep.formats.given import GivenTokenFormat
from max_ep.formats.forwarded import ForwardedTokenFormat
from max_ep.formats.mxfp4 import MXFP4
from max_ep.formats.nvfp4 import NVFP4
from max_ep.formats.plain import BF16TokenFormat, PlainTokenFormat
from max_ep.formats.scale_layouts import InTiles, RowByRow
from max_ep.protocol.layout import Group
from max_ep.protocol.message_sizes import combine_msg_bytes
from max_ep.launch.setup import set_up_kernel
from max_ep.launch.sizes import sizes_of
from max_ep.protocol.token_format import TokenFormat

comptime B16 = DType.bfloat16
comptime F8 = DType.float8_e4m3fn


def small(
    *,
    n_experts: Int = 7,
    max_tokens: Int = 5,
    hidden_size: Int = 520,
    addressing: Addressing = Addressing.BY_RANK,
    has_sums: Bool = True,
    masks: Bool = False,
    drops_rows: Bool = False,
    shared: Bool = False,
    partial_block: Int = 0,
    n_hosts: Int = 1,
) -> Group:
    """Describes a group of three ranks and few tokens, whose last step is not whole. By
    expert, and with a shared expert, ranks share a GPU. Over several hosts each has two
    ranks."""
    var combine_msg = combine_msg_bytes[B16](hidden_size)
    if partial_block != 0:
        combine_msg = combine_msg_bytes[F8](hidden_size, partial_block)
    return Group(
        n_experts=n_experts,
        n_ranks=3 if n_hosts == 1 else 2 * n_hosts,
        n_mapped=0 if n_hosts == 1 else 2,
        max_tokens_per_rank=max_tokens,
        top_k=3,
        hidden_size=hidden_size,
        dispatch_msg_bytes=combine_msg_bytes[B16](hidden_size),
        combine_msg_bytes=combine_msg,
        addressing=addressing,
        has_sums=has_sums,
        fused_shared_expert=shared,
        shares_gpu=n_hosts == 1 and (shared or addressing == Addressing.BY_EXPERT),
        num_threads=320,
        masks=masks,
        drops_rows=drops_rows,
        partial_block=partial_block,
    )


def late(group: Group) -> Group:
    """Describes a group whose weights come with combine."""
    var of = group
    of.late_weights = True
    return of


def padded(group: Group) -> Group:
    """Describes a group whose experts have rows of their own."""
    var of = group
    of.is_padded = True
    return of


def choosing(group: Group, top_k: Int) -> Group:
    """Describes a group whose tokens have so many choices."""
    var of = group
    of.top_k = top_k
    return of


def relaying(group: Group) -> Group:
    """Describes a group whose ranks relay to others of their host."""
    var of = group
    of.relays = True
    return of


comptime MANY = Group(
    n_experts=20,
    n_ranks=2,
    max_tokens_per_rank=260,
    top_k=17,
    hidden_size=1024,
    dispatch_msg_bytes=combine_msg_bytes[B16](1024),
    combine_msg_bytes=combine_msg_bytes[B16](1024),
    addressing=Addressing.BY_RANK,
    has_sums=True,
    shares_gpu=False,
    num_threads=320,
)
"""A rank may send more tokens than are inline, and more choices than blocks share."""


def apart(group: Group) -> Group:
    """Describes a group whose ranks are on hosts of their own."""
    var of = group
    of.n_mapped = 1
    return of


def of_phase(group: Group, is_combine: Bool) -> Group:
    """Describes the group for a kernel of dispatch or of combine."""
    var of = group
    if is_combine:
        of.dispatch_msg_bytes = 0
    else:
        of.combine_msg_bytes = 0
    return of


def emit_form[P: Kernel, splits: Bool](phase: String, name: String) raises:
    """Compiles a fused kernel, or the two that only send or receive."""
    comptime if splits:
        emit[kernel_entry[P, True, False], links=False](String(phase, "_async.", name))
        emit[kernel_entry[P, False, True], links=False](String(phase, "_wait.", name))
    else:
        emit[kernel_entry[P, True, True], links=False](String(phase, ".", name))


def emit_group[
    group: Group, splits: Bool = False, keeps_rows: Bool = False
](name: String) raises:
    """Compiles the kernels of a group, and describes it."""
    comptime Format = BF16TokenFormat[group.hidden_size, group.top_k]
    comptime there = of_phase(group, False)
    comptime back = of_phase(group, True)
    comptime if group.is_by_rank():
        emit_form[DispatchByRank[there, Format, B16], splits]("dispatch", name)
    else:
        emit_form[DispatchByExpert[there, Format, B16], splits]("dispatch", name)
    comptime if group.has_sums:
        comptime partial = B16 if group.partial_block == 0 else F8
        emit_form[CombineSums[back, B16, partial], splits]("combine", name)
    else:
        emit_form[CombineRows[back, B16, keeps_rows], splits]("combine", name)
    describe(group, name)


def emit_format[Format: TokenFormat, token_type: DType = B16](name: String) raises:
    """Compiles a dispatch of quantized tokens, whose last step is not whole."""
    comptime group = Group(
        n_experts=7,
        n_ranks=3,
        max_tokens_per_rank=5,
        top_k=Format.top_k,
        hidden_size=Format.hidden_size,
        dispatch_msg_bytes=Format.msg_bytes,
        addressing=Addressing.BY_RANK,
        shares_gpu=False,
        num_threads=320,
    )
    emit_form[DispatchByRank[group, Format, token_type], False]("dispatch", name)
    describe(group, name)


comptime ROW_BYTES = 1040
"""Bytes of a row as it is given; its last step is not whole."""
comptime N_SCALES = 3


def given(
    msg_bytes: Int,
    hidden_size: Int,
    combine_msg: Int,
    router_top_k: Int,
    *,
    is_plain: Bool,
    n_ranks: Int,
    relays: Bool,
    n_local: Int,
) -> Group:
    """Describes a group as PyTorch has it: plain rows, or expanded and aligned. Four ranks
    are on two hosts."""
    return Group(
        n_experts=n_ranks if is_plain else n_ranks * n_local,
        n_ranks=n_ranks,
        n_mapped=2 if n_ranks == 4 else 0,
        max_tokens_per_rank=70,
        top_k=n_ranks if is_plain else router_top_k,
        hidden_size=hidden_size,
        dispatch_msg_bytes=msg_bytes,
        combine_msg_bytes=combine_msg,
        addressing=Addressing.TO_RANKS if is_plain else Addressing.BY_RANK,
        has_sums=True,
        shares_gpu=False,
        wide_ids=True,
        num_threads=320,
        router_top_k=router_top_k if is_plain else 0,
        router_experts=n_ranks * n_local,
        row_alignment=1 if is_plain else 4,
        relays=relays,
    )


def emit_given[
    is_plain: Bool,
    router_top_k: Int,
    n_ranks: Int = 3,
    relays: Bool = False,
    more_experts: Int = 0,
](name: String) raises:
    """There are as many experts on a rank as choices in a token, and some more."""
    comptime n_local = router_top_k + more_experts
    comptime Format = GivenTokenFormat[
        ROW_BYTES,
        N_SCALES,
        n_ranks if is_plain else router_top_k,
        router_top_k if is_plain else 0,
        n_local,
    ]
    comptime hidden = ROW_BYTES // 2
    comptime back = combine_msg_bytes[B16](hidden)
    comptime of = given(
        Format.msg_bytes,
        Format.hidden_size,
        0,
        router_top_k,
        is_plain=is_plain,
        n_ranks=n_ranks,
        relays=relays,
        n_local=n_local,
    )
    emit_form[DispatchByRank[of, Format, DType.uint8], False]("dispatch", name)
    comptime sums = given(
        0,
        hidden,
        back,
        router_top_k,
        is_plain=is_plain,
        n_ranks=n_ranks,
        relays=relays,
        n_local=n_local,
    )
    emit_form[CombineSums[sums, B16, B16], False]("combine", name)
    comptime all_ = given(
        Format.msg_bytes,
        hidden,
        back,
        router_top_k,
        is_plain=is_plain,
        n_ranks=n_ranks,
        relays=relays,
        n_local=n_local,
    )
    describe(all_, name)


@__parameter
def scale_of[dtype: DType](expert_id: Int) -> Scalar[dtype]:
    return Scalar[dtype](1 << expert_id)


def emit_scaled[group: Group](name: String) raises:
    """Compiles a dispatch by expert with an input scale for each expert."""
    comptime there = of_phase(group, False)
    comptime Format = BF16TokenFormat[group.hidden_size, group.top_k]
    comptime P = DispatchByExpert[there, Format, B16]
    emit[kernel_entry[P, True, True, InputScales(scale_of)], links=False](
        String("dispatch.", name)
    )
    describe(group, name)


def emit_gather(name: String) raises:
    """Compiles the dispatch of an all-gather with four choices of the router."""
    comptime Format = PlainTokenFormat[B16, 264, 3, 4]
    comptime group = Group(
        n_experts=3,
        n_ranks=3,
        max_tokens_per_rank=20,
        top_k=3,
        hidden_size=Format.hidden_size,
        dispatch_msg_bytes=Format.msg_bytes,
        addressing=Addressing.TO_ALL,
        has_sums=True,
        shares_gpu=False,
        num_threads=320,
    )
    emit_form[DispatchByRank[group, Format, B16], False]("dispatch", name)
    describe(group, name)


def describe(group: Group, name: String):
    print(
        name,
        group.hidden_size,
        group.region_bytes(),
        local_sync_counters_words(group),
        masked_word(group),
        group.dispatch_recv_offset(),
        group.dispatch_counts_offset(),
        group.combine_recv_offset(),
        group.combine_counts_offset(),
        Int(group.fused_shared_expert),
        end="",
    )
    for word in group.words():
        print("", word, end="")
    print()
    print(name + ".sizes", sizes_of(group))


def emit_slow() raises:
    """Compiles what only `make test-all` runs."""
    emit_group[small(n_experts=270, drops_rows=True, n_hosts=2)]("hosts_drops")
    emit_group[late(small(n_hosts=2))]("hosts_late")
    comptime hosts = relaying(late(small(n_hosts=2)))
    emit_group[hosts, splits=True]("hosts_relay_late_split")
    comptime hosts_fp8 = small(hidden_size=384, partial_block=128, n_hosts=3)
    emit_group[relaying(hosts_fp8)]("hosts_relay_fp8_sums")
    comptime drops = small(
        n_experts=270, hidden_size=248, drops_rows=True, has_sums=False
    )
    emit_group[drops]("drops_rows")
    emit_group[small(hidden_size=384, partial_block=128, n_hosts=2)]("hosts_fp8_sums")
    emit_group[late(small(max_tokens=20, n_hosts=2)), splits=True]("hosts_late_split")
    emit_given[True, 3, 4]("hosts_plain")
    emit_given[True, 17, 4]("hosts_plain_many")
    emit_group[relaying(small(hidden_size=7432, n_hosts=2))]("hosts_relay_long")
    emit_group[small(hidden_size=384, partial_block=32)]("mxfp8_sums")
    # A rank has more choices than a block has threads.
    comptime late_wide = late(small(n_experts=30, max_tokens=12))
    emit_group[choosing(late_wide, 28)]("late_wide")


def main() raises:
    comptime if ALL_CASES:
        emit_slow()
    emit[set_up_kernel, links=False]("set_up")
    emit_group[small()]("sums")
    # So many experts that several warps count rows, whose last step is whole.
    emit_group[small(n_experts=269, hidden_size=512, has_sums=False)]("rows")
    comptime expert = small(
        max_tokens=20, addressing=Addressing.BY_EXPERT, has_sums=False
    )
    emit_group[expert, splits=True]("expert")
    emit_group[small(hidden_size=264, shared=True), splits=True]("shared")
    comptime expert_shared = small(
        max_tokens=7,  # More than warps that send.
        hidden_size=264,
        addressing=Addressing.BY_EXPERT,
        has_sums=False,
        shared=True,
    )
    emit_group[expert_shared]("expert_shared")
    emit_group[small(hidden_size=384, partial_block=128)]("fp8_sums")
    emit_group[late(small())]("late")
    emit_group[late(small(max_tokens=20)), splits=True]("late_split")
    emit_group[small(masks=True)]("masks")
    # A token has one chunk, of one step.
    emit_group[small(n_experts=270, hidden_size=248, drops_rows=True)]("drops")
    emit_group[MANY, splits=True]("many")
    # With so many tokens and more than two ranks all blocks share the work.
    emit_group[small(max_tokens=258, hidden_size=264)]("work")
    emit_group[small(n_experts=7, n_hosts=2)]("hosts_sums")
    comptime hosts_rows = small(hidden_size=264, has_sums=False, shared=True, n_hosts=2)
    emit_group[hosts_rows, splits=True]("hosts_rows")
    comptime hosts_expert = small(
        hidden_size=264, addressing=Addressing.BY_EXPERT, has_sums=False, n_hosts=2
    )
    emit_group[hosts_expert]("hosts_expert")
    emit_group[apart(MANY)]("hosts_many")
    # So many steps that a chunk of a token is not loaded at once.
    comptime long = small(hidden_size=7432)
    emit_group[long]("long")
    # More pairs than a warp reads at once, more choices than rows that are in flight.
    comptime wide = small(
        n_experts=269,
        max_tokens=2,
        hidden_size=1808,
        addressing=Addressing.BY_EXPERT,
        has_sums=False,
    )
    emit_group[choosing(wide, 9)]("wide")
    emit_group[small(masks=True, has_sums=False)]("masks_rows")
    emit_group[small(has_sums=False), splits=True, keeps_rows=True]("keeps")
    emit_group[padded(small(hidden_size=264, has_sums=False))]("padded")
    comptime by_expert = small(
        hidden_size=264, addressing=Addressing.BY_EXPERT, has_sums=False
    )
    emit_group[padded(by_expert)]("padded_expert")
    emit_scaled[by_expert]("expert_scaled")
    emit_group[relaying(small(n_hosts=2))]("hosts_relay")
    emit_given[True, 1]("plain_one")
    emit_given[True, 3]("plain")
    # So many choices of the router that neither lanes nor shared memory hold all ids.
    emit_given[True, 17]("plain_many")
    emit_given[False, 4]("expanded")
    # More experts on a rank than lanes in a warp.
    emit_given[False, 4, more_experts=33]("expanded_wide")
    emit_given[False, 4, 4]("hosts_expanded")
    emit_given[True, 3, 4, relays=True]("hosts_relay_plain")
    emit_gather("gather")
    emit_format[BlockwiseFP8TokenFormat[640, 3]]("fp8")
    emit_format[BlockScaledTokenFormat[NVFP4, RowByRow, 1152, 3]]("nvfp4")
    emit_format[BlockScaledTokenFormat[NVFP4, InTiles, 1152, 3]]("nvfp4_tiles")
    # A step would have more vectors of scales than a token has, all of them whole.
    emit_format[BlockScaledTokenFormat[NVFP4, RowByRow, 256, 3]]("nvfp4_short")
    emit_format[BlockScaledTokenFormat[MXFP4, RowByRow, 512, 3]]("mxfp4_short")
    emit_format[ForwardedTokenFormat[NVFP4, RowByRow, 1152, 3], DType.uint8](
        "nvfp4_forwarded"
    )
