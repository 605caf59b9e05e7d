# SPDX-License-Identifier: Apache-2.0
"""How a rank reaches its peers' memory.

`PeerBuffers` holds one address a rank. On CPU every rank's region is mapped
into this process (it is this process's own memory, or POSIX shared memory),
so a put is a store. The SHMEM transport (`use_shmem` on GPUs) belongs here.
"""
from .token_format import BytePointer


struct PeerBuffers[n_ranks: Int](TrivialRegisterPassable):
    """The same buffer on every rank, as addresses in this process.

    Parameters:
        n_ranks: Ranks of the group.
    """

    var addresses: Pointer[UInt64, MutUntrackedOrigin]
    """Addresses, `[n_ranks]`."""

    @always_inline
    def __init__(out self, addresses: Pointer[UInt64, MutUntrackedOrigin]):
        """Looks at addresses that somebody else owns.

        Args:
            addresses: `[n_ranks]` UInt64.
        """
        self.addresses = addresses

    @always_inline
    def __getitem__(self, rank: Int) -> BytePointer:
        """Points to the start of a rank's buffer.

        Args:
            rank: In `[0, n_ranks)`.

        Returns:
            The buffer.
        """
        return BytePointer(
            unsafe_from_address=Int(self.addresses[unsafe_offset=rank])
        )

    def is_mapped(self) -> Bool:
        """Tells whether every rank's buffer is there.

        Returns:
            False once the memory was freed (`EPCommInitializer.close`).
        """
        for rank in range(Self.n_ranks):
            if self.addresses[unsafe_offset=rank] == 0:
                return False
        return True
