# SPDX-License-Identifier: Apache-2.0
"""Chains of dispatch and combine as MAX graphs: for max_ep and for MAX's own EP.

Both have the same Python surface, so the same code builds and runs both; which
one is the module that is passed in. A chain of L layers is one graph: each
layer dispatches the tokens, combines the rows of the experts, and its sums are
the next layer's tokens. The experts are the identity (FP8 rows cannot be
combined as they are: there, every expert of a rank returns one given row, the
same for all tokens). Router weights are powers of two, see ``LAYER_FACTORS``; with
reduced combine they are given to dispatch.

Graphs are built from types alone, with the number of tokens left open, so that
they can be compiled where there is no GPU, once for many token counts.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from max.driver import Accelerator
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops

from . import gpu_graphs_all_gather
from .gpu_shapes import LAYER_FACTORS, OURS, ROUTED_FORMS, Config

FORMS = {
    "fused": "ep_dispatch and ep_combine, one op for each GPU",
    "all": "ep_dispatch_all and ep_combine_all, one op for all GPUs",
    "split": "async on all GPUs, then wait on all",
    "watched": "as split, with ep_watch between the halves, which waits for all",
    "dispatch": "ep_dispatch alone, L times",
    "routed": "as fused, with a router in front of each dispatch",
    "all_gather": "token_dispatch and token_combine of AllGatherTokenDispatcher",
}
"""What a chain is made of."""

# A rank of max_ep does not send before all have read what it sent last, so
# dispatch may follow dispatch. MAX's EP does not say that it may.
DEFAULT_FORMS = {
    "ours": ("fused", "all", "split", "dispatch"),
    "ours_by_rank": ("fused", "split", "dispatch"),
    "ours_reduced": ("fused", "split", "watched", "dispatch", *ROUTED_FORMS),
    "ours_all_gather": ("all_gather",),
    "max": ("fused", "all", "split"),
    "nccl": ("all_gather", "all_to_all"),
}

_N_FACTORS = len(LAYER_FACTORS)

CHECKED_LAYERS = 2
"""Layers of a chain whose first layer is compared with the oracle."""


def library(peer: str) -> ModuleType:
    """Returns the module behind a peer."""
    return importlib.import_module("max_ep" if peer in OURS else "max.nn.comm.ep")


def ep_config(config: Config) -> Any:
    """Returns the library's ``EPConfig``."""
    from max_ep import blockwise_fp8_quant_config

    is_fp8 = config.dtype == "fp8"
    fields: dict[str, Any] = dict(
        dispatch_dtype=DType.float8_e4m3fn if is_fp8 else DType.bfloat16,
        combine_dtype=DType.bfloat16,
        hidden_size=config.shape.hidden_size,
        top_k=config.shape.top_k,
        n_experts=config.shape.n_experts,
        max_tokens_per_rank=config.max_tokens,
        n_gpus_per_node=config.n_ranks,
        n_nodes=1,
        node_id=0,
        dispatch_quant_config=blockwise_fp8_quant_config() if is_fp8 else None,
    )
    if config.is_ours:
        fields |= dict(target="gpu", timeout_s=5.0, **OURS[config.peer])
    return library(config.peer).EPConfig(**fields)


# ------------------------------------------------------------------------- graphs


def graph_of(config: Config, form: str, *, is_check: bool = False) -> Graph:
    """Builds a chain: one that is timed, or a short one that returns what is checked.

    A chain that returned its rows would be timed with them: MAX copies what stands
    in a buffer of the graph, as results of halves that overlap do, when it is
    returned, and rows of 4096 tokens are 940 MB.

    Inputs, each a list with one tensor a rank: tokens ``[n_tokens, hidden]``
    bfloat16; ids ``[n_tokens, top_k]`` int32; then one list for each of
    ``LAYER_FACTORS`` of weights ``[n_tokens, top_k]`` float32 (not where neither
    dispatch nor combine takes any); for ``ROUTED_FORMS`` the router's
    ``[hidden, experts]`` bfloat16 and a zero ``[1]`` int32; for FP8 the experts'
    rows ``[max_recv_tokens, hidden]`` bfloat16 (not for ``dispatch``); last the
    EP inputs.

    Outputs, likewise: the last layer's sums. With ``is_check`` the first layer's
    sums; then for each rank what its dispatch returned without the last element:
    rows, for FP8 scales, row offsets, expert ids. For ``dispatch`` both return only
    that, of the last layer. For ``all_gather`` see
    :func:`bench.gpu_graphs_all_gather.graph_of`.
    """
    if config.is_dispatcher:
        return gpu_graphs_all_gather.graph_of(config)
    n_layers = CHECKED_LAYERS if is_check else config.n_layers(form)
    shape, n = config.shape, config.n_ranks
    group = ep_config(config)
    manager = library(config.peer).EPBatchManager(group)

    def types(dtype: DType, dims: list) -> list[TensorType]:
        return [TensorType(dtype, dims, DeviceRef.GPU(i)) for i in range(n)]

    inputs = types(DType.bfloat16, ["n_tokens", shape.hidden_size])
    inputs += types(DType.int32, ["n_tokens", shape.top_k])
    if takes_weights(config, form):
        for _ in LAYER_FACTORS:
            inputs += types(DType.float32, ["n_tokens", shape.top_k])
    if form in ROUTED_FORMS:
        inputs += types(DType.bfloat16, [shape.hidden_size, shape.n_experts])
        inputs += types(DType.int32, [1])
    if form != "dispatch" and config.dtype == "fp8":
        rows = [group.get_max_recv_tokens(), shape.hidden_size]
        inputs += types(DType.bfloat16, rows)
    name = f"{config.name}_{form}_l{n_layers}"
    with Graph(name, input_types=[*inputs, *manager.input_types()]) as graph:
        values = [value.tensor for value in graph.inputs[: len(inputs)]]
        manager.fetch_buffers(graph.inputs[len(inputs) :])
        x, ids, *rest = (values[i : i + n] for i in range(0, len(values), n))
        n_weights = _N_FACTORS if takes_weights(config, form) else 0
        weights, rest = rest[:n_weights], rest[n_weights:]
        n_router = 2 if form in ROUTED_FORMS else 0
        router, expert_rows = rest[:n_router], rest[n_router:]
        kept: list[tuple[TensorValue, ...]] = []
        first: list[TensorValue] = []
        for layer in range(n_layers):
            of_layer = weights[layer % _N_FACTORS] if weights else None
            with_tokens = of_layer if config.is_reduced else None
            of_router = _route(x, ids, *router) if router else ids
            outputs = _dispatch(manager, form, x, of_router, with_tokens)
            if form == "dispatch":
                kept = outputs
                continue
            rows = expert_rows[0] if expert_rows else [o[0] for o in outputs]
            with_rows = None if config.is_reduced else of_layer
            x = _combine(manager, form, rows, with_rows)
            kept, first = kept or outputs, first or x
        rows_kept = [value for o in kept for value in o[:-1]]
        if form == "dispatch":
            graph.output(*rows_kept)
        elif is_check:
            graph.output(*first, *rows_kept)
        else:
            graph.output(*x)
    return graph


def takes_weights(config: Config, form: str) -> bool:
    """Returns whether a chain has router weights among its inputs."""
    return form != "dispatch" or config.is_reduced


def _route(
    x: list[TensorValue],
    ids: list[TensorValue],
    gate: list[TensorValue],
    zero: list[TensorValue],
) -> list[TensorValue]:
    """Routes, and returns the given ids, which depend on it."""
    routed = []
    for tokens, given, weights, nothing in zip(x, ids, gate, zero):
        _, chosen = ops.top_k(tokens @ weights, int(given.shape[1]), -1)
        routed.append(given + ops.cast(chosen, DType.int32) * nothing)
    return routed


def _dispatch(
    manager: Any,
    form: str,
    x: list[TensorValue],
    ids: list[TensorValue],
    weights: list[TensorValue] | None,
) -> list[tuple[TensorValue, ...]]:
    """Dispatches on all ranks; ``weights``: those that go with the tokens."""
    ranks = list(range(len(x)))

    def more(i: int) -> dict:
        return {} if weights is None else {"router_weight": weights[i]}

    if form == "all":
        return manager.ep_dispatch_all(x, ids, ranks)
    if form in ("split", "watched"):
        for i in ranks:
            manager.ep_dispatch_async(x[i], ids[i], i, **more(i))
        if form == "watched":
            for i in ranks:
                manager.ep_watch("dispatch", i)
        return [manager.ep_dispatch_wait(i) for i in ranks]
    return [manager.ep_dispatch(x[i], ids[i], i, **more(i)) for i in ranks]


def _combine(
    manager: Any,
    form: str,
    rows: list[TensorValue],
    weights: list[TensorValue] | None,
) -> list[TensorValue]:
    """Combines on all ranks; ``weights`` is None if dispatch has them."""
    ranks = list(range(len(rows)))

    def of(i: int) -> TensorValue | None:
        return None if weights is None else weights[i]

    if form == "all":
        return manager.ep_combine_all(rows, weights, ranks)
    if form in ("split", "watched"):
        for i in ranks:
            manager.ep_combine_async(rows[i], i)
        if form == "watched":
            for i in ranks:
                manager.ep_watch("combine", i)
        return [manager.ep_combine_wait(of(i), i) for i in ranks]
    return [manager.ep_combine(rows[i], of(i), i) for i in ranks]


# ------------------------------------------------------------- compile, without GPU


def use_virtual_devices(n_ranks: int) -> None:
    """Makes this process see H200s that are not there; call it first of all."""
    import max.driver

    max.driver.set_virtual_device_api("cuda")
    max.driver.set_virtual_device_target_arch("sm_90a")
    max.driver.set_virtual_device_count(n_ranks)


def compile_config(config: Config, forms: tuple[str, ...], folder: Path) -> list[str]:
    """Compiles a configuration's graphs and its set-up graph into a folder.

    One folder holds one configuration: the set-up graphs of MAX's EP all have
    one name and one signature.

    Returns:
        A line for each graph: its name, seconds, and what went wrong if it did.
    """
    devices = [Accelerator(i) for i in range(config.n_ranks)]
    session = InferenceSession(devices=devices, export_mefs=folder)
    said = []
    for form in forms:
        begin = time.perf_counter()
        error = ""
        try:
            session.load(graph_of(config, form))
            if not config.is_dispatcher:
                session.load(graph_of(config, form, is_check=True))
        except Exception as e:
            error = f" FAILED: {e} {str(e.__cause__)[:2000]}"
        said.append(f"{form} {time.perf_counter() - begin:.0f} s{error}")
    if config.is_dispatcher:
        return said
    begin = time.perf_counter()
    before = set(folder.glob("*.mef"))
    error = ""
    try:
        with _no_allocation(config.peer):
            comm = library(config.peer).EPCommInitializer(ep_config(config))
            comm.ep_init(session)
    except Exception as e:
        # Running the graph cannot work here; compiling it must have.
        error = f" not exported, the GPU host compiles it: {e!r}"
    exported = set(folder.glob("*.mef")) - before
    said.append(
        f"set-up {time.perf_counter() - begin:.0f} s{'' if exported else error}"
    )
    return said


class _NoBuffer:
    """Stands in for a device buffer where nothing can be allocated."""

    def __init__(self, dtype: DType, shape: list[int], **more: Any) -> None:
        self.dtype, self.shape, self.device = dtype, shape, more.get("device")

    def __getattr__(self, name: str) -> Callable[..., _NoBuffer]:
        return lambda *_, **__: self


@contextlib.contextmanager
def _no_allocation(peer: str) -> Iterator[None]:
    """Lets MAX's ``EPCommInitializer`` get as far as compiling its graph.

    It allocates counters and asks for peer access before, which virtual devices
    refuse. Only for the compile machine.
    """
    if peer != "max":
        yield
        return
    module: Any = importlib.import_module("max.nn.comm.ep.ep_manager")
    kept = {
        name: getattr(module, name) for name in ("Buffer", "enable_all_peer_access")
    }
    module.Buffer, module.enable_all_peer_access = _NoBuffer, lambda: None
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
