"""Linear layer on FP8 tensor cores: operands quantised in groups of 128, products of one group.

    forward                                        backward
    x quantised along K, and along M to be kept    dy quantised along N and along M
    W quantised in squares, both ways              dx = dy W
    y = x W^T                                      dW = dy^T x

Kept for the backward: the codes of x along M, half the bytes of x in bfloat16, and those of W along N, so that x and W
are read once a step. Rows of zeros fill x and dy up to a multiple of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core.operator import custom_op
from kernels.mxfp8 import matmul
from kernels.mxfp8.grouped import BYTES, MATRIX, VALUES, Quantized, addressable, fprop, wgrad
from kernels.mxfp8.hopper.quantize import operators as quantize
from kernels.mxfp8.hopper.quantize import weights as quantized_weights
from kernels.mxfp8.hopper.quantize.tiles import quantize_tiles

GROUP = 128
_KEPT = 5  # tensors


def _rows_of(x: Tensor) -> int:
    return -(-x.shape[0] // GROUP) * GROUP


def quantized(x: Tensor, rows: bool, columns: bool, column_form: int) -> tuple[Quantized, Quantized]:
    """x [M, C] bfloat16 along its rows and along its columns, as `quantize.empty_operands` says."""
    operands = quantize.empty_operands(x, rows, columns, column_form)
    if rows or columns:
        pairs = [tensor for operand in operands for tensor in operand[:2]]
        quantize_tiles(addressable(x), *pairs, GROUP, False, BYTES, column_form=column_form)
    return operands


def quantized_weight(weight: Tensor, transposed: bool) -> tuple[Quantized, Quantized]:
    """weight [N, K] in squares, as [1, N, K] and if asked for as [1, K, N], each along its last axis."""
    matrix = addressable(weight)[None]
    if quantized_weights.serves(matrix):
        if transposed:
            return quantized_weights.operands(matrix)
        operand = quantized_weights.operand(matrix, False, GROUP)
        return operand, operand
    codes, scales, codes_t, scales_t = quantize.quantize_both(matrix, True, transposed, GROUP, True, MATRIX)
    return Quantized(codes, scales, GROUP), Quantized(codes_t, scales_t, GROUP)


def one_group(rows: int, device: torch.device) -> Tensor:
    """The `ends` of a product whose rows are one group."""
    return torch.full((1,), rows, dtype=torch.int32, device=device)


@custom_op("gemsmith::mxfp8_linear")
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, keep_x: bool, keep_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(y [M, N] bfloat16, and what the backward needs: empty tensors without `keep_x` and `keep_weight`)."""
    rows, columns = quantized(x.bfloat16(), True, keep_x, VALUES)
    matrix, transposed = quantized_weight(weight, keep_weight)
    y = fprop(rows, matrix, one_group(rows.codes.shape[0], x.device))[: x.shape[0]]
    if bias is not None:
        y.add_(bias)
    codes, scales, differ = transposed.codes, transposed.scales, transposed.differ
    if not keep_weight:
        codes, scales = codes.new_empty(0), scales.new_empty(0)
    differ = x.new_empty(0, dtype=torch.int32) if differ is None or not keep_weight else differ
    return y, columns.codes, columns.scales, codes, scales, differ


@_forward.register_fake
def _(x, weight, bias, keep_x, keep_weight):
    (n, k), m = weight.shape, _rows_of(x)
    codes = x.new_empty((k, m) if keep_x else (0, 0), dtype=torch.float8_e4m3fn)
    scales = x.new_empty((m // GROUP, k) if keep_x else (0, 0), dtype=torch.bfloat16)
    tables = weight.dtype is torch.bfloat16
    codes_t = x.new_empty((1, k, n) if keep_weight else (0,), dtype=torch.float8_e4m3fn)
    shape = ((n // GROUP, k) if tables else (1, k, n // 32)) if keep_weight else (0,)
    scales_t = x.new_empty(shape, dtype=torch.bfloat16 if tables else torch.uint8)
    differ = x.new_empty(1 if keep_weight and tables else 0, dtype=torch.int32)
    return x.new_empty(x.shape[0], n, dtype=torch.bfloat16), codes, scales, codes_t, scales_t, differ


@custom_op("gemsmith::mxfp8_linear_backward")
def _backward(dy: Tensor, kept: list[Tensor], needs: list[bool], weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(dx [M, K] bfloat16, dW [N, K] of `weight_dtype`), empty where `needs` says that it is not needed."""
    codes, scales, codes_t, scales_t, differ = kept
    needs_x, needs_weight = needs
    rows, columns = quantized(dy.bfloat16(), needs_x, needs_weight, BYTES)
    dx, dw = dy.new_empty(0, dtype=torch.bfloat16), dy.new_empty(0, dtype=weight_dtype)
    if needs_x:
        matrix = Quantized(codes_t, scales_t, GROUP, differ=differ if differ.numel() else None)
        dx = fprop(rows, matrix, one_group(rows.codes.shape[0], dy.device))[: dy.shape[0]]
        del rows, matrix
    if needs_weight:
        ends = one_group(columns.codes.shape[1], dy.device)
        dw = wgrad(columns, Quantized(codes, scales, GROUP), ends, weight_dtype)[0]
    return dx, dw


@_backward.register_fake
def _(dy, kept, needs, weight_dtype):
    n, k = dy.shape[1], (kept[2].shape[1] if needs[0] else kept[0].shape[0])
    return (
        dy.new_empty((dy.shape[0], k) if needs[0] else (0,), dtype=torch.bfloat16),
        dy.new_empty((n, k) if needs[1] else (0,), dtype=weight_dtype),
    )


def _save(ctx, inputs, output):
    x, weight, bias, keep_x, keep_weight = inputs
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # otherwise each would get a gradient of zeros
    ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    ctx.kept = keep_weight, keep_x


def _gradients(ctx, dy, *_):
    matmul.refuse_second_derivatives()
    if dy is None:
        return (None,) * _KEPT
    x_dtype, weight_dtype, bias_dtype = ctx.dtypes
    needs = list(ctx.needs_input_grad[:2])
    assert all(kept or not needed for kept, needed in zip(ctx.kept, needs, strict=True)), "needed, but not kept"
    dx, dw = _backward(dy, list(ctx.saved_tensors), needs, weight_dtype)
    db = dy.sum(0, dtype=torch.float32).to(bias_dtype) if ctx.needs_input_grad[2] else None
    return dx.to(x_dtype) if needs[0] else None, dw if needs[1] else None, db, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, group: int) -> Tensor:
    """x [M, K], weight [N, K], bias [N] or None -> [M, N] bfloat16, in groups of 128."""
    if x.shape[0] == 0:
        return matmul.linear(x, weight, bias, out_dtype, group)
    keeps = torch.is_grad_enabled()
    return _forward(x, weight, bias, keeps and weight.requires_grad, keeps and x.requires_grad)[0]
