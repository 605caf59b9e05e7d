# SPDX-License-Identifier: Apache-2.0
"""Our decoder of several checkpoints, without a server: compiled together.

An op that is in several graphs is compiled once, and most are.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from max import tree
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph
from max.graph import Module as GraphModule
from max.nn.kv_cache.cache_params import PACKED_PAGE_STRIDE, MHAKVCacheParams
from max.nn.layer import Module
from max.nn.transformer import ReturnLogits

from max_ep import EPCommInitializer, extension_path
from max_ep.checkpoint import check_config, config_in, described
from max_ep.experts import PACKAGE
from max_ep.serve.balancer import Balancer
from max_ep.serve.decoder import OurDecoder
from max_ep.serve.replaced import replaced
from max_ep.serve.settings import balance_s, serving_config
from max_ep.serve.weights import decoder_weights

PAGE = 128
"""Tokens of a page, and the most of a request: it has one page."""

SLICE_BYTES = 5000
"""What may move before a step: less than an expert of the tiny checkpoints, and no
multiple of its matrices."""


class _Named(Module):
    """Gives the weights of a decoder names that no other one has."""

    def __init__(self, name: str, decoder: OurDecoder) -> None:
        super().__init__()
        setattr(self, name, decoder)

    def __call__(self, *_: Any) -> None:
        raise NotImplementedError("its decoder is called")


class Decoders:
    """Decoders on ranks of the CPU, by the name of their checkpoint's folder."""

    def __init__(
        self, session: InferenceSession, folders: list[Path], n_ranks: int = 2
    ) -> None:
        module, weights = GraphModule(), {}
        self._decoders: dict[str, OurDecoder] = {}
        self._groups: dict[str, EPCommInitializer] = {}
        self._caches: dict[str, Buffer] = {}
        self.balancers: dict[str, Balancer | None] = {}
        for folder in folders:
            name, pipeline = folder.name, _pipeline_of(folder, n_ranks)
            config = check_config(config_in(folder))
            decoder = _decoder_of(config, pipeline)
            named = _Named(name, decoder)
            read = decoder_weights(pipeline)
            named.load_state_dict(
                {f"{name}.{w}": v for w, v in decoder.own_weights(read).items()},
                override_quantization_encoding=True,
                weight_alignment=1,
                strict=not decoder.described.is_tied,
            )
            weights |= named.state_dict()
            types = decoder._input_types()
            with replaced(), Graph(name, input_types=types, module=module) as graph:
                graph.output(*decoder(*graph.inputs))
            self._decoders[name] = decoder
            self._groups[name] = EPCommInitializer(decoder.config.ep_config)
            self._groups[name].ep_init(session)
            self.balancers[name] = None
            if decoder.held is not None:
                self.balancers[name] = Balancer(
                    self._groups[name], decoder.held, read, balance_s(), SLICE_BYTES
                )
        packages = [extension_path(), extension_path(PACKAGE)]
        compiled = session.compile(module, custom_extensions=packages)
        self._models = session.init_all(compiled, weights_registry=weights)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()

    def begin(self, name: str, n_requests: int) -> None:
        """Makes an empty cache for so many requests."""
        kv = self._decoders[name].config.kv_params
        heads = [PAGE, kv.n_kv_heads, kv.head_dim]
        zeros = np.zeros([n_requests, 2, kv.num_layers, *heads], np.float32)
        self._caches[name] = Buffer.from_numpy(zeros)

    def step(
        self, name: str, tokens: list[list[int]], n_cached: list[int]
    ) -> np.ndarray:
        """Runs the new tokens of each request, of which so many tokens are in the cache
        already; returns the logits behind the last, ``[n_requests, vocab_size]``."""
        n = [len(new) for new in tokens]
        longest = max(n)
        held = max(new + old for new, old in zip(n, n_cached))
        kv = [
            np.array(n_cached, np.uint32),
            np.arange(len(n), dtype=np.uint32).reshape(-1, 1),
            np.array([longest], np.uint32),
            np.array([held], np.uint32),
            np.array([PACKED_PAGE_STRIDE], np.int64),
            np.array([len(n), longest, 1, held], np.int64),
        ]
        inputs = [
            np.concatenate(tokens).astype(np.int64),
            np.cumsum([0, *n], dtype=np.uint32),
            np.array([1], np.int64),
        ]
        of_group = self._groups[name].model_inputs()
        if balancer := self.balancers[name]:
            of_group += balancer.inputs()
        logits, *_ = self._models[name].execute(
            *map(Buffer.from_numpy, inputs),
            self._caches[name],
            *map(Buffer.from_numpy, kv),
            *of_group,
        )
        return logits.to_numpy()


def _pipeline_of(folder: Path, n_ranks: int) -> Any:
    """Returns what MAX makes of the flags of a server, as far as we ask."""
    repo = SimpleNamespace(repo_type="local", local_path=str(folder), subfolder=None)
    model = SimpleNamespace(
        huggingface_model_repo=repo,
        huggingface_weight_repo=repo,
        resolved_weight_paths=lambda: sorted(folder.glob("*.safetensors")),
        device_specs=[SimpleNamespace(device_type="cpu")],
        quantization_encoding="float32",
        data_parallel_degree=1,
        max_length=PAGE,
    )
    runtime = SimpleNamespace(
        ep_size=n_ranks,
        max_batch_input_tokens=PAGE,
        enable_chunked_prefill=True,
        enable_overlap_scheduler=False,
    )
    sampling = SimpleNamespace(enable_penalties=False)
    return SimpleNamespace(model=model, runtime=runtime, sampling=sampling)


def _decoder_of(config: dict[str, Any], pipeline: Any) -> OurDecoder:
    model = described(config)
    group = serving_config(pipeline, model, DType.float32)
    group.node_id = 0
    attention = model.layers[0].attention
    kv_params = MHAKVCacheParams(
        dtype=DType.float32,
        n_kv_heads=attention.n_kv_heads,
        head_dim=attention.head_dim,
        num_layers=len(model.layers),
        devices=[DeviceRef.CPU()],
        page_size=PAGE,
    )
    assert len(tree.leaves(kv_params.get_symbolic_inputs())) == 7
    of_max = SimpleNamespace(
        devices=[DeviceRef.CPU()],
        dtype=DType.float32,
        kv_params=kv_params,
        max_seq_len=PAGE,
        return_logits=ReturnLogits.LAST_TOKEN,
        ep_config=group,
    )
    return OurDecoder(of_max, model)
