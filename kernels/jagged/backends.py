"""Registers the Triton and Gluon kernels of the jagged operators; they are imported when one of them is called."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from kernels.core import dispatch

MOVED = (*dispatch.FLOATS, torch.int32, torch.int64)


def _supports(*, device: str, capability: Hashable, dtype: torch.dtype, **facts: Hashable) -> str | None:
    return dispatch.needs_triton(device, capability) or dispatch.needs_dtype(dtype, *dispatch.FLOATS)


def _supports_moves(*, device: str, capability: Hashable, dtype: torch.dtype, **facts: Hashable) -> str | None:
    return dispatch.needs_triton(device, capability) or dispatch.needs_dtype(dtype, *MOVED)


def _register(op: str, supports: dispatch.Verifier = _supports):
    return dispatch.register(op, "triton", supports=supports, priority=10)


@_register("segment_sum")
def _segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    from kernels.jagged.triton import segment

    return segment.reduce(values, offsets, "sum", values.dtype)


@_register("segment_mean")
def _segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    from kernels.jagged.triton import segment

    return segment.reduce(values, offsets, "mean", values.dtype)


@_register("segment_max")
def _segment_max(values: Tensor, offsets: Tensor) -> Tensor:
    from kernels.jagged.triton import segment

    return segment.largest(values, offsets)[0]


@_register("jagged_to_padded", _supports_moves)
def _jagged_to_padded(values: Tensor, offsets: Tensor, max_length: int, fill: float, keep: str) -> Tensor:
    from kernels.jagged.triton import moves

    return moves.to_padded(values, offsets, max_length, fill, keep)


@_register("padded_to_jagged", _supports_moves)
def _padded_to_jagged(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    from kernels.jagged.triton import moves

    return moves.to_jagged(padded, offsets, total, "first")


@_register("jagged_last", _supports_moves)
def _jagged_last(values: Tensor, offsets: Tensor, count: int) -> Tensor:
    from kernels.jagged.triton import moves

    return moves.to_padded(values, offsets, count, 0.0, "right")


@_register("jagged_flip", _supports_moves)
def _jagged_flip(values: Tensor, offsets: Tensor) -> Tensor:
    from kernels.jagged.triton import moves

    return moves.flip(values, offsets)


@_register("jagged_slice", _supports_moves)
def _jagged_slice(
    values: Tensor, offsets: Tensor, start: Tensor, length: Tensor, total: int | None
) -> tuple[Tensor, Tensor]:
    from kernels.jagged.triton import gather

    return gather.slices(values, offsets, start, length, total)


@_register("jagged_concat", _supports_moves)
def _jagged_concat(a_values: Tensor, a_offsets: Tensor, b_values: Tensor, b_offsets: Tensor) -> tuple[Tensor, Tensor]:
    from kernels.jagged.triton import gather

    dtype = torch.promote_types(a_values.dtype, b_values.dtype)
    both = gather.concat(a_values.to(dtype), a_offsets, b_values.to(dtype), b_offsets)
    return both, a_offsets + b_offsets


@_register("jagged_index_select", _supports_moves)
def _jagged_index_select(values: Tensor, offsets: Tensor, rows: Tensor, total: int | None) -> tuple[Tensor, Tensor]:
    from kernels.jagged.triton import gather

    return gather.index_select(values, offsets, rows, total)


@_register("jagged_dense_bmm")
def _jagged_dense_bmm(x: Tensor, offsets: Tensor, y: Tensor, max_length: int) -> Tensor:
    from kernels.jagged.triton import bmm

    return bmm.dense_bmm(x, offsets, y, max_length)


@_register("jagged_jagged_bmm")
def _jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor, max_length: int) -> Tensor:
    from kernels.jagged.triton import bmm

    return bmm.jagged_bmm(x, y, offsets, max_length)


def _supports_row_stream(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    width: int,
    columns: int,
    long_rows: bool,
    **facts: Hashable,
) -> str | None:
    if reason := dispatch.needs_triton(device, capability, (9, 0)) or dispatch.needs_dtype(dtype, *dispatch.HALF):
        return reason
    if width % 16 or not 64 <= width <= 256 or not 0 < columns <= 8:
        return f"needs a width of 64 to 256 in steps of 16 and 1 to 8 columns, got {width} and {columns}"
    return "gives a whole row to one program, which a long one may keep for long" if long_rows else None


@dispatch.register("jagged_jagged_bmm", "gluon", supports=_supports_row_stream, priority=20)
def _jagged_jagged_bmm_stream(x: Tensor, y: Tensor, offsets: Tensor, max_length: int) -> Tensor:
    from kernels.jagged.hopper import bmm

    return bmm.jagged_bmm(x, y, offsets, max_length)


@_register("jagged_jagged_bmm_jagged_out")
def _outer(x: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, total: int, max_length: int) -> Tensor:
    from kernels.jagged.triton import square

    return square.outer(x, y, offsets, squares, total)


@_register("array_jagged_bmm_jagged_out")
def _inner(a: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, max_length: int, transpose: bool) -> Tensor:
    from kernels.jagged.triton import square

    return square.inner(a, y, offsets, squares, transpose)


def _supports_square_stream(
    *, device: str, capability: Hashable, dtype: torch.dtype, width: int, short_rows: bool, **facts: Hashable
) -> str | None:
    if reason := dispatch.needs_triton(device, capability, (9, 0)) or dispatch.needs_dtype(dtype, *dispatch.FLOATS):
        return reason
    if not 0 < width <= 256 or width % 8:
        return f"needs a width in multiples of 8 up to 256, got {width}"
    if dtype is torch.float32:
        return _supports_inner_stream(
            device=device, capability=capability, dtype=dtype, width=width, short_rows=short_rows
        )
    return None


def _supports_inner_stream(
    *, device: str, capability: Hashable, dtype: torch.dtype, width: int, short_rows: bool, **facts: Hashable
) -> str | None:
    if reason := dispatch.needs_triton(device, capability, (9, 0)) or dispatch.needs_dtype(dtype, *dispatch.FLOATS):
        return reason
    if not 128 < width <= 256 or width % 8:
        return f"needs a width in multiples of 8 from 136 to 256, got {width}"
    return "fills tiles of 64 places, which rows so short leave empty" if short_rows else None


@dispatch.register("jagged_jagged_bmm_jagged_out", "gluon", supports=_supports_square_stream, priority=20)
def _outer_stream(x: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, total: int, max_length: int) -> Tensor:
    from kernels.jagged import products
    from kernels.jagged.hopper.square import inner_product, outer_product

    serves_gradients = x.shape[1] > 128 and max_length >= products.SHORT
    return (inner_product if serves_gradients else outer_product).outer(x, y, offsets, squares, total)


@dispatch.register("array_jagged_bmm_jagged_out", "gluon", supports=_supports_inner_stream, priority=20)
def _inner_stream(a: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, max_length: int, transpose: bool) -> Tensor:
    from kernels.jagged.hopper.square import inner_product

    return inner_product.inner(a, y, offsets, squares, transpose)


@_register("jagged_softmax")
def _softmax(values: Tensor, offsets: Tensor) -> Tensor:
    from kernels.jagged.triton import softmax as triton_softmax

    return triton_softmax.softmax(values, offsets)


@_register("jagged2_softmax")
def _matrix_softmax(a: Tensor, offsets: Tensor, squares: Tensor, num_values: int) -> Tensor:
    from kernels.jagged.triton import softmax as triton_softmax

    return triton_softmax.matrix_softmax(a, offsets, squares, num_values)


@_register("jagged_elementwise")
def _elementwise(x: Tensor, y: Tensor, offsets: Tensor | None, op: str, activation: str) -> Tensor:
    from kernels.jagged.triton import elementwise as triton_elementwise

    return triton_elementwise.elementwise(x, y, offsets, op, activation)


@_register("jagged_linear")
def _linear(
    x: Tensor, offsets: Tensor, weight: Tensor, bias: Tensor | None, row_bias: Tensor | None, activation: str
) -> Tensor:
    from kernels.jagged.triton import linear as triton_linear

    return triton_linear.linear(
        x, offsets, weight, bias, row_bias, activation, _keeps(activation, x, weight, bias, row_bias)
    )[0]


def _supports_linear_stream(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    inner: int,
    width: int,
    **facts: Hashable,
) -> str | None:
    if reason := dispatch.needs_triton(device, capability, (9, 0)) or dispatch.needs_dtype(dtype, *dispatch.FLOATS):
        return reason
    if not all(0 < size <= 256 and size % 8 == 0 for size in (inner, width)):
        return f"needs widths in multiples of 8 up to 256, got {inner} in and {width} out"
    return None


@dispatch.register("jagged_linear", "gluon", supports=_supports_linear_stream, priority=20)
def _linear_stream(
    x: Tensor, offsets: Tensor, weight: Tensor, bias: Tensor | None, row_bias: Tensor | None, activation: str
) -> Tensor:
    from kernels.jagged.hopper.linear import forward

    keep = _keeps(activation, x, weight, bias, row_bias)
    return forward.linear(x, offsets, weight, bias, row_bias, activation, keep)[0]


def _keeps(activation: str, *operands: Tensor | None) -> bool:
    """Whether a backward will need the input of the activation."""
    differentiable = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in operands)
    return differentiable and activation not in ("none", "relu")
