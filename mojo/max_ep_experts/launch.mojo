# SPDX-License-Identifier: Apache-2.0
"""Launches a matmul of groups on a GPU, by the kernel that its sizes allow."""
from max.gpu.host import DeviceContext
from std.sys.info import _accelerator_arch

from .grouped_matmul import launch_grouped_matmul
from .product import GroupedProduct
from .wgmma import fits, launch_wgmma


def is_hopper[arch: StaticString = _accelerator_arch()]() -> Bool:
    """Returns whether a GPU is a Hopper GPU: "sm_90a", in a graph "nvidia:sm_90a"."""
    return arch.endswith("sm_90a")


def launch[
    swiglu: Bool
](product: GroupedProduct[DType.bfloat16], context: DeviceContext) raises:
    """Launches the product; only the device knows how many rows there are."""
    comptime if is_hopper():
        if fits(product):
            launch_wgmma[swiglu](product, context, context.stream())
            return
    launch_grouped_matmul[swiglu](product, context, context.stream())
