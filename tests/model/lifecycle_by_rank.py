# SPDX-License-Identifier: Apache-2.0
"""How launches on GPUs begin and end, in dispatch by rank and combine of sums.

The other two kernels begin and end in the same way.

Each block is counted once it has read the header; the last one advances the
generations. The next launch publishes what earlier ones have read. A word of each kind
is sent: a count, and data that is its own flag.
"""

from .launches import FUSED, THRICE_EACH, Agent, Launch, World, replays
from .memory import SENTINEL

CODE = "by rank: "


def header_word(a: Agent, *words: str) -> None:
    for word in words:
        a.load((word, a.rank), is_=a.before[word])


def advance_at_start(a: Agent) -> None:
    a.arrive(advance)


def advance(last: Agent) -> None:
    """In dispatch the same thread stores the number of tokens."""
    launch = last.launch
    moved = ("sent", "received")
    words = {f"{launch.direction}_{x}" for x in moved}
    if launch.direction == "dispatch":
        n, generation = last.next("dispatch_sent")
        place = ("n_tokens", last.rank, launch.parity(generation, n))
        last.store(place, len(last.world.tokens(n, last.rank)), ("n_tokens", n))
    for word in sorted(words):
        last.store((word, last.rank), last.next(word)[1])


def _publish_reads(a: Agent) -> None:
    """Publishes what the launches before have read."""
    received = "dispatch_received", "combine_received"
    word, truth = (
        tuple(of[word] for word in received)
        for of in (a.launch.before, a.launch.rounds)
    )
    for rank in a.world.ranks:
        a.publish(("dispatch_done", rank, a.rank), word, truth)


def await_readers(a: Agent) -> None:
    """Waits for readers, unless `poll_done_words` has seen them."""
    sent = f"{a.launch.direction}_sent"
    generation, n = a.before[sent], a.launch.rounds[sent]
    if a.before[f"{a.launch.direction}_drained"] == generation:
        return
    half = int(a.launch.direction == "combine")
    for rank in a.world.ranks:
        reached, truth = ("reached", half, generation), ("at least", half, n)
        a.load_acquire(("dispatch_done", a.rank, rank), reached, truth)


def poll_done_words(a: Agent) -> None:
    """Polls those of the other direction."""
    other = "combine" if a.launch.direction == "dispatch" else "dispatch"
    sent = f"{other}_sent"
    generation, n = a.before[sent], a.launch.rounds[sent]
    half = int(other == "combine")
    places = tuple(("dispatch_done", a.rank, rank) for rank in a.world.ranks)
    then = ((f"{other}_drained", a.rank), generation)
    a.poll(places, ("reached", half, generation), ("at least", half, n), then)


def publish_n_tokens(a: Agent) -> None:
    n, generation = a.next("dispatch_sent")
    await_readers(a)
    for rank in a.world.ranks:
        word = (generation, len(a.world.tokens(n, a.rank)))
        truth = ("n_tokens of", n, a.rank)
        a.store_relaxed(("dispatch_n_tokens", rank, a.rank), word, truth)


def _send_inline(a: Agent) -> None:
    n, _ = a.next("dispatch_sent")
    mine = a.of_block(len(a.world.tokens(n, a.rank)))
    if mine:
        await_readers(a)
    for t in mine:
        for to in a.world.owners(n, a.rank, t):
            truth = ("token", n, a.rank, t)
            a.store_relaxed(("inline_token", to, a.rank, t), truth, truth)


def share(a: Agent) -> None:
    """Awaits how many tokens each source sends."""
    n, generation = a.next("dispatch_received")
    for src in a.world.ranks:
        place, truth = ("dispatch_n_tokens", a.rank, src), ("n_tokens of", n, src)
        a.load_relaxed(place, ("equals", generation), truth)


def await_inline(a: Agent) -> None:
    n, _ = a.next("dispatch_received")
    items = [
        (src, t) for src in a.world.ranks for t in a.world.arriving(n, src, a.rank)
    ]
    for src, t in (items[i] for i in a.of_block(len(items))):
        place = ("inline_token", a.rank, src, t)
        a.load_relaxed(place, ("filled",), ("token", n, src, t))
        a.store(place, SENTINEL)


def send_partials(a: Agent) -> None:
    n, (m, _) = a.launch.rounds["dispatch_received"], a.next("combine_sent")
    items = [
        (src, t)
        for src in a.world.ranks
        for t in a.world.arriving(n, src, a.rank)
        if src != a.rank
    ]
    if mine := a.of_block(len(items)):
        await_readers(a)
    for src, t in (items[i] for i in mine):
        truth = ("partial", m, a.rank, src, t)
        a.store_relaxed(_partial(a, src, a.rank, t), truth, truth)


def _partial(a: Agent, to: int, owner: int, t: int) -> tuple:
    is_shared = a.world.has("dispatch and combine sharing a buffer")
    return ("inline_token" if is_shared else "partial", to, owner, t)


def add_tokens(a: Agent, n: int, of: int) -> None:
    """Adds up tokens of a combine, which answers the `n`-th dispatch."""
    m, _ = a.next("combine_received")
    a.load(("n_tokens", a.rank, a.launch.parity(of, n)), ("n_tokens", n))
    for t in a.of_block(len(a.world.tokens(n, a.rank))):
        for owner in a.world.owners(n, a.rank, t):
            if owner != a.rank:
                place, truth = _partial(a, a.rank, owner, t), ("partial", m, owner)
                a.load_relaxed(place, ("filled",), (*truth, a.rank, t))
                a.store(place, SENTINEL)


def phase(launch: Launch) -> None:
    """A fused dispatch or combine."""
    if launch.returns_early():
        return
    sent, other = f"{launch.direction}_sent", "combine"
    if launch.direction == "combine":
        other = "dispatch"
    n, of = launch.rounds["dispatch_received"], launch.before["dispatch_received"]
    for block in range(launch.world.n_blocks):
        a = launch.agent("electing warp", block)
        words = sent, f"{other}_sent", f"{launch.direction}_drained"
        header_word(a, "dispatch_received", "combine_received", *words)
        advance_at_start(a)
        if block == 0:
            _publish_reads(launch.agent("publishing warp"))
            poll_done_words(launch.agent("polling warp"))
        if launch.direction == "dispatch":
            a = launch.agent("numbers warp", block)
            if block == 0:
                publish_n_tokens(a)
            share(a)
            _send_inline(launch.agent("sender", block))
            await_inline(launch.agent("receiver", block))
        else:
            send_partials(launch.agent("sender", block))
            add_tokens(launch.agent("receiver", block), n, of)


# A token for both ranks, one for the other rank; then a rank with nothing to send.
_ROUTING: tuple = ((((0, 1),), ((0, 0),)), (((1, 1),), ()))
_SUMS = dict(model="lifecycle_by_rank", protocol="by_rank", has_sums=True)

_BOTH_WAYS: tuple = ((((0, 1),), ((1, 0),)),)

WORLDS = [
    World("by rank", routing=_ROUTING, n_blocks=2, **_SUMS, **replays(FUSED, 2)),
    # In one world there would be twenty times as many states.
    World("by rank, 1 block", program=THRICE_EACH, routing=_BOTH_WAYS, **_SUMS),
]
TINY = [
    World(
        "tiny, by rank",
        routing=((((1,),), ()),),
        is_one_agent=True,
        **_SUMS,
        **replays(FUSED, 1),
    )
]
"""So small that all steps can be interleaved in every order."""
