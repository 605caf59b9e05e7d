# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels for GPUs that need not be there, into the folder of `argv`.

`<target>.<name>.s` is the assembly, `sm_90a.<name>.cubin` what NVIDIA's assembler
makes of it. The programs `codegen*.mojo` use it; tests/codegen/test_codegen.py and
tests/codegen/same_code.py read the files.
"""
from max.gpu.host import get_gpu_target
from max_ep.device.kernel import Kernel, kernel_entry
from max_ep.protocol.arguments import InputScales
from std.compile import compile_info
from std.sys import argv, is_defined

comptime ALL_CASES = not is_defined["FEW_CASES"]()
"""Whether to compile what only `make test-all` and `same_code.py` look at."""


def _write[
    F: TrivialRegisterPassable, //, kernel: F, target: StaticString, kind: StaticString
](path: String) raises:
    var info = compile_info[
        kernel, emission_kind=kind, target=get_gpu_target[target]()
    ]()
    with open(path, "w") as file:
        file.write(info.asm)


def emit[
    F: TrivialRegisterPassable, //, kernel: F, links: Bool = True
](name: String) raises:
    """Compiles a kernel for NVIDIA; it links if it calls nothing outside of itself."""
    var path = String(argv()[1], "/sm_90a.", name)
    _write[kernel, "sm_90a", "asm"](String(path, ".s"))
    comptime if links:
        _write[kernel, "sm_90a", "object"](String(path, ".cubin"))


def emit_amd[F: TrivialRegisterPassable, //, kernel: F](name: String) raises:
    comptime if ALL_CASES:
        _write[kernel, "gfx942", "asm"](String(argv()[1], "/gfx942.", name, ".s"))


def emit_phase[
    P: Kernel, kernel: StaticString, scales: InputScales = None, for_amd: Bool = False
](variant: String) raises:
    """Compiles a phase's kernel, as `kernel.variant`; its end says which one."""
    comptime sends = not kernel.endswith("_wait")
    comptime receives = not kernel.endswith("_async")
    comptime entry = kernel_entry[P, sends, receives, scales]
    var name = String(kernel, ".", variant)
    emit[entry, links=not P.group.spans_hosts()](name)
    comptime if for_amd:
        emit_amd[entry](name)


def emit_dispatch[P: Kernel](variant: String) raises:
    """Compiles all three kernels of a dispatch."""
    emit_phase[P, "dispatch_async"](variant)
    emit_phase[P, "dispatch_wait"](variant)
    emit_phase[P, "dispatch"](variant)


def emit_combine[P: Kernel](variant: String) raises:
    """Compiles all three kernels of a combine."""
    emit_phase[P, "combine_async"](variant)
    emit_phase[P, "combine_wait"](variant)
    emit_phase[P, "combine"](variant)
