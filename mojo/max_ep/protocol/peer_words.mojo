# SPDX-License-Identifier: Apache-2.0
"""What a reader must know about words of one kind that peers write into a region.

`word_list.mojo` lists all kinds. A rank waits for them, `watch` measures how long,
`init` clears them, and `max-ep who` looks at them while a rank hangs.
"""


struct Buf:
    """Buffers of a region: `[dispatch, combine][send, recv, counts]`."""

    comptime DISPATCH_SEND = 0
    comptime DISPATCH_RECV = 1
    comptime DISPATCH_COUNTS = 2
    comptime COMBINE_SEND = 3
    comptime COMBINE_RECV = 4
    comptime COMBINE_COUNTS = 5


comptime N_BUFFERS = 6
comptime FLAG_BYTES = 8
"""Bytes of one flag or done word (UInt64)."""


struct Limit:
    """How many of the `n` words of a peer exist, where ranks have fewer experts."""

    comptime NONE = 0
    comptime EXPERTS_OF_READER = 1
    comptime EXPERTS_OF_PEER = 2

    comptime NAMES: Array[StaticString, 3] = ["none", "reader", "peer"]


struct Which:
    """Which words of a peer a rank awaits."""

    comptime EACH = 0
    """All that exist."""
    comptime CHOICES = 1
    """Word `i` if the peer has a row of choice `i` of this rank's tokens."""
    comptime TOKENS = 2
    """The words of token `i` if the peer has a row of it."""
    comptime SOME = 3
    """The words that other words announce."""

    comptime NAMES: Array[StaticString, 4] = ["each", "choices", "tokens", "some"]


struct Holds:
    """What a word holds. A reader accepts a generation that has reached the one it
    awaits; only a done word may be ahead of it."""

    comptime GENERATION = 0
    """In its upper half, as `flags.mojo` says."""
    comptime LOWER_GENERATION = 1
    """In its lower half."""
    comptime DATA = 2
    """16 bytes of data, which are there unless the last word is `SENTINEL`. The reader
    puts that back, so nobody else can see whether they have come."""

    comptime NAMES: Array[StaticString, 3] = ["generation", "lower_generation", "data"]


comptime DISPATCH_ASYNC = 0
comptime DISPATCH_WAIT = 1
comptime COMBINE_ASYNC = 2
comptime COMBINE_WAIT = 3

comptime PHASES: Array[StaticString, 4] = [
    "dispatch_async",
    "dispatch_wait",
    "combine_async",
    "combine_wait",
]
"""Names of the phases, by their numbers."""
comptime READ_ONLY = -1
"""The phase of words that are read without being awaited."""


struct PeerWords(TrivialRegisterPassable):
    """The words of one kind in the region of a rank."""

    var name: StaticString
    var buffer: Int
    """The buffer that has them, one of `Buf`."""
    var offset: Int
    """Bytes from its start to the first word of rank 0."""
    var peer_stride: Int
    """Bytes from the words of a peer to those of the next."""
    var n: Int
    """Words of a peer; 0: the group has none of this kind."""
    var spacing: Int
    """Bytes from a word to the next."""
    var n_runs: Int
    """How often `n` words stand together."""
    var run_stride: Int
    """Bytes from such words to the next ones."""
    var limit: Int
    var which: Int
    var holds: Int
    var phase: Int
    """The phase that awaits them, or `READ_ONLY`."""
    var counter: Int
    """The phase whose generation is awaited."""
    var step: Int
    """1: the generation after that one, -1: the one before."""

    var on_gpu: Bool
    """Whether the rank that reads them is on a GPU."""

    @always_inline
    def __init__(out self, on_gpu: Bool):
        """Describes no words."""
        self.name = ""
        self.buffer = 0
        self.offset = 0
        self.peer_stride = 0
        self.n = 0
        self.spacing = 0
        self.n_runs = 1
        self.run_stride = 0
        self.limit = Limit.NONE
        self.which = Which.EACH
        self.holds = Holds.GENERATION
        self.phase = READ_ONLY
        self.counter = 0
        self.step = 0
        self.on_gpu = on_gpu

    # ----------------------------------------------------------------- describes them

    @always_inline
    def add(
        mut self,
        name: StaticString,
        buffer: Int,
        offset: Int,
        peer_stride: Int = FLAG_BYTES,
    ):
        """Gives each peer one, which is read only."""
        self.name = name
        self.buffer = buffer
        self.offset = offset
        self.peer_stride = peer_stride
        self.n = 1

    @always_inline
    def each(mut self, n: Int, spacing: Int):
        """Gives each peer several."""
        self.n = n
        self.spacing = spacing

    @always_inline
    def repeat(mut self, n_runs: Int, stride: Int):
        self.n_runs = n_runs
        self.run_stride = stride

    @always_inline
    def await_in(mut self, phase: Int, which: Int = Which.EACH):
        """Says which phase awaits them. An *async* phase awaits that the generation
        before was read, a *wait* what has been sent of this one. A CPU rank advances
        its generation when a phase ends, a GPU rank when a launch begins."""
        self.phase = phase
        self.which = which
        var receives = phase % 2
        self.counter = phase - receives if self.on_gpu else phase
        self.step = receives - Int(self.on_gpu)

    @always_inline
    def await_sent(mut self, phase: Int, which: Int):
        """Says that an *async* phase awaits what has been sent of its generation."""
        self.await_in(phase, which)
        self.step += 1

    @always_inline
    def await_on_gpu(mut self, phase: Int, which: Int):
        if self.on_gpu:
            self.await_in(phase, which)

    # ------------------------------------------------------------------ what they are

    @always_inline
    def place(self, peer: Int, i: Int, run: Int = 0) -> Int:
        """Locates a word, from the start of its buffer."""
        return (
            self.offset
            + peer * self.peer_stride
            + run * self.run_stride
            + i * self.spacing
        )

    @always_inline
    def is_in_recv(self) -> Bool:
        """Returns whether they are in a recv buffer, not among counts."""
        return self.buffer == Buf.DISPATCH_RECV or self.buffer == Buf.COMBINE_RECV

    @always_inline
    def is_done_word(self) -> Bool:
        """Returns whether they say what a peer has read, not what it has sent."""
        var is_async = self.phase == DISPATCH_ASYNC or self.phase == COMBINE_ASYNC
        return is_async and self.step == -Int(self.on_gpu)
