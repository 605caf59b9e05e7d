# SPDX-License-Identifier: Apache-2.0
"""A second stream of each GPU, where `send_tokens` runs beside other kernels.

MAX queues a graph's kernels one behind another. What is put into the stream that
`fork` returns runs beside those that are queued after it, until `join`. In a
captured graph, both are edges.

Two launches of one rank share its counters. `send_tokens` and the dispatch of its
tokens may do so at once (`rank_slots/dispatch.mojo`); for all others of a protocol
that forks, `join` comes first, of whichever group they are. It also comes behind
that dispatch: MAX may give the tokens' memory to what follows.
"""
from max.gpu.host import DeviceContext, DeviceStream
from std.ffi import _Global

comptime _MAX_DEVICES = 64


@fieldwise_init
struct _Sent(ImplicitlyCopyable, Movable):
    """Tokens that were sent before their dispatch."""

    var counters: Int
    """Address of the counters of the rank whose they are."""
    var n_tokens: Int


struct _Sides(Movable):
    """What is known of each device."""

    var streams: List[Optional[DeviceStream]]
    var are_forked: List[Bool]
    """Whether `join` has something to wait for."""
    var sent: List[List[_Sent]]
    """What no dispatch has taken yet."""

    def __init__(out self):
        self.streams = List[Optional[DeviceStream]](
            length=_MAX_DEVICES, fill=None
        )
        self.are_forked = List[Bool](length=_MAX_DEVICES, fill=False)
        self.sent = List[List[_Sent]](length=_MAX_DEVICES, fill=List[_Sent]())


def _no_sides() -> _Sides:
    return _Sides()


# Of the process, since the ops of a graph share nothing else on the host.
comptime _SIDES = _Global["max_ep_side_streams", _no_sides]


def fork(
    context: DeviceContext, counters: Int, n_tokens: Int
) raises -> DeviceStream:
    """Lets the second stream go on behind all that is queued."""
    var device = Int(context.id())
    if device >= _MAX_DEVICES:
        raise Error(
            "max_ep: send_tokens on GPU ",
            device,
            ": the last one that has a second stream is ",
            _MAX_DEVICES - 1,
        )
    var sides = _SIDES.get_or_create_ptr()
    if not sides[].streams[device]:
        sides[].streams[device] = context.create_stream()
    var side = sides[].streams[device].value()
    var event = context.create_event()
    context.stream().record_event(event)
    side.enqueue_wait_for(event)
    sides[].are_forked[device] = True
    _ = take_sent(context, counters)
    sides[].sent[device].append(_Sent(counters, n_tokens))
    return side


def join(context: DeviceContext) raises:
    """Lets what is queued next wait for all that the second stream has."""
    var device = Int(context.id())
    var sides = _SIDES.get_or_create_ptr()
    if device >= _MAX_DEVICES or not sides[].are_forked[device]:
        return
    var event = context.create_event()
    sides[].streams[device].value().record_event(event)
    context.stream().enqueue_wait_for(event)
    sides[].are_forked[device] = False


def take_sent(context: DeviceContext, counters: Int) raises -> Int:
    """Takes back what `fork` was told of a rank."""
    var device = Int(context.id())
    if device >= _MAX_DEVICES:
        return -1
    var sides = _SIDES.get_or_create_ptr()
    ref sent = sides[].sent[device]
    for i in range(len(sent)):
        if sent[i].counters == counters:
            return sent.pop(i).n_tokens
    return -1


def check_sent[
    tokens_are_sent: Bool
](context: DeviceContext, counters: Int, n_tokens: Int) raises:
    """Checks that a dispatch is of the tokens that were sent, or none were."""
    var n_sent = take_sent(context, counters)
    comptime if tokens_are_sent:
        if n_sent == n_tokens:
            return
    else:
        if n_sent == -1:
            return
    raise Error(
        "max_ep: dispatch of ",
        n_tokens,
        " tokens, but send_tokens has sent ",
        "none" if n_sent < 0 else String(n_sent),
        " since the last dispatch. Send the tokens of a dispatch that has",
        (
            " tokens_are_sent, and those of no other. Then"
            " EPCommInitializer.reset()"
        ),
    )
