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
from max_ep.cli.serve import CUSTOM_ARCHITECTURES, device_flags

GPU = ["--target", "cuda:sm_90a"]
FLAGS = {
    "one_gpu": [*GPU, *device_flags(1, 0)],
    "two_gpus": [*GPU, *device_flags(2, 0)],
    "two_ranks_of_the_cpu": device_flags(0, 2),
}
LIMITS = "--max-length 256 --max-batch-size 4 --max-batch-input-tokens 256".split()


def count_ops(graph: Graph) -> NoReturn:
    """Ends the program where the decoder would be compiled."""
    # With the subgraphs, one for each kind of layer.
    text = str(graph._module)
    latent = re.findall(r'"mo\.mla\.graph\..*? : \(!mo\.tensor<\[\w+, (\d+), ', text)
    print("latent:", sorted({int(n_heads) for n_heads in latent}))
    symbols = re.findall(r'symbol = "([\w.]+)"', text)
    names = [symbol for symbol in symbols if symbol.startswith(("max_ep.", "ep."))]
    print("early:", json.dumps(sorted(read_early(text))))
    print("ops:", json.dumps(Counter(names)), flush=True)
    os._exit(0)


def read_early(text: str) -> set[str]:
    """Finds all that makes the weights of `add_norm_linear`, its third and fourth
    operand, which it reads before the kernel before it has ended."""
    makers: dict[str, tuple[str, list[str]]] = {}
    todo = []
    for made, op, given in re.findall(r"^ *(%[^=]*) = ([\w.]+)(.*)$", text, re.M):
        for name in re.findall(r"%\w+", made):
            makers[name] = op, re.findall(r"%\w+", given)
        if '"max_ep.add_norm_linear"' in given:
            todo += makers[name][1][2:4]
    found = set()
    while todo:
        op, of = makers.get(todo.pop(), ("an argument", []))
        found.add(op)
        todo += of
    return found


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
    sys.argv = ["max", "warm-cache", "--model-path", model, *FLAGS[where]]
    sys.argv += [*LIMITS, *CUSTOM_ARCHITECTURES]
    sys.argv += ["--export-mefs", str(Path(folder))]
    main()
