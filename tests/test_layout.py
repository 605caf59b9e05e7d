# SPDX-License-Identifier: Apache-2.0
"""Sizes and offsets, computed here a second time from the picture.

`layout.mojo` is the one home of these facts; Python asks it. Here the picture
in its docstring is computed independently, and the constants that Python and
Mojo both have are compared.
"""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cases import BY_RANK_CASES, CASES, F32, LARGE_CASES, SUMS_CASES, Case
from kernels import mojo_constant
from max.dtype import DType

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
from max_ep.extension import run_mojo

ALL_CASES = CASES | LARGE_CASES | BY_RANK_CASES | SUMS_CASES
case_names = pytest.mark.parametrize("name", ALL_CASES)

# ------------------------------------------------------------------- constants


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
def test_python_and_mojo_agree(value, name, path):
    assert np.float32(value) == np.float32(mojo_constant(name, path))


def test_entries_hold_what_the_config_lets_through():
    bits = mojo_constant("ENTRY_FIELD_BITS", "max_ep/dispatch_by_rank/entries.mojo")
    assert limits.MAX_OF_ENTRY == 2**bits - 1


def test_messages_keep_their_alignment():
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
    kind: str = "by_expert",
) -> dict[str, int]:
    """Draws the picture of `layout.mojo` with numbers. A kind is `by_expert`, or how
    combine of tokens by rank returns: `rows` or `sums`."""
    n_local = up(n_experts, n_ranks) // n_ranks
    n_pairs, n_slots = n_local * n_ranks, n_ranks * max_tokens
    n_inline = n_ranks * min(max_tokens, 256)
    entries = n_slots * top_k * (16 if kind == "sums" else 8)
    tokens = up(entries, 256)
    inline_tokens = tokens + up(n_slots * dispatch_msg, 256)
    chunk_flags = inline_tokens + up(n_inline * dispatch_msg, 256)
    if kind == "by_expert":
        send, recv = max_tokens * dispatch_msg, n_pairs * max_tokens * dispatch_msg
        n_counts = n_pairs + n_ranks
    else:
        send, recv = 0, chunk_flags + n_slots * 4 * 8
        n_counts = n_pairs + 2 * n_ranks
    n_messages = n_slots if kind == "sums" else max_tokens * top_k
    buffers = {
        "dispatch_send": send,
        "dispatch_recv": recv,
        "dispatch_counts": n_counts * 8,
        "combine_recv": n_messages * combine_msg,
        "combine_counts": (n_experts + n_ranks) * 8,
    }
    answer = dict(n_local_experts=n_local, n_pairs=n_pairs, n_slots=n_slots)
    answer |= dict(entries=entries, tokens=tokens, n_inline=n_inline)
    answer |= dict(inline_tokens=inline_tokens, chunk_flags=chunk_flags)
    offset = 0
    for name, n_bytes in buffers.items():
        answer[f"{name}_bytes"] = n_bytes
        answer[f"{name}_offset"] = offset
        offset += up(n_bytes, 256)
    put_bytes = up(max_tokens * top_k * dispatch_msg, 256)
    answer |= {"region_bytes": offset, "dispatch_put_bytes": put_bytes}
    put_bytes += up(n_slots * top_k * combine_msg, 256)
    return answer | {"put_bytes": put_bytes}


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
        case.combine_mode if case.protocol == "by_rank" else "by_expert",
    )


@case_names
def test_sizes_are_those_of_the_picture(name):
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
    for field, (constant, path) in constants.items():
        assert getattr(sizes, field) == mojo_constant(constant, path)


@case_names
def test_config_answers_from_the_sizes(name):
    case = ALL_CASES[name]
    cfg = case.config()
    assert cfg.n_local_experts == -(-case.n_experts // case.n_ranks)
    assert cfg.get_max_recv_tokens() == case.max_rows
    want = picture_of(case)["region_bytes"]
    assert cfg.estimate_memory_usage() == want
    # MAX's function of this name has no protocol, so ours answers for "auto".
    auto = case.config(protocol="auto", combine_mode="rows", partial_dtype=None)
    assert estimate(case) == auto.estimate_memory_usage()
    if case.protocol == "by_rank" and not case.combines_sums:
        assert estimate(case) == want


def estimate(case: Case, **changes: object) -> int:
    config = case.config()
    given = dict(
        hidden_size=case.hidden_size,
        dispatch_dtype=config.dispatch_dtype,
        combine_dtype=config.combine_dtype,
        max_tokens_per_rank=case.max_tokens_per_rank,
        n_experts=case.n_experts,
        n_nodes=1,
        n_gpus_per_node=case.n_ranks,
        top_k=case.top_k,
    )
    return estimate_ep_memory_usage(**(given | changes))


def test_several_hosts_are_estimated_as_gpus():
    """`"auto"` differs there: SHMEM has `by_expert` only."""
    case = CASES["last_rank_empty"]
    want = picture_of(case)["region_bytes"]
    assert estimate(case, n_nodes=2, n_gpus_per_node=2) == want


def test_memory_estimate_refuses_what_config_does():
    with pytest.raises(ValueError, match="use_allreduce"):
        estimate(CASES["two_ranks"], use_allreduce=True)
    with pytest.raises(ValueError, match="dispatch_element_dtype.*float4_e2m1fn"):
        dtype = DType.float4_e2m1fn
        estimate(CASES["two_ranks"], dispatch_element_dtype=dtype)


def test_processes_and_local_ranks_are_ranks_alike():
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
    waits, target, n_gpus_per_node, more
):
    given = {"target": target, "n_gpus_per_node": n_gpus_per_node, **more}
    config = CASES["one_rank"].config(timeout_s=2, **given)
    assert config.timeout_ms == (2000 if waits else 0)


@pytest.mark.parametrize("n_ranks", [1, 3, 64, 127, 128])
def test_counters_hold_every_pair(n_ranks):
    header = mojo_constant("N_HEADER_WORDS", "max_ep/counters.mojo")
    max_ranks = mojo_constant("MAX_RANKS")
    words_of = {n: header + 2 * (n + max_ranks + 1) for n in range(1, 300)}
    # The formula is the one that Mojo has; experts of two dispatches and slots of
    # one, for each choice, follow.
    case = CASES["two_ranks"]
    n_choices = case.max_tokens_per_rank * case.top_k
    assert case.config().sizes().counters_words == (
        words_of[case.n_experts] + 3 * n_choices
    )
    # Sums: of each rank its tokens, and a row and a weight a choice.
    sums = case.config(combine_mode="sums", protocol="auto").sizes()
    assert sums.counters_words == case.config().sizes().counters_words + (
        case.n_ranks * (1 + 2 * n_choices)
    )
    for n_experts, n_words in words_of.items():
        n_pairs = up(n_experts, n_ranks)
        assert header + 2 * (n_pairs + 1) <= n_words, (n_experts, n_ranks)


# ------------------------------------------------------- offsets, asked in Mojo

SWEEP = dict(
    n_experts=[1, 5, 64],
    n_ranks=[1, 2, 3, 8],
    max_tokens=[1, 7, 128],
    top_k=[1, 3],
    msg=[32, 176, 1104],
)

# What Mojo computes of a group `g`, its last expert `e`, rank `r`, token `t` and
# choice `k`, and of the picture `p`, in which messages of combine have `2 * msg` bytes.
_OF_EVERY_KIND = {
    "g.dispatch_recv_offset()": "p.dispatch_recv_offset",
    "g.dispatch_counts_offset()": "p.dispatch_counts_offset",
    "g.combine_recv_offset()": "p.combine_recv_offset",
    "g.combine_counts_offset()": "p.combine_counts_offset",
    "g.region_bytes()": "p.region_bytes",
    "g.choice(t, k)": "max_tokens * top_k - 1",
    "g.dispatch_done_offset(0)": "p.n_pairs * 8",
    "g.combine_count_offset(e)": "(n_experts - 1) * 8",
    "g.combine_done_offset(0)": "n_experts * 8",
    "g.combine_done_offset(r)": "p.combine_counts_bytes - 8",
    "g.dispatch_put_offset(g.n_choices() - 1)": "(max_tokens * top_k - 1) * msg",
    "g.combine_put_offset(r, 1)": "((n_ranks - 1) * max_tokens * top_k + 1) * 2 * msg",
}
_OF_ROWS = {
    # [max_tokens_per_rank][top_k]: choice is fastest.
    "g.combine_message_offset(0, k)": "(top_k - 1) * 2 * msg",
    "g.combine_message_offset(t, k)": "p.combine_recv_bytes - 2 * msg",
}
_OF_SUMS = {
    # [n_ranks][max_tokens_per_rank]: token is fastest.
    "g.partial_offset(0, t)": "(max_tokens - 1) * 2 * msg",
    "g.partial_offset(r, t)": "p.combine_recv_bytes - 2 * msg",
}
_BY_RANK = {
    "g.entry_offset(0, g.n_choices())": "p.entries // n_ranks",
    "g.entry_offset(r, g.n_choices())": "p.entries",
    "g.token_offset(0, 0)": "p.tokens",
    "g.token_offset(r, t)": "p.tokens + (p.n_slots - 1) * msg",
    "g.staged_from_recv(r)": "p.tokens + (n_ranks - 1) * max_tokens * msg",
    # Routing metadata: 16 bytes a choice, in front of 16 more.
    "g.metadata_offset(0, 0, 0, 1)": "p.tokens + msg - 32",
    "g.metadata_offset(r, t, k, g.top_k)": "p.tokens + p.n_slots * msg - 32",
    "g.inline_token_offset(0, 0)": "p.inline_tokens",
    "g.inline_token_offset(r, g.n_inline_tokens() - 1)": (
        "p.inline_tokens + (p.n_inline - 1) * msg"
    ),
    "g.chunk_flag_offset(0, 0, 0)": "p.chunk_flags",
    "g.chunk_flag_offset(r, 0, 1)": "p.chunk_flags + (p.n_slots - max_tokens) * 32 + 8",
    "g.chunk_flag_offset(r, t, N_CHUNKS - 1)": "p.dispatch_recv_bytes - 8",
    "g.dispatch_n_tokens_offset(0)": "(p.n_pairs + n_ranks) * 8",
    "g.dispatch_n_tokens_offset(r)": "p.dispatch_counts_bytes - 8",
}
_BY_EXPERT = {
    "g.dispatch_send_offset()": "p.dispatch_send_offset",
    "g.dispatch_staged_offset(t)": "(max_tokens - 1) * msg",
    "g.staged_from_recv(r)": "-p.dispatch_recv_offset",
    "g.pair(g.n_local_experts() - 1, 0)": "p.n_pairs - n_ranks",
    "g.pair(g.n_local_experts() - 1, r)": "p.n_pairs - 1",
    # [n_local_experts][n_ranks][max_tokens_per_rank]: slot is fastest.
    "g.dispatch_message_offset(0, t)": "(max_tokens - 1) * msg",
    "g.dispatch_message_offset(g.n_pairs() - 1, t)": "p.dispatch_recv_bytes - msg",
    "g.dispatch_count_offset(g.n_pairs() - 1)": "(p.n_pairs - 1) * 8",
    "g.dispatch_done_offset(r)": "p.dispatch_counts_bytes - 8",
}
OFFSETS = {
    "by_expert": _OF_EVERY_KIND | _OF_ROWS | _BY_EXPERT,
    "rows": _OF_EVERY_KIND | _OF_ROWS | _BY_RANK,
    "sums": _OF_EVERY_KIND | _OF_SUMS | _BY_RANK,
}
_AXES = {
    "by_expert": "Addressing.BY_EXPERT, Returns.ROWS",
    "rows": "Addressing.BY_RANK, Returns.ROWS",
    "sums": "Addressing.BY_RANK, Returns.SUMS",
}

_PROGRAM = """
from max_ep.layout import Addressing, N_CHUNKS, Group, Returns, n_experts_on_rank
from max_ep import (
    BF16TokenFormat, BlockwiseFP8TokenFormat, Float32TokenFormat,
    PlainTokenFormat, WithMetadataTokenFormat,
)

def group(
    n_experts: Int, n_ranks: Int, max_tokens: Int, top_k: Int, msg: Int,
    addressing: Addressing, returns: Returns,
) -> Group:
    return Group(
        n_experts=n_experts, n_ranks=n_ranks, max_tokens_per_rank=max_tokens,
        top_k=top_k, dispatch_msg_bytes=msg, combine_msg_bytes=2 * msg,
        addressing=addressing, returns=returns,
    )

def main():
    for n_experts in [1, 2, 5, 7, 64]:
        for n_ranks in [1, 2, 3, 4, 8]:
            for rank in range(n_ranks):
                print("held", n_experts, n_ranks, rank,
                      n_experts_on_rank(n_experts, n_ranks, rank))
"""


def mojo_program() -> str:
    """A Mojo program that answers all questions of this file."""
    lines, indent = [_PROGRAM], "    "
    for (wire, hidden_size), name in _FORMAT_SIZES.items():
        values = [f"{name}.{x}" for x in ("token_bytes", "msg_bytes", "hidden_size")]
        values = ", ".join([*values, f"{name}.top_k"])
        lines.append(f'{indent}print("format", "{wire}", {hidden_size}, {values})')
    for name, values in SWEEP.items():
        lines.append(f"{indent}for {name} in {values}:")
        indent += "    "
    lines.append(f"{indent}var e, r = n_experts - 1, n_ranks - 1")
    lines.append(f"{indent}var t, k = max_tokens - 1, top_k - 1")
    for kind, offsets in OFFSETS.items():
        made = f"group({', '.join(SWEEP)}, {_AXES[kind]})"
        lines.append(f"{indent}var {kind} = {made}")
        asked = [x.replace("g.", f"{kind}.") for x in offsets]
        lines.append(f'{indent}print("{kind}", {", ".join(asked)})')
    return "\n".join(lines) + "\n"


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
    ("bfloat16+5", 80): "WithMetadataTokenFormat[DType.bfloat16, 80, 3, 5]",
    ("float32+40", 4): "WithMetadataTokenFormat[DType.float32, 4, 32, 40]",
}


@pytest.fixture(scope="module")
def mojo_says(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """What the program has printed: lists of words, by the first word of a line."""
    path: Path = tmp_path_factory.mktemp("layout") / "ask.mojo"
    path.write_text(mojo_program())
    answers: dict[str, list[list[str]]] = {}
    for line in run_mojo("run", "-I", ".", str(path)).splitlines():
        what, *words = line.split()
        answers.setdefault(what, []).append(words)
    return answers


@pytest.mark.parametrize("kind", OFFSETS)
def test_offsets_are_those_of_the_picture(mojo_says, kind):
    sweep = [dict(zip(SWEEP, sizes)) for sizes in itertools.product(*SWEEP.values())]
    for sizes, words in zip(sweep, mojo_says[kind], strict=True):
        n_experts, n_ranks, max_tokens, top_k, msg = sizes.values()
        p = picture(msg, 2 * msg, n_experts, n_ranks, max_tokens, top_k, kind)
        known = sizes | {"p": SimpleNamespace(**p)}
        wanted = {x: eval(python, known) for x, python in OFFSETS[kind].items()}
        got = dict(zip(wanted, map(int, words), strict=True))
        assert got == wanted, sizes


def test_routing_metadata_stands_in_tokens():
    """In an all-gather, beside each token: in messages of dispatch alone."""
    config = AllGatherTokenDispatcher(80, 5, 7, n_gpus_per_node=3, target="cpu").config
    sizes = vars(config.sizes())
    messages = dict(dispatch_msg_bytes=160 + 5 * 16 + 16, combine_msg_bytes=160 + 16)
    want = messages | picture(*messages.values(), 3, 3, 7, 3, "sums")
    for name, n_bytes in sizes.items():
        assert n_bytes == want.get(name, n_bytes), name


def test_experts_on_a_rank(mojo_says):
    """Every expert is held once, by the rank that `e // n_local_experts` says."""
    for words in mojo_says["held"]:
        n_experts, n_ranks, rank, n_held = (int(word) for word in words)
        n_local = reference.n_local_experts(n_experts, n_ranks)
        mine = [e for e in range(n_experts) if e // n_local == rank]
        assert n_held == len(mine), words


def test_comptime_sizes_of_formats_are_the_runtime_ones(mojo_says):
    got = {}
    for wire, *words in mojo_says["format"]:
        hidden_size, n_token, n_msg, hidden_of, top_k = (int(w) for w in words)
        assert hidden_of == hidden_size
        assert f"{top_k}" in _FORMAT_SIZES[wire, hidden_size]
        got[wire, hidden_size] = (n_token, n_msg)
    want = {}
    for key in _FORMAT_SIZES:
        wire, _, router_top_k = key[0].partition("+")
        n_token = token_bytes(wire, key[1])
        want[key] = (n_token, n_token + 16 * int(router_top_k or 0) + 16)
    assert got == want
    # And so says `layout_query.mojo`, which has formulas for run time.
    for case in (
        Case("asked", 2, 5, 3, 80, 7),
        Case("asked", 3, 7, 2, 36, 5, "float32", F32, F32),
        Case("asked", 2, 5, 3, 640, 7, "fp8_pow2"),
    ):
        n_bytes = case.config().sizes().dispatch_msg_bytes
        assert n_bytes == got[case.wire, case.hidden_size][1]


def test_unknown_format_is_named():
    axes = CASES["two_ranks"].config().axes
    words = ["float16", "2", "80", "5", "2", "7", "3", *axes, "0"]
    with pytest.raises(RuntimeError, match="unknown format float16"):
        run_mojo("run", "-I", ".", "layout_query.mojo", *words)


# --------------------------------------------------- the memory that is set up


@pytest.mark.parametrize("name", ["last_rank_empty", "fp8", "one_rank"])
def test_addresses_are_those_of_the_picture(session, name):
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


def test_the_quant_config_has_the_block_of_the_kernels():
    block = blockwise_fp8_quant_config().input_scale.block_size
    assert block == (1, mojo_constant("FP8_BLOCK", FP8_SOURCE))
