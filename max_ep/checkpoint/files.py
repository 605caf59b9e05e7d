# SPDX-License-Identifier: Apache-2.0
"""Headers of a checkpoint's safetensors files, and its index; weights are not read.

A file is 8 bytes with the length of a header, the header in JSON, and the tensors'
bytes, without a hole. As in transformers, all tensors count of the files that the index
names, also those that it does not name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..plural import counted
from .rule import named, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPE_BYTES = {
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "U16": 2,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
"""Bytes of an element, by a header's name of a dtype."""

SKIPPED = "consolidated"
"""MAX skips files with this in their path, if there is another one."""

_MOST_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""

_ADAPTER = "adapter_config.json"
"""A file by which transformers, with peft, adds to the weights."""

_PIECE_BYTES = 1 << 24
"""What is read at once."""


@dataclass(frozen=True)
class Tensor:
    """One tensor, as a header describes it."""

    name: str
    dtype: str
    """A key of :data:`DTYPE_BYTES`."""
    shape: tuple[int, ...]
    file: Path
    begin: int = field(compare=False)
    """Its first byte in the file."""

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.file}: {named(self.name)}"


def read_tensors(folder: Path, files: Iterable[Path] = ()) -> dict[str, Tensor]:
    """Returns the tensors of a model's folder, by name.

    Those of the files that the index names; without one those of
    ``model.safetensors``, or else of all files. ``files`` replaces them, if not all of
    them are among these: MAX was given others.
    """
    if (folder / _ADAPTER).exists():
        raise ValueError(
            f"{folder} has {_ADAPTER}, and adapters are not served; merge the adapter "
            "into the weights, or remove it"
        )
    indexed, single = _index_of(folder), folder / SINGLE
    if indexed is not None and single.exists() and SINGLE not in indexed[1]:
        raise ValueError(
            f"{folder} has {SINGLE} and {INDEX}, which does not name it; remove one"
        )
    given = [Path(file) for file in files]
    if indexed is None:
        all_files = sorted(folder.glob("*.safetensors"))
        chosen = [single] if single.is_file() else all_files
    else:
        chosen = [folder / name for name in indexed[1]]
    if given and not {*chosen} <= {*given}:
        skipped = [x for x in chosen if SKIPPED in str(x) and x not in given]
        if skipped:
            raise ValueError(
                f"{skipped[0]}{and_others(skipped)}: MAX skips files with {SKIPPED!r} "
                "in their path, and was given others; pass --weight-path for each, or "
                "rename them"
            )
        indexed, chosen = None, given
    if not chosen:
        raise ValueError(
            f"{folder} has no *.safetensors; convert its weights to safetensors"
        )
    of_files = {file: _header_of(file) for file in chosen}
    for name, file in (indexed[0] if indexed else {}).items():
        if name not in of_files[folder / file]:
            raise ValueError(
                f"{folder / file} does not have {named(name)}, which {INDEX} says "
                "it has; download both again"
            )
    tensors: dict[str, Tensor] = {}
    for of_file in of_files.values():
        for name, tensor in of_file.items():
            other = tensors.setdefault(name, tensor)
            if other is not tensor and not are_equal(other, tensor):
                raise ValueError(
                    f"{tensor} has other values in {other.file.name}, which is read, "
                    "too; remove one"
                )
    return tensors


def _index_of(folder: Path) -> tuple[dict[str, str], list[str]] | None:
    """Returns which file has which tensor, and the files; None without an index."""
    path = folder / INDEX
    if not path.exists():
        return None
    index = _parsed(path, path.read_bytes())
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} has no weight_map with files of tensors")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(
                f"{path}: {named(name)} is in {shown(file)}, which is no name of a "
                "file beside it"
            )
    files = sorted(set(weight_map.values()))
    for file in files:
        if not (folder / file).is_file():
            names = [name for name, where in weight_map.items() if where == file]
            raise ValueError(
                f"{path} names {named(file)}, which is not there, for {named(names[0])}"
                f"{and_others(names)}; download it again"
            )
    return weight_map, files


def _header_of(file: Path) -> dict[str, Tensor]:
    """Reads a file's header, and compares it with the file's size."""
    n_there = file.stat().st_size
    with file.open("rb") as opened:
        n_header = int.from_bytes(opened.read(8), "little")
        if n_there < 8 or n_header > min(n_there - 8, _MOST_HEADER_BYTES):
            raise ValueError(
                f"{file} is no safetensors file or is cut: its header has {n_header} "
                f"bytes, the file {n_there}; download it again"
            )
        text = opened.read(n_header)
    header = _parsed(file, text)
    notes = header.pop("__metadata__", {})
    are_texts = isinstance(notes, dict) and all(
        isinstance(note, str) for note in notes.values()
    )
    if not text.startswith(b"{") or not are_texts:
        raise ValueError(
            f"{file} is no safetensors file: its header must begin with {{, and its "
            "__metadata__ be an object of texts; save it again"
        )
    spans, tensors = [], {}
    for name, entry in header.items():
        tensor, span = _entry_of(file, name, entry, 8 + n_header)
        tensors[name] = tensor
        spans.append((*span, name))
    end = 0
    for begin, behind, name in sorted(spans):
        if begin != end:
            raise ValueError(
                f"{file}: {named(name)} begins at byte {begin} of the data, and the "
                f"tensor before ends at {end}; download it again"
            )
        end = behind
    n_wanted = 8 + n_header + end
    if n_wanted != n_there:
        is_what = "is cut" if n_there < n_wanted else "is too long"
        raise ValueError(
            f"{file} {is_what}: its header wants {n_wanted} bytes, and there are "
            f"{n_there}; download it again"
        )
    return tensors


def _entry_of(
    file: Path, name: str, entry: Any, data: int
) -> tuple[Tensor, tuple[int, int]]:
    """Returns a tensor of a header, and where its bytes begin and end behind ``data``,
    the header's bytes."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape = fields.get("dtype"), fields.get("shape")
    span = fields.get("data_offsets")
    for what, value in (("shape", shape), ("data_offsets", span)):
        if not isinstance(value, list) or not all(_is_size(x) for x in value):
            raise ValueError(
                f"{file}: {named(name)} has {what} {shown(value)}; it must be a list "
                "of integers"
            )
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(
            f"{file}: {named(name)} has dtype {shown(dtype)}, which is not supported"
        )
    begin = data + span[0] if span else data
    tensor = Tensor(name, dtype, tuple(shape), file, begin)
    if len(span) != 2 or span[1] - span[0] != tensor.n_bytes:
        raise ValueError(
            f"{file}: {named(name)} has data_offsets {shown(span)}, and {dtype} of "
            f"shape {shape} has {tensor.n_bytes} bytes; download it again"
        )
    return tensor, (span[0], span[1])


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same dtype, shape and bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        for done in range(0, one.n_bytes, _PIECE_BYTES):
            n = min(_PIECE_BYTES, one.n_bytes - done)
            if first.read(n) != second.read(n):
                return False
    return True


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    """Parses a JSON object, in which no name stands twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) < len(pairs):
            seen: set[str] = set()
            twice = next(n for n, _ in pairs if n in seen or seen.add(n))
            raise ValueError(f"{shown(twice)} stands twice in it")
        return names

    try:
        parsed = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} cannot be read: it holds no names")
    return parsed


def and_others(names: list[Any]) -> str:
    """Says of how many more than the first an error is."""
    n = len(names) - 1
    return f" and {counted(n, 'other')}" if n else ""
