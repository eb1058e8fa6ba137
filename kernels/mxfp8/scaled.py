"""MXFP8 products by PyTorch's block-scaled ones: `torch.nn.functional.scaled_mm` (cuBLAS) and `scaled_grouped_mm`
(CUTLASS). For sm_100, on which nothing here has run: tests hold every argument to PyTorch's contract, on a CPU.

Operands are quantised by `reference` and have their scales in TILES. Sums are float32; those of grouped products are
rounded to bfloat16, the only dtype that `scaled_grouped_mm` writes. Where groups have 128 elements, each of their four
blocks of 32 names the scale that they share.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

from kernels.core import dispatch
from kernels.core.operator import custom_op
from kernels.mxfp8 import grouped
from kernels.mxfp8.grouped import Quantized, addressable, column_codes, scale_tiles
from kernels.mxfp8.matmul import aligned_groups, as_dtype, refuse_second_derivatives, scattered
from kernels.mxfp8.reference import BLOCK, TILE_COLUMNS, TILE_ROWS, swizzle_scales

MOST_GROUPS = 1024  # of a grouped product: PyTorch prepares them in one thread block


@custom_op("gemsmith::mxfp8_scaled_mm")
def _multiply(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Sums over the last axis of the codes a [M, K] and b.

    [M, N] for b [N, K]; with `ends`, [M, N] for b [E, N, K] and groups of rows, or [E, M, N] for b [N, K] and groups
    along K. Scales are [M, K / 32], both up to whole tiles, and [E, bytes] for b [E, N, K].
    """
    blocks, swizzle = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    # E8M0 from here on only: not all compilers know it.
    a_scales, b_scales = (addressable(scales).view(torch.float8_e8m0fnu) for scales in (a_scales, b_scales))
    operands = (addressable(a), addressable(b).mT, a_scales, blocks, b_scales, blocks, swizzle, swizzle)
    if ends is None:
        return functional.scaled_mm(*operands, output_dtype=dtype)
    return functional.scaled_grouped_mm(*operands, offs=ends, output_dtype=dtype)


@_multiply.register_fake
def _(a, a_scales, b, b_scales, ends, dtype):
    groups = [ends.shape[0]] if ends is not None and b.dim() == 2 else []
    return a.new_empty(*groups, a.shape[0], b.shape[-2], dtype=dtype)


def _tensors(operand: Quantized) -> tuple[Tensor, Tensor]:
    """(codes, scales) of an operand without pairs as `_multiply` takes them."""
    codes, scales = operand.codes, scale_tiles(operand)
    return codes, scales if codes.dim() == 3 else scales.reshape(-(-codes.shape[0] // TILE_ROWS) * TILE_ROWS, -1)


def _by_group(scales: Tensor, ends: Tensor) -> Tensor:
    """Scales [lines, M / 32] in tiles that follow each other row by row -> group by group, row by row within each."""
    rows, columns = (size // tile for size, tile in zip(scales.shape, (TILE_ROWS, TILE_COLUMNS), strict=True))
    ends = (ends + TILE_ROWS - 1) // TILE_ROWS  # now of tiles
    edges = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), columns)])
    column = torch.arange(columns, dtype=ends.dtype, device=ends.device)
    group = torch.searchsorted(ends, column, right=True)
    first, width = edges[group], edges.diff()[group]
    row = torch.arange(rows, dtype=ends.dtype, device=ends.device)[:, None]
    target = (rows * first + width * row + column - first).flatten().long()
    tiles = scales.view(rows * columns, -1)
    return torch.empty_like(tiles).index_copy_(0, target, tiles).view_as(scales)


def fprop(a: Quantized, b: Quantized, ends: Tensor) -> Tensor:
    m, groups = a.codes.shape[0], b.codes.shape[0]
    if not groups <= min(m, MOST_GROUPS):  # of fewer rows than groups PyTorch may write none
        return dispatch.reference("mxfp8_grouped_fprop")(a, b, ends)
    return _multiply(*_tensors(a), *_tensors(b), ends.int().contiguous(), torch.bfloat16)


def wgrad(dy: Quantized, x: Quantized, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Groups end at multiples of 128 columns too."""
    if ends.shape[0] > MOST_GROUPS:
        return dispatch.reference("mxfp8_grouped_wgrad")(dy, x, ends, dtype)
    ends = ends.int().contiguous()
    (codes, scales), (x_codes, x_scales) = _tensors(column_codes(dy)), _tensors(x)
    dw = _multiply(codes, _by_group(scales, ends), x_codes, _by_group(x_scales, ends), ends, torch.bfloat16)
    # The gradient of a group without rows is not written.
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return dw.masked_fill_(empty[:, None, None], 0.0).to(dtype)


def _operand(x: Tensor, axis: int, group: int, second: bool = False) -> Quantized:
    """x [..., R, C] with blocks along `axis`, -1 or -2, as the last one; the `second` operand in squares of 128."""
    choice = dispatch.choose("mxfp8_quantize", None, x, axis=axis)
    codes, scales, _ = choice(x, x.dim() + axis, group, second and group != BLOCK)
    if axis == -2:
        codes, scales = codes.mT, scales.mT
    return Quantized(codes.contiguous(), swizzle_scales(scales), group)


def _columns(rows: Tensor, group: int, second: bool = False) -> Quantized:
    """Rows [M, C] with blocks along M, which becomes a multiple of 32."""
    missing = -rows.shape[0] % BLOCK
    return _operand(functional.pad(rows, (0, 0, 0, missing)) if missing else rows, -2, group, second)


def _product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    (m, k), n = a.codes.shape, b.codes.shape[0]
    if m == 0 or k == 0:
        return a.codes.new_zeros(m, n, dtype=dtype)
    return _multiply(*_tensors(a), *_tensors(b), None, dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, group: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.bias_dtype = None if bias is None else bias.dtype
        with torch.autocast(x.device.type, enabled=False):
            operands = _operand(x, -1, group), _operand(weight, -1, group, second=True)
            y = _product(*operands, out_dtype if bias is None else torch.float32)
            return y if bias is None else as_dtype(y + bias, out_dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        refuse_second_derivatives()
        x, weight = ctx.saved_tensors
        group, (needs_x, needs_weight, needs_bias, *_) = ctx.group, ctx.needs_input_grad
        dx = dw = db = None
        with torch.autocast(x.device.type, enabled=False):
            if needs_x:
                dx = _product(_operand(dy, -1, group), _operand(weight, -2, group, second=True), x.dtype)
            if needs_weight:
                dw = _product(_columns(dy, group), _columns(x, group, second=True), torch.float32).to(weight.dtype)
            if needs_bias:
                db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, group: int) -> Tensor:
    """x [M, K], weight [N, K], bias [N] or None -> [M, N]."""
    return _Linear.apply(x, weight, bias, out_dtype, group)


def _collected(rows: Tensor, target: Tensor) -> Tensor:
    """The rows at `target`, and zeros where it is behind all of them."""
    inside = target < rows.shape[0]
    return torch.where(inside[:, None], rows.index_select(0, torch.where(inside, target, 0)), 0)


class _GroupedMM(torch.autograd.Function):
    """Rows move to groups of whole multiples of 128, as `mxfp8_grouped_fprop` and `mxfp8_grouped_wgrad` take them."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, offsets: Tensor, out_dtype: torch.dtype, group: int) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.group = group
        with torch.autocast(x.device.type, enabled=False):
            target, capacity, ends = aligned_groups(offsets, x.shape[0], TILE_ROWS)
            rows = _operand(scattered(x, target, capacity), -1, group)
            y = grouped.fprop(rows, _operand(weight, -1, group, second=True), ends)
            return as_dtype(_collected(y, target), out_dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        refuse_second_derivatives()
        x, weight, offsets = ctx.saved_tensors
        group, (needs_x, needs_weight, *_) = ctx.group, ctx.needs_input_grad
        dx = dw = None
        with torch.autocast(x.device.type, enabled=False):
            target, capacity, ends = aligned_groups(offsets, x.shape[0], TILE_ROWS)
            rows = scattered(dy, target, capacity)
            if needs_x:
                matrices = _operand(weight, -2, group, second=True)
                dx = _collected(grouped.fprop(_operand(rows, -1, group), matrices, ends), target).to(x.dtype)
            if needs_weight:
                columns = _columns(scattered(x, target, capacity), group, second=True)
                dw = grouped.wgrad(_columns(rows, group), columns, ends, weight.dtype)
        return dx, dw, None, None, None


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, out_dtype: torch.dtype, group: int) -> Tensor:
    """As the reference; results of products are rounded to bfloat16 before they become `out_dtype`."""
    return _GroupedMM.apply(x, weight, offsets, out_dtype, group)
