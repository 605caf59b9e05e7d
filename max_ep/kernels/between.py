# SPDX-License-Identifier: Apache-2.0
"""What a graph has between two of its ops, while it is built.

MAX's ``Graph`` does not say so publicly: this file reads the block of MLIR ops that
it builds, as of MAX 26.7. tests/test_halves.py would notice another one.
"""

from __future__ import annotations

from typing import Any

from max._mlir.ir import Attribute, BoolAttr, DictAttr
from max.graph import DeviceRef, Graph

# They launch nothing.
_WITHOUT_KERNEL = (
    "mo.buffer.create",
    "mo.constant",
    "rmo.mo.mutable.load",
    "rmo.reshape",
    "mo.chain.create",
)
_WITHOUT_LAUNCH = ('"max_ep.claim_', '"max_ep.look_')


def last_op() -> Any:
    """Returns the op that the current graph got last."""
    return Graph.current._current_block.operations[-1]


def runs_something_since(op: Any, device: DeviceRef) -> bool:
    """Tells whether a device has something to run between an op and what comes next.

    Args:
        op: From :func:`last_op`.
        device: The device, on which that op runs.

    Returns:
        Whether an op behind it may launch a kernel there; also if it is in another
        block.
    """
    operations = Graph.current._current_block.operations
    for i in range(len(operations) - 1, -1, -1):
        later = operations[i]
        if later == op:
            return False
        if later.name not in _WITHOUT_KERNEL and _runs_on(later, device):
            return True
    return True


def _runs_on(op: Any, device: DeviceRef) -> bool:
    if op.name == "mo.custom":
        return op.device == _of_mlir(device) and not str(op.symbol).startswith(
            _WITHOUT_LAUNCH
        )
    # As types are printed: !mo.tensor<[n, 80], bf16, gpu:0>
    types = {str(value.type) for value in (*op.operands, *op.results)} - {"!mo.chain"}
    return not types or any(text.endswith(f" {device}>") for text in types)


def _of_mlir(device: DeviceRef) -> Attribute:
    return Attribute._CAPICreate(device.to_mlir()._CAPIPtr)


def set_flag(op: Any, name: str) -> None:
    """Sets a parameter of a custom op that is False so far.

    Args:
        op: From :func:`last_op`.
        name: The parameter.
    """
    parameters = {item.name: item.attr for item in op.parameters}
    assert name in parameters, f"max_ep: {op.symbol} has no parameter {name}"
    with op.context:
        parameters[name] = BoolAttr.get(True)
        op.parameters = DictAttr.get(parameters)
