# SPDX-License-Identifier: Apache-2.0
"""How a protocol's launches are written down: worlds, launches and agents.

The methods of an agent do what the functions of `flags.mojo` do, in the same orders.
`store` and `load` are ordinary accesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .memory import SENTINEL, Order, Place, Step

CALLS: dict[str, tuple[str, Order]] = {
    "publish": ("write", Order.RELEASE),
    "load_acquire": ("await", Order.ACQUIRE),
    "store_relaxed": ("write", Order.RELAXED),
    "load_relaxed": ("await", Order.RELAXED),
    "block_add": ("arrive", Order.RELAXED),
    "block_arrive": ("arrive", Order.RELEASE),
    "block_publish": ("write", Order.RELEASE),
    "block_load_acquire": ("await", Order.ACQUIRE),
    "arrive": ("arrive", Order.ACQUIRE_RELEASE),
    "drain_stores": ("drain", Order.PLAIN),
}
"""Each atomic: what it does, and how it is ordered."""

OLDER = -1
"""Stands for every generation that is not the last."""

RANK_WORDS = {
    # dispatch
    "dispatch_staged": "own token that waits, encoded",
    "dispatch_message": "message by expert, and its source info",
    "dispatch_message_flag": "the flag in that source info, on GPUs",
    "dispatch_count": "messages of a pair",
    "dispatch_done": "what a reader has read; on GPUs by rank of both",
    "dispatch_n_tokens": "tokens of a source",
    "entry": "where a choice goes",
    "metadata": "what the router chose for a token of an all-gather",
    "token": "token by rank",
    "inline_token": "the same, its own flag",
    "chunk_flag": "a chunk of a token has come",
    # combine
    "combine_message": "expert row that goes back",
    "combine_message_flag": "the flag in its source info, on GPUs",
    "partial": "partial sum",
    "combine_count": "rows of an expert",
    "combine_done": "what a reader has read",
}
"""Words and payloads in symmetric memory: those that `layout.mojo` locates, and the
two flags inside of messages."""

LOCAL_WORDS = {
    "dispatch_sent": "header",
    "dispatch_received": "header",
    "combine_sent": "header",
    "combine_received": "header",
    "combine_of": "header",
    "dispatch_drained": "header",
    "combine_drained": "header",
    "n_tokens": "header, by the parity of the generation",
    "most_received": "header",
    "choices": "by the parity of the generation",
    "slots": "of this dispatch",
    "pair_rows": "of the last dispatch",
    "received_tokens": "of the last dispatch",
    "received_rows": "of the last dispatch",
    "received_weights": "of the last dispatch",
    "blocks_done": "blocks that have arrived",
}
"""Words that a rank keeps between launches (`counters.mojo`)."""

BLOCK_WORDS = {
    "INDEXED",
    "TOKENS_READY",
    "SUMMED",
    "COUNTED",
    "PAIRS_READY",
    "sums",
    "n_tokens_of",
    "block_pair_rows",
}
"""Words in the shared memory of a block."""

HEADER = tuple(word for word, where in LOCAL_WORDS.items() if where == "header")

Token = tuple[int, ...]
"""The expert of each choice of a token, -1: none."""


@dataclass(frozen=True)
class World:
    """Ranks, what they send, and what they run."""

    name: str
    protocol: str
    """`by_expert`, `by_rank` or `all_gather`."""
    program: tuple[str, ...]
    """The ops that every rank runs, in their order."""
    routing: tuple[tuple[tuple[Token, ...], ...], ...]
    """`[dispatch][rank][token][k]`: experts; dispatch `n` takes row `n` modulo their
    number."""
    target: str = "gpu"
    has_sums: bool = False
    n_experts: int = 0
    """0: one a rank."""
    n_local_experts: int = 1
    n_blocks: int = 1
    n_index_warps: int = 1
    most_counting_warps: int = 2
    """How many of them read counts, the last ones; if there are so many."""
    n_chunks: int = 1
    """Parts of a token that announce themselves each by itself."""
    n_chunks_at_once: int = 1
    """Parts that are sent before any of them is announced."""
    indexes_by_blocks: bool = False
    """Whether blocks write the entries of a run of choices each."""
    indexes_in_lanes: bool = False
    """Whether tokens do not wait for the entries, which are written as soon."""
    has_metadata: bool = False
    """Whether a token takes what the router chose for it along, in an all-gather."""
    n_inline_tokens: int = 2
    """Tokens of a rank up to which they are their own flags."""
    shares_gpu: bool | None = None
    """Whether ranks share a GPU; `None`: if launches run one after another."""
    in_turn: bool = False
    has_shared_expert: bool = False
    streams: bool = False
    """Whether CPU ranks copy with streaming stores."""
    generation_bits: int = 32
    first_generation: int = 0
    """What the counters of generations hold at first."""
    replayed: tuple[int, int] = (0, 1000)
    """Which launches are replays of one captured graph: the first, and how many are
    in a graph."""
    may_be_refused: bool = False
    is_one_agent: bool = False
    """Whether one agent does what all agents of a launch do: then there are few
    enough orders to try each."""
    mutation: Any = None

    # ------------------------------------------------------------ sizes, places

    @property
    def n_ranks(self) -> int:
        return len(self.routing[0])

    @property
    def n_launches(self) -> int:
        return len(self.program)

    @property
    def ranks(self) -> range:
        return range(self.n_ranks)

    @property
    def experts(self) -> range:
        return range(self.n_experts or self.n_ranks * self.n_local_experts)

    def rank_of(self, expert: int) -> int:
        return expert // self.n_local_experts

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

    def has(self, mutation: str) -> bool:
        """Says whether a mutation of that name is on."""
        return self.mutation is not None and mutation in self.mutation.switches

    @property
    def n_counting_warps(self) -> int:
        return min(self.n_index_warps, self.most_counting_warps)

    @property
    def publishes_at_dispatch_end(self) -> bool:
        return self.publishes_at_combine_end or not self.has_sums

    @property
    def publishes_at_combine_end(self) -> bool:
        return self.in_turn if self.shares_gpu is None else self.shares_gpu

    # ------------------------------------------------------ what the machine asks

    def initial(self, place: Place) -> tuple[Any, Any]:
        kind = place[0]
        g = self.first_generation
        if kind in ("inline_token", "partial") and self.target == "gpu":
            return SENTINEL, None
        if kind.startswith(("dispatch_done", "combine_done")):
            return ((g, g) if self._one_done_word else (g, 0)), (0, 0)
        if kind in LOCAL_WORDS:
            is_generation = kind.endswith(("_sent", "_received", "_drained"))
            if kind in HEADER and is_generation and not kind.startswith("most"):
                return g, None
            return 0, None
        if kind in BLOCK_WORDS:
            return 0, None
        return (0, 0), None

    @property
    def _one_done_word(self) -> bool:
        return self.target == "gpu" and self.protocol != "by_expert"

    def snapshot(self, rank: int, read: Callable[[Place], Any]) -> Any:
        words = [(word, read((word, rank))) for word in HEADER]
        for parity in (0, 1):
            words.append((f"n_tokens[{parity}]", read(("n_tokens", rank, parity))))
        return tuple(words)

    def op(self, launch: int) -> str:
        return self.program[launch]

    def build(self, rank: int, launch: int, snapshot: Any) -> Any:
        from . import by_expert, by_rank, cpu

        written = Launch(self, rank, launch, dict(snapshot))
        op = written.op
        returns_rows = op.startswith("combine") and not self.has_sums
        if self.target == "cpu":
            cpu.OPS[op](written)
        elif self.protocol == "by_expert" or returns_rows:
            by_expert.OPS[op](written)
        else:
            by_rank.OPS[op](written)
        if self.has("clears"):
            self._clear(written)
        return _as_one_agent(written.agents) if self.is_one_agent else written.agents

    def _clear(self, launch: Launch) -> None:
        """The mutation: begins with zero in all words that it waits for."""
        from .mutations import reset

        words = {
            step.place: reset(step)
            for _, steps in launch.agents
            for step in steps
            if step.accept[:1] == ("not zero",)
        }
        launch.agents.append(("clearing warp", list(words.values())))

    def runs_ahead(self, place: Place) -> bool:
        # Done words of GPU ranks; those of CPU ranks are awaited by equality. How
        # far the first warp of a block is may be seen late.
        if place[0] == "INDEXED":
            return True
        return self.target == "gpu" and place[0] in ("dispatch_done", "combine_done")

    def simplify(self, place: Place, value: Any, read: Callable[[Place], Any]) -> Any:
        kind, rank = place[:2]
        if kind.endswith("_drained"):
            # It is only asked whether it is that of the last that was sent.
            is_last = value == read((kind.replace("drained", "sent"), rank))
            return value if is_last else OLDER
        return value

    def is_local(self, place: Place) -> bool:
        return place[0] in LOCAL_WORDS

    def lives_for_a_launch(self, place: Place) -> bool:
        return place[0] in BLOCK_WORDS


def _as_one_agent(agents: list[tuple[str, list[Step]]]) -> list[tuple[str, list[Step]]]:
    """Has one agent do what all of them do, one after another."""
    steps = [step for _, of in agents for step in of if step.kind != "join"]
    return [("all", steps)]


@dataclass
class Launch:
    """A launch of one rank while it is written down."""

    world: World
    rank: int
    position: int
    before: dict[str, Any]
    """The header when it begins."""
    agents: list[tuple[str, list[Step]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        earlier = self.world.program[: self.position]
        # By the program, not by any generation: what the messages must be of.
        self.dispatched = sum(op in ("dispatch", "dispatch_async") for op in earlier)
        self.dispatch_read = sum(op in ("dispatch", "dispatch_wait") for op in earlier)
        self.combined = sum(op in ("combine", "combine_async") for op in earlier)
        self.combine_read = sum(op in ("combine", "combine_wait") for op in earlier)
        read = 0
        answered = [0]
        for op in earlier:
            if op in ("dispatch", "dispatch_wait"):
                read += 1
            if op in ("combine", "combine_async"):
                answered.append(read)
        self.answers = answered
        """Which dispatch each combine answers."""

    @property
    def op(self) -> str:
        return self.world.program[self.position]

    def next(self, word: str) -> int:
        """`next_generation` of a generation in the header."""
        return self.following(self.before[word])

    def following(self, generation: int) -> int:
        largest = (1 << self.world.generation_bits) - 1
        return generation + 1 if generation != largest else 2

    def parity(self, generation: int, n: int) -> int:
        """Which half the `n`-th dispatch has of what is kept for two."""
        if not self.world.has("parity kept per handle"):
            return generation % 2
        # Fixed when the graph was captured: the dispatches of a replay, counted.
        sending = [
            i
            for i, op in enumerate(self.world.program)
            if op in ("dispatch", "dispatch_async")
        ]
        first, length = self.world.replayed
        handles: dict[int, int] = {}
        for i in sending:
            replay = (i - first) // length if i >= first else -1
            handle = handles[replay] = handles.get(replay, -1) + 1
            if i == sending[n - 1]:
                return handle % 2
        raise AssertionError("there is no such dispatch")

    def agent(self, name: str, after: Iterable[int] = ()) -> Agent:
        """Begins an agent; it waits for those in `after`."""
        steps: list[Step] = []
        self.agents.append((name, steps))
        written = Agent(self, steps)
        if after := tuple(after):
            written.emit(Step("join", "join", name, agents=after))
        return written


@dataclass
class Agent:
    """A warp, or a few that do the same, while its steps are written down."""

    launch: Launch
    steps: list[Step]

    def emit(self, step: Step) -> None:
        """Adds a step, as the mutation makes it."""
        mutation = self.launch.world.mutation
        steps = [step] if mutation is None else mutation.change(step, self.launch)
        self.steps.extend(steps)

    def _access(self, call: str, where: str, place: Place, **rest: Any) -> None:
        kind, order = CALLS[call]
        self.emit(Step(kind, call, where, place, order, **rest))

    # --------------------------------------------------------- ordinary accesses

    def store(self, where: str, place: Place, value: Any, truth: Any = None) -> None:
        self.emit(Step("write", "store", where, place, Order.PLAIN, value, truth))

    def stream(self, where: str, place: Place, value: Any, truth: Any = None) -> None:
        order = Order.STREAMED if self.launch.world.streams else Order.PLAIN
        self.emit(Step("write", "store", where, place, order, value, truth))

    def load(
        self, where: str, place: Place, truth: Any = None, is_: Any = None
    ) -> None:
        self.emit(Step("read", "load", where, place, Order.PLAIN, is_, truth))

    def load_of(self, where: str, place: Place, generation: int, truth: Any) -> None:
        """Reads a word that must show a generation."""
        accept = ("equals", generation)
        self.emit(Step("read", "load", where, place, Order.PLAIN, None, truth, accept))

    def load_of_another_generation(
        self, where: str, place: Place, generation: int
    ) -> None:
        """Reads a word that must not show a generation."""
        accept = ("differs", generation)
        self.emit(Step("read", "load", where, place, Order.PLAIN, accept=accept))

    # ------------------------------------------------------ those of flags.mojo

    def publish(self, where: str, place: Place, value: Any, truth: Any) -> None:
        self._access("publish", where, place, value=value, truth=truth)

    def store_relaxed(self, where: str, place: Place, value: Any, truth: Any) -> None:
        self._access("store_relaxed", where, place, value=value, truth=truth)

    def load_acquire(self, where: str, place: Place, accept: Any, truth: Any) -> None:
        self._access("load_acquire", where, place, accept=accept, truth=truth)

    def load_relaxed(self, where: str, place: Place, accept: Any, truth: Any) -> None:
        self._access("load_relaxed", where, place, accept=accept, truth=truth)

    def block_publish(
        self, where: str, place: Place, value: Any, truth: Any = None
    ) -> None:
        self._access("block_publish", where, place, value=value, truth=truth)

    def block_arrive(self, where: str, place: Place) -> None:
        self._access("block_arrive", where, place)

    def block_add(self, where: str, place: Place) -> None:
        self._access("block_add", where, place)

    def block_load_acquire(self, where: str, place: Place, at_least: int) -> None:
        self._access("block_load_acquire", where, place, accept=("at least", at_least))

    def drain_stores(self, where: str) -> None:
        self._access("drain_stores", where, ())

    def poll(
        self,
        where: str,
        places: tuple[Place, ...],
        accept: Any,
        truth: Any,
        then: list[tuple[Place, Any]],
    ) -> None:
        """Polls words a few times, and stores only if all are there."""
        steps = [
            Step("write", "store", where, place, Order.PLAIN, value)
            for place, value in then
        ]
        self.emit(
            Step(
                "poll",
                "load_acquire",
                where,
                places[0],
                Order.ACQUIRE,
                truth=truth,
                accept=accept,
                places=places,
                skip=len(steps),
            )
        )
        self.steps.extend(steps)

    def refuse(self, where: str) -> None:
        """Notes a failure; neither this agent nor any launch behind it goes on."""
        self.emit(Step("refuse", "refuse", where))

    def arrive(self, where: str, n: int, then: Callable[[Agent], None]) -> None:
        """Counts a block; the last of `n` puts the word back, and does `then`."""
        place = ("blocks_done", self.launch.rank)
        behind = Agent(self.launch, [])
        behind.emit(Step("write", "store", where, place, Order.PLAIN, 0))
        then(behind)
        before = len(self.steps)
        self._access("arrive", where, place, value=n, skip=len(behind.steps))
        if len(self.steps) > before:
            self.steps.extend(behind.steps)
