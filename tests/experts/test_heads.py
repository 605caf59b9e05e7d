# SPDX-License-Identifier: Apache-2.0
"""The pass in front of attention: norms, positions, and the paged KV cache."""

import numpy as np
import pytest
from max.driver import CPU, Accelerator, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType

from max_ep.experts import PACKAGE
from max_ep.extension import add_op
from tests.harness import to_buffer, to_numpy
from tests.oracle.drawn import narrow, widen

N_Q, N_KV, SIZE, LAYERS, PAGE = 4, 2, 64, 3, 4
LENGTHS, NEW = [0, 7, 3], [5, 1, 2]
"""For each sequence, tokens in the cache and behind them."""
N_PAGES, N_POSITIONS, N_HEADS = 9, 16, N_Q + 2 * N_KV


def rotated(x, cos, sin):
    a, b = np.split(x, 2, axis=1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], 1)


def wanted(new, qkv, cache, rotary, pages, weights):
    """Computes both results in float32; changes the cache."""
    heads = qkv.reshape(len(qkv), N_HEADS, SIZE)
    normed = heads / np.sqrt((heads**2).mean(2, keepdims=True) + 1e-6)
    q = np.empty((len(qkv), N_Q, SIZE), np.float32)
    token = 0
    for sequence, (before, n) in enumerate(zip(LENGTHS, new)):
        for position in range(before, before + n):
            pairs = rotary[position].reshape(-1, 2).T
            q[token] = rotated(normed[token, :N_Q] * weights[0], *pairs)
            page = cache[pages[sequence, position // PAGE]]
            keys = normed[token, N_Q : N_Q + N_KV]
            page[0, 1, position % PAGE] = rotated(keys * weights[1], *pairs)
            page[1, 1, position % PAGE] = heads[token, N_Q + N_KV :]
            token += 1
    return q


def draw(new):
    """Draws what the pass is given of so many new tokens, as its arguments stand, and
    computes what comes out: queries, and the cache with layer 1 written."""
    rng = np.random.default_rng(0)

    def exact(*shape):
        x = rng.standard_normal(shape).astype(np.float32)
        return (x.view(np.uint32) >> 16 << 16).view(np.float32)  # exact in bfloat16

    old, rotary = exact(N_PAGES, 2, LAYERS, PAGE, N_KV, SIZE), exact(N_POSITIONS, SIZE)
    qkv, weights = exact(sum(new), N_HEADS * SIZE), exact(2, SIZE)
    ends, lengths = (np.uint32(x) for x in (np.cumsum([0, *new]), LENGTHS))
    pages = rng.permutation(N_PAGES).astype(np.uint32).reshape(3, 3)
    cache = old.copy()
    q = wanted(new, qkv, cache, rotary, pages, weights)
    return [old, qkv, ends, rotary, lengths, pages, *weights], q, cache


DTYPES = {"cpu": DType.float32, "gpu": DType.bfloat16}


def heads_graph(kind: str, **where: Module) -> Graph:
    dtype = DTYPES[kind]
    device = DeviceRef.CPU() if kind == "cpu" else DeviceRef.GPU()
    u32, i64, host = DType.uint32, DType.int64, DeviceRef.CPU()
    types = [
        BufferType(dtype, [N_PAGES, 2, LAYERS, PAGE, N_KV, SIZE], device),
        TensorType(dtype, ["n_tokens", N_HEADS * SIZE], device),
        TensorType(u32, ["n_ends"], device),
        TensorType(dtype, [N_POSITIONS, SIZE], device),
        TensorType(u32, ["n_sequences"], device),
        TensorType(u32, ["n_sequences", "n_pages"], device),
        *[TensorType(dtype, [SIZE], device)] * 2,
        TensorType(i64, [1], host),
        TensorType(u32, [1], host),
    ]
    with Graph("heads", input_types=types, **where) as graph:
        cache, *tensors = graph.inputs
        values = [cache.buffer, *(value.tensor for value in tensors)]
        result = TensorType(dtype, [values[1].shape[0], N_Q, SIZE], device)
        of_one = dict(size=SIZE, epsilon_of_one=10**6)
        made = add_op("norm_rope_store", device, values, [result], PACKAGE, **of_one)
        graph.output(*made)
    return graph


def add_graphs(module: Module) -> None:
    heads_graph("cpu", module=module)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu(1))])
def test_heads_are_normalized_rotated_and_cached(request, kind):
    dtype = DTYPES[kind]
    if kind == "cpu":
        there, model = CPU(), request.getfixturevalue("one_module").models["heads"]
    else:
        there = Accelerator()
        model = InferenceSession(devices=[CPU(), there]).load(heads_graph(kind))
    given, want, want_cache = draw(NEW)

    def put(x):
        return to_buffer(narrow(x, dtype) if x.dtype == np.float32 else x, there)

    cache, *buffers = map(put, given)
    (q,) = model.execute(
        cache,
        *buffers,
        Buffer.from_numpy(np.array([-1])),
        Buffer.from_numpy(np.array([1], np.uint32)),
    )
    close = dict(rtol=1e-5, atol=1e-5)
    if kind == "gpu":
        close = dict(rtol=2**-7, atol=1e-2)
    np.testing.assert_allclose(widen(to_numpy(q)), want, **close)
    np.testing.assert_allclose(widen(to_numpy(cache)), want_cache, **close)
