"""Activations and their slopes for the Hopper backward of GDPA, in few instructions (Gluon).

Constant factors are left out wherever the caller can apply them to a sum instead of to every score. The slope of a form
around t = tanh u(x) needs no second transcendental function: of x (1 + t) / 2 it is ((1 + t) + x u'(x) (1 - t^2)) / 2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gdpa.hopper.activations import _AS_TANH, _AS_TANH_LIMIT, _TANH_1, _TANH_3, _tanh, _value_and_slope, rounded


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


PAIRS = 4


def _packed_gelu_tanh() -> str:
    """PTX that turns PAIRS pairs of scores, with three constants, into values and slopes in bfloat16, two to a
    register.

    All but the tanh t is computed in pairs. 1 + t, for the value, and 1 - t^2 are computed before t is rounded: where
    |x| is large they are small, and the rounding of t would be as large as they are. Each step is done for all pairs
    before the next, because the compiler keeps the order when registers are scarce: pair after pair, each would wait
    for its own tanh.
    """
    scores = 2 * PAIRS
    linear, cubic, slope = (f"${scores + 2 * PAIRS * (n + 1)}" for n in range(3))
    pair = range(PAIRS)
    lines = [
        *(f".reg .b32 s{i}, u{i}, w{i}; .reg .f32 x{i}, y{i}, h{i}, k{i};" for i in pair),
        ".reg .b32 linear, cubic, slope;",
        f"cvt.rn.bf16x2.f32 linear, {linear}, {linear};",
        f"cvt.rn.bf16x2.f32 cubic, {cubic}, {cubic};",
        f"cvt.rn.bf16x2.f32 slope, {slope}, {slope};",
        *(f"cvt.rn.bf16x2.f32 s{i}, ${scores + 2 * i + 1}, ${scores + 2 * i};" for i in pair),
        *(f"mul.rn.bf16x2 w{i}, s{i}, s{i};" for i in pair),
        *(f"fma.rn.bf16x2 u{i}, w{i}, cubic, linear;" for i in pair),
        *(f"mul.rn.bf16x2 u{i}, u{i}, s{i};" for i in pair),
        *(f"shl.b32 x{i}, u{i}, 16; and.b32 y{i}, u{i}, 0xFFFF0000;" for i in pair),
        *(f"tanh.approx.f32 x{i}, x{i}; tanh.approx.f32 y{i}, y{i};" for i in pair),
        *(f"fma.rn.bf16x2 w{i}, w{i}, slope, linear;" for i in pair),
        *(f"mul.rn.bf16x2 w{i}, w{i}, s{i};" for i in pair),
        *(f"add.f32 h{i}, x{i}, 0f3F800000; add.f32 k{i}, y{i}, 0f3F800000;" for i in pair),
        *(f"cvt.rn.bf16x2.f32 u{i}, k{i}, h{i};" for i in pair),
        *(f"neg.f32 h{i}, x{i}; fma.rn.f32 x{i}, h{i}, x{i}, 0f3F800000;" for i in pair),
        *(f"neg.f32 k{i}, y{i}; fma.rn.f32 y{i}, k{i}, y{i}, 0f3F800000;" for i in pair),
        *(f"mul.rn.bf16x2 ${i}, s{i}, u{i};" for i in pair),
        *(f"cvt.rn.bf16x2.f32 s{i}, y{i}, x{i};" for i in pair),
        *(f"fma.rn.bf16x2 ${PAIRS + i}, w{i}, s{i}, u{i};" for i in pair),
    ]
    return "{" + " ".join(lines) + "}"


_PACKED_GELU_TANH = gl.constexpr(_packed_gelu_tanh())
_PACKED_OPERANDS = gl.constexpr(",".join(["=r"] * 2 * PAIRS + ["f"] * 8 * PAIRS))
_PACKED = gl.constexpr(2 * PAIRS)


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
            _PACKED_OPERANDS,
            [
                s,
                zero + _TANH_1 * half,
                zero + _TANH_3 * half * half * half,
                zero + 3.0 * _TANH_3 * half * half * half,
            ],
            (gl.bfloat16, gl.bfloat16),
            is_pure=False,
            pack=_PACKED,
        )
    elif len(KINDS) == 1:
        y, dy = _unscaled(s, scale, KINDS, 0)
        if dtype == gl.float16:  # unscaled scores may be out of range
            y = y * _factors(scale, KINDS, 0)[0]
    else:
        y = s
        dy = s
        for other in gl.static_range(len(KINDS)):
            if kind == other:  # s becomes y in place: two copies would not fit into the registers
                value, slope = _factors(scale, KINDS, other)
                y, dy = _unscaled(y, scale, KINDS, other)
                y = y * value
                dy = dy * slope
    return y, dy


@gluon.jit
def unscaled_factors(scale, KINDS: gl.constexpr, dtype: gl.constexpr):
    """The factors by which values and slopes of `unscaled_value_and_slope` must be multiplied.

    1 if heads differ in their activation: heads that share keys add to the same sums, so the factors were applied
    before.
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
    """x * y rounded to `dtype`, for x of that dtype and y in float32, in the fewest instructions possible."""
    if dtype == gl.bfloat16:
        z = gl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, rounded(y, dtype)], gl.bfloat16, True, 2
        )
    else:  # a gradient beyond the range of float16 may meet a slope of 0
        z = rounded(x.to(gl.float32) * y, dtype)
    return z
