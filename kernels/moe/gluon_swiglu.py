"""SwiGLU over rows in expert order, forward and backward, with the result quantised where it is made; Gluon.

The result is rounded to bfloat16 before it is quantised, as if it had been written and read again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.mxfp8.gluon_blocks import TILE, quantize_columns, quantize_rows, tile_layout, tile_offsets, tile_origin
from kernels.mxfp8.gluon_quantize import launch_options, scales_like

_CHUNK_ROWS = gl.constexpr(32)
_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _sigmoid(x):
    return gl.fdiv(1.0, 1.0 + gl.exp2(-x * _LOG2_E))


@gluon.jit(do_not_specialize=["num_groups"])
def forward_kernel(
    gate_up,
    ends,
    num_groups,
    codes,
    scales,
    num_rows,
    width,
    GROUP: gl.constexpr,
    R: gl.constexpr,
):
    """One tile of the result; with GROUP 0 `codes` are bfloat16 and nothing is quantised."""
    first_row = gl.program_id(0) // (width // 128) * 128
    first_column = gl.program_id(0) % (width // 128) * 128
    if first_row >= gl.load(ends + num_groups - 1):
        return
    _, _, offset = tile_offsets(2 * width, R)
    at = gate_up + first_row.to(gl.int64) * (2 * width) + first_column + offset
    gate = gl.load(at).to(gl.float32)
    result = (gate * _sigmoid(gate) * gl.load(at + width).to(gl.float32)).to(gl.bfloat16)
    if GROUP == 0:
        _, _, offset = tile_offsets(width, R)
        gl.store(codes + first_row.to(gl.int64) * width + first_column + offset, result)
    else:
        quantize_rows(result, codes, scales, first_row, first_column, num_rows, width, GROUP, False, False, True, R)


def swiglu(gate_up: Tensor, ends: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """gate_up [M, 2F] bfloat16 -> codes [M, F], scales [M, F / 32] (with group 0: bfloat16 and nothing)."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    codes = gate_up.new_empty(num_rows, width, dtype=torch.float8_e4m3fn if group else torch.bfloat16)
    scales = scales_like(codes if group else codes[:0, :0], False)
    if codes.numel():
        forward_kernel[(num_rows // TILE * (width // TILE),)](
            gate_up,
            ends,
            ends.shape[0],
            codes,
            scales,
            num_rows,
            width,
            GROUP=group,
            **launch_options(),
        )
    return codes, scales


@gluon.jit
def _load_chunk(gate_up, grad, selections, weights, first_row, column, width, LAYOUT: gl.constexpr):
    """(rows, where they begin in a matrix of `width` columns, their weights, (gate, up, grad)) of a part of a tile."""
    row = first_row + gl.arange(0, _CHUNK_ROWS, gl.SliceLayout(1, LAYOUT))
    at = gl.expand_dims(row.to(gl.int64) * width, 1)
    gate = gl.load(gate_up + 2 * at + column)
    up = gl.load(gate_up + width + 2 * at + column)
    upstream = gl.load(grad + at + column)
    selection = gl.load(selections + row)
    weight = gl.expand_dims(gl.load(weights + selection, mask=selection >= 0, other=0.0).to(gl.float32), 1)
    return row, at, weight, (gate, up, upstream)


@gluon.jit(do_not_specialize=["num_groups"])
def backward_kernel(
    gate_up,
    grad,
    selections,
    weights,
    ends,
    num_groups,
    row_codes,
    row_scales,
    column_codes,
    column_scales,
    result_codes,
    result_scales,
    partial,
    num_rows,
    width,
    GROUP: gl.constexpr,
    R: gl.constexpr,
):
    """One tile of `grad`, the gradient of the result before the weights; see `swiglu_backward`."""
    tiles = width // 128
    first_row, first_column = tile_origin(num_rows // 128, tiles)
    if first_row >= gl.load(ends + num_groups - 1):
        return
    LAYOUT: gl.constexpr = tile_layout(R)
    # Three tiles do not fit into registers beside what quantising one takes: they wait in shared memory.
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if GROUP:
        tiles_smem = gl.allocate_shared_memory(gl.bfloat16, [3, 128, 128], SHARED)
    CHUNK: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    column = gl.expand_dims(first_column + gl.arange(0, 128, gl.SliceLayout(0, CHUNK)), 0)
    row, at, weight, inputs = _load_chunk(gate_up, grad, selections, weights, first_row, column, width, CHUNK)
    for chunk in gl.static_range(128 // _CHUNK_ROWS):
        # The next chunk arrives while this one is computed.
        this_row, this_at, this_weight, this_inputs = row, at, weight, inputs
        if (chunk + 1) * _CHUNK_ROWS < 128:
            next_row = first_row + (chunk + 1) * _CHUNK_ROWS
            row, at, weight, inputs = _load_chunk(gate_up, grad, selections, weights, next_row, column, width, CHUNK)
        gate, up, upstream = this_inputs[0].to(gl.float32), this_inputs[1].to(gl.float32), this_inputs[2].to(gl.float32)
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        result = (silu * up).to(gl.bfloat16).to(gl.float32)
        gl.store(partial + this_row.to(gl.int64) * tiles + first_column // 128, gl.sum(result * upstream, 1))
        result = (result * this_weight).to(gl.bfloat16)
        upstream = upstream * this_weight
        d_up = (upstream * silu).to(gl.bfloat16)
        d_gate = (upstream * up * (sigmoid + silu * (1.0 - sigmoid))).to(gl.bfloat16)
        if GROUP == 0:
            gl.store(row_codes + 2 * this_at + column, d_gate)
            gl.store(row_codes + width + 2 * this_at + column, d_up)
            gl.store(result_codes + this_at + column, result)
        else:
            tiles_smem.index(0).slice(chunk * _CHUNK_ROWS, _CHUNK_ROWS, 0).store(d_gate)
            tiles_smem.index(1).slice(chunk * _CHUNK_ROWS, _CHUNK_ROWS, 0).store(d_up)
            tiles_smem.index(2).slice(chunk * _CHUNK_ROWS, _CHUNK_ROWS, 0).store(result)
    if GROUP:
        for half in range(2):
            first = first_column + half * width
            d = tiles_smem.index(half).load(LAYOUT)
            quantize_rows(d, row_codes, row_scales, first_row, first, num_rows, 2 * width, GROUP, False, False, True, R)
            # Loaded again, which is cheaper than keeping it.
            d = tiles_smem.index(half).load(LAYOUT)
            quantize_columns(
                d, column_codes, column_scales, first_row, first, num_rows, 2 * width, GROUP, False, False, True, R
            )
        result = tiles_smem.index(2).load(LAYOUT)
        quantize_columns(
            result, result_codes, result_scales, first_row, first_column, num_rows, width, GROUP, False, False, True, R
        )


def swiglu_backward(
    gate_up: Tensor, grad: Tensor, selections: Tensor, weights: Tensor, ends: Tensor, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `weights * swiglu(gate_up)` from that of the unweighted result's product, and the result again.

    Args:
        gate_up: [M, 2F] bfloat16; grad: [M, F] bfloat16, what arrives at the result divided by the row's weight.
        selections: [M] int32, which of `weights` [N, k] belongs to each row, -1 for none.
    Returns:
        Of d gate_up: codes [M, 2F], scales, codes [2F, M], scales; of the weighted result: codes [F, M], scales; and
        partial [M, F / 128] float32, whose sum over a row is the gradient of its weight. With group 0 the first is
        bfloat16 [M, 2F], the fifth bfloat16 [M, F], and the other codes and scales are empty.
    """
    num_rows, width = grad.shape
    dtype = torch.float8_e4m3fn if group else torch.bfloat16
    row_codes = grad.new_empty(num_rows, 2 * width, dtype=dtype)
    column_codes = grad.new_empty((2 * width, num_rows) if group else (0, 0), dtype=torch.float8_e4m3fn)
    result_codes = grad.new_empty((width, num_rows) if group else (num_rows, width), dtype=dtype)
    row_scales, column_scales, result_scales = (
        scales_like(codes if group else codes[:0, :0], False) for codes in (row_codes, column_codes, result_codes)
    )
    partial = grad.new_empty(num_rows, width // TILE, dtype=torch.float32)
    if grad.numel():
        backward_kernel[(num_rows // TILE * (width // TILE),)](
            gate_up,
            grad,
            selections,
            weights.contiguous(),
            ends,
            ends.shape[0],
            row_codes,
            row_scales,
            column_codes,
            column_scales,
            result_codes,
            result_scales,
            partial,
            num_rows,
            width,
            GROUP=group,
            **launch_options(),
        )
    return row_codes, row_scales, column_codes, column_scales, result_codes, result_scales, partial
