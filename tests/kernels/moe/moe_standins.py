"""What each kernel of the fused experts computes, in plain PyTorch: their oracles, and their stand-ins on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import mxfp8
from kernels.moe.hopper.swiglu_quantized import Results
from kernels.moe.reference import ROWS, Permutation, permutation
from kernels.mxfp8.grouped import MATRIX, VALUES
from kernels.mxfp8.hopper.quantize.int8 import empty_int8

__all__ = [
    "collect",
    "combine",
    "dequantize_interleaved",
    "empty_results",
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
    columns = _nothing(x) if column_form is None else quantized(rows, 0, group, column_form == VALUES)
    return *quantized(rows, 1, group), *columns


def swiglu(gate_up: Tensor, ends: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, 1)
    return (torch.nn.functional.silu(gate) * up).bfloat16()


def mxint8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and words of scales of x bfloat16, from exact arithmetic in float64."""
    blocks = x.double().unflatten(1, (-1, 32))
    largest = blocks.abs().amax(2)
    finite = largest <= 127 * 2.0**104  # and no NaN; the byte 237
    # 127 codes or less, each of at least the smallest normal float32.
    exponents = torch.ceil(torch.log2(torch.where(finite & (largest > 0), largest, 2.0**-140) / 127)).clamp(min=-126)
    exponents += (largest > 127 * torch.exp2(exponents)) & finite
    codes = (blocks / torch.exp2(exponents)[..., None]).nan_to_num(0, 0, 0).round().flatten(1).to(torch.int8)
    scales = torch.where(finite, exponents + 133, 255).to(torch.uint8)
    return codes, scales.view(torch.int32).t().contiguous()


def mxint8_values(codes: Tensor, scales: Tensor) -> Tensor:
    """float32, exactly."""
    exponents = scales.t().contiguous().view(torch.uint8).int()
    factors = torch.where(exponents == 255, torch.nan, ((exponents - 6) << 23).view(torch.float32))
    return (codes.float().unflatten(1, (-1, 32)) * factors[..., None]).flatten(1)


def empty_results(num_rows: int, width: int, group: int, keep: bool, device: torch.device) -> Results:
    codes, scales = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn), torch.empty(num_rows, width // 32).byte()
    return Results(codes, scales, *empty_int8(num_rows if keep else 0, 2 * width if keep else 0, device))


def swiglu_quantized(gate_up: Tensor, ends: Tensor, group: int, results: Results, first: int = 0) -> None:
    part = slice(first, first + len(gate_up))
    results.codes[part], results.scales[part] = quantized(swiglu(gate_up, ends), 1, group)
    if results.kept.numel():
        results.kept[part], results.kept_scales[:, part] = mxint8(gate_up)


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
    kept: Tensor,
    kept_scales: Tensor,
    grad: Tensor,
    selections: Tensor,
    weights: Tensor,
    ends: Tensor,
    group: int,
    overwrite: bool,
    result_form: int = MATRIX,
) -> tuple[Tensor, ...]:
    gate_up = mxint8_values(kept, kept_scales)
    d_gate_up, result, partial = swiglu_backward(gate_up, grad.clone(), selections, weights, ends, False)
    rows, row_scales = quantized(d_gate_up, 1, group)
    columns, column_scales = quantized(d_gate_up, 0, group)
    rows = _written(rows.view(torch.int8), kept, overwrite).view(torch.float8_e4m3fn)
    both = _written(pairs(columns).view(torch.bfloat16), grad, True).view(torch.float8_e4m3fn)
    result = quantized(result, 0, group, result_form == VALUES)
    return rows, row_scales, both, column_scales, *result, partial


def pairs(columns: Tensor) -> Tensor:
    """Codes [2C, M] of the columns of two matrices [M, C] as pairs [M, 2C]."""
    double, num_rows = columns.shape
    tiles = columns.view(torch.uint8).view(2, double // 2 // ROWS, ROWS, num_rows // ROWS, ROWS).permute(3, 2, 1, 0, 4)
    return tiles.reshape(num_rows, double).view(columns.dtype)


def _written(values: Tensor, place: Tensor, overwrite: bool) -> Tensor:
    return place.copy_(values) if overwrite else values


def combine(values: Tensor, rows: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    picked = values[rows.long()].float()
    return (picked if weights is None else picked * weights[..., None].float()).sum(1).to(dtype)


def collect(partial: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    return partial.sum(1)[rows.long()].to(dtype)
