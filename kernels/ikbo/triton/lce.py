"""Linear compression in Triton: the broadcast rows of the requests are added in the epilogue of the product.

One kernel for every level: it adds the rows of the level above, in float32, and writes the output or, in float32, the
rows for the next level below. Sums over levels are therefore rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.chip import multiplies_registers
from kernels.core.partial_sums import add_partial_sums
from kernels.core.rows import row_of
from kernels.core.triton import cdiv, near, precision_of

BLOCK_N = 128
MIN_PROGRAMS = 512  # as many as keep a GPU busy with slices of a weight's gradient


def forward(
    candidate: Tensor,
    w_candidate: Tensor,
    requests: Sequence[Tensor],
    w_requests: Sequence[Tensor],
    offsets: Sequence[Tensor],
) -> Tensor:
    above: tuple[Tensor, Tensor] | None = None
    for request, w_request, level_offsets in zip(requests, w_requests, offsets, strict=True):
        above = compress(request, w_request, above, torch.float32), level_offsets
    return compress(candidate, w_candidate, above, candidate.dtype)


def compress(x: Tensor, weight: Tensor, above: tuple[Tensor, Tensor] | None, dtype: torch.dtype) -> Tensor:
    """weight x[b] + rows[owner of b]: [B, M, N] of `dtype`, contiguous.

    x [B, K, N] and weight [M, K], float16, bfloat16 or float32, any strides. `above`: rows [R, M, N] float32,
    contiguous, and the offsets [R + 1] of what belongs to them.
    """
    num_entries, depth, width = x.shape
    num_rows = weight.shape[0]
    x = near(x)
    out = torch.empty(num_entries, num_rows, width, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    block_m = 128 if num_rows > 64 and x.element_size() == 2 else 64
    # Without rows neither pointer is read.
    rows, owners = (out, x) if above is None else (above[0], row_of(above[1], num_entries))
    grid = (num_entries * cdiv(num_rows, block_m) * cdiv(width, BLOCK_N),)
    _compress_kernel[grid](
        x,
        weight,
        rows,
        owners,
        out,
        num_rows,
        width,
        depth,
        *x.stride(),
        *weight.stride(),
        HAS_ROWS=above is not None,
        PRECISION=precision_of(x.dtype),
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=64 if x.element_size() == 2 else 32,
        num_warps=8 if block_m == 128 or multiplies_registers(x.device) else 4,
        num_stages=3,
    )
    return out


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """sum_b grad[b] x[b]^T: [M, K] of x's dtype, for grad [B, M, N] and x [B, K, N] of one dtype, any strides.

    Slices of the batch are summed one by one in float32 and added up in a fixed order.
    """
    num_entries, num_rows, width = grad.shape
    depth = x.shape[1]
    if grad.numel() == 0 or x.numel() == 0:
        return x.new_zeros(num_rows, depth)
    block = 128 if x.element_size() == 2 else 64
    tiles = cdiv(num_rows, block) * cdiv(depth, block)
    slices = max(1, min(MIN_PROGRAMS // tiles, num_entries))
    grad, x = near(grad), near(x)
    parts = torch.empty(slices, num_rows, depth, dtype=torch.float32, device=x.device)
    _compress_weight_kernel[(slices * tiles,)](
        grad,
        x,
        parts,
        num_entries,
        slices,
        num_rows,
        depth,
        width,
        *grad.stride(),
        *x.stride(),
        PRECISION=precision_of(x.dtype),
        BLOCK_M=block,
        BLOCK_K=block,
        BLOCK_N=64 if x.element_size() == 2 else 32,
        num_warps=8 if block == 128 else 4,
        num_stages=3,
    )
    return add_partial_sums(parts, x.dtype)


@triton.jit
def _compress_kernel(
    x,
    weight,
    rows,
    owners,
    out,
    num_rows,
    width,
    depth,
    x_stride_b,
    x_stride_k,
    x_stride_n,
    w_stride_m,
    w_stride_k,
    HAS_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles = tiles_m * tl.cdiv(width, BLOCK_N)
    entry = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    # Tiles that read the same columns of the entry are neighbours.
    m = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Addresses of entries take 64 bits; within one, by `narrow`, and within a weight, 32 are enough.
    weights = m[:, None] * w_stride_m + k[None, :] * w_stride_k
    columns = k[:, None] * x_stride_k + n[None, :] * x_stride_n
    x += entry.to(tl.int64) * x_stride_b
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        left = depth - start
        a = tl.load(weight + weights, mask=(m < num_rows)[:, None] & (k < left)[None, :], other=0.0)
        b = tl.load(x + columns, mask=(k < left)[:, None] & (n < width)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        weight += BLOCK_K * w_stride_k
        x += BLOCK_K * x_stride_k
    inside = (m < num_rows)[:, None] & (n < width)[None, :]
    cell = m[:, None] * width + n[None, :]
    if HAS_ROWS:
        rows += tl.load(owners + entry).to(tl.int64) * num_rows * width
        acc += tl.load(rows + cell, mask=inside, other=0.0)
    out += entry.to(tl.int64) * num_rows * width
    tl.store(out + cell, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_entries", "slices"])
def _compress_weight_kernel(
    grad,
    x,
    parts,
    num_entries,
    slices,
    num_rows,
    depth,
    width,
    g_stride_b,
    g_stride_m,
    g_stride_n,
    x_stride_b,
    x_stride_k,
    x_stride_n,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles = tiles_m * tl.cdiv(depth, BLOCK_K)
    part = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    m = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tile // tiles_m * BLOCK_K + tl.arange(0, BLOCK_K)
    begin = part.to(tl.int64) * num_entries // slices
    end = (part + 1).to(tl.int64) * num_entries // slices
    steps = tl.cdiv(width, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for step in range(((end - begin) * steps).to(tl.int32)):
        entry = begin + step // steps
        n = step % steps * BLOCK_N + tl.arange(0, BLOCK_N)
        a = tl.load(
            grad + entry * g_stride_b + m[:, None] * g_stride_m + n[None, :] * g_stride_n,
            mask=(m < num_rows)[:, None] & (n < width)[None, :],
            other=0.0,
        )
        b = tl.load(
            x + entry * x_stride_b + k[None, :] * x_stride_k + n[:, None] * x_stride_n,
            mask=(k < depth)[None, :] & (n < width)[:, None],
            other=0.0,
        )
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    cell = m[:, None] * depth + k[None, :]
    inside = (m < num_rows)[:, None] & (k < depth)[None, :]
    tl.store(parts + part.to(tl.int64) * num_rows * depth + cell, acc, mask=inside)
