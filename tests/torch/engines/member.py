# SPDX-License-Identifier: Apache-2.0
"""A process of `test_engines.py`."""

import sys
import traceback

import torch.distributed as dist

from tests.children import ROOT
from tests.torch.engines import Engine, folder
from tests.torch.engines.megatron import megatron, nemo
from tests.torch.engines.sglang import sglang
from tests.torch.engines.titan import torchtitan
from tests.torch.engines.vllm import vllm
from tests.torch.torch_member import open_group

ENGINES: dict[str, Engine] = dict(
    torchtitan=torchtitan, megatron=megatron, nemo=nemo, sglang=sglang, vllm=vllm
)


def member(rank: int, n_ranks: int, store: str, name: str) -> str:
    """Runs an engine's classes; returns what went wrong."""
    sys.path[:0] = [str(ROOT / "integrations/deep_ep"), str(folder())]
    open_group(rank, n_ranks, store)
    try:
        ENGINES[name](rank, n_ranks)
    except Exception:
        return traceback.format_exc()
    finally:
        dist.destroy_process_group()
    return ""
