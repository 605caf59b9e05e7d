# SPDX-License-Identifier: Apache-2.0
"""The reader of assembly: what `test_codegen*.py` say of kernels rests on it."""

import pytest
from assembly import Kernel, parse_ptx


def ptx(*lines: str) -> Kernel:
    return parse_ptx("\n{\n" + ";\n".join(lines) + ";\nret;\n}\n")


def ordered(kernel: Kernel) -> list[str]:
    return [op.kind for op in kernel.ops if op.order]


def test_the_reader_sees_orders():
    """What it says about single instructions; else all of the above says nothing."""
    kernel = ptx(
        *("@%p1 st.release.sys.b64 [%rd1], %rd2", "$L: ld.volatile.b64 %rd1, [%rd2]"),
        *("@!%p1 bra $L", "st.relaxed.gpu.global.b64 [%rd1], %rd2"),
    )
    kinds = ["store release system", "load volatile", "store relaxed device"]
    assert ordered(kernel) == kinds
    (loop,) = kernel.loops()
    assert (loop.entry, loop.body) == (1, {1, 2})


def test_the_reader_sees_inline_assembly():
    """128 bits in braces, and the wait for the launch before."""
    kernel = ptx(
        "griddepcontrol.wait",
        "{ .reg .b128 word; ld.relaxed.sys.global.b128 word, [%rd1]",
        "mov.b128 {%rd2, %rd3}, word; }",
        "{ .reg .b128 word; st.relaxed.sys.global.b128 [%rd3], word; }",
    )
    assert [(op.kind, op.n_bytes) for op in kernel.ops if op.what] == [
        ("launch_wait", 0),
        ("load relaxed system", 16),
        ("store relaxed system", 16),
    ]
    assert not kernel.reach_from_start(kernel.find_kind("launch_wait"))


@pytest.mark.parametrize(
    "line",
    [
        "cp.async.ca.shared.global [%r1], [%rd1], 16",
        "multimem.st.relaxed.sys.global.u32 [%rd1], %r1",
        "mbarrier.arrive.shared.b64 %rd2, [%rd1]",
        "call.uni (retval0), f, (param0)",
    ],
)
def test_the_reader_refuses_what_it_cannot_read(line):
    """Else an access would be overlooked, and what is awaited before it."""
    with pytest.raises(AssertionError, match=line.split()[0].partition(".")[0]):
        ptx(line)


def test_the_reader_sees_what_inline_assembly_loads():
    """Under a predicate of its own, which has no number."""
    kernel = ptx(
        "setp.ne.u32 p, %r5, 0", "@p ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%rd4]"
    )
    assert kernel.find(lambda op: op.moves_16("load")) == {1}
    assert kernel.ops[1].predicate == "@p"
