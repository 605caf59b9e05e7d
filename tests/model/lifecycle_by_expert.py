# SPDX-License-Identifier: Apache-2.0
"""How launches of dispatch by expert and of combine of rows begin and end.

Each block is counted when it has ended; the last one advances the generations, and
publishes what was read. A word of each kind is sent: a count, and a message with a
flag.
"""

from .launches import FUSED, THRICE_EACH, Agent, Launch, World, replays

CODE = "by expert: "


def load_and_check_header(a: Agent, *words: str) -> None:
    for word in words:
        a.load((word, a.rank), is_=a.before[word])


def await_done_words(a: Agent) -> None:
    direction = a.launch.direction
    sent = f"{direction}_sent"
    for rank in a.world.ranks:
        reached, truth = ("reached", 0, a.before[sent]), a.launch.rounds[sent]
        place = (f"{direction}_done", a.rank, rank)
        a.load_acquire(place, reached, ("at least", 0, truth))


def elect_last_block(launch: Launch, block: int, first: int) -> None:
    """Counts a block once all agents since `first` have ended."""
    a = launch.agent("end", block, range(first, len(launch.agents)))

    def end(last: Agent) -> None:
        advance(last)
        publish_done(last)

    a.arrive(end)


def advance(last: Agent) -> None:
    """In dispatch the same thread stores the number of tokens."""
    launch = last.launch
    if launch.direction == "dispatch":
        n, generation = last.next("dispatch_sent")
        place = ("n_tokens", last.rank, launch.parity(generation, n))
        last.store(place, len(last.world.tokens(n, last.rank)), ("n_tokens", n))
    for which in ("sent", "received"):
        word = f"{launch.direction}_{which}"
        last.store((word, last.rank), last.next(word)[1])


def publish_done(a: Agent) -> None:
    direction = a.launch.direction
    n, generation = a.next(f"{direction}_received")
    for rank in a.world.ranks:
        a.publish((f"{direction}_done", rank, a.rank), (generation, 0), (n, 0))


def _publish_counts(a: Agent) -> None:
    n, generation = a.next("dispatch_sent")
    await_done_words(a)
    for expert in (a.world.experts[i] for i in a.of_block(len(a.world.experts))):
        word = (generation, a.world.count(n, a.rank, expert))
        place = ("dispatch_count", a.world.rank_of(expert), expert, a.rank)
        a.store_relaxed(place, word, ("count", n, a.rank, expert))


def _write_messages(a: Agent) -> None:
    n, generation = a.next("dispatch_sent")
    await_done_words(a)
    items = a.world.messages(n, a.rank)
    for t, k, expert, slot in (items[i] for i in a.of_block(len(items))):
        truth, to = ("message", n, a.rank, t, k), a.world.rank_of(expert)
        a.store(("dispatch_message", to, expert, a.rank, slot), truth, truth)
        flag = ("message_flag", to, "dispatch", expert, a.rank, slot)
        a.publish(flag, (generation, (t, k)), truth)


def _await_counts(a: Agent) -> None:
    n, generation = a.next("dispatch_received")
    for expert in a.world.experts_of(a.rank):
        for src in a.world.ranks:
            place, truth = ("dispatch_count", a.rank, expert, src), ("count", n, src)
            a.load_relaxed(place, ("equals", generation), (*truth, expert))


def _receive_message(a: Agent) -> None:
    n, generation = a.next("dispatch_received")
    items = a.world.received_messages(n, a.rank)
    for src, t, k, expert, slot in (items[i] for i in a.of_block(len(items))):
        meant, place = ("message", n, src, t, k), (expert, src, slot)
        await_message(
            a, ("message_flag", a.rank, "dispatch", *place), generation, meant
        )
        a.load(("dispatch_message", a.rank, *place), meant)


def await_message(a: Agent, flag: tuple, generation: int, meant: tuple) -> None:
    a.load_acquire(flag, ("equals", generation), meant)


def send_rows(a: Agent) -> None:
    n = a.launch.rounds["dispatch_received"]
    m, generation = a.next("combine_sent")
    await_done_words(a)
    items = [x for x in a.world.received_messages(n, a.rank) if x[0] != a.rank]
    for src, t, k, expert, _ in (items[i] for i in a.of_block(len(items))):
        truth = ("row", m, src, t, k)
        a.store(_message(a, src, t, k), truth, truth)
        flag = ("message_flag", src, "combine", t, k)
        a.publish(flag, (generation, expert), truth)


def _message(a: Agent, to: int, t: int, k: int) -> tuple:
    if a.world.has("dispatch and combine sharing a buffer"):
        # The recv buffers begin at the same byte.
        return ("dispatch_message", to, t, k, 0)
    return ("combine_message", to, t, k)


def reduce_tokens(a: Agent, n: int, of: int) -> None:
    m, generation = a.next("combine_received")
    a.load(("n_tokens", a.rank, a.launch.parity(of, n)), ("n_tokens", n))
    tokens = a.world.tokens(n, a.rank)
    for t in a.of_block(len(tokens)):
        for k, expert in enumerate(tokens[t]):
            if expert >= 0 and a.world.rank_of(expert) != a.rank:
                meant = ("row", m, a.rank, t, k)
                flag = ("message_flag", a.rank, "combine", t, k)
                await_message(a, flag, generation, meant)
                a.load(_message(a, a.rank, t, k), meant)


def phase(launch: Launch) -> None:
    """A fused dispatch or combine."""
    if launch.returns_early():
        return
    n, of = launch.rounds["dispatch_received"], launch.before["dispatch_received"]
    for block in range(launch.world.n_blocks):
        first = len(launch.agents)
        sender = launch.agent("sender", block)
        load_and_check_header(sender, f"{launch.direction}_sent")
        receiver = launch.agent("receiver", block)
        load_and_check_header(receiver, f"{launch.direction}_received")
        if launch.direction == "dispatch":
            _publish_counts(launch.agent("first warp", block))
            _write_messages(sender)
            _await_counts(launch.agent("counter", block))
            _receive_message(receiver)
        else:
            send_rows(sender)
            reduce_tokens(receiver, n, of)
        elect_last_block(launch, block, first)


# A token for both ranks, one for the other rank; then a rank with nothing to send.
_ROUTING: tuple = ((((0, 1),), ((0, 0),)), (((1, 1),), ()))
_ROWS = dict(model="lifecycle_by_expert", protocol="by_expert")

WORLDS = [
    World("by expert", program=THRICE_EACH, routing=_ROUTING, n_blocks=2, **_ROWS)
]
TINY = [
    World(
        "tiny, by expert",
        routing=((((1,),), ((0,),)), (((1,),), ())),
        is_one_agent=True,
        **_ROWS,
        **replays(FUSED, 2),
    )
]
"""So small that all steps can be interleaved in every order."""
