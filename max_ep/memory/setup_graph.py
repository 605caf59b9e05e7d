# SPDX-License-Identifier: Apache-2.0
"""The graph that prepares memory before a group's first launch."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType

from ..config import EPConfig
from ..graph.builders import call_ep_init
from ..limits import NUM_GROUPS

SETUP_GRAPH = "max_ep_init"
"""Name of the graph."""

_setup_models: WeakKeyDictionary[InferenceSession, dict[tuple, Model]] = (
    WeakKeyDictionary()
)


def setup_model(
    session: InferenceSession, config: EPConfig, model: Model | None = None
) -> Model:
    """Loads the graph that prepares one rank on each device of this process, once a
    session and kind of devices: the sizes of the group are its inputs. ``model``: it,
    if it was compiled with others; later calls get it, too."""
    kind = (config.target, config.n_local_devices, len(config.sizes().setup))
    models = _setup_models.setdefault(session, {})
    if model is not None:
        models[kind] = model
    if kind not in models:
        models[kind] = session.load(setup_graph(config))
    return models[kind]


def setup_graph(config: EPConfig, module: Module | None = None) -> Graph:
    """Builds the graph that runs ``max_ep.init`` for one rank per device; with others
    of one ``module`` it compiles in about the time of one."""
    cpu = DeviceRef.CPU()
    types: list[BufferType | TensorType] = []
    n_devices = config.n_local_devices
    for i in range(n_devices):
        device = config.device(i * config.n_gpus_per_node // n_devices)
        # The number of counters is left open: one graph serves all sizes.
        types += [BufferType(DType.int32, ["counters_words"], device)] * NUM_GROUPS
        types.append(TensorType(DType.int64, [len(config.sizes().setup)], cpu))
    with Graph(SETUP_GRAPH, input_types=types, module=module) as graph:
        outputs = []
        for i in range(0, len(types), 3):
            group_0, group_1, words = graph.inputs[i : i + 3]
            groups = group_0.buffer, group_1.buffer
            outputs += call_ep_init(*groups, config, setup=words.tensor)
        graph.output(*outputs)
    return graph
