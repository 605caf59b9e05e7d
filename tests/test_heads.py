# SPDX-License-Identifier: Apache-2.0
"""The pass in front of attention: norms, positions, and the paged KV cache."""

import numpy as np
import pytest
from cases import narrow, widen
from harness import to_buffer, to_numpy
from max.driver import CPU, Accelerator, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType

from max_ep.experts import PACKAGE
from max_ep.extension import add_op

N_Q, N_KV, SIZE, LAYERS, PAGE = 4, 2, 64, 3, 4
LENGTHS, NEW = [0, 7, 3], [5, 1, 2]
"""Of each sequence, tokens in the cache and behind them."""


def rotated(x, cos, sin):
    a, b = np.split(x, 2, axis=1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], 1)


def wanted(qkv, cache, rotary, pages, weights):
    """Computes both results in float32; changes the cache."""
    heads = qkv.reshape(len(qkv), N_Q + 2 * N_KV, SIZE)
    normed = heads / np.sqrt((heads**2).mean(2, keepdims=True) + 1e-6)
    q = np.empty((len(qkv), N_Q, SIZE), np.float32)
    token = 0
    for sequence, (before, n) in enumerate(zip(LENGTHS, NEW)):
        for position in range(before, before + n):
            pairs = rotary[position].reshape(-1, 2).T
            q[token] = rotated(normed[token, :N_Q] * weights[0], *pairs)
            page = cache[pages[sequence, position // PAGE]]
            keys = normed[token, N_Q : N_Q + N_KV]
            page[0, 1, position % PAGE] = rotated(keys * weights[1], *pairs)
            page[1, 1, position % PAGE] = heads[token, N_Q + N_KV :]
            token += 1
    return q


@pytest.mark.parametrize("kind", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu(1))])
def test_heads_are_normalized_rotated_and_cached(kind):
    device, dtype = DeviceRef.CPU(), DType.float32
    if kind == "gpu":
        device, dtype = DeviceRef.GPU(), DType.bfloat16
    n_pages, n_positions, n_heads = 9, 16, N_Q + 2 * N_KV
    u32, i64, host = DType.uint32, DType.int64, DeviceRef.CPU()
    types = [
        BufferType(dtype, [n_pages, 2, LAYERS, PAGE, N_KV, SIZE], device),
        TensorType(dtype, ["n_tokens", n_heads * SIZE], device),
        TensorType(u32, ["n_ends"], device),
        TensorType(dtype, [n_positions, SIZE], device),
        TensorType(u32, ["n_sequences"], device),
        TensorType(u32, ["n_sequences", "n_pages"], device),
        *[TensorType(dtype, [SIZE], device)] * 2,
        TensorType(i64, [1], host),
        TensorType(u32, [1], host),
    ]
    with Graph("heads", input_types=types) as graph:
        cache, *tensors = graph.inputs
        values = [cache.buffer, *(value.tensor for value in tensors)]
        result = TensorType(dtype, [values[1].shape[0], N_Q, SIZE], device)
        of_one = dict(size=SIZE, epsilon_of_one=10**6)
        made = add_op("norm_rope_store", device, values, [result], PACKAGE, **of_one)
        graph.output(*made)
    there = Accelerator() if kind == "gpu" else CPU()
    model = InferenceSession(devices=[CPU(), there]).load(graph)
    random = np.random.default_rng(0)

    def draw(*shape):
        x = random.standard_normal(shape).astype(np.float32)
        return (x.view(np.uint32) >> 16 << 16).view(np.float32)  # exact in bfloat16

    old, rotary = draw(*map(int, types[0].shape)), draw(n_positions, SIZE)
    qkv, weights = draw(sum(NEW), n_heads * SIZE), draw(2, SIZE)
    pages = random.permutation(n_pages).astype(np.uint32).reshape(3, 3)
    new = old.copy()
    want = wanted(qkv, new, rotary, pages, weights)
    ends = np.cumsum([0, *NEW]).astype(np.uint32)

    def put(x):
        return to_buffer(narrow(x, dtype) if x.dtype == np.float32 else x, there)

    cache = put(old)
    (q,) = model.execute(
        cache,
        put(qkv),
        put(ends),
        put(rotary),
        put(np.array(LENGTHS, np.uint32)),
        put(pages),
        *map(put, weights),
        Buffer.from_numpy(np.array([-1])),
        Buffer.from_numpy(np.array([1], np.uint32)),
    )
    close = dict(rtol=1e-5, atol=1e-5)
    if kind == "gpu":
        close = dict(rtol=2**-7, atol=1e-2)
    np.testing.assert_allclose(widen(to_numpy(q)), want, **close)
    np.testing.assert_allclose(widen(to_numpy(cache)), new, **close)
