"""What each kernel of the fused experts computes, in plain PyTorch: their oracles, and their stand-ins on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import mxfp8
from kernels.moe.reference import ROWS, Permutation, permutation
from kernels.mxfp8.grouped import MATRIX

__all__ = [
    "collect",
    "combine",
    "dequantize_interleaved",
    "gather",
    "permutation",
    "quantize_both",
    "quantized",
    "swiglu",
    "swiglu_backward",
    "swiglu_quantized",
    "swiglu_quantized_backward",
]


def quantized(x: Tensor, axis: int, group: int, square: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scales with blocks along `axis`, which becomes the last one."""
    codes, scales, _ = mxfp8.quantize(x, axis, block_size=group, square=square, backend="reference")
    return (codes, scales) if axis % x.dim() == x.dim() - 1 else (codes.mT.contiguous(), scales.mT.contiguous())


def _nothing(like: Tensor) -> tuple[Tensor, Tensor]:
    return like.new_empty(0, 0, dtype=torch.float8_e4m3fn), like.new_empty(0, 0, dtype=torch.uint8)


def quantize_both(x: Tensor, rows: bool, columns: bool, group: int, square: bool, form: int) -> tuple[Tensor, ...]:
    assert form == MATRIX
    return (
        *(quantized(x, -1, group, square) if rows else _nothing(x)),
        *(quantized(x, -2, group, square) if columns else _nothing(x)),
    )


def dequantize_interleaved(codes: Tensor, scales: Tensor) -> Tensor:
    values = mxfp8.dequantize(mxfp8.MXTensor(codes, scales, 1), backend="reference")
    return values.unflatten(-1, (-1, 4, 4, 2, 2)).movedim(-4, -2).flatten(-5)


def gather(x: Tensor, places: Permutation, group: int, column_form: int | None) -> tuple[Tensor, ...]:
    selections = places.selections.long()
    rows = x[selections.clamp(min=0) // places.rows.shape[1]].masked_fill((selections < 0)[:, None], 0.0)
    if not group:
        return rows.bfloat16(), *_nothing(x)[::-1], *_nothing(x)
    return *quantized(rows, 1, group), *(_nothing(x) if column_form is None else quantized(rows, 0, group))


def swiglu(gate_up: Tensor, ends: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, 1)
    return (torch.nn.functional.silu(gate) * up).bfloat16()


def swiglu_quantized(gate_up: Tensor, ends: Tensor, group: int) -> tuple[Tensor, Tensor]:
    return quantized(swiglu(gate_up, ends), 1, group)


def swiglu_backward(
    gate_up: Tensor, grad: Tensor, selections: Tensor, weights: Tensor, ends: Tensor, overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = gate_up.float().chunk(2, 1)
    weight = (weights.flatten()[selections.long().clamp(min=0)] * (selections >= 0))[:, None]
    sigmoid = torch.sigmoid(gate)
    result = (gate * sigmoid * up).bfloat16().float()
    partial = (result * grad.float()).unflatten(1, (-1, ROWS)).sum(2)
    upstream = grad.float() * weight
    d_gate = upstream * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
    d_gate_up = torch.cat([d_gate, upstream * gate * sigmoid], 1).bfloat16()
    return _written(d_gate_up, gate_up, overwrite), grad.copy_(result * weight), partial


def swiglu_quantized_backward(
    gate_up: Tensor,
    grad: Tensor,
    selections: Tensor,
    weights: Tensor,
    ends: Tensor,
    group: int,
    overwrite: bool,
    result_form: int = MATRIX,
) -> tuple[Tensor, ...]:
    d_gate_up, result, partial = swiglu_backward(gate_up, grad.clone(), selections, weights, ends, False)
    rows, row_scales = quantized(d_gate_up, 1, group)
    columns, column_scales = quantized(d_gate_up, 0, group)
    both = _written(pairs(rows, columns).view(torch.bfloat16), gate_up, overwrite).view(torch.float8_e4m3fn)
    return both, row_scales, column_scales, *quantized(result, 0, group), partial


def pairs(rows: Tensor, columns: Tensor) -> Tensor:
    """Codes [M, C] and [C, M] as pairs [M, 2C]."""
    num_rows, width = rows.shape
    both = rows.new_empty(num_rows // ROWS, ROWS, width // ROWS, 2, ROWS, dtype=torch.uint8)
    both[:, :, :, 0] = rows.view(torch.uint8).view(num_rows // ROWS, ROWS, width // ROWS, ROWS)
    both[:, :, :, 1] = columns.view(torch.uint8).view(width // ROWS, ROWS, num_rows // ROWS, ROWS).permute(2, 1, 0, 3)
    return both.view(num_rows, 2 * width).view(rows.dtype)


def _written(values: Tensor, place: Tensor, overwrite: bool) -> Tensor:
    return place.copy_(values) if overwrite else values


def combine(values: Tensor, rows: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    picked = values[rows.long()].float()
    return (picked if weights is None else picked * weights[..., None].float()).sum(1).to(dtype)


def collect(partial: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    return partial.sum(1)[rows.long()].to(dtype)
