"""TMA descriptors of jagged tensors with heads, for the Hopper kernels of attention and GDPA."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def head_descriptor(x: Tensor, rows: int, swizzle: int | None = None) -> tuple[TensorDescriptor, int]:
    """(TMA descriptor of blocks of `rows` rows of one head of x [N, H, d], elements from one head to the next).

    x is float16 or bfloat16 with N > 0. The descriptor sees [N, everything that a row index can reach], so that a head
    is a range of columns. What TMA cannot address, rows or heads that do not start at multiples of 16 bytes, is copied.
    `swizzle` is the width in bytes of a swizzled line in shared memory; by default the widest that d allows.
    """
    total, num_heads, dim = x.shape
    # PyTorch lets the stride of a dimension of size 1 be anything.
    row_stride = x.stride(0) if total > 1 else num_heads * dim
    head_stride = x.stride(1) if num_heads > 1 else 0
    addressable = x.data_ptr() % 16 == 0 and row_stride % 8 == 0 and head_stride % 8 == 0 and x.stride(2) == 1
    if not addressable or row_stride <= 0 or head_stride < 0 or (num_heads - 1) * head_stride + dim >= 2**31:
        x = x.clone(memory_format=torch.contiguous_format)
        row_stride, head_stride = num_heads * dim, dim if num_heads > 1 else 0
    block = [rows, dim]
    if swizzle is None:
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if x.dtype is torch.bfloat16 else gl.float16)
    else:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=2)
    columns = (num_heads - 1) * head_stride + dim
    return TensorDescriptor(x, [total, columns], [row_stride, 1], block, layout), head_stride
