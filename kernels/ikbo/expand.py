"""The copy itself, where a row for each candidate is needed: deterministic, and one operator for `torch.export`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.core.checks import check_offsets, check_rows
from kernels.core.operator import custom_op
from kernels.core.rows import row_of
from kernels.jagged import segment_sum


@custom_op("gemsmith::expand_rows")
def _expand(x: Tensor, offsets: Tensor, total: int) -> Tensor:
    return x.index_select(0, row_of(offsets, total))


@_expand.register_fake
def _(x: Tensor, offsets: Tensor, total: int) -> Tensor:
    return x.new_empty(total, *x.shape[1:])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (offsets,) = ctx.saved_tensors
    return segment_sum(grad, offsets), None, None


_expand.register_autograd(_backward, setup_context=_save)


def expand_rows(x: Tensor, offsets: Tensor, total: int) -> Tensor:
    """[R, ...] -> [total, ...]: row r of x for each of the candidates offsets[r]:offsets[r + 1].

    The gradient is a segment sum, which has no atomics and adds in float32. `total` is offsets[R], which the caller
    knows as the number of candidates.
    """
    check_offsets(total, offsets)
    check_rows(x, offsets, "x")
    return _expand(x, offsets, total)
