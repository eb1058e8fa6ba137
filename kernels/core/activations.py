"""The activations of GDPA: names, values and derivatives in plain PyTorch, and the constants of the fast forms.

Every one has act(0) = 0, so that a pair outside a row or a window contributes nothing whichever way it is masked.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Operators get the index of a name in this tuple.
ACTIVATIONS = (
    "gelu",
    "gelu_tanh",
    "gelu_poly",
    "silu",
    "relu",
    "relu_squared",
    "hardswish",
    "leaky_relu",
    "identity",
)

LEAKY_SLOPE = 0.01

# gelu_poly(x) = x (1/2 + c Q(c^2)) with c = x clamped to [-LIMIT, LIMIT]. Q is the polynomial with the smallest maximal
# error of x (1/2 + x Q(x^2)) against the erf form within the limits, under two conditions: x Q(x^2) is 1/2 and flat at
# LIMIT. These make the factor exactly 0 or 1 beyond LIMIT, where any other value would be an error that grows with
# |x|, and make the derivative continuous. Errors over all x: 5.4e-4 of the value, 5.0e-3 of the derivative.
GELU_POLY_LIMIT = 3.7
GELU_POLY = (0.396311275, -0.0623936251, 0.00777617247, -0.000605931268, 2.60650563e-05, -4.6846057e-07)

# The erf form within 2.6e-5 as x (1/2 + 1/2 tanh(x T(min(x^2, LIMIT)))), for chips whose tanh is one instruction.
# Beyond LIMIT the tanh is 1 in every dtype in which it is computed; without the minimum T would turn negative.
GELU_AS_TANH_LIMIT = 16.0
GELU_AS_TANH = (0.797505339, 0.0370079516, -0.000351889451)


def activate(name: str, x: Tensor) -> Tensor:
    """act(x), elementwise and differentiable, in the dtype of x; `name` is one of ACTIVATIONS."""
    match name:
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu_poly":
            clamped = x.clamp(-GELU_POLY_LIMIT, GELU_POLY_LIMIT)
            return x * (0.5 + clamped * _polynomial(GELU_POLY, clamped.square()))
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)
        case "relu_squared":
            return F.relu(x).square()
        case "hardswish":
            return F.hardswish(x)
        case "leaky_relu":
            return F.leaky_relu(x, LEAKY_SLOPE)
        case "identity":
            return x
    raise unknown(name)


def derivative(name: str, x: Tensor) -> Tensor:
    """act'(x), elementwise; where it does not exist, the value that PyTorch's autograd takes."""
    match name:
        case "gelu":
            normal = torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
            return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * normal
        case "gelu_tanh":
            outer, inner = math.sqrt(2 / math.pi), 0.044715
            t = torch.tanh(outer * x * (1 + inner * x.square()))
            return 0.5 * (1 + t) + 0.5 * x * (1 - t.square()) * outer * (1 + 3 * inner * x.square())
        case "gelu_poly":
            clamped = x.clamp(-GELU_POLY_LIMIT, GELU_POLY_LIMIT)
            square = clamped.square()
            steps = tuple((2 * power + 1) * factor for power, factor in enumerate(GELU_POLY))
            inside = x.abs() <= GELU_POLY_LIMIT
            slope = torch.where(inside, x * _polynomial(steps, square), 0.0)
            return 0.5 + clamped * _polynomial(GELU_POLY, square) + slope
        case "silu":
            s = torch.sigmoid(x)
            return s * (1 + x * (1 - s))
        case "relu":
            return (x > 0).to(x.dtype)
        case "relu_squared":
            return 2 * F.relu(x)
        case "hardswish":
            return torch.where(x <= -3, 0.0, torch.where(x < 3, x / 3 + 0.5, 1.0)).to(x.dtype)
        case "leaky_relu":
            return torch.where(x > 0, 1.0, LEAKY_SLOPE).to(x.dtype)
        case "identity":
            return torch.ones_like(x)
    raise unknown(name)


def unknown(name: str) -> ValueError:
    return ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")


def _polynomial(factors: tuple[float, ...], x: Tensor) -> Tensor:
    """factors[0] + factors[1] x + ..., by Horner's rule."""
    value = torch.full_like(x, factors[-1])
    for factor in reversed(factors[:-1]):
        value = value * x + factor
    return value
