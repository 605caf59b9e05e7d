# SPDX-License-Identifier: Apache-2.0
"""What a library is built for, given by `-D` (`max_ep/torch/library.py`).

Tokens are addressed by rank.

    TARGET              cpu or gpu
    ROWS                padded: rows by expert, each expert's in a block of its own;
                        combine returns rows. plain: a row for each token and rank, with
                        ids and weights. expanded: rows by expert. Of the last two,
                        combine returns sums
    FORMAT              padded: a name of `formats/table.mojo`, what dispatch sends, with
                        `_forwarded` if tokens are given so; else: given
                        (`formats/given.mojo`)
    HIDDEN              elements of a token; given: bytes of a row
    SCALES              given: words of scales of a row
    COMBINE             bfloat16 or float32: elements of expert rows and results
    COMBINE_HIDDEN      how many of them
    PARTIAL             the same of partial sums
    ALIGNMENT           expanded: rows of an expert begin at a multiple of it
    EXPERTS, RANKS, TOP_K, TOKENS      of the group; TOKENS: the most of a rank
    PACKED_SCALES       whether scales are exponents, four in an int32
    MAPPED              ranks of a host, whose memory is mapped; 0: all ranks
    RELAYS              whether tokens and sums cross once to each other host
    WIDE_IDS            whether ids are int64
    MASKS               whether a rank that is late is masked, and the others go on
"""
from max_ep.formats.given import GivenTokenFormat
from max_ep.formats.table import FormatOf
from max_ep.protocol.addressing import Addressing
from max_ep.protocol.layout import Group
from max_ep.protocol.message_sizes import combine_msg_bytes
from max_ep.protocol.token_format import TokenFormat
from std.sys import get_defined_int, get_defined_string, is_defined

comptime TARGET = get_defined_string["TARGET"]()
comptime ROWS = get_defined_string["ROWS"]()
comptime IS_PLAIN = ROWS == "plain"
comptime IS_GIVEN = ROWS != "padded"
comptime HAS_SUMS = IS_GIVEN or is_defined["SUMS"]()
comptime N_RANKS = get_defined_int["RANKS"]()
comptime HIDDEN = get_defined_int["HIDDEN"]()
comptime TOP_K = get_defined_int["TOP_K"]()
comptime WIDE_IDS = is_defined["WIDE_IDS"]()
comptime FORMAT = get_defined_string["FORMAT"]()
comptime SCALES = (
    "packed" if is_defined["PACKED_SCALES"]() else "transposed" if FORMAT.startswith(
        "fp8"
    ) else "rows"
)
comptime N_EXPERTS = get_defined_int["EXPERTS"]()
comptime GROUP_TOP_K = N_RANKS if IS_PLAIN else TOP_K
comptime Format: TokenFormat = (
    GivenTokenFormat[
        HIDDEN,
        get_defined_int["SCALES"](),
        GROUP_TOP_K,
        TOP_K if IS_PLAIN else 0,
        N_EXPERTS // N_RANKS,
    ] if FORMAT
    == "given" else FormatOf[FORMAT, HIDDEN, TOP_K, scales=SCALES]
)
comptime INPUT_DTYPE = (
    DType.float32 if FORMAT == "float32" else DType.uint8 if FORMAT == "given"
    or FORMAT.endswith("_forwarded") else DType.bfloat16
)
comptime _dtype[name: StaticString] = (
    DType.float32 if name == "float32" else DType.bfloat16
)
comptime COMBINE_DTYPE = _dtype[get_defined_string["COMBINE"]()]
comptime PARTIAL_DTYPE = (
    _dtype[get_defined_string["PARTIAL"]()] if HAS_SUMS else COMBINE_DTYPE
)


def _group(hidden_size: Int, dispatch_msg_bytes: Int, combine_msg_bytes: Int) -> Group:
    return Group(
        n_experts=N_RANKS if IS_PLAIN else N_EXPERTS,
        n_ranks=N_RANKS,
        max_tokens_per_rank=get_defined_int["TOKENS"](),
        top_k=GROUP_TOP_K,
        hidden_size=hidden_size,
        dispatch_msg_bytes=dispatch_msg_bytes,
        combine_msg_bytes=combine_msg_bytes,
        addressing=Addressing.TO_RANKS if IS_PLAIN else Addressing.BY_RANK,
        has_sums=HAS_SUMS,
        is_padded=not IS_GIVEN,
        n_mapped=get_defined_int["MAPPED"](),
        relays=is_defined["RELAYS"](),
        wide_ids=WIDE_IDS,
        masks=is_defined["MASKS"](),
        router_top_k=TOP_K if IS_PLAIN else 0,
        router_experts=N_EXPERTS,
        row_alignment=get_defined_int["ALIGNMENT"]() if IS_GIVEN else 0,
        late_weights=HAS_SUMS and not IS_GIVEN,
        shares_gpu=not (HAS_SUMS and not IS_GIVEN),
    )


comptime COMBINE_HIDDEN = get_defined_int["COMBINE_HIDDEN"]()
comptime COMBINE_BYTES = combine_msg_bytes[PARTIAL_DTYPE](COMBINE_HIDDEN)
comptime DISPATCH_HIDDEN = HIDDEN if FORMAT.endswith(
    "_forwarded"
) else Format.hidden_size
comptime DISPATCH = _group(DISPATCH_HIDDEN, Format.msg_bytes, 0)
comptime COMBINE = _group(COMBINE_HIDDEN, 0, COMBINE_BYTES)
comptime REGION = _group(DISPATCH_HIDDEN, Format.msg_bytes, COMBINE_BYTES)
