# SPDX-License-Identifier: Apache-2.0
"""Each architecture's decoder against transformers: logits, token by token.

The checkpoints are tiny and random; norms, biases and sinks are drawn, too, so that
none is missed. What a server adds, `test_serve.py` tries.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef

from graphs.serve.checkpoint import OTHER_SIZES, make_checkpoint
from max_ep.checkpoint import Rope
from max_ep.checkpoint.decoder import Attention
from max_ep.serve.attention import HeadsAttention
from tests.children import slow
from tests.serve.decoders import Decoders
from tests.serve.serving import model_of

TOGETHER = [
    ("glm4_tiny",),
    ("qwen2_tiny", "mixtral_tiny"),
    ("hyv3_tiny", "qwen3_vl_tiny"),
    ("minimax_tiny", "tiny_uncommon"),
    ("olmoe_tiny",),
]
"""Checkpoints whose decoders are compiled together: a compiler of more than two takes
more memory than most machines have. Qwen3's is in `test_balanced_serving.py`."""

ON_GPUS = {"gpt_oss_tiny", "laguna_tiny"}
"""Windows are not compiled for the CPU: it takes more memory still."""

LENGTHS = (1, 40, 23)
"""Tokens of prompts; windows have 16."""
N_STEPS = 8


@pytest.fixture(scope="module")
def decoders(request, session, tmp_path_factory) -> Iterator[tuple[Decoders, Path]]:
    folder = tmp_path_factory.mktemp("made")
    for size in request.param:
        make_checkpoint(folder / size, size)
    made = Decoders(session, [folder / size for size in request.param])
    yield made, folder
    made.close()


@slow
@pytest.mark.parametrize(
    "decoders, size",
    [(sizes, size) for sizes in TOGETHER for size in sizes],
    indirect=["decoders"],
    scope="module",
)
def test_logits_are_those_of_transformers(size, decoders):
    """Prompts in one batch, then a token of each. Fails if a field of the config is
    not served, or a weight is not read."""
    made, folder = decoders
    reference = model_of(folder / size, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    texts = [rng.integers(5, 500, n).tolist() for n in LENGTHS]
    made.begin(size, len(texts))
    new, n_cached = [list(text) for text in texts], [0] * len(texts)
    for _ in range(N_STEPS):
        logits = made.step(size, new, n_cached)
        for text, row in zip(texts, logits):
            with torch.no_grad():
                wanted = reference(torch.tensor([text])).logits[0, -1].numpy()
            np.testing.assert_allclose(row, wanted, rtol=1e-3, atol=1e-4)
        n_cached = [len(text) for text in texts]
        new = [[int(row.argmax())] for row in logits]
        texts = [text + token for text, token in zip(texts, new)]


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-3, 0.02, 0.3, 0.7, 3e-3, 2.5])
def test_epsilons_of_heads_on_gpus(eps):
    """The op that normalizes, rotates and caches has one over an integer; others take
    more ops. Fails if the integer is only near."""
    rope = Rope("default", 64, {})
    of = Attention(4, 2, 64, rope, norm="head")
    heads = HeadsAttention(of, 128, eps, None, DType.bfloat16, DeviceRef.GPU())
    assert heads._is_plain() == (eps in (1e-6, 1e-5, 1e-3, 0.02))


def test_each_size_is_compared():
    sizes = {size for sizes in TOGETHER for size in sizes}
    tiny = {size for size in OTHER_SIZES if size.endswith("tiny")}
    assert sizes <= {*tiny, "minimax_tiny", "tiny_uncommon"}
    assert tiny <= sizes | ON_GPUS
