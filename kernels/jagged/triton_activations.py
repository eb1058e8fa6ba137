"""Activations and their derivatives as device functions."""

import triton
import triton.language as tl


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """float32 -> float32."""
    if ACTIVATION == "relu":
        y = tl.where(z < 0, 0.0, z)
    elif ACTIVATION == "gelu":
        y = 0.5 * z * (1.0 + tl.math.erf(z * 0.7071067811865476))
    elif ACTIVATION == "silu":
        y = z * tl.sigmoid(z)
    elif ACTIVATION == "sigmoid":
        y = tl.sigmoid(z)
    elif ACTIVATION == "tanh":
        y = 2.0 * tl.sigmoid(2.0 * z) - 1.0
    else:
        y = z
    return y


@triton.jit
def slope(z, ACTIVATION: tl.constexpr):
    """The derivative of `activate` at z; that of relu at 0 is 0."""
    if ACTIVATION == "relu":
        dy = tl.where(z > 0, 1.0, 0.0)
    elif ACTIVATION == "gelu":
        normal = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        dy = 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476)) + z * normal
    elif ACTIVATION == "silu":
        s = tl.sigmoid(z)
        dy = s * (1.0 + z * (1.0 - s))
    elif ACTIVATION == "sigmoid":
        s = tl.sigmoid(z)
        dy = s * (1.0 - s)
    elif ACTIVATION == "tanh":
        t = 2.0 * tl.sigmoid(2.0 * z) - 1.0
        dy = 1.0 - t * t
    else:
        dy = z * 0.0 + 1.0
    return dy
