# SPDX-License-Identifier: Apache-2.0
"""The MAX custom ops of `AllGatherTokenDispatcher`."""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from .choices import PackedChoices, UnpackedChoices, do_items


@always_inline
def _read[
    dtype: DType
](tensor: InputTensor[dtype=dtype, ...]) -> Pointer[
    Scalar[dtype], ImmUntrackedOrigin
]:
    return {unsafe_from_address = Int(tensor.unsafe_ptr())}


@always_inline
def _written[
    dtype: DType
](tensor: OutputTensor[dtype=dtype, ...]) -> Pointer[
    Scalar[dtype], MutUntrackedOrigin
]:
    return {unsafe_from_address = Int(tensor.unsafe_ptr())}


@extensibility.register("max_ep.pack_choices")
struct PackChoices:
    """Puts ids and probabilities into rows that a dispatch can gather."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        messages: OutputTensor[dtype=DType.float32, rank=2, ...],
        ranks: OutputTensor[dtype=DType.int32, rank=2, ...],
        ones: OutputTensor[dtype=DType.float32, rank=2, ...],
        ids: InputTensor[dtype=DType.int32, rank=2, ...],
        probs: InputTensor[dtype=DType.float32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op on one rank; see `PackedChoices`."""
        do_items[target](
            PackedChoices(
                _read(ids),
                _read(probs),
                _written(messages),
                _written(ranks),
                _written(ones),
                ids.dim_size(0),
                ids.dim_size(1),
                messages.dim_size(1),
                ranks.dim_size(1),
            ),
            ctx,
        )


@extensibility.register("max_ep.unpack_choices")
struct UnpackChoices:
    """Reads ids and probabilities out of the rows that were gathered."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        ids: OutputTensor[dtype=DType.int32, rank=2, ...],
        probs: OutputTensor[dtype=DType.float32, rank=2, ...],
        n_gathered: OutputTensor[dtype=DType.int32, rank=1, ...],
        rows: InputTensor[dtype=DType.float32, rank=2, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op on one rank; see `UnpackedChoices`."""
        do_items[target](
            UnpackedChoices(
                _read(rows),
                _read(row_offsets),
                _written(ids),
                _written(probs),
                _written(n_gathered),
                ids.dim_size(0),
                ids.dim_size(1),
                rows.dim_size(1),
            ),
            ctx,
        )
