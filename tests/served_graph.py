# SPDX-License-Identifier: Apache-2.0
"""Prints the EP ops of the graph that max_ep.serve builds of a model.

Takes where (a key of ``FLAGS``), the checkpoint's folder, and one for what is compiled
before. GPUs are virtual, and nothing is compiled: where MAX would compile the decoder,
its ops are counted, printed as JSON, and the program ends. A program of its own, since
virtual devices are for a whole process.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import MagicMock

from max._entrypoints.pipelines import main
from max.engine import InferenceSession
from max.graph import Graph

from max_ep import EPCommInitializer

FLAGS = {
    "one_gpu": "--target cuda:sm_90a --devices gpu:0 --quantization-encoding bfloat16",
    "two_gpus": "--target cuda:sm_90a --devices gpu:0,1 --quantization-encoding "
    "bfloat16 --data-parallel-degree 2 --ep-size 2",
    "two_ranks_of_the_cpu": "--devices cpu --quantization-encoding float32 --ep-size 2",
}
LIMITS = (
    "--max-length 256 --max-batch-size 4 --max-batch-input-tokens 256 "
    "--custom-architectures max_ep.serve"
)


def count_ops(graph: Graph) -> NoReturn:
    """Ends the program where the decoder would be compiled."""
    # With the subgraphs, one for each kind of layer.
    symbols = re.findall(r'symbol = "([\w.]+)"', str(graph._module))
    names = [symbol for symbol in symbols if symbol.startswith(("max_ep.", "ep."))]
    print("ops:", json.dumps(Counter(names)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    where, model, folder = sys.argv[1:]

    def take_graph(_session: InferenceSession, model: Any, **_options: Any) -> Any:
        """Takes the decoder; samplers, which come before it, need not be there."""
        text = str(model) if isinstance(model, Graph) else ""
        if "max_ep." in text:
            count_ops(model)
        return MagicMock()

    InferenceSession.compile = InferenceSession.load = take_graph
    EPCommInitializer.ep_init = lambda *_: None
    sys.argv = ["max", "warm-cache", "--model-path", model, *FLAGS[where].split()]
    sys.argv += LIMITS.split()
    sys.argv += ["--export-mefs", str(Path(folder))]
    main()
