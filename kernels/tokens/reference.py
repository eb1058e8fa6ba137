"""The specifications of the operators on single tokens, in plain PyTorch; the equations are in the README."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import pad

from kernels.core.constants import EPSILON

ACTIVATIONS = {"none": lambda u: u, "silu": F.silu}


def activate(z: Tensor, bias: Tensor, activation: str, factor: Tensor | None) -> Tensor:
    wide = torch.promote_types(z.dtype, torch.float32)
    y = ACTIVATIONS[activation](z.to(wide) + bias.to(wide))
    return (y if factor is None else y * factor.to(wide)).to(z.dtype)


def add_rms_norm(x: Tensor, change: Tensor | None, rows: Tensor | None, twice: bool = False) -> tuple[Tensor, ...]:
    total = x if change is None else x + change
    # A row of zeros after the last one is row -1.
    picked = total[:0] if rows is None else pad(total, (0, 0, 0, 1))[rows]
    normed = cast(Tensor, rms_norm(total, total.dtype, EPSILON))
    return total, normed, picked, *((normed,) if twice else ())


def biased_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def concat_finite(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    whole = torch.cat(parts)
    return whole, whole.isfinite().all().float()


def concat_tokens(parts: list[Tensor], added: Tensor | None) -> Tensor:
    whole = torch.cat(parts, 1)
    return whole if added is None else whole + added


def move_rows_(out: Tensor, rows: Tensor, places: Tensor, scatter: bool, divisor: float) -> Tensor:
    moved = rows if scatter else rows[places]
    moved = moved if divisor == 1 else moved / divisor
    return out.index_copy_(0, places, moved) if scatter else out.copy_(moved)


def place_rows(parts: list[Tensor], places: Tensor, gradient_divisor: float = 1.0) -> Tensor:
    rows = torch.cat(parts)
    if gradient_divisor != 1 and rows.requires_grad:
        rows.register_hook(lambda gradient: gradient / gradient_divisor)
    return torch.empty_like(rows).index_copy(0, places, rows)


def project_qkv(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, heads: int, twice: bool
) -> tuple[Tensor, ...]:
    return rotate_qkv(
        F.linear(x, weight).view(x.shape[0], 3, heads, weight.shape[0] // (3 * heads)), cos, sin, positions, twice
    )


def of_readers(normed: Tensor, *others: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """The norm alone, or a tuple with those others that there are."""
    given = [other for other in others if other is not None]
    return (normed, *given) if given else normed


def rms_norm(
    x: Tensor, dtype: torch.dtype, epsilon: float, twice: bool = False, beside: bool = False
) -> Tensor | tuple[Tensor, ...]:
    # PyTorch takes the statistics in at least float32 whatever the input, and autocast widens the result too.
    normed = F.rms_norm(x, x.shape[-1:], eps=epsilon).to(dtype)
    return of_readers(normed, normed if twice else None, x if beside else None)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rotate_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, twice: bool = False
) -> tuple[Tensor, ...]:
    q, k, v = qkv.unbind(1)
    key_value = rotate(k, cos, sin, positions), v
    return rotate(q, cos, sin, positions), *key_value, *(key_value if twice else ())


def silu_mlp(x: Tensor, inner: Tensor, bias: Tensor, outer: Tensor, outer_bias: Tensor | None) -> Tensor:
    return F.linear(activate(F.linear(x, inner), bias, "silu", None), outer, outer_bias)


def zero_unless_(x: Tensor, condition: Tensor) -> Tensor:
    return x.masked_fill_(condition == 0, 0)
