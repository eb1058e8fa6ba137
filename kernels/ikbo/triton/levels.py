"""Sums over the levels of tree attention: of results, weighted by their levels' shares of all weights, and of
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher

# Of a program.
_QUERIES = 16
_ROWS = 32


@triton.jit(do_not_specialize=["num_queries"])
def _join_levels_kernel(results, statistics, out, lse, num_queries, D: tl.constexpr, QUERIES: tl.constexpr):
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    head = tl.program_id(1)
    inside = query < num_queries
    place = (query.to(tl.int64) * tl.num_programs(1) + head)[:, None] * D + tl.arange(0, D)
    number = head.to(tl.int64) * num_queries + query
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    for level in tl.static_range(len(statistics)):
        # +inf is a level without keys.
        own = tl.load(statistics[level] + number, inside, float("inf"))
        largest = tl.maximum(largest, tl.where(own == float("inf"), -float("inf"), own))
    acc = tl.zeros([QUERIES, D], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for level in tl.static_range(len(statistics)):
        own = tl.load(statistics[level] + number, inside, float("inf"))
        weight = tl.where(own == float("inf"), 0.0, tl.exp(own - largest))
        acc += weight[:, None] * tl.load(results[level] + place, inside[:, None], 0.0).to(tl.float32)
        total += weight
    keyless = total == 0.0
    total = tl.where(keyless, 1.0, total)
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), inside[:, None])
    tl.store(lse + number, tl.where(keyless, float("inf"), largest + tl.log(total)), inside)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_levels_kernel(parts, out, num_rows, D: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None]
    place = row.to(tl.int64)[:, None] * D + tl.arange(0, D)
    total = tl.zeros([ROWS, D], tl.float32)
    for part in tl.static_range(len(parts)):
        total += tl.load(parts[part] + place, inside, 0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), inside)


def join_levels(results: Sequence[Tensor], statistics: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(out [N, H, d], lse [H, N]) of one softmax over the keys of all levels, from those of each level.

    `statistics` are natural logarithms of sums, float32, +inf for a query whose level has no keys; one that has none at
    all gets zeros and +inf. All are contiguous, d is a power of two.
    """
    num_queries, num_heads, head_dim = results[0].shape
    out, lse = torch.empty_like(results[0]), torch.empty_like(statistics[0])
    if out.numel():
        _launch_join(
            (-(-num_queries // _QUERIES), num_heads, 1), (out.device, out.dtype, len(results), head_dim),
            tuple(results), tuple(statistics), out, lse, num_queries, head_dim, _QUERIES,
        )  # fmt: skip
    return out, lse


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """The sum of contiguous tensors [N, H, d] of one dtype, d a power of two, rounded once."""
    out = torch.empty_like(parts[0])
    if num_rows := out.shape[0] * out.shape[1]:
        key = out.device, out.dtype, len(parts), out.shape[2]
        _launch_sum((-(-num_rows // _ROWS), 1, 1), key, tuple(parts), out, num_rows, out.shape[2], _ROWS)
    return out


_launch_join = Launcher(_join_levels_kernel, num_warps=4)
_launch_sum = Launcher(_sum_levels_kernel, num_warps=4)
