# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies groups of rows on a GPU."""
from max.gpu.host import DeviceContext

from .grouped_matmul import launch_grouped_matmul
from .hopper import fits, is_hopper, launch_on_hopper
from .product import GroupedProduct
from .wgmma import Bf16Product


def launch_grouped[
    swiglu: Bool
](product: GroupedProduct[DType.bfloat16], context: DeviceContext) raises:
    """Launches the kernel that takes the sizes."""
    comptime if is_hopper():
        if fits(product):
            launch_on_hopper(Bf16Product[swiglu](product), context)
            return
    launch_grouped_matmul[swiglu](product, context)
