# SPDX-License-Identifier: Apache-2.0
"""What the Mojo sources say, as far as the model has to follow them.

Read by regular expressions: `test_model_sources.py` compares it with the model and
with the tables of what is left out, so a flag, a wait or a phase that one of the two
lacks is found.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "mojo" / "max_ep"

# A wait that is built of an atomic, and the atomic that the model has for it.
ALIASES = {"await_generation": "peek"}


def source(name: str) -> str:
    return (PACKAGE / name).read_text()


def _code(text: str) -> str:
    """Leaves out docstrings and comments; keeps the lines."""
    text = re.sub(r'"""[\s\S]*?"""', lambda m: "\n" * m.group().count("\n"), text)
    return re.sub(r"#.*", "", text)


def functions(name: str) -> dict[str, str]:
    """The code of each function of a file: those of the file, methods of structs.

    Functions inside of functions belong to the outer one.
    """
    found: dict[str, list[str]] = {}
    current, in_struct = "", False
    for line in _code(source(name)).splitlines():
        if re.match(r"(struct|trait) ", line):
            in_struct = True
        starts = re.match(r"def (\w+)", line)
        if starts:
            in_struct = False
        elif in_struct:
            starts = re.match(r"    def (\w+)", line)
        if starts:
            current = starts.group(1)
            line = line[starts.end() :]
        elif re.match(r"(comptime|from|import|@|struct|trait)\b", line):
            current = ""
        if current:
            found.setdefault(current, []).append(line)
    return {function: "\n".join(lines) for function, lines in found.items()}


def is_repeated(before: str) -> bool:
    """Tells whether what comes behind some code of a function is in a loop."""
    *lines, last = before.splitlines()
    indent = len(last) - len(last.lstrip())
    for line in reversed(lines):
        here = len(line) - len(line.lstrip())
        if line.strip() and here < indent:
            indent = here
            if re.match(r" +(for|while) ", line):
                return True
    return False


def protocol_files() -> list[str]:
    """All files but `flags.mojo`, relative to the package."""
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.mojo")]
    return sorted(str(f) for f in files if str(f) != "flags.mojo")


def calls_of(names: set[str]) -> Counter[tuple[str, str]]:
    """Counts calls of some functions: `(file and function, callee)`."""
    found: Counter[tuple[str, str]] = Counter()
    for file in protocol_files():
        for function, code in functions(file).items():
            for name in re.findall(r"(?<![\w.])(\w+)\s*(?=[\[(])", code):
                if name in names and name != function:
                    found[f"{file}: {function}", name] += 1
    return found


def atomics() -> dict[str, tuple[str, set[str], str]]:
    """What the functions of `flags.mojo` do: load, store or add; orders; scope."""
    found = {}
    for function, code in functions("flags.mojo").items():
        orders = set(re.findall(r"Ordering\.(\w+)", code))
        does = set(re.findall(r"\]?\.(load|store|fetch_add|compare_exchange)\b", code))
        if re.search(r"\bfence\[", code):
            does.add("fence")
        assembly = re.search(r'"\s*(st|ld)\.(\w+)\.(\w+)\.|(st|ld)\.(\w+)\.sys\.', code)
        if assembly:
            kind = assembly.group(1) or assembly.group(4)
            orders.add((assembly.group(2) or assembly.group(5)).upper())
            does.add({"st": "store", "ld": "load"}[kind])
        if not orders:
            continue
        scope = "system"
        for name in ("block", "device"):
            if f"_{name}_scope()" in code:
                scope = name
        found[function] = (" ".join(sorted(does)), orders, scope)
    return found


def located_words() -> set[str]:
    """What `layout.mojo` gives an offset inside of a buffer."""
    code = _code(source("layout.mojo"))
    inside = code[: code.index("def dispatch_send_bytes")]
    return {
        name
        for name, arguments in re.findall(r"def (\w+)_offset\(\s*self([^)]*)\)", inside)
        if arguments.strip(" ,\n")
    }


def header_words() -> set[str]:
    """Words of the header of the counters, in lower case."""
    code = _code(source("counters.mojo"))
    words = re.findall(r"^comptime _?(\w+?)(?:_WORD)? = \d+\b", code, re.MULTILINE)
    return {word.lower() for word in words}


def counter_arrays() -> set[str]:
    """What the counters hold besides: the methods that point into them.

    And what is in the header, if a method points to it: then it is `…_word`.
    """
    methods = functions("counters.mojo")
    return {
        name.removesuffix("_word")
        for name, code in methods.items()
        if "-> Pointer[" in code and name != "failure"
    }


def control_words() -> set[str]:
    """Words by which the warps of a block agree: constants of the kernels' files."""
    found = set()
    for file in ("rank_slots/dispatch_roles", "rank_slots/combine_roles"):
        roles = _code(source(f"{file}.mojo"))
        found |= set(re.findall(r"^comptime (\w+) = ", roles, re.MULTILINE))
    for file in ("expert_slots/dispatch", "expert_slots/combine"):
        code = _code(source(f"{file}.mojo"))
        for name in re.findall(r"control\.unsafe_offset\((\w+)\)", code):
            found.add(name.lstrip("_"))
    return found


def phases() -> set[str]:
    """The kernels and the functions of CPU ranks, by what they are of."""
    found = set()
    for file in protocol_files():
        folder = file.split("/")[0]
        if folder in ("expert_slots", "rank_slots"):
            for name in re.findall(r"^def (\w+_kernel)\b", source(file), re.M):
                found.add(f"{folder}: {name}")
        if folder == "cpu":
            for name in re.findall(r"^def cpu_(\w+)\b", source(file), re.M):
                found.add(f"cpu: {name}")
    return found


def named_phases() -> list[str]:
    """`failures.PHASES`: what a time-out names."""
    code = _code(source("failures.mojo"))
    table = re.search(r"comptime PHASES[^=]*=\s*\[([^\]]*)\]", code)
    return re.findall(r'"(\w+)"', table.group(1)) if table else []


def mojo_calls(files: list[str]) -> dict[str, set[str]]:
    """Who calls whom in some files: `file: function` to `file: function`."""
    codes = {f"{file}: {f}": c for file in files for f, c in functions(file).items()}
    by_name: dict[str, list[str]] = {}
    for where in codes:
        by_name.setdefault(where.split(": ")[1], []).append(where)
    calls: dict[str, set[str]] = {}
    for where, code in codes.items():
        file, own = where.split(": ")
        calls[where] = set()
        for name in set(re.findall(r"(?<![\w.])(\w+)\s*(?=[\[(])", code)):
            found = by_name.get(name, [])
            here = [f for f in found if f.startswith(f"{file}: ")]
            calls[where] |= set(here or found) - {where}
    return calls


def _model_functions(modules: list[str]) -> dict[str, ast.FunctionDef]:
    """The functions of some files of the model; no two have the same name."""
    functions = [
        node
        for module in modules
        for node in ast.parse((Path(__file__).parent / module).read_text()).body
        if isinstance(node, ast.FunctionDef)
    ]
    found = {function.name: function for function in functions}
    assert len(found) == len(functions)
    return found


def model_calls(modules: list[str]) -> dict[str, set[str]]:
    """Who calls whom in some files of the model, by names."""
    calls = {
        name: {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        - {name}
        for name, function in _model_functions(modules).items()
    }
    return {f: {c for c in called if c in calls} for f, called in calls.items()}


def edges(calls: dict[str, set[str]], nodes: set[str]) -> set[tuple[str, str]]:
    """Whom some functions call, also through functions that are not among them."""
    found = set()
    for node in nodes:
        todo, seen = list(calls[node]), set()
        while todo:
            called = todo.pop()
            if called in nodes:
                found.add((node, called))
            elif called not in seen:
                seen.add(called)
                todo += calls.get(called, ())
    return found


def notes_of_counters() -> Counter[tuple[str, str]]:
    """How often which function notes which word of the counters, by `set_…`."""
    found: Counter[tuple[str, str]] = Counter()
    for file in protocol_files():
        if file != "counters.mojo":
            for function, code in functions(file).items():
                for word in re.findall(r"\.set_(\w+)\(", code):
                    found[f"{file}: {function}", word] += 1
    return found


def put_backs() -> set[str]:
    """Functions that store `EMPTY` where data was its own flag."""
    found = set()
    for file in protocol_files():
        for function, code in functions(file).items():
            for store in re.findall(r"store16\(([\s\S]{0,120})", code):
                if re.match(r"[^;]*?,\s*LaneBytes\(EMPTY\),?\s*\)", store):
                    found.add(f"{file}: {function}")
    return found


def put_back_to_zero() -> set[str]:
    """Functions of protocols that store 0 where blocks have counted."""
    return {
        f"{file}: {function}"
        for file in protocol_files()
        if "slots/" in file
        for function, code in functions(file).items()
        if re.search(r"\[\] = 0\b", code)
    }


def directions(names: set[str]) -> set[tuple[str, str, bool]]:
    """Calls in `rank_slots` that say whether they are for combine."""
    found = set()
    for file in protocol_files():
        if file.startswith("rank_slots/"):
            for function, code in functions(file).items():
                pattern = r"(\w+)\[\s*layout,\s*(True|False)\s*\]"
                for name, is_combine in re.findall(pattern, code):
                    if name in names:
                        caller = function.removesuffix("_kernel")
                        found.add((caller, name, is_combine == "True"))
    return found


def model_directions(modules: list[str], names: set[str]) -> set[tuple[str, str, bool]]:
    """The same calls in the model, where it is the last argument."""
    return {
        (function.name, node.func.id, node.args[-1].value)
        for function in _model_functions(modules).values()
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in names
        and isinstance(node.args[-1], ast.Constant)
    }
