"""TMA descriptors of jagged tensors with heads, for the Hopper kernels of attention and GDPA."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.core.hopper import UncheckedDescriptor, operand_layout, swizzled_layout


def head_descriptor(x: Tensor, rows: int, swizzle: int | None = None) -> tuple[TensorDescriptor, int]:
    """(TMA descriptor of blocks of `rows` rows of one head of x [N, H, d], elements from one head to the next).

    x is float16 or bfloat16 with N > 0. The descriptor describes [N, everything that a row index can reach], so that a
    head is a range of columns. x is copied if TMA cannot address it (rows or heads that do not start at multiples of 16
    bytes), and if all rows of a head lie together: then the distance of heads, for which kernels are compiled, would
    differ in every batch.
    `swizzle` is the width in bytes of a swizzled line in shared memory; by default the widest that d allows.
    """
    total, num_heads, dim = x.shape
    row_stride, head_stride, stride = x.stride()
    # PyTorch lets the stride of a dimension of size 1 be anything.
    row_stride = row_stride if total > 1 else num_heads * dim
    head_stride = head_stride if num_heads > 1 else 0
    addressable = x.data_ptr() % 16 == 0 and row_stride % 8 == 0 and head_stride % 8 == 0 and stride == 1
    ordered = row_stride > 0 and 0 <= head_stride <= row_stride
    if not addressable or not ordered or (num_heads - 1) * head_stride + dim >= 2**31:
        x = x.clone(memory_format=torch.contiguous_format)
        row_stride, head_stride = num_heads * dim, dim if num_heads > 1 else 0
    columns = (num_heads - 1) * head_stride + dim
    layout = operand_layout(rows, dim, x.dtype) if swizzle is None else swizzled_layout(swizzle, 2, 2)
    return UncheckedDescriptor(x, [total, columns], [row_stride, 1], [rows, dim], layout), head_stride


def line_descriptor(x: Tensor, length: int) -> TensorDescriptor:
    """TMA descriptor of runs of `length` numbers of a contiguous float32 tensor, seen as one line."""
    return UncheckedDescriptor(x, [x.numel()], [1], [length], swizzled_layout(0, 4, 1))


def lines_descriptor(x: Tensor, lines: int) -> TensorDescriptor:
    """TMA descriptor of blocks of `lines` lines of 32 numbers of a contiguous float32 tensor."""
    return UncheckedDescriptor(x, [x.numel() // 32, 32], [32, 1], [lines, 32], swizzled_layout(128, 4, 2))
