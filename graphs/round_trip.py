# SPDX-License-Identifier: Apache-2.0
import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

from max_ep import EPBatchManager, EPCommInitializer, EPConfig

cpu, f32, ranks = DeviceRef.CPU(), DType.float32, range(4)
config = EPConfig(
    dispatch_dtype=f32, combine_dtype=f32, hidden_size=256, top_k=2, n_experts=8,
    max_tokens_per_rank=16, n_gpus_per_node=4, n_nodes=1, target="cpu",
)  # fmt: skip
manager = EPBatchManager(config)
types = [TensorType(f32, [16, 256], cpu) for _ in ranks]  # tokens of each rank
types += [TensorType(DType.int32, [16, 2], cpu) for _ in ranks]  # their experts
types += [TensorType(f32, [16, 2], cpu) for _ in ranks]  # router weights
with Graph("round_trip", input_types=[*types, *manager.input_types()]) as graph:
    x, ids, weights = ([v.tensor for v in graph.inputs[i : i + 4]] for i in (0, 4, 8))
    manager.fetch_buffers(graph.inputs[12:])
    dispatched = manager.ep_dispatch_all(x, ids, list(ranks))
    experts = [rows * 2 for rows, *_ in dispatched]  # every expert doubles its rows
    graph.output(*manager.ep_combine_all(experts, weights, list(ranks)))

rng = np.random.default_rng(0)
tokens = [rng.standard_normal((16, 256), np.float32) for _ in ranks]
chosen = [rng.permuted(np.tile(np.arange(8, dtype=np.int32), (16, 1)), axis=1)[:, :2]
          for _ in ranks]  # fmt: skip
halves = [np.full((16, 2), 0.5, np.float32) for _ in ranks]
session = InferenceSession(devices=[CPU()])
model = session.load(graph)
with EPCommInitializer(config) as comm:
    comm.ep_init(session)
    chosen = [np.ascontiguousarray(ids) for ids in chosen]
    results = model.execute(*tokens, *chosen, *halves, *comm.model_inputs())
for rank in ranks:
    np.testing.assert_array_equal(results[rank].to_numpy(), 2 * tokens[rank])
print("every token went to two experts and came back doubled")
