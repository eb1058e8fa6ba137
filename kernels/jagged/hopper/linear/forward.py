"""`jagged_linear` on Hopper for layers of up to 256 in and 256 out: one stream of all values past a weight that stays.

    out[i] = activation(x[i] @ weight^T + bias + row_bias[b]) for i in row b        x [N, D], weight [E, D] -> [N, E]

Such a layer takes as long as reading x and writing the result, if nothing else is read and nobody waits. A program
keeps the weight, or of a float32 one a part of its columns, in shared memory, and works through tiles of 64 values,
whatever rows these are of. Warps of their own load them with TMA, look up their rows and fetch what is added to them
(`hopper.linear.loader`), and two warpgroups multiply and finish them (`hopper.linear.consumer`, with float32 operands
`hopper.linear.consumer_fp32`), so that the tensor cores work while an activation is applied.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.core.hopper import addressable
from kernels.core.launch import Launcher, aligned, processors
from kernels.core.operator import custom_op
from kernels.core.triton import cdiv, next_power_of_2, precision_of, steps_of
from kernels.jagged.hopper.linear.backward import SPAN, gradients
from kernels.jagged.hopper.linear.backward_fp32 import SPAN_OUT, gradients_single
from kernels.jagged.hopper.linear.consumer import multiply
from kernels.jagged.hopper.linear.consumer_fp32 import multiply_single
from kernels.jagged.hopper.linear.loader import HELD, find, load, place
from kernels.jagged.hopper.linear.tiles import ROWS, WINDOW, descriptor
from kernels.jagged.hopper.linear.weight import weight_gradient
from kernels.jagged.triton.linear import (
    keeps_input,
    linear_backward,
    linear_gradients,
    linear_like,
    save_linear,
    weight_product,
)

MAX_WIDTH = 256
LINE = 128  # bytes of a row of a piece

# Three warpgroups at this limit fill the register file; the fetching warps give most of theirs to the consumers.
_MAX_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(232)
_LOADER_REGISTERS = gl.constexpr(40)


@gluon.jit(do_not_specialize=["total", "num_rows"])
def _linear_kernel(
    x_desc,
    weight_desc,
    out_desc,
    kept_desc,
    row_bias_desc,
    out,
    for_backward,
    offsets,
    bias,
    row_bias,
    total,
    num_rows,
    row_bias_stride,
    E,
    SHARED: gl.constexpr,
    COLUMNS: gl.constexpr,
    D_PIECES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    ROW_BIAS: gl.constexpr,
    KEEP: gl.constexpr,
    EVEN: gl.constexpr,
    LEVELS: gl.constexpr,
    THRICE: gl.constexpr,
    SLOPE: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    SINGLE: gl.constexpr = dtype == gl.float32
    RING: gl.constexpr = 4 if THRICE else 6 if SINGLE else 8
    PARTS: gl.constexpr = 2 if SHARED else 1
    WIDTH: gl.constexpr = weight_desc.block_type.shape[1 if TRANSPOSED else 0]
    # Consumers of half precision ask for the tile behind their last one, too.
    AHEAD: gl.constexpr = 0 if SINGLE else 2 // PARTS
    ring = gl.allocate_shared_memory(dtype, [RING] + x_desc.block_type.shape, x_desc.layout)
    weights = gl.allocate_shared_memory(dtype, [PARTS * D_PIECES] + weight_desc.block_type.shape, weight_desc.layout)
    rows = gl.allocate_shared_memory(gl.int32, [HELD, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    placed = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    # The weight is there; it is split by both consumers.
    once = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    for i in gl.static_range(HELD):
        mbarrier.init(placed.index(i), count=1)
        mbarrier.init(taken.index(i), count=PARTS)
    mbarrier.init(once.index(0), count=1)
    mbarrier.init(once.index(1), count=2)
    fence_async_shared()
    barriers = (full, empty, placed, taken, once.index(0))
    if SINGLE:
        # Each consumer has a ring of its own: in one of both, it could be ahead of a slot by a round.
        second = gl.allocate_shared_memory(dtype, [RING] + x_desc.block_type.shape, x_desc.layout)
        second_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
        second_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(RING):
            mbarrier.init(second_full.index(i), count=1)
            mbarrier.init(second_empty.index(i), count=1)
        fence_async_shared()
        seconds = (second_full, second_empty, placed, taken, once.index(0))
        rests = weights
        if THRICE:
            rests = gl.allocate_shared_memory(dtype, [D_PIECES] + weight_desc.block_type.shape, weight_desc.layout)
        gl.warp_specialize(
            [
                (multiply_single, (ring, weights, rests, rows, barriers, once.index(1), out, for_backward, bias,
                                   row_bias, row_bias_stride, total, E, COLUMNS, D_PIECES, ACTIVATION, BIAS, ROW_BIAS,
                                   KEEP, EVEN, THRICE, SLOPE, 0)),
                (multiply_single, (second, weights, rests, rows, seconds, once.index(1), out, for_backward, bias,
                                   row_bias, row_bias_stride, total, E, COLUMNS, D_PIECES, ACTIVATION, BIAS, ROW_BIAS,
                                   KEEP, EVEN, THRICE, SLOPE, 1)),
                (load, (x_desc, weight_desc, ring, weights, barriers, total, COLUMNS, D_PIECES, AHEAD, TRANSPOSED, 0,
                        2)),
                (load, (x_desc, weight_desc, second, weights, seconds, total, COLUMNS, D_PIECES, AHEAD, TRANSPOSED, 1,
                        2)),
                (find, (rows, placed, taken, offsets, num_rows, total if ROW_BIAS else 0, COLUMNS, AHEAD, LEVELS)),
            ],
            [4, 1, 1, 1],
            [_CONSUMER_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS],
        )  # fmt: skip
    else:
        slots = gl.allocate_shared_memory(dtype, [2] + out_desc.block_type.shape, out_desc.layout)
        firsts = gl.allocate_shared_memory(gl.int32, [HELD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        others = gl.allocate_shared_memory(gl.int32, [HELD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        # Eight lines of 64 columns are what the swizzle of an operand repeats; two are a piece of one.
        LINES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        lines = gl.allocate_shared_memory(dtype, [HELD * PARTS * WIDTH // 32, WINDOW, 64], LINES)
        found = gl.allocate_shared_memory(gl.int32, [HELD, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        known = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
        used = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
        landed = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(HELD):
            mbarrier.init(known.index(i), count=1)
            mbarrier.init(used.index(i), count=1)
            mbarrier.init(landed.index(i), count=1)
        fence_async_shared()
        added = lines._reinterpret(dtype, [HELD * PARTS, 2 * WINDOW, WIDTH], LINES)
        gl.warp_specialize(
            [
                (multiply, (out_desc, kept_desc, ring, weights, added, slots, rows, firsts, others, barriers, row_bias,
                            row_bias_stride, total, E, WIDTH, SHARED, D_PIECES, TRANSPOSED, ACTIVATION, BIAS, ROW_BIAS,
                            KEEP, 0)),
                (multiply, (out_desc, kept_desc, ring, weights, added, slots, rows, firsts, others, barriers, row_bias,
                            row_bias_stride, total, E, WIDTH, SHARED, D_PIECES, TRANSPOSED, ACTIVATION, BIAS, ROW_BIAS,
                            KEEP, 1)),
                (load, (x_desc, weight_desc, ring, weights, barriers, total, COLUMNS, D_PIECES, AHEAD, TRANSPOSED, 0,
                        1)),
                (find, (found, known, used, offsets, num_rows, total if ROW_BIAS else 0, COLUMNS,
                        AHEAD if ROW_BIAS else 0, LEVELS)),
                (place, (row_bias_desc, bias, E, lines, found, rows, firsts, others, landed, known, used, barriers,
                         total, AHEAD, BIAS, ROW_BIAS)),
            ],
            [4, 1, 1, 1],
            [_CONSUMER_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS],
        )  # fmt: skip


_launch = Launcher(_linear_kernel, num_warps=4, maxnreg=_MAX_REGISTERS)


def _together(dtype: torch.dtype, width: int, inner: int) -> bool:
    """Whether one kernel makes all gradients, for which slopes of the activation are kept."""
    if dtype is torch.float32:
        return precision_of(dtype) == "tf32" and width in SPAN_OUT and inner in SPAN
    return width in SPAN and inner in SPAN


@custom_op("gemsmith::jagged_linear_stream")
def linear(
    x: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_bias: Tensor | None,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """As `triton.linear.linear`, for widths in multiples of 8 up to MAX_WIDTH; in tf32, too, slopes may be kept."""
    total, inner = x.shape
    width = weight.shape[0]
    out, for_backward = x.new_empty(total, width), x.new_empty(total if keep else 0, width)
    if out.numel() == 0:
        return out, for_backward
    single = x.dtype is torch.float32
    # tf32 operands must lie with what is summed over along their rows.
    transposed = not single and weight.stride(0) == 1 and weight.stride(1) != 1
    x, weight = addressable(x), addressable(weight.mT if transposed else weight)
    given = (bias is not None, row_bias is not None)
    bias = bias.contiguous() if given[0] else x
    row_bias = addressable(row_bias) if given[1] else x
    offsets = offsets.contiguous()
    piece = LINE // x.element_size()
    thrice = precision_of(x.dtype) == "tf32x3"
    block_e = min(max(64, next_power_of_2(width)), 64 if thrice else 128 if single else 256)
    columns = cdiv(width, block_e)
    shared = block_e == 256
    part = block_e // 2 if shared else block_e
    constants = (
        shared,
        columns,
        cdiv(inner, piece),
        transposed,
        activation,
        *given,
        keep,
        width % block_e == 0,
        cdiv(steps_of(offsets.shape[0] - 1), 5),
        thrice,
        single and _together(x.dtype, weight.shape[0], inner),
    )
    sizes = (row_bias.stride(0), width)
    out_desc = descriptor(out, ROWS.value, piece)
    _launch(
        (min(processors(x.device) // columns, cdiv(total, ROWS.value)) * columns, 1, 1),
        (
            x.device,
            x.dtype,
            offsets.dtype,
            bias.dtype,
            row_bias.dtype,
            aligned(offsets, bias, row_bias),
            sizes,
            constants,
        ),
        descriptor(x, ROWS.value, piece),
        descriptor(weight, *((piece, part) if transposed else (part, piece))),
        out_desc,
        descriptor(for_backward, ROWS.value, piece) if keep else out_desc,
        descriptor(row_bias, WINDOW.value, piece),
        out,
        for_backward,
        offsets,
        bias,
        row_bias,
        total,
        offsets.shape[0] - 1,
        *sizes,
        *constants,
    )
    return out, for_backward


def _save(ctx, inputs, output):
    save_linear(ctx, inputs, output)
    x, _, weight, *_, keep = inputs
    if keep and _together(x.dtype, *weight.shape):
        ctx.activation = "given"


def _times(grad, offsets, weight):
    return linear(grad, offsets, weight.mT, None, None, "none", False)[0]


def _backward(ctx, grad, _):
    x, offsets, weight, *point = ctx.saved_tensors
    # A float32 forward may have kept, where tf32 was not allowed, what the activation was applied to.
    together = _together(x.dtype, *weight.shape) and ctx.activation in ("none", "relu", "given")
    if grad is None or not (together and ctx.needs_input_grad[0] and ctx.needs_input_grad[2]):
        thrice = precision_of(x.dtype) == "tf32x3"
        return linear_backward(_times, weight_gradient if thrice else weight_product, ctx, grad, _)
    all_gradients = gradients_single if x.dtype is torch.float32 else gradients
    needs_sums = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    return linear_gradients(
        ctx, *all_gradients(grad, point[0] if point else grad, x, offsets, weight, ctx.activation, needs_sums)
    )


linear.register_fake(linear_like)
linear.register_autograd(_backward, setup_context=_save)


def jagged_linear(
    x: Tensor, offsets: Tensor, weight: Tensor, bias: Tensor | None, row_bias: Tensor | None, activation: str
) -> Tensor:
    keep = keeps_input(activation, x, weight, bias, row_bias)
    return linear(x, offsets, weight, bias, row_bias, activation, keep)[0]
