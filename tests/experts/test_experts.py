# SPDX-License-Identifier: Apache-2.0
"""The matmuls for GPUs, as far as it shows without one.

What it computes is compared with torch in tests/experts/test_experts_gpu.py.
"""

import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from bench import few_rows
from max_ep import experts
from max_ep.extension import run_mojo
from max_ep.serve import hopper
from tests.children import WHERE_WE_IMPORT, ran, slow
from tests.codegen.assembly import nvidia_resources
from tests.codegen.kernels import PROGRAMS, Tuning, compiled, mojo_constant, tuning
from tests.errors import raises, refused

FEW_ROWS = "max_ep_experts/few_rows.mojo"


@pytest.fixture(scope="module")
def folder() -> Path:
    return compiled("codegen_experts.mojo")


def test_python_refuses_what_the_kernel_cannot_take(folder):
    taken = (folder / "printed").read_text().split()
    # Rows of a whole tile are as many where Python puts zeros behind them.
    wanted = [experts.GPU_COLUMNS, experts.GPU_K_STEP, hopper.TILE_ROWS]
    wanted += [experts.GATHER_COLUMNS, experts.GATHER_EXPERTS]
    assert [int(n) for n in taken] == wanted
    lane = mojo_constant("LANE", "max_ep_experts/product.mojo")
    assert hopper.NORM_COLUMNS == lane


def test_few_rows_assembly(folder):
    """Loads of 16 bytes, and `mma`."""
    kernels = [*folder.glob("*.grouped_matmul*.s"), *folder.glob("*.linear.s")]
    assert len(kernels) == 3
    for path in kernels:
        text = path.read_text()
        loads = re.findall(r"ld\.global\.nc(?:\.\w+)*?((?:\.v\d)?\.b\d+) ", text)
        wide = [width for width in loads if width == ".v4.b32"]
        assert len(wide) > 20 and set(loads) <= {".v4.b32", ".b32"}
        assert "mma.sync.aligned.m16n8k16.row.col.f32" in text


@pytest.mark.parametrize("name", ["few_rows.1", "few_rows.2", "chosen.gate_up"])
def test_weights_of_few_tokens_are_asked_for_at_once(folder, name):
    """Many loads before the first product. The kernel before may still run until the
    wait; what it writes is not read before, nor through the cache of constants."""
    text = (folder / f"sm_90a.{name}.s").read_text()
    before, wait, after = text.partition("griddepcontrol.wait;")
    assert wait and "ld.global" not in before and "st.global" not in before
    first, _, _ = after.partition("fma.rn.f32")
    weights = r"ld\.global\.nc\.L1::no_allocate\.L2::256B\.v4\.b32"
    of = tuning("TUNING")
    assert len(re.findall(weights, first)) == of.n_rows * of.n_steps
    assert len(re.findall(r"\.nc\b", after)) == len(re.findall(weights, after))
    assert ("prefetch.L2" in before) == name.startswith("few_rows")


@pytest.mark.parametrize("name", ["add_norm.320", "add_norm.8448", "heads", "choose"])
def test_a_small_kernel_reads_behind_its_wait(folder, name):
    """What the kernel before writes is not read before, nor through the cache of
    constants."""
    text = (folder / f"sm_90a.{name}.s").read_text()
    before, wait, after = text.partition("griddepcontrol.wait;")
    memory = r"\b(?:ld|st)\.(?!param)"
    assert wait and not re.search(memory, before) and re.search(memory, after)
    assert "griddepcontrol.launch_dependents;" in text and ".nc" not in after


def test_down_loads_weights_before_it_waits(folder):
    """And the router's choices, which the kernel before has waited for."""
    text = (folder / "sm_90a.chosen.down.s").read_text()
    before, _, _ = text.partition("griddepcontrol.wait;")
    of = tuning("DOWN")
    n = of.n_rows * of.n_steps
    assert before.count("ld.global.nc.L1::no_allocate") == n
    assert before.count("ld.global") == n + 2 and "st.global" not in before


@pytest.mark.parametrize("n_tokens", [1, 2])
def test_constants_of_a_norms_product_are_loaded_before_it_waits(folder, n_tokens):
    """The weights of a warp, and those of the norm. Nothing is stored before, and what
    is added does not come through the cache of constants."""
    text = (folder / f"sm_90a.norm_product.{n_tokens}.s").read_text()
    before, wait, after = text.partition("griddepcontrol.wait;")
    n_steps = n_tokens  # of the programs
    of = tuning("NORM_TUNING", "norm_product.mojo")
    assert wait and before.count("ld.global.nc.L1::no_allocate") == of.n_rows * n_steps
    assert before.count("ld.global") == (of.n_rows + 1) * n_steps
    assert "st.global" not in before and ".nc" not in after
    assert "griddepcontrol.launch_dependents;" in text


def test_the_benchmark_of_few_rows_has_the_limits_of_the_kernels():
    """Fails if it times a kernel as part of a layer that no op launches there."""
    for name in ("MAX_ROWS", "MAX_TOKENS"):
        assert getattr(few_rows, name) == mojo_constant(name, FEW_ROWS)


OF_DENSE = "{0.n_warps} warps, {0.n_slices} slices, {0.n_rows} rows, {0.n_steps} steps"


@pytest.mark.parametrize(
    "mojo, names, words",
    [
        ("DENSE", few_rows.DENSE, OF_DENSE),
        ("DOWN", few_rows.DOWN, "{0.n_rows} rows, {0.n_steps} steps"),
        ("NORM", few_rows.OF_NORM, "{0.n_warps} warps, {0.n_rows} rows"),
    ],
)
def test_the_benchmark_of_few_rows_names_what_it_times(mojo, names, words):
    """Mojo and Python list the same variants; the first is of Python alone."""
    text = Path(few_rows.__file__).with_name("few_rows_bench").joinpath("ops.mojo")
    text = text.read_text()
    (made,) = re.findall(rf"^comptime (?:OF_)?{mojo} = \[(.*?)^\]", text, re.M | re.S)
    wanted = []
    for name, sizes in re.findall(r"(\w+)(?:\((.*)\))?,$", made, re.M):
        file = "norm_product.mojo" if name == "NORM_TUNING" else "few_rows.mojo"
        *numbers, overlaps = sizes.split(", ") if sizes else (None, "True")
        of = Tuning(*map(int, numbers)) if sizes else tuning(name, file)
        said = re.sub(r"\b1 (\w+)s\b", r"1 \1", words.format(of))
        if overlaps == "False":
            assert said == wanted[0]
            said = "the same without PDL"
        wanted.append(said)
    assert names[1:] == wanted
    assert re.findall(rf"^comptime N_{mojo} = (\d+)$", text, re.M) == [f"{len(wanted)}"]


def test_a_fence_before_each_product_of_gathered_rows(folder):
    """What threads have copied is then seen by `wgmma`."""
    text = (folder / "sm_90a.wgmma.gathered.s").read_text()
    fence = r"fence\.proxy\.async\.shared::cta;((?!mma_async)[\s\S])*?wgmma\.fence"
    assert len(re.findall(fence, text)) == text.count("wgmma.fence") > 0


def test_rows_of_a_token_are_loaded_together(folder):
    text = (folder / "sm_90a.add.s").read_text()
    loads = [m.start() for m in re.finditer(r"ld\.global\.nc\.v4\.b32", text)]
    assert len(loads) == 8 and loads[-1] < text.index("fma.rn.f32")
    n_registers, _ = nvidia_resources((folder / "sm_90a.add.cubin").read_bytes())
    assert n_registers > 8 * 4 + 8  # fewer: the assembler has moved loads


@pytest.mark.parametrize(
    "name, widths",
    [
        ("wgmma.swiglu", ["b16", "b32"]),
        ("wgmma", ["b32", "v2.b32"]),
        ("fp8.swiglu", ["b32", "v2.b16"]),
        ("fp8", ["v4.b32"]),
    ],
)
def test_a_lane_stores_adjacent_columns_at_once(folder, name, widths):
    text = (folder / f"sm_90a.{name}.s").read_text()
    assert sorted(set(re.findall(r"st\.global\.([\w.]+)", text))) == widths


def test_no_registers_are_spilled(folder):
    cubins = list(folder.glob("*.cubin"))
    assert len(cubins) == 20
    for path in cubins:
        n_registers, stack_bytes = nvidia_resources(path.read_bytes())
        # In FP8 there are half as many sums more; a few registers are saved.
        assert stack_bytes <= (16 if "fp8" in path.name else 0)
        assert ".local" not in path.with_suffix(".s").read_text()
        # Three warpgroups of the one kernel, three blocks of four warps of the others,
        # 32 warps of the sort, as many warps as a token may have choices.
        is_wide = "sort" in path.name or "add_norm" in path.name
        n_threads = 1024 if is_wide else 3 * 128
        if "chosen.down" in path.name:
            n_threads = 32 * int(mojo_constant("MAX_TOP_K", FEW_ROWS))
        assert n_registers * n_threads <= 2**16


def test_each_tile_is_computed_once():
    printed = run_mojo("run", "-I", ".", str(PROGRAMS / "expert_tiles.mojo"))
    assert printed.strip() == "OK"


OPS = """
import os
import sys
from max.driver import (
    Accelerator, set_virtual_device_api, set_virtual_device_count,
    set_virtual_device_target_arch,
)
set_virtual_device_api("cuda")
set_virtual_device_target_arch("sm_90a")
set_virtual_device_count(1)
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from max_ep.experts import grouped_swiglu, linear, routed_swiglu

gpu, bf16 = DeviceRef.GPU(0), DType.bfloat16
types = [
    TensorType(bf16, ["n_rows", 512], gpu),
    TensorType(bf16, [8, 512, 512], gpu),
    TensorType(bf16, [8, 512, 256], gpu),
    TensorType(DType.uint32, [9], gpu),
    TensorType(DType.int32, [8], gpu),
    TensorType(DType.int32, ["n_tokens", 4], gpu),
    TensorType(DType.float32, ["n_tokens", 4], gpu),
]
fp8 = DType.float8_e4m3fn
for shape, of_scales in (
    (["n_rows", 512], [4, "n_rows"]),
    ([8, 512, 512], [8, 4, 4]),
    ([8, 512, 256], [8, 4, 2]),
):
    types += [TensorType(fp8, shape, gpu), TensorType(DType.float32, of_scales, gpu)]
with Graph("experts", input_types=types) as graph:
    x, gate_up, down, *groups, ids, weights = (v.tensor for v in graph.inputs[:7])
    layer = routed_swiglu(x, ids, weights, gate_up, down)
    given = [v.tensor for v in graph.inputs[7:]]
    of_fp8 = grouped_swiglu(*zip(given[::2], given[1::2]), *groups)
    product = linear(x, gate_up[0])
    graph.output(grouped_swiglu(x, gate_up, down, *groups), layer, of_fp8, product)
InferenceSession(devices=[Accelerator(0)], export_mefs=sys.argv[1]).load(graph)
print("compiled", flush=True)
os._exit(0)
"""
"""Compiles SwiGLU experts of rows, of tokens, and of rows in FP8. Virtual devices are
for a whole process."""


@slow
def test_ops_compile_for_hopper(tmp_path):
    """In a graph, whose GPU has another name than that of `mojo build`."""
    how = dict(PYTHONPATH=WHERE_WE_IMPORT)
    done = ran(sys.executable, "-c", OPS, tmp_path, **how)
    assert "compiled" in done.stdout, done.stderr[-2000:]
    (model,) = tmp_path.glob("*.mef")
    text = model.read_bytes()
    # Products of 1 and 2 tokens, and both products of experts.
    for file, n in ((b"hopper", 6), (b"few_rows", 2 + 2)):
        kernels = re.findall(rb"\.text\.(max_ep_experts_%s_\w+)" % file, text)
        assert len(set(kernels)) == n, set(kernels)


BF16, F32 = DType.bfloat16, DType.float32


F8 = DType.float8_e4m3fn


@refused("""
"grouped_matmul", [F32, F32], [2, 32, 64] | takes bfloat16
"grouped_matmul", [BF16, BF16], [2, 24, 64] | are [2, 24, 64]
"grouped_matmul", [BF16, BF16], [2, 32, 96] | are [2, 32, 96]
"grouped_gate_up", [F32, F32], [2, 32, 64] | takes bfloat16; grouped_matmul_ragged
"grouped_gate_up", [BF16, BF16], [2, 24, 64] | are [2, 24, 64]
"linear", [F32, F32], [32, 64] | linear takes; MAX's linear
"linear", [BF16, F32], [32, 64] | weights DType.float32
"linear", [BF16, BF16], [24, 64] | are [24, 64]
"linear", [BF16, BF16], [32, 128] | 64 columns; need 128
"grouped_matmul", [BF16, F8], [2, 256, 128], [2, 2, 1] | e4m3fn; given DType.bf
"grouped_matmul", [F8, F8], [2, 128, 128], [2, 1, 1] | n a multiple of 256
"grouped_matmul", [F8, F8], [2, 256, 256], [2, 2, 2] | given 128, [2, 256, 256]
"grouped_matmul", [F8, F8], [2, 256, 128], [2, 2, 2] | n / 128, k / 128
""")
def test_refusals(arguments, words):
    op, dtypes, weights, *scales = eval(arguments, globals())
    gpu = DeviceRef.GPU(0)
    types = [TensorType(dtypes[0], ["n_rows", 128 if scales else 64], gpu)]
    types += [TensorType(F32, [1, "n_rows"], gpu)] * len(scales)
    types += [TensorType(dtypes[1], weights, gpu)]
    types += [TensorType(F32, of_weights, gpu) for of_weights in scales]
    if op.startswith("grouped"):
        types += [TensorType(DType.uint32, [3], gpu), TensorType(DType.int32, [2], gpu)]

    def multiply(*given):
        if scales:
            given = given[:2], given[2:4], *given[4:]
        return getattr(experts, op)(*given)

    with raises((TypeError, ValueError), words):
        Graph("refused", multiply, types)


@refused("""
"sm_80", "cuda", BF16, "" | taken
"sm_90a", "cuda", F8, "" | taken
"gfx942", "hip", BF16, "" | gfx942; NVIDIA GPUs only; MAX's grouped_matmul_ragged
"sm_100a", "cuda", F8, "" | sm_100a; Hopper (sm_90) only
"cpu", "cpu", F8, "cpu" | no kernel for the CPU; max_ep.dequantize; float32
"cpu", "cpu", DType.uint8, "cpu" | rows are DType.uint8; bfloat16 and float32
"cpu", "cpu", DType.float64, "cpu" | rows are DType.float64
""")
def test_a_device_without_a_kernel_is_refused(monkeypatch, arguments, words):
    """When the graph is built, not by a compiler after minutes."""
    arch, api, dtype, place = eval(arguments, globals())
    monkeypatch.setattr(experts, "accelerator_api", lambda: api)
    monkeypatch.setattr(experts, "accelerator_architecture_name", lambda: arch)
    device = DeviceRef.CPU() if place else DeviceRef.GPU(0)
    sizes = [(dtype, [9, 128]), (dtype, [2, 256, 128])]
    if dtype == F8:  # MAX has no tensors of it on the CPU
        dtype = DType.uint8 if place else F8
        sizes = [(dtype, [9, 128]), (F32, [1, 9])]
        sizes += [(dtype, [2, 256, 128]), (F32, [2, 2, 1])]
    sizes += [(DType.uint32, [3]), (DType.int32, [2])]

    def multiply(*given):
        if len(given) == 6:
            given = given[:2], given[2:4], *given[4:]
        return experts.grouped_matmul(*given)

    types = [TensorType(of, shape, device) for of, shape in sizes]
    is_taken = words == "taken"
    with nullcontext() if is_taken else raises((TypeError, ValueError), words):
        Graph("refused", multiply, types)


def test_each_group_has_an_offset():
    sizes = (
        (F32, [9, 128]),
        (F32, [2, 256, 128]),
        (DType.uint32, [4]),
        (DType.int32, [2]),
    )
    types = [TensorType(dtype, shape, DeviceRef.CPU()) for dtype, shape in sizes]
    with pytest.raises(ValueError, match="have 4 elements and expert_ids 2"):
        Graph("refused", experts.grouped_matmul, types)


def test_rows_in_fp8_are_not_gathered():
    gpu = DeviceRef.GPU(0)
    sizes = (F8, [9, 128]), (F32, [1, 9]), (F8, [2, 256, 128]), (F32, [2, 2, 1])
    sizes += (DType.uint32, [3]), (DType.int32, [2]), (DType.int32, [9])
    types = [TensorType(dtype, shape, gpu) for dtype, shape in sizes]

    def gather(x, of_x, w, of_w, *groups):
        return experts.grouped_gate_up((x, of_x), (w, of_w), *groups)

    with pytest.raises(ValueError, match="gathers no rows in FP8"):
        Graph("refused", gather, types)
