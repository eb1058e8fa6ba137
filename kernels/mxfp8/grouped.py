"""Grouped products of operands that are quantised already, or bfloat16: what a fused layer is made of.

Rows are in expert order; expert e owns rows ends[e - 1]:ends[e], and every group begins at a multiple of 128 rows. Rows
behind the last end are undefined, in operands and in results, and are not read. An `Operand` is a bfloat16 tensor or a
`Quantized` with blocks along its last axis, which is the axis that is summed over.

Codes of both orientations of a matrix [M, C] may share a tensor, its pairs: e4m3 [M, 2C], which has the bytes of the
matrix in bfloat16. In a tile of 128 x 128 of the matrix, where the row j of the tile had its 256 bytes, there are 128
codes of the row j and then 128 codes of the column j.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import dispatch
from kernels.mxfp8.reference import BLOCK, MXTensor


class Quantized(NamedTuple):
    """codes [..., K] float8_e4m3fn and scales [..., ceil(K / 32)] uint8; `group` elements in a row share a scale.

    With `paired` codes are the pairs of the matrix and of its transpose, of which a product takes the part it needs.
    """

    codes: Tensor
    scales: Tensor
    group: int = BLOCK
    paired: bool = False


Operand = Tensor | Quantized


def fprop(a: Operand, b: Operand, ends: Tensor) -> Tensor:
    """a [M, K] times each row's expert in b [E, N, K] -> bfloat16 [M, N]; the input gradient with b transposed.

    a may be paired.
    """
    like, group = _describe(a)
    shape = b.codes.shape if isinstance(b, Quantized) else b.shape
    facts = {"in_features": shape[2], "out_features": shape[1]}
    if like.shape[0] == 0:
        return like.new_empty(0, shape[1], dtype=torch.bfloat16)
    if group == 0:
        return dispatch.choose("grouped_mm", None, like, **facts)(a, b, ends)
    return dispatch.choose("mxfp8_grouped_fprop", None, like, group=group, **facts)(a, b, ends)


def wgrad(dy: Operand, x: Operand, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over each expert's rows of dy^T x -> [E, N, K].

    bfloat16 operands are [M, N] and [M, K], quantised ones [N, M] and [K, M]. dy may be paired.
    """
    like, group = _describe(dy)
    n, k = (operand.scales.shape[0] if isinstance(operand, Quantized) else operand.shape[1] for operand in (dy, x))
    facts = {"in_features": k, "out_features": n}
    if like.numel() == 0:
        return like.new_zeros(ends.shape[0], n, k, dtype=dtype)
    if group == 0:
        return dispatch.choose("grouped_wgrad", None, like, **facts, multiple=128)(dy, x, ends).to(dtype)
    return dispatch.choose("mxfp8_grouped_wgrad", None, like, group=group, **facts)(dy, x, ends, dtype)


def _describe(operand: Operand) -> tuple[Tensor, int]:
    return (operand.codes, operand.group) if isinstance(operand, Quantized) else (operand, 0)


def row_codes(a: Quantized) -> Quantized:
    """a [M, K] without pairs."""
    if not a.paired:
        return a
    codes = a.codes.unflatten(1, (-1, 2, 128))[:, :, 0].flatten(1)
    return Quantized(codes, a.scales, a.group)


def column_codes(dy: Quantized) -> Quantized:
    """dy [N, M] without pairs."""
    if not dy.paired:
        return dy
    codes = dy.codes.unflatten(1, (-1, 2, 128)).unflatten(0, (-1, 128))[:, :, :, 1].permute(2, 1, 0, 3)
    return Quantized(codes.flatten(2).flatten(0, 1), dy.scales, dy.group)


def _values(operand: Quantized) -> Tensor:
    """Exact in bfloat16, which tensor cores multiply; float32 elsewhere."""
    dtype = torch.bfloat16 if operand.codes.device.type == "cuda" else torch.float32
    quantized = MXTensor(operand.codes, operand.scales, operand.codes.dim() - 1)
    return dispatch.choose("mxfp8_dequantize", None, operand.codes)(quantized, dtype)


@dispatch.register("mxfp8_grouped_fprop", "reference")
def _fprop(a: Quantized, b: Quantized, ends: Tensor) -> Tensor:
    return fprop(_values(row_codes(a)), _values(b), ends).bfloat16()


@dispatch.register("mxfp8_grouped_wgrad", "reference")
def _wgrad(dy: Quantized, x: Quantized, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return wgrad(_values(column_codes(dy)).t(), _values(x).t(), ends, dtype)
