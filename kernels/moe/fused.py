"""Routed SwiGLU experts as one operator, forward and backward, over quantised or bfloat16 operands.

    forward                                            backward
    rows of x gathered (and quantised both ways)       rows of dout gathered (and quantised both ways)
    h = rows W_gate_up^T                               dy = dout rows W_down
    y = swiglu(h) (quantised)                          dh, w * y from h, dy (quantised)
    o = y W_down^T                                     dW_down = dout^T (w * y),  dW_gate_up = dh^T rows
    out = weighted sums of o's rows                    dx = sums of the rows of dh W_gate_up

Kept for the backward: h in bfloat16, the rows of x (quantised along the rows' axis, or bfloat16) and the weights as the
input gradients take them. o is not kept: a row's weight is applied to y in the backward, where its gradient
<dout W_down, y> falls out of the same pass.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from kernels import dispatch
from kernels.custom_op import custom_op
from kernels.moe.reference import Permutation
from kernels.mxfp8 import QUANTIZED
from kernels.mxfp8.grouped import Operand, Quantized, fprop, wgrad

GROUPS = {"bf16": 0, **QUANTIZED}
"""Elements that share a scale, by recipe; 0 is not quantised."""
_KEPT = 10  # tensors
FLOATS = (torch.bfloat16, torch.float32)


def _weights(weight: Tensor, group: int, columns: bool) -> tuple[Operand, list[Tensor]]:
    """(weight [E, N, K] as the forward takes it, what the backward needs of it: quantised, only with `columns`)."""
    if group == 0:
        rounded = weight.to(torch.bfloat16, memory_format=torch.contiguous_format)
        return rounded, [rounded if rounded is not weight else rounded.new_empty(0), rounded.new_empty(0)]
    from kernels.mxfp8.gluon_quantize import quantize_both

    codes, scales, *transposed = quantize_both(weight, True, columns, group, group == 128, False)
    return Quantized(codes, scales, group), transposed


def _transposed(weight: Tensor, kept: list[Tensor], group: int) -> Operand:
    """The weight [E, N, K] as [E, K, N], out of what `_weights` kept."""
    if group:
        return Quantized(*kept, group)
    return (kept[0] if kept[0].numel() else weight).transpose(1, 2)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out [N, D], and what the backward needs: empty tensors unless `keep`)."""
    from kernels.moe import triton_route
    from kernels.moe.gluon_gather import gather
    from kernels.moe.gluon_swiglu import swiglu

    permutation = triton_route.permutation(chosen, gate_up.shape[0])
    rows, row_scales, *kept_rows = gather(x, permutation, group, keep and group > 0)
    first, first_kept = _weights(gate_up, group, keep)
    hidden = fprop(Quantized(rows, row_scales, group) if group else rows, first, permutation.ends)
    kept_rows = kept_rows if group else [rows, row_scales]
    del rows, row_scales, first
    result, scales = swiglu(hidden, permutation.ends, group)
    second, second_kept = _weights(down, group, keep)
    result = fprop(Quantized(result, scales, group) if group else result, second, permutation.ends)
    out = triton_route.combine(result, permutation.rows, weights, dtype)
    if not keep:
        return out, *(out.new_empty(0) for _ in range(_KEPT))
    return out, hidden, *kept_rows, *first_kept, *second_kept, *permutation


@_forward.register_fake
def _(x, chosen, weights, gate_up, down, group, dtype, keep):
    from kernels.moe.reference import capacity_of

    out = x.new_empty(x.shape, dtype=dtype)
    if not keep:
        return out, *(out.new_empty(0) for _ in range(_KEPT))
    num_experts, double, width = gate_up.shape
    rows = capacity_of(chosen.numel(), num_experts)
    codes, bytes_ = torch.float8_e4m3fn, torch.uint8

    def blocked(*shape: int) -> list[Tensor]:
        return [x.new_empty(shape, dtype=codes), x.new_empty(*shape[:-1], -(-shape[-1] // 32), dtype=bytes_)]

    def copied(weight: Tensor) -> list[Tensor]:
        shape = (0,) if weight.dtype is torch.bfloat16 else weight.shape
        return [x.new_empty(shape, dtype=torch.bfloat16), x.new_empty(0, dtype=torch.bfloat16)]

    if group:
        kept_rows = blocked(width, rows)
        kept = [*blocked(num_experts, width, double), *blocked(num_experts, double // 2, width)]
    else:
        kept_rows = [x.new_empty(rows, width, dtype=torch.bfloat16), x.new_empty(0, 0, dtype=bytes_)]
        kept = [*copied(gate_up), *copied(down)]
    hidden = x.new_empty(rows, double, dtype=torch.bfloat16)
    indices = [chosen.new_empty(shape, dtype=torch.int32) for shape in (chosen.shape, (rows,), (num_experts,))]
    return out, hidden, *kept_rows, *kept, *indices


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
    """(dx in `dtype`, dweights, dgate_up, ddown), empty those that `needs` says nobody needs."""
    from kernels.moe import triton_route
    from kernels.moe.gluon_gather import gather
    from kernels.moe.gluon_swiglu import swiglu_backward

    hidden, rows_t, rows_t_scales, *kept_weights = kept[:7]
    permutation = Permutation(*kept[7:])
    ends = permutation.ends
    dx, d_weights, d_gate_up, d_down = _unneeded(grad, weights, gate_up, down, dtype)
    needs_x, needs_weights, needs_gate_up, needs_down = needs
    d_out, d_out_scales, *d_out_t = gather(grad, permutation, group, group > 0 and needs_down)
    d_result = fprop(
        Quantized(d_out, d_out_scales, group) if group else d_out, _transposed(down, kept_weights[2:], group), ends
    )
    if group:
        d_out = d_out_scales = None
    *d_hidden, result, result_scales, partial = swiglu_backward(
        hidden, d_result, permutation.selections, weights, ends, group
    )
    del d_result
    if needs_weights:
        d_weights = triton_route.collect(partial, permutation.rows, weights.dtype)
    if needs_down and group:
        d_down = wgrad(Quantized(*d_out_t, group), Quantized(result, result_scales, group), ends, down.dtype)
    elif needs_down:
        d_down = wgrad(d_out, result, ends, down.dtype)
    del d_out, d_out_t, result
    if needs_gate_up and group:
        rows = Quantized(rows_t, rows_t_scales, group)
        d_gate_up = wgrad(Quantized(*d_hidden[2:], group), rows, ends, gate_up.dtype)
    elif needs_gate_up:
        d_gate_up = wgrad(d_hidden[0], rows_t, ends, gate_up.dtype)
    if needs_x:
        d_hidden = Quantized(*d_hidden[:2], group) if group else d_hidden[0]
        d_rows = fprop(d_hidden, _transposed(gate_up, kept_weights[:2], group), ends)
        dx = triton_route.combine(d_rows, permutation.rows, None, dtype)
    return dx, d_weights, d_gate_up, d_down


def _unneeded(grad: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype) -> list[Tensor]:
    return [grad.new_empty(0, dtype=dtype), *(t.new_empty(0) for t in (weights, gate_up, down))]


@_backward.register_fake
def _(grad, weights, gate_up, down, kept, group, dtype, needs):
    full = (grad.new_empty(grad.shape, dtype=dtype), *(t.new_empty(t.shape) for t in (weights, gate_up, down)))
    empty = _unneeded(grad, weights, gate_up, down, dtype)
    return tuple(full[i] if needed else empty[i] for i, needed in enumerate(needs))


def _save(ctx, inputs, output):
    x, _, weights, gate_up, down, group, _, keep = inputs
    assert keep, "differentiated although it was told that no gradient is needed"
    ctx.save_for_backward(weights, gate_up, down, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    # Or each of them would come with zeros of its size.
    ctx.set_materialize_grads(False)
    ctx.group, ctx.dtype = group, x.dtype


def _gradients(ctx, grad, *_):
    weights, gate_up, down, *kept = ctx.saved_tensors
    needs_x, _, *needs_others = ctx.needs_input_grad[:5]
    needs = [needs_x, *needs_others]
    grads = _backward(grad.contiguous(), weights, gate_up, down, kept, ctx.group, ctx.dtype, needs)
    dx, *others = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return dx, None, *others, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def _supports(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    operands: str,
    out_dtype: torch.dtype,
    dim: int,
    expert_dim: int,
    num_experts: int,
) -> str | None:
    if reason := dispatch.needs_triton(device, capability, (9, 0)):
        return reason
    if operands not in GROUPS:
        return f"multiplies operands of {', '.join(GROUPS)}, not {operands}"
    if dtype not in FLOATS or out_dtype not in FLOATS:
        return f"takes and returns bfloat16 or float32, not {dtype} and {out_dtype}"
    if dim % 32 or expert_dim % 128:
        return f"needs dim in multiples of 32 and expert_dim in multiples of 128, got {dim} and {expert_dim}"
    if num_experts > 1024:
        return f"counts up to 1024 experts at once, got {num_experts}"
    return None


@dispatch.register("moe_experts", "fused", supports=_supports, priority=10)
def experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, recipe: str) -> Tensor:
    """See `kernels.moe.experts`."""
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weights, gate_up, down))
    group = GROUPS.get(recipe, 0)
    dtype = dispatch.autocast_dtype(x)
    return _forward(x, chosen, weights, gate_up, down, group, dtype, keep)[0]
