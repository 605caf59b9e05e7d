# SPDX-License-Identifier: Apache-2.0
"""Messages to a process that is to be met, which none of its group would send."""

import json

OWNER = {"pid": 1, "started": "", "fingerprint": "top_k=2"}
NONSENSE = [
    b"",
    b"hello",
    b"\xff",
    b"7",
    b"[1]",
    b"[1, {}]",
    b"[" * 65536,  # deeper than Python's parser goes
    b"9" * 65536,
    *(
        json.dumps(said).encode()
        for said in (
            [1, OWNER],
            {"node": 1},
            {"node": 1, "owner": 7},
            {"node": 1, "owner": OWNER | {"more": 1}},
            {"node": [], "owner": OWNER},
            {"node": float("inf"), "owner": OWNER},
            {"node": 1e400, "owner": OWNER},
            {"node": 10**400, "owner": OWNER},
            {"node": True, "owner": OWNER},
            {"node": "1", "owner": OWNER},
            {"node": None, "owner": OWNER},
            {"node": 1, "owner": OWNER | {"fingerprint": 7}},
            {"node": 1, "owner": OWNER | {"fingerprint": ["top_k"]}},
            {"node": 1, "owner": OWNER | {"pid": "1"}},
            {"node": 1, "owner": OWNER | {"fingerprint": "x" * 65536}},
        )
    ),
]
