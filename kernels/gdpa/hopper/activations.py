"""Activations of GDPA as device functions for Hopper, on scores that have not been scaled yet (Gluon).

The forms around a tanh are written for h = x / 2, because x (1 + tanh u) / 2 = h + h tanh u is then one instruction
after the tanh. The hardware's tanh has a relative error of 5e-4, which suits products of half-precision operands.

With bfloat16 operands the forward's GELUs are computed in bfloat16: the scores, the polynomial and the tanh are
rounded, not only the activation, which makes its error 1.9 times that of rounding once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.core import activations

_POLY_LIMIT = gl.constexpr(activations.GELU_POLY_LIMIT)
_POLY = gl.constexpr(activations.GELU_POLY)
_AS_TANH_LIMIT = gl.constexpr(activations.GELU_AS_TANH_LIMIT / 4)  # of h^2
_AS_TANH = gl.constexpr(tuple(2 * 4**power * factor for power, factor in enumerate(activations.GELU_AS_TANH)))
_LEAKY_SLOPE = gl.constexpr(activations.LEAKY_SLOPE)
_TANH_1 = gl.constexpr(1.5957691216057308)  # u = _TANH_1 h + _TANH_3 h^3 of the tanh form of GELU
_TANH_3 = gl.constexpr(0.2854192650904)


def head_kinds(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(the different names, which of them each head has): constants of a kernel, without heads if there is one name."""
    kinds = tuple(dict.fromkeys(names))
    return kinds, tuple(kinds.index(name) for name in names) if len(kinds) > 1 else ()


@gluon.jit
def kind_of(head, HEAD_KINDS: gl.constexpr):
    """Which of a call's different activations a head has."""
    kind = head * 0
    for other in gl.static_range(len(HEAD_KINDS)):
        kind = gl.where(head == other, HEAD_KINDS[other], kind)
    return kind


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _value_and_slope(s, scale, KINDS: gl.constexpr, KIND: gl.constexpr):
    """(act(x), act'(x)) of x = scale * s for KINDS[KIND], float32; what a caller does not use is not computed."""
    ACTIVATION: gl.constexpr = KINDS[KIND]
    x = s * scale
    h = s * (0.5 * scale)
    square = h * h
    if ACTIVATION == "gelu":
        low = gl.minimum(square, _AS_TANH_LIMIT)
        t = _tanh(h * (_AS_TANH[0] + low * (_AS_TANH[1] + low * _AS_TANH[2])))
        y = h + h * t
        dy = (0.5 + 0.5 * t) + x * 0.3989422804014327 * gl.exp2(square * -2.8853900817779268)
    elif ACTIVATION == "gelu_tanh":
        t = _tanh(h * (_TANH_1 + _TANH_3 * square))
        y = h + h * t
        dy = (0.5 + 0.5 * t) + h * (0.5 * _TANH_1 + (1.5 * _TANH_3) * square) * (1.0 - t * t)
    elif ACTIVATION == "gelu_poly":
        c = gl.minimum(gl.maximum(x, -_POLY_LIMIT), _POLY_LIMIT)
        c_square = c * c
        factor = _POLY[5] * c_square + _POLY[4]
        step = (11 * _POLY[5]) * c_square + 9 * _POLY[4]
        for back in gl.static_range(4):
            factor = factor * c_square + _POLY[3 - back]
            step = step * c_square + (7 - 2 * back) * _POLY[3 - back]
        phi = 0.5 + c * factor
        y = x * phi
        dy = phi + c * step  # the step is zero at the limit; beyond it the polynomial is flat
    elif ACTIVATION == "silu":
        t = _tanh(h)
        y = h + h * t
        dy = (0.5 + 0.5 * t) + (0.5 * h) * (1.0 - t * t)
    elif ACTIVATION == "relu":
        y = gl.where(x < 0.0, 0.0, x)
        dy = gl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "relu_squared":
        positive = gl.where(x < 0.0, 0.0, x)
        y = positive * positive
        dy = 2.0 * positive
    elif ACTIVATION == "hardswish":
        y = x * gl.minimum(gl.maximum(x * 0.16666666666666666 + 0.5, 0.0), 1.0)
        dy = gl.where(x <= -3.0, 0.0, gl.where(x < 3.0, x * 0.3333333333333333 + 0.5, 1.0))
    elif ACTIVATION == "leaky_relu":
        y = gl.where(x > 0.0, x, _LEAKY_SLOPE * x)
        dy = gl.where(x > 0.0, 1.0, _LEAKY_SLOPE)
    else:
        gl.static_assert(ACTIVATION == "identity")
        y = x
        dy = x * 0.0 + 1.0
    return y, dy


@gluon.jit
def value_and_slope(s, scale, kind, KINDS: gl.constexpr):
    """(act(scale s), act'(scale s)) of KINDS[kind]: a branch that all threads take alike, or none for one kind."""
    if len(KINDS) == 1:
        y, dy = _value_and_slope(s, scale, KINDS, 0)
    else:
        y = s
        dy = s
        for other in gl.static_range(len(KINDS)):
            if kind == other:  # s becomes y in place: two copies would not fit into the registers
                y, dy = _value_and_slope(y, scale, KINDS, other)
    return y, dy


@gluon.jit
def _unscaled(s, scale, KINDS: gl.constexpr, KIND: gl.constexpr, dtype: gl.constexpr):
    """act(scale s) / `_factor` of KINDS[KIND], with constants moved to where they cost nothing."""
    ACTIVATION: gl.constexpr = KINDS[KIND]
    half = 0.5 * scale
    if ACTIVATION == "gelu":
        square = s * s
        low = gl.minimum(square, _AS_TANH_LIMIT / (half * half))
        third = half * half * half
        t = _tanh(s * (_AS_TANH[0] * half + low * (_AS_TANH[1] * third + low * (_AS_TANH[2] * third * half * half))))
        y = s + s * t
    elif ACTIVATION == "gelu_tanh":
        t = _tanh(s * (_TANH_1 * half + (_TANH_3 * half * half * half) * (s * s)))
        y = s + s * t
    elif ACTIVATION == "silu":
        t = _tanh(s * half)
        y = s + s * t
    else:
        y, _dy = _value_and_slope(s, scale, KINDS, KIND)
    if dtype == gl.float16:  # unscaled scores may be out of range
        y = y * _factor(scale, KINDS, KIND)
    return y


@gluon.jit
def _factor(scale, KINDS: gl.constexpr, KIND: gl.constexpr):
    ACTIVATION: gl.constexpr = KINDS[KIND]
    factor = scale * 0.0 + 1.0
    if ACTIVATION == "gelu" or ACTIVATION == "gelu_tanh" or ACTIVATION == "silu":
        factor = 0.5 * scale
    return factor


# Pairs of scores $1, $2 and constants $3, $5, ... to an activation in bfloat16, two to a register all the way.
_PACKED_GELU_TANH = gl.constexpr("""{
    .reg .b32 s, t, linear, cubic;
    cvt.rn.bf16x2.f32 s, $2, $1;
    cvt.rn.bf16x2.f32 linear, $3, $3;
    cvt.rn.bf16x2.f32 cubic, $5, $5;
    mul.rn.bf16x2 t, s, s;
    fma.rn.bf16x2 t, t, cubic, linear;
    mul.rn.bf16x2 t, t, s;
    tanh.approx.bf16x2 t, t;
    fma.rn.bf16x2 $0, s, t, s;
}""")
_PACKED_GELU = gl.constexpr("""{
    .reg .b32 s, t, square, linear, cubic, quintic, limit;
    cvt.rn.bf16x2.f32 s, $2, $1;
    cvt.rn.bf16x2.f32 linear, $3, $3;
    cvt.rn.bf16x2.f32 cubic, $5, $5;
    cvt.rn.bf16x2.f32 quintic, $7, $7;
    cvt.rn.bf16x2.f32 limit, $9, $9;
    mul.rn.bf16x2 square, s, s;
    min.bf16x2 square, square, limit;
    fma.rn.bf16x2 t, square, quintic, cubic;
    fma.rn.bf16x2 t, t, square, linear;
    mul.rn.bf16x2 t, t, s;
    tanh.approx.bf16x2 t, t;
    fma.rn.bf16x2 $0, s, t, s;
}""")


@gluon.jit
def activated(s, scale, kind, KINDS: gl.constexpr, dtype: gl.constexpr):
    """act(scale s) / `unscaled_factor` of KINDS[kind], computed at this point of the program and no later.

    In `dtype` where that takes fewer instructions than float32; otherwise in float32, within the range of `dtype`, for
    `rounded`.
    """
    half = 0.5 * scale
    third = half * half * half
    zero = gl.full(s.shape, 0.0, gl.float32, s.type.layout)
    if len(KINDS) == 1 and dtype == gl.bfloat16 and KINDS[0] == "gelu_tanh":
        y = gl.inline_asm_elementwise(
            _PACKED_GELU_TANH,
            "=r,f,f,f,f,f,f",
            [s, zero + _TANH_1 * half, zero + _TANH_3 * third],
            gl.bfloat16,
            is_pure=False,
            pack=2,
        )
    elif len(KINDS) == 1 and dtype == gl.bfloat16 and KINDS[0] == "gelu":
        quintic = _AS_TANH[2] * third * half * half
        limit = _AS_TANH_LIMIT / (half * half)
        y = gl.inline_asm_elementwise(
            _PACKED_GELU,
            "=r,f,f,f,f,f,f,f,f,f,f",
            [s, zero + _AS_TANH[0] * half, zero + _AS_TANH[1] * third, zero + quintic, zero + limit],
            gl.bfloat16,
            is_pure=False,
            pack=2,
        )
    elif len(KINDS) == 1 and dtype == gl.bfloat16 and KINDS[0] == "relu":
        y = gl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,f,f", [s * scale], gl.bfloat16, is_pure=False, pack=2
        )
    elif len(KINDS) == 1:
        y = _pinned(_unscaled(s, scale, KINDS, 0, dtype))
    else:
        y = s
        for other in gl.static_range(len(KINDS)):
            if kind == other:
                y = _unscaled(y, scale, KINDS, other, dtype)
        y = _pinned(y)
    return y


@gluon.jit
def unscaled_factor(scale, kind, KINDS: gl.constexpr, dtype: gl.constexpr):
    """The factor by which `activated` must be multiplied."""
    factor = scale * 0.0 + 1.0
    if dtype == gl.bfloat16:
        for other in gl.static_range(len(KINDS)):
            factor = gl.where(kind == other, _factor(scale, KINDS, other), factor)
    return factor


@gluon.jit
def _pinned(x):
    """x, float32, computed at this point of the program and no later.

    Otherwise a compiler may move arithmetic behind a wait for products with which it could overlap.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], gl.float32, False, 1)


@gluon.jit
def rounded(x, dtype: gl.constexpr):
    """x.to(dtype), two neighbours to a register, computed at this point; x itself if it already has `dtype`."""
    y = x
    if dtype != x.dtype:
        if dtype == gl.bfloat16:
            y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, False, 2)
        else:
            y = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.float16, False, 2)
    return y
