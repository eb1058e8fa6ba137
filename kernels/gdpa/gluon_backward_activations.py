"""Activations and their slopes for the Hopper backward of GDPA, in few instructions (Gluon).

Constant factors are left out wherever the caller can apply them to a sum instead of to every score. The slope of a form
around t = tanh u(x) needs no second transcendental function: of x (1 + t) / 2 it is ((1 + t) + x u'(x) (1 - t^2)) / 2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gdpa.gluon_activations import _AS_TANH, _AS_TANH_LIMIT, _TANH_1, _TANH_3, _tanh, _value_and_slope, rounded


@gluon.jit
def _unscaled(s, scale, KINDS: gl.constexpr, KIND: gl.constexpr):
    """(act(x) / a, act'(x) / b) of x = scale * s for KINDS[KIND] and (a, b) of `_factors`, float32."""
    ACTIVATION: gl.constexpr = KINDS[KIND]
    half = 0.5 * scale
    if ACTIVATION == "gelu_tanh":
        linear = _TANH_1 * half
        u = s * (linear + (_TANH_3 * half * half * half) * (s * s))
        t = _tanh(u)
        y = s + s * t
        # x u'(x) is 3 u less twice the linear term, and a third of it takes one instruction.
        dy = (u - (0.6666666666666666 * linear) * s) * (1.0 - t * t) + (t * 0.3333333333333333 + 0.3333333333333333)
    elif ACTIVATION == "gelu":
        square = s * s
        low = gl.minimum(square, _AS_TANH_LIMIT / (half * half))
        third = half * half * half
        t = _tanh(s * (_AS_TANH[0] * half + low * (_AS_TANH[1] * third + low * (_AS_TANH[2] * third * half * half))))
        y = s + s * t
        normal = gl.exp2(square * (-0.7213475204444817 * scale * scale))
        dy = (s * (0.7978845608028654 * scale)) * normal + (1.0 + t)
    elif ACTIVATION == "silu":
        u = s * half
        t = _tanh(u)
        y = s + s * t
        dy = u * (1.0 - t * t) + (1.0 + t)
    else:
        y, dy = _value_and_slope(s, scale, KINDS, KIND)
    return y, dy


# Pairs of scores $2, $3 and constants $4, $6, $8 to a value and a slope in bfloat16, two to a register all the way but
# for the tanh t. With h = 1 + t and e = 1 - t the slope is h + x u'(x) h e. Both are made of t before it is rounded:
# made of e, which is nearly 2 where x is far below 0, h would be off by as much as it is.
_PACKED_GELU_TANH = gl.constexpr("""{
    .reg .b32 s, u, v, w, linear, cubic, slope;
    .reg .f32 x, y, x1, y1;
    cvt.rn.bf16x2.f32 s, $3, $2;
    cvt.rn.bf16x2.f32 linear, $4, $4;
    cvt.rn.bf16x2.f32 cubic, $6, $6;
    cvt.rn.bf16x2.f32 slope, $8, $8;
    mul.rn.bf16x2 w, s, s;
    fma.rn.bf16x2 u, w, cubic, linear;
    mul.rn.bf16x2 u, u, s;
    fma.rn.bf16x2 w, w, slope, linear;
    mul.rn.bf16x2 w, w, s;
    shl.b32 v, u, 16;
    and.b32 u, u, 0xFFFF0000;
    mov.b32 x, v;
    mov.b32 y, u;
    tanh.approx.f32 x, x;
    tanh.approx.f32 y, y;
    add.f32 x1, x, 0f3F800000;
    add.f32 y1, y, 0f3F800000;
    cvt.rn.bf16x2.f32 u, y1, x1;
    sub.f32 x, 0f3F800000, x;
    sub.f32 y, 0f3F800000, y;
    cvt.rn.bf16x2.f32 v, y, x;
    mul.rn.bf16x2 $0, s, u;
    mul.rn.bf16x2 w, w, v;
    fma.rn.bf16x2 $1, w, u, u;
}""")


@gluon.jit
def _factors(scale, KINDS: gl.constexpr, KIND: gl.constexpr):
    ACTIVATION: gl.constexpr = KINDS[KIND]
    value = scale * 0.0 + 1.0
    slope = scale * 0.0 + 1.0
    if ACTIVATION == "gelu_tanh" or ACTIVATION == "gelu" or ACTIVATION == "silu":
        value = 0.5 * scale
        slope = scale * 0.0 + (1.5 if ACTIVATION == "gelu_tanh" else 0.5)
    return value, slope


@gluon.jit
def unscaled_value_and_slope(s, scale, kind, KINDS: gl.constexpr, dtype: gl.constexpr):
    """(act(scale s), act'(scale s)) of KINDS[kind] without the `unscaled_factors`, float32, in the range of `dtype`."""
    if len(KINDS) == 1 and dtype == gl.bfloat16 and KINDS[0] == "gelu_tanh":
        half = 0.5 * scale
        zero = gl.full(s.shape, 0.0, gl.float32, s.type.layout)
        y, dy = gl.inline_asm_elementwise(
            _PACKED_GELU_TANH,
            "=r,=r,f,f,f,f,f,f,f,f",
            [
                s,
                zero + _TANH_1 * half,
                zero + _TANH_3 * half * half * half,
                zero + 3.0 * _TANH_3 * half * half * half,
            ],
            (gl.bfloat16, gl.bfloat16),
            is_pure=False,
            pack=2,
        )
    elif len(KINDS) == 1:
        y, dy = _unscaled(s, scale, KINDS, 0)
        if dtype == gl.float16:  # scores that have not been scaled may not fit
            y = y * _factors(scale, KINDS, 0)[0]
    else:
        y = s
        dy = s
        for other in gl.static_range(len(KINDS)):
            if kind == other:  # of y, which is still s then: two copies would not fit into the registers
                value, slope = _factors(scale, KINDS, other)
                y, dy = _unscaled(y, scale, KINDS, other)
                y = y * value
                dy = dy * slope
    return y, dy


@gluon.jit
def unscaled_factors(scale, KINDS: gl.constexpr, dtype: gl.constexpr):
    """What values and slopes of `unscaled_value_and_slope` have to be multiplied by.

    Heads that share keys may differ in their activation, and add to the same sums: then there is nothing left to do.
    """
    value = scale * 0.0 + 1.0
    slope = scale * 0.0 + 1.0
    if len(KINDS) == 1:
        value, slope = _factors(scale, KINDS, 0)
        if dtype == gl.float16:
            value = scale * 0.0 + 1.0
        elif KINDS[0] == "gelu_tanh":
            slope = scale * 0.0 + 0.5
    return value, slope


@gluon.jit
def rounded_product(x, y, dtype: gl.constexpr):
    """x * y rounded to `dtype`, of x in that dtype and y in float32, in the fewest instructions that `dtype` allows."""
    if dtype == gl.bfloat16:
        z = gl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, rounded(y, dtype)], gl.bfloat16, True, 2
        )
    else:  # a gradient beyond the range of float16 may meet a slope of 0
        z = rounded(x.to(gl.float32) * y, dtype)
    return z
