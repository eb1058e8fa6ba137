"""Moving rows between jagged and padded layouts: conversions, flip, and windows of rows; Triton.

Every operator writes each place of its output once, from one place of its source or from a constant: a program finds
the sources of a tile of places and copies. The backward of one operator is another one of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned
from kernels.core.operator import custom_op
from kernels.core.triton import cdiv, flat, row_of, steps_of, tile_shape


@triton.jit
def _skipped(count, length, SIDE: tl.constexpr):
    """Place within a row of `count` that a padded row of `length` begins with: negative where padding comes first."""
    if SIDE == "first":
        skipped = count * 0
    elif SIDE == "last":
        skipped = tl.maximum(count - length, 0)
    else:
        skipped = count - length
    return skipped


@triton.jit(do_not_specialize=["total", "num_rows", "length", "fill"])
def _move_kernel(
    out,
    source,
    offsets,
    starts,
    window_offsets,
    total,
    num_rows,
    length,
    width,
    source_stride,
    fill,
    KIND: tl.constexpr,
    SIDE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    written = place < total
    if KIND == "to_padded":
        row = place // length
    else:
        row = row_of(offsets, num_rows, place, STEPS)
    begin = tl.load(offsets + row, mask=written, other=0).to(tl.int64)
    count = tl.load(offsets + row + 1, mask=written, other=0).to(tl.int64) - begin
    if KIND == "to_padded":
        position = place - row * length + _skipped(count, length, SIDE)
        index = begin + position
    elif KIND == "to_jagged":
        position = place - begin - _skipped(count, length, SIDE)
        index = row * length + position
        count = length
    elif KIND == "flip":
        position = count - 1 - (place - begin)
        index = begin + position
    elif KIND == "window":
        position = place - begin
        index = tl.load(starts + row, mask=written, other=0) + position
    elif KIND == "select":
        position = place - begin
        chosen = tl.load(starts + row, mask=written, other=0)
        index = tl.load(window_offsets + chosen, mask=written, other=0).to(tl.int64) + position
    else:  # the places of a window in the values that it was cut from
        position = place - tl.load(starts + row, mask=written, other=0)
        first = tl.load(window_offsets + row, mask=written, other=0).to(tl.int64)
        count = tl.load(window_offsets + row + 1, mask=written, other=0).to(tl.int64) - first
        index = first + position
    found = written & (position >= 0) & (position < count)

    columns = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = columns < width
    values = tl.load(
        source + index[:, None] * source_stride + columns[None, :], mask=found[:, None] & inside[None, :], other=0
    )
    if KIND == "to_padded":
        values = tl.where(found[:, None], values, tl.full([1, 1], fill, values.dtype))
    tl.store(out + place[:, None] * width + columns[None, :], values, mask=written[:, None] & inside[None, :])


def move(
    kind: str,
    source: Tensor,
    out: Tensor,
    offsets: Tensor,
    *,
    length: int = 1,
    fill: float = 0.0,
    side: str = "first",
    starts: Tensor | None = None,
    window_offsets: Tensor | None = None,
) -> Tensor:
    """Fill `out`, whose places are its leading dimension (the two leading ones of a padded tensor).

    Kinds: to_padded and to_jagged with rows of `length`; flip; window, whose row b begins at starts[b] of the source;
    unwindow, the adjoint of window; select, whose row m is row starts[m] of a source with `window_offsets`.
    """
    if out.numel() == 0:
        return out
    total = out.shape[0] * out.shape[1] if kind == "to_padded" else out.shape[0]
    if kind == "to_jagged":
        source = source.flatten(0, 1)
    source = flat(source)
    width = source.shape[1]
    num_rows = offsets.shape[0] - 1
    block_r, block_w = tile_shape(width)
    starts = offsets if starts is None else starts
    window_offsets = offsets if window_offsets is None else window_offsets
    tensors = (source, offsets, starts, window_offsets)
    constants = (kind, side, steps_of(num_rows), block_r, block_w)
    # A float reaches the kernel in 32 bits, which are too few for ids.
    number = float(fill) if source.is_floating_point() else int(fill)
    _launch(
        (cdiv(total, block_r), cdiv(width, block_w), 1),
        (out.device, *[tensor.dtype for tensor in tensors], *aligned(*tensors), total >> 31,
         -(2**31) <= number < 2**31, width, source.stride(0), *constants),
        out, *tensors, total, num_rows, length, width, source.stride(0), number, *constants,
    )  # fmt: skip
    return out


_launch = Launcher(_move_kernel)


@custom_op("gemsmith::jagged_to_padded")
def to_padded(values: Tensor, offsets: Tensor, max_length: int, fill: float, side: str) -> Tensor:
    """[N, ...] -> [B, max_length, ...]; side 'first' or 'last' as in `jagged_to_padded`, 'right' as `jagged_last`."""
    offsets = offsets.contiguous()
    out = values.new_empty(offsets.shape[0] - 1, max_length, *values.shape[1:])
    return move("to_padded", values, out, offsets, length=max_length, fill=fill, side=side)


@to_padded.register_fake
def _(values, offsets, max_length, fill, side):
    return values.new_empty(offsets.shape[0] - 1, max_length, *values.shape[1:])


@custom_op("gemsmith::padded_to_jagged")
def to_jagged(padded: Tensor, offsets: Tensor, total: int, side: str) -> Tensor:
    """[B, L, ...] -> [total, ...], the adjoint of `to_padded` of the same side."""
    out = padded.new_empty(total, *padded.shape[2:])
    if padded.shape[1] == 0:
        return out.zero_()
    return move("to_jagged", padded, out, offsets.contiguous(), length=padded.shape[1], side=side)


@to_jagged.register_fake
def _(padded, offsets, total, side):
    return padded.new_empty(total, *padded.shape[2:])


def _save_padding(ctx, inputs, output):
    values, offsets, _, _, side = inputs
    ctx.save_for_backward(offsets)
    ctx.total, ctx.side = values.shape[0], side


def _save_unpadding(ctx, inputs, output):
    padded, offsets, _, side = inputs
    ctx.save_for_backward(offsets)
    ctx.max_length, ctx.side = padded.shape[1], side


to_padded.register_autograd(
    lambda ctx, grad: (to_jagged(grad, *ctx.saved_tensors, ctx.total, ctx.side), None, None, None, None),
    setup_context=_save_padding,
)
to_jagged.register_autograd(
    lambda ctx, grad: (to_padded(grad, *ctx.saved_tensors, ctx.max_length, 0.0, ctx.side), None, None, None),
    setup_context=_save_unpadding,
)


@custom_op("gemsmith::jagged_flip", like="values")
def flip(values: Tensor, offsets: Tensor) -> Tensor:
    """Each row backwards: [N, ...] -> [N, ...]."""
    return move("flip", values, torch.empty_like(values, memory_format=torch.contiguous_format), offsets.contiguous())


def _save_flip(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


flip.register_autograd(lambda ctx, grad: (flip(grad, *ctx.saved_tensors), None), setup_context=_save_flip)


@custom_op("gemsmith::jagged_window")
def window(values: Tensor, offsets: Tensor, starts: Tensor, window_offsets: Tensor, total: int) -> Tensor:
    """[total, ...] whose row b holds the values from starts[b] on, which lie in row b of `offsets`."""
    out = values.new_empty(total, *values.shape[1:])
    return move("window", values, out, window_offsets.contiguous(), starts=starts.contiguous())


@window.register_fake
def _(values, offsets, starts, window_offsets, total):
    return values.new_empty(total, *values.shape[1:])


@custom_op("gemsmith::jagged_unwindow")
def unwindow(part: Tensor, offsets: Tensor, starts: Tensor, window_offsets: Tensor, total: int) -> Tensor:
    """The adjoint of `window`: [total, ...] with zeros outside the windows."""
    out = part.new_empty(total, *part.shape[1:])
    return move(
        "unwindow",
        part,
        out,
        offsets.contiguous(),
        starts=starts.contiguous(),
        window_offsets=window_offsets.contiguous(),
    )


@unwindow.register_fake
def _(part, offsets, starts, window_offsets, total):
    return part.new_empty(total, *part.shape[1:])


def _save_window(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:4])
    ctx.total = inputs[0].shape[0]


window.register_autograd(
    lambda ctx, grad: (unwindow(grad, *ctx.saved_tensors, ctx.total), None, None, None, None),
    setup_context=_save_window,
)
unwindow.register_autograd(
    lambda ctx, grad: (window(grad, *ctx.saved_tensors, ctx.total), None, None, None, None),
    setup_context=_save_window,
)


def padded_to_jagged(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    return to_jagged(padded, offsets, total, "first")


def jagged_last(values: Tensor, offsets: Tensor, count: int) -> Tensor:
    return to_padded(values, offsets, count, 0.0, "right")
