# SPDX-License-Identifier: Apache-2.0
"""Combine that returns rows, on GPUs, whatever dispatch addressed them by."""

from .by_expert import await_done_words, finish, received_messages
from .launches import Agent, Launch
from .steps import await_kept_count, await_message, publish_kept_counts

CODE = "combine to rows: "


def _send_rows(a: Agent) -> None:
    n = a.launch.rounds["dispatch_received"]
    m, generation = a.next("combine_sent")
    for counter in range(a.world.n_index_warps):
        a.load(("pair_rows", a.rank, counter), ("pair rows", n))
    await_done_words(a, "combine")
    if a.world.drops_rows and a.block == 0:
        publish_kept_counts(a)
    items = [item for item in received_messages(a, n) if item[0] != a.rank]
    for i in a.of_block(len(items)):
        src, t, k, expert, _ = items[i]
        truth = ("row", m, src, t, k)
        for chunk in range(a.world.n_chunks):
            a.store(_message(a, src, t, k, chunk), truth, truth)
        a.publish(("combine_message_flag", src, t, k), (generation, expert), truth)


def _message(a: Agent, to: int, t: int, k: int, chunk: int) -> tuple:
    if a.world.has("dispatch and combine sharing a buffer"):
        # The recv buffers begin at the same byte.
        if a.world.protocol != "by_expert":
            return ("inline_token", to, k, t, chunk)
        return ("dispatch_message", to, t, k, 0, chunk)
    return ("combine_message", to, t, k, chunk)


def _reduce_tokens(a: Agent, n: int, of: int) -> None:
    m, generation = a.next("combine_received")
    parity = a.launch.parity(of, n)
    a.load(("combine_received", a.rank), is_=a.before["combine_received"])
    a.load(("n_tokens", a.rank, parity), ("n_tokens", n))
    tokens = a.world.tokens(n, a.rank)
    for t in a.of_block(len(tokens)):
        for k, expert in enumerate(tokens[t]):
            is_own = expert >= 0 and a.world.rank_of(expert) == a.rank
            # An own row is read where it is.
            truth = "own row" if is_own else "choice"
            a.load(("choices", a.rank, parity, t, k), (truth, n, t, k))
            if is_own or expert < 0:
                continue
            if a.world.drops_rows:
                await_kept_count(a, expert)
            meant = ("row", m, a.rank, t, k)
            flag = ("combine_message_flag", a.rank, t, k)
            await_message(a, flag, generation, meant)
            for chunk in range(a.world.n_chunks):
                a.load(_message(a, a.rank, t, k, chunk), meant)


def phase(launch: Launch, sends: bool, receives: bool) -> None:
    """A combine, or one phase of it."""
    n, of = launch.answered()
    for block in range(launch.world.n_blocks):
        first = len(launch.agents)
        if sends:
            _send_rows(launch.agent("sender", block))
        if receives:
            _reduce_tokens(launch.agent("receiver", block), n, of)
        finish(launch, block, first)
