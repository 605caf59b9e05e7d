# SPDX-License-Identifier: Apache-2.0
"""Routers: the op's choice against the oracle, and both against transformers.

And MiniMax-M2's in plain ops, which CPUs have. The tests on GPUs need no package of
``max[serve]``.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType

from max_ep import Replicas, balance_ids, reference, softmax_top_k
from max_ep.balance import plan
from max_ep.graph import routing
from tests.children import ALL_CASES
from tests.codegen.kernels import compiled
from tests.errors import raises, refused

N_EXPERTS, TOP_K = 12, 4

# Dtype, experts, choices, whether weights are divided by their sum.
CHOICES = {
    "qwen3": (DType.bfloat16, 128, 8, True),
    "all_of_softmax": (DType.float32, 40, 6, False),
    "one": (DType.float32, 1, 1, True),
    "every": (DType.float32, 32, 32, True),
    "ragged": (DType.bfloat16, 1000, 32, True),
}
USED = [n for n in CHOICES if ALL_CASES or n not in ("all_of_softmax", "every")]
"""What is compiled; `make test` has the weights of `all_of_softmax` with replicas."""


def choice_graph(name: str, device: DeviceRef, **where: Module) -> Graph:
    dtype, n_experts, top_k, renormalize = CHOICES[name]
    types = [TensorType(dtype, ["n_tokens", n_experts], device)]
    how = dict(top_k=top_k, renormalize=renormalize)
    return Graph(f"choose_{name}", softmax_top_k, types, **where, **how)


LAYERS, PHYSICAL, MOST = 2, 53, 5
"""A placement of the 40 experts of `all_of_softmax`; its table has gaps."""


def balance_graph(device: DeviceRef, **where: Module) -> Graph:
    """Builds the op of a router with a placement, and the op of ids alone."""
    dtype, n_experts, top_k, renormalize = CHOICES["all_of_softmax"]
    types = [
        TensorType(dtype, ["n_tokens", n_experts], device),
        TensorType(DType.int32, ["n_tokens", top_k], device),
        BufferType(DType.int32, [LAYERS, n_experts, MOST], device),
        BufferType(DType.int32, [LAYERS, n_experts], device),
    ]
    with Graph("balance", input_types=types, **where) as graph:
        logits, ids, *tables = graph.inputs
        first, last = (Replicas(*tables, layer) for layer in range(LAYERS))
        chosen = softmax_top_k(logits.tensor, top_k, renormalize, last)
        graph.output(*chosen, balance_ids(ids.tensor, first))
        with pytest.raises(ValueError, match="layer=2 .* num_moe_layers=2"):
            balance_ids(ids.tensor, Replicas(*tables, LAYERS))
        with pytest.raises(TypeError, match="topk_ids has dtype .*int32"):
            balance_ids(logits.tensor, first)
    return graph


def add_graphs(module: Module) -> None:
    from max_ep.checkpoint.decoder import Moe, Router
    from max_ep.serve import moe

    cpu = DeviceRef.CPU()
    for name in USED:
        choice_graph(name, cpu, module=module)
    balance_graph(cpu, module=module)
    types = [
        TensorType(DType.float32, ["n_tokens", N_EXPERTS], cpu),
        TensorType(DType.float32, [N_EXPERTS], cpu),
    ]
    for name, fields in SIGMOID.items():
        with Graph(name, input_types=types, module=module) as graph:
            logits, bias = (value.tensor for value in graph.inputs)
            of = Moe(N_EXPERTS, TOP_K, 8, Router("sigmoid", **fields))
            gate = moe.Router.__new__(moe.Router)
            made = dict(_of=of.router, _names=["e_score_correction_bias"])
            made |= dict(gate_score=lambda x: x, e_score_correction_bias=bias)
            vars(gate).update(made, num_experts_per_token=TOP_K)
            graph.output(*moe.Router.__call__(gate, logits))


SIGMOID = {
    "minimax_router": {},
    "glm4_router": dict(scale=2.5, n_groups=4, n_chosen_groups=2),
}


def of_transformers(
    name: str, logits: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights and ids."""
    from transformers import Glm4MoeConfig, MiniMaxM2Config
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter

    sizes = dict(hidden_size=N_EXPERTS, num_experts_per_tok=TOP_K)
    if name == "minimax_router":
        config = MiniMaxM2Config(**sizes, num_local_experts=N_EXPERTS)
        router = MiniMaxM2TopKRouter(config)
        router.weight.data = torch.eye(N_EXPERTS)
        return router(logits, bias)[1:]
    groups = dict(n_group=4, topk_group=2, routed_scaling_factor=2.5)
    config = Glm4MoeConfig(
        **sizes, **groups, n_routed_experts=N_EXPERTS, moe_intermediate_size=8
    )
    layer = Glm4MoeMoE(config)
    layer.gate.e_score_correction_bias = bias
    return layer.route_tokens_to_experts(logits)[::-1]


@pytest.mark.parametrize("name", SIGMOID)
def test_router_is_that_of_transformers(name, one_module):
    """Choices are made with the bias, and weighed without it."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(300, N_EXPERTS)).astype(np.float32)
    # As large as the differences of scores, so that it matters.
    bias = rng.normal(scale=0.2, size=N_EXPERTS).astype(np.float32)
    ids, weights = (
        out.to_numpy() for out in one_module.models[name].execute(logits, bias)
    )
    with torch.no_grad():
        want_weights, want_ids = of_transformers(
            name, torch.from_numpy(logits), torch.from_numpy(bias)
        )
    unbiased = np.argsort(-logits, 1)[:, :TOP_K]
    assert (np.sort(unbiased, 1) != np.sort(want_ids.numpy(), 1)).any()
    # In whatever order they are, each with its weight.
    found, wanted = np.zeros_like(logits), np.zeros_like(logits)
    np.put_along_axis(found, ids, weights, 1)
    np.put_along_axis(wanted, want_ids.numpy(), want_weights.numpy(), 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def draw_logits(n_experts: int, dtype: DType) -> np.ndarray:
    """Draws logits, with ties, with what is not finite, and with both zeros."""
    logits = np.random.default_rng(1).normal(size=(301, n_experts), scale=4)
    logits[100:150] = logits[100:150].round()
    logits[150:160, ::3] = -np.inf
    logits[160:170] = -3
    logits[170:180] = np.where(np.arange(n_experts) % 2, 0.0, -0.0)
    logits[180, n_experts // 2 :] = np.nan
    logits[181, n_experts // 2] = -np.float32(np.nan)
    logits[182, n_experts // 3] = np.inf
    logits = logits.astype(np.float32)
    if dtype == DType.bfloat16:
        logits = reference.bfloat16_to_float32(reference.float32_to_bfloat16(logits))
    return logits


COUNTS = [0, 1, 3, 5, 301]


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))]
)
def models(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The compiled ops, by name, and where they run."""
    if request.param == "cpu":
        made = request.getfixturevalue("one_module").models
        return SimpleNamespace(device="cpu", **made)
    load, gpu = request.getfixturevalue("gpu_session").load, DeviceRef.GPU(0)
    made = {f"choose_{name}": load(choice_graph(name, gpu)) for name in USED}
    return SimpleNamespace(device="cuda", balance=load(balance_graph(gpu)), **made)


@pytest.mark.parametrize("n_tokens", COUNTS)
@pytest.mark.parametrize("name", USED)
def test_choice_is_the_oracles(models, name, n_tokens):
    """Weights as far as `exp` is exact: GPUs have a faster one."""
    rtol = 2e-6 if models.device == "cpu" else 5e-6
    dtype, n_experts, top_k, renormalize = CHOICES[name]
    logits = draw_logits(n_experts, dtype)[:n_tokens]
    given = torch.from_numpy(logits).to(models.device)
    given = given.bfloat16() if dtype == DType.bfloat16 else given
    outputs = getattr(models, f"choose_{name}").execute(given)
    ids, weights = (out.to_numpy() for out in outputs)
    want_ids, want = reference.softmax_top_k(logits, top_k, renormalize)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want, rtol=rtol)


@pytest.mark.parametrize("n_tokens", COUNTS)
def test_replicas_are_the_oracles(models, n_tokens):
    """Both ops, bit for bit but for weights."""
    dtype, n_experts, top_k, renormalize = CHOICES["all_of_softmax"]
    rng = np.random.default_rng(n_tokens)
    counts = rng.integers(1, 900, (LAYERS, n_experts))
    placement = plan(counts, 4, PHYSICAL - n_experts, top_k=top_k)
    tables = placement.log2phy(MOST), placement.logcnt
    logits = draw_logits(n_experts, dtype)[:n_tokens]
    ids = rng.integers(-3, n_experts + 3, (n_tokens, top_k)).astype(np.int32)
    arrays = logits, ids, *tables
    given = [torch.from_numpy(array).to(models.device) for array in arrays]
    outputs = models.balance.execute(*given)
    chosen, weights, balanced = (out.to_numpy() for out in outputs)
    want_ids, want = reference.softmax_top_k(logits, top_k, renormalize)
    of_first, of_last = ([table[layer] for table in tables] for layer in range(LAYERS))
    np.testing.assert_array_equal(chosen, reference.balance_ids(want_ids, *of_last))
    np.testing.assert_allclose(weights, want, rtol=5e-6)
    np.testing.assert_array_equal(balanced, reference.balance_ids(ids, *of_first))


def test_oracles_choice_is_that_of_transformers():
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    logits = draw_logits(128, DType.float32)[:100]
    for renormalize in (False, True):
        config = Qwen3MoeConfig(
            hidden_size=128,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=renormalize,
        )
        router = Qwen3MoeTopKRouter(config)
        router.weight.data = torch.eye(128)
        with torch.no_grad():
            _, want_weights, want_ids = router(torch.from_numpy(logits))
        ids, weights = reference.softmax_top_k(logits, 8, renormalize)
        np.testing.assert_array_equal(ids, want_ids.numpy())
        np.testing.assert_allclose(weights, want_weights.numpy(), rtol=1e-5)


@refused("""
"float16", [3, 8], 2 | logits; float16; bfloat16 or DType.float32
"float32", [3, 8], 9 | top_k=9 of 8 experts
"float32", [3, 8], 0 | at least 1
"float32", [3, 8], True | top_k=True; be an integer
"float32", [3, 8], 2.0 | top_k=2.0; be an integer
"float32", [3, 64], 33 | at most 32
"float32", [3, "n_experts"], 2 | known to the graph
"float32", [3, 4, 8], 2 | logits has shape [3, 4, 8]
"float32", [3, routing.MAX_GPU_EXPERTS + 1], 2, DeviceRef.GPU(0) | experts; up to
""")
def test_refusals(arguments, words):
    dtype, shape, top_k, *device = eval(arguments, globals())
    types = [TensorType(DType[dtype], shape, *(device or [DeviceRef.CPU()]))]
    with raises((TypeError, ValueError), words):
        Graph("refused", softmax_top_k, types, top_k=top_k)


def test_gpu_assembly():
    """A warp has a token's logits in registers, and stores what was chosen once."""
    paths = compiled("codegen_routing.mojo").glob("*.s")
    texts = {path.stem: path.read_text() for path in paths}
    amd = texts.pop("gfx942.bf16_128_8", "")
    of_ids = texts.pop("sm_90a.balance_ids")
    assert [len(re.findall(rf"{op}\.global", of_ids)) for op in ("ld", "st")] == [3, 1]
    assert len(texts) == 4 and f"sm_90a.f32_{routing.MAX_GPU_EXPERTS}_32" in texts
    for name, text in texts.items():
        n_experts, top_k = map(int, name.split("_")[-2:])
        n_of_tables = 2 * ("balanced" in name)
        assert len(re.findall(r"ld\.global", text)) == n_experts // 32 + n_of_tables
        assert len(re.findall(r"redux\.sync\.max", text)) == 2 * top_k
        assert len(re.findall(r"st\.global", text)) == 2
        assert ".local" not in text
    # For AMD only `make test-all` compiles.
    assert bool(amd) == ALL_CASES
    assert not amd or re.search(r"\.private_segment_fixed_size: 0$", amd, re.M)
