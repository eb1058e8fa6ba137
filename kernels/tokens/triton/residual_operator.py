"""A residual sum with its norm and chosen rows of it by the Triton kernels, as an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.core.operator import custom_op
from kernels.tokens.triton import residual


@custom_op("gemsmith::add_rms_norm")
def _add_rms_norm(x: Tensor, change: Tensor | None, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return residual.add_rms_norm(x, change, rows)


@_add_rms_norm.register_fake
def _(x: Tensor, change: Tensor | None, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0 if change is None else x.shape)
    return total, x.new_empty(x.shape), x.new_empty(((0,) if rows is None else tuple(rows.shape)) + x.shape[1:])


@custom_op("gemsmith::add_rms_norm_backward")
def _add_rms_norm_backward(
    d_total: Tensor | None, d_normed: Tensor, d_picked: Tensor | None, total: Tensor, rows: Tensor | None
) -> Tensor:
    return residual.add_rms_norm_backward(d_total, d_normed, d_picked, total, rows)


@_add_rms_norm_backward.register_fake
def _(d_total: Tensor | None, d_normed: Tensor, d_picked: Tensor | None, total: Tensor, rows: Tensor | None) -> Tensor:
    return total.new_empty(total.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, change, rows = inputs
    ctx.has_change = change is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0] if ctx.has_change else x, rows)


def _backward(
    ctx: Any, d_total: Tensor | None, d_normed: Tensor | None, d_picked: Tensor | None
) -> tuple[Tensor, Tensor | None, None]:
    total, rows = ctx.saved_tensors
    if d_normed is None:
        d_normed = torch.zeros_like(total)
    # Without a change the sum is not an output, and without `rows` none is picked.
    d = _add_rms_norm_backward(
        d_total if ctx.has_change else None, d_normed, None if rows is None else d_picked, total, rows
    )
    return d, d if ctx.has_change else None, None


_add_rms_norm.register_autograd(_backward, setup_context=_save)


def add_rms_norm(x: Tensor, change: Tensor | None, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    total, normed, picked = _add_rms_norm(x, change, rows)
    return x if change is None else total, normed, picked
