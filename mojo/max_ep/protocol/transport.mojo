# SPDX-License-Identifier: Apache-2.0
"""How a rank reaches its peers' memory: by stores to mapped addresses, on GPUs of other
hosts by SHMEM.

With SHMEM a message is staged in symmetric memory, and put with its flag as the signal.
The functions are in the bitcode of NVSHMEM, which is built into the package by `mojo
precompile --bitcode-libs` (`extension.py`); names and argument order:
https://docs.nvidia.com/nvshmem/api/gen/api/signal.html.
"""
from std.ffi import external_call

from .flags import flag_word, order_before_put
from .kernel_argument import MutPointer
from .layout import BUFFER_ALIGN, Group, round_up
from .token_format import BytePointer

comptime _SIGNAL_SET = Int32(9)
"""NVSHMEM_SIGNAL_SET: the signal replaces the word."""


@always_inline
def mapped_address(own: UInt64, rank: Int) -> UInt64:
    """Asks SHMEM where a rank's copy of symmetric memory is mapped."""
    return UInt64(
        Int(
            external_call["nvshmem_ptr", BytePointer](
                BytePointer(unsafe_from_address=Int(own)), Int32(rank)
            )
        )
    )


@always_inline
def put_message_warp(
    to: UInt64,
    from_: UInt64,
    n_bytes: Int,
    flag: UInt64,
    generation: UInt32,
    choice: Int,
    rank: Int,
):
    """Starts to put a message, and then its flag, with a whole warp.

    The bytes may be overwritten once the receiver has published that it read them. Each
    8 bytes come whole, in any order.
    """
    # ORDER: SHMEM delivers the signal after the message; pairs with the ACQUIRE
    # in `load_acquire_sys`. The warp's syncs inside order the lanes' writes before.
    external_call["nvshmemx_putmem_signal_nbi_warp", NoneType](
        BytePointer(unsafe_from_address=Int(to)),
        BytePointer(unsafe_from_address=Int(from_)),
        UInt64(n_bytes),
        BytePointer(unsafe_from_address=Int(flag)),
        flag_word(generation, choice),
        _SIGNAL_SET,
        Int32(rank),
    )


@always_inline
def put_words_warp(to: UInt64, from_: UInt64, n_bytes: Int, rank: Int):
    """Starts to put words that hold their generation, with a whole warp."""
    # ORDER: none. Each word of 8 bytes comes whole, and announces itself.
    external_call["nvshmemx_putmem_nbi_warp", NoneType](
        BytePointer(unsafe_from_address=Int(to)),
        BytePointer(unsafe_from_address=Int(from_)),
        UInt64(n_bytes),
        Int32(rank),
    )


@always_inline
def put_flag(to: UInt64, generation: UInt32, count: Int, rank: Int):
    """Puts a word after everything that this thread has read and written."""
    order_before_put()
    external_call["nvshmemx_signal_op", NoneType](
        BytePointer(unsafe_from_address=Int(to)),
        flag_word(generation, count),
        _SIGNAL_SET,
        Int32(rank),
    )


@always_inline
def put_word(to: UInt64, generation: UInt32, value: Int, rank: Int):
    """Puts a word that is all there is to read."""
    # ORDER: none. It comes whole, and announces nothing else.
    external_call["nvshmemx_signal_op", NoneType](
        BytePointer(unsafe_from_address=Int(to)),
        flag_word(generation, value),
        _SIGNAL_SET,
        Int32(rank),
    )


@fieldwise_init
struct PeerBuffers(TrivialRegisterPassable):
    """The same buffer on every rank, as addresses in this process."""

    var addresses: MutPointer[UInt64]

    def __getitem__(self, rank: Int) -> BytePointer:
        return BytePointer(unsafe_from_address=Int(self.addresses[unsafe_offset=rank]))


# ------------------------------------------------------------------ the put buffers


@always_inline
def dispatch_put_offset(group: Group, choice: Int) -> Int:
    return choice * group.dispatch_msg_bytes


@always_inline
def combine_put_offset(group: Group, src_rank: Int, choice: Int) -> Int:
    return (src_rank * group.n_choices() + choice) * group.combine_msg_bytes


def put_bytes(group: Group) -> Int:
    """Counts the bytes of both put buffers, dispatch's first.

    They follow the region, and exist only if the group spans hosts. By rank a rank stages
    what it puts in its region.
    """
    if group.is_by_rank():
        return 0
    return combine_put_from_region_end(group) + round_up(
        combine_put_offset(group, group.n_ranks, 0), BUFFER_ALIGN
    )


def combine_put_from_region_end(group: Group) -> Int:
    """Locates the combine put buffer, from the end of the region."""
    if group.is_by_rank():
        return 0
    return round_up(dispatch_put_offset(group, group.n_choices()), BUFFER_ALIGN)
