# SPDX-License-Identifier: Apache-2.0
"""``python -m max_ep.cli`` is ``max-ep``."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
