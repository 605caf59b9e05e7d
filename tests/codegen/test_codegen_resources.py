# SPDX-License-Identifier: Apache-2.0
"""What the GPU kernels need: registers, memory, and accesses of 16 bytes."""

import re

import pytest

from max_ep.extension import mojo_dir
from max_ep.limits import MAX_GPU_PAIRS, MAX_RANKS
from tests.children import slow
from tests.codegen.assembly import amd_resources, nvidia_resources
from tests.codegen.kernels import AMD, FOR_AMD, N_PAIRS, N_RANKS, compiled, kernels

# Registers of a multiprocessor's threads, and of the threads of an MI300X core that
# share a SIMD: a block of 512 puts two waves on each of the four.
NVIDIA_REGISTERS = 65536
AMD_REGISTERS_OF_TWO_WAVES = 256

# Local memory that a thread uses since its registers do not suffice, in bytes, at
# most. It should be none, and is for all others.
SPILLED = {
    "dispatch_async.fp8_scaled": 104,
    "dispatch_wait.fp8_shared_chunks_oversubscribed": 8,
    "dispatch.mxfp8_tiles_chunks": 8,
    "combine.fp8": 8,
}


@kernels(but="set_up")
def test_payload_moves_by_16_bytes(it):
    """Nothing narrower in a peer's memory but words that are published. Its address
    comes out of a table: the space is generic. Set-up clears a rank's own memory."""
    if it.sends or it.receives:
        assert it.kernel.find(lambda op: op.n_bytes == 16)
    narrow = it.kernel.find(
        lambda op: op.is_plain and op.space == "generic" and op.n_bytes != 16
    )
    assert not narrow, it.shown(narrow)


@kernels()
def test_nothing_is_read_as_a_constant(it):
    """That cache hears of no other writer, and launches overlap."""
    constants = it.kernel.find(lambda op: op.is_read_only)
    assert not constants, it.shown(constants)


IDS_BYTES = 16 * 1024
"""Ids of few choices, in shared memory, by rank."""


@kernels(but="many|clear")
def test_shared_memory_suffices(it):
    """So much for each pair and each rank that `MAX_GPU_PAIRS` of them fit."""
    sizes = re.findall(r"\.shared \.align \d+ \.b8 \S+\[(\d+)\];", it.text)
    n_bytes, n_extra = sum(map(int, sizes)), 0
    if it.is_by_rank:
        n_of_pair, n_of_rank = 4 * (it.is_dispatch and it.receives), 16
        besides = 21 * 1024 if it.is_dispatch and it.sends else 256
        if it.is_dispatch and it.sends and it.has("chunks"):
            # Many choices are counted, 4 bytes for each expert, where few have ids.
            n_extra = max(0, 4 * (MAX_GPU_PAIRS + 288) - IDS_BYTES)
    else:
        n_of_pair, n_of_rank, besides = 12, 16, 64
    besides = min(besides, max(0, n_bytes - n_of_pair * N_PAIRS - n_of_rank * N_RANKS))
    assert n_bytes <= n_of_pair * N_PAIRS + n_of_rank * N_RANKS + besides
    most = n_of_pair * MAX_GPU_PAIRS + 20 * MAX_RANKS + besides + n_extra
    assert most <= 48 * 1024


@kernels()
def test_no_local_memory(it):
    """No array that is indexed at run time, and no spilled registers but known ones."""
    local = it.kernel.find(lambda op: op.space == "local")
    assert not it.shown(local) and ".local" not in it.text
    n_registers, stack_bytes = nvidia_resources(it.cubin)
    # The assembler may spill a little to get by with half of the registers.
    has_half = n_registers * n_threads() <= NVIDIA_REGISTERS // 2
    known = SPILLED.get(it.name, 0)
    assert stack_bytes <= max(known, 16 if has_half and not it.is_by_rank else 0)


def n_threads_of_set_up() -> int:
    source = (mojo_dir() / "max_ep/launch/setup.mojo").read_text()
    return int(re.search(r"block_dim=(\d+)", source)[1])


def n_threads() -> int:
    layout = (mojo_dir() / "max_ep/protocol/layout.mojo").read_text()
    return int(re.search(r"num_threads: Int = (\d+)", layout)[1])


@kernels()
def test_block_is_resident(it):
    """The registers of a multiprocessor suffice for a block."""
    has_bound = it.sends or it.receives
    n = n_threads() if has_bound else n_threads_of_set_up()
    assert (f"\n.maxntid {n_threads()}\n" in it.text) == has_bound
    n_registers, _ = nvidia_resources(it.cubin)
    assert n_registers * n <= NVIDIA_REGISTERS


@slow
@pytest.mark.parametrize("it", [f"by_expert {n}" for n in FOR_AMD], indirect=True)
def test_amd_has_the_same_scopes(it):
    """Caches are written back by releases and emptied by acquires, as far as a scope
    reaches; no registers are spilled."""
    text = (compiled("codegen.mojo") / f"{AMD}.{it.name}.s").read_text()
    for bits, scope in (("sc0 sc1", "system"), ("sc1", "device")):
        kinds = {op.order for op in it.kernel.ops if op.scope == scope}
        has_both = "acq_rel" in kinds
        for instruction, order in (("wbl2", "release"), ("inv", "acquire")):
            found = re.search(rf"buffer_{instruction} {bits}\n", text)
            assert bool(found) == (has_both or order in kinds), (instruction, bits)
    resources = amd_resources(text)
    assert not resources["vgpr_spill_count"]
    assert resources["private_segment_fixed_size"] == 0
    assert resources["wavefront_size"] == 64
    if it.sends or it.receives:
        assert resources["max_flat_workgroup_size"] == n_threads()
    assert resources["vgpr_count"] <= AMD_REGISTERS_OF_TWO_WAVES
