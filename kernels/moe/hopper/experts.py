"""Routed SwiGLU experts as one operator, forward and backward, over quantised or bfloat16 operands.

    forward                                            backward
    rows of x gathered (and quantised both ways)       rows of dout gathered (and quantised both ways)
    h = rows W_gate_up^T                               dy = dout rows W_down
    y = swiglu(h) (quantised)                          dh, w * y from h, dy (quantised)
    o = y W_down^T                                     dW_down = dout^T (w * y),  dW_gate_up = dh^T rows
    out = weighted sums of o's rows                    dx = sums of the rows of dh W_gate_up

Kept for the backward: h and the rows of x. Quantised recipes keep h in MXINT8 and the rows of x quantised along the
rows' axis; otherwise both are bfloat16. The weights are quantised anew for the input gradients, except W_down with
groups of 128: one pass quantises it for both products, since what is kept of it is freed before the backward's peak. o
is not kept: a row's weight is applied to y in the backward, where its gradient <dout W_down, y> comes out of the same
pass. All else is made as late and freed as early as possible; dh takes the memory of h, unless h is needed again, and
in codes that of dy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.operator import custom_op, intercepted
from kernels.moe import GROUPS
from kernels.moe.reference import ROWS, Permutation, capacity_of
from kernels.mxfp8 import QUANTIZED
from kernels.mxfp8.grouped import (
    MATRIX,
    TABLES,
    VALUES,
    Operand,
    Quantized,
    Rounded,
    form_of,
    fprop,
    in_tables,
    swaps,
    wgrad,
)

_KEPT = 11  # tensors


def _operand(weight: Tensor, group: int, transpose: bool) -> Operand:
    """weight [E, N, K] as the forward takes it, or with `transpose` as [E, K, N] for the input gradient."""
    if group == 0:
        rounded = weight.to(torch.bfloat16, memory_format=torch.contiguous_format)
        return rounded.transpose(1, 2) if transpose else rounded
    from kernels.mxfp8.hopper.quantize import operators as quantize
    from kernels.mxfp8.hopper.quantize import weights as quantized_weights

    if quantized_weights.serves(weight):
        return quantized_weights.operand(weight, transpose, group)
    results = quantize.quantize_both(weight, not transpose, transpose, group, group == 128, MATRIX)
    return Quantized(*(results[2:] if transpose else results[:2]), group)


def _quantizes_both(weight: Tensor, group: int) -> bool:
    tiles = weight.shape[1] % 128 == 0 and weight.shape[2] % 128 == 0
    return group == 128 and weight.is_cuda and weight.dtype is torch.bfloat16 and tiles and weight.numel() > 0


def _both(weight: Tensor, group: int) -> tuple[Operand, *tuple[Tensor, ...]]:
    """weight [E, N, K] as the forward takes it, and the three tensors that the input gradient takes, or empty ones."""
    if not _quantizes_both(weight, group):
        return _operand(weight, group, False), *(weight.new_empty(0) for _ in range(3))
    from kernels.mxfp8.hopper.quantize import weights as quantized_weights

    operand, transposed = quantized_weights.operands(weight)
    return operand, transposed.codes, transposed.scales, transposed.differ


# Saved programs hold these names: the experts of a token stay `chosen` here.
@custom_op("gemsmith::moe_experts")
def _forward(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    group: int,
    dtype: torch.dtype,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out [N, O], and what the backward needs: empty tensors unless `keep`)."""
    from kernels.moe.hopper.gather import gather
    from kernels.moe.triton import route

    permutation = route.permutation(chosen, gate_up.shape[0])
    rows, row_scales, *kept_rows = gather(x, permutation, group, form_of(group, True) if keep and group else None)
    facts = {"group": group, "in_features": x.shape[1], "out_features": down.shape[2]}
    hidden_of = dispatch.choose("moe_hidden", None, rows, **facts)
    operand = Quantized(rows, row_scales, group) if group else rows
    if keep and not group:
        kept_rows = [rows, row_scales]
    del rows, row_scales
    result, hidden, hidden_scales = hidden_of(operand, _operand(gate_up, group, False), permutation.ends, keep)
    del operand
    second, *transposed = _both(down, group) if keep else (_operand(down, group, False),)
    result = fprop(result, second, permutation.ends)
    del second
    out = route.combine(result, permutation.rows, weights, dtype)
    if not keep:
        return out, *(out.new_empty(0) for _ in range(_KEPT))
    return out, hidden, hidden_scales, *kept_rows, *permutation, *transposed


@_forward.register_fake
def _(x, chosen, weights, gate_up, down, group, dtype, keep):
    out = x.new_empty(x.shape[0], down.shape[1], dtype=dtype)
    if not keep:
        return out, *(out.new_empty(0) for _ in range(_KEPT))
    num_experts, double, width = gate_up.shape
    rows = capacity_of(chosen.numel(), num_experts)
    shape, scales, scale_dtype = (width, rows) if group else (rows, width), (0, 0), torch.uint8
    if group:
        form = form_of(group, True) if in_tables(x.dtype, width) else MATRIX
        scales = (width, rows // 32) if form == MATRIX else (rows // 128, width)
        scale_dtype = TABLES.get(form, torch.uint8)
    kept_rows = x.new_empty(shape, dtype=torch.float8_e4m3fn if group else torch.bfloat16)
    hidden = x.new_empty(rows, double, dtype=torch.int8 if group else torch.bfloat16)
    hidden_scales = x.new_empty((double // 128, rows) if group else (0, 0), dtype=torch.int32)
    shapes = (chosen.shape, (rows,), (num_experts,), (rows // ROWS,))
    indices = [chosen.new_empty(shape, dtype=torch.int32) for shape in shapes]
    transposed = [down.new_empty(0) for _ in range(3)]
    if _quantizes_both(down, group):
        hidden_width = double // 2
        transposed = [
            down.new_empty(num_experts, hidden_width, down.shape[1], dtype=torch.float8_e4m3fn),
            down.new_empty(down.shape[1] // 128, num_experts * hidden_width, dtype=TABLES[VALUES]),
            down.new_empty(1, dtype=torch.int32),
        ]
    kept_scales = x.new_empty(scales, dtype=scale_dtype)
    return out, hidden, hidden_scales, kept_rows, kept_scales, *indices, *transposed


def _differentiate(
    grad: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    kept: list[Tensor],
    group: int,
    dtype: torch.dtype,
    needs: list[bool],
    overwrite: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `_backward`. With `overwrite` the first of `kept` may be overwritten, and codes freed."""
    from kernels.moe.hopper.gather import gather
    from kernels.moe.hopper.swiglu import swiglu_backward
    from kernels.moe.hopper.swiglu_quantized import swiglu_quantized_backward
    from kernels.moe.triton import route
    from kernels.mxfp8.hopper import dequantize

    hidden, hidden_scales, *kept_rows = kept[:4]
    permutation = Permutation(*kept[4:8])
    _, selections, ends, _ = permutation
    dx, d_weights, d_gate_up, d_down = _unneeded(grad, weights, gate_up, down, dtype)
    needs_x, needs_weights, needs_gate_up, needs_down = needs
    # The weight gradient of W_down, from dout's rows and the weighted y.
    swapped = swaps(group, grad.shape[1], hidden.shape[1] // 2)
    d_out_form = form_of(group, swapped) if group and needs_down else None
    d_out, d_out_scales, *d_out_t = gather(grad, permutation, group, d_out_form)
    d_hidden: Operand
    rows: Operand
    if group:
        codes, scales, differ = kept[8:]
        transposed = Quantized(codes, scales, group, differ=differ) if codes.numel() else _operand(down, group, True)
        d_result = fprop(Quantized(d_out, d_out_scales, group), transposed, ends)
        del d_out, d_out_scales, transposed
        if overwrite:
            codes.untyped_storage().resize_(0)
        d_codes, d_scales, pairs, pair_scales, *result, partial = swiglu_quantized_backward(
            hidden, hidden_scales, d_result, selections, weights, ends, group, overwrite, form_of(group, not swapped)
        )
        del d_result
        if needs_down:
            d_down = wgrad(Quantized(*d_out_t, group), Quantized(*result, group), ends, down.dtype)
        del d_out_t, result
        d_hidden, d_hidden_t = Quantized(d_codes, d_scales, group), Quantized(pairs, pair_scales, group, True)
        del d_codes, pairs
        rows = Quantized(*kept_rows, group)
    else:
        d_result = fprop(d_out, _operand(down, group, True), ends)
        d_hidden, result, partial = swiglu_backward(hidden, d_result, selections, weights, ends, overwrite)
        if needs_down:
            d_down = wgrad(d_out, result, ends, down.dtype)
        del d_out, d_result, result
        d_hidden_t, rows = d_hidden, kept_rows[0]
    if needs_weights:
        d_weights = route.collect(partial, permutation.rows, weights.dtype)
    if needs_x:
        d_rows = fprop(d_hidden, _operand(gate_up, group, True), ends)
        dx = route.combine(d_rows, permutation.rows, None, dtype)
        del d_rows
    del d_hidden
    if needs_gate_up:
        if group == QUANTIZED["mxfp8"] and kept_rows[0].numel():
            rows = Rounded(dequantize.dequantize_interleaved(*kept_rows))
            if overwrite:
                kept_rows[0].untyped_storage().resize_(0)
        d_gate_up = wgrad(d_hidden_t, rows, ends, gate_up.dtype)
    return dx, d_weights, d_gate_up, d_down


@custom_op("gemsmith::moe_experts_backward")
def _backward(
    grad: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    kept: list[Tensor],
    group: int,
    dtype: torch.dtype,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx in `dtype`, dweights, dgate_up, ddown), empty where `needs` says that it is not needed."""
    return _differentiate(grad, weights, gate_up, down, kept, group, dtype, needs, False)


def _unneeded(grad: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype) -> list[Tensor]:
    return [grad.new_empty(0, dtype=dtype), *(t.new_empty(0) for t in (weights, gate_up, down))]


@_backward.register_fake
def _(grad, weights, gate_up, down, kept, group, dtype, needs):
    full = (
        grad.new_empty(grad.shape[0], gate_up.shape[2], dtype=dtype),
        *(t.new_empty(t.shape) for t in (weights, gate_up, down)),
    )
    empty = _unneeded(grad, weights, gate_up, down, dtype)
    return tuple(full[i] if needed else empty[i] for i, needed in enumerate(needs))


def _save(ctx, inputs, output):
    x, _, weights, gate_up, down, group, _, keep = inputs
    assert keep, "differentiated although it was told that no gradient is needed"
    ctx.save_for_backward(weights, gate_up, down, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    # Otherwise each would get a gradient of zeros.
    ctx.set_materialize_grads(False)
    ctx.group, ctx.dtype = group, x.dtype


def _gradients(ctx, grad, *_):
    if grad is None:  # none arrives
        return (None,) * 8
    weights, gate_up, down, *kept = ctx.saved_tensors
    needs_x, _, *needs_others = ctx.needs_input_grad[:5]
    needs = [needs_x, *needs_others]
    arguments = (grad.contiguous(), weights, gate_up, down, kept, ctx.group, ctx.dtype, needs)
    if intercepted(arguments) or torch.is_grad_enabled() or torch._C._autograd._get_current_graph_task_keep_graph():
        grads = _backward(*arguments)
    else:
        # Autograd frees what was saved when this returns.
        grads = _differentiate(*arguments, overwrite=True)
    dx, *others = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return dx, None, *others, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def experts(x: Tensor, selected_experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, recipe: str) -> Tensor:
    """See `kernels.moe.experts`."""
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weights, gate_up, down))
    group = GROUPS.get(recipe, 0)
    dtype = dispatch.autocast_dtype(x)
    return _forward(x, selected_experts, weights, gate_up, down, group, dtype, keep)[0]
