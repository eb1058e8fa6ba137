"""A residual sum, its norm and chosen rows of it in Triton: the sum is made where it is normalised.

In the backward, the incoming gradient of the sum and that of a second reader of the norm are added in the pass that
makes the gradient of the norm, and that of the chosen rows afterwards, in place, to these few rows: no gradient of the
size of all tokens is written for them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.core.constants import EPSILON
from kernels.core.launch import Launcher, aligned
from kernels.core.operator import custom_op, intercepted
from kernels.core.triton import cdiv
from kernels.tokens.triton.tokens import tile, tiling

_EPSILON = tl.constexpr(EPSILON)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_kernel(
    x, change, total, normed, num_rows, HAS_CHANGE: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places, inside = tile(tl.program_id(0).to(tl.int64) * ROWS, num_rows, WIDTH, ROWS, BLOCK)
    values = tl.load(x + places, inside, 0.0).to(tl.float32)
    if HAS_CHANGE:
        # The norm is that of the sum as it is stored.
        rounded = (values + tl.load(change + places, inside, 0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + places, rounded, inside)
        values = rounded.to(tl.float32)
    s = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + _EPSILON)
    tl.store(normed + places, (values * s[:, None]).to(normed.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_backward_kernel(
    d_total, d_normed, more, total, d, num_rows, HAS_TOTAL: tl.constexpr, HAS_MORE: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places, inside = tile(tl.program_id(0).to(tl.int64) * ROWS, num_rows, WIDTH, ROWS, BLOCK)
    values = tl.load(total + places, inside, 0.0).to(tl.float32)
    dn = tl.load(d_normed + places, inside, 0.0).to(tl.float32)
    if HAS_MORE:
        dn += tl.load(more + places, inside, 0.0).to(tl.float32)
    s = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + _EPSILON)
    shared = tl.sum(values * dn, 1) / WIDTH * s * s * s
    result = s[:, None] * dn - values * shared[:, None]
    if HAS_TOTAL:
        result += tl.load(d_total + places, inside, 0.0).to(tl.float32)
    tl.store(d + places, result.to(d.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_picked"])
def pick_rows_kernel(
    values, rows, picked, num_picked, GIVE_BACK: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """picked = values[rows], zeros for rows below 0; or values[rows] += picked."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    places, inside = tile(first, num_picked, WIDTH, ROWS, BLOCK)
    number = first + tl.arange(0, ROWS)
    row = tl.load(rows + number, number < num_picked, -1).to(tl.int64)
    at = values + (row * WIDTH)[:, None] + tl.arange(0, BLOCK)[None, :]
    real = inside & (row >= 0)[:, None]
    found = tl.load(at, real, 0.0)
    if GIVE_BACK:
        given = tl.load(picked + places, real, 0.0)
        tl.store(at, (found.to(tl.float32) + given.to(tl.float32)).to(values.dtype.element_ty), real)
    else:
        tl.store(picked + places, found, inside)


_launch_forward = Launcher(add_rms_norm_kernel)
_launch_backward = Launcher(add_rms_norm_backward_kernel)
_launch_pick = Launcher(pick_rows_kernel)


@custom_op("gemsmith::add_rms_norm")
def _add_rms_norm(x: Tensor, change: Tensor | None, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(x + change, of no size without a change; its norm; its rows of [rows]) of x and change [N, D] of one dtype."""
    x = x.contiguous()
    total = x.new_empty(0 if change is None else x.shape)
    normed = torch.empty_like(x)
    added = x if change is None else change.contiguous()
    _over_rows(_launch_forward, x, (x, added, total, normed), (change is not None,))
    picked = x.new_empty(((0,) if rows is None else tuple(rows.shape)) + (x.shape[1],))
    if rows is not None:
        _pick(x if change is None else total, rows, picked, give_back=False)
    return total, normed, picked


@_add_rms_norm.register_fake
def _(x: Tensor, change: Tensor | None, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0 if change is None else x.shape)
    return total, x.new_empty(x.shape), x.new_empty(((0,) if rows is None else tuple(rows.shape)) + x.shape[1:])


@custom_op("gemsmith::add_rms_norm_backward", like="total")
def _add_rms_norm_backward(
    d_total: Tensor | None,
    d_normed: Tensor,
    more: Tensor | None,
    d_picked: Tensor | None,
    total: Tensor,
    rows: Tensor | None,
) -> Tensor:
    """The gradient [N, D] of x and of change, from those of the results that have one; of the norm d_normed + more."""
    total, d_normed = total.contiguous(), d_normed.contiguous()
    d = torch.empty_like(total)
    given, added = (total if each is None else each.contiguous() for each in (d_total, more))
    options = d_total is not None, more is not None
    _over_rows(_launch_backward, total, (given, d_normed, added, total, d), options)
    if rows is not None and d_picked is not None:
        _pick(d, rows, d_picked.contiguous(), give_back=True)
    return d


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, change, rows = inputs
    ctx.has_change = ctx.has_total = change is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0] if ctx.has_change else x, rows)


def _backward(
    ctx: Any, d_total: Tensor | None, d_normed: Tensor | None, d_picked: Tensor | None, more: Tensor | None = None
) -> tuple[Tensor, Tensor | None, None]:
    total, rows = ctx.saved_tensors
    if d_normed is None:
        d_normed, more = more, None
    if d_normed is None:
        d_normed = torch.zeros_like(total)
    # Without a change the operator has no sum, and without `rows` none is picked.
    d = _add_rms_norm_backward(
        d_total if ctx.has_total else None, d_normed, more, None if rows is None else d_picked, total, rows
    )
    return d, d if ctx.has_change else None, None


_add_rms_norm.register_autograd(_backward, setup_context=_save)


class _TwoReaders(torch.autograd.Function):
    """Not an operator of torch.library, none of whose results may be another's memory, or an argument's, as the sum
    is without a change."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Tensor | None, rows: Tensor | None) -> tuple[Tensor, ...]:
        total, normed, picked = _add_rms_norm(x, change, rows)
        _save(ctx, (x, change, rows), (total, normed, picked))
        ctx.has_total = True
        return x.view_as(x) if change is None else total, normed, picked, normed.view_as(normed)

    backward = staticmethod(once_differentiable(_backward))


def add_rms_norm(x: Tensor, change: Tensor | None, rows: Tensor | None, twice: bool = False) -> tuple[Tensor, ...]:
    if twice and not intercepted((x, change, rows)):
        return cast("tuple[Tensor, ...]", _TwoReaders.apply(x, change, rows))
    total, *others = _add_rms_norm(x, change, rows)
    return x if change is None else total, *others, *(others[:1] if twice else ())


def _pick(values: Tensor, rows: Tensor, picked: Tensor, give_back: bool) -> None:
    _over_rows(_launch_pick, picked.view(-1, values.shape[1]), (values, rows.contiguous(), picked), (give_back,))


def _over_rows(launch: Launcher, like: Tensor, tensors: tuple[Tensor, ...], options: tuple[bool, ...]) -> None:
    """Launch over the rows of `like` [N, D]."""
    num_rows, width = like.shape
    if not like.numel():
        return
    constants = tiling(width)
    warps = constants.pop("num_warps")
    launch(
        (cdiv(num_rows, constants["ROWS"]), 1, 1),
        (like.device, tuple([tensor.dtype for tensor in tensors]), aligned(*tensors), num_rows >> 31, options, width),
        *tensors, num_rows, *options, *constants.values(), num_warps=warps,
    )  # fmt: skip
