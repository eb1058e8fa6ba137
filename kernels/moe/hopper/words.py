"""SwiGLU on words, which hold two neighbours of a row in bfloat16; device functions in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def sigmoid_of(x):
    """Within a few ulp, and 0 where it is below 2^-126."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 a;
        mul.f32 a, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 a, a;
        add.f32 a, a, 0f3F800000;
        rcp.approx.ftz.f32 $0, a;
        }""",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def left_half(words):
    return (words << 16).to(gl.float32, bitcast=True)


@gluon.jit
def right_half(words):
    return (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def pair(left, right):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [left, right], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def swiglu_of(gate, up):
    """silu(gate) * up, computed in float32 and rounded once."""
    left = left_half(gate) * sigmoid_of(left_half(gate)) * left_half(up)
    right = right_half(gate) * sigmoid_of(right_half(gate)) * right_half(up)
    return pair(left, right)
