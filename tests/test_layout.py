# SPDX-License-Identifier: Apache-2.0
"""Sizes and offsets, computed here a second time from the picture.

`layout.mojo` is the one home of these facts; Python asks it. Here the picture
in its docstring is computed independently, and the constants that Python and
Mojo both have are compared.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from cases import (
    BF16,
    BY_RANK_CASES,
    CASES,
    F32,
    LARGE_CASES,
    SUMS_CASES,
    Case,
)

from max_ep import (
    AllGatherTokenDispatcher,
    EPBatchManager,
    EPCommInitializer,
    blockwise_fp8_quant_config,
    estimate_ep_memory_usage,
    formats,
    limits,
    reference,
)
from max_ep.extension import mojo_dir, run_mojo

ALL_CASES = CASES | LARGE_CASES | BY_RANK_CASES | SUMS_CASES
case_names = pytest.mark.parametrize("name", ALL_CASES)

# ------------------------------------------------------------------- constants


def mojo_constant(name: str, path: str = "max_ep/layout.mojo") -> float:
    """Reads `comptime NAME = value` from a Mojo source."""
    text = (mojo_dir() / path).read_text()
    values = re.findall(rf"^comptime {name} = (.*)$", text, re.MULTILINE)
    assert len(values) == 1, f"{path}: `comptime {name}` stands {len(values)} times"
    return float(re.sub(r"^Float32\((.*)\)$", r"\1", values[0]))


FP8_SOURCE = "max_ep/formats/blockwise_fp8.mojo"


@pytest.mark.parametrize(
    "value, name, path",
    [
        (limits.MAX_TOP_K, "MAX_TOP_K", "max_ep/layout.mojo"),
        (limits.MAX_RANKS, "MAX_RANKS", "max_ep/layout.mojo"),
        (limits.TOKEN_ALIGN_BYTES, "MESSAGE_ALIGN", "max_ep/layout.mojo"),
        (formats.FP8_BLOCK, "FP8_BLOCK", FP8_SOURCE),
        (reference.FP8_MAX, "FP8_MAX", FP8_SOURCE),
        (reference.FP8_MIN_AMAX, "FP8_MIN_AMAX", FP8_SOURCE),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_python_and_mojo_agree(value: float, name: str, path: str) -> None:
    assert np.float32(value) == np.float32(mojo_constant(name, path))


def test_entries_hold_what_the_config_lets_through() -> None:
    bits = mojo_constant("ENTRY_FIELD_BITS", "max_ep/dispatch_by_rank/entries.mojo")
    assert limits.MAX_OF_ENTRY == 2**bits - 1


def test_messages_keep_their_alignment() -> None:
    """What is copied in words of MESSAGE_ALIGN stays aligned to them."""
    align = mojo_constant("MESSAGE_ALIGN")
    assert mojo_constant("SOURCE_INFO_BYTES") % align == 0
    assert mojo_constant("BUFFER_ALIGN") % align == 0


# ----------------------------------------------------- the picture, in Python


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def token_bytes(wire: str, hidden_size: int) -> int:
    if wire.startswith("fp8"):
        # One byte each, then a float32 scale for each 128, in whole messages.
        return hidden_size + up(hidden_size // 128 * 4, 16)
    return up(hidden_size * {"bfloat16": 2, "float32": 4}[wire], 16)


def picture(
    dispatch_msg: int,
    combine_msg: int,
    n_experts: int,
    n_ranks: int,
    max_tokens: int,
    top_k: int,
    protocol: str = "expert_slots",
) -> dict[str, int]:
    """Draws the picture of `layout.mojo` with numbers."""
    n_local = up(n_experts, n_ranks) // n_ranks
    entry = 16 if protocol == "rank_slots_reduced" else 8
    by_rank = {
        "dispatch_send": 0,
        "dispatch_recv": up(n_ranks * max_tokens * top_k * entry, 256)
        + up(n_ranks * max_tokens * dispatch_msg, 256)
        + up(n_ranks * min(max_tokens, 256) * dispatch_msg, 256)
        + n_ranks * max_tokens * 4 * 8,
        "dispatch_counts": (n_local * n_ranks + 2 * n_ranks) * 8,
    }
    buffers = {
        "dispatch_send": max_tokens * dispatch_msg,
        "dispatch_recv": n_local * n_ranks * max_tokens * dispatch_msg,
        "dispatch_counts": (n_local * n_ranks + n_ranks) * 8,
        "combine_recv": max_tokens * top_k * combine_msg,
        "combine_counts": (n_experts + n_ranks) * 8,
    }
    if protocol != "expert_slots":
        buffers |= by_rank
    if protocol == "rank_slots_reduced":
        buffers["combine_recv"] = n_ranks * max_tokens * combine_msg
    answer = {"n_local_experts": n_local}
    offset = 0
    for name, n_bytes in buffers.items():
        answer[f"{name}_bytes"] = n_bytes
        answer[f"{name}_offset"] = offset
        offset += up(n_bytes, 256)
    put_bytes = up(max_tokens * top_k * dispatch_msg, 256)
    answer |= {"region_bytes": offset, "dispatch_put_bytes": put_bytes}
    put_bytes += up(n_ranks * max_tokens * top_k * combine_msg, 256)
    return answer | {"put_bytes": put_bytes}


def wire_protocol(case: Case) -> str:
    """What the layout goes by: reduced combine counts as a protocol there."""
    return case.config().mojo_protocol


def picture_of(case: Case) -> dict[str, int]:
    sent = case.combine if case.partial_dtype is None else case.partial_dtype
    combine_bytes = up(case.hidden_size * sent.size_in_bytes, 16)
    messages = dict(
        dispatch_msg_bytes=token_bytes(case.wire, case.hidden_size) + 16,
        combine_msg_bytes=combine_bytes + 16,
    )
    return messages | picture(
        *messages.values(),
        case.n_experts,
        case.n_ranks,
        case.max_tokens_per_rank,
        case.top_k,
        wire_protocol(case),
    )


@case_names
def test_sizes_are_those_of_the_picture(name: str) -> None:
    case = ALL_CASES[name]
    sizes = case.config().sizes()
    want = picture_of(case)
    for field in vars(sizes):
        if field in want:
            assert getattr(sizes, field) == want[field], f"{name}: {field}"
    # Everything is compared, but for what is not in the picture.
    constants = {
        "setup_words": ("N_SETUP_WORDS", "max_ep/setup.mojo"),
        "failure_word": ("FAILURE_WORD", "max_ep/counters.mojo"),
        "n_failure_words": ("N_FAILURE_WORDS", "max_ep/counters.mojo"),
    }
    rest = set(vars(sizes)) - set(want)
    assert rest == {"counters_words", "protocol", *constants}
    assert sizes.protocol == mojo_constant(wire_protocol(case).upper())
    for field, (constant, path) in constants.items():
        assert getattr(sizes, field) == mojo_constant(constant, path)


@case_names
def test_config_answers_from_the_sizes(name: str) -> None:
    case = ALL_CASES[name]
    cfg = case.config()
    assert cfg.n_local_experts == -(-case.n_experts // case.n_ranks)
    assert cfg.get_max_recv_tokens() == case.max_rows
    want = picture_of(case)["region_bytes"]
    assert cfg.estimate_memory_usage() == want
    estimate = estimate_ep_memory_usage(
        hidden_size=case.hidden_size,
        dispatch_dtype=cfg.dispatch_dtype,
        combine_dtype=cfg.combine_dtype,
        max_tokens_per_rank=case.max_tokens_per_rank,
        n_experts=case.n_experts,
        n_nodes=1,
        n_gpus_per_node=case.n_ranks,
        top_k=case.top_k,
    )
    # MAX's function of this name has no protocol, so ours answers for "auto".
    auto = case.config(protocol="auto", combine_mode="rows", partial_dtype=None)
    assert estimate == auto.estimate_memory_usage()
    if case.protocol == "by_rank" and not case.combines_sums:
        assert estimate == want


def test_several_hosts_are_estimated_as_gpus() -> None:
    """`"auto"` differs there: SHMEM has `by_expert` only."""
    case = CASES["last_rank_empty"]
    estimate = estimate_ep_memory_usage(
        hidden_size=case.hidden_size,
        dispatch_dtype=BF16,
        combine_dtype=BF16,
        max_tokens_per_rank=case.max_tokens_per_rank,
        n_experts=case.n_experts,
        n_nodes=2,
        n_gpus_per_node=2,
        top_k=case.top_k,
    )
    assert estimate == picture_of(case)["region_bytes"]


def test_processes_and_local_ranks_are_ranks_alike() -> None:
    """How ranks are spread over processes does not change a rank's memory."""
    case = CASES["last_rank_empty"]
    for n_nodes in (1, 2, 4):
        cfg = case.config(n_nodes=n_nodes, n_gpus_per_node=4 // n_nodes)
        assert cfg.n_ranks == 4
        assert cfg.sizes() == case.config().sizes()


@pytest.mark.parametrize(
    "waits, target, n_gpus_per_node, more",
    [
        (False, "cpu", 1, {}),
        (False, "cpu", 4, {}),
        (True, "cpu", 1, {"n_nodes": 4}),
        # Its own blocks wait for each other in the fused forms.
        (True, "gpu", 1, {}),
        (True, "gpu", 4, {}),
        (False, "gpu", 4, {"ranks_per_gpu": 4}),
        (True, "gpu", 4, {"ranks_per_gpu": 2}),
    ],
)
def test_there_is_time_where_a_wait_can_be_met_later(
    waits: bool, target: str, n_gpus_per_node: int, more: dict[str, int]
) -> None:
    given = {"target": target, "n_gpus_per_node": n_gpus_per_node, **more}
    config = CASES["one_rank"].config(timeout_s=2, **given)
    assert config.timeout_ms == (2000 if waits else 0)


@pytest.mark.parametrize("n_ranks", [1, 3, 64, 127, 128])
def test_counters_hold_every_pair(n_ranks: int) -> None:
    header = mojo_constant("N_HEADER_WORDS", "max_ep/counters.mojo")
    max_ranks = mojo_constant("MAX_RANKS")
    words_of = {n: header + 2 * (n + max_ranks + 1) for n in range(1, 300)}
    # The formula is the one that Mojo has; two halves of experts and one of
    # slots, for each choice, follow.
    case = CASES["two_ranks"]
    n_choices = case.max_tokens_per_rank * case.top_k
    assert case.config().sizes().counters_words == (
        words_of[case.n_experts] + 3 * n_choices
    )
    # Reduced combine: of each rank its tokens, and a row and a weight a choice.
    reduced = case.config(combine_mode="sums", protocol="auto").sizes()
    assert reduced.counters_words == case.config().sizes().counters_words + (
        case.n_ranks * (1 + 2 * n_choices)
    )
    for n_experts, n_words in words_of.items():
        n_pairs = up(n_experts, n_ranks)
        assert header + 2 * (n_pairs + 1) <= n_words, (n_experts, n_ranks)


# ------------------------------------------------------- offsets, asked in Mojo

_SWEEP = {
    "n_experts": [1, 5, 64],
    "n_ranks": [1, 2, 3, 8],
    "max_tokens": [1, 7, 128],
    "top_k": [1, 3],
    "dispatch_msg": [32, 176, 1104],
}

_PROGRAM = """
from max_ep.layout import EXPERT_SLOTS, N_CHUNKS, RANK_SLOTS
from max_ep.layout import RANK_SLOTS_REDUCED, RegionLayout
from max_ep.layout import n_experts_on_rank

def main() raises:
    for n_experts in [1, 5, 64]:
        for n_ranks in [1, 2, 3, 8]:
            for max_tokens in [1, 7, 128]:
                for top_k in [1, 3]:
                    for dispatch_msg in [32, 176, 1104]:
                        var l = RegionLayout(
                            n_experts, n_ranks, max_tokens, top_k,
                            dispatch_msg, 2 * dispatch_msg, EXPERT_SLOTS,
                        )
                        for protocol in [RANK_SLOTS, RANK_SLOTS_REDUCED]:
                            var b = RegionLayout(
                                n_experts, n_ranks, max_tokens, top_k,
                                dispatch_msg, 2 * dispatch_msg, protocol,
                            )
                            var name = String("rank_slots")
                            if protocol == RANK_SLOTS_REDUCED:
                                name += "_reduced"
                            print(
                                name,
                                b.dispatch_recv_offset(),
                                b.entry_offset(n_ranks - 1, b.n_choices() - 1),
                                b.token_offset(0, 0),
                                b.token_offset(n_ranks - 1, max_tokens - 1),
                                b.carried_choice_offset(0, 0, 0, 1),
                                b.carried_choice_offset(
                                    n_ranks - 1, max_tokens - 1, top_k - 1, top_k
                                ),
                                b.early_token_offset(0, 0),
                                b.early_token_offset(
                                    n_ranks - 1, b.n_early_tokens() - 1
                                ),
                                b.chunk_flag_offset(0, 0, 0),
                                b.chunk_flag_offset(
                                    n_ranks - 1, max_tokens - 1, N_CHUNKS - 1
                                ),
                                b.dispatch_counts_offset(),
                                b.dispatch_n_tokens_offset(0),
                                b.dispatch_n_tokens_offset(n_ranks - 1),
                                b.combine_recv_offset(),
                                b.combine_counts_offset(),
                                b.region_bytes(),
                            )
                        var last_expert = l.n_local_experts() - 1
                        var last_pair = l.pair(last_expert, n_ranks - 1)
                        print(
                            "layout", n_experts, n_ranks, max_tokens, top_k,
                            dispatch_msg,
                            l.dispatch_send_offset(), l.dispatch_recv_offset(),
                            l.dispatch_counts_offset(),
                            l.combine_recv_offset(), l.combine_counts_offset(),
                            l.region_bytes(),
                            l.pair(last_expert, 0), last_pair,
                            l.dispatch_message_offset(0, max_tokens - 1),
                            l.dispatch_message_offset(last_pair, max_tokens - 1),
                            l.dispatch_count_offset(last_pair),
                            l.dispatch_done_offset(0),
                            l.dispatch_done_offset(n_ranks - 1),
                            l.combine_message_offset(0, top_k - 1),
                            l.combine_message_offset(max_tokens - 1, top_k - 1),
                            l.combine_count_offset(n_experts - 1),
                            l.combine_done_offset(0),
                            l.combine_done_offset(n_ranks - 1),
                        )
    for n_experts in [1, 2, 5, 7, 64]:
        for n_ranks in [1, 2, 3, 4, 8]:
            for rank in range(n_ranks):
                print("held", n_experts, n_ranks, rank,
                      n_experts_on_rank(n_experts, n_ranks, rank))
    formats()
"""

_FORMAT_SIZES = {
    ("bfloat16", 8): "PlainTokenFormat[DType.bfloat16, 8, 3]",
    ("bfloat16", 80): "BF16TokenFormat[80, 3]",
    ("bfloat16", 7168): "BF16TokenFormat[7168, 8]",
    ("float32", 4): "Float32TokenFormat[4, 1]",
    ("float32", 36): "PlainTokenFormat[DType.float32, 36, 2]",
    ("fp8", 128): "BlockwiseFP8TokenFormat[128, 1]",
    ("fp8", 384): "BlockwiseFP8TokenFormat[384, 2, False]",
    ("fp8_pow2", 640): "BlockwiseFP8TokenFormat[640, 32, True]",
    ("fp8", 7168): "BlockwiseFP8TokenFormat[7168, 8]",
    ("bfloat16+5", 80): "WithChoicesTokenFormat[DType.bfloat16, 80, 3, 5]",
    ("float32+40", 4): "WithChoicesTokenFormat[DType.float32, 4, 32, 40]",
}


@pytest.fixture(scope="module")
def mojo_says(tmp_path_factory) -> dict[str, list[list[str]]]:
    """Runs one Mojo program that answers all questions of this file."""
    lines = [
        "from max_ep import BF16TokenFormat, BlockwiseFP8TokenFormat",
        "from max_ep import Float32TokenFormat, PlainTokenFormat",
        "from max_ep import WithChoicesTokenFormat",
        "def formats():",
    ]
    for (wire, hidden_size), name in _FORMAT_SIZES.items():
        lines.append(
            f'    print("format", "{wire}", {hidden_size}, {name}.token_bytes, '
            f"{name}.msg_bytes, {name}.hidden_size, {name}.top_k)"
        )
    path: Path = tmp_path_factory.mktemp("layout") / "ask.mojo"
    path.write_text(_PROGRAM + "\n" + "\n".join(lines) + "\n")
    printed = run_mojo("run", "-I", ".", str(path))
    answers: dict[str, list[list[str]]] = {}
    for line in printed.splitlines():
        what, *words = line.split()
        answers.setdefault(what, []).append(words)
    return answers


def test_offsets_are_those_of_the_picture(mojo_says) -> None:
    sweep = list(itertools.product(*_SWEEP.values()))
    assert len(mojo_says["layout"]) == len(sweep)
    for key, words in zip(sweep, mojo_says["layout"]):
        n_experts, n_ranks, max_tokens, top_k, msg = key
        got = [int(word) for word in words]
        assert tuple(got[:5]) == key
        p = picture(msg, 2 * msg, n_experts, n_ranks, max_tokens, top_k)
        n_pairs = p["n_local_experts"] * n_ranks
        want = [
            p["dispatch_send_offset"],
            p["dispatch_recv_offset"],
            p["dispatch_counts_offset"],
            p["combine_recv_offset"],
            p["combine_counts_offset"],
            p["region_bytes"],
            n_pairs - n_ranks,
            n_pairs - 1,
            # [n_local_experts][n_ranks][max_tokens_per_rank]: slot is fastest.
            (max_tokens - 1) * msg,
            p["dispatch_recv_bytes"] - msg,
            (n_pairs - 1) * 8,
            n_pairs * 8,
            p["dispatch_counts_bytes"] - 8,
            # [max_tokens_per_rank][top_k]: choice is fastest.
            (top_k - 1) * 2 * msg,
            p["combine_recv_bytes"] - 2 * msg,
            (n_experts - 1) * 8,
            n_experts * 8,
            p["combine_counts_bytes"] - 8,
        ]
        assert got[5:] == want, f"{dict(zip(_SWEEP, key))}"


@pytest.mark.parametrize("protocol", ["rank_slots", "rank_slots_reduced"])
def test_offsets_by_rank_are_those_of_the_picture(mojo_says, protocol: str) -> None:
    """`rank_slots`: entries, then tokens; the numbers of tokens come last."""
    sweep = list(itertools.product(*_SWEEP.values()))
    entry = 16 if protocol == "rank_slots_reduced" else 8
    assert len(mojo_says[protocol]) == len(sweep)
    for key, words in zip(sweep, mojo_says[protocol]):
        n_experts, n_ranks, max_tokens, top_k, msg = key
        p = picture(msg, 2 * msg, n_experts, n_ranks, max_tokens, top_k, protocol)
        n_entry_bytes = n_ranks * max_tokens * top_k * entry
        tokens = up(n_entry_bytes, 256)
        n_early = min(max_tokens, 256)
        early = tokens + up(n_ranks * max_tokens * msg, 256)
        flags = early + up(n_ranks * n_early * msg, 256)
        want = [
            p["dispatch_recv_offset"],
            n_entry_bytes - entry,
            tokens,
            tokens + (n_ranks * max_tokens - 1) * msg,
            # Choices that a token carries: 16 bytes each, in front of 16 more.
            tokens + msg - 32,
            tokens + n_ranks * max_tokens * msg - 32,
            early,
            early + (n_ranks * n_early - 1) * msg,
            flags,
            p["dispatch_recv_bytes"] - 8,
            p["dispatch_counts_offset"],
            (p["n_local_experts"] + 1) * n_ranks * 8,
            p["dispatch_counts_bytes"] - 8,
            p["combine_recv_offset"],
            p["combine_counts_offset"],
            p["region_bytes"],
        ]
        assert [int(w) for w in words] == want, f"{dict(zip(_SWEEP, key))}"


def test_choices_that_are_carried_have_room() -> None:
    """In an all-gather, beside each token: in messages of dispatch alone."""
    config = AllGatherTokenDispatcher(80, 5, 7, n_gpus_per_node=3, target="cpu").config
    sizes = vars(config.sizes())
    messages = dict(dispatch_msg_bytes=160 + 5 * 16 + 16, combine_msg_bytes=160 + 16)
    want = messages | picture(*messages.values(), 3, 3, 7, 3, "rank_slots_reduced")
    assert {name: sizes[name] for name in want if name in sizes} == {
        name: n_bytes for name, n_bytes in want.items() if name in sizes
    }


def test_a_token_a_rank_takes_far_less_memory() -> None:
    """4096 tokens on 4 ranks: 0.24 GB of dispatch recv instead of 15 GB."""
    case = Case("many", 4, 256, 8, 7168, 4096)
    by_expert = case.config().sizes().dispatch_recv_bytes
    by_rank = case.config(protocol="by_rank").sizes().dispatch_recv_bytes
    assert by_expert == 256 * 4096 * (14336 + 16)
    early = 4 * 256 * (14336 + 16)
    flags = 4 * 4096 * 4 * 8
    assert by_rank == 4 * 4096 * (14336 + 16) + 4 * 4096 * 8 * 8 + early + flags


def test_a_partial_a_rank_takes_less_memory_than_a_row_a_choice() -> None:
    """4096 tokens, top-8, on 4 ranks: half of combine recv; and what is sent is.

    With float32 partials of bfloat16 rows it is the same again.
    """
    case = Case("many", 4, 256, 8, 7168, 4096, protocol="by_rank")
    rows = case.config().sizes().combine_recv_bytes
    partials = case.config(combine_mode="sums").sizes().combine_recv_bytes
    assert rows == 8 * 4096 * (14336 + 16) and partials == rows / 2
    wide = case.config(combine_mode="sums", partial_dtype=F32).sizes()
    assert wide.combine_recv_bytes == 4 * 4096 * (28672 + 16)


def test_experts_on_a_rank(mojo_says) -> None:
    """Every expert is held once, by the rank that `e // n_local_experts` says."""
    for words in mojo_says["held"]:
        n_experts, n_ranks, rank, n_held = (int(word) for word in words)
        n_local = reference.n_local_experts(n_experts, n_ranks)
        mine = [e for e in range(n_experts) if e // n_local == rank]
        assert n_held == len(mine), words


def test_comptime_sizes_of_formats_are_the_runtime_ones(mojo_says) -> None:
    got = {}
    for wire, *words in mojo_says["format"]:
        hidden_size, n_token, n_msg, hidden_of, top_k = (int(w) for w in words)
        assert hidden_of == hidden_size
        assert f"{top_k}" in _FORMAT_SIZES[wire, hidden_size]
        got[wire, hidden_size] = (n_token, n_msg)
    want = {}
    for key in _FORMAT_SIZES:
        wire, _, n_carried = key[0].partition("+")
        n_token = token_bytes(wire, key[1])
        want[key] = (n_token, n_token + 16 * int(n_carried or 0) + 16)
    assert got == want
    # And so says `layout_query.mojo`, which has formulas for run time.
    for wire, hidden_size in [("bfloat16", 80), ("float32", 36), ("fp8_pow2", 640)]:
        tokens = F32 if wire == "float32" else BF16
        case = Case("asked", 2, 5, 3, hidden_size, 7, wire, tokens)
        if wire == "float32":
            case = Case("asked", 3, 7, 2, hidden_size, 5, wire, F32, F32)
        sizes = case.config().sizes()
        assert sizes.dispatch_msg_bytes == got[wire, hidden_size][1]


def test_unknown_format_is_named() -> None:
    words = ["float16", "2", "80", "5", "2", "7", "3", "expert_slots", "0"]
    with pytest.raises(RuntimeError, match="unknown format float16"):
        run_mojo("run", "-I", ".", "layout_query.mojo", *words)


# --------------------------------------------------- the memory that is set up


@pytest.mark.parametrize("name", ["last_rank_empty", "fp8", "one_rank"])
def test_addresses_are_those_of_the_picture(session, name: str) -> None:
    """`ep_init` hands out what the picture says, on regions that lie apart."""
    case = CASES[name]
    want = picture_of(case)
    with EPCommInitializer(case.config()) as comm:
        comm.ep_init(session)
        buffers = comm.model_inputs()
        types = EPBatchManager(comm.config).input_types()
        assert len(buffers) == len(types)
        for buffer, declared in zip(buffers, types):
            assert buffer.dtype == declared.dtype
            assert list(buffer.shape) == [int(d) for d in declared.shape]
        # send, recv, counts; of each: dispatch, then combine.
        addresses = [b.to_numpy().astype(np.int64) for b in buffers[-6:]]
    send, _, recv, combine_recv, counts, combine_counts = addresses
    base = send - want["dispatch_send_offset"]
    assert (recv - base == want["dispatch_recv_offset"]).all()
    assert (counts - base == want["dispatch_counts_offset"]).all()
    assert (combine_recv - base == want["combine_recv_offset"]).all()
    assert (combine_counts - base == want["combine_counts_offset"]).all()
    assert (base % mojo_constant("BUFFER_ALIGN") == 0).all()
    apart = np.diff(np.sort(base))
    assert (apart >= want["region_bytes"]).all(), f"regions overlap: {base}"


def test_the_quant_config_has_the_block_of_the_kernels() -> None:
    block = blockwise_fp8_quant_config().input_scale.block_size
    assert block == (1, mojo_constant("FP8_BLOCK", FP8_SOURCE))
