# SPDX-License-Identifier: Apache-2.0
"""Checks while a graph is built: dtypes, shapes, devices, forms that can run, order.

Each error says what was given, what is needed, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, StaticDim, TensorValue, Value

from ..config import EPConfig
from ..plural import counted


def check_value(
    value: Value,
    what: str,
    dtypes: DType | tuple[DType, ...],
    shape: list[int | None],
    device: DeviceRef | None,
) -> None:
    """Raises unless a value has this dtype, shape and device; None: any."""
    if not isinstance(value, (TensorValue, BufferValue)):
        raise TypeError(
            f"{what} is a {type(value).__name__}; pass a graph value (a "
            "TensorValue, or `.tensor` of a graph input)"
        )
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if value.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise TypeError(f"{what} has dtype {value.dtype}, it must be {wanted}; cast it")
    given = list(value.shape)
    fits = len(given) == len(shape) and all(
        want is None or not isinstance(have, StaticDim) or int(have) == want
        for have, want in zip(given, shape)
    )
    if not fits:
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        have = ", ".join(map(str, given))
        raise ValueError(f"{what} has shape [{have}], it must be [{wanted}]")
    if device is not None and value.device != device:
        ref = "CPU()" if device.is_cpu() else f"GPU({device.id})"
        raise ValueError(
            f"{what} is on {value.device}, it must be on {device}; move it with "
            f".to(DeviceRef.{ref}), or choose another EPConfig.target"
        )


def differ(a: Dim, b: Dim) -> bool:
    return isinstance(a, StaticDim) and isinstance(b, StaticDim) and a != b


def check_n_tokens(config: EPConfig, what: str, n_tokens: Dim) -> None:
    if isinstance(n_tokens, StaticDim) and int(n_tokens) > config.max_tokens_per_rank:
        raise ValueError(
            f"{what} has {counted(int(n_tokens), 'token')}, "
            f"EPConfig.max_tokens_per_rank is {config.max_tokens_per_rank}; send fewer "
            "at a time, or raise it"
        )


def check_same_rows(
    what: str, value: TensorValue, other: str, other_value: TensorValue
) -> None:
    a, b = value.shape[0], other_value.shape[0]
    if differ(a, b):
        raise ValueError(
            f"{what} has {counted(a, 'row')} and {other} has {b}; pass as many rows of "
            "both, one a token"
        )


def check_all_ranks(
    config: EPConfig, device_ids: list[int], **lists: Sequence[TensorValue] | None
) -> None:
    """Raises unless all local ranks are named, and each list has a value for each."""
    if sorted(device_ids) != list(range(config.n_gpus_per_node)):
        all_ = f"all {counted(config.n_gpus_per_node, 'rank')} of this process"
        raise ValueError(f"device_ids={device_ids} must name {all_}")
    check_one_a_rank(len(device_ids), **lists)


def check_one_a_rank(n_ranks: int, **lists: Sequence[TensorValue] | None) -> None:
    """Raises unless each list has a value for each local rank."""
    for what, values in lists.items():
        if isinstance(values, TensorValue):
            raise TypeError(
                f"{what} is one TensorValue; pass a list, with a tensor for each of "
                f"the {counted(n_ranks, 'local rank')}"
            )
        if values is not None and len(values) != n_ranks:
            n = f"{counted(len(values), 'tensor')} for {counted(n_ranks, 'local rank')}"
            raise ValueError(f"{what} has {n}; pass one for each")


def refuse_if_in_turn(config: EPConfig, op: str) -> None:
    """Raises if a rank of the fused ``op`` would wait for peers that run after it."""
    if not config.runs_ranks_in_turn:
        return
    raise ValueError(
        f"{op} of one rank waits for its peers, but ranks of this process that share a "
        f"device run one after another (n_gpus_per_node={config.n_gpus_per_node}, "
        f"ranks_per_gpu={config.ranks_per_gpu}). Use ep_{op}_all, or ep_{op}_async (or "
        f"call_ep_{op}_async) of all ranks, then ep_{op}_wait (or call_ep_{op}_wait), "
        f"or a device for each rank: on CPU n_gpus_per_node=1, n_nodes="
        f"{config.n_ranks}, on GPUs ranks_per_gpu=1"
    )


class OpOrder:
    """The ops of one direction so far: every wait must follow its sends.

    Ranks that run one after another must all send before one of them waits, and all
    wait before one sends again.
    """

    def __init__(self, phase: str, n_local_ranks: int, in_turn: bool) -> None:
        """Begins with nothing sent; ``in_turn``: ranks run one after another."""
        self._phase = phase
        self._in_turn = in_turn
        self._sent = [0] * n_local_ranks
        self._waited = [0] * n_local_ranks

    def send(self, device_id: int) -> None:
        """Counts a rank's send; refuses it before the wait for the previous one."""
        ranks, sent = self._others(device_id), self._sent[device_id]
        if unread := [rank for rank in ranks if self._waited[rank] < sent]:
            raise ValueError(
                f"ep_{self._phase}_async on device {device_id} again, before "
                f"ep_{self._phase}_wait on devices {unread}: the buffers still "
                "hold what was sent last. Wait on every device first, or use a "
                "second EPBatchManager with buffers of its own"
            )
        self._sent[device_id] += 1

    def check_wait(self, device_id: int, op: str) -> None:
        """Refuses a wait before its send."""
        ranks, waited = self._others(device_id), self._waited[device_id]
        if self._sent[device_id] <= waited:
            without = f"without ep_{self._phase}_async before it"
            raise ValueError(f"{op} on device {device_id} {without}; call that first")
        if late := [rank for rank in ranks if self._sent[rank] <= waited]:
            raise ValueError(
                f"{op} on device {device_id} before "
                f"ep_{self._phase}_async on devices {late}: the ranks of this "
                "process run one after another, so their sends would never "
                f"come. Call ep_{self._phase}_async of every device first"
            )

    def wait(self, device_id: int) -> None:
        """Checks and counts a rank's wait."""
        self.check_wait(device_id, f"ep_{self._phase}_wait")
        self._waited[device_id] += 1

    def is_under_way(self, device_id: int) -> bool:
        return self._sent[device_id] > self._waited[device_id]

    def _others(self, device_id: int) -> Iterable[int]:
        return range(len(self._sent)) if self._in_turn else [device_id]
