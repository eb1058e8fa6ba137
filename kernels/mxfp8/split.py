"""Linear layer of float32 weights and bfloat16 rows, as exact as in float32 and on bfloat16 tensor cores.

A float32 number is the sum of three bfloat16 numbers, of 8 significant bits each. Products of bfloat16 numbers are
exact in float32, so one product with the three parts of the weight, side by side, reads x once and in its own dtype,
where a product in float32 would need a copy of x in float32. This suits layers of few outputs, such as a router's gate.

    y = x hi^T + x mid^T + x lo^T        dW = dy_hi^T x + dy_mid^T x + dy_lo^T x
    dx = dy_hi hi + dy_hi mid + dy_mid hi, whose error of 2^-16 is far below the rounding of dx to bfloat16
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three bfloat16 tensors, of falling magnitude, whose sum is the float32 tensor x."""
    high = x.bfloat16()
    rest = x - high
    middle = rest.bfloat16()
    return high, middle, (rest - middle).bfloat16()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] @ [K, N] of bfloat16 -> float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, torch.cat(split(weight)).t()).unflatten(1, (3, -1)).sum(1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        if torch.is_grad_enabled():  # for a second derivative
            return (dy @ weight).to(x.dtype) if needs_x else None, dy.t() @ x.float() if needs_weight else None
        high, middle, low = split(dy)
        dx = dw = None
        if needs_x:
            w_high, w_middle, _ = split(weight)
            dx = torch.cat([high, high, middle], 1) @ torch.cat([w_high, w_middle, w_high])
        if needs_weight:
            dw = _product(torch.cat([high, middle, low], 1).t(), x).unflatten(0, (3, -1)).sum(0)
        return dx, dw


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] bfloat16, weight [N, K] float32, bias [N] float32 or None -> [..., N] float32."""
    if x.numel() == 0:
        return reference(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        y = _Linear.apply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], len(weight))
        return y if bias is None else y + bias


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return functional.linear(x.to(weight.dtype), weight, bias)
