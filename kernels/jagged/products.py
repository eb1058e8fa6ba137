"""Public functions of jagged products, softmax and the square layout.

The square layout holds one L_b x L_b matrix a row, row-major, one behind another: values [sum of L_b^2], where row b's
matrix begins at squares[b]. `squared_offsets` makes `squares`; its last entry is the length of the values.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from kernels.core import dispatch
from kernels.core.checks import check_floating, check_offsets
from kernels.core.dispatch import Backend, triton_floats
from kernels.jagged import reference


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
    return dispatch.choose("jagged_jagged_bmm", backend, x)(x, y, offsets, max_length)


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
    chosen = dispatch.choose("jagged_jagged_bmm_jagged_out", backend, x)
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
    chosen = dispatch.choose("array_jagged_bmm_jagged_out", backend, y)
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


dispatch.declare(
    "jagged_jagged_bmm",
    Backend("triton", "kernels.jagged.triton.bmm:jagged_bmm", triton_floats),
    Backend("reference", reference.jagged_jagged_bmm),
)
dispatch.declare(
    "jagged_jagged_bmm_jagged_out",
    Backend("triton", "kernels.jagged.triton.square:jagged_jagged_bmm_jagged_out", triton_floats),
    Backend("reference", reference.jagged_jagged_bmm_jagged_out),
)
dispatch.declare(
    "array_jagged_bmm_jagged_out",
    Backend("triton", "kernels.jagged.triton.square:array_jagged_bmm_jagged_out", triton_floats),
    Backend("reference", reference.array_jagged_bmm_jagged_out),
)
dispatch.declare(
    "jagged_softmax",
    Backend("triton", "kernels.jagged.triton.softmax:softmax", triton_floats),
    Backend("reference", reference.jagged_softmax),
)
dispatch.declare(
    "jagged2_softmax",
    Backend("triton", "kernels.jagged.triton.softmax:matrix_softmax", triton_floats),
    Backend("reference", reference.jagged2_softmax),
)


@dispatch.flops("jagged_jagged_bmm")
def _flops_of_bmm(x: Tensor, y: Tensor, offsets: Tensor, max_length: int) -> float:
    return 2 * x.numel() * y.shape[1]


@dispatch.flops("jagged_jagged_bmm_jagged_out")
def _flops_of_outer(x: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, total: int, max_length: int) -> float:
    return 2 * total * x.shape[1]


@dispatch.flops("array_jagged_bmm_jagged_out")
def _flops_of_inner(a: Tensor, y: Tensor, *rest: object) -> float:
    return 2 * a.numel() * y.shape[1]
