"""Public functions and the specification, in plain PyTorch, of jagged products, softmax and the square layout.

The square layout holds one L_b x L_b matrix a row, row-major, one behind another: values [sum of L_b^2], where row b's
matrix begins at squares[b]. `squared_offsets` makes `squares`; its last entry is the length of the values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.core import dispatch
from kernels.core.checks import check_floating, check_lengths, check_offsets
from kernels.jagged import reference

SHORT = 128  # places; rows of fewer do not fill tiles of 64
LONG = 1024  # places of a row; the kernel that gives each row to one program keeps to rows of no more


def squared_offsets(offsets: Tensor) -> Tensor:
    """[B + 1] int64: where each row's matrix of the square layout begins."""
    return pad(offsets.diff().long().square().cumsum(0), (1, 0))


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor, max_length: int, *, backend: str | None = None) -> Tensor:
    """out[b] = x[row b]^T @ y[row b]: x [N, D], y [N, E] -> [B, D, E]; an empty row gives zeros.

    No row is longer than max_length.
    """
    _check_matrices(x, y)
    check_offsets(x.shape[0], offsets)
    x, y = dispatch.autocast_operands(x=x, y=y)
    facts = {"width": x.shape[1], "columns": y.shape[1], "long_rows": max_length > LONG}
    return dispatch.choose("jagged_jagged_bmm", backend, x, **facts)(x, y, offsets, max_length)


def jagged_jagged_bmm_jagged_out(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    squares: Tensor,
    total: int,
    max_length: int,
    *,
    backend: str | None = None,
) -> Tensor:
    """a[b] = x[row b] @ y[row b]^T: x [N, D], y [N, D] -> [total], the square layout.

    `squares` is `squared_offsets(offsets)` and `total` its last entry. No row is longer than max_length.
    """
    _check_matrices(x, y)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x is {x.shape[1]} and y is {y.shape[1]} wide; they must be equally wide")
    check_offsets(x.shape[0], offsets)
    check_offsets(total, squares)
    x, y = dispatch.autocast_operands(x=x, y=y)
    chosen = dispatch.choose(
        "jagged_jagged_bmm_jagged_out", backend, x, width=x.shape[1], short_rows=max_length < SHORT
    )
    return chosen(x, y, offsets, squares, total, max_length)


def array_jagged_bmm_jagged_out(
    a: Tensor,
    y: Tensor,
    offsets: Tensor,
    squares: Tensor,
    max_length: int,
    transpose: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """out[row b] = a[b] @ y[row b], or a[b]^T @ y[row b]: a [sum of L_b^2], y [N, D] -> [N, D].

    No row is longer than max_length.
    """
    if a.dim() != 1 or y.dim() != 2:
        raise ValueError(f"expected a [sum of L^2] and y [N, D], got {tuple(a.shape)} and {tuple(y.shape)}")
    check_offsets(y.shape[0], offsets)
    check_offsets(a.shape[0], squares)
    a, y = dispatch.autocast_operands(a=a, y=y)
    chosen = dispatch.choose("array_jagged_bmm_jagged_out", backend, y, width=y.shape[1], short_rows=max_length < SHORT)
    return chosen(a, y, offsets, squares, max_length, transpose)


def jagged_softmax(values: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Softmax over the places of each row, each column on its own: [N, ...] -> [N, ...]."""
    check_floating(values, "values")
    check_offsets(values.shape[0], offsets)
    return dispatch.choose("jagged_softmax", backend, values)(values, offsets)


def jagged2_softmax(
    a: Tensor, offsets: Tensor, squares: Tensor, num_values: int, *, backend: str | None = None
) -> Tensor:
    """Softmax over each row of each matrix of the square layout: [sum of L_b^2] -> the same.

    `num_values` is offsets[B], the number of matrix rows.
    """
    check_floating(a, "a")
    check_offsets(num_values, offsets)
    check_offsets(a.shape[0], squares)
    return dispatch.choose("jagged2_softmax", backend, a)(a, offsets, squares, num_values)


def _check_matrices(x: Tensor, y: Tensor) -> None:
    if x.dim() != 2 or y.dim() != 2 or x.shape[0] != y.shape[0]:
        raise ValueError(f"expected x [N, D] and y [N, E], got {tuple(x.shape)} and {tuple(y.shape)}")


def _pad(values: Tensor, offsets: Tensor, max_length: int) -> Tensor:
    check_lengths(offsets, max_length, "max_length")
    return reference.jagged_to_padded(values, offsets, max_length, 0.0, "first")


def _square_places(offsets: Tensor, squares: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(place in the values of the matrix row, its column), each [total] int64, of each place of the square layout."""
    matrix, position = reference.place_in_row(squares, total)
    length = offsets.diff().long()[matrix]
    return offsets.long()[matrix] + position // length, position % length


@dispatch.register("jagged_jagged_bmm", "reference")
def _jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor, max_length: int) -> Tensor:
    return _pad(x, offsets, max_length).mT @ _pad(y, offsets, max_length)


@dispatch.register("jagged_jagged_bmm_jagged_out", "reference")
def _outer(x: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, total: int, max_length: int) -> Tensor:
    scores = reference.padded_to_jagged(
        _pad(x, offsets, max_length) @ _pad(y, offsets, max_length).mT, offsets, x.shape[0]
    )
    place, column = _square_places(offsets, squares, total)
    return scores.flatten().index_select(0, place * max_length + column)


def _to_matrix_rows(a: Tensor, offsets: Tensor, squares: Tensor, num_values: int, max_length: int) -> Tensor:
    """[sum of L_b^2] -> [N, max_length], zeros behind the end of each row."""
    place, column = _square_places(offsets, squares, a.shape[0])
    rows = a.new_zeros(num_values * max_length).index_copy(0, place * max_length + column, a)
    return rows.view(num_values, max_length)


@dispatch.register("array_jagged_bmm_jagged_out", "reference")
def _inner(a: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, max_length: int, transpose: bool) -> Tensor:
    matrices = _pad(_to_matrix_rows(a, offsets, squares, y.shape[0], max_length), offsets, max_length)
    out = (matrices.mT if transpose else matrices) @ _pad(y, offsets, max_length)
    return reference.padded_to_jagged(out, offsets, y.shape[0])


def _softmax_of(values: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Softmax over the rows of any jagged tensor [total, ...]."""
    wide = reference.widened(values)
    row = reference.row_of(offsets, total)
    largest = torch.segment_reduce(wide.detach(), "max", offsets=offsets, axis=0, unsafe=True)
    exponential = (wide - largest.index_select(0, row)).exp()
    return (exponential / reference.segment_sum(exponential, offsets).index_select(0, row)).to(values.dtype)


@dispatch.register("jagged_softmax", "reference")
def _softmax(values: Tensor, offsets: Tensor) -> Tensor:
    return _softmax_of(values, offsets, values.shape[0])


@dispatch.register("jagged2_softmax", "reference")
def _matrix_softmax(a: Tensor, offsets: Tensor, squares: Tensor, num_values: int) -> Tensor:
    # The rows of all matrices are the rows of a jagged tensor of their own.
    row = reference.row_of(offsets, num_values)
    row_offsets = pad(offsets.diff().long()[row].cumsum(0), (1, 0))
    return _softmax_of(a, row_offsets, a.shape[0])


@dispatch.flops("jagged_jagged_bmm")
def _flops_of_bmm(x: Tensor, y: Tensor, offsets: Tensor, max_length: int) -> float:
    return 2 * x.numel() * y.shape[1]


@dispatch.flops("jagged_jagged_bmm_jagged_out")
def _flops_of_outer(x: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, total: int, max_length: int) -> float:
    return 2 * total * x.shape[1]


@dispatch.flops("array_jagged_bmm_jagged_out")
def _flops_of_inner(a: Tensor, y: Tensor, *rest: object) -> float:
    return 2 * a.numel() * y.shape[1]
