# SPDX-License-Identifier: Apache-2.0
"""Launches a matmul of groups on a GPU, by the kernel that its sizes allow."""
from max.gpu.host import DeviceContext
from std.sys.info import _accelerator_arch

from .grouped_matmul import launch_grouped_matmul
from .hopper import fits, launch_on_hopper, TileProduct
from .product import GroupedProduct
from .ring import MAX_GROUPS
from .tile import K_STEP
from .tiles import BN
from .wgmma import Bf16Product


def is_hopper[arch: StaticString = _accelerator_arch()]() -> Bool:
    """Returns whether a GPU is a Hopper GPU: "sm_90a", in a graph "nvidia:sm_90a"."""
    return arch.endswith("sm_90a")


def launch[
    swiglu: Bool
](product: GroupedProduct[DType.bfloat16], context: DeviceContext) raises:
    comptime if is_hopper():
        if fits(product) and Int(product.y) % 16 == 0:
            launch_on_hopper(Bf16Product[swiglu](product), context, context.stream())
            return
    launch_grouped_matmul[swiglu](product, context)


def launch_only_on_hopper[
    P: TileProduct, //
](op: StaticString, product: P, context: DeviceContext) raises:
    """Launches a product that has no other kernel."""
    comptime if is_hopper():
        var grouped = product.grouped()
        if not fits(grouped) or Int(grouped.y) % 16 != 0:
            raise Error(
                t"max_ep: {op} takes n in multiples of {BN} and k of"
                t" {2 * K_STEP} bytes, up to {MAX_GROUPS} experts, and results that are"
                t" aligned to 16 bytes; given n={grouped.n}, k of {2 * grouped.k} bytes"
                t" and {grouped.n_groups} experts"
            )
        launch_on_hopper(product, context, context.stream())
    else:
        raise Error(t"max_ep: {op} is for Hopper")
