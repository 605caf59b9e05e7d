# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint: which are read, and what is refused of one."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from graphs.serve.checkpoint import make_checkpoint
from max_ep.checkpoint import check_config, check_tensors, config_in, read_tensors
from max_ep.checkpoint.files import INDEX, SINGLE

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def check(folder: Path) -> dict[str, Any]:
    return check_tensors(check_config(config_in(folder)), read_tensors(folder))


@pytest.fixture
def shards(tmp_path) -> Path:
    """A checkpoint in three files, with an index."""
    make_checkpoint(tmp_path / "made")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    shutil.copytree(tmp_path / "made", tmp_path, dirs_exist_ok=True)
    (tmp_path / SINGLE).unlink()
    model.save_pretrained(tmp_path, max_shard_size="400KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def rewrite(header: dict[str, Any]) -> Callable[[Path], None]:
    text = json.dumps(header).encode()
    return lambda folder: files_of(folder)[1].write_bytes(with_header(text, bytes(8)))


def cut(folder: Path) -> None:
    file = files_of(folder)[1]
    file.write_bytes(file.read_bytes()[:-500])


def lengthen(folder: Path) -> None:
    file = files_of(folder)[1]
    file.write_bytes(file.read_bytes() + bytes(3))


def change_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps(change(index)))

    return apply


def renamed(index: dict[str, Any], file: Any) -> dict[str, Any]:
    return index | {"weight_map": index["weight_map"] | {Q_PROJ: file}}


def one_of_each_file(index: dict[str, Any]) -> dict[str, Any]:
    of_files = {file: name for name, file in index["weight_map"].items()}
    return index | {"weight_map": {name: file for file, name in of_files.items()}}


def put_into_last(folder: Path, more: float) -> None:
    """Copies the tensors of the first file into the last, changed by a number."""
    first, *_, last = files_of(folder)
    copies = {name: weight + more for name, weight in load_file(first).items()}
    save_file(load_file(last) | copies, last)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "damage, words",
    [
        (cut, r"-00002-of-\d+.safetensors is cut: its header wants \d+ bytes, and "
         r"there are \d+; download it again"),
        (lengthen, r"-00002-of-\d+.safetensors is too long: its header wants \d+"),
        (lambda folder: files_of(folder)[1].write_bytes(b""), "is cut: its header has"),
        (lambda folder: files_of(folder)[1].write_bytes(b"\xff" * 99), "has 18446744"),
        (lambda folder: files_of(folder)[1].write_bytes(with_header(b"{")),
         "safetensors cannot be read: Expecting"),
        (lambda folder: files_of(folder)[1].write_bytes(with_header(b"[]")),
         "it holds no names"),
        (lambda folder: files_of(folder)[1].write_bytes(with_header(b"[" * 99999)),
         "cannot be read: maximum recursion"),
        (lambda folder: files_of(folder)[1].write_bytes(
            with_header(b'{"a": {}, "a": {}}')), "'a' stands twice"),
        # MAX's reader ends in a segmentation fault.
        (rewrite({"__metadata__": None, "a": ENTRY}), "__metadata__ be an object of"),
        (lambda folder: files_of(folder)[1].write_bytes(with_header(b" {}")),
         "its header must begin with {"),
        (rewrite({"a\nb": ENTRY, "c": ENTRY}), "c begins at byte 0"),
        (rewrite({"a\nb": ENTRY | {"shape": []}}), r"'a\\nb' has data_offsets"),
        (rewrite({"a": 3}), "a has shape None"),
        (rewrite({"a": ENTRY | {"shape": [2.0]}}), r"a has shape \[2.0\]"),
        (rewrite({"a": ENTRY | {"shape": [-2]}}), r"a has shape \[-2\]"),
        (rewrite({"a": ENTRY | {"dtype": "F4"}}), "a has dtype 'F4', which is not"),
        (rewrite({"a": ENTRY | {"dtype": ["F32"]}}), r"a has dtype \['F32'\]"),
        (rewrite({"a": ENTRY | {"data_offsets": [0]}}), r"has data_offsets \[0\], and"),
        (rewrite({"a": ENTRY | {"data_offsets": [8, 0]}}), "and F32 of shape"),
        (rewrite({"a": ENTRY | {"shape": [2**62, 2**62]}}), "and F32 of shape"),
        (rewrite({"a": ENTRY, "b": ENTRY}), "b begins at byte 0 of the data"),
        (rewrite({"a": ENTRY | {"data_offsets": [4, 12]}}), "a begins at byte 4"),
        (lambda folder: files_of(folder)[1].unlink(),
         rf"{INDEX} names model-00002-of-.*, which is not there, for model"),
        (rewrite({"a": ENTRY}), f"00002.* does not have .*, which {INDEX} says"),
        (lambda folder: (folder / INDEX).write_text("{"), f"{INDEX} cannot be read"),
        (change_index(lambda index: [index]), f"{INDEX} cannot be read: it holds no"),
        (change_index(lambda index: {}), "has no weight_map"),
        (change_index(lambda index: renamed(index, 3)), f"{Q_PROJ} is in 3, which"),
        (change_index(lambda index: renamed(index, "../x")), "is in '../x', which is"),
        (lambda folder: shutil.copy(files_of(folder)[0], folder / SINGLE),
         "has model.safetensors and .*json, which does not name it"),
        (lambda folder: put_into_last(folder, 1),
         r"of-.*: .* has other values in model-00001.*, which is read, too; remove"),
        (lambda folder: (folder / INDEX).unlink() or put_into_last(folder, 1),
         r"of-.*: .* has other values in model-00001.*, which is read, too; remove"),
        (lambda folder: [x.unlink() for x in (folder / INDEX, *files_of(folder))],
         r"has no \*.safetensors"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"),
         "has adapter_config.json, and adapters are not served; merge"),
    ],
)  # fmt: skip
def test_files_that_are_refused(damage, words, shards):
    check(shards)
    damage(shards)
    with pytest.raises(ValueError, match=words) as raised:
        check(shards)
    assert "\n" not in str(raised.value)


def test_files_that_the_index_names_count(shards):
    """All that they have, as in transformers, which takes the last copy; no other file
    is read."""
    before = check(shards)
    put_into_last(shards, 0)
    save_file({Q_PROJ: torch.zeros(1)}, shards / "zzz.safetensors")
    change_index(one_of_each_file)(shards)
    assert check(shards) == before
    put_into_last(shards, 1)
    loaded = AutoModelForCausalLM.from_pretrained(shards).state_dict()
    of_last = load_file(files_of(shards)[-2])
    for name in load_file(files_of(shards)[0]):
        assert torch.equal(loaded[name], of_last[name])


def test_one_file_counts_alone(tmp_path):
    """Without an index, as in transformers; MAX would read others, too."""
    make_checkpoint(tmp_path)
    shutil.copy(tmp_path / SINGLE, tmp_path / "old.safetensors")
    files = {place.tensor.file.name for place in check(tmp_path).values()}
    assert files == {SINGLE}
    given = [tmp_path / "old.safetensors"]
    files = {tensor.file.name for tensor in read_tensors(tmp_path, given).values()}
    assert files == {"old.safetensors"}


def test_files_that_max_skips_are_not_replaced_by_others(shards):
    """MAX gives what is beside them: old weights would be served in silence."""
    first, *more = files_of(shards)
    skipped = first.rename(shards / "consolidated.00.safetensors")
    old = shards / "old.safetensors"
    save_file({Q_PROJ: torch.zeros(1)}, old)
    index = json.loads((shards / INDEX).read_text())
    where = {
        n: x.replace(first.name, skipped.name) for n, x in index["weight_map"].items()
    }
    (shards / INDEX).write_text(json.dumps(index | {"weight_map": where}))
    with pytest.raises(ValueError, match="MAX skips files with 'consolidated' in th"):
        read_tensors(shards, [old])
    assert read_tensors(shards, [skipped, *more, old]) == read_tensors(shards)
