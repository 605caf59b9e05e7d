# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels for GPUs that need not be there, into the folder of `argv`.

`<target>.<name>.s` is the assembly, `sm_90a.<name>.cubin` what NVIDIA's assembler
makes of it. The programs `codegen*.mojo` use it; tests/test_codegen.py and
tests/same_code.py read the files.
"""
from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys import argv


def _write[
    Kernel: TrivialRegisterPassable,
    //,
    kernel: Kernel,
    target: StaticString,
    kind: StaticString,
](path: String) raises:
    var info = compile_info[
        kernel, emission_kind=kind, target=get_gpu_target[target]()
    ]()
    with open(path, "w") as file:
        file.write(info.asm)


def emit[
    Kernel: TrivialRegisterPassable, //, kernel: Kernel, links: Bool = True
](name: String) raises:
    """Compiles a kernel for NVIDIA.

    Parameters:
        Kernel: The kernel's type.
        kernel: The kernel.
        links: Whether it calls nothing outside of itself, as SHMEM is.

    Args:
        name: What to call its files.
    """
    var path = String(argv()[1], "/sm_90a.", name)
    _write[kernel, "sm_90a", "asm"](String(path, ".s"))
    comptime if links:
        _write[kernel, "sm_90a", "object"](String(path, ".cubin"))


def emit_amd[
    Kernel: TrivialRegisterPassable, //, kernel: Kernel
](name: String) raises:
    """Compiles a kernel for AMD."""
    _write[kernel, "gfx942", "asm"](String(argv()[1], "/gfx942.", name, ".s"))
