# SPDX-License-Identifier: Apache-2.0
"""`max-ep serve`: what it finds, chooses and refuses. `test_serve.py` runs it."""

import json
import math
import os
import re
import struct
import sys
from pathlib import Path

import huggingface_hub
import pytest

from max_ep import cli
from max_ep.checkpoint import (
    ARCHITECTURES,
    PLACES,
    check_config,
    loaded_bytes,
)
from max_ep.checkpoint.files import DTYPE_BYTES, INDEX
from max_ep.checkpoint.tensors import needed_tensors
from max_ep.cli.serve import gpus_of_machine
from tests.children import ROOT, ran
from tests.serve.serving_configs import PUBLISHED

# It has 1.2 GB of experts and 1.2 GB of other weights, in bfloat16.
QWEN = PUBLISHED["Qwen3-30B-A3B"] | {
    "num_hidden_layers": 1,
    "vocab_size": 140000,
    "quantization_config": None,
}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FP8_QWEN = QWEN | {"quantization_config": BLOCKS}
H100 = "NVIDIA H100 80GB HBM3, 81559, 9.0"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function that gives this machine other GPUs."""

    def have(*gpus: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\ncat <<END\n" + "\n".join(gpus) + "\nEND\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def started(*_: object) -> None:
        raise AssertionError("a server would have been started")

    monkeypatch.setattr(os, "execv", started)  # which does not return
    have()
    return have


def test_hidden_gpus_are_not_counted(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    cases = f"*--id=7) exit 6;; *--id=*) echo {H100};; *) echo {H100}; echo {H100};;"
    program.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert len(gpus_of_machine()) == 2
    for visible, n in {"": 0, "-1": 0, "1": 1}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(gpus_of_machine()) == n
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ValueError, match="finds no CUDA_VISIBLE_DEVICES='7'"):
        gpus_of_machine()


def checkpoint(folder: Path, config: dict, dtype: str = "BF16") -> str:
    """Writes a checkpoint of these sizes, all bytes of it a hole."""
    folder = folder / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    try:
        needed = needed_tensors(check_config(config))
    except ValueError:
        needed = {}
    header, end = {}, 0

    def add(name: str, dtype: str, shape: tuple[int, ...]) -> None:
        nonlocal end
        begin, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = dict(dtype=dtype, shape=shape, data_offsets=[begin, end])

    block = (config.get("quantization_config") or {}).get("weight_block_size")
    for name, tensor in needed.items():
        is_fp8 = tensor.is_matrix and block
        add(name, "F8_E4M3" if is_fp8 else dtype, tensor.shape)
        if is_fp8:
            scales = tuple(-(-n // b) for n, b in zip(tensor.shape, block))
            add(f"{name}_scale_inv", "F32", scales)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return str(folder)


def flags_in(said: str, model: str) -> str:
    """Returns the command of a dry run, without what all have in common."""
    (line,) = [x for x in said.splitlines() if "command" in x]
    _, _, rest = line.partition("max serve --model-path ")
    named, _, flags = rest.partition(" --custom-architectures max_ep.serve ")
    assert named == model
    return flags


@pytest.mark.parametrize(
    "gpus, words, flags",
    [
        ((), (), "--devices cpu --quantization-encoding float32 --ep-size 4"),
        ((), ("--ranks", "8", "--port", "1"), "--devices cpu --quantization-encoding "
         "float32 --ep-size 8 --port 1"),
        ([H100], (), "--devices gpu:0 --quantization-encoding bfloat16 "
         "--device-graph-capture"),
        ([H100] * 2, (), "--devices gpu:0,1 --quantization-encoding bfloat16 "
         "--data-parallel-degree 2 --ep-size 2 --device-graph-capture"),
        ([H100] * 2, ("--gpus", "1"), "--devices gpu:0 --quantization-encoding "
         "bfloat16 --device-graph-capture"),
        ([H100], ("--gpus", "0"), "--devices cpu --quantization-encoding float32 "
         "--ep-size 4"),
    ],
)  # fmt: skip
def test_flags(gpus, words, flags, machine, tmp_path, run_cli):
    machine(*gpus)
    model = checkpoint(tmp_path, QWEN)
    assert flags_in(run_cli("serve", model, "--dry-run", *words), model) == flags


def test_paths_that_max_does_not_read(machine, tmp_path, run_cli):
    """It finds no weights behind a slash, and takes brackets for a pattern."""
    machine()
    model = checkpoint(tmp_path, QWEN)
    flags = "--devices cpu --quantization-encoding float32 --ep-size 4"
    assert flags_in(run_cli("serve", f"{model}//", "--dry-run"), model) == flags
    (tmp_path / "a[1]").mkdir()
    model = checkpoint(tmp_path / "a[1]", QWEN)
    said = run_cli("serve", model, "--dry-run", status=1)
    assert r"a[1]/model: MAX finds no files in a folder with * ? [ in its path" in said


@pytest.mark.parametrize(
    "more", [{}, {"rotary_dim": 128}, {"partial_rotary_factor": 0.5}]
)
def test_what_transformers_ignores_is_said(more, machine, tmp_path, run_cli):
    """Half of each head of MiniMax-M2 is rotated, in transformers 5.12 all of it."""
    sizes = {"num_hidden_layers": 1, "vocab_size": 16, "num_local_experts": 8}
    minimax = PUBLISHED["MiniMax-M2"] | sizes | {"quantization_config": None}
    model = checkpoint(tmp_path, minimax | more)
    said = run_cli("serve", model, "--dry-run", "--gpus", 0)
    assert ("note       rotary_dim=64 counts" in said) == (not more)


def test_fp8_experts_of_one_gpu_stay_as_small(machine, tmp_path, run_cli):
    """In bfloat16 they would not fit: see the refusals below."""
    machine("NVIDIA H100, 1900, 9.0")
    model = checkpoint(tmp_path, FP8_QWEN)
    assert "--devices gpu:0" in run_cli("serve", model, "--dry-run")


@pytest.mark.parametrize(
    "name, fits", [("DeepSeek-V3", True), ("DeepSeek-V3 without blocks", False)]
)
def test_what_eight_gpus_hold_is_said_of_config_and_index(
    name, fits, machine, tmp_path, run_cli
):
    """Before 689 GB are downloaded: experts in FP8, an eighth of them on each."""
    machine(*["NVIDIA H200, 143771, 9.0"] * 8)
    config = PUBLISHED["DeepSeek-V3"]
    if not fits:
        config = config | {"quantization_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = {"metadata": {"total_size": 688586727753}, "weight_map": {"a": "b"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    said = run_cli("serve", tmp_path, "--dry-run", status=0 if fits else 1)
    if not fits:
        assert "197.7 GB of weights on each GPU do not fit into its 150.8 GB" in said
        return
    assert "files      none yet" in said
    assert "DeepseekV3ForCausalLM, 688.6 GB of weights" in said
    assert "experts    256, 32 on each of 8 ranks" in said
    (line,) = [x for x in said.splitlines() if x.startswith("memory")]
    numbers = [float(x) for x in re.findall(r"([\d.]+) GB", line)]
    total, in_fp8, wide, left = numbers
    assert total == pytest.approx(in_fp8 + wide, abs=0.11)
    assert total + left == pytest.approx(150.8, abs=0.11)
    # 58 layers of 32 experts and the shared one, 3 x 7168 x 2048 each.
    assert in_fp8 == pytest.approx(58 * 33 * 3 * 7168 * 2048 / 1e9, abs=0.06)
    assert "--ep-size 8" in said
    # Without --dry-run files must be there.
    assert "which is not there" in run_cli("serve", tmp_path, status=1)
    machine()  # The same weights are said where there are no GPUs.
    said = run_cli("serve", tmp_path, "--dry-run", "--gpus", "8")
    assert "machine    8 GPUs that are not here" in said and "--ep-size 8" in said
    (line,) = [x for x in said.splitlines() if x.startswith("memory")]
    assert [float(x) for x in re.findall(r"([\d.]+) GB", line)] == numbers[:3]


def test_one_gpu_that_is_not_here(machine, tmp_path, run_cli):
    machine()
    said = run_cli("serve", checkpoint(tmp_path, QWEN), "--dry-run", "--gpus", "1")
    assert "machine    1 GPU that is not here" in said
    assert re.search(r"experts    (\d+), \1 on 1 rank$", said, re.M)


def test_float32_is_halved_on_gpus(machine, tmp_path, run_cli):
    machine("NVIDIA H100, 2400, 9.0")
    said = run_cli("serve", checkpoint(tmp_path, QWEN, "F32"), "--dry-run")
    assert "4.8 GB of weights" in said and "--devices gpu:0" in said


def test_files_of_a_checkpoint_in_float16_are_named(machine, tmp_path, run_cli):
    """MAX finds none by itself that have no dtype that it serves."""
    model = checkpoint(tmp_path, QWEN, "F16")
    flags = flags_in(run_cli("serve", model, "--dry-run"), model)
    assert flags.endswith(f"--ep-size 4 --weight-path {model}/model.safetensors")
    said = run_cli("serve", model, "--dry-run", "--weight-path", "x")
    assert flags_in(said, model).endswith("--ep-size 4 --weight-path x")


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_published_model_has_a_command(name, machine, tmp_path, run_cli):
    """Fails if the command reads a field that not all architectures have."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    (tmp_path / INDEX).write_text("{}")
    said = run_cli("serve", tmp_path, "--gpus", 1, "--dry-run")
    assert "--custom-architectures max_ep.serve --devices gpu:0" in said


def test_files_that_max_skips_are_named(machine, tmp_path, run_cli):
    """It takes those with this word, or in a folder with it, for copies of others."""
    for folder, name in (("plain", "consolidated-1"), ("consolidated", "1")):
        (tmp_path / folder).mkdir()
        model = checkpoint(tmp_path / folder, QWEN)
        file = Path(model) / f"{name}.safetensors"
        (Path(model) / "model.safetensors").rename(file)
        flags = flags_in(run_cli("serve", model, "--dry-run"), model)
        assert flags.endswith(f"--ep-size 4 --weight-path {file}")


def test_fewer_ranks_where_experts_are_odd(machine, tmp_path, run_cli):
    model = checkpoint(tmp_path, dict(QWEN, num_experts=9))
    said = run_cli("serve", model, "--dry-run")
    assert flags_in(said, model).endswith("--ep-size 3")


@pytest.mark.parametrize(
    "gpus, config, words, text",
    [
        ((), {"architectures": ["LlamaForCausalLM"]}, (),
         "'LlamaForCausalLM' is not supported; there are Qwen3MoeForCausalLM, "),
        ((), {}, (), "'no architecture' is not supported"),
        ((), QWEN | {"quantization_config": {"quant_method": "fp8"}}, (),
         "Qwen3MoeForCausalLM in 'fp8' without weight_block_size is not supported; "
         "take a checkpoint in bfloat16"),
        ((), QWEN | {"hidden_size": 2046}, (),
         "hidden_size=2046 is not served; served are multiples of 4"),
        ([H100], QWEN | {"hidden_size": 2044}, (),
         "hidden_size=2044 is not served; served are multiples of 8"),
        ((), QWEN | {"use_sliding_window": True}, (),
         "use_sliding_window=True is not served"),
        # With other sizes of experts or blocks in bfloat16.
        (["NVIDIA H100, 1300, 9.0"] * 2, FP8_QWEN, (),
         "1.5 GB of weights on each GPU do not fit into its 1.4 GB"),
        (["NVIDIA H100, 1700, 9.0"], FP8_QWEN, (),
         "1.8 GB of weights on each GPU do not fit into its 1.8 GB"),
        (["NVIDIA H100, 1900, 9.0"], FP8_QWEN | {"moe_intermediate_size": 704}, (),
         "2.3 GB of weights on each GPU do not fit into its 2.0 GB"),
        (["NVIDIA H100, 1900, 9.0"],
         FP8_QWEN | {"quantization_config": BLOCKS | {"weight_block_size": [64, 64]}},
         (), "2.4 GB of weights on each GPU do not fit into its 2.0 GB"),
        ((), PUBLISHED["DeepSeek-V3"], (), "is not served on the CPU, but on one"),
        (["NVIDIA A100, 81559, 8.0"], QWEN, (),
         "need an H100 or H200, this GPU is NVIDIA A100"),
        (["NVIDIA H100, 2200, 9.0"], QWEN, (),
         "2.4 GB of weights on each GPU do not fit into its 2.3 GB"),
        # Each GPU has all but the 1.2 GB of the experts.
        (["NVIDIA H100, 1700, 9.0"] * 2, QWEN, (),
         "1.8 GB of weights on each GPU do not fit into its 1.8 GB"),
        ([H100], QWEN, ("--gpus", "2"), "--gpus 2: this machine has 1; give no more"),
        ((), QWEN, ("--ranks", "3"), "--ranks 3 does not divide 128 experts"),
        ((), QWEN, ("--ranks", "0"), "--ranks 0 does not divide 128 experts"),
    ],
)  # fmt: skip
def test_refusals(gpus, config, words, text, machine, tmp_path, run_cli):
    machine(*gpus)
    model = checkpoint(tmp_path, config)
    assert text in run_cli("serve", model, *words, status=1)


def test_a_file_that_is_cut_is_refused(machine, tmp_path, run_cli):
    """What else is refused of a checkpoint, `test_serve_checkpoint.py` has."""
    model = checkpoint(tmp_path, QWEN)
    file = Path(model) / "model.safetensors"
    n = file.stat().st_size
    with file.open("rb+") as opened:
        opened.truncate(n - 500)
    said = run_cli("serve", model, "--dry-run", status=1)
    assert f"model.safetensors is cut: its header wants {n} bytes, and" in said
    assert f"there are {n - 500}; download it again" in said


def test_what_is_no_model_is_refused(machine, tmp_path, monkeypatch, run_cli):
    assert "has no config.json" in run_cli("serve", tmp_path, status=1)
    for text, said in (("{", "config.json is not JSON: "), ("[]", "holds no names")):
        (tmp_path / "config.json").write_text(text)
        assert said in run_cli("serve", tmp_path, "--dry-run", status=1)
    said = run_cli("serve", tmp_path / "config.json", status=1)
    assert "config.json is a file; name the folder it is in" in said
    said = run_cli("serve", tmp_path / "none", status=1)
    assert f"there is no folder {tmp_path / 'none'}, and the" in said
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "hub cannot be reached" in run_cli("serve", "nobody/nothing", status=1)


def test_a_folder_without_a_tokenizer_is_refused(
    machine, tmp_path, monkeypatch, run_cli
):
    """MAX ends with a traceback, after a minute. A dry run needs none."""
    model = checkpoint(tmp_path, QWEN)
    run_cli("serve", model, "--dry-run")
    said = run_cli("serve", model, status=1)
    assert f"{model} has no tokenizer; copy tokenizer.json and" in said
    monkeypatch.setattr(os, "execv", lambda program, command: print("started"))
    (Path(model) / "tokenizer.json").write_text("{}")
    assert run_cli("serve", model).endswith("started\n")


@pytest.mark.parametrize(
    "text, words", [("{", "is not JSON"), ("[]", "holds no names")]
)
def test_a_tokenizer_that_cannot_be_read_is_refused(
    text, words, machine, tmp_path, run_cli
):
    """MAX ends with a traceback, after a minute."""
    model = checkpoint(tmp_path, QWEN)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = Path(model) / name
        path.write_text(text)
        assert f"{name} {words}" in run_cli("serve", model, "--dry-run", status=1)
        path.unlink()


def test_a_tokenizer_without_thoughts(machine, tmp_path, run_cli):
    """MAX's server of a MiniMax-M2 ended with a traceback; others have no thoughts."""
    flag = " --reasoning-parser none"
    minimax = PUBLISHED["MiniMax-M2"] | dict(num_hidden_layers=1, attn_type_list=[1])
    del minimax["quantization_config"]
    for config, has_flag in ((minimax, True), (QWEN, False)):
        (folder := tmp_path / str(has_flag)).mkdir()
        model = checkpoint(folder, config)
        tokenizer = Path(model) / "tokenizer.json"
        assert flag not in run_cli("serve", model, "--dry-run")  # there is none
        tokenizer.write_text('{"model": {"vocab": {"think": 0}}}')
        said = run_cli("serve", model, "--dry-run")
        assert (flag in said) == ("has no <think>" in said) == has_flag
        by_hand = run_cli("serve", model, "--dry-run", "--reasoning-parser", "x")
        assert flag not in by_hand
        tokenizer.write_text('{"added_tokens": [{"content": "<think>"}]}')
        assert flag not in run_cli("serve", model, "--dry-run")


@pytest.mark.parametrize(
    "kind, words",
    [
        ("GatedRepoError", "nobody/x is gated on the Hugging Face hub; accept"),
        ("RepositoryNotFoundError", "hub has no such model, or a private one; corr"),
        ("RemoteEntryNotFoundError", "nobody/x on the Hugging Face hub has no conf"),
        ("HfHubHTTPError", "hub does not give it: HfHubHTTPError"),
    ],
)
def test_why_the_hub_does_not_give_a_model(kind, words, machine, monkeypatch, run_cli):
    """Fails if the first line of its error is shown, which is only a number."""

    def refuse(*_: object) -> None:
        of = getattr(huggingface_hub.errors, kind)
        raise of.__new__(of)  # made of an answer of the hub

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    assert words in run_cli("serve", "nobody/x", status=1)


def test_what_is_supported_is_said_once():
    """The documents' table, the command's, and what MAX registers."""
    from max_ep import serve

    assert {a.name for a in serve.ARCHITECTURES} == set(ARCHITECTURES)
    page = (ROOT / "docs/serving.md").read_text()
    cell = r" ((?:yes|no)(?:, not tried)?) \|"
    rows = re.findall(rf"^\| (\S+) \|{cell * 3}", page, re.M)
    said = {name.replace("-", "").lower(): tuple(cells) for name, *cells in rows}

    def cell_of(entry, place: str) -> str:
        if place not in entry.places:
            return "no"
        return "yes" if place in entry.compared else "yes, not tried"

    assert said == {
        re.sub(r"For\w+$", "", name).lower(): tuple(
            cell_of(entry, place) for place in PLACES
        )
        for name, entry in ARCHITECTURES.items()
    }


def test_what_models_need_is_computed():
    """The table of commands: from each published `config.json`."""
    page = (ROOT / "docs/serving.md").read_text()
    rows = re.findall(
        r"^\| (\S+) \| (\d) × H[12]00: ([\d.]+) GB \| "
        r"`max-ep serve \S+/(\S+) --gpus (\d)",
        page,
        re.M,
    )
    assert len(rows) == 10
    for name, n, gigabytes, repository, gpus in rows:
        assert name == repository and n == gpus
        n_bytes = sum(loaded_bytes(check_config(PUBLISHED[name]), int(n)))
        assert f"{n_bytes / 1e9:.1f}" == gigabytes, name


def test_no_max_is_loaded():
    program = "import sys, max_ep.cli.serve; sys.exit('max' in sys.modules)"
    assert ran(sys.executable, "-c", program).returncode == 0


def test_other_commands_take_no_other_flags(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--port", "1"])
    assert "unrecognized arguments: --port 1" in capsys.readouterr().err
