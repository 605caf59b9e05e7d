# SPDX-License-Identifier: Apache-2.0
"""The engines' own classes over our `deep_ep`: what processes of `test_engines.py` do.

Their packages are unpacked without what they depend on (`make test-engines`). Modules
that have nothing to do with `deep_ep` are replaced.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

E, K, CAP = 8, 3, 16
"""As in `elastic_case.py`: the same kernels."""


def folder() -> Path:
    """Where the engines' packages are."""
    return Path(os.environ["MAX_EP_ENGINES"])


def given_to(rank: int, seed: int, n: int, hidden: int) -> tuple[torch.Tensor, ...]:
    """Tokens, ids of experts, and weights."""
    draw = torch.Generator().manual_seed(10 * seed + rank)
    x = torch.randn(n, hidden, generator=draw).bfloat16()
    ids = torch.rand(n, E, generator=draw).topk(K, -1).indices
    weights = torch.rand(n, K, generator=draw) + 0.1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return x.to(device), ids.to(device), weights.to(device)


def experts(rows: torch.Tensor, counts: list[int], first: int) -> torch.Tensor:
    """Multiplies the rows of each expert by its number and 1; keeps those behind."""
    of = torch.arange(first, first + len(counts), device=rows.device) + 1
    factors = of.repeat_interleave(torch.tensor(counts, device=rows.device))
    made = rows[: len(factors)] * factors[:, None].to(rows.dtype)
    return torch.cat([made, rows[len(factors) :]])


def padded_experts(
    rows: torch.Tensor, counts: torch.Tensor, first: int
) -> torch.Tensor:
    """Likewise for padded rows `[experts, rows, hidden]`; what nobody sent is NaN."""
    made = torch.full_like(rows, float("nan"))
    for i, n in enumerate(counts.tolist()):
        made[i, :n] = (rows[i, :n].float() * (first + i + 1)).bfloat16()
    return made


def plain_layer(x: Any, ids: Any, weights: Any) -> torch.Tensor:
    factors = (weights * (ids + 1) * (ids >= 0)).sum(1, keepdim=True)
    return x.float() * factors


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=2**-5, atol=2**-3)


def fp8_in_blocks(x: torch.Tensor, block: int, **_: Any) -> tuple[Any, Any]:
    """Quantizes, in place of an engine's kernel: values, and a scale a block."""
    blocks = x.float().unflatten(1, (-1, block))
    scales = blocks.abs().amax(2, keepdim=True).clamp(1e-4) / 448
    values = (blocks / scales).to(torch.float8_e4m3fn)
    return values.flatten(1), scales.squeeze(2)


class _Absent(ModuleType):
    """A module of which only names are asked: each is a class that does nothing."""

    __path__: list[str] = []  # it has modules, too

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        does: dict[str, Any] = {
            "__init__": lambda self, *_, **__: None,
            "__call__": lambda self, *given, **__: given[0] if given else None,
            "__class_getitem__": classmethod(lambda cls, *_: cls),
            "__get_pydantic_core_schema__": classmethod(lambda *_: {"type": "any"}),
        }
        made = type(name, (), does)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if any(f"{name}.".startswith(f"{absent}.") for absent in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def leave_out(*names: str) -> None:
    """Makes packages that are not there importable, with all that is in them."""
    sys.meta_path.insert(0, _Finder(names))


def replace(name: str, **attributes: Any) -> None:
    """Puts a module in an engine's place."""
    module = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


Engine = Callable[[int, int], None]
