"""Operators on jagged tensors: (values [N, ...], offsets [B + 1]), row b is values[offsets[b]:offsets[b + 1]].

Offsets are int32 or int64 on the device of the values, start at 0, do not decrease, and end at N. No operator waits for
the device (the one exception says so), so sizes that cannot be read from a shape are arguments: maxima are configured
constants that no row exceeds, never the maximum of a batch. Half-precision sums are accumulated in float32.
`backend` forces one backend by name; see `kernels.core.dispatch`.

A ValueError names shapes and dtypes that do not fit and, on the CPU, offsets that do not run from 0 to N, rows longer
than their maximum, and negative row numbers, starts and lengths. On a GPU such checks would have to wait for the
device: row lengths are device assertions, and the rest is not checked.
"""

from __future__ import annotations

from torch import Tensor

from kernels.core import dispatch, rows
from kernels.core.checks import check_floating, check_lengths, check_not_negative, check_offsets, check_rows
from kernels.core.dispatch import Backend, triton_floats, triton_moves
from kernels.jagged import reference
from kernels.jagged.pointwise import jagged_dense_elementwise, jagged_elementwise, jagged_linear
from kernels.jagged.products import (
    array_jagged_bmm_jagged_out,
    jagged2_softmax,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
    jagged_softmax,
    squared_offsets,
)
from kernels.jagged.windows import jagged_flip, jagged_slice

__all__ = [
    "array_jagged_bmm_jagged_out",
    "check_lengths",
    "check_offsets",
    "jagged2_softmax",
    "jagged_concat",
    "jagged_dense_bmm",
    "jagged_dense_elementwise",
    "jagged_elementwise",
    "jagged_flip",
    "jagged_index_select",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_last",
    "jagged_linear",
    "jagged_low_rank",
    "jagged_slice",
    "jagged_softmax",
    "jagged_to_padded",
    "padded_to_jagged",
    "segment_max",
    "segment_mean",
    "segment_sum",
    "squared_offsets",
]


def segment_sum(values: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Sum of each row: [N, ...] -> [B, ...]; an empty row gives 0."""
    check_floating(values, "values")
    check_offsets(values.shape[0], offsets)
    return dispatch.choose("segment_sum", backend, values)(values, offsets)


def segment_mean(values: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Mean of each row: [N, ...] -> [B, ...]; an empty row gives 0."""
    check_floating(values, "values")
    check_offsets(values.shape[0], offsets)
    return dispatch.choose("segment_mean", backend, values)(values, offsets)


def segment_max(values: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Maximum of each row: [N, ...] -> [B, ...]; an empty row gives 0. Ties share the gradient evenly."""
    check_floating(values, "values")
    check_offsets(values.shape[0], offsets)
    return dispatch.choose("segment_max", backend, values)(values, offsets)


def jagged_to_padded(
    values: Tensor,
    offsets: Tensor,
    max_length: int,
    fill: float = 0.0,
    keep: str = "first",
    *,
    backend: str | None = None,
) -> Tensor:
    """[N, ...] -> [B, max_length, ...]: rows start at position 0 and `fill` follows them.

    If a row is longer than max_length, `keep` says whether its first or its last max_length values are kept.
    """
    if keep not in ("first", "last"):
        raise ValueError(f"keep must be 'first' or 'last', got {keep!r}")
    check_offsets(values.shape[0], offsets)
    return dispatch.choose("jagged_to_padded", backend, values)(values, offsets, max_length, fill, keep)


def padded_to_jagged(padded: Tensor, offsets: Tensor, total: int, *, backend: str | None = None) -> Tensor:
    """[B, L, ...] -> [total, ...]: the inverse of `jagged_to_padded`; positions of a row beyond L give 0.

    `total` is offsets[B], which the caller knows as the shape of the values that the offsets came with.
    """
    check_offsets(total, offsets)
    check_rows(padded, offsets, "padded")
    return dispatch.choose("padded_to_jagged", backend, padded)(padded, offsets, total)


def jagged_concat(
    a_values: Tensor, a_offsets: Tensor, b_values: Tensor, b_offsets: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(values [Na + Nb, ...], offsets [B + 1]) whose row b is a's row b followed by b's row b."""
    check_offsets(a_values.shape[0], a_offsets)
    check_offsets(b_values.shape[0], b_offsets)
    if a_offsets.shape != b_offsets.shape:
        raise ValueError(f"a has {len(a_offsets) - 1} rows and b has {len(b_offsets) - 1}; they must be equal")
    if a_values.shape[1:] != b_values.shape[1:]:
        raise ValueError(
            f"a {tuple(a_values.shape)} and b {tuple(b_values.shape)} must be alike but for their first size"
        )
    return dispatch.choose("jagged_concat", backend, a_values)(a_values, a_offsets, b_values, b_offsets)


def jagged_index_select(
    values: Tensor, offsets: Tensor, rows: Tensor, total: int | None = None, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(values, offsets [M + 1]) whose row m is row rows[m], repetition allowed; rows [M] int64 or int32.

    `total` is the sum of the selected lengths. Without it this is the one function that waits for the device.
    """
    check_offsets(values.shape[0], offsets)
    check_not_negative(rows, "rows")
    selected, selected_offsets = dispatch.choose("jagged_index_select", backend, values)(values, offsets, rows, total)
    check_offsets(selected.shape[0], selected_offsets)
    return selected, selected_offsets


def jagged_last(values: Tensor, offsets: Tensor, count: int, *, backend: str | None = None) -> Tensor:
    """[N, ...] -> [B, count, ...]: the last `count` values of each row, right-aligned, zeros in front if shorter."""
    check_offsets(values.shape[0], offsets)
    return dispatch.choose("jagged_last", backend, values)(values, offsets, count)


def jagged_dense_bmm(x: Tensor, offsets: Tensor, y: Tensor, max_length: int, *, backend: str | None = None) -> Tensor:
    """out[i] = x[i] @ y[b] for i in row b: x [N, D], y [B, D, E] -> [N, E]. No row is longer than max_length."""
    if x.dim() != 2 or y.dim() != 3 or x.shape[1] != y.shape[1]:
        raise ValueError(f"expected x [N, D] and y [B, D, E], got {tuple(x.shape)} and {tuple(y.shape)}")
    check_offsets(x.shape[0], offsets)
    check_rows(y, offsets, "y")
    x, y = dispatch.autocast_operands(x=x, y=y)
    return dispatch.choose("jagged_dense_bmm", backend, x)(x, offsets, y, max_length)


def jagged_low_rank(
    x: Tensor, offsets: Tensor, left: Tensor, weight: Tensor, max_length: int, *, backend: str | None = None
) -> Tensor:
    """out[i] = weight @ (left[b] @ x[i]) for i in row b: x [N, D], left [B, n, D], weight [E, n] -> [N, E].

    A linear layer whose weight [E, D] is each row's own, of a rank n that is small: only left differs between rows. No
    row is longer than max_length. What left @ x gives is rounded to the dtype of x. All operands have one dtype; in an
    autocast region they take its dtype.
    """
    if x.dim() != 2 or left.dim() != 3 or weight.dim() != 2 or left.shape[1:] != (weight.shape[1], x.shape[1]):
        raise ValueError(
            f"expected x [N, D], left [B, n, D] and weight [E, n], got {tuple(x.shape)}, {tuple(left.shape)} and "
            f"{tuple(weight.shape)}"
        )
    check_offsets(x.shape[0], offsets)
    check_rows(left, offsets, "left")
    x, left, weight = dispatch.autocast_operands(x=x, left=left, weight=weight)
    return dispatch.choose("jagged_low_rank", backend, x)(x, offsets, left, weight, max_length)


for _op, _file, _function, _supports, _specification in (
    ("segment_sum", "segment", "segment_sum", triton_floats, reference.segment_sum),
    ("segment_mean", "segment", "segment_mean", triton_floats, reference.segment_mean),
    ("segment_max", "segment", "segment_max", triton_floats, reference.segment_max),
    ("jagged_to_padded", "moves", "to_padded", triton_moves, rows.jagged_to_padded),
    ("padded_to_jagged", "moves", "padded_to_jagged", triton_moves, rows.padded_to_jagged),
    ("jagged_last", "moves", "jagged_last", triton_moves, reference.jagged_last),
    ("jagged_concat", "gather", "jagged_concat", triton_moves, reference.jagged_concat),
    ("jagged_index_select", "gather", "index_select", triton_moves, reference.jagged_index_select),
    ("jagged_dense_bmm", "bmm", "dense_bmm", triton_floats, reference.jagged_dense_bmm),
    ("jagged_low_rank", "low_rank", "jagged_low_rank", triton_floats, reference.jagged_low_rank),
):
    dispatch.declare(
        _op,
        Backend("triton", f"kernels.jagged.triton.{_file}:{_function}", _supports),
        Backend("reference", _specification),
    )


@dispatch.flops("jagged_dense_bmm")
def _flops(x: Tensor, offsets: Tensor, y: Tensor, max_length: int) -> float:
    return 2 * x.numel() * y.shape[2]


@dispatch.flops("jagged_low_rank")
def _flops_low_rank(x: Tensor, offsets: Tensor, left: Tensor, weight: Tensor, max_length: int) -> float:
    return 2 * left.shape[1] * (x.numel() + x.shape[0] * weight.shape[0])
