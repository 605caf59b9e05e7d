# SPDX-License-Identifier: Apache-2.0
r"""Compares the machine code of all kernel variants of two source trees.

    python tests/codegen/same_code.py BASE [NEW] [--only REGEX] [--allow KIND,...]
        [--rename OLD=NEW]

BASE and NEW are folders, or git revisions of the repository in the current folder.
NEW is the working tree unless given. Each tree's own `tests/mojo/codegen*.mojo` run
with that tree's `mojo/`. The variants that they write are paired by `program/name`,
so a refactor may rewrite the programs. If it renames variants or programs, map the
base's names: `--rename 'codegen_rank_slots/(.*)=codegen_by_rank/\1'`.

A variant is
    same       its assembly is equal up to comments, line tables, and the names of
               symbols, registers and labels
    machine    (NVIDIA, where the program also writes a .cubin) its assembly differs,
               but what the assembler makes of it is equal to the byte
    different  none of these
    only-base, only-new

The exit status is 0 if all are the same or of a kind that --allow names (`machine`
unless given), 1 if not, 2 if a tree does not compile. The tool keeps what a tree
compiled to in --cache. It does not see launch code, ops and CPU code.
"""

import argparse
import collections
import concurrent.futures
import difflib
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("mojo", "tests/mojo")
# A symbol of Mojo ends in a hash of its module, name and parameters.
SYMBOL = re.compile(r"(?<![\w$])[A-Za-z_][\w$]*?_[0-9a-f]{16}")
ENTRY = re.compile(r"\.(?:entry|amdhsa_kernel)\s+([\w$]+)")
REGISTER = re.compile(r"%(?:p|rs|r|rd|f|fd|h|hh|rq|b)\d+\b")
LABEL = re.compile(r"\$L__BB\d+_\d+|\.?LBB\d+_\d+|\.Lfunc_\w+|\.Ltmp\d+")
DROPPED = re.compile(
    r"\s*(\.loc|\.file|\.ident|\.section\s+\.debug|\.section\s+\.comment)\b"
)
# Sections of a cubin that decide what runs.
DECIDES = tuple(b".text. .nv.constant .nv.shared .nv.info .nv.global .rel".split())


def fail(text: str) -> None:
    print(f"same_code: {text}", file=sys.stderr)
    sys.exit(2)


def _numbered(pattern: re.Pattern[str], text: str, word: str) -> str:
    """Numbers what a pattern finds by first appearance: equal up to names."""
    known: dict[str, str] = {}

    def name(found: re.Match[str]) -> str:
        kind = re.match(r"%[a-z]+", found[0])
        start = kind[0] if kind else word
        return known.setdefault(found[0], f"{start}{len(known)}")

    return pattern.sub(name, text)


def normal(text: str) -> str:
    """Returns assembly without what only names things."""
    is_ptx = ".entry" in text
    comment = "//" if is_ptx else ";"
    lines = []
    for line in text.splitlines():
        line = line.partition(comment)[0].rstrip()
        if line.strip() and not DROPPED.match(line):
            lines.append(" ".join(line.split()))
    text = "\n".join(lines)
    for i, entry in enumerate(dict.fromkeys(ENTRY.findall(text))):
        text = text.replace(entry, f"KERNEL{i}")
    text = _numbered(SYMBOL, text, "SYMBOL")
    return _numbered(LABEL, text, "LABEL")


def canonical(text: str) -> str:
    """Returns the normal form with registers numbered by first appearance."""
    # A PTX register is a name: how many there are, and which, means nothing. One of
    # AMD's is a place, and stays.
    text = re.sub(r"\.reg \.\w+ %\w+<\d+>;\n?", "", text)
    return _numbered(REGISTER, text, "%")


def attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Returns the number of each attribute in .nv.info, and all its bytes."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        end = at + 4 + (size if form == 4 else 0)
        yield attribute, info[at:end]
        at = end


def _attributes(info: bytes) -> bytes:
    """Returns what .nv.info says, without the indices of symbols."""
    of_symbol = (0x11, 0x12, 0x23, 0x2F)
    return b"".join(
        sorted(
            bytes([attribute]) + body[8 if attribute in of_symbol else 0 :]
            for attribute, body in attributes(info)
        )
    )


def sections(elf: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Returns the name, info and body of each section of an ELF file."""
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    places = [offset + i * size for i in range(count)]
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, place) for place in places]
    at = headers[names][4]
    for name, kind, _, _, start, length, _, info, *_ in headers:
        nobits = 8
        body = str(length).encode() if kind == nobits else elf[start : start + length]
        yield elf[at + name : elf.index(b"\0", at + name)], info, body


def machine_code(path: Path) -> list[tuple[bytes, int, bytes]]:
    """Returns what runs of a kernel, without its name."""
    entries = ENTRY.findall(path.read_text())
    entry = re.compile(b"|".join(re.escape(e.encode()) for e in entries))
    # The registers of a thread are in a byte of a text section's header.
    return sorted(
        (
            entry.sub(b"K", name),
            info >> 24,
            _attributes(body) if name.startswith(b".nv.info") else body,
        )
        for name, info, body in sections(path.with_suffix(".cubin").read_bytes())
        if name.startswith(DECIDES)
    )


MOJO = str(Path(sys.executable).with_name("mojo"))


def sources(what: str, into: Path) -> Path:
    """Returns a folder with the tree: the folder itself, or a revision unpacked."""
    if Path(what).is_dir():
        return Path(what).resolve()
    archive = subprocess.run(["git", "archive", what, *FOLDERS], capture_output=True)
    if archive.returncode:
        fail(f"{what} is neither a folder nor a revision: {archive.stderr.decode()}")
    subprocess.run(["tar", "-x", "-C", str(into)], input=archive.stdout, check=True)
    return into


def digest(tree: Path, version: str) -> str:
    state = hashlib.sha256(version.encode())
    paths = [path for x in FOLDERS for path in sorted((tree / x).rglob("*.mojo"))]
    for path in paths:
        state.update(str(path.relative_to(tree)).encode() + b"\0" + path.read_bytes())
    return state.hexdigest()[:24]


def compile_one(tree: Path, program: Path, folder: Path) -> str:
    """Runs one program; its files and what it prints end up in a folder."""
    folder.mkdir(parents=True)
    done = subprocess.run(
        [MOJO, "run", "-I", ".", str(program), str(folder)],
        cwd=tree / "mojo",
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return f"{program.name} of {tree}:\n{done.stderr[-4000:]}"
    return ""


def variants(folder: Path) -> dict[str, Path]:
    """Returns the files by program and name: programs use the same names."""
    return {
        str(path.relative_to(folder))[:-2]: path for path in sorted(folder.rglob("*.s"))
    }


def show(base: str, new: str, n_lines: int) -> str:
    """Returns the start of a diff; registers have no numbers, unless they differ."""

    def lines(text: str) -> list[str]:
        text = REGISTER.sub(lambda m: m[0].rstrip("0123456789"), text)
        return re.sub(r"LABEL\d+", "LABEL", text).splitlines()

    texts = canonical(base), canonical(new)
    pair = tuple(map(lines, texts))
    pair = pair if pair[0] != pair[1] else tuple(text.splitlines() for text in texts)
    diff = list(difflib.unified_diff(*pair, lineterm="", n=1))[2:]
    changed = sum(line[0] in "+-" for line in diff)
    rest = [f"... {changed} lines differ"] if len(diff) > n_lines else []
    return "\n".join(f"      {line}" for line in diff[:n_lines] + rest)


def compare(base: Path, new: Path, n_lines: int) -> tuple[str, str]:
    texts = [normal(path.read_text()) for path in (base, new)]
    if texts[0] == texts[1] or canonical(texts[0]) == canonical(texts[1]):
        return "same", ""
    has_code = all(path.with_suffix(".cubin").exists() for path in (base, new))
    is_same = has_code and machine_code(base) == machine_code(new)
    return "machine" if is_same else "different", show(*texts, n_lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("new", nargs="?", default=".")
    parser.add_argument("--only", default="", help="compare variants that match")
    parser.add_argument("--allow", default="machine", help="kinds that pass, by comma")
    parser.add_argument("--diff", type=int, default=14, help="lines of a diff")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW")
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir()) / "same_code"
    )
    args = parser.parse_args()
    version = subprocess.run([MOJO, "--version"], stdout=subprocess.PIPE, text=True)
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as scratch,
        concurrent.futures.ThreadPoolExecutor(args.jobs) as pool,
    ):
        folders, todo, built = [], [], []
        for i, what in enumerate((args.base, args.new)):
            (unpacked := Path(scratch) / f"tree{i}").mkdir()
            tree = sources(what, unpacked)
            kept = args.cache / digest(tree, version.stdout)
            folders.append(kept)
            if kept.is_dir() or kept in [place for _, place in built]:
                continue
            building = Path(scratch) / f"out{i}"
            built.append((building, kept))
            programs = sorted((tree / "tests/mojo").glob("codegen*.mojo"))
            # The longest first.
            for program in sorted(programs, key=lambda p: -p.stat().st_size):
                todo.append(
                    pool.submit(compile_one, tree, program, building / program.stem)
                )
        if errors := [text for task in todo if (text := task.result())]:
            fail("\n".join(errors))
        for building, kept in built:
            kept.parent.mkdir(parents=True, exist_ok=True)
            if not kept.exists():
                shutil.move(building, kept)
    base, new = map(variants, folders)
    for old, _, name in (pair.partition("=") for pair in args.rename):
        renamed = {re.sub(f"^{old}$", name, key): path for key, path in base.items()}
        if len(renamed) < len(base) or renamed == base:
            fail(f"--rename {old}: nothing to rename, or two of one name")
        base = renamed
    found: dict[str, list[str]] = collections.defaultdict(list)
    for name in sorted({*base, *new}):
        if not re.search(args.only, name):
            continue
        if name not in new or name not in base:
            verdict, text = ("only-base" if name in base else "only-new"), ""
        else:
            verdict, text = compare(base[name], new[name], args.diff)
        found[verdict].append(name)
        if verdict != "same":
            print(f"{verdict:10} {name}")
            if text:
                print(text)
    counts = ", ".join(f"{len(names)} {verdict}" for verdict, names in found.items())
    print(f"same_code: {counts or 'no variants'}; {time.monotonic() - started:.1f} s")
    return 0 if found and set(found) <= {"same", *args.allow.split(",")} else 1


if __name__ == "__main__":
    sys.exit(main())
