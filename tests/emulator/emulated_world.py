# SPDX-License-Identifier: Apache-2.0
"""The memory of an emulated group's ranks, and its launches."""

import contextlib
import functools
import itertools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from max_ep.extension import sizes_in
from max_ep.quantize import bfloat16_to_float32, float32_to_bfloat16
from max_ep.waits import n_words, named, place
from tests.children import ALL_CASES
from tests.codegen.kernels import compiled, counter_word
from tests.emulator import Clock, Emulated, Launch, Memory, Races, Trials, run
from tests.emulator.grid import (
    IDLE_ROUNDS,
    IDLE_ROUNDS_FOR_EVER,
    without_collector,
)
from tests.emulator.link import Link, with_calls

N_THREADS, N_BLOCKS = 320, 2
LONG_MS = 1 << 30
MASKS_BIT = 8
_SPLIT = ("many", "shared", "expert", "late_split", "keeps")
_SPLIT += ("hosts_rows",)
_FUSED = "sums rows expert_shared fp8_sums late masks drops work fp8 nvfp4".split()
_FUSED += "hosts_sums hosts_expert hosts_many hosts_relay".split()
_FUSED += "long wide masks_rows padded padded_expert".split()
if ALL_CASES:  # `emit_slow` has them
    _SPLIT += "hosts_late_split", "hosts_relay_late_split"
    _FUSED += "hosts_drops hosts_late hosts_fp8_sums hosts_relay_fp8_sums".split()
    _FUSED += "drops_rows late_wide hosts_relay_long mxfp8_sums".split()
FORMS = dict.fromkeys(_FUSED, ("",)) | dict.fromkeys(_SPLIT, ("_async", "_wait"))
"""The groups of `emulated.mojo`, and which launches they have."""


@functools.cache
def text_of(name: str, program: str = "emulated.mojo") -> str:
    return with_calls((compiled(program) / f"sm_90a.{name}.s").read_text())


@functools.cache
def kernel(
    name: str, program: str = "emulated.mojo", trials: Trials | None = None
) -> Emulated:
    """Reads one of the kernels that a program compiles."""
    return Emulated(text_of(name, program), trials)


@dataclass
class Sizes:
    """What `emulated.mojo` prints of a group."""

    hidden: int
    region: int
    counters: int
    masked: int
    dispatch_recv: int
    dispatch_counts: int
    combine_recv: int
    combine_counts: int
    is_shared: int
    n_experts: int
    n_ranks: int
    max_tokens: int
    top_k: int
    dispatch_msg: int
    combine_msg: int
    protocol: int

    @property
    def n_local(self) -> int:
        return -(-self.n_experts // self.n_ranks)

    def experts_of(self, rank: int) -> list[int]:
        """The experts whose rows a rank makes, in their order."""
        first = rank * self.n_local
        shared = [self.n_experts] * self.is_shared
        return shared + [*range(first, first + self.n_local)]


def bf16(x: np.ndarray) -> bytes:
    """Rounds, but for NaN, which keep their bits."""
    x = x.astype(np.float32)
    whole = x.view(np.uint32) >> 16
    return np.where(np.isnan(x), whole, float32_to_bfloat16(x)).astype("<u2").tobytes()


def as_given(tokens: np.ndarray) -> bytes:
    """Returns numbers in bfloat16; bytes are quantized tokens, as they are."""
    return tokens.tobytes() if tokens.dtype == np.uint8 else bf16(tokens)


def of_bf16(memory: Memory, at: int, n_rows: int, n: int) -> np.ndarray:
    return bfloat16_to_float32(memory.array(at, np.uint16, n_rows, n))


def words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


@functools.cache
def printed(name: str) -> tuple[Sizes, SimpleNamespace]:
    """Returns what is printed of a group: its sizes, and the words of its regions."""
    lines = (compiled("emulated.mojo") / "printed").read_text().splitlines()
    (line,) = (x.split()[1:] for x in lines if x.split()[0] == name)
    (said,) = (x.split(" ", 1)[1] for x in lines if x.split()[0] == f"{name}.sizes")
    return Sizes(*map(int, line)), sizes_in(said)


@functools.cache
def places(name: str) -> list[dict[str, set[int]]]:
    """Finds for each rank where peers write each kind of words into its region."""
    sizes, words = printed(name)
    ranks, kinds = range(sizes.n_ranks), _awaited_kinds(words)
    found: list[dict[str, set[int]]] = [{x.name: set() for x in kinds} for _ in ranks]
    for kind, reader, peer in itertools.product(kinds, ranks, ranks):
        i = np.arange(n_words(words, kind, reader, peer))
        for number in range(kind.n_runs):
            found[reader][kind.name].update(place(kind, peer, i, number).tolist())
    return found


def _awaited_kinds(words: SimpleNamespace) -> list[SimpleNamespace]:
    """Kinds of words; one more shows others what a rank awaits."""
    return [kind for kind in words.gpu if kind.name != "begin of combine"]


class World:
    """The memory of all ranks of a group, and its launches."""

    trials: Trials | None = None
    """What is tried in its kernels."""

    n_blocks = N_BLOCKS

    def __init__(self, name: str, timeout_ms=LONG_MS, finds_races=True):
        (self.sizes, self.words), self.polled = printed(name), set()
        s = self.sizes
        self.name, self.seed = name, 0
        self.is_padded = name.startswith("padded")
        self.has_sums = s.protocol % MASKS_BIT in (3, 7)
        self.memory, self.clock = Memory(1 << 24, begin=1 << 17), Clock()
        self.timeout_ms = timeout_ms
        self.forms = FORMS.get(name, ("",))  # of given rows: fused
        self.queues: dict[int, list] | None = None
        self.finds_races = finds_races
        ranks = range(s.n_ranks)
        n_bytes = s.region + self.words.put_bytes
        self.regions = [self.memory.allocate(n_bytes) for _ in ranks]
        self.link, self.per_host = None, 1 if name == "hosts_many" else 2
        if name.startswith("hosts"):
            self.link = Link(self.regions, n_bytes, self.per_host, len(name))
        self.counters = [self.memory.allocate(4 * s.counters) for _ in ranks]
        self.spare = [self.memory.allocate(4 * s.counters) for _ in ranks]
        # A lane loads each word of the header; launches record the last ones meanwhile.
        header = counter_word("BROKEN"), counter_word("N_HEADER_WORDS")
        unwatched = [*range(*header)]
        self.unwatched = []
        if s.protocol & MASKS_BIT:
            # Blocks need not agree on who is masked, nor when heartbeats came.
            unwatched += range(s.masked, s.masked + s.n_ranks + 1)
            end = s.counters - s.max_tokens - s.n_local
            unwatched += range(end - 2 * s.n_ranks, end)
            beat = named(self.words.gpu, "heartbeat")
            beats = [place(beat, rank, 0) + i for rank in ranks for i in (0, 4)]
            self.unwatched = [x + i for x in self.regions for i in beats]
        self.unwatched += [x + 4 * i for x in self.counters for i in unwatched]
        # One thread writes what it has recorded behind the code.
        first = counter_word("FAILURE")
        record = range(first + 1, first + counter_word("N_FAILURE_WORDS"))
        self.unread = [x + 4 * i for x in self.counters for i in record]
        self.n_tokens = [0] * s.n_ranks
        for rank in ranks:
            # All flags seem to be of the first generation, and all data to be there.
            at = self.regions[rank]
            self.memory.bytes[at : at + s.region] = words(1 << 32) * (s.region // 8)
            self.set_up(rank, timeout_ms=timeout_ms)

    def set_up(self, rank, readmitted=-1, timeout_ms=LONG_MS, done=(0, 0)):
        s = self.sizes
        group = (s.n_experts, s.n_ranks, s.max_tokens, s.top_k)
        group += (s.dispatch_msg, s.combine_msg, s.protocol)
        setup = struct.pack(
            "<Qii?3x7iiII4x",
            *(self.regions[rank], rank, timeout_ms, True),
            *(*group, readmitted, *done),
        )
        params = [words(self.counters[rank]), words(self.spare[rank]), setup]
        launch = Launch(kernel("set_up", trials=self.trials), params, 2, 64)
        run([[launch]], self.memory, self.clock)

    def buffers(self, rank: int, recv: int, counts: int) -> list[int]:
        mapped = self._mapped(rank)
        found = [region + recv for region in mapped]
        return found + [x + counts for x in mapped] + [self.counters[rank]]

    def _mapped(self, rank: int) -> list[int]:
        """Lists the regions of a rank's host."""
        if self.link is None:
            return self.regions
        first = rank - rank % self.per_host
        return self.regions[first : first + self.per_host]

    def put_buffers(self, rank: int, at: int) -> list[int]:
        return [x + self.sizes.region + at for x in self._mapped(rank)]

    def run(self, phase: str, params: dict[int, list[int]]) -> None:
        made = kernel(f"{phase}.{self.name}", trials=self.trials)
        shape = self.n_blocks, N_THREADS
        self._enqueue(
            {rank: Launch(made, [words(*x)], *shape) for rank, x in params.items()}
        )

    def _enqueue(self, of_ranks: dict[int, Launch | Callable[[], None]]) -> None:
        if self.queues is None:
            with self.without_waiting():
                return self._enqueue(of_ranks)
        for rank, launch in of_ranks.items():
            self.queues.setdefault(rank, []).append(launch)

    @contextlib.contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Runs at its end all that is in it: no rank waits till others have ended."""
        self.queues = {}
        yield
        queues, self.queues = self.queues, None
        self._run(queues)

    @without_collector()
    def _run(self, queues: dict[int, list]) -> None:
        self.seed += 1
        # Where ranks have a deadline, warps that are slow would miss it.
        is_even = self.timeout_ms != LONG_MS
        # There several warps settle the same count, or count the same rows.
        lets_equal = "masks" in self.name or "drops" in self.name
        how = self.unwatched, lets_equal
        how = *how, self.link.n_more if self.link else 0, self.unread
        found = Races(len(queues), self.n_blocks, N_THREADS, *how)
        if self.link:
            self.link.found = found if self.finds_races else None
        how = self.seed, is_even, found if self.finds_races else None
        n_idle = IDLE_ROUNDS if is_even else IDLE_ROUNDS_FOR_EVER
        run(queues.values(), self.memory, self.clock, *how, n_idle, self.link)
        for rank, threads in zip(queues, found.threads):
            self._check_polled(rank, set().union(*(x.polled for x in threads)))

    def _check_polled(self, rank: int, addresses: set[int]) -> None:
        """In regions a kernel polls only what Mojo lists, and only in its rank's own.
        Inline tokens of its own, which it loads alike, are elsewhere."""
        for of_rank, region in enumerate(self.regions):
            inside = range(region, region + self.sizes.region)
            for at in filter(inside.__contains__, addresses):
                of = places(self.name)[rank].items()
                kinds = {kind for kind, there in of if at - region in there}
                where = f"rank {rank} polls {at - region} of rank {of_rank}"
                assert of_rank == rank and kinds, f"{where}, which is in no list"
                self.polled |= kinds

    def awaited(self) -> set[str]:
        """Names the kinds that a phase awaits."""
        return {kind.name for kind in _awaited_kinds(self.words) if kind.phase}

    def word(self, rank: int, name: str) -> int:
        return self.memory.load(self.counters[rank] + 4 * counter_word(name), 4)

    def masked(self, rank: int, counters: list[int] | None = None) -> list[int]:
        at = (counters or self.counters)[rank] + 4 * self.sizes.masked
        return [self.memory.load(at + 4 * i, 4) for i in range(self.sizes.n_ranks)]

    def dispatch(self, tokens, ids, weights, forms=None, ranks=None, n_rows_max=None):
        """Returns the outputs of each rank."""
        s, memory = self.sizes, self.memory
        params, outputs = {}, {}
        ranks = range(s.n_ranks) if ranks is None else ranks
        for rank in ranks:
            n_rows = n_rows_max or max(1, sum(map(len, rows_of(rank, ids, s))))
            self.n_tokens[rank] = len(tokens[rank])
            given = [
                memory.put(as_given(tokens[rank])),
                memory.put(ids[rank].astype(np.int32).tobytes()),
                memory.put(weights[rank].astype(np.float32).tobytes()),
                len(tokens[rank]),
                0,  # no copy of the ids
            ]
            out = [
                memory.allocate(n_rows * s.hidden * 2),
                memory.allocate(4 * (s.n_local + s.is_shared + 1)),
                memory.allocate(8 * (s.n_local * s.n_ranks + s.is_shared)),
                memory.allocate(8 * n_rows),
            ]
            # In tiles of 128 rows, and each expert begins with one.
            n_more = 128 * (s.n_local + 1) if self.name == "nvfp4_tiles" else 0
            scales = memory.allocate((n_rows + n_more) * s.hidden // 8)
            rows = {"fp8": [scales, n_rows], "nvfp4_tiles": [scales, 0]}.get(
                self.name, [scales] if "fp4" in self.name else [0] * 3
            )
            params[rank] = [*given, out[0], *rows, n_rows, *out[1:]]
            params[rank] += self.buffers(rank, s.dispatch_recv, s.dispatch_counts)
            params[rank] += self.put_buffers(rank, 0)
            made = memory.allocate(n_rows * s.hidden * 2)
            outputs[rank] = Output(self, rank, n_rows, *out, scales, made)
        for form in forms or self.forms:
            self.run(f"dispatch{form}", params)
        return outputs

    def combine(self, outputs, weights, forms=None, n_rows=None):
        """Runs the experts, then a combine, which is given `n_rows` if not all; returns
        where each rank's results are, and how many."""
        s, memory = self.sizes, self.memory
        params, results = {}, {}
        for rank, output in outputs.items():
            given = [output.made, n_rows or output.n_rows_max]
            n = self.n_tokens[rank]
            results[rank] = memory.allocate(max(1, n * s.hidden * 2)), n
            router = memory.put(weights[rank].astype(np.float32).tobytes())
            combined = [*results[rank], router, 0, 0, 0]  # no biases
            if not self.has_sums:
                given.append(output.src_info)
            params[rank] = given + combined
            params[rank] += self.buffers(rank, s.combine_recv, s.combine_counts)
            params[rank] += self.put_buffers(rank, self.words.dispatch_put_bytes)
        self._enqueue({rank: output.run_experts for rank, output in outputs.items()})
        for form in forms or self.forms:
            self.run(f"combine{form}", params)
        return results

    def numbers(self, at: int, n_rows: int) -> np.ndarray:
        return of_bf16(self.memory, at, n_rows, self.sizes.hidden)


@dataclass
class Output:
    """What a dispatch has delivered to a rank."""

    world: World
    rank: int
    n_rows_max: int
    rows: int
    offsets: int
    expert_ids: int
    src_info: int
    scales: int
    made: int
    """What experts make of the rows."""

    def read(self) -> tuple[np.ndarray, ...]:
        """Reads offsets, rows, and token and k of each row; packs what is padded."""
        s, memory = self.world.sizes, self.world.memory
        if self.world.is_padded:
            counts = memory.array(self.offsets, np.int32, s.n_local)
            places = self._places(counts)
            rows = self.world.numbers(self.rows, self.n_rows_max)[places]
            info = memory.array(self.src_info, np.int32, self.n_rows_max, 2)[places]
            return np.cumsum([0, *counts]), rows, info
        offsets = memory.array(self.offsets, np.uint32, s.n_local + s.is_shared + 1)
        n_rows = int(offsets[-1])
        info = memory.array(self.src_info, np.int32, n_rows, 2)
        n = s.n_local + s.is_shared
        ids = memory.array(self.expert_ids, np.int32, n)
        np.testing.assert_array_equal(ids, range(n))
        return offsets, self.world.numbers(self.rows, n_rows), info

    def _places(self, counts: np.ndarray) -> np.ndarray:
        """Finds the rows of padded experts."""
        s = self.world.sizes
        of_expert = np.arange(s.n_ranks * s.max_tokens)
        return np.flatnonzero(of_expert < counts[:, np.newaxis])

    def run_experts(self) -> None:
        """Adds its expert's number to each row."""
        offsets, rows, _ = self.read()
        counts = np.diff(offsets.astype(int))
        places = self._places(counts) if self.world.is_padded else range(len(rows))
        sizes = self.world.sizes
        made = np.zeros((self.n_rows_max, sizes.hidden))
        experts = np.repeat(sizes.experts_of(self.rank), counts)
        made[places] = rows + experts[:, np.newaxis]
        self.world.memory.bytes[self.made : self.made + 2 * made.size] = bf16(made)


def rows_of(rank, ids, sizes) -> list[list[tuple[int, int, int]]]:
    """Lists source, token and k of the rows of each expert of a rank, in order."""
    found: list[list] = []
    for expert in sizes.experts_of(rank):
        if expert == sizes.n_experts and sizes.is_shared and not found:
            found.append([(rank, token, -1) for token in range(len(ids[rank]))])
            continue
        found.append([])
        for src, of_rank in ids.items():
            if expert < sizes.n_experts:
                choices = [(src, *x) for x in np.argwhere(of_rank == expert).tolist()]
                found[-1] += choices[: sizes.max_tokens]
    return found
