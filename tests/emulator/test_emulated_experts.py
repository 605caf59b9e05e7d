# SPDX-License-Identifier: Apache-2.0
"""The experts' kernels for GPUs, run in an emulator and compared with numpy."""

import numpy as np
import pytest

from max_ep.reference import bfloat16_to_float32, float32_to_bfloat16
from tests.codegen.kernels import tuning
from tests.emulator import Clock, Emulated, Launch, Memory, TensorMap, run
from tests.emulator.emulated_world import bf16, kernel, of_bf16, words
from tests.emulator.numbers import FP8
from tests.experts.test_choices import check_sorted
from tests.experts.test_heads import (
    LAYERS,
    N_HEADS,
    N_KV,
    N_PAGES,
    N_Q,
    PAGE,
    SIZE,
    draw,
)

N_EXPERTS, K, N = 3, 384, 512
TUNING, DOWN = tuning("TUNING"), tuning("DOWN")


def of_experts(name: str) -> Emulated:
    return kernel(name, "codegen_experts.mojo")


def swiglu(product: np.ndarray) -> np.ndarray:
    gate, up = np.split(product, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


class Product:
    """A product of groups: some of few rows, one of none, one of more than a tile."""

    sizes, experts = [3, 0, 165, 33], [2, 0, 0, 1]

    def __init__(self, is_swiglu: bool, k: int = K):
        rng = np.random.default_rng(k)
        self.memory = Memory(1 << 23)
        self.ends = np.cumsum([0, *self.sizes])
        self.n_rows = int(self.ends[-1])
        self.x = rng.integers(-2, 3, (self.n_rows, k)).astype(np.float32)
        self.weights = rng.integers(-2, 3, (N_EXPERTS, N, k)).astype(np.float32)
        self.is_swiglu = is_swiglu
        if is_swiglu:
            self.x /= 16
        self.width = N // 2 if is_swiglu else N

    def words(self, x: bytes, weights: bytes, k: int) -> list[int]:
        """Puts what is multiplied into memory; `k` counts 2 bytes each."""
        put = self.memory.put
        self.y = self.memory.allocate(2 * self.n_rows * self.width)
        self.at_x, self.at_weights = put(x), put(weights)
        offsets = put(self.ends.astype(np.uint32).tobytes())
        ids = put(np.array(self.experts, np.int32).tobytes())
        found = [self.y, self.at_x, self.at_weights, offsets, ids]
        return [*found, len(self.experts), self.n_rows, N_EXPERTS, N, k, 0]

    def maps(self, n_rows: int, k: int) -> list[TensorMap | None]:
        """Makes the maps of `copies.mojo`, of rows and of weights."""
        rows = TensorMap(self.at_x, (n_rows, k), (k, 1), (32, 64))
        n_rows, up = N_EXPERTS * N, N // 2
        shape, strides = (n_rows // 32, 4, 8, k), (32 * k, k, 4 * k, 1)
        if self.is_swiglu:
            shape = ((n_rows - up) // 16, 2, 8, 2 * k)
            strides = (16 * k, up * k, 2 * k, 1)
        return [rows, TensorMap(self.at_weights, shape, strides, (4, 2, 8, 64))]

    def wanted(self) -> np.ndarray:
        found = []
        for i, expert in enumerate(self.experts):
            rows = self.x[self.ends[i] : self.ends[i + 1]]
            found.append(rows @ self.weights[expert].T)
        product = np.concatenate(found)
        return swiglu(product) if self.is_swiglu else product


def launch(of: Product, made: Emulated, params: list[int], maps: list) -> None:
    grid = Launch(made, [b"", b"", words(*params)], 2, 384, maps)
    run([[grid]], of.memory, Clock())


def test_groups_in_bfloat16():
    of = Product(is_swiglu=False)
    params = of.words(bf16(of.x), bf16(of.weights), K)
    launch(of, of_experts("wgmma"), params, of.maps(of.n_rows, K))
    found = of_bf16(of.memory, of.y, of.n_rows, of.width)
    np.testing.assert_allclose(found, of.wanted(), rtol=2**-8)


def test_rows_are_gathered():
    of = Product(is_swiglu=True)
    rng = np.random.default_rng(1)
    tokens = of.x[:50]
    token_of_row = rng.integers(0, 50, of.n_rows)
    of.x = tokens[token_of_row]
    params = of.words(bf16(tokens), bf16(of.weights), K)
    params += [of.memory.put(token_of_row.astype(np.int32).tobytes()), 50]
    launch(of, of_experts("wgmma.gathered"), params, of.maps(50, K))
    found = of_bf16(of.memory, of.y, of.n_rows, of.width)
    np.testing.assert_allclose(found, of.wanted(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("is_swiglu", [False, True])
def test_groups_in_fp8(is_swiglu):
    """With SwiGLU the result is quantized, 128 columns with one scale."""
    k = 640
    of = Product(is_swiglu=is_swiglu, k=k)
    byte_of = {float(x): i for i, x in enumerate(FP8) if i < 0x7F or 0x80 < i < 0xFF}
    as_bytes = np.vectorize(lambda x: byte_of[float(x)], otypes=[np.uint8])
    params = of.words(as_bytes(of.x).tobytes(), as_bytes(of.weights).tobytes(), k // 2)
    rng = np.random.default_rng(3)
    of_x = rng.choice([0.5, 1, 2], (k // 128, of.n_rows)).astype(np.float32)
    shape = (N_EXPERTS, N // 128, k // 128)
    of_weights = rng.choice([0.5, 1, 2], shape).astype(np.float32)
    params += [of.memory.put(x.tobytes()) for x in (of_x, of_weights)]
    params.append(scales := of.memory.allocate(4 * of.width // 128 * of.n_rows))
    name = "fp8.swiglu" if is_swiglu else "fp8"
    launch(of, of_experts(name), params, of.maps(of.n_rows, k // 2))
    of.x *= np.repeat(of_x.T, 128, axis=1)
    of.weights *= np.repeat(np.repeat(of_weights, 128, axis=1), 128, axis=2)
    if is_swiglu:
        values = FP8[of.memory.array(of.y, np.uint8, of.n_rows, of.width)]
        of_rows = of.memory.array(scales, np.float32, of.width // 128, of.n_rows)
        found = values * np.repeat(of_rows.T, 128, axis=1)
        most = np.abs(of.wanted()).max() * 2**-9
        np.testing.assert_allclose(found, of.wanted(), rtol=2**-4, atol=most)
        return
    found = of_bf16(of.memory, of.y, of.n_rows, of.width)
    np.testing.assert_allclose(found, of.wanted(), rtol=2**-8)


@pytest.mark.parametrize("n_tokens", [3, 1400])
def test_choices_are_sorted(n_tokens):
    """More than a warp loads at once, and more than all of them."""
    n_experts, top_k = 5, 3
    rng = np.random.default_rng(n_tokens)
    ids = rng.integers(-1, n_experts + 1, (n_tokens, top_k)).astype(np.int32)
    memory, n = Memory(1 << 20), ids.size
    sizes = (n_experts + 1, n_experts, n, n)
    out = [memory.allocate(4 * size) for size in sizes]
    n_warps = min(max(-(-n // 512), 1), 32)
    params = [*out, memory.put(ids.tobytes()), n, n_experts, top_k]
    shape = n_experts + 1, 32 * n_warps
    grid = Launch(of_experts("sort"), [words(*params)], *shape)
    run([[grid]], memory, Clock(), seed=5)
    found = [memory.array(at, np.int32, size) for at, size in zip(out, sizes)]
    found[-1] = found[-1].reshape(n_tokens, top_k)
    check_sorted(ids, n_experts, found)


def test_few_rows():
    """By as many warps as share a sum."""
    rng = np.random.default_rng(2)
    for n_rows, k in ((3, 320), (40, 512)):
        memory, n = Memory(1 << 20), 32
        x = rng.integers(-3, 4, (n_rows, k)).astype(np.float32)
        weight = rng.integers(-3, 4, (n, k)).astype(np.float32)
        y = memory.allocate(2 * n_rows * n)
        params = [y, memory.put(bf16(x)), memory.put(bf16(weight)), n_rows, n, k]
        given = [words(x) for x in params]
        grid = Launch(of_experts("linear"), given, n // 16, 256)
        run([[grid]], memory, Clock(), seed=n_rows)
        found = of_bf16(memory, y, n_rows, n)
        np.testing.assert_allclose(found, x @ weight.T, rtol=2**-8)


@pytest.mark.parametrize("n_rows, n, k", [(1, 44, 320), (2, 16, 2624), (2, 20, 4160)])
def test_up_to_two_rows(n_rows, n, k):
    """Warps with nothing of `k`; steps that end within a warp, and more of them than a
    warp asks for at once. Each row and column is stored once, nothing behind."""
    rng = np.random.default_rng(k)
    memory = Memory(1 << 20)
    x = rng.integers(-3, 4, (n_rows, k)).astype(np.float32)
    weight = rng.integers(-3, 4, (n, k)).astype(np.float32)
    y = memory.allocate(2 * n_rows * n)
    params = [y, memory.put(bf16(x)), memory.put(bf16(weight)), n, k]
    of = of_experts(f"few_rows.{n_rows}")
    params = [words(w) for w in params]
    grid = Launch(of, params, -(-n // TUNING.of_block), TUNING.n_threads)
    run([[grid]], memory, Clock())
    found = of_bf16(memory, y, n_rows, n)
    np.testing.assert_allclose(found, x @ weight.T, rtol=2**-8)


def rounded(x: np.ndarray) -> np.ndarray:
    return bfloat16_to_float32(float32_to_bfloat16(x))


class Sums:
    """What is added and normalized."""

    epsilon = np.float32(1e-6)

    def __init__(self, n_tokens: int, n: int):
        self.rng, self.shape = np.random.default_rng(n), (n_tokens, n)
        self.memory = memory = Memory(1 << 20)
        self.x, self.more, self.weight = (
            rounded(self.rng.standard_normal(shape).astype(np.float32))
            for shape in (self.shape, self.shape, n)
        )
        self.total, self.normed = (memory.allocate(2 * n_tokens * n) for _ in range(2))
        values = self.x, self.more, self.weight
        given = [memory.put(bf16(value)) for value in values]
        self.params = [words(self.total, self.normed, *given), self.epsilon.tobytes()]

    def check(self) -> np.ndarray:
        """Compares sums and norms, and returns the norms."""
        found = of_bf16(self.memory, self.total, *self.shape)
        wanted = rounded(self.x + self.more)
        np.testing.assert_array_equal(found, wanted)
        scale = 1 / np.sqrt((wanted**2).mean(1, keepdims=True) + self.epsilon)
        found = of_bf16(self.memory, self.normed, *self.shape)
        # Rounded twice; a rounding differs where the scale's last bits do.
        wanted = rounded(wanted * scale) * self.weight
        np.testing.assert_allclose(found, wanted, rtol=2**-6)
        assert np.mean(found == rounded(wanted)) > 0.99
        return found


@pytest.mark.parametrize("n", [320, 8448])
def test_sums_and_their_norms(n):
    """Columns for some threads of a block, and for some of them twice."""
    of = Sums(2, n)
    n_threads = min(-(-n // 256) * 32, 1024)
    grid = Launch(of_experts(f"add_norm.{n}"), of.params, 2, n_threads)
    run([[grid]], of.memory, Clock(), seed=n)
    of.check()


@pytest.mark.parametrize("n_tokens, n_columns, n", [(1, 2048, 12), (2, 2120, 20)])
def test_norms_and_their_product(n_tokens, n_columns, n):
    """The product is of the norms as they are stored. Some lanes have no columns."""
    of = Sums(n_tokens, n_columns)
    weight = of.rng.integers(-3, 4, (n, n_columns)).astype(np.float32)
    y, at = of.memory.allocate(2 * n_tokens * n), of.memory.put(bf16(weight))
    params = [words(y), *of.params, words(at), words(n)]
    of_block = tuning("NORM_TUNING", "norm_product.mojo").of_block
    kernel = of_experts(f"norm_product.{n_tokens}")
    grid = Launch(kernel, params, -(-n // of_block), 256)
    run([[grid]], of.memory, Clock(), seed=n)
    found = of_bf16(of.memory, y, n_tokens, n)
    wanted = of.check() @ weight.T
    np.testing.assert_allclose(found, wanted, rtol=2**-7, atol=1e-2)


class Chosen:
    """Experts of few tokens; two tokens have one of them, some choices are nobody's."""

    n_tokens, top_k, n_experts = 3, 2, 3

    def __init__(self, hidden: int, dim: int):
        self.hidden, self.dim = hidden, dim
        rng = np.random.default_rng(dim)
        self.memory = Memory(1 << 20)
        n, n_choices = self.n_experts, self.n_tokens * self.top_k

        def draw(*shape: int) -> np.ndarray:
            return rng.integers(-2, 3, shape).astype(np.float32)

        self.x, self.rows = draw(self.n_tokens, hidden) / 16, draw(n_choices, dim)
        self.gate_up, self.down = draw(n, 2 * dim, hidden), draw(n, hidden, dim)
        self.ids = np.array([1, -1, 2, 1, n, 0], np.int32)
        self.weights = rng.random(n_choices).astype(np.float32)

    def launch(self, name: str, n_blocks: int, n_threads: int) -> None:
        put = self.memory.put
        self.y = self.memory.allocate(2 * self.n_tokens * self.hidden)
        self.activated = put(bf16(self.rows))
        params = [self.y, self.activated, put(bf16(self.x)), put(self.ids.tobytes())]
        params += [put(self.weights.tobytes()), put(bf16(self.gate_up))]
        params += [put(bf16(self.down)), self.n_tokens, self.top_k, self.n_experts]
        params += [self.hidden, self.dim]
        grid = Launch(of_experts(name), [words(*params)], n_blocks, n_threads)
        run([[grid]], self.memory, Clock(), seed=2)


def test_gate_and_up_of_few_tokens():
    """A warp asks for weights twice, and the second time some are behind the end."""
    of = Chosen(hidden=2120, dim=12)
    n_blocks = len(of.ids) * -(-2 * of.dim // TUNING.of_block)
    of.launch("chosen.gate_up", n_blocks, TUNING.n_threads)
    found = of_bf16(of.memory, of.activated, len(of.ids), of.dim)
    for choice, expert in enumerate(of.ids):
        want = of.rows[choice]  # left as it was
        if 0 <= expert < of.n_experts:
            x = of.x[choice // of.top_k]
            (want,) = swiglu(x[np.newaxis] @ of.gate_up[expert].T)
        np.testing.assert_allclose(found[choice], want, rtol=2**-7, atol=1e-3)


def test_down_of_few_tokens():
    """Adds up weighted rows, but for those of nobody."""
    of = Chosen(hidden=16, dim=776)
    of.launch("chosen.down", of.n_tokens * of.hidden // DOWN.n_rows, 32 * of.top_k)
    want = np.zeros((of.n_tokens, of.hidden), np.float32)
    for choice, expert in enumerate(of.ids):
        if 0 <= expert < of.n_experts:
            product = of.down[expert] @ of.rows[choice]
            want[choice // of.top_k] += of.weights[choice] * product
    found = of_bf16(of.memory, of.y, of.n_tokens, of.hidden)
    np.testing.assert_allclose(found, want, rtol=2**-8, atol=1e-4)


def test_heads():
    """Has so many tokens that the last block has lanes too many."""
    given, want, want_cache = draw([5, 1, 1])
    memory, n_tokens, layer = Memory(1 << 20), len(want), 1
    q = memory.allocate(2 * want.size)
    cache, *buffers = (
        memory.put(bf16(x) if x.dtype == np.float32 else x.tobytes()) for x in given
    )
    page = want_cache[0].size
    params = [q, cache, *buffers]
    params += [n_tokens, 3, N_Q, N_KV, 3, page, PAGE, LAYERS, layer]
    params.append(int(np.float32(1e-6).view(np.uint32)))
    n_threads = n_tokens * N_HEADS * SIZE // 8
    grid = Launch(of_experts("heads"), [words(*params)], -(-n_threads // 256), 256)
    run([[grid]], memory, Clock(), seed=5)
    found = of_bf16(memory, q, n_tokens, N_Q * SIZE).reshape(want.shape)
    close = dict(rtol=2**-7, atol=1e-2)
    np.testing.assert_allclose(found, want, **close)
    found = of_bf16(memory, cache, N_PAGES, page).reshape(want_cache.shape)
    np.testing.assert_allclose(found, want_cache, **close)
