# SPDX-License-Identifier: Apache-2.0
"""How a protocol's launches are written down: worlds, launches and agents.

The methods of an agent do what the functions of `flags.mojo` do, in the same orders.
`store` and `load` are ordinary accesses. A step says where it stands: `CODE` of the
module that calls the method, and the calling function, which is named as in `mojo/`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .memory import SENTINEL, Order, Place, Step

RANK_WORDS = set(
    "staged_token dispatch_message message_flag dispatch_count dispatch_done"
    " dispatch_n_tokens entry metadata token inline_token"
    " combine_message partial combine_count combine_done"
    " dispatch_put staged_count combine_put staged_row staged_partial".split()
)
"""Words and payloads in symmetric memory, by the functions of `mojo/` that locate them.
A flag in a message has the message's place."""

HEADER = (
    "dispatch_sent dispatch_received combine_sent combine_received combine_of"
    " dispatch_drained combine_drained n_tokens"
).split()
"""Words of the counters' header; `n_tokens` by the parity of the generation."""

LOCAL_WORDS = {
    *HEADER,
    *("pair_row", "received_tokens", "received_rows"),  # of the last dispatch
    "blocks_arrived",
}
"""Words that a rank keeps between launches (`counters.mojo`)."""

FUSED = ("dispatch", "combine")
LINK = "link"
"""The agents that carry what a rank asks of its link to other hosts."""
THRICE_EACH = ("dispatch",) * 3 + ("combine",) * 3
"""Nothing but done words is between two launches that write to the same places."""

Token = tuple[int, ...]
"""The expert of each choice of a token, -1: none."""


def replays(body: tuple[str, ...], n: int, first: tuple[str, ...] = ()) -> dict:
    """A captured graph that is replayed, maybe after launches of another one."""
    return {"program": first + body * n, "replayed": (len(first), len(body))}


@dataclass(frozen=True)
class World:
    """Ranks, what they send, and what they run."""

    name: str
    model: str  # The module with the launches
    protocol: str  # `by_expert`, `by_rank` or `all_gather`
    program: tuple[str, ...]  # The ops that every rank runs, in their order
    routing: tuple[tuple[tuple[Token, ...], ...], ...]
    """`[dispatch][rank][token][k]`: experts; dispatch `n` takes row `n` modulo their
    number."""
    has_sums: bool = False
    n_experts: int = 0  # 0: one a rank
    n_blocks: int = 1
    has_metadata: bool = False
    """Whether a token takes what the router chose for it along, in an all-gather."""
    in_turn: bool = False
    has_shared_expert: bool = False
    streams: bool = False  # CPU ranks copy with streaming stores
    ranks_per_host: int = 0  # 0: all ranks are on one host
    generation_bits: int = 32
    first_generation: int = 0  # What the counters of generations hold at first
    replayed: tuple[int, int] = (0, 1000)
    """Which launches are replays of one captured graph: the first, and how many are
    in a graph."""
    is_one_agent: bool = False
    """Whether one agent does what all agents of a launch do: then there are few
    enough orders to try each."""
    mutation: Any = None

    @property
    def n_ranks(self) -> int:
        return len(self.routing[0])

    @property
    def ranks(self) -> range:
        return range(self.n_ranks)

    @property
    def experts(self) -> range:
        return range(self.n_experts or self.n_ranks)

    def rank_of(self, expert: int) -> int:
        return expert

    def experts_of(self, rank: int) -> list[int]:
        return [e for e in self.experts if self.rank_of(e) == rank]

    def tokens(self, dispatch: int, rank: int) -> tuple[Token, ...]:
        """The tokens of a rank in the `dispatch`-th dispatch, from 1."""
        return self.routing[(dispatch - 1) % len(self.routing)][rank]

    def count(self, dispatch: int, src_rank: int, expert: int) -> int:
        tokens = self.tokens(dispatch, src_rank)
        return sum(e == expert for token in tokens for e in token)

    def owners(self, dispatch: int, rank: int, token: int) -> list[int]:
        """The ranks that hold experts of a token, in order."""
        experts = self.tokens(dispatch, rank)[token]
        return sorted({self.rank_of(e) for e in experts if e >= 0})

    def messages(self, dispatch: int, src: int) -> list[tuple[int, int, int, int]]:
        """Token, k, expert and slot of each choice that a rank sends."""
        slots: dict[int, int] = {}
        messages = []
        for t, experts in enumerate(self.tokens(dispatch, src)):
            for k, expert in enumerate(experts):
                if expert >= 0:
                    messages.append((t, k, expert, slots.get(expert, 0)))
                    slots[expert] = slots.get(expert, 0) + 1
        return messages

    def received_messages(self, n: int, rank: int) -> list[tuple[int, ...]]:
        """Source, token, k, expert and slot of each choice that a rank receives."""
        items = [(src, *m) for src in self.ranks for m in self.messages(n, src)]
        return [item for item in items if self.rank_of(item[3]) == rank]

    def arriving(self, n: int, src: int, rank: int) -> list[int]:
        """The tokens of a source that have rows on a rank."""
        tokens = range(len(self.tokens(n, src)))
        return [t for t in tokens if rank in self.owners(n, src, t)]

    def is_far(self, rank: int, other: int) -> bool:
        """Says whether only a link leads from a rank to another."""
        n = self.ranks_per_host or self.n_ranks
        return rank // n != other // n

    def has(self, mutation: str) -> bool:
        """Says whether a mutation of that name is on."""
        return self.mutation is not None and mutation in self.mutation.switches

    @property
    def is_gpu(self) -> bool:
        return self.model != "cpu"

    def initial(self, place: Place) -> tuple[Any, Any]:
        kind, g = place[0], self.first_generation
        if kind in ("inline_token", "partial") and self.is_gpu:
            return SENTINEL, None
        if kind in ("dispatch_done", "combine_done"):
            is_of_both = self.is_gpu and self.protocol == "by_rank"
            return ((g, g) if is_of_both else (g, 0)), (0, 0)
        if kind in HEADER and kind.endswith(("_sent", "_received", "_drained")):
            return g, None
        return (0 if kind in LOCAL_WORDS else (0, 0)), None

    def snapshot(self, rank: int, read: Callable[[Place], Any]) -> Any:
        words = [(word, read((word, rank))) for word in HEADER]
        for parity in (0, 1):
            words.append((f"n_tokens[{parity}]", read(("n_tokens", rank, parity))))
        return tuple(words)

    def build(self, rank: int, position: int, snapshot: Any) -> Any:
        launch = Launch(self, rank, position, dict(snapshot))
        importlib.import_module(f".{self.model}", __package__).phase(launch)
        if self.has("clears"):
            self._clear(launch)
        if not self.is_one_agent:
            return launch.agents
        steps = [s for _, of in launch.agents for s in of if s.kind != "join"]
        return [("all", steps)]

    def _clear(self, launch: Launch) -> None:
        """The mutation: begins with zero in all words that it waits for."""
        from .mutations import reset

        steps = [step for _, of in launch.agents for step in of]
        awaited = {s.place: reset(s) for s in steps if s.accept[:1] == ("not zero",)}
        launch.agents.append(("clearing warp", list(awaited.values())))

    def runs_ahead(self, place: Place) -> bool:
        # Done words of GPU ranks; those of CPU ranks are awaited by equality.
        return self.is_gpu and place[0] in ("dispatch_done", "combine_done")

    def is_local(self, place: Place) -> bool:
        return place[0] in LOCAL_WORDS


@dataclass
class Launch:
    """A launch of one rank while it is written down."""

    world: World
    rank: int
    position: int
    before: dict[str, Any]  # The header when it begins
    agents: list[tuple[str, list[Step]]] = field(default_factory=list)
    carried: dict[int, list[int]] = field(default_factory=dict)
    """The agents that carry what was asked of the link, by the rank that gets it."""
    fence: Step | None = None
    """The last fence; its agents are all that carry what came before."""

    def __post_init__(self) -> None:
        # By the program, not by any generation: what the messages must be of.
        self.rounds = dict.fromkeys(HEADER[:4], 0)
        """How often the rank has sent and received before."""
        self.answers = [0]
        """Which dispatch each combine answers."""
        for op in self.world.program[: self.position]:
            direction, _, phase = op.partition("_")
            self.rounds[f"{direction}_sent"] += phase != "wait"
            self.rounds[f"{direction}_received"] += phase != "async"
            if direction == "combine" and phase != "wait":
                self.answers.append(self.rounds["dispatch_received"])

    @property
    def op(self) -> str:
        return self.world.program[self.position]

    @property
    def direction(self) -> str:
        return self.op.partition("_")[0]

    @property
    def sends(self) -> bool:
        return not self.op.endswith("_wait")

    @property
    def receives(self) -> bool:
        return not self.op.endswith("_async")

    def returns_early(self) -> bool:
        """The mutation: a rank without tokens leaves a dispatch at once."""
        is_on = self.world.has("early return of a rank with zero tokens")
        is_sent = self.direction == "dispatch" and self.sends
        n, _ = self.next("dispatch_sent")
        return is_on and is_sent and not self.world.tokens(n, self.rank)

    def next(self, word: str) -> tuple[int, int]:
        """The round that a launch makes of `dispatch_sent` or the like, and its
        generation."""
        return self.rounds[word] + 1, self.following(self.before[word])

    def following(self, generation: int) -> int:
        largest = (1 << self.world.generation_bits) - 1
        return generation + 1 if generation != largest else 2

    def parity(self, generation: int, n: int) -> int:
        """Which half the `n`-th dispatch has of what is kept for two."""
        if not self.world.has("parity kept per handle"):
            return generation % 2
        # Fixed when the graph was captured: the dispatches of a replay, counted.
        ops = enumerate(self.world.program)
        sending = [i for i, op in ops if op in ("dispatch", "dispatch_async")]
        first, length = self.world.replayed
        handles: dict[int, int] = {}
        for i in sending:
            replay = (i - first) // length if i >= first else -1
            handle = handles[replay] = handles.get(replay, -1) + 1
            if i == sending[n - 1]:
                return handle % 2
        raise AssertionError("there is no such dispatch")

    def agent(
        self, name: str, block: int | None = None, after: Iterable[int] = ()
    ) -> Agent:
        """Begins an agent; it waits for those in `after`."""
        name = name if block is None else f"block {block}, {name}"
        a = Agent(self, block, [])
        self.agents.append((name, a.steps))
        if after := tuple(after):
            a.emit(Step("join", "join", name, agents=after))
        return a

    def carrier(self, asking: Agent, to: int) -> Agent:
        """Begins an agent of the link, for one request. It knows what its rank knew; of
        what the link carries, only what a fence orders before it."""
        steps = [id(steps) for _, steps in self.agents]
        a = self.agent(LINK, after=[steps.index(id(asking.steps))])
        carried = self.carried.setdefault(to, [])
        if self.fence and (before := {*carried} & {*self.fence.agents}):
            a.emit(replace(self.fence, agents=tuple(sorted(before))))
        carried.append(len(self.agents) - 1)
        return a


@dataclass
class Agent:
    """A warp, or a few that do the same, while its steps are written down."""

    launch: Launch
    block: int | None
    steps: list[Step]

    def __post_init__(self) -> None:
        self.world, self.rank = self.launch.world, self.launch.rank
        self.before, self.next = self.launch.before, self.launch.next

    def emit(self, step: Step) -> None:
        """Adds a step, as the mutation makes it."""
        mutation = self.world.mutation
        steps = [step] if mutation is None else mutation.change(step)
        self.steps.extend(steps)

    def _do(self, kind: str, call: str, place: Place, order: Order, **rest: Any) -> str:
        """Adds what the caller's caller does; returns where that stands."""
        frame = sys._getframe(2)
        where = frame.f_globals["CODE"] + frame.f_code.co_name
        self.emit(Step(kind, call, where, place, order, **rest))
        return where

    def of_block(self, n: int) -> range:
        """Numbers below `n` that are this block's."""
        return range(self.block, n, self.world.n_blocks)

    def store(self, place: Place, value: Any, truth: Any = None) -> None:
        self._do("write", "store", place, Order.PLAIN, value=value, truth=truth)

    def stream(self, place: Place, truth: Any) -> None:
        order = Order.STREAMED if self.world.streams else Order.PLAIN
        self._do("write", "store", place, order, value=truth, truth=truth)

    def load(self, place: Place, truth: Any = None, is_: Any = None) -> None:
        self._do("read", "load", place, Order.PLAIN, value=is_, truth=truth)

    def load_of(self, place: Place, generation: int, truth: Any) -> None:
        """Reads a word that must show a generation."""
        accept = ("equals", generation)
        self._do("read", "load", place, Order.PLAIN, truth=truth, accept=accept)

    def load_of_another_generation(self, place: Place, generation: int) -> None:
        """Reads a word that must not show a generation."""
        self._do("read", "load", place, Order.PLAIN, accept=("differs", generation))

    def publish(self, place: Place, value: Any, truth: Any) -> None:
        a, call = self, "publish"
        if self.world.is_far(self.rank, place[1]):
            a, call = self.launch.carrier(self, place[1]), "signal"
        a._do("write", call, place, Order.RELEASE, value=value, truth=truth)

    def put(self, place: Place, staged: Place) -> None:
        """Copies what is staged when the link carries it: any time from now on."""
        a = self.launch.carrier(self, place[1])
        a._do("put", "put", place, Order.PLAIN, places=(staged,))

    def fence(self) -> None:
        """Orders what the link carries from now on after all before, for each rank."""
        frame = sys._getframe(1)
        where = frame.f_globals["CODE"] + frame.f_code.co_name
        before = tuple(x for of in self.launch.carried.values() for x in of)
        self.launch.fence = Step("join", "fence", where, agents=before)

    def store_relaxed(self, place: Place, value: Any, truth: Any) -> None:
        order = Order.RELAXED
        self._do("write", "store_relaxed_sys", place, order, value=value, truth=truth)

    def load_acquire(self, place: Place, accept: Any, truth: Any) -> None:
        order = Order.ACQUIRE
        self._do("await", "load_acquire_sys", place, order, accept=accept, truth=truth)

    def load_relaxed(self, place: Place, accept: Any, truth: Any) -> None:
        order = Order.RELAXED
        self._do("await", "load_relaxed_sys", place, order, accept=accept, truth=truth)

    def drain_stores(self) -> None:
        self._do("drain", "drain_stores", (), Order.PLAIN)

    def poll(self, places: tuple, accept: Any, truth: Any, then: tuple) -> None:
        """Polls words a few times, and stores a word only if all are there."""
        wanted = dict(truth=truth, accept=accept, places=places, skip=1)
        order = Order.ACQUIRE
        where = self._do("poll", "load_acquire_sys", places[0], order, **wanted)
        place, value = then
        self.steps.append(Step("write", "store", where, place, Order.PLAIN, value))

    def arrive(self, then: Callable[[Agent], None]) -> None:
        """Counts a block; the last one puts the word back, and does `then`."""
        place = ("blocks_arrived", self.rank)
        last = Agent(self.launch, self.block, [])
        last._do("write", "store", place, Order.PLAIN, value=0)
        then(last)
        before, wanted = len(self.steps), dict(value=self.world.n_blocks)
        wanted["skip"] = len(last.steps)
        self._do("arrive", "arrive_on_gpu", place, Order.ACQUIRE_RELEASE, **wanted)
        if len(self.steps) > before:
            self.steps.extend(last.steps)
