# SPDX-License-Identifier: Apache-2.0
"""Launches a matmul of groups on a GPU, by the kernel that its sizes allow."""
from max.gpu.host import DeviceContext
from std.sys.info import _accelerator_arch

from .grouped_matmul import launch_grouped_matmul
from .hopper import fits, launch_on_hopper
from .product import GroupedProduct
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
    launch_grouped_matmul[swiglu](product, context, context.stream())
