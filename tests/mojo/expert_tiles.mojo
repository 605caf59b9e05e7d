# SPDX-License-Identifier: Apache-2.0
"""Tiles of the experts' matmul for many rows, which are pure functions.

Prints OK, or raises. Run by tests/experts/test_experts.py.
"""
from max_ep_experts import fp8, wgmma
from max_ep_experts.hopper import is_hopper
from max_ep_experts.product import GroupedProduct
from max_ep_experts.tiles import BN, Chunks, Schedule
from std.random import random_ui64, seed
from std.testing import assert_equal, assert_true

comptime N_EXPERTS = 7
comptime BF16 = wgmma.Bf16Product[False].chunks
comptime FP8 = fp8.ScaledProduct[False].chunks


def product_of(
    mut offsets: List[UInt32], mut experts: List[Int32], n_rows: Int, n: Int
) -> GroupedProduct[DType.bfloat16]:
    """Makes a product without tensors."""
    return GroupedProduct[DType.bfloat16](
        y={unsafe_from_address = 16},
        x={unsafe_from_address = 16},
        weights={unsafe_from_address = 16},
        row_offsets={unsafe_from_address = Int(offsets.unsafe_ptr())},
        expert_ids={unsafe_from_address = Int(experts.unsafe_ptr())},
        one_group=0,
        n_groups=len(experts),
        n_rows=n_rows,
        n_experts=N_EXPERTS,
        n=n,
        k=64,
    )


def check_schedules(
    mut offsets: List[UInt32],
    mut experts: List[Int32],
    n_rows: Int,
    n: Int,
    n_clusters: Int,
    chunks: Chunks,
    may_be_narrow: Bool = True,
) raises:
    """Each row that exists has each column of its expert's weight, computed once."""
    var product = product_of(offsets, experts, n_rows, n)
    var n_groups = len(experts)
    var pairs = List[UInt32](length=n_groups + 1, fill=0)
    var odds = List[UInt32](length=n_groups + 1, fill=0)
    for g in range(n_groups):
        pairs[g + 1] = pairs[g] + chunks.n_pairs(product.size(g))
        odds[g + 1] = odds[g] + chunks.n_odd(product.size(g))
    comptime part = Int(BN) // 2
    var n_parts = n // part
    var found = List[Int](length=n_rows * n_parts, fill=0)
    for block in range(2 * n_clusters):
        var cluster, rank = divmod(block, 2)
        var schedule = Schedule(
            product,
            chunks,
            {unsafe_from_address = Int(pairs.unsafe_ptr())},
            {unsafe_from_address = Int(odds.unsafe_ptr())},
            UInt32(cluster),
            UInt32(n_clusters),
            may_be_narrow=may_be_narrow,
        )
        while True:
            var tile = schedule.next(UInt32(rank))
            if tile.n_rows == 0:
                break
            assert_true(tile.n_rows <= chunks.most)
            var is_last = Int(tile.column) == n - Int(BN)
            if rank == 1 and is_last and n % (2 * Int(BN)) != 0:
                if not (tile.shares_weight or schedule.narrow):
                    continue  # Both blocks compute the last columns.
            for r in range(tile.begin, tile.begin + tile.n_rows):
                for i in range(Int(tile.n_columns) // part):
                    found[Int(r) * n_parts + Int(tile.column) // part + i] += 1
    _ = pairs^
    _ = odds^
    var wanted = List[Int](length=n_rows, fill=0)
    for g in range(n_groups):
        for r in range(product.size(g)):
            wanted[Int(product.begin(g) + r)] += 1
    for row in range(n_rows):
        for i in range(n_parts):
            assert_equal(found[row * n_parts + i], wanted[row])


def check_random_groups() raises:
    """Checks groups of any size, some of them empty."""
    for i in range(240):
        var n_groups = Int(random_ui64(1, 40))
        var highest = [UInt64(2), 70, 300, 700][i % 4]
        var offsets = List[UInt32](length=1, fill=UInt32(random_ui64(0, 5)))
        var experts = List[Int32]()
        for _ in range(n_groups):
            var size = random_ui64(0, highest) if random_ui64(0, 4) > 0 else 0
            offsets.append(offsets[len(offsets) - 1] + UInt32(size))
            experts.append(Int32(random_ui64(0, N_EXPERTS - 1)))
        var n_rows = Int(offsets[n_groups]) + 3
        var n_clusters = [1, 2, 3, 7, 66, 1000][i % 6]
        var n = [512, 768][i // 4 % 2]
        check_schedules(offsets, experts, n_rows, n, n_clusters, BF16)
        check_schedules(offsets, experts, n_rows, n, n_clusters, FP8, False)


def check_failed_dispatch() raises:
    """Offsets behind the rows, offsets that decrease, and experts there are not."""
    comptime far = UInt32.MAX
    var offsets: List[UInt32] = [0, 130, 1 << 31, 1 << 30, far, 77, far - 1, far]
    var experts: List[Int32] = [3, 0, -1, Int32.MAX, 2, Int32.MIN, 6]
    for n_clusters in [3, 1000]:
        check_schedules(offsets, experts, 700, 512, n_clusters, BF16)


def check_one_group() raises:
    """All rows are one group, of the only weight."""
    var product = GroupedProduct[DType.bfloat16](
        y={unsafe_from_address = 16},
        x={unsafe_from_address = 16},
        weights={unsafe_from_address = 16},
        row_offsets={unsafe_from_address = 16},
        expert_ids={unsafe_from_address = 16},
        one_group=1,
        n_groups=1,
        n_rows=300,
        n_experts=1,
        n=512,
        k=64,
    )
    assert_equal(product.begin(0), 0)
    assert_equal(product.size(0), 300)
    assert_equal(product.expert(0), 0)


def check_chunks() raises:
    """Chunks have their most rows, none is empty, and few rows are not multiplied."""
    for n_rows in range(1, 3000):
        for chunks in [BF16, FP8]:
            var size = chunks.size(UInt32(n_rows))
            assert_true(size <= chunks.most and size % chunks.step == 0)
            var full = Int((chunks.count(UInt32(n_rows)) - 1) * size)
            assert_true(full < n_rows <= full + Int(size))


def main() raises:
    seed(17)
    assert_true(is_hopper["sm_90a"]() and is_hopper["nvidia:sm_90a"]())
    assert_true(not is_hopper["nvidia:sm_100a"]() and not is_hopper["amdgpu:gfx942"]())
    check_chunks()
    check_one_group()
    check_random_groups()
    check_failed_dispatch()
    print("OK")
