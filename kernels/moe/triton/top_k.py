"""The largest scores of each row; Triton.

A row is a few dozen scores, so that k passes over it in registers take less time than to start a sort.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned
from kernels.core.operator import custom_op
from kernels.core.triton import cdiv, next_power_of_2

_ELEMENTS = 4096  # of scores that a program holds


@triton.jit(do_not_specialize=["num_rows"])
def top_k_kernel(scores, chosen, num_rows, num_columns, K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows)[:, None] & (column < num_columns)
    score = tl.load(scores + row.to(tl.int64)[:, None] * num_columns + column, mask=inside, other=0).to(tl.float32)
    # Integers in the order of the scores, with equal zeros; NaN is the largest, as to torch.topk.
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    key = tl.where(score != score, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    # Less than minus infinity: for missing scores, and those already chosen.
    key = tl.where(column < num_columns, key, -0x80000000)
    for j in tl.static_range(K):
        index = tl.min(tl.where(key == tl.max(key, 1)[:, None], column, COLUMNS), 1)
        tl.store(chosen + row.to(tl.int64) * K + j, index.to(tl.int64), mask=row < num_rows)
        key = tl.where(column == index[:, None], -0x80000000, key)


_launch = Launcher(top_k_kernel, num_warps=4)


@custom_op("gemsmith::moe_top_k")
def top_k(scores: Tensor, k: int) -> Tensor:
    """See `kernels.moe.top_k`."""
    num_rows, num_columns = scores.shape
    chosen = scores.new_empty(num_rows, k, dtype=torch.int64)
    if chosen.numel():
        scores = scores.contiguous()
        columns = next_power_of_2(num_columns)
        block = max(_ELEMENTS // columns, 1)
        key = (scores.device, scores.dtype, num_columns, k, *aligned(scores))
        _launch((cdiv(num_rows, block), 1, 1), key, scores, chosen, num_rows, num_columns, k, columns, block)
    return chosen


@top_k.register_fake
def _(scores, k):
    return scores.new_empty(scores.shape[0], k, dtype=torch.int64)
