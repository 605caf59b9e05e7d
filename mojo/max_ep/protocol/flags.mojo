# SPDX-License-Identifier: Apache-2.0
"""All atomics of the project: stores and loads of flags, and the deadline of a wait.

A flag is one UInt64, written by one rank in a generation and never reset:

    bits 63..32  generation that wrote it (0 = nothing was ever written)
    bits 31..0   a count

A reader accepts a flag only if its generation *equals* the one it waits for.
So an old flag is never accepted as a new one, and the generation may wrap.
Done words of GPU ranks may run ahead, and are accepted then (`is_not_before`).
"""
from std.atomic import Atomic, fence, Ordering
from std.sys import (
    _RegisterPackType,
    inlined_assembly,
    is_amd_gpu,
    is_gpu,
    is_nvidia_gpu,
)
from std.time import global_perf_counter_ns, perf_counter_ns

from .kernel_argument import MutPointer
from .layout import SOURCE_INFO_BYTES

comptime FlagPointer = MutPointer[UInt64]

comptime SharedPointer[T: AnyType] = Pointer[
    T, MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
comptime SharedWord = SharedPointer[UInt32]
"""A word in the shared memory of a GPU block."""

comptime POLLS_PER_CLOCK_READ = 64
"""Loads of a flag by a GPU thread between two reads of the clock, which cost
as much as some loads."""

comptime POLLS_BEFORE_SLEEP = 2048
"""Loads of a flag before the waiter gives its core to others: about the time
a peer on another core needs to publish a small message."""

comptime SLEEP_SECONDS = 50e-6
"""How long a waiter sleeps between two loads once it yields, so that more
ranks than cores make progress."""


@always_inline
def next_generation(generation: UInt32) -> UInt32:
    """Returns the next generation; a wrap skips 0, which means "never written", and 1,
    which has the parity of `UInt32.MAX`."""
    return generation + 1 if generation != UInt32.MAX else 2


@always_inline
def flag_word(generation: UInt32, count: Int) -> UInt64:
    return (UInt64(generation) << 32) | UInt64(count)


@always_inline
def count_of(word: UInt64) -> Int:
    return Int(word & 0xFFFF_FFFF)


@always_inline
def generation_of(word: UInt64) -> UInt32:
    return UInt32(word >> 32)


@always_inline
def flag_at(buffer: MutPointer[UInt8], offset: Int) -> FlagPointer:
    return buffer.unsafe_offset(offset).unsafe_bitcast[UInt64]()


@always_inline
def message_flag(message: MutPointer[UInt8], msg_bytes: Int) -> FlagPointer:
    return flag_at(message, msg_bytes - SOURCE_INFO_BYTES)


@always_inline
def publish(flag: FlagPointer, generation: UInt32, count: Int):
    """Publishes everything that this thread wrote before."""
    # ORDER: RELEASE, system scope. Pairs with the ACQUIRE in `load_acquire_sys`. Makes
    # visible: all bytes this thread wrote before, and those of the worker
    # threads it joined before. Weaker would let a reader see the new flag
    # while the messages still hold the last generation.
    publish_word(flag, flag_word(generation, count))


@always_inline
def publish_word(place: FlagPointer, word: UInt64):
    # ORDER: RELEASE, system scope: as in `publish`, which calls it.
    Atomic[UInt64].store[ordering=Ordering.RELEASE](place, word)


@always_inline
def drain_stores():
    """Orders this thread's streaming stores before all its later stores."""
    # ORDER: SEQUENTIAL, system scope. Pairs with no load: it makes weakly
    # ordered non-temporal stores (x86 does not order them with a release)
    # ordinary ones, which the join of the workers and the RELEASE in
    # `publish` then carry. Weaker compiles to nothing on x86.
    fence[ordering=Ordering.SEQUENTIAL]()


@always_inline
def load_acquire_sys(flag: FlagPointer) -> UInt64:
    # ORDER: ACQUIRE, system scope. Pairs with the RELEASE in `publish`. Makes
    # visible: everything the publisher wrote before it published. Weaker would
    # let the reads of the messages overtake the read of their flag.
    return Atomic[UInt64].load[ordering=Ordering.ACQUIRE](flag)


@always_inline
def now_ns() -> UInt64:
    """Reads the clock: on a GPU that of all multiprocessors, on a CPU the host's."""
    comptime if is_gpu():
        return global_perf_counter_ns()
    return UInt64(perf_counter_ns())


@always_inline
def ms_of(ns: UInt64) -> UInt32:
    """Returns a time in ms; it wraps."""
    return UInt32((ns // 1_000_000) & 0xFFFF_FFFF)


@fieldwise_init
struct Deadline(TrivialRegisterPassable):
    """The time by which one launch must have met all its waits."""

    var end_ns: UInt64

    @staticmethod
    @always_inline
    def after(timeout_ms: Int) -> Self:
        return Self(now_ns() + UInt64(timeout_ms) * 1_000_000)

    @always_inline
    def has_passed(self) -> Bool:
        return now_ns() > self.end_ns


# ------------------------------------------------------------------ GPU ranks


def _device_scope() -> StaticString:
    return "agent" if is_amd_gpu() else "device"


def _block_scope() -> StaticString:
    return "workgroup" if is_amd_gpu() else "block"


@always_inline
def store_relaxed_sys(flag: FlagPointer, generation: UInt32, count: Int):
    """Publishes a count, which announces no other data."""
    # ORDER: RELAXED, system scope. Pairs with the RELAXED in `load_relaxed_sys`.
    # Makes visible: itself. Generation and count are one word, and each
    # message that is counted announces itself, so nothing this rank wrote
    # needs to be before. Its caller has seen, with ACQUIRE, that the count of
    # the generation before was read: this store cannot overtake that.
    store_word_relaxed_sys(flag, flag_word(generation, count))


@always_inline
def store_word_relaxed_sys(flag: FlagPointer, word: UInt64):
    # ORDER: RELAXED, system scope: as in `store_relaxed_sys`, which calls it.
    Atomic[UInt64].store[ordering=Ordering.RELAXED](flag, word)


@always_inline
def load_relaxed_sys(flag: FlagPointer) -> UInt64:
    # ORDER: RELAXED, system scope. Pairs with the RELAXED in `store_relaxed_sys`.
    # Makes visible: itself. What is read by means of the count is awaited by
    # its own flag.
    return Atomic[UInt64].load[ordering=Ordering.RELAXED](flag)


@always_inline
def load_relaxed_sys_2(flag: FlagPointer) -> Tuple[UInt64, UInt64]:
    """Reads two adjacent flags at once."""
    comptime assert is_nvidia_gpu(), "two accesses in one instruction, in PTX"
    # ORDER: RELAXED, system scope, as two accesses of 64 bits, in any order. Each
    # pairs with the RELAXED in `store_relaxed_sys`. Makes visible: itself.
    var words = inlined_assembly[
        "ld.relaxed.sys.global.v2.b64 {$0, $1}, [$2];",
        _RegisterPackType[UInt64, UInt64],
        constraints="=l,=l,l,~{memory}",
        has_side_effect=True,
    ](flag)
    return (words[0], words[1])


@always_inline
def is_not_before(found: UInt32, generation: UInt32) -> Bool:
    """Returns whether `found` is `generation` or a later one; it may wrap.

    A GPU rank that receives nothing from a peer does not wait for it: in dispatch
    a rank without experts, in combine a rank whose tokens all went elsewhere. So
    its done word may be ahead of the one that the peer awaits, but never by 2**31.
    """
    return (found - generation).cast[DType.int32]() >= 0


@always_inline
def fetch_add_block(counter: SharedWord, n: UInt32) -> UInt32:
    # ORDER: RELAXED, block scope. Pairs with none: it hands out work indices,
    # makes a histogram that is read after a barrier, or counts warps whose writes
    # nobody reads.
    return Atomic[UInt32, scope=_block_scope()].fetch_add[ordering=Ordering.RELAXED](
        counter, n
    )


@always_inline
def arrive_in_block(counter: SharedWord):
    """Publishes this warp's writes to the block, and counts the warp."""
    # ORDER: RELEASE, block scope. Pairs with the ACQUIRE in `load_acquire_block`.
    # Makes visible: what this warp wrote before. Warps that arrive later add to the
    # same word, so a reader of the final number sees the writes of all of them.
    # Weaker would show the number before the work.
    _ = Atomic[UInt32, scope=_block_scope()].fetch_add[ordering=Ordering.RELEASE](
        counter, 1
    )


@always_inline
def arrive_with_block(counter: SharedWord) -> Int:
    """Publishes this warp's writes to the block, takes over those of the warps that have
    arrived before, and returns how many these are."""
    # ORDER: ACQUIRE_RELEASE, block scope. Pairs with itself in the other warps. Makes
    # visible to the last one: what all of them wrote, so that its release of a flag
    # covers all parts of the message. Weaker would let the flag come before a part.
    return Int(
        Atomic[UInt32, scope=_block_scope()].fetch_add[
            ordering=Ordering.ACQUIRE_RELEASE
        ](counter, 1)
    )


@always_inline
def store_release_block(word: SharedWord, value: UInt32):
    """Publishes to the block everything that this warp wrote before."""
    # ORDER: RELEASE, block scope. Pairs with the ACQUIRE in `load_acquire_block`.
    # Makes visible: what this warp wrote before, to shared memory and to this
    # rank's own words. Weaker would show the progress before the work.
    Atomic[UInt32, scope=_block_scope()].store[ordering=Ordering.RELEASE](word, value)


@always_inline
def load_acquire_block(word: SharedWord) -> UInt32:
    """Reads a word that another warp of the block publishes."""
    # ORDER: ACQUIRE, block scope. Pairs with the RELEASE in `store_release_block`.
    # Makes visible: what that warp wrote before. Weaker would let the reads of
    # its results overtake this one.
    return Atomic[UInt32, scope=_block_scope()].load[ordering=Ordering.ACQUIRE](word)


@always_inline
def arrive_on_gpu(counter: MutPointer[Int32]) -> Int:
    # ORDER: ACQUIRE_RELEASE, device scope. Pairs with itself in the other
    # blocks of the launch. Makes visible to the last one: that all blocks have
    # read what they had to read, and what they wrote, so that its release of
    # the done words covers all of them.
    return Int(
        Atomic[Int32, scope=_device_scope()].fetch_add[
            ordering=Ordering.ACQUIRE_RELEASE
        ](counter, 1)
    )


@always_inline
def fetch_add_gpu(counter: MutPointer[Int32]) -> Int32:
    # ORDER: RELAXED, device scope. Pairs with none: it hands out work indices.
    return Atomic[Int32, scope=_device_scope()].fetch_add[ordering=Ordering.RELAXED](
        counter, 1
    )


@always_inline
def load_relaxed_gpu[T: DType](word: MutPointer[Scalar[T]]) -> Scalar[T]:
    """Reads a word of this rank that another block may be writing."""
    # ORDER: RELAXED, device scope. Pairs with the RELAXED in `store_relaxed_gpu`.
    # Makes visible: itself.
    return Atomic[Scalar[T], scope=_device_scope()].load[ordering=Ordering.RELAXED](
        word
    )


@always_inline
def store_relaxed_gpu[T: DType](word: MutPointer[Scalar[T]], value: Scalar[T]):
    """Publishes a word to this rank's other blocks: a mask, a decided count."""
    # ORDER: RELAXED, device scope. Pairs with the RELAXED in `load_relaxed_gpu`.
    # Makes visible: itself. It announces no other data: a count that was decided
    # stands in the word, with its generation, and a mask only says to wait no longer.
    Atomic[Scalar[T], scope=_device_scope()].store[ordering=Ordering.RELAXED](
        word, value
    )


@always_inline
def fetch_max(word: MutPointer[Int32], value: Int32) -> Bool:
    """Increases a word of this rank to at least a value."""
    comptime Record = Atomic[Int32, scope=_device_scope()]
    # ORDER: RELAXED, device scope. Pairs with none: the host and later launches
    # read the failure record after this one has ended, its last block after
    # `arrive_on_gpu`. Who reads it earlier may see it or not, and ends either way.
    var old = Record.load[ordering=Ordering.RELAXED](word)
    while old < value:
        # ORDER: RELAXED, as above.
        if Record.compare_exchange[
            success_ordering=Ordering.RELAXED, failure_ordering=Ordering.RELAXED
        ](word, old, value):
            return True
    return False


@always_inline
def order_before_put():
    """Orders what this thread has read and written before a put that follows.

    For words that SHMEM writes: unlike `publish`, its signal orders nothing.
    """
    # ORDER: RELEASE fence, system scope. With the put that follows it pairs
    # with the ACQUIRE in `load_acquire_sys`. Makes visible: all bytes this thread wrote
    # before, and that it has read what it read. Weaker would let a reader see
    # the word first.
    fence[ordering=Ordering.RELEASE]()


# ------------------------------------------- data that announces itself (PTX)


@always_inline
def store_relaxed_sys_16(p: MutPointer[UInt8], bytes: SIMD[DType.uint32, 4]):
    comptime assert is_nvidia_gpu(), "128 bits at once are promised by PTX only"
    var low = (UInt64(bytes[1]) << 32) | UInt64(bytes[0])
    var high = (UInt64(bytes[3]) << 32) | UInt64(bytes[2])
    # ORDER: RELAXED, system scope, one access of 128 bits (PTX: `.b128` is a
    # scalar type, so it is never torn; a vector of four words may be). Pairs
    # with the RELAXED in `load_relaxed_sys_16`. Makes visible: itself; one word of
    # the 16 bytes shows that all have arrived. Its caller has seen, with ACQUIRE,
    # that the previous contents were read.
    inlined_assembly[
        (
            "{ .reg .b128 word; mov.b128 word, {$1, $2};"
            " st.relaxed.sys.global.b128 [$0], word; }"
        ),
        NoneType,
        constraints="l,l,l,~{memory}",
        has_side_effect=True,
    ](p, low, high)


@always_inline
def load_relaxed_sys_16(p: MutPointer[UInt8]) -> SIMD[DType.uint32, 4]:
    """Reads 16 bytes that a peer may be writing, in one access."""
    comptime assert is_nvidia_gpu(), "128 bits at once are promised by PTX only"
    # ORDER: RELAXED, system scope, one access of 128 bits. Pairs with the
    # RELAXED in `store_relaxed_sys_16`. Makes visible: itself. Volatile, which PTX
    # defines as that, and never split: of a `ld.relaxed` whose middle words nobody
    # uses, the assembler makes two loads, and the first may see less than the second.
    var halves = inlined_assembly[
        (
            "{ .reg .b128 word; ld.volatile.global.b128 word, [$2];"
            " mov.b128 {$0, $1}, word; }"
        ),
        _RegisterPackType[UInt64, UInt64],
        constraints="=l,=l,l,~{memory}",
        has_side_effect=True,
    ](p)
    return {
        UInt32(halves[0] & 0xFFFF_FFFF),
        UInt32(halves[0] >> 32),
        UInt32(halves[1] & 0xFFFF_FFFF),
        UInt32(halves[1] >> 32),
    }
