"""SwiGLU over rows in expert order in bfloat16, forward and backward; Gluon."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.core.launch import Launcher, aligned

_ROWS = gl.constexpr(32)  # of a tile; it has 128 columns
_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _sigmoid(x):
    return gl.fdiv(1.0, 1.0 + gl.exp2(-x * _LOG2_E))


@gluon.jit
def _tile(num_groups, ends, width):
    """(whether it is after the last end, its rows, where they begin in a matrix of `width` columns, its columns)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    first_row = gl.program_id(0) // (width // 128) * _ROWS
    first_column = gl.program_id(0) % (width // 128) * 128
    row = first_row + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.expand_dims(first_column + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT)), 0)
    return first_row >= gl.load(ends + num_groups - 1), row, gl.expand_dims(row.to(gl.int64) * width, 1), column


@gluon.jit(do_not_specialize=["num_groups"])
def swiglu_forward_kernel(gate_up, ends, num_groups, out, width):
    behind, _, at, column = _tile(num_groups, ends, width)
    if behind:
        return
    gate = gl.load(gate_up + 2 * at + column).to(gl.float32)
    up = gl.load(gate_up + width + 2 * at + column).to(gl.float32)
    gl.store(out + at + column, (gate * _sigmoid(gate) * up).to(gl.bfloat16))


_launch_forward = Launcher(swiglu_forward_kernel, num_warps=4)


def swiglu(gate_up: Tensor, ends: Tensor) -> Tensor:
    """gate_up [M, 2F] bfloat16 -> [M, F], in which rows after the last end are not written."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    if out.numel():
        grid = (num_rows // _ROWS.value * (width // 128), 1, 1)
        _launch_forward(grid, (out.device, *aligned(gate_up, ends)), gate_up, ends, ends.shape[0], out, width)
    return out


@gluon.jit(do_not_specialize=["num_groups"])
def swiglu_backward_kernel(gate_up, grad, selections, weights, ends, num_groups, d_gate_up, partial, width):
    """One tile of `grad`, the gradient of the result before the weights; see `swiglu_backward`."""
    behind, row, at, column = _tile(num_groups, ends, width)
    if behind:
        return
    gate = gl.load(gate_up + 2 * at + column).to(gl.float32)
    up = gl.load(gate_up + width + 2 * at + column).to(gl.float32)
    upstream = gl.load(grad + at + column).to(gl.float32)
    selection = gl.load(selections + row)
    weight = gl.expand_dims(gl.load(weights + selection, mask=selection >= 0, other=0.0).to(gl.float32), 1)
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    result = (silu * up).to(gl.bfloat16).to(gl.float32)
    tiles = width // 128
    gl.store(partial + row.to(gl.int64) * tiles + gl.program_id(0) % tiles, gl.sum(result * upstream, 1))
    upstream = upstream * weight
    d_gate = upstream * up * (sigmoid + silu * (1.0 - sigmoid))
    gl.store(d_gate_up + 2 * at + column, d_gate.to(gl.bfloat16))
    gl.store(d_gate_up + width + 2 * at + column, (upstream * silu).to(gl.bfloat16))
    gl.store(grad + at + column, (result * weight).to(gl.bfloat16))


_launch_backward = Launcher(swiglu_backward_kernel, num_warps=4, maxnreg=128)


def swiglu_backward(
    gate_up: Tensor, grad: Tensor, selections: Tensor, weights: Tensor, ends: Tensor, overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `weights * swiglu(gate_up)`, and the weighted result again.

    Args:
        gate_up: [M, 2F] bfloat16; grad: [M, F] bfloat16, the gradient of the result divided by the row's weight. It is
            overwritten by the weighted result.
        selections: [M] int32, which of `weights` [N, k] belongs to each row, -1 for none.
        overwrite: d gate_up takes the memory of gate_up.
    Returns:
        d gate_up [M, 2F], the weighted result [M, F], and partial [M, F / 128] float32, whose sum over a row is the
        gradient of its weight.
    """
    num_rows, width = grad.shape
    d_gate_up = gate_up if overwrite else torch.empty_like(gate_up)
    partial = grad.new_empty(num_rows, width // 128, dtype=torch.float32)
    if grad.numel():
        weights = weights.contiguous()
        _launch_backward(
            (num_rows // _ROWS.value * (width // 128), 1, 1),
            (grad.device, weights.dtype, *aligned(gate_up, grad, selections, weights, ends)),
            gate_up,
            grad,
            selections,
            weights,
            ends,
            ends.shape[0],
            d_gate_up,
            partial,
            width,
        )
    return d_gate_up, grad, partial
