"""What the Gluon kernels of several families share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Of a block or warpgroup: its name up to Triton 3.6, and from 3.7 on.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


class UncheckedDescriptor(TensorDescriptor):
    """A TMA descriptor of a tensor that is known to be addressable, which is not looked at again at each launch."""

    def __post_init__(self) -> None:
        pass


@gluon.jit
def halves(x):
    """The left and the right half of the columns of an accumulator; no register moves."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
