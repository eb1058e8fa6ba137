"""Activations of GDPA and their derivatives as device functions."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.core import activations

POLY_LIMIT = tl.constexpr(activations.GELU_POLY_LIMIT)
POLY = tl.constexpr(activations.GELU_POLY)
AS_TANH_LIMIT = tl.constexpr(activations.GELU_AS_TANH_LIMIT)
AS_TANH = tl.constexpr(activations.GELU_AS_TANH)
LEAKY_SLOPE = tl.constexpr(activations.LEAKY_SLOPE)


@triton.jit
def _fast_tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    if FAST:
        y = 0.5 + 0.5 * _fast_tanh(0.5 * x)
    else:
        y = tl.sigmoid(x)
    return y


@triton.jit
def _value_and_slope(x, KINDS: tl.constexpr, KIND: tl.constexpr, FAST: tl.constexpr):
    """(act(x), act'(x)) of KINDS[KIND], float32; what a caller does not use is not computed.

    FAST takes the hardware's tanh, whose relative error of 5e-4 suits products of half-precision operands.
    """
    ACTIVATION: tl.constexpr = KINDS[KIND]
    if ACTIVATION == "gelu":
        square = x * x
        if FAST:
            low = tl.minimum(square, AS_TANH_LIMIT)
            phi = 0.5 + 0.5 * _fast_tanh(x * (AS_TANH[0] + low * (AS_TANH[1] + low * AS_TANH[2])))
        else:
            phi = 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)
        y = x * phi
        dy = phi + x * 0.3989422804014327 * tl.exp2(square * -0.7213475204444817)
    elif ACTIVATION == "gelu_tanh":
        square = x * x
        phi = _sigmoid(2.0 * x * (0.7978845608028654 + 0.035677408136300125 * square), FAST)
        y = x * phi
        dy = phi + 2.0 * y * (1.0 - phi) * (0.7978845608028654 + 0.10703222440890037 * square)
    elif ACTIVATION == "gelu_poly":
        c = tl.minimum(tl.maximum(x, -POLY_LIMIT), POLY_LIMIT)
        square = c * c
        factor = tl.zeros_like(x)
        step = tl.zeros_like(x)
        for back in tl.static_range(6):
            factor = factor * square + POLY[5 - back]
            step = step * square + (11 - 2 * back) * POLY[5 - back]
        phi = 0.5 + c * factor
        y = x * phi
        # Zero beyond the limit, where the polynomial is flat.
        dy = phi + c * step
    elif ACTIVATION == "silu":
        s = _sigmoid(x, FAST)
        y = x * s
        dy = s + y * (1.0 - s)
    elif ACTIVATION == "relu":
        y = tl.where(x < 0.0, 0.0, x)
        dy = tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "relu_squared":
        positive = tl.where(x < 0.0, 0.0, x)
        y = positive * positive
        dy = 2.0 * positive
    elif ACTIVATION == "hardswish":
        y = x * tl.minimum(tl.maximum(x * 0.16666666666666666 + 0.5, 0.0), 1.0)
        dy = tl.where(x <= -3.0, 0.0, tl.where(x < 3.0, x * 0.3333333333333333 + 0.5, 1.0))
    elif ACTIVATION == "leaky_relu":
        y = tl.where(x > 0.0, x, LEAKY_SLOPE * x)
        dy = tl.where(x > 0.0, 1.0, LEAKY_SLOPE)
    else:
        tl.static_assert(ACTIVATION == "identity")
        y = x
        dy = tl.zeros_like(x) + 1.0
    return y, dy


@triton.jit
def kind_of(head, HEAD_KINDS: tl.constexpr):
    """Which of a call's different activations a head has."""
    kind = 0
    for other in tl.static_range(len(HEAD_KINDS)):
        kind = tl.where(head == other, HEAD_KINDS[other], kind)
    return kind


@triton.jit
def value_and_slope(x, kind, KINDS: tl.constexpr, FAST: tl.constexpr):
    """(act(x), act'(x)) of KINDS[kind]: a branch that all threads take alike, or none if there is one kind."""
    if len(KINDS) == 1:
        y, dy = _value_and_slope(x, KINDS, 0, FAST)
    else:
        y = x
        dy = x
        for other in tl.static_range(len(KINDS)):
            if kind == other:
                y, dy = _value_and_slope(x, KINDS, other, FAST)
    return y, dy


def constants(names: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments that describe activations by head: KINDS, HEAD_KINDS, FAST."""
    kinds = tuple(dict.fromkeys(names))
    return {
        "KINDS": kinds,
        "HEAD_KINDS": tuple(kinds.index(name) for name in names) if len(kinds) > 1 else (0,),
        "FAST": dtype is not torch.float32,
    }
