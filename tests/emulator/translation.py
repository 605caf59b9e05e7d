# SPDX-License-Identifier: Apache-2.0
"""Makes a Python generator of a kernel in PTX."""

from __future__ import annotations

import ast
import re

from tests.codegen.assembly import Op, parse_ptx

from . import link
from .hopper import FIRST_MAP, RANK_SHIFT
from .memory import Memory
from .races import ORDERS, SCOPES
from .simpler import chosen, simplified

POLLS = None
"""What a thread yields that polls; others yield an exchange, or 0 to go on later."""
M32, M64 = (1 << 32) - 1, (1 << 64) - 1

_FLOAT = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "quotient({0}, {1})",
    "fma": "{0} * {1} + {2}",
    "max": "max({0}, {1})",
    "min": "min({0}, {1})",
    "abs": "abs({0})",
    "neg": "-{0}",
    "rcp": "quotient(1.0, {0})",
    "ex2": "2.0 ** {0}",
    "rsqrt": "{0} ** -0.5",
}
_PLAIN = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
_COMPARE = dict(
    eq="==", ne="!=", lt="<", le="<=", gt=">", ge=">=", lo="<", ls="<=", hi=">", hs=">="
)
DYNAMIC = 232448
"""Bytes of shared memory that a launch may ask for."""
_WAIT = (
    r"LAB_WAIT:\s*mbarrier\.try_wait\.parity\.shared::cta\.b64 P1, (\[.*?\]), (%r\d+);"
    r"\s*@P1 bra DONE;\s*bra LAB_WAIT;\s*DONE:"
)
_ACCESS = dict(load="load", store="store")
_ACCESS |= dict(get="unordered.load", set="unordered.store")
_SPECIAL = {
    "%cluster_ctarank": "(ctaid & 1)",
    "%tid.x": "tid",
    "%ctaid.x": "ctaid",
    "%ctaid.y": "0",
    "%ntid.x": "ntid",
    "%nctaid.x": "nctaid",
    "%laneid": "(tid & 31)",
    "%globaltimer": "clock.ns",
}


class Translation:
    """Makes the source of a generator from a kernel's operations."""

    def __init__(self, text: str) -> None:
        self.trials: dict[int, list[tuple[int, list[Op]]]] = {}
        """What operations become if mutations of some numbers are on."""
        # What a thread does at once, under a name that says so.
        text = re.sub(_WAIT, r"phases.wait \1, \2;", text)
        text = text.replace("cp.async", "copy").replace("mbarrier.", "phases.")
        self.kernel = parse_ptx(text)
        self.ops = self.kernel.ops
        self.is_cluster = ".reqnctapercluster 2" in text
        self.shared: dict[str, tuple[int, int]] = {}
        place = r"\.shared \.align (\d+) \.b8 (\S+)\[(\d+)\];"
        memory = Memory(1 << 20, gap=16)
        for align, name, n_bytes in re.findall(place, text):
            begin = memory.allocate(int(n_bytes), max(16, int(align)))
            self.shared[name] = (begin, int(n_bytes))
        for name in re.findall(r"\.extern \.shared \.align \d+ \.b8 (\S+)\[\];", text):
            self.shared[name] = (memory.allocate(DYNAMIC, 1024), DYNAMIC)

    def operand(self, x: str, bits: int = 32) -> str:
        x = x.strip()
        if x in _SPECIAL:
            return _SPECIAL[x]
        if x.startswith("%") or x in ("word", "p", "_", "remAddr32"):
            return x.lstrip("%").replace(".", "_")
        if found := re.fullmatch(r"0f([0-9A-F]{8})", x):
            return str(int(found[1], 16))
        if re.fullmatch(r"-?(0x)?[\dA-F]+U?", x):
            return str(int(x.rstrip("U"), 0) & ((1 << bits) - 1))
        if x in self.shared:
            return str(self.shared[x][0])
        if found := re.search(r"_param_(\d+)$", x):
            return str(FIRST_MAP + int(found[1]))
        raise NotImplementedError(x)

    def address(self, text: str) -> str:
        of, _, offset = text.partition("+")
        base = self.operand(of, 64)
        if not offset:
            return base
        return f"({base} + {int(offset)} & {M64})"

    def blocks(self) -> list[list[str]]:
        """Returns statements; `b` says which block comes next."""
        ops = self.ops
        leaders = {0}
        for i, op in enumerate(ops):
            if op.successors != [i + 1]:
                leaders |= {*op.successors, i + 1}
        leaders = sorted(x for x in leaders if x < len(ops))
        number = {place: i for i, place in enumerate(leaders)}
        blocks = []
        for begin, end in zip(leaders, [*leaders[1:], len(ops)]):
            lines = []
            for i in range(begin, end):
                lines += self._tried(i, ops[i], number)
            if ops[end - 1].successors == [end] and end < len(ops):
                lines.append(f"b = {number[end]}")
            blocks.append(lines or ["pass"])
        return blocks

    def program(self) -> ast.Module:
        """Returns a module with the generator."""
        blocks = self.blocks()
        found = re.findall(r"\b((mem|sh)_(load|store|get|set)_(\d))\(", str(blocks))
        made, unset = simplified(blocks)
        out = [
            "def thread(tid, ctaid, ntid, nctaid, params, mem, sh, clock, block):",
            " b = 0",
            *(
                f" {name} = {of}.{_ACCESS[how]}_{n}"
                for name, of, how, n in sorted({*found})
            ),
            " word = p = False",
            *(f" {to} = {of[0] != 'p' and 0xDEAD}" for of, to in unset.items()),
            " if b: yield",
            " while True: pass",
        ]
        program = ast.parse("\n".join(out))
        program.body[0].body[-1].body = chosen(made)
        return program

    def _tried(self, place: int, op: Op, number: dict[int, int]) -> list[str]:
        lines, choice = self.lines(place, op, number), "if"
        out = []
        for which, ops in self.trials.get(place, ()):
            out.append(f"{choice} is_open[{which}] and begins({which}):")
            made = [line for x in ops for line in self.lines(place, x, number)]
            out += [" " + line for line in made or ["pass"]]
            choice = "elif"
        return [*out, "else:", *(" " + x for x in lines or ["pass"])] if out else lines

    def lines(self, place: int, op: Op, number: dict[int, int]) -> list[str]:
        text, predicate = op.text, op.predicate
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        if "\t" in name:
            name, _, more = text.partition("\t")
            name, rest = name.strip(), more.strip()
        how, *kinds = name.split(".")
        when = ""
        if predicate:
            is_not = "!" in predicate
            of = predicate.lstrip("@!%")
            when = f"if {'not ' if is_not else ''}{of}: "
        if how == "bra":
            if not when:
                return [f"b = {number[op.successors[-1]]}"]
            after, there = op.successors
            of = when.removeprefix("if ").rstrip(": ")
            return [f"b = {number[there]} if {of} else {number[after]}"]
        made = self.statements(place, how, kinds, rest)
        if not when:
            return made
        return [when.rstrip(), *(" " + line for line in made or ["pass"])]

    def statements(self, place: int, how: str, kinds: list[str], rest: str) -> list:
        if how in ("ret", "exit"):
            return ["return"]
        if how == "trap":
            return ['raise RuntimeError("trap")']
        if how == "fence" and "sys" in kinds and "acquire" not in kinds:
            return ["if block.link: block.link.fence(mem)"]
        if how in ("griddepcontrol", "fence", "membar", "setmaxnreg"):
            return []
        if how == "link":
            of = [self.operand(x, 64) for x in _split(rest)]
            return link.statements(place, kinds[0], of)
        if how in ("phases", "copy", "mapa", "wgmma", "mma"):
            return self._of_hopper(place, how, kinds, rest)
        if how == "barrier" and kinds[0] == "cluster":
            return ["yield ('barrier', 'cluster', 0)"] * (kinds[1] == "wait")
        if how in ("ld", "st", "atom", "red"):
            return self._access(how, kinds, rest)
        if how == "bar" and kinds[0] == "warp":
            return ["yield ('meet', 0)"]
        if how in ("bar", "barrier"):
            which, _, n = rest.partition(",")
            return [f"yield ('barrier', {int(which)}, {int(n) if n else 'ntid'})"]
        parts = _split(rest)
        kind = kinds[-1] if kinds else ""
        if how in ("shfl", "vote", "redux", "match"):
            return self._exchange(place, how, kinds, parts)
        bits = 8 if kind == "pred" else int(re.sub(r"\D", "", kind) or 32)
        if how == "mov" and "{" in rest:
            return self._move(parts, bits)
        to = self.operand(parts[0].split("|")[0])
        if how == "cvt":
            return [f"{to} = {self._converted(kinds, parts)}"]
        of_bits = 8 * 4 if how in ("shl", "shr") else bits
        of = [
            self.operand(x, bits if i == 0 else of_bits)
            for i, x in enumerate(parts[1:])
        ]
        return [f"{to} = {self._value(how, kinds, kind, bits, of)}"]

    def _value(
        self, how: str, kinds: list[str], kind: str, bits: int, of: list[str]
    ) -> str:
        mask, half = (1 << bits) - 1, 1 << bits - 1
        signed = [str(int(x) ^ half) if x.isdigit() else f"({x} ^ {half})" for x in of]
        if how in ("mov", "cvta"):
            return str(of[0] != "0") if kind == "pred" and of[0].isdigit() else of[0]
        if kind == "pred":
            if how == "not":
                return f"not {of[0]}"
            return f"{of[0]} {_PLAIN[how]} {of[1]}"
        if how == "selp":
            return f"{of[0]} if {of[2]} else {of[1]}"
        if how == "setp":
            if kind == "f32":
                a, b = (f"floats[{x}]" for x in of)
                if kinds[0] == "nan":
                    return f"{a} != {a} or {b} != {b}"
                return f"{a} {_COMPARE[kinds[0]]} {b}"
            a, b = signed if kind[0] == "s" else of
            return f"{a} {_COMPARE[kinds[0]]} {b}"
        if kind == "f32":
            values = [f"floats[{x}]" for x in of]
            return f"to_bits({_FLOAT[how].format(*values)})"
        if kind == "bf16x2":
            return f"{how}_bf16x2({of[0]}, {of[1]})"
        assert kind[0] in "bsu" and kind[1:].isdigit(), kinds
        if how in _PLAIN:
            value = f"{of[0]} {_PLAIN[how]} {of[1]}"
            return f"({value}) & {mask}" if how in ("add", "sub") else value
        if how == "not":
            return f"{of[0]} ^ {mask}"
        if how == "neg":
            return f"-{of[0]} & {mask}"
        if how in ("min", "max"):
            if kinds[0] == "relu":
                return f"max({signed[0]}, {signed[1]}, {half}) ^ {half}"
            if kind[0] == "s":
                return f"{how}({signed[0]}, {signed[1]}) ^ {half}"
            return f"{how}({of[0]}, {of[1]})"
        if how == "shl":
            by = of[1] if of[1].isdigit() else f"min({of[1]}, {bits})"
            return f"({of[0]} << {by}) & {mask}"
        if how == "shr":
            value = f"{signed[0]} - {half}" if kind[0] == "s" else of[0]
            by = of[1] if of[1].isdigit() else f"min({of[1]}, {bits})"
            return f"({value}) >> {by} & {mask}"
        wide = [f"({x} - {half})" for x in signed] if kind[0] == "s" else of
        if how in ("mul", "mad"):
            product = f"{wide[0]} * {wide[1]}"
            if kinds[0] == "hi":
                return f"({product} >> {bits}) & {mask}"
            if kinds[0] == "wide":
                mask = (1 << 2 * bits) - 1
            return f"({product}{' + ' + of[2] if how == 'mad' else ''}) & {mask}"
        if how == "div":
            if kind[0] == "u":
                return f"{of[0]} // {of[1]}"
            return f"divided({of[0]}, {of[1]}, {bits}) & {mask}"
        if how == "rem" and kind[0] == "u":
            return f"{of[0]} % {of[1]}"
        if how == "rem":
            return f"({of[0]} - divided({of[0]}, {of[1]}, {bits}) * {of[1]}) & {mask}"
        if how == "popc":
            return f"{of[0]}.bit_count()"
        if how == "prmt":
            return f"permuted({', '.join(of)})"
        if how == "bfi" and of[2].isdigit() and of[3].isdigit():
            inserted = (1 << int(of[3])) - 1 << int(of[2]) & mask
            value = f"{of[0]} << {of[2]} & {inserted}"
            return f"{of[1]} & {mask ^ inserted} | ({value})"
        raise NotImplementedError(f"{how}.{'.'.join(kinds)}")

    def _converted(self, kinds: list[str], parts: list[str]) -> str:
        of = [self.operand(x, 64) for x in parts[1:]]
        to, source = kinds[-2], kinds[-1]
        if (to, source) == ("f32", "bf16"):
            return f"{of[0]} << 16"
        if (to, source) == ("bf16x2", "f32"):
            return f"to_bf16({of[0]}) << 16 | to_bf16({of[1]})"
        if (to, source) == ("e4m3x2", "f32"):
            return f"to_fp8({of[0]}) << 8 | to_fp8({of[1]})"
        if (to, source) == ("f16x2", "e4m3x2"):
            return f"fp8_to_f16x2({of[0]})"
        if (to, source) == ("f32", "f16"):
            return f"f16_to_bits({of[0]})"
        if (to, source) == ("bf16", "f32"):
            return f"to_bf16({of[0]})"
        if to == "f32" and source in ("u32", "u64"):
            return f"to_bits(float({of[0]}))"
        if (to, source) == ("f32", "s64"):
            return f"to_bits(float(({of[0]} ^ {1 << 63}) - {1 << 63}))"
        if to[0] in "us" and source[0] in "us":
            mask, half = (1 << int(to[1:])) - 1, 1 << int(source[1:]) - 1
            is_whole = parts[1].startswith("%rd") == (source[1:] == "64")
            low = of[0] if is_whole else f"({of[0]} & {2 * half - 1})"
            if source[0] == "s":
                return f"(({low} ^ {half}) - {half}) & {mask}"
            return f"{low} & {mask}"
        raise NotImplementedError(f"cvt.{'.'.join(kinds)}")

    def _move(self, parts: list[str], bits: int) -> list[str]:
        if parts[0].startswith("{"):
            names = [self.operand(x) for x in parts[0].strip("{}").split(",")]
            n = bits // len(names)
            of = self.operand(parts[1], bits)
            return [
                f"{x} = {of} >> {n * i} & {(1 << n) - 1}" for i, x in enumerate(names)
            ]
        names = parts[1].strip("{}").split(",")
        n = bits // len(names)
        joined = " | ".join(
            f"{self.operand(x, n)} << {n * i}" for i, x in enumerate(names)
        )
        return [f"{self.operand(parts[0])} = {joined}"]

    def _access(self, how: str, kinds: list[str], rest: str) -> list[str]:
        n_bytes = int(re.sub(r"\D", "", kinds[-1])) // 8
        place = rest[rest.index("[") + 1 : rest.index("]")]
        if "param" in (kind.partition("::")[0] for kind in kinds):
            which, offset = re.search(r"_param_(\d+)(?:\+(\d+))?$", place).groups()
            at = int(offset or 0)
            names = rest[: rest.index("[")].strip(" ,{}").split(",")
            loads = []
            for i, x in enumerate(names):
                begin = at + n_bytes * i
                value = f"params[{which}, {begin}, {begin + n_bytes}]"
                loads.append(f"{self.operand(x)} = {_extended(kinds[-1], value)}")
            return loads
        memory = "sh" if "shared" in kinds else "mem"
        load, store = f"{memory}_load_{n_bytes}", f"{memory}_store_{n_bytes}"
        lines = [f"a = {self.address(place)}"]
        # PTX defines volatile so.
        ordered = [*kinds, "relaxed", "sys"] if "volatile" in kinds else kinds
        order = next(
            (x for x in ordered if x in ORDERS), "relaxed" * (how[0] not in "ls")
        )
        if order:
            load, store = f"{memory}_get_{n_bytes}", f"{memory}_set_{n_bytes}"
            scope = next((x for x in ordered if x in SCOPES), "")
            stored = None
            if how == "st" and "{" not in rest:
                names = rest[rest.index("]") + 1 :].lstrip(", ")
                stored = "word" if n_bytes == 16 else self.operand(names, 8 * n_bytes)
            if how == "ld":
                about = f"a, {n_bytes}, '{order}', '{scope}'"
                lines.append(f"{memory}.poll({about})")
            else:
                about = f"a, {n_bytes}, '{how}', '{order}', '{scope}', {stored}"
                lines.append(f"{memory}.order({about})")
        # A load may poll; what follows a release must not be needed by whom it is for.
        waits = [f"yield {POLLS}"] if order and how == "ld" else []
        goes_on = ["yield 0"] if order in ("release", "acq_rel") else []
        if n_bytes == 16:
            if how == "ld":
                load = "mem_get_8" if order else "mem_load_8"
                low, high = (f"{load}(a + {i})" for i in (0, 8))
                return [*waits, *lines, f"word = {low} | {high} << 64"]
            store = "mem_set_8" if order else "mem_store_8"
            stores = [f"{store}(a + {i}, word >> {8 * i})" for i in (0, 8)]
            return [*lines, *stores]
        if how == "ld":
            names = rest[: rest.index("[")].strip().rstrip(",").strip("{} ").split(",")
            for i, x in enumerate(names):
                value = f"{load}(a + {n_bytes * i})"
                lines.append(f"{self.operand(x)} = {_extended(kinds[-1], value)}")
            return waits + lines
        after = rest[rest.index("]") + 1 :].lstrip(", ").strip()
        if how == "st":
            names = after.strip("{} ").split(",")
            for i, x in enumerate(names):
                value = self.operand(x, 8 * n_bytes)
                lines.append(f"{store}(a + {n_bytes * i}, {value})")
            return lines + goes_on
        of = [self.operand(x, 8 * n_bytes) for x in after.split(",")]
        to = self.operand(rest.partition(",")[0]) if how == "atom" else "_"
        if kinds[-2] == "cas":  # others may come first
            lines.insert(0, "yield 0")
        lines.append(f"old = {load}(a)")
        if kinds[-2] == "cas":
            lines.append(f"if old == {of[0]}: {store}(a, {of[1]})")
        elif kinds[-2] == "add":
            lines.append(f"{store}(a, old + {of[0]})")
        else:
            raise NotImplementedError(f"{how}.{'.'.join(kinds)}")
        return [*lines, f"{to} = old", *goes_on]

    def _of_hopper(
        self, place: int, how: str, kinds: list[str], rest: str
    ) -> list[str]:
        parts = _split(rest)
        at = [self.address(x[1:].partition("]")[0]) for x in parts if x[0] == "["]
        if how == "mapa":
            to, of, rank = map(self.operand, parts)
            return [f"{to} = {of} | {rank} << {RANK_SHIFT}"]
        if how == "phases" and kinds[0] == "wait":
            return [
                f"while block.is_before({at[0]}, {self.operand(parts[1])}):",
                " yield",
            ]
        if how == "phases" and kinds[0] == "init":
            return [f"block.initialize({at[0]}, {self.operand(parts[1])})"]
        if how == "phases" and "shared::cluster" in kinds:
            return [f"block.arrive_at({at[0]}, {self.operand(parts[2])})"]
        if how == "phases" and kinds[1] == "expect_tx":
            return [f"block.arrive({at[0]}, 1, {self.operand(parts[2])})"]
        if how == "phases" or how == "copy" and kinds[0] == "phases":
            return [f"block.arrive({at[0]})"]
        if how == "copy" and kinds[0] == "cg":
            assert parts[2] == "16"
            return [
                f"sh_store_8({at[0]} + {i}, mem_load_8({at[1]} + {i}))" for i in (0, 8)
            ]
        if how == "copy" and kinds[1] == "prefetch":
            return [f"block.prefetch({at[0]}, {self.operand(parts[1])})"]
        if how == "copy" and kinds[1] == "tensor":
            pattern = r"\[(.*?)\], \[(.*?), \{(.*?)\}\], \[(.*?)\]"
            to, map_, coordinates, barrier = re.match(pattern, rest).groups()
            of = ", ".join(self.operand(x) for x in coordinates.split(","))
            to, barrier = self.address(to), self.address(barrier)
            both = any("multicast" in kind for kind in kinds)
            return [
                f"block.copy({to}, {self.operand(map_)}, ({of}), {barrier}, {both})"
            ]
        if how == "wgmma" and kinds[0] == "mma_async":
            registers = ", ".join(map(self.operand, parts[0].strip("{}").split(",")))
            a, b, keeps = map(self.operand, parts[1:4])
            request = f"({a}, {b}, {keeps}, ({registers}))"
            shape = next(x for x in kinds if re.match(r"m\d", x))
            return [f"({registers}) = yield ('wgmma {shape} {place}', {request})"]
        if how == "wgmma" and kinds[0] in ("commit_group", "wait_group"):
            call = "commit(tid >> 7)"
            if kinds[0] == "wait_group":
                call = f"await_groups(tid >> 7, {parts[0]})"
            return ["yield ('meet', 0)", f"if tid % 128 == 0: block.{call}"]
        if how == "wgmma" and kinds[0] == "fence":
            return []
        if how == "mma":
            d, *of = (
                ", ".join(map(self.operand, x.strip("{}").split(","))) for x in parts
            )
            return [f"({d}) = yield ('mma {place}', (({of[0]}), ({of[1]}), ({of[2]})))"]
        raise NotImplementedError(f"{how}.{'.'.join(kinds)}")

    def _exchange(
        self, place: int, how: str, kinds: list[str], parts: list[str]
    ) -> list[str]:
        to = self.operand(parts[0].split("|")[0])
        of = [self.operand(x) for x in parts[1:]]
        assert "|" not in parts[0] and of[-1] == str(M32), "not all lanes take part"
        what = f"{how}.{next(x for x in kinds if x != 'sync')}"
        request = of[0]
        if what == "shfl.idx" and of[1].isdigit() and of[2] == "31":
            what = f"lane.{int(of[1]) & 31}"
        elif how == "shfl":
            request = f"({of[0]}, {of[1]}, {of[2]})"
        return [f"{to} = yield ('{what} {place}', {request})"]


def _extended(kind: str, value: str) -> str:
    """Extends what is loaded to the register, which may be wider."""
    if kind[0] != "s":
        return value
    half = 1 << int(kind[1:]) - 1
    return f"(({value}) ^ {half}) - {half} & {M64}"


def _split(rest: str) -> list[str]:
    """Splits operands at commas that are not in braces."""
    return [x.strip() for x in re.findall(r"(?:\{[^}]*\}|[^,{])+", rest)]
