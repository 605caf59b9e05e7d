# SPDX-License-Identifier: Apache-2.0
"""`EPConfig`: what it refuses, what it takes of MAX's, and what `auto` is."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch  # noqa: F401, for the tables
from max.dtype import DType
from max.nn.comm.ep import EPConfig as MaxEPConfig
from max.nn.quant_config import QuantFormat

from max_ep import (
    EPConfig,
    blockwise_fp8_quant_config,
    mxfp8_quant_config,
    nvfp4_quant_config,
)
from tests.children import ROOT
from tests.errors import arguments_of, raises, refused
from tests.oracle.cases import BF16, CASES, F32

TWO = CASES["two_ranks"]  # 5 experts, top_k 3, hidden 80, 7 tokens, bfloat16

INT8, F16, FP8_E4M3 = DType.int8, DType.float16, DType.float8_e4m3fn
QUANT = blockwise_fp8_quant_config()
NVFP4 = dataclasses.replace(QUANT, format=QuantFormat.NVFP4)


NARROW_BLOCKS, BF16_SCALES = (
    dataclasses.replace(
        QUANT, input_scale=dataclasses.replace(QUANT.input_scale, **changes)
    )
    for changes in (dict(block_size=(1, 64)), dict(dtype=BF16))
)


REFUSED_FIELD = "fused_moe_ready"
"""The one of MAX's that asks for what there is not."""
BAD_CONFIGS = """
hidden_size=81 | 81; 162 bytes; multiple of 16
hidden_size=4, dispatch_dtype=F32 | hidden_size=4; combine_dtype; multiple of 8
hidden_size=0 | hidden_size=0; >= 1
hidden_size=80.0 | hidden_size=80.0; integer
hidden_size=True | hidden_size=True; integer; not bool
max_tokens_per_rank=np.float32(7) | max_tokens_per_rank=; integer; not float32
max_tokens_per_rank=torch.tensor(7) | max_tokens_per_rank=tensor(7); not Tensor
n_sms=True | n_sms=True; integer >= 0, not bool
moe_dim=2**61 | moe_dim=2305843009213693952; from 0 to 2147483647
router_top_k=None | router_top_k=None; not NoneType
fused_shared_expert="no" | fused_shared_expert='no'; True or False
protocol=1 | protocol=1; text, not int
dispatch_quant_config="fp8" | dispatch_quant_config is a str; blockwise_fp8_quant_config
top_k=33, n_experts=64 | top_k=33; 32
top_k=6 | top_k=6; n_experts=5
top_k=0 | top_k=0; >= 1
n_experts=0 | n_experts=0
max_tokens_per_rank=-1 | max_tokens_per_rank=-1
n_gpus_per_node=129 | 129; 128
n_gpus_per_node=2**61 | n_gpus_per_node=2305843009213693952; to 2147483647
n_nodes=0 | n_nodes=0
node_id=1 | node_id=1; n_nodes=1
node_id="0" | node_id='0'; integer; not str
node_id=-2 | node_id=-2; >= -1
timeout_s=0 | timeout_s=0; above 0
timeout_s=float("nan") | timeout_s=nan; above 0
timeout_s=True | timeout_s=True; must be seconds
start_timeout_s=0 | start_timeout_s=0; above 0
start_timeout_s="5" | start_timeout_s='5'; must be seconds
timeout_s="5" | timeout_s='5'; must be seconds
timeout_s=None | timeout_s=None; must be seconds
timeout_s=-1 | timeout_s=-1; above 0
timeout_s=float("inf") | timeout_s=inf; at most a day
target="tpu" | 'tpu'; 'cpu'; 'gpu'
protocol="by_node" | 'by_node'; 'auto'; 'by_rank'; 'by_expert'
target="gpu", n_nodes=2, ranks_per_gpu=2 | n_nodes=2; pass ranks_per_gpu=1
on_timeout="mask", target="gpu" | on_timeout='mask' on GPUs; protocol='by_expert'
on_timeout="mask", target="gpu", n_nodes=2 | NVSHMEM, which no process can leave or join
combine_mode="tokens" | 'tokens'; 'rows'; 'sums'
combine_mode="sums" | combine_mode='sums'; protocol='by_expert'; 'by_rank'
**AS_SUMS, partial_dtype=F16 | partial_dtype; float16; bfloat16 or float32
partial_dtype=F32 | partial_dtype=DType.float32; combine_mode='rows'; leave it out
**PARTIALS_OF_84 | hidden_size=84; partial_dtype; 168 bytes; multiple of 8
combine_quant_config=QUANT | combine_quant_config; combine_mode='rows'; 'sums'
**AS_SUMS, combine_quant_config=QUANT, partial_dtype=BF16 | no partial_dtype
**AS_SUMS, combine_quant_config=QUANT | hidden_size=80; 128; FP8 partial sums; pad
**AS_SUMS, combine_quant_config=NVFP4 | combine_quant_config has format; NVFP4
n_sms=-1 | n_sms=-1; >= 0
combine_dtype=F16 | combine_dtype; float16; bfloat16 or float32
dispatch_dtype=INT8 | dispatch_dtype; int8; bfloat16; float32; float8_e4m3fn
dispatch_dtype="bfloat16" | dispatch_dtype='bfloat16'; str; DType.bfloat16
dispatch_dtype=FP8_E4M3 | dispatch_quant_config; blockwise_fp8_quant_config()
dispatch_quant_config=QUANT | dispatch_quant_config; bfloat16; pass None
output_layout="ragged" | 'ragged'; 'packed'; 'padded'
**PADDED, fused_shared_expert=True | fused_shared_expert; output_layout='packed'; add it
tokens_are_quantized=True | tokens_are_quantized; bfloat16
**OF_FP8, hidden_size=512, scale_layout="packed" | 'packed'; fp8_power_of_two_scales
**OF_FP8, hidden_size=80 | hidden_size=80; 128; FP8; pad
**OF_FP8 | dict(dispatch_quant_config=NVFP4) | NVFP4; BLOCKSCALED_FP8
**OF_FP8 | dict(dispatch_quant_config=NARROW_BLOCKS) | (1, 64); (1, 128)
**OF_FP8 | dict(dispatch_quant_config=BF16_SCALES) | bfloat16; float32
**PLANNED | eplb_phy2log_plan; eplb_enabled=False; leave the plan out
use_allreduce=True | use_allreduce; n_experts=5; ranks divide
use_allreduce=True, n_experts=6, n_nodes=2, n_gpus_per_node=1 | use_allreduce; n_nodes=2
use_allreduce=True, n_experts=6, fused_shared_expert=True | fused_shared_expert; beside
nvfp4_dyn_global_scales=True | nvfp4_dyn_global_scales; nvfp4_quant_config()
eplb_enabled=True | num_moe_layers=0; from 1; eplb_enabled=True
**BALANCED | dict(max_replicas=0) | max_replicas=0; from 1
**BALANCED | dict(num_logical_experts=2) | num_logical_experts=2; top_k=3; n_experts=5
**BALANCED | dict(num_logical_experts=6) | num_logical_experts=6; n_experts=5
**BALANCED, eplb_phy2log_plan=[[0, 1, 2, 3], [0]] | phy2log; [n_layers, n_physical]
**BALANCED, eplb_phy2log_plan=[[0, 1, 2, 3]] | [1, 4]; [2, 5]; num_moe_layers
**BALANCED, eplb_phy2log_plan=[[0, 1, 2, 2, 0]] * 2 | [2, 5]; 3 logical; experts=4
**BALANCED, eplb_phy2log_plan=[[0, 1, 2, 4, 0]] * 2 | each logical expert of [0, 5)
**BALANCED, eplb_phy2log_plan=[[0, 1, 2, 3, 0], [0, 1, 2, 0, 0]] | each logical
**BALANCED | dict(max_replicas=1, **PLANNED) | 2 replicas; max_replicas=1
max_output_rows=0 | max_output_rows=0; >= 1, or None
max_output_rows=2**61 | max_output_rows=2305843009213693952; or None
max_output_rows=9, target="gpu", protocol="by_expert" | max_output_rows=9; by_rank
max_output_rows=9, **PADDED | max_output_rows=9; 'padded'; packed
fused_moe_ready=True | fused_moe_ready; Blackwell; use ep_dispatch
"""
BALANCED = dict(
    eplb_enabled=True, num_moe_layers=2, num_logical_experts=4, max_replicas=2
)
PLANNED = dict(eplb_phy2log_plan=[[0, 1, 2, 3, 0]] * 2)
PADDED = dict(output_layout="padded")
AS_SUMS = dict(combine_mode="sums", protocol="auto")
OF_FP8 = dict(dispatch_dtype=FP8_E4M3, dispatch_quant_config=QUANT)
OF_F32 = dict(dispatch_dtype=F32, combine_dtype=F32)
PARTIALS_OF_84 = AS_SUMS | OF_F32 | dict(hidden_size=84, partial_dtype=BF16)


@refused(BAD_CONFIGS)
def test_config_refuses(arguments, words):
    """`TWO`'s configuration, with what is changed in it."""
    with raises(ValueError, words):
        TWO.config(**arguments_of(arguments, globals()))


_FULLY_BALANCED = BALANCED | PLANNED
_BALANCED_FIELDS = (*BALANCED, *PLANNED)
_OF_MXFP8 = dict(
    dispatch_dtype=FP8_E4M3, dispatch_quant_config=mxfp8_quant_config(), hidden_size=96
)
OF_NVFP4 = dict(
    dispatch_dtype=DType.uint8,
    dispatch_quant_config=nvfp4_quant_config(),
    hidden_size=96,
)
# For each field of MAX's EPConfig a value that is not its default, and what it needs.
GIVEN = dict.fromkeys(_BALANCED_FIELDS, _FULLY_BALANCED) | dict(
    dispatch_dtype=OF_NVFP4,
    combine_dtype=dict(combine_dtype=F32),
    hidden_size=dict(hidden_size=160),
    top_k=dict(top_k=2),
    n_experts=dict(n_experts=6),
    max_tokens_per_rank=dict(max_tokens_per_rank=9),
    n_gpus_per_node=dict(n_gpus_per_node=4),
    n_nodes=dict(n_nodes=2, n_gpus_per_node=1),
    node_id=dict(node_id=0),
    dispatch_quant_config=_OF_MXFP8,
    nvfp4_dyn_global_scales=OF_NVFP4 | dict(nvfp4_dyn_global_scales=True),
    fused_shared_expert=dict(fused_shared_expert=True),
    fuse_ffn_combine_send=dict(fuse_ffn_combine_send=True),
    moe_dim=dict(moe_dim=64),
    use_allreduce=dict(use_allreduce=True, n_experts=6),
    max_batch_size=dict(max_batch_size=8),
)


def test_each_field_of_maxs_config_is_taken_or_refused(monkeypatch):
    """Fails if MAX has a field that is neither here nor among the refused."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")  # MAX asks for it with two nodes
    names = [field.name for field in dataclasses.fields(MaxEPConfig)]
    assert sorted([*GIVEN, REFUSED_FIELD]) == sorted(names)
    for name, given in GIVEN.items():
        config = TWO.config(**given)
        assert np.array_equal(getattr(config, name), given[name])
        theirs = MaxEPConfig(**{field: getattr(config, field) for field in names})
        for field in names:
            assert np.array_equal(getattr(theirs, field), getattr(config, field)), name
    guide = (ROOT / "docs/from_max.md").read_text()
    assert f"| `{REFUSED_FIELD}` |" in guide


@refused("""
n_experts=65535, protocol="by_rank" | 65535; by_expert
max_tokens_per_rank=65535, protocol="by_rank" | 65535; by_expert
n_experts=3840, target="gpu" | 2 GPU ranks; 3840
""")
def test_largest_sizes(arguments, words):
    """What an entry can hold, and the experts that a block can count."""
    most = arguments_of(arguments, globals())
    TWO.config(**most)
    field, n = next(iter(most.items()))
    with raises(ValueError, f"{field}={n + 1}; {words}"):
        TWO.config(**(most | {field: n + 1}))


@refused("""
hidden_size=2**61 | hidden_size; bytes of memory; a smaller hidden_size
hidden_size=2**40 | hidden_size; 4,398,046,511,120 bytes in a message
hidden_size=2**30 | hidden_size; 4,294,967,312 bytes in a message; GiB
max_tokens_per_rank=2**62 | max_tokens_per_rank; bytes of memory
max_tokens_per_rank=2**30 | max_tokens_per_rank; 6,442,450,944 rows; 2,147,483,647
n_experts=2**62 | n_experts; bytes of memory
n_experts=2**20 + 1, hidden_size=8 | n_experts; 1,048,577 n_experts; 1,048,576
hidden_size=2**19, max_tokens_per_rank=2**25 | max_tokens_per_rank; TiB
**OF_FP8, hidden_size=2**61 | hidden_size; bytes of memory
""")
@pytest.mark.parametrize("protocol", ["auto", "by_expert"])
def test_sizes_do_not_wrap(arguments, words, protocol):
    """Mojo's numbers have 64 bits, and some 32. What is refused names one field, what
    it makes, and the bytes of a rank."""
    given = arguments_of(arguments, globals())
    with raises(ValueError, f"{words}; is too large; memory would take at least"):
        TWO.config(protocol=protocol, **given)


ANYTHING = [
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**61, 10**30, 1.5, 2.0, 1j),
    *(float("nan"), float("inf"), "x", "", "8", b"x", [], [1], [[0, 1, 2]], {}),
    *(np.array(3), np.array([1, 2]), np.int64(4), np.float32(2), np.bool_(True)),
    *(torch.tensor(4), object(), int, len, range(3), ..., F16, FP8_E4M3, INT8),
    *(QUANT, NVFP4, type(QUANT), np.ones((1, 5), np.int64), np.zeros((99, 99))),
]


def test_any_value_is_taken_or_refused_in_words():
    """Each field with things of all kinds: a `ValueError` of one line, or nothing."""
    fp8 = OF_FP8 | dict(hidden_size=256)
    sums = AS_SUMS | dict(hidden_size=256, combine_quant_config=QUANT)
    for given in ({}, fp8, sums, BALANCED | PLANNED):
        for field in dataclasses.fields(EPConfig):
            n_taken = 0
            for value in ANYTHING:
                try:
                    TWO.config(**(given | {field.name: value}))
                    n_taken += 1
                except ValueError as error:
                    assert len(str(error)) < 400 and "\n" not in str(error), error
            assert n_taken < len(ANYTHING) / 2, field.name


def test_integers_of_numpy_become_pythons():
    config = TWO.config(hidden_size=np.int64(96), top_k=np.uint8(2), n_sms=np.int32(3))
    assert [type(n) for n in (config.hidden_size, config.top_k, config.n_sms)] == [
        int
    ] * 3


@pytest.mark.parametrize("protocol", ["auto", "by_expert"])
def test_what_by_expert_costs_is_said_once(protocol):
    """Where another size would be by rank; who asks for by expert knows."""
    large = dict(max_tokens_per_rank=65536, n_experts=256, n_gpus_per_node=8)
    large |= dict(hidden_size=7168, top_k=8, protocol=protocol)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = TWO.config(**large)
        dataclasses.replace(config, n_sms=3)
        TWO.config(**large | dict(max_tokens_per_rank=65535))
    assert len(caught) == (protocol == "auto")
    for warning in caught:
        assert "by_expert': max_tokens_per_rank=65536 is above 65535" in str(warning)
        assert "at least 231.00 GiB instead of 14.00 GiB" in str(warning)
        assert warning.filename.endswith("cases.py")  # which calls EPConfig


@pytest.mark.filterwarnings("ignore:max_ep. protocol='auto'")
def test_auto_is_by_rank_where_that_works(monkeypatch):
    for changes, protocol in (
        (dict(combine_mode="sums"), "by_rank"),
        ({}, "by_rank"),
        (dict(target="gpu", n_nodes=2), "by_expert"),
        (dict(target="gpu", n_nodes=2, combine_mode="sums"), "by_rank"),
        (dict(max_tokens_per_rank=65536), "by_expert"),
    ):
        assert TWO.config(protocol="auto", **changes).protocol == protocol
    name = "max_ep.config.protocol.accelerator_architecture_name"
    for gpu, protocol in dict(sm_80="by_expert", sm_90a="by_rank").items():
        monkeypatch.setattr(name, lambda gpu=gpu: gpu)
        assert TWO.config(protocol="auto", target="gpu").protocol == protocol
    monkeypatch.setattr("max_ep.config.protocol.accelerator_api", lambda: "hip")
    assert TWO.config(protocol="auto", target="gpu").protocol == "by_expert"
    assert TWO.config(protocol="auto").protocol == "by_rank"
    with raises(ValueError, "by_rank; AMD; by_expert"):
        TWO.config(protocol="by_rank", target="gpu")
