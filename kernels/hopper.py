"""What the Gluon kernels of several families share."""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_TYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
}

# Of a block or warpgroup: its name up to Triton 3.6, and from 3.7 on.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


class UncheckedDescriptor(TensorDescriptor):
    """A TMA descriptor of a tensor that is known to be addressable, which is not looked at again at each launch."""

    def __post_init__(self) -> None:
        pass


# Layouts in shared memory are one object for all calls, because one takes as long to make as three descriptors.
@cache
def operand_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """That of a block which matrix instructions read, with the widest swizzle that its columns allow."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _TYPES[dtype])


@cache
def swizzled_layout(swizzle: int, element_bytes: int, rank: int) -> gl.NVMMASharedLayout:
    """That of a block whose lines are swizzled over so many bytes, 0 for not at all."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * element_bytes, rank=rank)


@gluon.jit
def halves(x):
    """The left and the right half of the columns of an accumulator; no register moves."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
