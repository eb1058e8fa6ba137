"""SwiGLU over rows in expert order, forward and backward, with MXFP8 results quantised where they are made; Gluon.

The result is rounded to bfloat16 before it is quantised, as if it had been written and read again. Tiles are loaded by
TMA. The backward computes in place in shared memory, where each of its three tiles is quantised along rows and columns;
the codes are stored from the memory of the tile's words.

The forward also writes the hidden rows for the backward, in MXINT8 (`mxfp8.hopper.quantize.int8`), half the bytes of
bfloat16. The gradient of the hidden rows has as many bytes in codes of each orientation: the codes of its rows may take
the memory of these rows, and those of its columns take that of the gradient of the result. Each tile's codes cover
exactly the memory that the tile was read from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.core.hopper import left_half, pair, right_half, sigmoid_of
from kernels.core.launch import Launcher, aligned
from kernels.moe.hopper.words import swiglu_words
from kernels.mxfp8.grouped import TABLES, form_of
from kernels.mxfp8.hopper.quantize.blocks import tile_place
from kernels.mxfp8.hopper.quantize.int8 import (
    empty_int8,
    load_int8,
    scale_words_layout,
    scales_descriptor,
    store_int8,
)
from kernels.mxfp8.hopper.quantize.operators import scales_like
from kernels.mxfp8.hopper.quantize.pairs import (
    WARPS,
    codes_descriptor,
    codes_layout,
    column_layout,
    row_layout,
    store_columns,
    store_rows,
    table_of,
    words_descriptor,
    words_layout,
)

# Three programs of the forward and two of the backward share a multiprocessor, as shared memory lets them.
FORWARD_REGISTERS, BACKWARD_REGISTERS = 80, 128
_CHUNK = gl.constexpr(32)  # rows that the backward computes at a time


@gluon.jit
def _load_halves(desc, row, column, width, gate_smem, up_smem, full):
    """Start to read the tiles of gate and of up."""
    tma.async_copy_global_to_shared(desc, [row, column // 2], full, gate_smem)
    tma.async_copy_global_to_shared(desc, [row, (width + column) // 2], full, up_smem)


@gluon.jit(do_not_specialize=["num_groups", "first"])
def swiglu_quantized_forward_kernel(
    hidden_desc,
    codes_desc,
    kept_desc,
    scales,
    kept_scales,
    ends,
    num_groups,
    first,
    tile_rows,
    num_rows,
    width,
    GROUP: gl.constexpr,
    FORM: gl.constexpr,
    KEEP: gl.constexpr,
):
    """One tile of the result. `hidden_desc` has `tile_rows` tiles of the `num_rows` rows, from the row `first` on."""
    own_row, column = tile_place(gl.program_id(0), tile_rows, width // 128)
    row = first + own_row
    if row >= gl.load(ends + num_groups - 1):
        return
    smem = gl.allocate_shared_memory(gl.int32, [2, 128, 64], words_layout())
    barriers = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = barriers.index(0)
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, 2 * hidden_desc.block_type.nbytes)
    _load_halves(hidden_desc, own_row, column, width, smem.index(0), smem.index(1), full)
    mbarrier.wait(full, 0)
    buffers = smem.index(0)._reinterpret(gl.int16, [2, 128, 64], codes_layout())
    gate = smem.index(0).load(row_layout())
    if KEEP:
        store_int8(gate, buffers.index(1), kept_desc, row, column // 2, kept_scales, row, column // 32, num_rows)
    up = smem.index(1).load(row_layout())
    result = swiglu_words(gate, up)
    store_rows(result, buffers.index(0), codes_desc, row, column // 2, scales, None, row, column // 32, num_rows,
               width // 32, GROUP, False, FORM)  # fmt: skip
    if KEEP:
        # Read again: both words and results of a tile need more registers than three programs have.
        more = smem.index(1)._reinterpret(gl.int16, [2, 128, 64], codes_layout())
        store_int8(smem.index(1).load(row_layout()), more.index(0), kept_desc, row, (width + column) // 2,
                   kept_scales, row, (width + column) // 32, num_rows)  # fmt: skip
    tma.store_wait(0)
    smem._keep_alive()  # see `swiglu_quantized_backward_kernel`
    mbarrier.invalidate(full)  # here, see `quantize_tiles_kernel`


_launch_forward = Launcher(swiglu_quantized_forward_kernel, num_warps=WARPS, maxnreg=FORWARD_REGISTERS)


class Results(NamedTuple):
    """Of `swiglu_quantized`, for all M rows: codes [M, F] and their scales in a table (see `mxfp8.grouped`), and the
    hidden rows in MXINT8, [M, 2F] and the words of their scales, both empty if they are not kept.
    """

    codes: Tensor
    scales: Tensor
    kept: Tensor
    kept_scales: Tensor


def empty_results(num_rows: int, width: int, group: int, keep: bool, device: torch.device) -> Results:
    codes = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device)
    kept = empty_int8(num_rows, 2 * width, device) if keep else empty_int8(0, 0, device)
    return Results(codes, scales_like(codes, form_of(group, second=False)), *kept)


def swiglu_quantized(gate_up: Tensor, ends: Tensor, group: int, results: Results, first: int = 0) -> None:
    """Fill the part of `results` that comes from gate_up [m, 2F] bfloat16, their rows from `first` on.

    Both are multiples of 128. `ends` are those of all rows.
    """
    (part_rows, width), num_rows = (gate_up.shape[0], gate_up.shape[1] // 2), results.codes.shape[0]
    form, keep = form_of(group, second=False), results.kept.numel() > 0
    if gate_up.numel():
        _launch_forward(
            (part_rows // 128 * (width // 128), 1, 1),
            (gate_up.device, group, keep, part_rows // 128 % 16 == 0, part_rows == 128, *aligned(ends)),
            words_descriptor(gate_up),
            codes_descriptor(results.codes),
            codes_descriptor(results.kept if keep else results.codes),
            table_of(results.scales),
            results.kept_scales,
            ends,
            ends.shape[0],
            first,
            part_rows // 128,
            num_rows,
            width,
            group,
            form,
            keep,
        )


@gluon.jit
def _differentiate(gate, sigmoid, up, upstream):
    """(d gate, d up) of half of the words, float32."""
    silu = gate * sigmoid
    return upstream * up * (sigmoid + silu * (1.0 - sigmoid)), upstream * silu


@gluon.jit
def _chunk_weights(selections, weights, row, LAYOUT: gl.constexpr):
    selection = gl.load(selections + row + gl.arange(0, _CHUNK, gl.SliceLayout(1, LAYOUT)))
    return gl.load(weights + selection, mask=selection >= 0, other=0.0).to(gl.float32)


@gluon.jit
def _differentiate_chunk(gate_smem, up_smem, grad_smem, kept_smem, scales_smem, weight, partial, row, tile_columns,
                         CHUNK: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Rows CHUNK * 32... of the kept gate and up and of the gradient become those of d gate, d up and the weighted
    result.
    """
    kept_gate = kept_smem[0].slice(CHUNK * _CHUNK, _CHUNK, 0)
    kept_up = kept_smem[1].slice(CHUNK * _CHUNK, _CHUNK, 0)
    grad_smem = grad_smem.slice(CHUNK * _CHUNK, _CHUNK, 0)
    gate, more_gate = load_int8(kept_gate, scales_smem[0].slice(CHUNK * _CHUNK, _CHUNK, 1), LAYOUT)
    up, more_up = load_int8(kept_up, scales_smem[1].slice(CHUNK * _CHUNK, _CHUNK, 1), LAYOUT)
    grad = grad_smem.load(LAYOUT)
    weight = gl.expand_dims(weight, 1)
    sigmoid = sigmoid_of(gate)
    more = sigmoid_of(more_gate)
    result = pair(gate * sigmoid * up, more_gate * more * more_up)
    product = left_half(result) * left_half(grad) + right_half(result) * right_half(grad)
    grad_smem.store(pair(left_half(result) * weight, right_half(result) * weight))
    d_gate, d_up = _differentiate(gate, sigmoid, up, left_half(grad) * weight)
    d_gate_right, d_up_right = _differentiate(more_gate, more, more_up, right_half(grad) * weight)
    # The words of the last two chunks take the memory of what was kept, from its first row on.
    gate_smem.slice(CHUNK * _CHUNK, _CHUNK, 0).store(pair(d_gate, d_gate_right))
    up_smem.slice(CHUNK * _CHUNK, _CHUNK, 0).store(pair(d_up, d_up_right))
    rows = row + CHUNK * _CHUNK + gl.arange(0, _CHUNK, gl.SliceLayout(1, LAYOUT))
    gl.store(partial + rows.to(gl.int64) * tile_columns, gl.sum(product, 1))


@gluon.jit
def _store_gradient(words_smem, rows_desc, columns_desc, row, column, half, row_scales, column_scales, num_rows, width,
                    GROUP: gl.constexpr, FORM: gl.constexpr):  # fmt: skip
    """A tile of d gate (`half` 0) or d up (1), in both orientations."""
    along = words_smem.load(row_layout())
    across = words_smem.load(column_layout())
    buffers = words_smem._reinterpret(gl.int16, [2, 128, 64], codes_layout())
    line = half * width + column
    store_rows(along, buffers.index(0), rows_desc, row, line // 2, row_scales, None, row, line // 32, num_rows,
               width // 16, GROUP, False, FORM)  # fmt: skip
    store_columns(across, buffers.index(1), columns_desc, row, column + half * 64, column_scales, None, line,
                  row // 32, 2 * width, num_rows // 32, GROUP, False, FORM)  # fmt: skip


@gluon.jit(do_not_specialize=["num_groups"])
def swiglu_quantized_backward_kernel(
    kept_desc,
    kept_scales_desc,
    grad_desc,
    rows_desc,
    columns_desc,
    result_desc,
    selections,
    weights,
    ends,
    num_groups,
    row_scales,
    column_scales,
    result_scales,
    partial,
    num_rows,
    width,
    GROUP: gl.constexpr,
    FORM: gl.constexpr,
    RESULT_FORM: gl.constexpr,
):
    """One tile of the gradient of the result before the weights; see `swiglu_quantized_backward`."""
    row, column = tile_place(gl.program_id(0), num_rows // 128, width // 128)
    if row >= gl.load(ends + num_groups - 1):
        return
    # Three separate buffers: accesses to different ones need no barrier in between.
    gate_codes = gl.allocate_shared_memory(gl.int16, [2, 128, 64], codes_layout())
    up_codes = gl.allocate_shared_memory(gl.int16, [2, 128, 64], codes_layout())
    grad_smem = gl.allocate_shared_memory(gl.int32, [128, 64], words_layout())
    scales_smem = gl.allocate_shared_memory(gl.int32, [2, 1, 128], scale_words_layout())
    barriers = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = barriers.index(0)
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(
        full, 2 * kept_desc.block_type.nbytes + 2 * kept_scales_desc.block_type.nbytes + grad_desc.block_type.nbytes
    )
    _load_halves(kept_desc, row, column, width, gate_codes.index(1), up_codes.index(1), full)
    tma.async_copy_global_to_shared(grad_desc, [row, column // 2], full, grad_smem)
    tma.async_copy_global_to_shared(kept_scales_desc, [column // 128, row], full, scales_smem.index(0))
    tma.async_copy_global_to_shared(kept_scales_desc, [(width + column) // 128, row], full, scales_smem.index(1))
    gate_smem = gate_codes._reinterpret(gl.int32, [128, 64], words_layout())
    up_smem = up_codes._reinterpret(gl.int32, [128, 64], words_layout())
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0])
    weight = (
        _chunk_weights(selections, weights, row, LAYOUT),
        _chunk_weights(selections, weights, row + _CHUNK, LAYOUT),
        _chunk_weights(selections, weights, row + 2 * _CHUNK, LAYOUT),
        _chunk_weights(selections, weights, row + 3 * _CHUNK, LAYOUT),
    )
    mbarrier.wait(full, 0)
    kept_smem = (gate_codes.index(1), up_codes.index(1))
    kept_scales = (scales_smem.index(0), scales_smem.index(1))
    for chunk in gl.static_range(4):
        _differentiate_chunk(gate_smem, up_smem, grad_smem, kept_smem, kept_scales, weight[chunk],
                             partial + column // 128, row, width // 128, chunk, LAYOUT)  # fmt: skip
    _store_gradient(gate_smem, rows_desc, columns_desc, row, column, 0, row_scales, column_scales, num_rows, width,
                    GROUP, FORM)  # fmt: skip
    _store_gradient(up_smem, rows_desc, columns_desc, row, column, 1, row_scales, column_scales, num_rows, width, GROUP,
                    FORM)  # fmt: skip
    across = grad_smem.load(column_layout())
    buffers = grad_smem._reinterpret(gl.int16, [2, 128, 64], codes_layout())
    store_columns(across, buffers.index(0), result_desc, column, row // 2, result_scales, None, column,
                  row // 32, width, num_rows // 32, GROUP, False, RESULT_FORM)  # fmt: skip
    tma.store_wait(0)
    # Otherwise exchanges between threads would use the memory of the first two, which copies still read.
    gate_codes._keep_alive()
    up_codes._keep_alive()
    mbarrier.invalidate(full)  # here, see `quantize_tiles_kernel`


_launch_backward = Launcher(swiglu_quantized_backward_kernel, num_warps=WARPS, maxnreg=BACKWARD_REGISTERS)


def swiglu_quantized_backward(
    kept: Tensor,
    kept_scales: Tensor,
    grad: Tensor,
    selections: Tensor,
    weights: Tensor,
    ends: Tensor,
    group: int,
    overwrite: bool,
    result_form: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `weights * swiglu(gate_up)`, and the weighted result again.

    Args:
        kept, kept_scales: gate_up [M, 2F] as `swiglu_quantized` keeps it.
        grad: [M, F] bfloat16, the gradient of the result divided by the row's weight; overwritten.
        selections: [M] int32, which of `weights` [N, k] belongs to each row, -1 for none.
        overwrite: the codes of d gate_up's rows take the memory of `kept`.
        result_form: of the scales of the weighted result, see `mxfp8.grouped`.
    Returns:
        Of d gate_up: codes [M, 2F] and scales of its rows, pairs [M, 2F] (see `mxfp8.grouped`) in the memory of `grad`
        and scales of its columns; of the weighted result: codes [F, M], scales; and partial [M, F / 128] float32, whose
        sum over a row is the gradient of its weight.
    """
    num_rows, width = grad.shape
    pairs = grad.view(torch.float8_e4m3fn)
    rows = (
        kept.view(torch.float8_e4m3fn) if overwrite else grad.new_empty(num_rows, 2 * width, dtype=torch.float8_e4m3fn)
    )
    form = form_of(group, second=False)
    row_scales = grad.new_empty(width // 64, num_rows, dtype=TABLES[form])
    column_scales = grad.new_empty(num_rows // 128, 2 * width, dtype=TABLES[form])
    result_codes = grad.new_empty(width, num_rows, dtype=torch.float8_e4m3fn)
    result_scales = scales_like(result_codes, result_form)
    partial = grad.new_empty(num_rows, width // 128, dtype=torch.float32)
    if grad.numel():
        weights = weights.contiguous()
        _launch_backward(
            (num_rows // 128 * (width // 128), 1, 1),
            (grad.device, group, result_form, weights.dtype, *aligned(selections, weights, ends)),
            codes_descriptor(kept),
            scales_descriptor(kept_scales),
            words_descriptor(grad),
            codes_descriptor(rows),
            codes_descriptor(pairs),
            codes_descriptor(result_codes),
            selections,
            weights,
            ends,
            ends.shape[0],
            table_of(row_scales),
            table_of(column_scales),
            table_of(result_scales),
            partial,
            num_rows,
            width,
            group,
            form,
            result_form,
        )
    return rows, row_scales, pairs, column_scales, result_codes, result_scales, partial
