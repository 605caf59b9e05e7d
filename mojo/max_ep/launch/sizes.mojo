# SPDX-License-Identifier: Apache-2.0
"""What Python must know of a group's memory, by name, as JSON.

`layout_query.mojo` prints it, and the C ABI hands it out. Sizes are in bytes, unless
their name says otherwise; a `_word` is the first of its kind in the counters.
"""
from ..cpu.link import Queue
from ..protocol.counters import (
    choices_word,
    local_sync_counters_words,
    masked_word,
    N_FAILURE_WORDS,
    N_HEADER_WORDS,
    Word,
)
from ..protocol.layout import Group
from ..protocol.peer_words import (
    COMBINE_WAIT,
    Holds,
    Limit,
    PeerWords,
    PHASES,
    READ_ONLY,
    Which,
)
from ..protocol.transport import combine_put_from_region_end, put_bytes
from ..protocol.word_list import N_KINDS, peer_words
from .setup import SETUP_WORDS


def sizes_of(group: Group) -> String:
    """Lists sizes, the words of `setup`, and the words that peers write."""
    var numbers = [
        ("n_ranks", group.n_ranks),
        ("n_experts", group.n_experts),
        ("n_local_experts", group.n_local_experts()),
        ("max_tokens_per_rank", group.max_tokens_per_rank),
        ("top_k", group.top_k),
        ("n_choices", group.n_choices()),
        ("masks", Int(group.masks)),
        ("header_words", N_HEADER_WORDS),
        ("counters_words", local_sync_counters_words(group)),
        ("masked_word", masked_word(group)),
        ("failure_word", Word.FAILURE),
        ("n_failure_words", N_FAILURE_WORDS),
        ("generations_word", Word.DISPATCH_SENT),
        ("launch_word", Word.LAUNCH),
        ("link_word", Word.LINK),
        ("launch_since_word", Word.LAUNCH_SINCE),
        ("n_tokens_word", Word.N_TOKENS),
        ("combine_of_word", Word.COMBINE_OF),
        ("choices_word", choices_word(group.n_experts)),
        ("protocol", group.protocol()),
        ("dispatch_msg_bytes", group.dispatch_msg_bytes),
        ("combine_msg_bytes", group.combine_msg_bytes),
        ("dispatch_send_bytes", group.dispatch_send_bytes()),
        ("dispatch_recv_bytes", group.dispatch_recv_bytes()),
        ("dispatch_counts_bytes", group.dispatch_counts_bytes()),
        ("combine_recv_bytes", group.combine_recv_bytes()),
        ("combine_counts_bytes", group.combine_counts_bytes()),
        ("region_bytes", group.region_bytes()),
        ("dispatch_put_bytes", combine_put_from_region_end(group)),
        ("put_bytes", put_bytes(group)),
        ("link_put", Queue.PUT),
        ("link_fence", Queue.FENCE),
        ("link_n_kinds", Queue.N_KINDS),
        ("link_room", Queue.ROOM),
        ("link_appended", Queue.APPENDED),
        ("link_carried", Queue.CARRIED),
        ("link_first", Queue.FIRST),
        ("link_request_words", Queue.REQUEST_WORDS),
    ]
    var text = String("{")
    for i in range(len(numbers)):
        text += _member(numbers[i][0], numbers[i][1]) + ", "
    text += String('"setup": [')
    var names = materialize[SETUP_WORDS]()
    for i in range(len(names)):
        text += _separator(i) + _quoted(names[i])
    text += '], "phases": ['
    var phases = materialize[PHASES]()
    for i in range(len(phases)):
        text += _separator(i) + _quoted(phases[i])
    text += '], "experts_of": ['
    for rank in range(group.n_ranks):
        text += _separator(rank) + String(group.n_experts_on(rank))
    return (
        text
        + '], "cpu": ['
        + _words(group, False)
        + '], "gpu": ['
        + _words(group, True)
        + "]}"
    )


def _separator(i: Int) -> StaticString:
    return ", " if i > 0 else ""


def _quoted(name: StringSlice) -> String:
    return String('"', name, '"')


def _member(name: StringSlice, value: Int) -> String:
    return String(_quoted(name), ": ", value)


def _words(group: Group, on_gpu: Bool) -> String:
    """Lists the words that peers write into a region, each kind an object."""
    var text = String()
    comptime for kind in range(N_KINDS):
        var words = peer_words[kind](group, on_gpu)
        var word = Word.DISPATCH_SENT + words.counter
        if words.n > 0:
            text += _separator(text.byte_length()) + _object(group, words, word)
        if words.phase == COMBINE_WAIT and words.holds == Holds.DATA:
            # A launch of combine first publishes that its rank has read the dispatch.
            # Others see that, and not whether the data has come.
            var begun = peer_words[0](group, on_gpu)
            begun.name = "begin of combine"
            begun.phase = COMBINE_WAIT
            begun.step = 0
            text += ", " + _object(group, begun, Word.COMBINE_OF)
    return text


def _object(group: Group, words: PeerWords, word: Int) -> String:
    var which = materialize[Which.NAMES]()
    var limits = materialize[Limit.NAMES]()
    var holds = materialize[Holds.NAMES]()
    var phases = materialize[PHASES]()
    var phase = StaticString("") if words.phase == READ_ONLY else phases[words.phase]
    var text = String('{"name": ', _quoted(words.name), ', "phase": ', _quoted(phase))
    text += String(', "which": ', _quoted(which[words.which]))
    text += String(', "limit": ', _quoted(limits[words.limit]))
    text += String(', "holds": ', _quoted(holds[words.holds]), ", ")
    var numbers = [
        ("offset", group.buffer_offset(words.buffer) + words.offset),
        ("peer_stride", words.peer_stride),
        ("n", words.n),
        ("spacing", words.spacing),
        ("n_runs", words.n_runs),
        ("run_stride", words.run_stride),
        ("word", word),
        ("step", words.step),
    ]
    for i in range(len(numbers)):
        text += _separator(i) + _member(numbers[i][0], numbers[i][1])
    return text + "}"
