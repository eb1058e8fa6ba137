"""Forward and backward of `attention_pool` in Triton: few queries a row over values that are keys at once.

A program per row holds all queries and heads of the row as one tile and reads each value once, as key and as value. The
gradient of a value is complete when it has been read; those of the queries stay in registers while all values pass by.
Nothing is summed between programs, so runs give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.pool_tiles import tile_of
from kernels.attention.triton.tile import LN2, LOG2E
from kernels.core.caches import cached
from kernels.core.chip import shared_limit
from kernels.core.launch import Launcher, aligned, kinds
from kernels.core.rows import Rows
from kernels.core.triton import cdiv, precision_of

# Rows from which on their lengths are not compared: programs are then so many that they end at about the same time.
MAX_ORDERED = 8192


@triton.jit(do_not_specialize=["num_rows"])
def attention_pool_order_kernel(offsets, order, num_rows, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """The place of a row is the number of those that are longer, or equally long and before it."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(offsets + row, mask=row < num_rows, other=0)
    length = tl.load(offsets + row + 1, mask=row < num_rows, other=0) - begin
    place = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_rows, STEP):
        other = first + tl.arange(0, STEP)
        other_begin = tl.load(offsets + other, mask=other < num_rows, other=1)
        other_length = tl.load(offsets + other + 1, mask=other < num_rows, other=0) - other_begin
        longer = other_length[None, :] > length[:, None]
        earlier = (other_length[None, :] == length[:, None]) & (other[None, :] < row[:, None])
        place += tl.sum((longer | earlier).to(tl.int32), 1)
    tl.store(order + place, row, mask=row < num_rows)


@triton.jit
def _rows(q_offsets, offsets, order, ORDERED: tl.constexpr, HEADS: tl.constexpr, m):
    """(query and head of each row m of the tile, which exist, first value, count of values); int64 but for the last."""
    row = tl.program_id(0)
    if ORDERED:
        row = tl.load(order + row)
    first_query = tl.load(q_offsets + row).to(tl.int64)
    num_queries = tl.load(q_offsets + row + 1).to(tl.int64) - first_query
    begin = tl.load(offsets + row).to(tl.int64)
    count = (tl.load(offsets + row + 1).to(tl.int64) - begin).to(tl.int32)
    return first_query + m // HEADS, (m % HEADS).to(tl.int64), m // HEADS < num_queries, begin, count


@triton.jit
def _load(pointers, real, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """The two halves [rows, HALF] of the rows that begin at `pointers` [rows], zeros for those that are not `real`."""
    feature = tl.arange(0, HALF)[None, :]
    first, second = pointers[:, None] + feature, pointers[:, None] + (feature + HALF)
    if WIDTH == 2 * HALF:
        halves = tl.load(first, mask=real[:, None], other=0.0), tl.load(second, mask=real[:, None], other=0.0)
    else:
        halves = (
            tl.load(first, mask=real[:, None] & (feature < WIDTH), other=0.0),
            tl.load(second, mask=real[:, None] & (feature + HALF < WIDTH), other=0.0),
        )
    return halves


@triton.jit
def _store(pointers, real, halves, WIDTH: tl.constexpr, HALF: tl.constexpr):
    feature = tl.arange(0, HALF)[None, :]
    kind: tl.constexpr = pointers.dtype.element_ty
    tl.store(pointers[:, None] + feature, halves[0].to(kind), mask=real[:, None] & (feature < WIDTH))
    tl.store(pointers[:, None] + (feature + HALF), halves[1].to(kind), mask=real[:, None] & (feature + HALF < WIDTH))


@triton.jit
def _scores(halves, of_queries, scale, PRECISION: tl.constexpr):
    """scale times the products [values, queries]; scaled apart, so that neither sum waits for the other."""
    first = tl.dot(halves[0], tl.trans(of_queries[0]), input_precision=PRECISION) * scale
    return first + tl.dot(halves[1], tl.trans(of_queries[1]), input_precision=PRECISION) * scale


@triton.jit(do_not_specialize=["total_q"])
def attention_pool_forward_kernel(
    q, values, out, lse, q_offsets, offsets, order, scale, total_q, q_token, q_head, value_token,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Tiles of scores are [values, queries]."""
    query, head, real, begin, count = _rows(q_offsets, offsets, order, ORDERED, HEADS, tl.arange(0, BLOCK_M))
    if tl.max(real.to(tl.int32), 0) == 0:
        return
    of_queries = _load(q + query * q_token + head * q_head, real, WIDTH, HALF)
    n = tl.arange(0, BLOCK_N)
    at = values + (begin + n) * value_token
    step = tl.cast(value_token, tl.int64) * BLOCK_N
    acc = tl.zeros((BLOCK_M, HALF), tl.float32)
    acc2 = tl.zeros((BLOCK_M, HALF), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for first in range(0, count, BLOCK_N):
        exists = n < count - first
        halves = _load(at, exists, WIDTH, HALF)
        at += step
        s = tl.where(exists[:, None], _scores(halves, of_queries, scale * LOG2E, PRECISION), float("-inf"))
        new_highest = tl.maximum(highest, tl.max(s, 0))  # every step has a value
        p = tl.exp2(s - new_highest[None, :])
        rescale = tl.exp2(highest - new_highest)
        total = total * rescale + tl.sum(p, 0)
        weights = tl.trans(p.to(halves[0].dtype))
        acc = tl.dot(weights, halves[0], acc * rescale[:, None], input_precision=PRECISION)
        acc2 = tl.dot(weights, halves[1], acc2 * rescale[:, None], input_precision=PRECISION)
        highest = new_highest
    blind = count == 0
    total = tl.where(blind, 1.0, total)
    tl.store(lse + head * total_q + query, tl.where(blind, float("inf"), (highest + tl.log2(total)) * LN2), mask=real)
    results = acc / total[:, None], acc2 / total[:, None]
    _store(out + (query * HEADS + head) * WIDTH, real, results, WIDTH, HALF)


@triton.jit(do_not_specialize=["total_q"])
def attention_pool_backward_kernel(
    grad, q, values, out, lse, dq, dvalues, q_offsets, offsets, order, scale, total_q,
    grad_token, grad_head, q_token, q_head, value_token,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Queries and gradients of the result take turns in one operand [2 BLOCK_M, width]. Its product with values is
    their scores and the gradients of their weights, in turns, which one thread holds; and its product with gradients of
    scores and weights, in turns, is the gradient of values."""
    query, head, real, begin, count = _rows(q_offsets, offsets, order, ORDERED, HEADS, tl.arange(0, BLOCK_M))
    places = (query * HEADS + head) * WIDTH
    outs = _load(out + places, real, WIDTH, HALF)
    grads = _load(grad + query * grad_token + head * grad_head, real, WIDTH, HALF)
    delta = tl.sum(outs[0].to(tl.float32) * grads[0].to(tl.float32), 1)
    delta += tl.sum(outs[1].to(tl.float32) * grads[1].to(tl.float32), 1)
    # A row of the tile that is no query has no weights.
    lse2 = tl.load(lse + head * total_q + query, mask=real, other=float("inf")) * LOG2E
    m2 = tl.arange(0, 2 * BLOCK_M)
    query2, head2, real2, _, _ = _rows(q_offsets, offsets, order, ORDERED, HEADS, m2 // 2)
    both = tl.where(m2 % 2 == 0, q + query2 * q_token + head2 * q_head, grad + query2 * grad_token + head2 * grad_head)
    of_queries = _load(both, real2, WIDTH, HALF)
    n = tl.arange(0, BLOCK_N)
    at = values + (begin + n) * value_token
    step = tl.cast(value_token, tl.int64) * BLOCK_N
    to = dvalues + (begin + n) * WIDTH
    DQ_ROWS: tl.constexpr = BLOCK_M if BLOCK_M >= 16 else 2 * BLOCK_M
    dq_first = tl.zeros((DQ_ROWS, HALF), tl.float32)
    dq_second = tl.zeros((DQ_ROWS, HALF), tl.float32)
    for first in range(0, count, BLOCK_N):
        exists = n < count - first
        halves = _load(at, exists, WIDTH, HALF)
        at += step
        s, dp = tl.split(tl.reshape(_scores(halves, of_queries, scale, PRECISION), (BLOCK_N, BLOCK_M, 2)))
        # The zeros of a missing value may give an overflow.
        p = tl.where(exists[:, None], tl.exp2(s * LOG2E - lse2[None, :]), 0.0)
        ds = (p * (dp - delta[None, :] * scale)).to(halves[0].dtype)
        weights = tl.reshape(tl.join(ds, p.to(halves[0].dtype)), (BLOCK_N, 2 * BLOCK_M))
        dvalues_halves = (
            tl.dot(weights, of_queries[0], input_precision=PRECISION),
            tl.dot(weights, of_queries[1], input_precision=PRECISION),
        )
        if BLOCK_M >= 16:
            of_dq = tl.trans(ds)
        else:  # too few rows for a product: with those of the weights they are enough
            of_dq = tl.trans(weights)
        dq_first = tl.dot(of_dq, halves[0], dq_first, input_precision=PRECISION)
        dq_second = tl.dot(of_dq, halves[1], dq_second, input_precision=PRECISION)
        _store(to, exists, dvalues_halves, WIDTH, HALF)
        to += BLOCK_N * WIDTH
    if BLOCK_M >= 16:
        _store(dq + places, real, (dq_first, dq_second), WIDTH, HALF)
    else:
        _store(dq + (query2 * HEADS + head2) * WIDTH, real2 & (m2 % 2 == 0), (dq_first, dq_second), WIDTH, HALF)


_launch_order = Launcher(attention_pool_order_kernel)
_launch_forward = Launcher(attention_pool_forward_kernel)
_launch_backward = Launcher(attention_pool_backward_kernel)


def forward(q: Tensor, values: Tensor, queries: Rows, offsets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out [Nq, H, d] like q, lse [H, Nq] float32, the natural logarithm of the sums of weights, +inf without any)."""
    num_queries, num_heads, width = q.shape
    out = torch.empty(num_queries, num_heads, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_heads, num_queries, dtype=torch.float32, device=q.device)
    q, values = last_contiguous(q), last_contiguous(values)
    _launch(_launch_forward, (q, values, out, lse), (q,), values, queries, offsets, scale)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, values: Tensor, out: Tensor, lse: Tensor, queries: Rows, offsets: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(dq, dvalues), contiguous, in the inputs' dtype."""
    dq, dvalues = q.new_empty(q.shape), values.new_empty(values.shape)
    grad, q, values = last_contiguous(grad), last_contiguous(q), last_contiguous(values)
    tensors = (grad, q, values, out, lse, dq, dvalues)
    _launch(_launch_backward, tensors, (grad, q), values, queries, offsets, scale)
    return dq, dvalues


def last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def longest_first(offsets: Tensor) -> Tensor:
    """[B] int32: the rows, the longest first, so that no long one begins when nearly all others have ended."""
    num_rows = offsets.shape[0] - 1
    order = torch.empty(num_rows, dtype=torch.int32, device=offsets.device)
    grid = (cdiv(num_rows, 32), 1, 1)
    key = (offsets.device, offsets.dtype, *aligned(offsets))
    _launch_order(grid, key, offsets, order, num_rows, 32, 256, num_warps=4)
    return order


def _launch(
    launch: Launcher,
    tensors: tuple[Tensor, ...],
    of_queries: tuple[Tensor, ...],
    values: Tensor,
    queries: Rows,
    offsets: Tensor,
    scale: float,
) -> None:
    """A program for each row. `of_queries` are the tensors [Nq, H, d] that the kernel reads by their strides."""
    q_offsets, max_q = queries
    num_rows, (num_queries, num_heads, width) = q_offsets.shape[0] - 1, of_queries[0].shape
    backward = launch is _launch_backward
    device, dtype = values.device, values.dtype
    tile = tile_of(width, max_q * num_heads, dtype.itemsize, backward, shared_limit(device))
    assert tile is not None  # or the verifier would have refused
    ordered = 1 < num_rows <= MAX_ORDERED
    order = cached(lambda: longest_first(offsets), "longest first", offsets) if ordered else offsets
    constants = (num_heads, width, tile.features // 2, tile.rows, tile.values, precision_of(dtype), ordered)
    strides = (*[stride for tensor in of_queries for stride in tensor.stride()[:2]], values.stride(0))
    if num_rows:
        launch(
            (num_rows, 1, 1),
            (device, dtype, q_offsets.dtype, offsets.dtype, *aligned(*tensors, q_offsets, offsets), num_queries >> 31,
             kinds(strides), tile, *constants),
            *tensors, q_offsets, offsets, order, float(scale), num_queries, *strides, *constants,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
