"""Code that the Gluon kernels of several families share."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_TYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
}

# The barrier of a block or warpgroup, by its name up to Triton 3.6 and from 3.7 on.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


class UncheckedDescriptor(TensorDescriptor):
    """A TMA descriptor of a tensor that is known to be addressable, without Triton's checks at each launch."""

    def __post_init__(self) -> None:
        pass


# Layouts are made once and kept, because making one takes as long as making three descriptors.
@cache
def operand_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout of a block that matrix instructions read, with the widest swizzle that its columns allow."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _TYPES[dtype])


@cache
def swizzled_layout(swizzle: int, element_bytes: int, rank: int) -> gl.NVMMASharedLayout:
    """The layout of a block whose lines are swizzled over this many bytes, 0 for no swizzle."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * element_bytes, rank=rank)


@gluon.jit
def halves(x):
    """The left and the right half of the columns of an accumulator; no register moves."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def sigmoid_of(x):
    """Within a few ulp, and 0 where it is below 2^-126."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 a;
        mul.f32 a, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 a, a;
        add.f32 a, a, 0f3F800000;
        rcp.approx.ftz.f32 $0, a;
        }""",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def left_half(words):
    """float32 of the first of two neighbours in bfloat16, which a word of 32 bits holds."""
    return (words << 16).to(gl.float32, bitcast=True)


@gluon.jit
def right_half(words):
    return (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def pair(left, right):
    """The word of two neighbours, rounded to bfloat16.

    A tensor that is converted and read again is converted element by element, which takes a quarter of the speed.
    """
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [left, right], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def words_of(x):
    """An accumulator's pairs of neighbours, int32 [rows, columns / 2]."""
    left, right = x.reshape((x.shape[0], x.shape[1] // 2, 2)).split()
    return pair(left, right)


@gluon.constexpr_function
def turn_barrier(instruction, consumer):
    """PTX: "sync" or "arrive" at the barrier where warpgroup `consumer` waits for its turn."""
    return f"bar.{instruction} {14 + consumer}, 256;"


@gluon.constexpr_function
def _at_turn_barrier(instruction, consumer):
    return turn_barrier(instruction, consumer) + " mov.b32 $0, $1;"


@gluon.jit
def _threads():
    return gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def take_turn(C: gl.constexpr):
    """Wait until the other one of two warpgroups, 0 and 1, passes the turn on to warpgroup C.

    Warpgroup 1 must pass the turn before the first one, and 0 must take it after the last. Turns are named barriers of
    the hardware, the last two of 16 (Triton uses its own from 0 on). An mbarrier in shared memory would take longer.
    """
    gl.inline_asm_elementwise(_at_turn_barrier("sync", C), "=r,r", [_threads()], gl.int32, False, 1)


@gluon.jit
def pass_turn(C: gl.constexpr):
    """Warpgroup C passes the turn on, without waiting for the other one."""
    gl.inline_asm_elementwise(_at_turn_barrier("arrive", 1 - C), "=r,r", [_threads()], gl.int32, False, 1)


@gluon.jit
def ring(STAGES: gl.constexpr):
    """(barriers of full stages, of those that both of two consumers have read, and of the consumers' order)."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    orders = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(orders.index(0), count=1)
    return full, empty, orders.index(0)


@gluon.jit
def start(order, C: gl.constexpr):
    """To be called by consumer C before its first tile."""
    if C == 1:
        mbarrier.wait(order, 0)


@gluon.jit
def let_other_start(order, now, C: gl.constexpr):
    if C == 0:
        mbarrier.arrive(order, count=1, pred=now)


@gluon.jit
def let_next_start():
    """Let a kernel that was launched with `launch_pdl` start where this one leaves room, once all its programs run.

    It must not touch memory that this one writes, and it must not end before this one, for the kernels after it.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [gl.program_id(0)], gl.int32, False, 1
    )


def addressable(matrix: Tensor) -> Tensor:
    """The matrix, or a copy if its rows are not contiguous ones at multiples of 16 bytes, as TMA wants them."""
    stride = matrix.stride(0)
    ordered = matrix.stride(1) == 1 and matrix.shape[1] <= stride
    if ordered and stride * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)
