"""The gradient of the weight of `jagged_linear` with float32 operands on Hopper, as three tf32 products.

    dweight = grad^T @ x                [N, E], [N, D] -> [E, D]

The sum is over places, and tensor cores take float32 operands from shared memory only with what is summed over along
their lines. So grad comes by registers, which any order does, and x is turned round by a warpgroup of its own. Programs
have 64 columns of x, and their part of the result in registers from the first block of places to the last.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.core.hopper import addressable, barrier
from kernels.core.launch import Launcher, processors
from kernels.core.operator import custom_op
from kernels.core.triton import cdiv
from kernels.jagged.hopper.linear.backward import WIDTH, finish
from kernels.jagged.hopper.linear.consumer_fp32 import high_and_rest
from kernels.jagged.hopper.linear.tiles import descriptor

PLACES = gl.constexpr(32)  # of a block: a line of 128 bytes when x is turned round
COLUMNS = gl.constexpr(64)  # of x
HALF = gl.constexpr(WIDTH // 2)  # lines of the result, of a consumer
SLOTS = gl.constexpr(4)  # blocks that are loaded
TURNED = gl.constexpr(2)  # blocks of x that are turned round

# Four warpgroups fill the register file; those that load leave theirs to the consumers.
_MAX_REGISTERS = 128
_CONSUMER_REGISTERS = gl.constexpr(208)
_TURN_REGISTERS = gl.constexpr(72)
_LOADER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _load(grad_desc, x_desc, grads, xs, full, empty, total, GROUPS: gl.constexpr):
    """A warp that loads blocks of places."""
    block = 0
    for first in range(gl.program_id(0) // GROUPS * PLACES, total, gl.num_programs(0) // GROUPS * PLACES):
        slot = block % SLOTS
        mbarrier.wait(empty.index(slot), ((block // SLOTS) & 1) ^ 1)
        mbarrier.expect(full.index(slot), 2 * grad_desc.block_type.nbytes + x_desc.block_type.nbytes)
        for c in gl.static_range(2):
            tma.async_copy_global_to_shared(grad_desc, [first, c * HALF], full.index(slot), grads.index(2 * slot + c))
        column = gl.program_id(0) % GROUPS * COLUMNS
        tma.async_copy_global_to_shared(x_desc, [first, column], full.index(slot), xs.index(slot))
        block += 1  # noqa: SIM113


@gluon.jit
def _turn(xs, turned, rests, full, empty, made, taken, total, GROUPS: gl.constexpr):
    """Warps that turn blocks of x round, [PLACES, COLUMNS] -> [COLUMNS, PLACES], and split them in two."""
    # A thread writes 16 bytes, and eight neighbouring ones write to lines that differ.
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 1], [4, 8], [2, 2], [1, 0])
    block = 0
    for _first in range(gl.program_id(0) // GROUPS * PLACES, total, gl.num_programs(0) // GROUPS * PLACES):
        slot = block % SLOTS
        index = block % TURNED
        mbarrier.wait(full.index(slot), (block // SLOTS) & 1)
        value = xs.index(slot).load(LAYOUT)
        mbarrier.wait(taken.index(index), ((block // TURNED) & 1) ^ 1)
        high, rest = high_and_rest(value)
        turned.index(index).permute((1, 0)).store(high)
        rests.index(index).permute((1, 0)).store(rest)
        fence_async_shared()
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        mbarrier.arrive(made.index(index), count=1)
        block += 1  # noqa: SIM113


@gluon.jit
def _multiply(grads, turned, rests, full, empty, made, taken, partials, total, GROUPS: gl.constexpr,
              C: gl.constexpr):  # fmt: skip
    """Consumer C: lines [128 C, 128 C + 128) of the result."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 8])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 1)
    z = gl.zeros((HALF, COLUMNS), gl.float32, LAYOUT)
    block = 0
    for _first in range(gl.program_id(0) // GROUPS * PLACES, total, gl.num_programs(0) // GROUPS * PLACES):
        slot = block % SLOTS
        index = block % TURNED
        mbarrier.wait(full.index(slot), (block // SLOTS) & 1)
        grad = grads.index(2 * slot + C).permute((1, 0)).load(OPERAND)
        mbarrier.wait(made.index(index), (block // TURNED) & 1)
        x = turned.index(index).permute((1, 0))
        # Tensor cores round sums towards zero, threads to nearest: they add what blocks have.
        part = gl.zeros((HALF, COLUMNS), gl.float32, LAYOUT)
        high, rest = high_and_rest(grad)
        part = warpgroup_mma(rest, x, part, use_acc=False, is_async=True)
        part = warpgroup_mma(high, rests.index(index).permute((1, 0)), part, is_async=True)
        part = warpgroup_mma(high, x, part, is_async=True)
        # Not before: what these products wait for is that the block has been read.
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        part, high, rest = warpgroup_mma_wait(0, deps=(part, high, rest))
        z += part
        barrier()
        mbarrier.arrive(taken.index(index), count=1)
        block += 1  # noqa: SIM113
    e = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT)), 1)
    d = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)), 0)
    at = partials + (gl.program_id(0) // GROUPS * (2 * HALF) + C * HALF) * (2 * HALF)
    gl.store(at + gl.program_id(0) % GROUPS * COLUMNS + e * (2 * HALF) + d, z)


@gluon.jit(do_not_specialize=["total"])
def _linear_weight_kernel(grad_desc, x_desc, partials, total, GROUPS: gl.constexpr):
    grads = gl.allocate_shared_memory(gl.float32, [2 * SLOTS] + grad_desc.block_type.shape, grad_desc.layout)
    xs = gl.allocate_shared_memory(gl.float32, [SLOTS] + x_desc.block_type.shape, x_desc.layout)
    LINES: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    turned = gl.allocate_shared_memory(gl.float32, [TURNED, COLUMNS, PLACES], LINES)
    rests = gl.allocate_shared_memory(gl.float32, [TURNED, COLUMNS, PLACES], LINES)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [TURNED, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [TURNED, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3)
    for i in gl.static_range(TURNED):
        mbarrier.init(made.index(i), count=1)
        mbarrier.init(taken.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (grads, turned, rests, full, empty, made, taken, partials, total, GROUPS, 0)),
            (_multiply, (grads, turned, rests, full, empty, made, taken, partials, total, GROUPS, 1)),
            (_turn, (xs, turned, rests, full, empty, made, taken, total, GROUPS)),
            (_load, (grad_desc, x_desc, grads, xs, full, empty, total, GROUPS)),
        ],
        [4, 4, 1],
        [_CONSUMER_REGISTERS, _TURN_REGISTERS, _LOADER_REGISTERS],
    )


_launch = Launcher(_linear_weight_kernel, num_warps=4, maxnreg=_MAX_REGISTERS)


@custom_op("gemsmith::jagged_linear_stream_weight")
def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T @ x of float32 grad [N, E] and x [N, D], E and D up to 256, about as exact as float32 products."""
    total, inner = x.shape
    width = grad.shape[1]
    dw = x.new_empty(width, inner)
    if total == 0:
        return dw.zero_()
    grad, x = addressable(grad), addressable(x)
    groups = cdiv(inner, COLUMNS.value)
    shares = min(processors(x.device) // groups, cdiv(total, PLACES.value))
    partials = x.new_empty(shares, WIDTH, WIDTH)
    _launch(
        (groups * shares, 1, 1),
        (x.device, groups),
        descriptor(grad, PLACES.value, HALF.value),
        descriptor(x, PLACES.value, COLUMNS.value),
        partials,
        total,
        groups,
    )
    finish(partials, dw, None, None, PLACES.value)
    return dw


@weight_gradient.register_fake
def _(grad, x):
    return x.new_empty(grad.shape[1], x.shape[1])


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, change):
    grad, x = ctx.saved_tensors
    return x @ change.mT, grad @ change


weight_gradient.register_autograd(_backward, setup_context=_save)
