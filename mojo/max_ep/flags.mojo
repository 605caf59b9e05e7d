# SPDX-License-Identifier: Apache-2.0
"""Every atomic of the project: publish a flag, await a flag, with a deadline.

A flag is one UInt64, written by one rank only and never reset:

    bits 63..32  generation that wrote it (0 = nothing was ever written)
    bits 31..0   a count

A reader accepts a flag only if its generation *equals* the one it waits for,
so an old flag can never be taken for a new one, and the generation may wrap.
"""
from std.atomic import Atomic, Ordering, fence
from std.time import perf_counter_ns, sleep

comptime FlagPointer = Pointer[UInt64, MutUntrackedOrigin]
"""A flag in some rank's region."""

comptime SPINS_BEFORE_YIELD = 2048
"""Loads of a flag before the waiter gives its core to others: about the time
a peer on another core needs to publish a small message."""

comptime YIELD_SECONDS = 50e-6
"""How long a waiter sleeps between two looks once it yields, so that more
ranks than cores make progress."""


@always_inline
def next_generation(generation: UInt32) -> UInt32:
    """Counts on; 0, which untouched memory shows, is left out when it wraps.

    Args:
        generation: A generation, or 0 before the first.

    Returns:
        The one after it, never 0.
    """
    return generation + 1 if generation != UInt32.MAX else 1


@always_inline
def flag_word(generation: UInt32, count: Int) -> UInt64:
    """Puts a flag together.

    Args:
        generation: The generation that writes it.
        count: In `[0, 2**32)`.

    Returns:
        The word.
    """
    return (UInt64(generation) << 32) | UInt64(count)


@always_inline
def count_of(word: UInt64) -> Int:
    """Takes the count out of a flag.

    Args:
        word: From `peek`.

    Returns:
        In `[0, 2**32)`.
    """
    return Int(word & 0xFFFF_FFFF)


@always_inline
def generation_of(word: UInt64) -> UInt32:
    """Takes the generation out of a flag.

    Args:
        word: From `peek`.

    Returns:
        The generation that wrote it.
    """
    return UInt32(word >> 32)


@fieldwise_init
struct Waiter(TrivialRegisterPassable):
    """Who waits for whom, where: what an error about a wait has to say."""

    var phase: StaticString
    """The op that waits, such as `dispatch_wait`."""
    var my_rank: Int
    """The rank that waits."""
    var missing_rank: Int
    """The rank that has not answered."""
    var missing_what: StaticString
    """What it should have published."""
    var expert_id: Int
    """The global expert concerned; `-1` if none is."""


@always_inline
def publish(flag: FlagPointer, generation: UInt32, count: Int):
    """Publishes that everything this thread wrote before is in place.

    Args:
        flag: A flag that only this rank writes.
        generation: The generation that is published.
        count: What the flag counts, in `[0, 2**32)`.
    """
    # ORDER: RELEASE, system scope. Pairs with the ACQUIRE in `peek`. Makes
    # visible: all bytes this thread wrote before, and those of the worker
    # threads it joined before. Weaker would let a reader see the new flag
    # while the messages still hold the last generation.
    Atomic[UInt64].store[ordering=Ordering.RELEASE](
        flag, flag_word(generation, count)
    )


@always_inline
def drain_stores():
    """Puts this thread's streaming stores before all its later stores."""
    # ORDER: SEQUENTIAL, system scope. Pairs with no load: it turns weakly
    # ordered non-temporal stores (x86 does not order them with a release)
    # into ordinary ones, which the join of the workers and the RELEASE in
    # `publish` then carry. Weaker compiles to nothing on x86.
    fence[ordering=Ordering.SEQUENTIAL]()


@always_inline
def peek(flag: FlagPointer) -> UInt64:
    """Reads a flag once.

    Args:
        flag: The flag.

    Returns:
        Generation (high half) and count (low half).
    """
    # ORDER: ACQUIRE, system scope. Pairs with the RELEASE in `publish`. Makes
    # visible: everything the publisher wrote before it published. Weaker would
    # let the reads of the messages overtake the read of their flag.
    return Atomic[UInt64].load[ordering=Ordering.ACQUIRE](flag)


@fieldwise_init
struct Deadline(TrivialRegisterPassable):
    """The time by which one launch must have met all its waits."""

    var start_ns: Int
    """When the launch began."""
    var timeout_ms: Int
    """How long it may wait in all; 0: it must not wait, because the ranks of
    this process run one after another."""

    @staticmethod
    def after(timeout_ms: Int) -> Self:
        """Starts the clock.

        Args:
            timeout_ms: Milliseconds; 0 means that no wait is allowed.

        Returns:
            A deadline that runs from now on.
        """
        return Self(Int(perf_counter_ns()), timeout_ms)

    @always_inline
    def has_passed(self) -> Bool:
        """Looks at the clock.

        Returns:
            Whether the time is up.
        """
        if self.timeout_ms == 0:
            return True
        return (
            Int(perf_counter_ns()) - self.start_ns > self.timeout_ms * 1_000_000
        )


def await_generation(
    flag: FlagPointer, generation: UInt32, deadline: Deadline, who: Waiter
) raises -> Int:
    """Waits until a flag carries a generation, or raises naming the culprit.

    Args:
        flag: A flag in this rank's region.
        generation: The generation to wait for.
        deadline: When to give up.
        who: What the error says.

    Returns:
        The count published with that generation.

    Raises:
        If the deadline passes first.
    """
    var spins = 0
    while True:
        var word = peek(flag)
        if generation_of(word) == generation:
            return count_of(word)
        spins += 1
        if spins < SPINS_BEFORE_YIELD and deadline.timeout_ms > 0:
            continue
        if deadline.has_passed():
            _raise_missing(generation_of(word), generation, deadline, who)
        sleep(YIELD_SECONDS)


def _raise_missing(
    found: UInt32, wanted: UInt32, deadline: Deadline, who: Waiter
) raises:
    """Raises the error of a wait that was not met.

    Args:
        found: The generation the flag carries.
        wanted: The generation it should carry.
        deadline: How long was waited.
        who: Who waited for whom.

    Raises:
        Always.
    """
    var place = String("max_ep: ", who.phase, " on rank ", who.my_rank, ": ")
    var expert = String()
    if who.expert_id >= 0:
        expert = String(" for expert ", who.expert_id)
    var what = String(
        who.missing_what,
        expert,
        " of generation ",
        wanted,
        " from rank ",
        who.missing_rank,
        " (last seen: generation ",
        found,
        ")",
    )
    if deadline.timeout_ms == 0:
        raise Error(
            place,
            "no ",
            what,
            ". The ranks of one process run one after another, so waiting",
            " cannot help: put the async op of every rank before the first",
            " wait, and wait on every rank before sending again. After a run",
            " that failed half-way, call EPCommInitializer.reset().",
        )
    raise Error(
        place,
        "timed out after ",
        deadline.timeout_ms,
        " ms waiting for ",
        what,
        ". Rank ",
        who.missing_rank,
        " has died, is later than EPConfig.timeout_s, or runs other EP ops",
        " than this rank. Restart the group.",
    )
