# SPDX-License-Identifier: Apache-2.0
"""Before a model is served: memory that is planned, settings, and placements."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from max.driver import DeviceSpec
from max.dtype import DType
from max.pipelines.architectures.deepseekV3 import model as stock_model
from max.pipelines.architectures.deepseekV3.model_config import (
    DeepseekV3Config as MaxsConfig,
)
from max.pipelines.lib import KVCacheConfig
from transformers import AutoConfig

from graphs.serve.checkpoint import make_checkpoint
from max_ep import EPConfig
from max_ep.balance import Placement, plan
from max_ep.checkpoint import check_config
from max_ep.limits import BALANCE_VARIABLE
from max_ep.serve import deepseek_v3, settings, source
from max_ep.serve.model import CheckedConfig, ExpertParallelModel, OurConfig
from max_ep.serve.replaced import OF_A_MODEL, replaced
from max_ep.serve.settings import (
    PLACEMENT_VARIABLE,
    ExpertParallelPlanner,
    activation_bytes,
    place_experts,
    serving_config,
)
from tests.serve.described import QWEN3, qwen3
from tests.serve.serving_configs import PUBLISHED


def test_devices_that_an_architecture_is_not_for(monkeypatch):
    """Before weights are read: the memory plan comes first."""
    name = "DeepseekV3ForCausalLM"
    devices = [SimpleNamespace(device_type="cpu")]
    monkeypatch.setattr(settings, "config_of", lambda _: dict(architectures=[name]))
    words = "not served on the CPU, but on one GPU and several GPUs; .*without max_ep"
    where = SimpleNamespace(model=SimpleNamespace(device_specs=devices))
    with pytest.raises(ValueError, match=f"{name} is {words}"):
        _planner().estimate_activation_memory(where, None)


@pytest.mark.parametrize(
    "device, dtype, words",
    [
        (
            "gpu",
            DType.float32,
            "float32 is not served on GPUs; pass --quantization-enc",
        ),
        (
            "cpu",
            DType.bfloat16,
            "bfloat16 is not served on the CPU; .*encoding float32",
        ),
    ],
)
def test_dtypes_that_were_not_compared(device, dtype, words):
    """MAX would serve them: a word in the name of a weight file is enough."""
    where = _flags(64, True)
    where.model.device_specs = [SimpleNamespace(device_type=device)]
    planner = _planner()
    planner._config.dtype = dtype
    with pytest.raises(ValueError, match=words):
        planner.estimate_activation_memory(where, None)


class _Copied(SimpleNamespace):
    """Has pydantic's way to copy."""

    def model_copy(self, update: dict) -> _Copied:
        return _Copied(**(vars(self) | update))


def _served(folder: Path, parsed: Any = None) -> SimpleNamespace:
    """What MAX knows of a checkpoint in a folder, as far as we ask; ``parsed`` is its
    ``config.json``, if not as transformers parses it."""
    repo = SimpleNamespace(repo_type="local", local_path=str(folder), subfolder=None)
    model = SimpleNamespace(huggingface_model_repo=repo, huggingface_weight_repo=repo)
    model.huggingface_config = parsed or AutoConfig.from_pretrained(folder)
    model.resolved_weight_paths = lambda: sorted(folder.rglob("*.safetensors"))[::-1]
    model.device_specs = [SimpleNamespace(device_type="cpu")]
    return SimpleNamespace(model=model)


def test_a_server_checks_the_checkpoint(tmp_path, monkeypatch):
    """With MAX's own command, too: the config when MAX reads it, and with the memory
    plan the files. What MAX reads and transformers does not write is added."""
    monkeypatch.undo()

    class Stock:
        @classmethod
        def initialize(cls, pipeline_config: Any) -> Any:
            return pipeline_config.model.huggingface_config

    class Checked(CheckedConfig, Stock):
        pass

    for size in ("deepseek_tiny", "tiny"):
        make_checkpoint(tmp_path / size, size)
        fields = json.loads((tmp_path / size / "config.json").read_text())
        for name in ("moe_layer_freq", "topk_method", "scoring_func", "head_dim"):
            fields.pop(name, None)
        (tmp_path / size / "config.json").write_text(json.dumps(fields))
        made = Checked.initialize(_served(tmp_path / size))
        if size == "tiny":
            assert made.head_dim == 32
        else:
            known = made.moe_layer_freq, made.topk_method, made.scoring_func
            assert known == (1, "noaux_tc", "sigmoid")
    folder = tmp_path / "tiny"
    more = folder / "original"  # MAX opens these files, too
    shutil.copytree(folder, more)
    served = _served(folder)
    files = {place.tensor.file for place in source.stored_in(served, 0).values()}
    assert files == {folder / "model.safetensors"}
    cut = folder / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-500])
    with pytest.raises(ValueError, match="model.safetensors is cut"):
        _planner().estimate_activation_memory(served, served.model.huggingface_config)
    fields["use_sliding_window"] = True
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="use_sliding_window=True is not served"):
        Checked.initialize(served)


def test_fields_beside_those_of_the_text_model_do_not_count(tmp_path, monkeypatch):
    """transformers reads `text_config` alone. Failed while the group read what
    transformers had parsed: a token had one expert of eight."""
    monkeypatch.undo()
    published = PUBLISHED["Qwen3-VL-30B-A3B-Instruct"]
    beside = dict(num_experts_per_tok=1, hidden_size=64, max_position_embeddings=77)
    (tmp_path / "config.json").write_text(json.dumps(published | beside))
    served, flags = _served(tmp_path), _flags(64, True)
    vars(served.model).update(vars(flags.model) | dict(max_length=None))
    served.runtime, served.sampling = flags.runtime, flags.sampling

    class Model(ExpertParallelModel):
        pipeline_config, dtype = served, DType.float32
        huggingface_config = served.model.huggingface_config

    group, text = Model()._group(), published["text_config"]
    longest = OurConfig.calculate_max_seq_len(Model.huggingface_config, served.model)
    assert longest == text["max_position_embeddings"]
    assert (group.top_k, group.hidden_size) == (8, text["hidden_size"])


def test_max_reads_what_was_checked_of_deepseek(tmp_path, monkeypatch):
    """Not what the checkpoint's own class says of fields that are left out. Failed for
    each of the three."""
    monkeypatch.undo()
    others = dict(routed_scaling_factor=1.0, qk_rope_head_dim=32, rope_theta=5e4)
    heads = dict(num_attention_heads=40, num_key_value_heads=40)
    kimi = PUBLISHED["Kimi-K2-Instruct"] | heads
    given = {name: value for name, value in kimi.items() if name not in others}
    (tmp_path / "config.json").write_text(json.dumps(given))
    served = _served(tmp_path, SimpleNamespace(**(given | others)))
    gpus = [DeviceSpec.accelerator(i) for i in range(2)]
    how = dict(data_parallel_degree=2, use_subgraphs=True, device_specs=gpus)
    vars(served.model).update(how, kv_cache=KVCacheConfig())
    served.speculative = None
    chosen = f"{MaxsConfig.__module__}._select_quantization_encoding"
    monkeypatch.setattr(chosen, lambda *_: "bfloat16")
    # As MAX's model makes it, while its graph is built.
    with replaced(
        dict.fromkeys(OF_A_MODEL) | deepseek_v3.DeepseekV3Model.also_replaced
    ):
        kind = stock_model.DeepseekV3Config
    assert kind is deepseek_v3.DeepseekV3Config
    assert stock_model.DeepseekV3Config is MaxsConfig
    for _ in range(2):  # MAX keeps what was parsed
        made = kind.initialize(served, max_seq_len=100)
        # With heads of zeros.
        assert made.num_attention_heads == made.num_key_value_heads == 64
        assert made.kv_params.num_q_heads == 64
    assert served.model.huggingface_config.num_attention_heads == 64
    assert made.routed_scaling_factor == 2.5
    assert made.kv_params.head_dim == 512 + 64
    assert made.rope_theta == 1e4
    assert made.rope_scaling["factor"] == kimi["rope_scaling"]["factor"]


@pytest.mark.parametrize(
    "name, device, n, gigabytes",
    [
        ("DeepSeek-V3", "gpu", 8, 907.4),  # 656.5 of experts, and eight times the rest
        ("gpt-oss-20b", "gpu", 1, 41.8),  # from 13.8
        ("gpt-oss-20b", "cpu", 1, 83.7),
    ],
)
def test_weights_are_planned_as_they_are_loaded(
    name, device, n, gigabytes, monkeypatch
):
    """Not as they are stored: matrices are widened, and each GPU has all but experts.
    MAX's planner, which takes files for bfloat16, planned -3.8 TB of DeepSeek-V3."""
    config = check_config(PUBLISHED[name])
    monkeypatch.setattr(settings, "config_of", lambda _: config)
    devices = [SimpleNamespace(device_type=device)] * n
    where = SimpleNamespace(model=SimpleNamespace(device_specs=devices))
    planner = deepseek_v3.DeepseekV3Planner if n > 1 else ExpertParallelPlanner
    n_bytes = planner.__new__(planner).estimate_weights_size(where)
    assert n_bytes / 1e9 == pytest.approx(gigabytes, rel=1e-3)


def test_deepseek_needs_attention_and_experts(monkeypatch):
    """MAX plans its attention without expert parallelism, which is ours to plan."""
    asked = []

    def attention(self: object, pipeline_config: _Copied, huggingface: str) -> int:
        asked.append((pipeline_config.runtime.ep_size, huggingface))
        return 40

    two = _Copied(
        model=SimpleNamespace(device_specs=[None] * 2), runtime=_Copied(ep_size=2)
    )
    asked_for = "estimate_activation_memory"
    monkeypatch.setattr(deepseek_v3.DeepseekV3MemoryPlanner, asked_for, attention)
    monkeypatch.setattr(deepseek_v3.ExpertParallelPlanner, asked_for, lambda *_: 2)
    planner = deepseek_v3.DeepseekV3Planner.__new__(deepseek_v3.DeepseekV3Planner)
    assert planner.estimate_activation_memory(two, "config.json") == 42
    assert asked == [(1, "config.json")]
    assert two.runtime.ep_size == 2
    one = _Copied(model=SimpleNamespace(device_specs=[None]))
    assert planner.estimate_signal_buffer_memory(one) > 0  # and one GPU has them


@pytest.fixture(autouse=True)
def checked(monkeypatch) -> dict[str, Any]:
    """A checked `config.json` in place of files; what the plan refuses of them,
    `test_serve_checkpoint.py` has."""
    config = check_config(QWEN3)
    monkeypatch.setattr(settings, "is_downloaded", lambda _: False)
    for place in (settings, source):
        monkeypatch.setattr(place, "config_of", lambda _: config)
    return config


PLACEMENT = plan(np.outer([1, 2], 1000 / np.arange(1, 17)), 4, 4, top_k=4)
"""Two layers of 16 experts on four ranks, with a replica each."""

MODEL = qwen3()


def _flags(n_tokens: int, cuts_prompts: bool) -> SimpleNamespace:
    """What MAX makes of the flags of four ranks of the CPU, as far as we ask."""
    cpu = SimpleNamespace(device_type="cpu")
    model = SimpleNamespace(device_specs=[cpu], data_parallel_degree=1, max_length=100)
    runtime = SimpleNamespace(ep_size=4, max_batch_input_tokens=n_tokens)
    runtime.enable_chunked_prefill = cuts_prompts
    runtime.enable_overlap_scheduler = runtime.disable_overlap = False
    sampling = SimpleNamespace(enable_penalties=False)
    return SimpleNamespace(model=model, runtime=runtime, sampling=sampling)


def _config(flags: SimpleNamespace) -> EPConfig:
    return serving_config(flags, MODEL, DType.float32)


def test_a_placement_names_weights_by_place(tmp_path, monkeypatch):
    """Each place has the weights of its logical expert, in each layer with experts."""
    PLACEMENT.save(tmp_path / "plan.npz")
    monkeypatch.setenv(PLACEMENT_VARIABLE, str(tmp_path / "plan.npz"))
    config = _config(_flags(256, True))
    assert (config.n_experts, config.num_logical_experts) == (20, 16)
    dense = {"embed.weight": "e", "layers.0.mlp.down_proj.weight": "d"}
    weights = {
        f"layers.{layer}.mlp.experts.{e}.{name}.weight": (layer, e, name)
        for layer in (1, 10)
        for e in range(16)
        for name in ("up_proj", "down_proj")
    }
    assert place_experts(dense | weights, config) == dense | {
        f"layers.{layer}.mlp.experts.{p}.{name}.weight": (layer, int(e), name)
        for layer, row in zip((1, 10), PLACEMENT.phy2log)
        for p, e in enumerate(row)
        for name in ("up_proj", "down_proj")
    }
    other = tmp_path / "other.npz"
    for text, said in ((None, "No such file"), ("?", "no file of max_ep.balance")):
        if text:
            other.write_text(text)
        with monkeypatch.context() as here:
            here.setenv(PLACEMENT_VARIABLE, str(other))
            with pytest.raises(ValueError, match=f"MAX_EP_PLACEMENT=.*{said}"):
                _config(_flags(256, True))
    with pytest.raises(ValueError, match="has 2 layers, the model 0 with experts"):
        place_experts(dense, config)
    flags = _flags(256, True)
    flags.runtime.eplb_redundant_experts_per_gpu = 1
    with pytest.raises(ValueError, match="--eplb-redundant.*MAX_EP_PLACEMENT"):
        _config(flags)
    Placement(PLACEMENT.phy2log, 2).save(tmp_path / "plan.npz")
    with pytest.raises(ValueError, match="16 experts on 2 ranks.*served are 16 on 4"):
        _config(_flags(256, True))


def test_experts_that_move_have_room(monkeypatch):
    """Replicas, and places for one layer more, are in the memory plan; without a
    placement each layer has its own replicas, spread evenly."""
    flags, planned = _flags(64, True), []
    for seconds in ("", "60"):
        monkeypatch.setenv(BALANCE_VARIABLE, seconds)
        config = _config(flags)
        of_group = sum(settings.rank_bytes(config, MODEL))
        whole = _planner().estimate_activation_memory(flags, None)
        planned.append(whole - 4 * of_group)
    n_layers, of_expert = 2, 3 * 64 * 32 * 4
    assert planned == [0, 4 * ((n_layers + 1) * 5 - n_layers * 4) * of_expert]
    assert (config.n_experts, config.max_replicas) == (20, 4)
    placed = Placement(config.eplb_phy2log_plan, 4)
    assert len(placed.phy2log) == n_layers and placed.logcnt.sum(1).tolist() == [20, 20]
    deeper = serving_config(flags, qwen3(num_hidden_layers=5), DType.float32)
    assert len(deeper.eplb_phy2log_plan) == 5
    one = _flags(64, True)
    one.runtime.ep_size = 1
    with pytest.raises(ValueError, match="MAX_EP_BALANCE is set, but one rank has all"):
        _config(one)


def _planner() -> settings.ExpertParallelPlanner:
    plan = settings.ExpertParallelPlanner.__new__(settings.ExpertParallelPlanner)
    plan._config = SimpleNamespace(dtype=DType.float32)
    return plan


def test_the_plan_is_of_all_ranks_and_of_the_longest_prompt():
    """Fails if memory is planned for one of several ranks, or for a batch alone."""
    whole, chunked = _config(_flags(64, False)), _config(_flags(164, True))
    assert whole == chunked
    of_a_rank = whole.estimate_memory_usage() + activation_bytes(whole, MODEL)
    planned = _planner().estimate_activation_memory(_flags(64, False), None)
    assert planned == 4 * of_a_rank


BF16_ROWS = 2 * 2 * 128  # as they come, and as they go
FP8_ROWS = 128 + 4 + 64 + 2 + 2 * 128  # with scales; gate and up in FP8, too


@pytest.mark.parametrize(
    "target, moe_dim, is_fp8, n_bytes",
    [
        ("gpu", 64, False, BF16_ROWS + 2 * 64),
        ("gpu", 96, False, BF16_ROWS + 2 * 288),
        ("cpu", 64, False, BF16_ROWS + 2 * 192),
        ("gpu", 64, True, FP8_ROWS),
    ],
)
def test_the_plan_has_gate_and_up_where_they_are_stored(
    target, moe_dim, is_fp8, n_bytes
):
    """On GPUs one kernel multiplies them, if it takes their sizes."""
    how = dict(dispatch_dtype=DType.bfloat16, combine_dtype=DType.bfloat16)
    config = SimpleNamespace(
        target=target, n_output_rows=10, is_quantized=is_fp8, **how
    )
    model = qwen3(hidden_size=128, moe_intermediate_size=moe_dim)
    assert activation_bytes(config, model) == 10 * n_bytes


def test_experts_with_biases_have_no_replicas(tmp_path, monkeypatch):
    PLACEMENT.save(tmp_path / "plan.npz")
    monkeypatch.setenv(PLACEMENT_VARIABLE, str(tmp_path / "plan.npz"))
    model = replace(MODEL, moe=replace(MODEL.moe, is_clamped=True))
    with pytest.raises(ValueError, match="MAX_EP_PLACEMENT is set, and biases"):
        serving_config(_flags(256, True), model, DType.float32)


def test_penalties_count_the_last_token():
    """MAX's sampler would not have it where steps overlap; it has a negative id."""
    flags = _flags(64, True)
    flags.sampling.enable_penalties = flags.runtime.enable_overlap_scheduler = True
    with pytest.raises(ValueError, match="the last token .*; pass --disable-overlap"):
        _config(flags)
    flags.runtime.disable_overlap = True
    _config(flags)


def test_gpus_that_do_not_divide_the_experts():
    """There ``--ep-size`` follows from the GPUs: others must be served on."""
    flags = _flags(64, True)
    flags.model.device_specs = [SimpleNamespace(device_type="gpu")] * 3
    flags.model.data_parallel_degree = flags.runtime.ep_size = 3
    with pytest.raises(ValueError, match="serve on a number of GPUs that divides 16"):
        _config(flags)


def test_what_makes_batches_large_is_named(monkeypatch):
    """Without chunked prefill a prompt may come on top of a full batch."""
    free = SimpleNamespace(stats={"free_memory": 1})
    monkeypatch.setattr(settings, "CPU", lambda: free)
    plan = _planner()
    with pytest.raises(ValueError, match="lower --max-batch-input-tokens$"):
        plan.estimate_activation_memory(_flags(64, True), None)
    with pytest.raises(ValueError, match="--max-length.*chunked prefill on$"):
        plan.estimate_activation_memory(_flags(64, False), None)


def test_variables(monkeypatch):
    """Empty is unset; what they cannot be is said with their names."""

    def config() -> EPConfig:
        return _config(_flags(64, True))

    for name in ("MAX_EP_PROTOCOL", "MAX_EP_TIMEOUT_S"):
        monkeypatch.setenv(name, "")
    assert (config().protocol, config().timeout_s) == ("by_rank", 30)
    assert config().combine_mode == "sums"
    monkeypatch.setenv("MAX_EP_PROTOCOL", "by_expert")
    monkeypatch.setenv("MAX_EP_TIMEOUT_S", "2.5")
    assert (config().protocol, config().timeout_s) == ("by_expert", 2.5)
    assert config().combine_mode == "rows"
    monkeypatch.setenv("MAX_EP_TIMEOUT_S", "30s")
    with pytest.raises(ValueError, match="MAX_EP_TIMEOUT_S='30s' must be seconds"):
        config()
    monkeypatch.setenv("MAX_EP_PROTOCOL", "carrier_pigeon")
    with pytest.raises(ValueError, match="'carrier_pigeon' is no protocol; set it to"):
        config()
