"""What is done to each token by itself, in one pass over memory where PyTorch's operators make several.

The equations are in the README of this folder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import dispatch
from kernels.tokens import norm, permutation, rotary  # noqa: F401  register their backends

__all__ = ["permute", "rms_norm", "rotate"]


def permute(values: Tensor, order: Tensor, *, backend: str | None = None) -> Tensor:
    """values[order] of values [N, ...], for an `order` [N] int64 that holds each of 0 .. N - 1 once.

    The gradient goes back the same way, without the sums that selecting rows more than once would need. ValueError for
    another shape or dtype of `order`; that each row is in it once is not looked at.
    """
    if order.shape != values.shape[:1] or order.dtype != torch.int64:
        raise ValueError(
            f"order must be int64 [{len(values)}], a place for each row of values, got {order.dtype} "
            f"{tuple(order.shape)}"
        )
    return dispatch.choose_in_eager("permute", backend, values)(values, order)


def rms_norm(x: Tensor, *, dtype: torch.dtype | None = None, backend: str | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + 1e-5) over the last dimension of x [..., D], in `dtype`; without one, in that of x.

    Statistics are at least float32. Zeros stay zeros with a finite gradient. ValueError for integers.
    """
    dtype = dtype or x.dtype
    for name, kind in (("x", x.dtype), ("dtype", dtype)):
        if not kind.is_floating_point:
            raise ValueError(f"{name} must be of a floating type, e.g. torch.bfloat16, got {kind}")
    return dispatch.choose_in_eager("rms_norm", backend, x, width=x.shape[-1], out_dtype=dtype)(x, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, backend: str | None = None) -> Tensor:
    """Rotate each head of x [N, H, d] by its token's angles; feature i is paired with feature i + d / 2.

    cos and sin are [N, d / 2], of any floating dtype. Computed in at least float32; the result has the dtype of x. x
    may be a view of a fused projection and is read where it is. ValueError for shapes that do not fit.
    """
    if x.dim() != 3 or x.shape[2] % 2 or cos.shape != sin.shape or cos.shape != (x.shape[0], x.shape[2] // 2):
        raise ValueError(
            f"shapes do not fit: x {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}; expected x "
            "[N, H, d] with an even d, cos and sin [N, d / 2]"
        )
    facts = {"width": x.shape[2], "angles": cos.dtype, "angles_learn": cos.requires_grad or sin.requires_grad}
    return dispatch.choose_in_eager("rotate", backend, x, **facts)(x, cos, sin)
