"""SwiGLU on words, which hold two neighbours of a row in bfloat16; device functions in Gluon."""

from __future__ import annotations

from triton.experimental import gluon

from kernels.core.hopper import left_half, pair, right_half, sigmoid_of


@gluon.jit
def swiglu_halves(gate, up):
    """silu(gate) * up in float32: (of the left halves of words, of the right ones)."""
    left = left_half(gate) * sigmoid_of(left_half(gate)) * left_half(up)
    right = right_half(gate) * sigmoid_of(right_half(gate)) * right_half(up)
    return left, right


@gluon.jit
def swiglu_words(gate, up):
    """As `swiglu_halves`, rounded once."""
    left, right = swiglu_halves(gate, up)
    return pair(left, right)
