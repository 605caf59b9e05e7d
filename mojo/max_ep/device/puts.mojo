# SPDX-License-Identifier: Apache-2.0
"""How a warp brings what is staged to a rank of another host.

A put of SHMEM has one load of each lane in flight. Where SHMEM has mapped the other
rank's memory, since NVLink reaches it, the warp copies itself, with several.
"""
from max.gpu import lane_id, syncwarp, WARP_SIZE

from ..protocol.flags import flag_at, publish, store_word_relaxed_sys
from ..protocol.transport import mapped_address, put_message_warp, put_words_warp
from .warp import ACCESSES_IN_FLIGHT, bytes_at


@always_inline
def _copy_words_warp[
    n_words: Int, are_awaited: Bool
](to: UInt64, from_: UInt64, n_bytes: Int):
    """Copies whole vectors of some words of 8 bytes; `are_awaited`: the words themselves.
    """
    comptime n_vector_bytes = 8 * n_words
    comptime in_flight = ACCESSES_IN_FLIGHT * (2 // n_words)
    comptime step = WARP_SIZE * n_vector_bytes
    for first in range(Int(lane_id()) * n_vector_bytes, n_bytes, in_flight * step):
        var parts = Array[SIMD[DType.uint64, n_words], in_flight](fill=0)
        comptime for is_load in [True, False]:
            comptime for i in range(in_flight):
                var at = UInt64(first + i * step)
                if first + i * step < n_bytes:
                    comptime if is_load:
                        parts[i] = (
                            bytes_at(from_ + at)
                            .unsafe_bitcast[UInt64]()
                            .unsafe_load[
                                width=n_words, alignment=n_vector_bytes, invariant=False
                            ]()
                        )
                    elif are_awaited:
                        store_word_relaxed_sys(
                            flag_at(bytes_at(to + at), 0), parts[i][0]
                        )
                    else:
                        bytes_at(to + at).unsafe_bitcast[UInt64]().unsafe_store[
                            alignment=n_vector_bytes
                        ](0, parts[i])


@always_inline
def send_message_warp[
    n_words: Int = 2
](
    to: UInt64,
    from_: UInt64,
    n_bytes: Int,
    flag: UInt64,
    generation: UInt32,
    choice: Int,
    rank: Int,
):
    """Starts to bring a message of whole vectors of `n_words`, and then its flag, with a
    whole warp: as `put_message_warp`."""
    var there = mapped_address(to, rank)
    if there == 0:
        put_message_warp(to, from_, n_bytes, flag, generation, choice, rank)
        return
    _copy_words_warp[n_words, False](there, from_, n_bytes)
    syncwarp()
    if Int(lane_id()) == 0:
        # I2: the flag is published after all of the message.
        publish(flag_at(bytes_at(there + flag - to), 0), generation, choice)


@always_inline
def send_words_warp(to: UInt64, from_: UInt64, n_bytes: Int, rank: Int):
    """Starts to bring words that hold their generation, with a whole warp."""
    var there = mapped_address(to, rank)
    if there == 0:
        put_words_warp(to, from_, n_bytes, rank)
        return
    _copy_words_warp[1, True](there, from_, n_bytes)
