# SPDX-License-Identifier: Apache-2.0
"""Executes a chain of layers twice, for a profiler.

    python ncu_run.py MEF_DIR RANKS TOKENS FORM

with the graphs that ``python -m bench.gpu_round_trip --compile-only`` made.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, ".")
from bench import gpu_peers_max
from bench.gpu_shapes import Case, Config

mef_dir, n_ranks, n_tokens, form = sys.argv[1:]
config = Config("ours_reduced", int(n_ranks), "h7168_e256_k8", "bfloat16", int(n_tokens))
runner = gpu_peers_max.Runner(config, Path(mef_dir) / config.name)
data = gpu_peers_max.make_data(
    Case(config, int(n_tokens), "uniform"), 0, exact_weights=True
)
inputs = runner._inputs(form, data)
model = runner._model(form)
for _ in range(2):
    model.execute(*inputs)
    runner._finish()
print("done", flush=True)
# With a profiler attached the interpreter's own exit may hang.
os._exit(0)
