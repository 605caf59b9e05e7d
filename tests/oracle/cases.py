# SPDX-License-Identifier: Apache-2.0
"""Named cases: the sizes of groups that the tests of dispatch and combine sweep, odd on
purpose. What ranks are given is in `drawn.py`.
"""

from dataclasses import dataclass, field, replace

from max.dtype import DType

from max_ep import EPConfig
from max_ep.formats import BY_NAME, TokenFormat
from max_ep.reference import n_local_experts

BF16, F32 = DType.bfloat16, DType.float32


@dataclass(frozen=True)
class Case:
    """Sizes of a group of ranks in one process."""

    name: str
    n_ranks: int
    n_experts: int
    top_k: int
    hidden_size: int
    max_tokens_per_rank: int
    wire: str = "bfloat16"  # name of a format; `_pow2`: rounded scales
    tokens: DType = BF16  # What the tokens are before they are sent
    combine: DType = BF16  # What expert rows and results are
    scales: str | None = None
    """Input scales: None, `one` (`[1]`) or `each` (`[n_experts]`)."""
    # Not in `repr`, which seeds the data.
    output_layout: str = field(default="packed", repr=False)
    scale_layout: str = field(default="auto", repr=False)
    fused_shared_expert: bool = field(default=False, repr=False)
    protocol: str = field(default="by_expert", repr=False)
    combine_mode: str = field(default="rows", repr=False)
    partial_dtype: DType | None = field(default=None, repr=False)
    partial: str | None = field(default=None, repr=False)
    """Short name of the format of quantized partial sums."""
    use_allreduce: bool = field(default=False, repr=False)
    max_output_rows: int | None = field(default=None, repr=False)
    row_scales: bool = field(default=False, repr=False)
    forwards: bool = field(default=False, repr=False)
    """Whether tokens are quantized before they are given."""
    hierarchical: bool = field(default=False, repr=False)

    @property
    def token_format(self) -> TokenFormat:
        found = BY_NAME[self.wire.removesuffix("_pow2")]
        return found.with_row_scales() if self.row_scales else found

    @property
    def is_quantized(self) -> bool:
        return self.token_format.is_quantized

    @property
    def has_rounded_scales(self) -> bool:
        return self.wire.endswith("_pow2")

    @property
    def sends_rows_back(self) -> bool:
        """Whether dispatched rows can be the expert rows, as they are."""
        return not self.is_quantized and self.tokens == self.combine

    @property
    def combines_sums(self) -> bool:
        return self.combine_mode == "sums"

    @property
    def n_local_experts(self) -> int:
        return n_local_experts(self.n_experts, self.n_ranks)

    @property
    def n_senders(self) -> int:
        return 1 if self.use_allreduce else self.n_ranks

    @property
    def max_rows(self) -> int:
        per_token = min(self.top_k, self.n_local_experts)
        most = self.n_senders * self.max_tokens_per_rank * per_token
        return min(most, self.max_output_rows or most)

    @property
    def is_padded(self) -> bool:
        return self.output_layout == "padded"

    @property
    def capacity(self) -> int:
        """The most rows one expert can get."""
        return self.n_senders * self.max_tokens_per_rank

    @property
    def rows_shape(self) -> list[int]:
        """Sizes of the rows of one rank, without the hidden size."""
        if self.is_padded:
            return [self.n_local_experts, self.capacity]
        n_shared = self.max_tokens_per_rank if self.fused_shared_expert else 0
        return [self.max_rows + n_shared]

    def config(self, **changes: object) -> EPConfig:
        """Makes the `EPConfig`, in one process unless changed."""
        same = "hidden_size top_k n_experts max_tokens_per_rank output_layout"
        same += " scale_layout fused_shared_expert protocol combine_mode partial_dtype"
        same += " use_allreduce max_output_rows hierarchical"
        quantized = self.token_format.make_quant_config
        back = self.partial and BY_NAME[self.partial].make_quant_config()
        fields = {name: getattr(self, name) for name in same.split()} | dict(
            dispatch_dtype=self.token_format.dtype,
            combine_dtype=self.combine,
            n_gpus_per_node=self.n_ranks,
            n_nodes=1,
            target="cpu",
            dispatch_quant_config=quantized and quantized(),
            fp8_power_of_two_scales=self.has_rounded_scales,
            combine_quant_config=back,
            tokens_are_quantized=self.forwards,
            nvfp4_dyn_global_scales=self.row_scales,
        )
        return EPConfig(**(fields | changes))

    def on_one_gpu(self) -> EPConfig:
        return self.config(target="gpu", ranks_per_gpu=self.n_ranks)

    def on_gpus(self, **changes: object) -> EPConfig:
        return self.config(target="gpu", timeout_s=5, **changes)


_CASES = [
    # name, ranks, experts, top_k, hidden, tokens.
    Case("one_rank", 1, 5, 3, 80, 7),
    Case("two_ranks", 2, 5, 3, 80, 7),  # 3 and 2 experts
    Case("last_rank_empty", 4, 5, 3, 80, 7),  # 2, 2, 1 and 0 experts
    # A token may have rows on three ranks: with sums, their order shows.
    Case("uneven_7_on_3", 3, 7, 3, 36, 5, "float32", F32, F32),
    Case("five_ranks_top_1", 5, 15, 1, 128, 3, "fp8", tokens=F32),
    Case("smallest", 5, 15, 1, 8, 3, "float32", F32, BF16),  # 16 bytes a row
    Case("top_32", 2, 40, 32, 16, 7, combine=F32),
    Case("fp8", 3, 7, 3, 256, 7, "fp8"),
    Case("fp8_pow2", 2, 6, 2, 384, 7, "fp8_pow2", combine=F32),
    # These differ from one above in what is sent only.
    Case("fp8_of_float32", 3, 7, 3, 256, 7, "fp8", tokens=F32),
    Case("scaled", 2, 5, 3, 80, 7, scales="one"),
    Case("scaled_each", 3, 7, 3, 36, 5, "float32", F32, F32, "each"),
    Case("fp8_scaled_each", 3, 7, 3, 256, 7, "fp8", scales="each"),
    # Neither 16 scales nor 4, and fewer values than a warp holds.
    Case("mxfp8", 3, 7, 3, 96, 7, "mxfp8"),
    Case("mxfp4", 3, 7, 3, 96, 7, "mxfp4"),
    Case("nvfp4_scaled_each", 3, 7, 3, 96, 7, "nvfp4", scales="each"),
]
CASES = {case.name: case for case in _CASES}

_PADDED = dict(output_layout="padded")
_TILES = dict(scale_layout="tiles")
_PACKED = dict(scale_layout="packed")
_SHARED = dict(fused_shared_expert=True)
_LAYOUT_CASES = [
    Case("padded_last_rank_empty", 3, 4, 3, 80, 7, **_PADDED),  # 2, 2 and 0
    # Large enough that a launch is spread over workers.
    Case("padded_fp8", 2, 5, 3, 1024, 96, "fp8", scales="one", **_PADDED),
    Case("padded_fp8_each", 3, 7, 3, 1024, 96, "fp8", scales="each", **_PADDED),
    # More rows than a tile has, and tiles that are not full.
    Case("tiles_mxfp8", 2, 5, 3, 1120, 96, "mxfp8", scale_layout="tiles"),
    Case("tiles_nvfp4", 3, 7, 3, 1120, 7, "nvfp4", scale_layout="tiles"),
    Case("padded_mxfp8", 2, 5, 3, 1024, 9, "mxfp8", F32, scales="each", **_PADDED),
    # Fewer experts on a rank than a token chooses.
    Case("allreduce", 3, 6, 3, 80, 7, scales="each", use_allreduce=True),
    # Scales of 4 bytes, of 1, and not of whole words.
    Case("forwarded_fp8", 2, 5, 3, 384, 9, "fp8", forwards=True),
    Case("forwarded_mxfp4", 3, 7, 3, 96, 7, "mxfp4", forwards=True, **_PADDED),
    Case("forwarded_nvfp4", 2, 5, 3, 1120, 9, "nvfp4", forwards=True, **_TILES),
    Case("packed_scales", 2, 5, 3, 1024, 9, "fp8_pow2", scale_layout="packed"),
    Case("forwarded_packed", 2, 5, 3, 1024, 9, "fp8_pow2", forwards=True, **_PACKED),
    Case("row_scales", 2, 5, 3, 1120, 9, "nvfp4", row_scales=True, **_TILES),
    Case("shared_last_rank_empty", 3, 4, 3, 80, 7, **_SHARED),
    Case("shared_fp8", 2, 5, 3, 1024, 96, "fp8_pow2", combine=F32, **_SHARED),
]
LAYOUT_CASES = {case.name: case for case in _LAYOUT_CASES}
"""Padded rows, and a fused shared expert."""

PROTOCOLS = {
    "": {},
    "_by_rank": {"protocol": "by_rank"},
    "_sums": {"protocol": "by_rank", "combine_mode": "sums"},
}
"""What names of cases end with, and what those cases change."""


def in_protocols(cases: list[Case]) -> dict[str, Case]:
    """Names the cases, in every protocol."""
    return {
        f"{c.name}{suffix}": replace(c, name=f"{c.name}{suffix}", **changes)
        for c in cases
        for suffix, changes in PROTOCOLS.items()
    }


def capped(cases: list[Case]) -> dict[str, Case]:
    """In the protocols that may drop rows."""
    found = in_protocols(cases)
    return {name: case for name, case in found.items() if case.protocol == "by_rank"}


BY_RANK_CASES = {
    f"{name}_by_rank": replace(case, name=f"{name}_by_rank", protocol="by_rank")
    for name, case in (CASES | LAYOUT_CASES).items()
    if case.scales is None
}
"""The cases without input scales, by rank."""

# Cases in which combine differs, and the dtype of partial sums; None: that of results.
_PARTIALS = {
    "last_rank_empty": F32,
    "uneven_7_on_3": None,
    "five_ranks_top_1": None,
    "smallest": None,
    "top_32": None,
    "fp8_pow2": BF16,
    "padded_last_rank_empty": F32,
    "shared_last_rank_empty": None,
    "shared_fp8": BF16,
}
SUMS_CASES = {
    f"{name}_sums": replace(
        BY_RANK_CASES[f"{name}_by_rank"],
        name=f"{name}_sums",
        combine_mode="sums",
        partial_dtype=partial_dtype,
    )
    for name, partial_dtype in _PARTIALS.items()
}
"""By rank, with combine adding up on the ranks of the experts."""
_SUMS = dict(protocol="by_rank", combine_mode="sums")
_QUANTIZED_SUMS = [
    # Neither 16 scales nor 4, and three owners.
    Case("fp8_sums_back", 4, 7, 4, 384, 7, partial="fp8", **_SUMS),
    Case(
        "mxfp8_sums_back", 3, 7, 3, 96, 7, "float32", F32, F32, partial="mxfp8", **_SUMS
    ),
]
SUMS_CASES |= {case.name: case for case in _QUANTIZED_SUMS}

# 3 ranks with 2, 2 and 1 experts. "full": 3 * 7 rows of each of 3 experts.
CAPPED = Case("capped", 3, 5, 3, 80, 7, max_output_rows=17)
TIGHT = replace(CAPPED, name="tight", max_output_rows=1, fused_shared_expert=True)
CAPPED_CASES = in_protocols([CAPPED]) | {"tight": TIGHT}
"""Dispatch into fewer rows than some routings need."""
# Pairs of two scan warps; more tokens than can be inline.
CAPPED_MANY = Case("capped_many", 2, 300, 3, 80, 300, max_output_rows=301)
CAPPED_ON_TWO = [
    replace(CAPPED, name="capped_two", n_ranks=2),
    replace(TIGHT, name="tight_two", n_ranks=2),
    CAPPED_MANY,
]

# 4 ranks with 2, 2, 2 and 1 experts. "uniform" drops rows on three, "masked" none.
CAPPED_BACK = replace(
    SUMS_CASES["fp8_sums_back"], name="capped_fp8_sums_back", max_output_rows=13
)
COMBINED_CASES = {CAPPED_BACK.name: CAPPED_BACK}
"""CPU ranks have in one case what GPUs have in several: each costs a compilation."""

SMALL_CASES = CASES | LAYOUT_CASES | BY_RANK_CASES | SUMS_CASES | CAPPED_CASES
SMALL_CASES |= COMBINED_CASES

SMALL_CASES_OF_CI = """
capped_fp8_sums_back padded_mxfp8 shared_fp8_sums
row_scales_by_rank forwarded_packed allreduce
""".split()
"""Each combine, layout of rows and scales, and cap once, of what the forms of
`test_round_trip.py` have not; `make test-all` runs all."""


# Large enough that a launch is spread over workers and writes past the caches.
_LARGE = [
    Case("large", 2, 12, 8, 2048, 320),
    Case("large_fp8", 2, 12, 8, 2048, 320, "fp8"),
    Case("large_sums", 2, 12, 8, 2048, 520, protocol="by_rank", combine_mode="sums"),
]
LARGE_CASES = {case.name: case for case in _LARGE}
