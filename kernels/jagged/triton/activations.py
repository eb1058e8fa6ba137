"""Activations and their derivatives as device functions."""

import torch
import triton
import triton.language as tl

from kernels.core import activations

AS_TANH_LIMIT = tl.constexpr(activations.GELU_AS_TANH_LIMIT)
AS_TANH = tl.constexpr(activations.GELU_AS_TANH)


@triton.jit
def _erf(x):
    """erf with an absolute error of at most 1.8e-7: 1 - exp(-p(|x|)) with its sign, p a polynomial fitted on [0, 4].

    One special function and ten multiply-adds an element, half of what the library takes, which would be as long as the
    memory traffic of the layers that use it. Beyond 4 the result is 1 in float32.
    """
    a = tl.minimum(tl.abs(x), 4.0)
    p = 0.000319940373 - 6.94681993e-05 * a
    p = 0.00159578221 + p * a
    p = -0.0204149166 + p * a
    p = 0.103253741 + p * a
    p = 0.63653691 + p * a
    p = 1.1283838 + p * a
    y = 1.0 - tl.exp(-p * a)
    return tl.where(x < 0, -y, y)


@triton.jit
def _fast_tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _tanh(z, FAST: tl.constexpr):
    if FAST:
        y = _fast_tanh(z)
    else:
        y = 2.0 * tl.sigmoid(2.0 * z) - 1.0
    return y


@triton.jit
def _fast_normal(z):
    """The normal distribution function at z."""
    low = tl.minimum(z * z, AS_TANH_LIMIT)
    return 0.5 + 0.5 * _fast_tanh(z * (AS_TANH[0] + low * (AS_TANH[1] + low * AS_TANH[2])))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """float32 -> float32; FAST takes the hardware's tanh for tanh and GELU: half-precision results hide its error."""
    if ACTIVATION == "relu":
        y = tl.where(z < 0, 0.0, z)
    elif ACTIVATION == "gelu":
        if FAST:
            y = z * _fast_normal(z)
        else:
            y = 0.5 * z * (1.0 + _erf(z * 0.7071067811865476))
    elif ACTIVATION == "silu":
        y = z * tl.sigmoid(z)
    elif ACTIVATION == "sigmoid":
        y = tl.sigmoid(z)
    elif ACTIVATION == "tanh":
        y = _tanh(z, FAST)
    else:
        y = z
    return y


@triton.jit
def slope(z, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """The derivative of `activate` at z; that of relu at 0 is 0. With "given" it is z itself, as `kept` made it."""
    if ACTIVATION == "relu":
        dy = tl.where(z > 0, 1.0, 0.0)
    elif ACTIVATION == "gelu":
        e = tl.exp2(z * z * -0.7213475204444817)
        if FAST:
            normal = _fast_normal(z)
        else:
            # erfc as in Abramowitz and Stegun 7.1.26, within 1.5e-7, whose exponential the density needs as well.
            t = 1.0 / (1.0 + 0.23164190 * tl.abs(z))
            tail = 0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)
            tail = e * (t * (0.127414796 + t * (-0.142248368 + t * tail)))
            normal = tl.where(z < 0, tail, 1.0 - tail)
        dy = normal + z * 0.3989422804014327 * e
    elif ACTIVATION == "silu":
        s = tl.sigmoid(z)
        dy = s * (1.0 + z * (1.0 - s))
    elif ACTIVATION == "sigmoid":
        s = tl.sigmoid(z)
        dy = s * (1.0 - s)
    elif ACTIVATION == "given":
        dy = z
    elif ACTIVATION == "tanh":
        t = _tanh(z, FAST)
        dy = 1.0 - t * t
    else:
        dy = z * 0.0 + 1.0
    return dy


@triton.jit
def with_slope(z, ACTIVATION: tl.constexpr):
    """(`activate`, `slope`) at z, neither FAST, which share what is long."""
    if ACTIVATION == "gelu":
        normal = 0.5 + 0.5 * _erf(z * 0.7071067811865476)
        y = z * normal
        dy = normal + z * 0.3989422804014327 * tl.exp2(z * z * -0.7213475204444817)
    else:
        y = activate(z, ACTIVATION, False)
        dy = slope(z, ACTIVATION, False)
    return y, dy


@triton.jit
def kept(z, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """What a forward keeps for its backward: z, or with FAST the derivative there, as exact when rounded as z is."""
    if FAST:
        y = slope(z, ACTIVATION, True)
    else:
        y = z
    return y


def kept_activation(activation: str, dtype: torch.dtype) -> str:
    """The activation whose `slope` at what was kept is the derivative."""
    return activation if dtype is torch.float32 else "given"
