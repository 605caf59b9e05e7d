# SPDX-License-Identifier: Apache-2.0
"""``max-ep serve MODEL``: checks machine and model, and starts ``max serve``.

It loads no MAX, so it refuses an unsupported model at once.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import (
    ARCHITECTURES,
    GENERATION_FILE,
    Tensor,
    check_config,
    check_generation,
    check_place,
    check_tensors,
    config_in,
    described,
    has_penalties,
    json_in,
    kept_in_fp8,
    loaded_bytes,
    read_tensors,
    what_transformers_ignores,
    what_was_not_compared,
    why_not_balanced,
)
from ..checkpoint.files import INDEX, SKIPPED
from ..limits import BALANCE_VARIABLE, TOKEN_ALIGN_BYTES
from ..plural import counted

CUSTOM_ARCHITECTURES = ("--custom-architectures", "max_ep.serve")
"""The flag that makes MAX serve with max_ep."""

CAPTURED_DECODE = "--device-graph-capture"
"""The flag that makes MAX decode through captured graphs."""

PENALTIES = "--enable-penalties"
"""The flag that makes MAX's sampler one that counts tokens."""

IN_TURN = "--disable-overlap"
"""The flag that makes MAX wait for a token before the next step: its penalties do not
count the last one otherwise."""

THOUGHTS = "--reasoning-parser"
"""The flag that says in which format answers have thoughts."""

THOUGHT = "<think>"
"""The token that begins one."""

_CPU_RANKS = 4

_BALANCE_S = "60"
"""Its value with ``--balance``."""


@dataclass(frozen=True)
class Gpu:
    name: str
    n_bytes: int
    is_hopper: bool


def run_serve(options: Any) -> None:
    """Prints what was found and the command; runs it in this process's place."""
    gpus = gpus_of_machine()
    n_gpus = len(gpus) if options.gpus is None else options.gpus
    if n_gpus < 0 or n_gpus > len(gpus) and not options.dry_run:
        has = f"this machine has {len(gpus)}"
        raise ValueError(f"--gpus {n_gpus}: {has}; give no more, or 0 for its CPU")
    if n_gpus > len(gpus):  # Their memory is not known.
        gpus = []
    # MAX finds no weights behind a slash at the end.
    model = options.model.rstrip("/") or "/"
    config, generation, tensors, n_bytes = checkpoint_of(model, n_gpus, options.dry_run)
    _check_files_of_tokenizer(Path(model))
    _check_supported(config, gpus[:n_gpus])
    _check_token(config["hidden_size"], n_gpus)
    n_experts = described(config).moe.n_experts
    n_ranks = n_gpus or options.ranks
    if n_ranks is None:
        # The most that have the same number of experts.
        n_ranks = max(n for n in range(1, _CPU_RANKS + 1) if n_experts % n == 0)
    if n_ranks < 1 or n_experts % n_ranks:
        name = "--gpus" if n_gpus else "--ranks"
        raise ValueError(
            f"{name} {n_ranks} does not divide {counted(n_experts, 'expert')}"
        )
    where = "the CPU"
    if n_gpus:
        are = "is" if n_gpus == 1 else "are"
        where = (
            f"{n_gpus} of {len(gpus)} x {gpus[0].name}"
            if gpus
            else f"{counted(n_gpus, 'GPU')} that {are} not here"
        )
    size = _gigabytes(n_bytes) if n_bytes else "unknown size"
    print(f"machine    {where}")
    print(f"model      {config['architectures'][0]}, {size} of weights")
    ranks = "1 rank" if n_ranks == 1 else f"each of {counted(n_ranks, 'rank')}"
    print(f"experts    {n_experts}, {n_experts // n_ranks} on {ranks}")
    if n_gpus:
        print(f"memory     {_memory(config, n_gpus, gpus[:n_gpus])}")
    not_compared = what_was_not_compared(config["architectures"][0], n_gpus)
    for note in (not_compared, what_transformers_ignores(config)):
        if note:
            print(f"note       {note}")
    chosen = [*CUSTOM_ARCHITECTURES, *device_flags(n_gpus, n_ranks)]
    if n_gpus and CAPTURED_DECODE not in options.flags:
        chosen.append(CAPTURED_DECODE)
    are_counted = has_penalties(generation) or PENALTIES in options.flags
    if n_gpus and are_counted and IN_TURN not in options.flags:
        chosen.append(IN_TURN)
    chosen += _weight_paths(options.flags, tensors)
    if _lacks_thoughts(config, Path(model)) and THOUGHTS not in options.flags:
        print(f"note       the tokenizer has no {THOUGHT}, so answers have no thoughts")
        chosen += [THOUGHTS, "none"]
    command = ["max", "serve", "--model-path", model, *chosen, *options.flags]
    environment = _environment(options.balance, config, n_ranks)
    set_before = "".join(f"{name}={text} " for name, text in environment.items())
    print(f"command    {set_before}{shlex.join(command)}", flush=True)
    if options.dry_run:
        return
    _check_tokenizer(Path(model))
    beside = Path(sys.executable).with_name("max")
    program = str(beside) if beside.exists() else shutil.which("max")
    if not program:
        raise ValueError("there is no `max`; uv pip install 'max[serve]==26.7.*'")
    print("MAX compiles the model, the first time for minutes, then loads it.")
    sys.stdout.flush()
    os.environ.update(environment)
    os.execv(program, command)


def _environment(
    is_balanced: bool, config: dict[str, Any], n_ranks: int
) -> dict[str, str]:
    """Returns the variables that ``--balance`` sets."""
    if not is_balanced:
        return {}
    if why := why_not_balanced(config, n_ranks):
        raise ValueError(f"--balance: {why}; leave it out")
    return {BALANCE_VARIABLE: os.environ.get(BALANCE_VARIABLE) or _BALANCE_S}


def device_flags(n_gpus: int, n_ranks: int) -> list[str]:
    """Returns the flags of ``max serve`` for so many GPUs; 0: for ranks on the CPU."""
    if n_gpus == 0:
        flags = ["--devices", "cpu", "--quantization-encoding", "float32"]
        return [*flags, "--ep-size", str(n_ranks)]
    devices = "gpu:" + ",".join(str(i) for i in range(n_gpus))
    flags = ["--devices", devices, "--quantization-encoding", "bfloat16"]
    if n_gpus > 1:
        flags += ["--data-parallel-degree", str(n_gpus), "--ep-size", str(n_gpus)]
    return flags


def gpus_of_machine() -> list[Gpu]:
    """Asks ``nvidia-smi`` for the visible ones; without it there are no GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return []
    asked = "--query-gpu=name,memory.total,compute_cap"
    command = ["nvidia-smi", asked, "--format=csv,noheader,nounits"]
    if visible:
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return []
    if visible and done.returncode != 0:
        raise ValueError(
            f"nvidia-smi finds no CUDA_VISIBLE_DEVICES={visible!r}; list GPUs by "
            "number or by whole UUID"
        )
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    return [
        Gpu(name, int(mebibytes) << 20, capability.startswith("9."))
        for name, mebibytes, capability in (row for row in rows if len(row) == 3)
    ]


def checkpoint_of(
    model: str, n_gpus: int, is_dry_run: bool = False
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor], int]:
    """Returns ``config.json``, ``generation_config.json``, the tensors, and the bytes
    of the weights.

    All are checked, of a folder; for a dry run its files may be missing, but for
    ``config.json`` and the index. Of a repository of the Hugging Face hub tensors are
    not known, and the bytes are 0 without an index; the server checks them when it has
    them.
    """
    folder = Path(model)
    if folder.is_dir():
        if any(sign in model for sign in "*?["):
            has = "MAX finds no files in a folder with * ? [ in its path"
            raise ValueError(f"{model}: {has}; rename it")
        config = check_config(config_in(folder))
        generation = check_generation(folder)
        check_place(config["architectures"][0], n_gpus)
        if is_dry_run and (folder / INDEX).is_file():
            if not any(folder.glob("*.safetensors")):
                print(f"files      none yet: {folder} has config.json and the index")
                return config, generation, {}, _bytes_of_index(folder / INDEX)
        tensors = read_tensors(folder)
        check_tensors(config, tensors, kept_in_fp8(described(config), n_gpus))
        n_bytes = sum(tensor.n_bytes for tensor in tensors.values())
        return config, generation, tensors, n_bytes
    if folder.exists():
        raise ValueError(f"{model} is a file; name the folder it is in")
    try:
        from huggingface_hub import errors, hf_hub_download

        files = Path(hf_hub_download(model, "config.json")).parent
        n_bytes = 0
        with suppress(errors.EntryNotFoundError):
            n_bytes = _bytes_of_index(Path(hf_hub_download(model, INDEX)))
        with suppress(errors.EntryNotFoundError):
            hf_hub_download(model, GENERATION_FILE)
    except Exception as error:
        raise ValueError(_why_not_there(model, error)) from error
    config = check_config(config_in(files))
    check_place(config["architectures"][0], n_gpus)
    return config, check_generation(files), {}, n_bytes


def _why_not_there(model: str, error: Exception) -> str:
    """Says why a model cannot be had, in one sentence."""
    try:
        from huggingface_hub import errors
    except ImportError:
        return f"{model} is no folder, and huggingface_hub is not installed"
    hub, none = "the Hugging Face hub", f"there is no folder {model}, and"
    kinds = (
        (errors.HFValidationError, f"{none} {hub} has no such names"),
        (
            errors.GatedRepoError,
            f"{model} is gated on {hub}; accept its terms there, then `hf auth login`",
        ),
        (
            errors.RepositoryNotFoundError,
            f"{none} {hub} has no such model, or a private one; correct the name, or "
            "`hf auth login`",
        ),
        (
            errors.LocalEntryNotFoundError,
            f"{none} {hub} cannot be reached, from which it was not downloaded yet",
        ),
        (
            errors.EntryNotFoundError,
            f"{model} on {hub} has no config.json; name a model for transformers",
        ),
    )
    for kind, why in kinds:
        if isinstance(error, kind):
            return why
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"{none} {hub} does not give it: {reason}"


def _bytes_of_index(path: Path) -> int:
    """Returns the bytes of all weights, or 0 where the index does not say."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        return int(index["metadata"]["total_size"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0


def _weight_paths(flags: Sequence[str], tensors: dict[str, Tensor]) -> list[str]:
    """Returns flags that name the files of a checkpoint, where MAX finds none by itself
    or not all: if they are in no dtype that it serves, or of a path that it skips."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    files = sorted({str(tensor.file.absolute()) for tensor in tensors.values()})
    is_float16 = "F16" in dtypes and not {"F32", "BF16"} & dtypes
    are_skipped = any(SKIPPED in file for file in files)
    if "--weight-path" in flags or not (is_float16 or are_skipped):
        return []
    return [word for file in files for word in ("--weight-path", file)]


def _check_tokenizer(folder: Path) -> None:
    """Refuses a folder without a tokenizer, which MAX would miss late."""
    kinds = ("*token*", "vocab*", "*.model")
    if folder.is_dir() and not any(any(folder.glob(kind)) for kind in kinds):
        raise ValueError(
            f"{folder} has no tokenizer; copy tokenizer.json and tokenizer_config.json "
            "of the model into it"
        )


def _check_files_of_tokenizer(folder: Path) -> None:
    """Refuses files that cannot be read; MAX's error would not name them."""
    for name in _OF_TOKENIZERS:
        path = folder / name
        if path.is_file() and not isinstance(json_in(path), dict):
            raise ValueError(f"{path} holds no names; download it again")


_OF_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def _lacks_thoughts(config: dict[str, Any], folder: Path) -> bool:
    """Returns whether MAX would look for a token of thoughts that a tokenizer lacks."""
    paths = [folder / name for name in _OF_TOKENIZERS]
    texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
    thinks = ARCHITECTURES[config["architectures"][0]].parser is not None
    return thinks and bool(texts) and not any(f'"{THOUGHT}"' in text for text in texts)


def _check_token(hidden_size: int, n_gpus: int) -> None:
    """Refuses tokens that dispatch cannot copy."""
    multiple = TOKEN_ALIGN_BYTES // (2 if n_gpus else 4)
    if hidden_size % multiple:
        raise ValueError(
            f"config.json: hidden_size={hidden_size} is not served; served are "
            f"multiples of {multiple}"
        )


def _check_supported(config: dict[str, Any], gpus: Sequence[Gpu]) -> None:
    """Refuses GPUs that cannot serve the model, in one sentence."""
    for gpu in gpus:
        if not gpu.is_hopper:
            what = "the matmuls need an H100 or H200"
            raise ValueError(f"{what}, this GPU is {gpu.name}")
    if not gpus:
        return
    each, least = sum(loaded_bytes(config, len(gpus))), min(x.n_bytes for x in gpus)
    if each > least:
        raise ValueError(
            f"{_gigabytes(each)} of weights on each GPU do not fit into its "
            f"{_gigabytes(least)}; serve on more GPUs"
        )


def _memory(config: dict[str, Any], n_gpus: int, gpus: Sequence[Gpu]) -> str:
    """Says what weights take of a GPU's memory, and what they leave of one that is
    there."""
    in_fp8, wide = loaded_bytes(config, n_gpus)
    kinds = f"{_gigabytes(wide)} in bfloat16"
    if in_fp8:
        kinds = f"{_gigabytes(in_fp8)} of experts in FP8, {kinds}"
    each = f"{_gigabytes(in_fp8 + wide)} of weights on each GPU ({kinds})"
    if not gpus:
        return each
    least = min(gpu.n_bytes for gpu in gpus)
    return f"{each}, {_gigabytes(least - in_fp8 - wide)} left"


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB"
