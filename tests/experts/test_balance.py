# SPDX-License-Identifier: Apache-2.0
"""Balanced experts: the planner, moving weights, a layer, and the command. The ops
alone are in test_router.py."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType

from graphs.moe_layer import CONFIG, HIDDEN_SIZE, MOE_DIM
from max_ep import EPBatchManager, EPCommInitializer, balance
from max_ep.balance import Placement, moves, plan, rebalance, unbalanced
from max_ep.config import checks
from max_ep.graph.moe import moe_layer
from max_ep.reference import balance_ids
from max_ep.stats import Statistics
from tests.errors import raises, refused

N_EXPERTS, TOP_K, N_REPLICAS = 256, 8, 32


def draw_ids(seed: int, n_tokens: int, popular: int = 3) -> np.ndarray:
    """Draws choices by Zipf's law, a token's likeliest experts first, as routers do."""
    order = np.random.default_rng(popular).permutation(N_EXPERTS)
    likely = -1.4 * np.log(1 + order)
    noise = np.random.default_rng(seed).gumbel(size=(n_tokens, N_EXPERTS))
    return np.argsort(-(likely + noise), axis=1)[:, :TOP_K].astype(np.int32)


def counts_of(ids: np.ndarray, n: int = N_EXPERTS) -> np.ndarray:
    return np.bincount(ids.ravel(), minlength=n)


def measured(ids: np.ndarray, placement: Placement) -> float:
    """Rows of the busiest rank, times the mean, by the formula of the op."""
    tables = placement.log2phy()[0], placement.logcnt[0]
    n_physical = placement.phy2log.shape[1]
    counts = counts_of(balance_ids(ids, *tables), n_physical)
    rows = np.add.reduceat(counts, np.arange(0, n_physical, placement.n_local))
    return rows.max() / rows.mean()


@pytest.mark.parametrize("n_tokens", [1000, 4096])
def test_fresh_draws_are_balanced(n_tokens):
    """The busiest rank gets 1.7 times the mean without replicas."""
    seen, fresh = draw_ids(0, 4096), draw_ids(1, n_tokens)
    placement = plan(counts_of(seen), 4, N_REPLICAS)
    without = unbalanced(1, N_EXPERTS, 4)
    assert measured(fresh, without) > 1.6
    assert measured(fresh, placement) < 1.05
    predicted = placement.imbalance(counts_of(fresh)[None])
    np.testing.assert_allclose(predicted, measured(fresh, placement), atol=0.03)


def test_an_expert_that_is_always_first():
    """Only one of four replicas would be chosen: `(8 * n + 0) % 4` is 0."""
    ids = np.random.default_rng(0).integers(1, N_EXPERTS, (2000, TOP_K))
    ids[:, 0] = 0
    by_count = {}
    for top_k in (1, TOP_K):
        placement = plan(counts_of(ids), 4, 3, top_k=top_k)
        by_count[int(placement.logcnt[0, 0])] = measured(ids, placement)
    assert by_count[4] > 1.3 and by_count[3] < 1.05


@pytest.mark.parametrize("n_ranks, n_hosts", [(2, 1), (3, 1), (8, 2), (16, 4)])
def test_replicas_are_spread(n_ranks, n_hosts):
    """Over hosts as evenly as can be; there may be fewer experts on the last rank."""
    counts = counts_of(draw_ids(0, 4096))
    placement = plan(counts, n_ranks, N_REPLICAS, n_hosts=n_hosts)
    assert placement.phy2log.shape == (1, N_EXPERTS + N_REPLICAS)
    assert placement.imbalance(counts[None]) < 1.03
    host = np.arange(placement.phy2log.size) // (placement.n_local * n_ranks // n_hosts)
    for expert, n in enumerate(placement.logcnt[0]):
        on_host = np.bincount(host[placement.phy2log[0] == expert], minlength=n_hosts)
        assert on_host.max() - on_host.min() <= 1, (expert, n, on_host)


def copies_on_ranks(placement: Placement) -> np.ndarray:
    """Copies of each expert on each rank, ``[n_layers, n_ranks, n_logical]``."""
    n_logical = placement.n_logical
    found = np.zeros((len(placement.phy2log), placement.n_ranks, n_logical), int)
    for layer, row in enumerate(placement.phy2log):
        for place, expert in enumerate(row):
            found[layer, place // placement.n_local, expert] += 1
    return found


@st.composite
def groups_to_plan(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, int]]:
    """Loads of one layer, and sizes that some placement has."""
    n_hosts, n_logical = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    n_ranks = n_hosts * draw(st.integers(1, 5))
    most = draw(st.sampled_from([n_ranks, draw(st.integers(1, n_ranks))]))
    n_replicas = draw(st.integers(0, n_logical * (most - 1)))
    if draw(st.booleans()):  # as many on each rank
        n_replicas = -(-(n_logical + n_replicas) // n_ranks) * n_ranks - n_logical
    if not n_ranks - n_logical <= n_replicas <= n_logical * (most - 1):
        n_replicas = n_logical * (n_ranks - 1)
        most = n_ranks
    skew = draw(st.floats(0, 3))
    loads = 1e6 / (
        1 + draw(st.permutations(range(n_logical)))[0] + np.arange(n_logical)
    )
    loads = np.where(draw(st.booleans()), loads**skew, 0).round(draw(st.integers(0, 3)))
    sizes = dict(n_ranks=n_ranks, n_replicas=n_replicas, n_hosts=n_hosts)
    return loads, sizes | dict(top_k=draw(st.integers(1, 8)), max_replicas=most)


@settings(max_examples=150, deadline=None)
@given(groups_to_plan())
def test_a_placement_of_any_group(drawn):
    """Each expert somewhere, none twice on a rank, as many on each host or one more,
    as many places on each rank; unmeasured experts have as many replicas or one more;
    the same again if the old placement is given. It failed for copies beside each
    other, and for loads of 0, which gave one expert all replicas."""
    loads, sizes = drawn
    placement = plan(loads, **sizes)
    n_physical = len(loads) + sizes["n_replicas"]
    assert placement.phy2log.shape == (1, n_physical)
    (copies,) = copies_on_ranks(placement)
    assert copies.sum(0).min() >= 1 and copies.max() == 1
    assert placement.logcnt.max() <= sizes["max_replicas"]
    if not loads.any():
        assert np.ptp(placement.logcnt) <= 1
    if n_physical % sizes["n_ranks"] == 0:
        assert (copies.sum(1) == n_physical // sizes["n_ranks"]).all()
        on_host = copies.reshape(sizes["n_hosts"], -1, len(loads)).sum(1)
        assert np.ptp(on_host, axis=0).max() <= 1
    again = plan(loads, **sizes, old=placement)
    assert again.imbalance(loads[None]) <= 1.06 * placement.imbalance(loads[None])


@pytest.mark.parametrize("n_ranks, n_replicas", [(4, 32), (8, 32), (16, 64), (32, 64)])
@pytest.mark.parametrize("skew", [0.5, 1.0, 1.4])
def test_near_the_lower_bound(n_ranks, n_replicas, skew):
    """Zipf loads: no placement is below the mean, nor below the busiest expert's share
    on all the ranks that ``top_k=8`` lets its replicas use."""
    loads = np.random.default_rng(0).permutation((1.0 + np.arange(N_EXPERTS)) ** -skew)
    placement = plan(loads, n_ranks, n_replicas)
    most = max(n for n in range(1, n_ranks + 1) if n % 2)
    bound = max(1, loads.max() / most / loads.sum() * n_ranks)
    assert placement.imbalance(loads[None]) < 1.01 * bound


def test_one_hot_expert():
    """It had 32 copies more, of which 23 were beside another, and 1.78 times the mean:
    seven of eight ranks have a copy, for 8 and ``top_k=8`` share a factor."""
    loads = np.array([[10**7] + [1] * 255])
    placement = plan(loads, 8, 32)
    assert copies_on_ranks(placement).max() == 1 and placement.logcnt[0, 0] == 7
    np.testing.assert_allclose(placement.imbalance(loads), 8 / 7, rtol=1e-4)


def test_layers_without_rows_are_spread():
    """Beside a layer that was measured; one expert had all 33 copies."""
    loads = np.stack([np.zeros(32), counts_of(draw_ids(0, 4096))[:32], np.zeros(32)])
    placement = plan(loads, 32, 32)
    assert (placement.logcnt[[0, 2]] == 2).all() and placement.logcnt[1].max() > 3
    assert placement.imbalance(loads).tolist()[::2] == [1, 1]


def test_large_and_small_loads():
    """Rows are relative: neither sums of huge ones nor shares of tiny ones are lost."""
    loads = draw_ids(0, 512).ravel()[:64] + 1.0
    want = plan(loads, 8, 8).phy2log
    for factor in (2.0**-1000, 2.0**50):
        assert (plan(loads * factor, 8, 8).phy2log == want).all()


def test_tables_are_those_of_max():
    placement = Placement(np.array([[2, 0, 1, 2, 0, 2], [0, 1, 2, 1, 1, 0]]), 3)
    assert placement.logcnt.tolist() == [[2, 1, 3], [2, 3, 1]]
    assert placement.log2phy().tolist() == [
        [[1, 4, -1], [2, -1, -1], [0, 3, 5]],
        [[0, 5, -1], [1, 3, 4], [2, -1, -1]],
    ]
    assert placement.log2phy(5).shape == (2, 3, 5)
    assert placement.log2phy().dtype == placement.logcnt.dtype == np.int32
    assert placement.logical_counts(np.arange(12).reshape(2, 6)).tolist() == [
        [1 + 4, 2, 0 + 3 + 5],
        [6 + 11, 7 + 9 + 10, 8],
    ]
    means = placement.logical_counts(np.full((2, 6), 1.5))  # were rounded one by one
    assert means.tolist() == [[3, 1.5, 4.5], [3, 4.5, 1.5]]


def test_a_second_plan_moves_few():
    """Traffic of the same kind; without `old` nearly all experts move."""
    first = plan(counts_of(draw_ids(0, 4096)), 4, N_REPLICAS)
    counts = counts_of(draw_ids(1, 4096))
    second = plan(counts, 4, N_REPLICAS, old=first)
    assert (first.phy2log != second.phy2log).sum() < 20
    assert second.imbalance(counts[None]) < 1.05
    same = plan(counts, 4, N_REPLICAS, old=second)
    assert (same.phy2log == second.phy2log).all() and not moves(same, second, 9, 9)


def weights_of(placement: Placement, layer: int) -> list[list]:
    """Tensors of each rank that say which expert they are of; 2 + 2 + 6 bytes each.
    Two have a number for each expert: such were not moved."""
    ranks = []
    for rank in range(placement.n_ranks):
        own = placement.phy2log[layer, rank * placement.n_local :][: placement.n_local]
        ids = own[:, None] + 100 * layer
        down = torch.from_numpy(ids.repeat(3, 1)).to(torch.bfloat16)
        one = ids[:, 0].astype(np.int16)
        scales = torch.nn.Parameter(torch.from_numpy(one.copy()), requires_grad=False)
        ranks.append([one, scales, down.reshape(-1, 1, 3)])
    return ranks


def holds(weights: list, placement: Placement) -> bool:
    return all(
        np.array_equal(np.asarray(have.tolist()), np.asarray(want.tolist()))
        for layer, ranks in enumerate(weights)
        for got, need in zip(ranks, weights_of(placement, layer), strict=True)
        for have, want in zip(got, need, strict=True)
    )


@pytest.mark.parametrize("slice_bytes", [3, 7, 10, 1000])
def test_weights_are_moved_in_slices(slice_bytes):
    """After each step, weights are where the placement of that step says."""
    rng = np.random.default_rng(0)
    old, new = (plan(rng.integers(1, 90, (2, 12)), 4, 4) for _ in range(2))
    slices = moves(old, new, 10, slice_bytes)
    assert all(0 < s.end - s.begin <= slice_bytes for s in slices)
    n_moved = (old.phy2log != new.phy2log).sum()
    assert sum(s.end - s.begin for s in slices) == 10 * n_moved > 100
    for s in slices:
        src, dst = (r * 4 + i for r, i in ((s[1], s[2]), (s[3], s[4])))
        assert old.phy2log[s.layer, src] == new.phy2log[s.layer, dst]
    weights = [weights_of(old, layer) for layer in range(2)]
    steps = list(rebalance(weights, old, new, slice_bytes))
    assert len(steps) == len(slices) + 2 and holds(weights, new)
    weights = [weights_of(old, layer) for layer in range(2)]
    placements = []
    for placement in rebalance(weights, old, new, slice_bytes):
        assert holds(weights, placement)
        placements.append(placement)
    assert len({id(p) for p in placements}) == 3  # old, one layer, both


ONE, ONE_OF_8 = unbalanced(1, 4, 2), unbalanced(1, 8, 2)
SWAPPED = Placement(ONE.phy2log[:, ::-1], 2)
FIXED, TABLES = np.zeros((2, 3)), np.zeros((2, 2, 16, 3), int)
FIXED.setflags(write=False)


@refused("""
plan(np.ones(4), 4, 9, max_replicas=3) | n_replicas=9 must be in [0, 8]; at most 3
plan(np.ones(4), 2, 5) | n_replicas=5 must be in [0, 4]; at most 2 replicas each, one on
plan(np.ones(4), 8, 2) | n_replicas=2 must be at least 4: there are 4 experts
plan(np.ones(4), 2, -1) | n_replicas=-1 must be an integer >= 0
plan(np.ones(4), 2, 1.0) | n_replicas=1.0 must be an integer
plan(np.ones(4), True, 0) | n_ranks=True must be an integer
plan(np.ones(4), 2, "1") | n_replicas='1' must be an integer
plan(np.ones(4), 10**30, 0) | n_ranks=1000; an integer from 1 to 2147483647
plan(np.ones(4), 2, 0, max_replicas=-1) | max_replicas=-1 must be an integer >= 0
plan(np.ones(4), 2, 0, old=ONE_OF_8) | old has; (1, 8, 2); (1, 4, 2); leave old out
plan(np.ones(4), 4, 0, n_hosts=3) | n_ranks=4 must be a multiple of n_hosts=3
plan(np.ones(4), 0, 0) | n_ranks=0 must be an integer >= 1
plan(np.ones(4), 2, 0, top_k=0) | top_k=0 must be an integer >= 1
plan(-np.ones(4), 2, 0) | counts has -1 for expert 0 of layer 0; all >= 0
plan([[1, 1], [1, np.nan]], 2, 0) | counts has nan for expert 1 of layer 1; finite
plan([[1, np.inf]], 2, 0) | counts has inf for expert 1 of layer 0; finite
plan([[1e30, 1]], 2, 0) | counts has 1e+30; below 2**63
plan([["1", "2"]], 2, 0) | counts is text; it must be numbers
plan([[1], [1, 2]], 2, 0) | counts is of dtype object; it must be numbers
plan(None, 2, 0) | counts is of dtype object; it must be numbers
ONE.imbalance(np.ones((1, 5))) | counts has shape [1, 5]; it must be [1, 4]
ONE.logical_counts(np.ones((2, 4))) | counts has shape [2, 4]; it must be [1, 4]
plan(np.ones((1, 2, 4)), 2, 0) | counts has shape [1, 2, 4]; [n_layers, n_logical]
Placement(np.array([[0, 1, 2], [0, 2, 2]]), 1) | each logical expert of [0, 3
Placement(np.ones((1, 2)), 1) | float64 [1, 2]; integers
Placement(np.array([[0, 2**40]]), 1) | each logical expert of [0, 1099511627777
Placement(np.array([[0, 1]]), 0) | n_ranks=0 must be an integer from 1 to 2
Placement(np.array([[0, 1]]), 2.0) | n_ranks=2.0 must be an integer from 1 to 2
Placement(np.array([[0, 0, 0, 1]]), 2).log2phy(2) | 3 replicas, above max_replicas=2
moves(ONE, unbalanced(2, 4, 2), 1, 1) | same layers
moves(ONE, ONE, 1, 0) | slice_bytes=0
rebalance([[[np.zeros((2, 6))[:, ::2]]] * 2], ONE, SWAPPED, 9) | contiguous
rebalance([[[FIXED]] * 2], ONE, SWAPPED, 9) | weights[0][0][0] is read-only
rebalance([[[FIXED.copy()]] * 2] * 2, ONE, SWAPPED, 9) | weights has 2 layers; 1 layer
rebalance([[[FIXED.copy()]]], ONE, SWAPPED, 9) | weights[0] has 1 rank; 2 ranks
rebalance([[[np.ones((3, 2))]] * 2], ONE, SWAPPED, 9) | [3, 2]; the 2 experts of its
rebalance([[[np.ones((1, 2))]] * 2], ONE, SWAPPED, 9) | [1, 2]; the 2 experts of its
rebalance([[[np.ones(2)], [np.ones((2, 1))]]], ONE, SWAPPED, 9) | float64 []; 64 [1]
rebalance([[[]] * 2], ONE, SWAPPED, 9) | no tensors
unbalanced(1, 4.5, 2) | n_experts=4.5 must be an integer
unbalanced(-1, 4, 2) | n_layers=-1 must be an integer >= 1
ONE.log2phy(-1) | max_replicas=-1 must be an integer >= 0
default_replicas(8, 0) | n_ranks=0 must be an integer >= 1
check_tables(BALANCED, TABLES[:1], TABLES[:1, ..., 0] + 1) | experts 0 and 1; Placement
""")
def test_what_cannot_be_planned(arguments, words):
    with raises(ValueError, words):
        eval(arguments, vars(balance) | vars(checks) | globals())


def test_weights_are_lists_of_arrays():
    """An array of a rank would be taken for a list of its experts."""
    weights = [[np.zeros((2, 6))] * 2]
    with raises(TypeError, "weights[0][0] is a ndarray; pass a list of arrays"):
        rebalance(weights, ONE, SWAPPED, 100)


# ---------------------------------------------------------------------- a layer

N_RANKS = CONFIG.n_ranks
LAYER, MOST = 1, 3
BALANCED = replace(
    CONFIG,
    n_experts=CONFIG.n_experts + 4,
    eplb_enabled=True,
    num_moe_layers=2,
    max_replicas=MOST,
    num_logical_experts=CONFIG.n_experts,
)


# Ranks that have all tokens, and 4 logical experts on 6 physical ones.
SMALL = replace(
    BALANCED,
    top_k=2,
    n_experts=6,
    num_logical_experts=4,
    n_gpus_per_node=2,
    max_tokens_per_rank=4,
    use_allreduce=True,
    num_moe_layers=1,
    eplb_phy2log_plan=[[0, 1, 2, 3, 0, 1]],
)


def add_wrong_ids(module: Module) -> None:
    """Adds a dispatch of ids that went through both ops that number them anew."""
    cpu, manager = DeviceRef.CPU(), EPBatchManager(SMALL)
    types = [TensorType(SMALL.dispatch_dtype, ["n", SMALL.hidden_size], cpu)]
    types += [TensorType(DType.int32, ["n", 2], cpu)]
    types += manager.input_types()
    with Graph("wrong_ids", input_types=types, module=module) as graph:
        x, ids, *buffers = graph.inputs
        manager.fetch_buffers(buffers)
        ids = manager.ep_balance_ids(ids.tensor, 0, 0)
        graph.output(*manager.ep_dispatch(x.tensor, ids, 0))


def add_graphs(module: Module) -> None:
    """Adds the layer twice, plain and with balanced experts, and `add_wrong_ids`."""
    add_wrong_ids(module)
    cpu, f32 = DeviceRef.CPU(), CONFIG.combine_dtype
    types: list = [TensorType(f32, [f"n_{r}", HIDDEN_SIZE], cpu) for r in range(4)]
    types += [TensorType(f32, [CONFIG.n_experts, HIDDEN_SIZE], cpu)]
    managers = [EPBatchManager(config) for config in (CONFIG, BALANCED)]
    for manager in managers:
        n = manager.config.n_local_experts
        for shape in ([n, 2 * MOE_DIM, HIDDEN_SIZE], [n, HIDDEN_SIZE, MOE_DIM]):
            types += [TensorType(f32, shape, cpu)] * N_RANKS
        types += manager.input_types()
    with Graph("balanced_moe", input_types=types, module=module) as graph:
        values = iter(graph.inputs)
        x = [next(values).tensor for _ in range(N_RANKS)]
        router, outputs = next(values).tensor, []
        for manager in managers:
            weights = [next(values).tensor for _ in range(2 * N_RANKS)]
            experts = zip(weights[:N_RANKS], weights[N_RANKS:])
            manager.fetch_buffers([next(values) for _ in manager.input_types()])
            results, ids = moe_layer(manager, x, router, list(experts), LAYER)
            outputs += [*results, *ids]
        graph.output(*outputs)


def test_a_layer_gives_the_same(session, one_module):
    """Bit for bit, with any placement, and at each step from one to another."""
    rng = np.random.default_rng(5)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5

    x = [10 * draw(n, HIDDEN_SIZE) for n in (64, 17, 0, 40)]
    router = draw(CONFIG.n_experts, HIDDEN_SIZE)
    experts = [
        draw(CONFIG.n_experts, *shape)
        for shape in ((2 * MOE_DIM, HIDDEN_SIZE), (HIDDEN_SIZE, MOE_DIM))
    ]
    old, new = (
        plan(rng.integers(1, 90, (2, CONFIG.n_experts)), 4, 4, max_replicas=MOST)
        for _ in range(2)
    )
    plain = [part for weights in experts for part in np.split(weights, N_RANKS)]
    moved = [
        list(zip(*(np.split(w[row], N_RANKS) for w in experts))) for row in old.phy2log
    ]
    model = one_module.models["balanced_moe"]
    config = replace(BALANCED, eplb_phy2log_plan=old.phy2log)
    with EPCommInitializer(CONFIG) as comm, EPCommInitializer(config) as balanced:
        comm.ep_init(session)
        balanced.ep_init(session)

        def check() -> None:
            own = [of_rank[kind] for kind in range(2) for of_rank in moved[LAYER]]
            given = [*x, router, *plain, *comm.model_inputs(), *own]
            outputs = model.execute(*given, *balanced.model_inputs())
            arrays = [output.to_numpy() for output in outputs]
            for got, want in zip(arrays[2 * N_RANKS :], arrays):
                np.testing.assert_array_equal(got, want)

        check()
        for placement in rebalance(moved, old, new, slice_bytes=80_000):
            tables = placement.log2phy(config.max_replicas), placement.logcnt
            of_ranks = [[table] * config.n_gpus_per_node for table in tables]
            balanced.set_eplb_placement(*of_ranks)
            check()  # runs a step
        assert placement.phy2log.tolist() == new.phy2log.tolist()
        with pytest.raises(ValueError, match="log2phy has 1 table; .* 4 local ranks"):
            balanced.set_eplb_placement([tables[0]], [tables[1]])
        with pytest.raises(ValueError, match=r"logcnt has a table .* int32 \[2, 16\]"):
            balanced.set_eplb_placement(*([tables[0]] * N_RANKS for _ in range(2)))
        with pytest.raises(ValueError, match=r"\[0, 0\]; they must be in \[1, max_r"):
            balanced.set_eplb_placement(*([0 * t] * N_RANKS for t in tables))
        with pytest.raises(ValueError, match=r"in \[0, 99\]; .* n_experts=20"):
            wrong = np.where(tables[0] == 19, 99, tables[0])
            balanced.set_eplb_placement(*([t] * N_RANKS for t in (wrong, tables[1])))
        other = old.log2phy(MOST), old.logcnt
        with pytest.raises(ValueError, match="local rank 3 are another placement"):
            balanced.set_eplb_placement(*([t] * 3 + [o] for t, o in zip(tables, other)))


@pytest.mark.parametrize(
    "given, range_",
    [
        (4, "num_logical_experts"),
        (5, "num_logical_experts"),
        (6, "num_logical_experts"),
        (2**20 - 1, "num_logical_experts"),
        (2**20, "n_experts"),
        (2**31 - 1, "n_experts"),
        (-2, "n_experts"),
        (-(2**31), "n_experts"),
    ],
)
def test_ids_out_of_range_are_reported_as_given(session, one_module, given, range_):
    """Also those that a physical expert has. Fails if an op makes -2 of them."""
    ids = np.array([[0, 3], [given, -1], [2, 1]], np.int32)
    x = np.zeros((3, SMALL.hidden_size), np.float32)
    with EPCommInitializer(SMALL) as comm:
        comm.ep_init(session)
        words = f"token 1, k 0: expert {given}. Ids must be in [-1, {range_})"
        with raises(Exception, words):
            one_module.models["wrong_ids"].execute(x, ids, *comm.model_inputs())
        comm.reset()


def test_a_placement_is_needed():
    with pytest.raises(ValueError, match="eplb_enabled=True"):
        EPCommInitializer(CONFIG).set_eplb_placement([], [])
    manager = EPBatchManager(BALANCED)
    tree = manager.input_tree()
    assert list(tree)[-2:] == ["eplb_log2phy", "eplb_logcnt"]
    shapes = [2, 16, MOST], [2, 16]
    for name, shape in zip(list(tree)[-2:], shapes):
        want = BufferType(DType.int32, shape, DeviceRef.CPU())
        assert tree[name] == (want,) * N_RANKS
    with Graph("placed", input_types=manager.input_types()) as graph:
        comm = manager.comm_buffers(graph.inputs)
        assert list(comm.eplb_log2phy) == list(comm.eplb_logcnt) == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="device_id=4"):
            manager.eplb_replicas(4, 0)
    manager = EPBatchManager(CONFIG)
    with Graph("not_placed", input_types=manager.input_types()) as graph:
        assert manager.comm_buffers(graph.inputs).eplb_log2phy is None
        with pytest.raises(ValueError, match="EPConfig.eplb_enabled=True"):
            manager.eplb_replicas(0, 0)


# ------------------------------------------------------------------ the command


def save_statistics(path, counts: np.ndarray) -> str:
    ns = np.zeros((1, 4, 4), int)
    received = counts.astype(np.int32).reshape(1, 4, -1)
    Statistics(ns, ns, received, counts.size).save(path)
    return str(path)


def test_command(tmp_path, run_cli):
    """From what `max-ep stats` reads; the second time from physical experts' rows."""
    layers = [draw_ids(layer, 4096, layer) for layer in range(2)]
    files = [
        save_statistics(tmp_path / f"{i}.npz", counts_of(ids))
        for i, ids in enumerate(layers)
    ]
    out, picture = str(tmp_path / "placement.npz"), tmp_path / "plot.png"
    said = run_cli("balance", *files, "--out", out, "--plot", picture)
    assert max(len(line) for line in said.splitlines() if out not in line) <= 80
    assert said.startswith("256 experts on 4 ranks, 32 replicas more: 72 a rank")
    assert picture.read_bytes().startswith(b"\x89PNG")
    placement = Placement.load(out)
    with np.load(out) as saved:
        assert saved["log2phy"].shape == (2, 256, placement.logcnt.max())
        assert (saved["logcnt"] == placement.logcnt).all()
    tables = placement.log2phy(), placement.logcnt
    received = [counts_of(balance_ids(i, *t), 288) for i, *t in zip(layers, *tables)]
    files = [save_statistics(tmp_path / f, c) for f, c in zip("ab", received)]
    said = run_cli("balance", *files, "--current", out)
    table = [line.split() for line in said.splitlines()[4:6]]
    assert table == [["0", "1.00", "1.00", "0"], ["1", "1.00", "1.00", "0"]]


def test_command_says_what_is_wrong(tmp_path, run_cli):
    good = save_statistics(tmp_path / "good.npz", np.ones(8))
    other = save_statistics(tmp_path / "other.npz", np.ones(12))
    unbalanced(1, 12, 4).save(tmp_path / "placement.npz")
    for most, n_replicas in ((1, 0), (2, 4), (0, 4)):
        said = run_cli("balance", good, "--max-replicas", most)
        assert said.startswith(f"8 experts on 4 ranks, {n_replicas} replicas more")
    for words, says in (
        ([good, other], "differ in (experts, ranks): [(8, 4), (12, 4)]"),
        ([good, "--current", f"{tmp_path}/placement.npz"], "for 1 layer, 12 experts"),
        ([good, "--replicas", "99"], "--replicas 99 must be in [0, 24]"),
        ([good, "--hosts", "3"], "n_ranks=4 must be a multiple of --hosts 3"),
        ([good, "--top-k", "0"], "--top-k 0 must be an integer >= 1"),
        ([good, "--out", f"{tmp_path}/./good.npz"], "is one of the measurements"),
    ):
        said = run_cli("balance", *words, status=1)
        assert said.startswith("max-ep balance: ") and says in said
