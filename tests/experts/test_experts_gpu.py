# SPDX-License-Identifier: Apache-2.0
"""The matmuls that served models use on Hopper, against torch."""

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from max.driver import CPU, Accelerator, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight

from bench.few_rows import MAX_TOKENS
from max_ep.experts import (
    gather_takes,
    grouped_gate_up,
    grouped_matmul,
    linear,
    routed_swiglu,
)
from max_ep.serve.hopper import add_norm_anywhere, add_norm_linear_anywhere

pytestmark = pytest.mark.gpu(1)

N_EXPERTS = 6
EXPERT_IDS = [3, 0, 5, 1, 2]
# A kernel for Hopper takes n in multiples of 256, in twos where it can.
SHAPES = {"wide": (1536, 2048), "odd": (768, 128), "narrow": (48, 64)}
OPS = {"": grouped_matmul, "_gate_up": grouped_gate_up}
FP8_SHAPES = {"wide": (1536, 2048), "odd": (768, 128)}
FP8_OPS = {"_fp8": grouped_matmul, "_gate_up_fp8": grouped_gate_up}
# Sizes of attention's output and of a router; the last one's k is no multiple of 256.
LINEARS = {"output": (2048, 4096), "router": (128, 2048), "odd_k": (256, 2112)}
# Hidden size, that of an expert, and choices: Qwen3's; odd ones, two batches of `k`.
LAYERS = {"qwen3": (2048, 768, 8), "two_batches": (2112, 1152, 3)}

IN_FLOAT32, BFLOAT16 = 5e-6, 2**-8
"""How far sums of products are off, and roundings."""

# Columns of a block's threads, of some of them, and of some of them twice.
NORMED, EPSILON = (2048, 1992, 8448), 1e-6
# Rows of a weight, and columns: Qwen3's; some lanes without columns; as many steps as
# weights are loaded ahead for, and more.
NORM_PRODUCTS = {
    "qwen3": (5120, 2048),
    "odd": (48, 2112),
    "wide": (128, 7168),
    "two_ops": (64, 8448),
}


def in_fp8(op: Callable) -> Callable:
    """Takes rows and weights with their scales one after another."""
    return lambda x, of_x, w, of_w, *groups: op((x, of_x), (w, of_w), *groups)


def add_norm(x: Any, more: Any, weight: Any) -> tuple[TensorValue, TensorValue]:
    """Returns a sum and its norm, as a layer of a served decoder has them."""
    return add_norm_anywhere(norm_of(weight), x, more)


def norm_of(weight: Any) -> Any:
    plain = dict(eps=EPSILON, weight_offset=0, multiply_before_cast=False)
    return SimpleNamespace(weight=weight, dim=int(weight.shape[0]), **plain)


@functools.cache
def weights_of_norm_product(size: str) -> dict[str, torch.Tensor]:
    """Draws a norm's weight and that of the product."""
    n, n_columns = NORM_PRODUCTS[size]
    torch.manual_seed(n)
    return {
        "norm": torch.randn(n_columns).bfloat16(),
        "weight": (torch.randn(n, n_columns) * n_columns**-0.5).bfloat16(),
    }


def norm_product(size: str, x: Any, more: Any) -> tuple[TensorValue, ...]:
    """Returns a sum, its norm and a product, of weights that are constants."""
    weights = {
        name: Weight(name, DType.bfloat16, list(value.shape), DeviceRef.GPU(0))
        for name, value in weights_of_norm_product(size).items()
    }
    layer: Any = SimpleNamespace(weight=weights["weight"], bias=None)
    norm = norm_of(TensorValue(weights["norm"]))
    return add_norm_linear_anywhere(norm, x, more, layer)


def make_graphs() -> Iterator[tuple[str, Graph]]:
    gpu = DeviceRef.GPU(0)
    for name, (n, k) in FP8_SHAPES.items():
        blocks = [N_EXPERTS, n // 128, k // 128]
        types = [
            TensorType(DType.float8_e4m3fn, ["n_rows", k], gpu),
            TensorType(DType.float32, [k // 128, "n_rows"], gpu),
            TensorType(DType.float8_e4m3fn, [N_EXPERTS, n, k], gpu),
            TensorType(DType.float32, blocks, gpu),
            TensorType(DType.uint32, ["n_offsets"], gpu),
            TensorType(DType.int32, ["n_groups"], gpu),
        ]
        for end, op in FP8_OPS.items():
            yield f"{name}{end}", Graph(f"experts_{name}{end}", in_fp8(op), types)
    for name, (n, k) in SHAPES.items():
        types = [
            TensorType(DType.bfloat16, ["n_rows", k], gpu),
            TensorType(DType.bfloat16, [N_EXPERTS, n, k], gpu),
            TensorType(DType.uint32, ["n_offsets"], gpu),
            TensorType(DType.int32, ["n_groups"], gpu),
        ]
        for end, op in OPS.items():
            yield f"{name}{end}", Graph(f"experts_{name}{end}", op, types)
        if gather_takes(N_EXPERTS, n, k):
            types.append(TensorType(DType.int32, ["n_rows_of_tokens"], gpu))
            graph = Graph(f"experts_{name}_gathered", grouped_gate_up, types)
            yield f"{name}_gathered", graph
    for name, (hidden, moe_dim, top_k) in LAYERS.items():
        types = [
            TensorType(DType.bfloat16, ["n_tokens", hidden], gpu),
            TensorType(DType.int32, ["n_tokens", top_k], gpu),
            TensorType(DType.float32, ["n_tokens", top_k], gpu),
            TensorType(DType.bfloat16, [N_EXPERTS, 2 * moe_dim, hidden], gpu),
            TensorType(DType.bfloat16, [N_EXPERTS, hidden, moe_dim], gpu),
        ]
        yield name, Graph(f"layer_{name}", routed_swiglu, types)
    for name, (n, k) in LINEARS.items():
        types = [
            TensorType(DType.bfloat16, ["n_rows", k], gpu),
            TensorType(DType.bfloat16, [n, k], gpu),
        ]
        yield name, Graph(f"linear_{name}", linear, types)
    for n in NORMED:
        rows = TensorType(DType.bfloat16, ["n_rows", n], gpu)
        types = [rows, rows, TensorType(DType.bfloat16, [n], gpu)]
        yield f"norm_{n}", Graph(f"norm_{n}", add_norm, types)
    for size, (_, n_columns) in NORM_PRODUCTS.items():
        name = f"norm_product_{size}"
        types = 2 * [TensorType(DType.bfloat16, ["n_rows", n_columns], gpu)]
        yield name, Graph(name, functools.partial(norm_product, size), types)


@pytest.fixture(scope="module")
def multiply() -> Callable:
    session = InferenceSession(devices=[CPU(), Accelerator()])
    made = list(make_graphs())
    graphs = dict(made)
    assert len(graphs) == len(made), "two graphs have one name"

    @functools.cache
    def model_of(name: str) -> Model:
        size = name.removeprefix("norm_product_")
        weights = weights_of_norm_product(size) if size in NORM_PRODUCTS else {}
        return session.load(graphs[name], weights_registry=weights)

    def buffer(tensor: torch.Tensor) -> Buffer:
        if tensor.dtype != torch.float8_e4m3fn:
            return Buffer.from_dlpack(tensor)
        as_bytes = Buffer.from_dlpack(tensor.view(torch.uint8))
        return as_bytes.view(DType.float8_e4m3fn, tuple(tensor.shape))

    def tensor(buffer: Buffer) -> torch.Tensor:
        if buffer.dtype != DType.float8_e4m3fn:
            return torch.from_dlpack(buffer)
        as_bytes = torch.from_dlpack(buffer.view(DType.uint8, tuple(buffer.shape)))
        return as_bytes.view(torch.float8_e4m3fn)

    def run(name: str, *tensors: torch.Tensor) -> Any:
        torch.cuda.synchronize()
        outputs = model_of(name).execute(*map(buffer, tensors))
        Accelerator().synchronize()
        found = [tensor(output) for output in outputs]
        return found if len(found) > 1 else found[0]

    return run


def groups_of(rows: list[int], expert_ids: list[int]) -> tuple[list[slice], tuple]:
    """Makes groups of so many rows: where each is, and what an op is given of them."""
    ends = torch.tensor([0, *rows]).cumsum(0)
    places = [slice(*ends[i : i + 2].tolist()) for i in range(len(rows))]
    offsets = ends.to(torch.int32).view(torch.uint32).cuda()
    return places, (offsets, torch.tensor(expert_ids, dtype=torch.int32).cuda())


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


@pytest.mark.parametrize("end", OPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "rows",
    [[1, 0, 0, 0, 0], [8, 9, 0, 1, 7], [32, 33, 64, 65, 3], [700, 0, 1, 257, 5]]
    + [[160, 161, 320, 321, 49], [81, 97, 113, 128, 145]],
)
def test_each_group_has_its_product(multiply, shape, end, rows):
    check_groups(multiply, shape, end, rows, EXPERT_IDS)


@pytest.mark.parametrize("shape", ["odd", "narrow"])
@pytest.mark.parametrize("n_groups", [31, 32, 33, 128, 400])
def test_so_have_many_groups(multiply, shape, n_groups):
    """A warp adds up their tiles, 32 groups at a time; a block has 384 threads."""
    rows = [37 * i % 331 for i in range(n_groups)]
    expert_ids = [i % N_EXPERTS for i in range(n_groups)]
    check_groups(multiply, shape, "", rows, expert_ids)


def check_groups(multiply, shape, end, rows, expert_ids):
    n, k = SHAPES[shape]
    n_behind = 3
    torch.manual_seed(0)
    x, weights = draw(sum(rows) + n_behind, k), draw(N_EXPERTS, n, k)
    places, groups = groups_of(rows, expert_ids)
    y = multiply(shape + end, x, weights, *groups)
    assert y.shape == (sum(rows) + n_behind, n // 2 if end else n)
    for place, expert in zip(places, expert_ids, strict=True):
        want = x[place].double() @ weights[expert].double().T
        if end:
            gate, up = want.tensor_split(2, dim=1)
            want = torch.nn.functional.silu(gate) * up
            # An error of a sum is multiplied by the other factor.
            off = (y[place].double() - want).abs()
            error = k**0.5 * 1e-5 * (1 + gate.abs() + up.abs())
            assert bool((off <= want.abs() * 2**-8 + error).all())
        else:
            check_product(y[place], want, k)


@pytest.mark.parametrize("shape", ["wide", "odd"])
@pytest.mark.parametrize("n_tokens", [1, 7, 500])
@pytest.mark.parametrize(
    "rows",
    [
        [1, 0, 0, 0, 0],
        [0, 1, 15, 160, 161],
        [321, 16, 0, 320, 17],
        [2000, 33, 1, 0, 64],
        [9000, 9001, 0, 5, 70],  # several tiles a block
    ],
)
def test_gathered_rows_have_the_same_product(multiply, shape, n_tokens, rows):
    """To the bit, also of a token in many rows. What is no token spoils no other."""
    n, k = SHAPES[shape]
    n_rows = sum(rows)
    torch.manual_seed(n_rows)
    x, weights = draw(n_tokens, k), draw(N_EXPERTS, n, k)
    _, groups = groups_of(rows, EXPERT_IDS)
    token_of_row = torch.randint(n_tokens, (n_rows + 3,), device="cuda").int()
    wanted = multiply(f"{shape}_gate_up", x[token_of_row], weights, *groups)
    y = multiply(f"{shape}_gathered", x, weights, *groups, token_of_row)
    assert torch.equal(y[:n_rows], wanted[:n_rows])
    no_tokens = token_of_row.clone()
    no_tokens[::5], no_tokens[1::10] = -1, 2**31 - 1
    y = multiply(f"{shape}_gathered", x, weights, *groups, no_tokens)
    is_same = no_tokens[:n_rows] == token_of_row[:n_rows]
    assert torch.equal(y[:n_rows][is_same], wanted[:n_rows][is_same])


@pytest.mark.parametrize("shape", FP8_SHAPES)
@pytest.mark.parametrize(
    "rows",
    [[1, 0, 0, 0, 0], [8, 9, 0, 1, 7], [63, 130, 64, 65, 3], [700, 0, 1, 257, 5]],
)
def test_each_group_has_its_product_in_fp8(multiply, shape, rows):
    """Compares with elements times scales; sums are rounded as the tensor cores do."""
    n, k = FP8_SHAPES[shape]
    torch.manual_seed(0)
    n_rows = sum(rows) + 3
    # Scales that differ by block, row and expert.
    x = torch.randn(n_rows, k, device="cuda") * torch.rand(n_rows, 1, device="cuda")
    x, x_scales = in_blocks(x.mul(10.0), 1)
    of_blocks = torch.rand(N_EXPERTS, n // 128, 1, k // 128, 1, device="cuda") + 0.1
    weights = torch.randn(N_EXPERTS, n // 128, 128, k // 128, 128, device="cuda")
    weights, weight_scales = in_blocks((weights * of_blocks).view(-1, n, k), 128)
    places, groups = groups_of(rows, EXPERT_IDS)
    given = x, x_scales.T.contiguous(), weights, weight_scales, *groups
    y = multiply(f"{shape}_fp8", *given)
    activated, scales = multiply(f"{shape}_gate_up_fp8", *given)
    exact_x = x.double() * x_scales.double().repeat_interleave(128, 1)
    by_row = weight_scales.double().repeat_interleave(128, 1)
    exact = weights.double() * by_row.repeat_interleave(128, 2)
    for of_group, expert in zip(places, EXPERT_IDS):
        if of_group.start == of_group.stop:
            continue
        want = exact_x[of_group] @ exact[expert].T
        error = 1e-3 * (exact_x[of_group].square() @ exact[expert].square().T).sqrt()
        off = (y[of_group].double() - want).abs()
        assert bool((off <= want.abs() * 2**-8 + error).all()), float(off.max())
        gate, up = want.tensor_split(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
        of_row = scales.T[of_group].double()
        largest = want.abs().unflatten(1, (-1, 128)).amax(2)
        torch.testing.assert_close(of_row, largest / 448, rtol=1e-2, atol=3e-7)
        of_row = of_row.repeat_interleave(128, 1)
        off = (activated[of_group].double() * of_row - want).abs()
        more = error.tensor_split(2, dim=1)
        error = (more[0] + more[1]) * (1 + gate.abs() + up.abs())
        allowed = want.abs() * 2**-4 + of_row * 2**-10 + error
        assert bool((off <= allowed).all()), float((off - allowed).max())


def in_blocks(x: torch.Tensor, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes; a scale is of 128 columns of so many rows."""
    blocks = x.unflatten(-1, (-1, 128)).unflatten(-3, (-1, n_rows))
    scales = blocks.abs().amax((-3, -1), keepdim=True) / 448
    values = (blocks / scales).to(torch.float8_e4m3fn).view(x.shape)
    return values, scales.squeeze(-1).squeeze(-2)


def check_product(y: torch.Tensor, want: torch.Tensor, k: int) -> None:
    """One rounding to bfloat16, and sums in float32."""
    off = (y.double() - want).abs()
    assert bool((off <= want.abs() * 2**-8 + k**0.5 * 1e-5).all())


@pytest.mark.parametrize("shape", LINEARS)
@pytest.mark.parametrize(
    "n_rows", [1, 2, 3, 4, 5, 7, 8, 9, 32, 33, 64, 65, 127, 128, 129, 255, 700]
)
def test_a_linear_layer_is_the_product(multiply, shape, n_rows):
    n, k = LINEARS[shape]
    torch.manual_seed(n_rows)
    x, weight = draw(n_rows, k), draw(n, k)
    y = multiply(shape, x, weight)
    assert y.shape == (n_rows, n)
    check_product(y, x.double() @ weight.double().T, k)


def rounded(x: torch.Tensor, off: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns it in bfloat16, and how far another rounding may be from that, of what
    differs by ``off``."""
    low, y, high = ((x + d).bfloat16().double() for d in (-off, 0, off))
    return y, torch.maximum(high - y, y - low)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("n_tokens", [1, 2, 4, 5, 70])
def test_a_routed_layer(multiply, layer, n_tokens):
    """Few tokens by kernels of their own; some choices are nobody's, some tokens share
    experts. The same bits each time."""
    hidden, moe_dim, top_k = LAYERS[layer]
    torch.manual_seed(n_tokens)
    x = draw(n_tokens, hidden)
    gate_up = (draw(N_EXPERTS, 2 * moe_dim, hidden) * hidden**-0.5).bfloat16()
    down = (draw(N_EXPERTS, hidden, moe_dim) * moe_dim**-0.5).bfloat16()
    ids = torch.randint(-1, N_EXPERTS + 1, (n_tokens, top_k), device="cuda").int()
    weights = torch.rand(n_tokens, top_k, device="cuda")
    y = multiply(layer, x, ids, weights, gate_up, down)
    want = torch.zeros(n_tokens, hidden, device="cuda").double()
    slack = torch.zeros_like(want)
    for token, choice in ((ids >= 0) & (ids < N_EXPERTS)).nonzero().tolist():
        expert, weight = ids[token, choice], weights[token, choice].double()
        gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
        off = IN_FLOAT32 * (1 + gate.abs()) * (1 + up.abs())
        activated, off = rounded(torch.nn.functional.silu(gate) * up, off)
        matrix = down[expert].double()
        row, off = matrix @ activated, matrix.abs() @ off
        off += IN_FLOAT32 * (1 + row.abs())
        if n_tokens > MAX_TOKENS:  # otherwise it is not stored, and so not rounded
            row, off = rounded(row, off)
        want[token] += weight * row
        slack[token] += weight * off
    assert ((y.double() - want).abs() <= slack + BFLOAT16 * want.abs() + 1e-5).all()
    assert torch.equal(y, multiply(layer, x, ids, weights, gate_up, down))


@pytest.mark.parametrize("shape", ["odd", "narrow"])
def test_offsets_of_a_failed_dispatch_reach_nothing(multiply, shape):
    """Groups behind the rows, and of experts that there are not, have no product."""
    n, k = SHAPES[shape]
    torch.manual_seed(0)
    x, weights = draw(9, k), draw(N_EXPERTS, n, k)
    # The first group is right; the second ends, the others begin behind all rows.
    ends = torch.tensor([0, 4, 2**31 - 1, 2**30, 2**31 - 1, 77], dtype=torch.int32)
    experts = torch.tensor([3, 0, -1, 2**31 - 1, 2], dtype=torch.int32)
    y = multiply(shape, x, weights, ends.view(torch.uint32).cuda(), experts.cuda())
    for begin, end, expert in ((0, 4, 3), (4, 9, 0)):
        want = x[begin:end].double() @ weights[expert].double().T
        check_product(y[begin:end], want, k)


@pytest.mark.parametrize("n_rows", [1, 2, 3, 300])
@pytest.mark.parametrize("size", NORM_PRODUCTS)
def test_norms_and_their_product(multiply, size, n_rows):
    """Sums and norms, and the product of the norms as they are stored; the same bits
    each time."""
    n, n_columns = NORM_PRODUCTS[size]
    torch.manual_seed(n_rows)
    x, more = draw(n_rows, n_columns), draw(n_rows, n_columns)
    found = multiply(f"norm_product_{size}", x, more)
    total, normed, y = found
    weights = {k: v.cuda() for k, v in weights_of_norm_product(size).items()}
    check_norm(total, normed, x, more, weights["norm"])
    wanted = normed.double() @ weights["weight"].double().T
    check_product(y, wanted, n_columns)
    for again, once in zip(multiply(f"norm_product_{size}", x, more), found):
        assert torch.equal(again, once)


@pytest.mark.parametrize("n_rows", [1, 3, 300])
@pytest.mark.parametrize("n", NORMED)
def test_sums_and_their_norms(multiply, n, n_rows):
    """A sum has torch's bits. A norm is rounded twice, as transformers' is."""
    x, more, weight = draw(n_rows, n), draw(n_rows, n), draw(n)
    total, normed = multiply(f"norm_{n}", x, more, weight)
    check_norm(total, normed, x, more, weight)


def check_norm(total, normed, x, more, weight):
    assert torch.equal(total, x + more)
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + EPSILON)
    wanted = (wide * scale).bfloat16() * weight
    torch.testing.assert_close(normed, wanted, rtol=2**-6, atol=0)
    assert (normed == wanted).float().mean() > 0.99
