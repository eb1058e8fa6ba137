"""SwiGLU over rows in expert order, forward and backward, with MXFP8 results quantised where they are made; Gluon.

The result is rounded to bfloat16 before it is quantised, as if it had been written and read again. Tiles are loaded by
TMA. The backward computes in place in shared memory, where each of its three tiles is quantised along rows and columns;
the codes are stored from the memory of the tile's words.

The gradient of the hidden rows has as many bytes in codes of both orientations as these rows had in bfloat16, so it may
overwrite them: in place of the 256 bytes of a row of a tile, there are 128 codes of the row and then 128 codes of a
column of the tile. A tile's codes cover exactly the memory that the tile was read from.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.core.launch import Launcher, aligned
from kernels.mxfp8.grouped import TABLES, form_of
from kernels.mxfp8.hopper.quantize.blocks import tile_place
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
def _sigmoid(x):
    """Within a few ulp, and 0 where it is below 2^-126."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 a;
        mul.f32 a, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 a, a;
        add.f32 a, a, 0f3F800000;
        rcp.approx.ftz.f32 $0, a;
        }""",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _left(words):
    return (words << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _right(words):
    return (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _pair(left, right):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [left, right], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _load_halves(desc, row, column, width, gate_smem, up_smem, full):
    """Start to read the tiles of gate and of up."""
    tma.async_copy_global_to_shared(desc, [row, column // 2], full, gate_smem)
    tma.async_copy_global_to_shared(desc, [row, (width + column) // 2], full, up_smem)


@gluon.jit(do_not_specialize=["num_groups"])
def swiglu_quantized_forward_kernel(
    hidden_desc, codes_desc, scales, ends, num_groups, num_rows, width, GROUP: gl.constexpr, FORM: gl.constexpr
):
    """One tile of the result."""
    row, column = tile_place(gl.program_id(0), num_rows // 128, width // 128)
    if row >= gl.load(ends + num_groups - 1):
        return
    smem = gl.allocate_shared_memory(gl.int32, [2, 128, 64], words_layout())
    barriers = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = barriers.index(0)
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, 2 * hidden_desc.block_type.nbytes)
    _load_halves(hidden_desc, row, column, width, smem.index(0), smem.index(1), full)
    mbarrier.wait(full, 0)
    gate = smem.index(0).load(row_layout())
    up = smem.index(1).load(row_layout())
    left = _left(gate) * _sigmoid(_left(gate)) * _left(up)
    right = _right(gate) * _sigmoid(_right(gate)) * _right(up)
    buffers = smem.index(0)._reinterpret(gl.int16, [2, 128, 64], codes_layout())
    store_rows(_pair(left, right), buffers.index(0), codes_desc, row, column // 2, scales, scales, row, column // 32,
               num_rows, width // 32, GROUP, False, FORM)  # fmt: skip
    tma.store_wait(0)
    mbarrier.invalidate(full)  # here, see `quantize_tiles_kernel`


_launch_forward = Launcher(swiglu_quantized_forward_kernel, num_warps=WARPS, maxnreg=FORWARD_REGISTERS)


def swiglu_quantized(gate_up: Tensor, ends: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """gate_up [M, 2F] bfloat16 -> codes [M, F] and their scales, in a table (see `mxfp8.grouped`)."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    codes = gate_up.new_empty(num_rows, width, dtype=torch.float8_e4m3fn)
    form = form_of(group, second=False)
    scales = scales_like(codes, form)
    if codes.numel():
        _launch_forward(
            (num_rows // 128 * (width // 128), 1, 1),
            (codes.device, group, *aligned(ends)),
            words_descriptor(gate_up),
            codes_descriptor(codes),
            table_of(scales),
            ends,
            ends.shape[0],
            num_rows,
            width,
            group,
            form,
        )
    return codes, scales


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
def _differentiate_chunk(
    gate_smem, up_smem, grad_smem, weight, partial, row, tile_columns, CHUNK: gl.constexpr, LAYOUT: gl.constexpr
):
    """Rows CHUNK * 32... of the tiles of gate, up and gradient become those of d gate, d up and the weighted result."""
    gate_smem = gate_smem.slice(CHUNK * _CHUNK, _CHUNK, 0)
    up_smem = up_smem.slice(CHUNK * _CHUNK, _CHUNK, 0)
    grad_smem = grad_smem.slice(CHUNK * _CHUNK, _CHUNK, 0)
    gate = gate_smem.load(LAYOUT)
    up = up_smem.load(LAYOUT)
    grad = grad_smem.load(LAYOUT)
    weight = gl.expand_dims(weight, 1)
    sigmoid = _sigmoid(_left(gate))
    more = _sigmoid(_right(gate))
    result = _pair(_left(gate) * sigmoid * _left(up), _right(gate) * more * _right(up))
    product = _left(result) * _left(grad) + _right(result) * _right(grad)
    grad_smem.store(_pair(_left(result) * weight, _right(result) * weight))
    d_gate, d_up = _differentiate(_left(gate), sigmoid, _left(up), _left(grad) * weight)
    d_gate_right, d_up_right = _differentiate(_right(gate), more, _right(up), _right(grad) * weight)
    gate_smem.store(_pair(d_gate, d_gate_right))
    up_smem.store(_pair(d_up, d_up_right))
    rows = row + CHUNK * _CHUNK + gl.arange(0, _CHUNK, gl.SliceLayout(1, LAYOUT))
    gl.store(partial + rows.to(gl.int64) * tile_columns, gl.sum(product, 1))


@gluon.jit
def _store_gradient(words_smem, pairs_desc, row, column, row_scales, column_scales, num_rows, width,
                    GROUP: gl.constexpr, FORM: gl.constexpr):  # fmt: skip
    """A tile of d gate or d up at `column` of the 2 * width, in both orientations."""
    along = words_smem.load(row_layout())
    across = words_smem.load(column_layout())
    buffers = words_smem._reinterpret(gl.int16, [2, 128, 64], codes_layout())
    store_rows(along, buffers.index(0), pairs_desc, row, column, row_scales, row_scales, row, column // 32, num_rows,
               width // 16, GROUP, False, FORM)  # fmt: skip
    store_columns(across, buffers.index(1), pairs_desc, row, column + 64, column_scales, column_scales, column,
                  row // 32, 2 * width, num_rows // 32, GROUP, False, FORM)  # fmt: skip


@gluon.jit(do_not_specialize=["num_groups"])
def swiglu_quantized_backward_kernel(
    hidden_desc,
    grad_desc,
    pairs_desc,
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
    gate_smem = gl.allocate_shared_memory(gl.int32, [128, 64], words_layout())
    up_smem = gl.allocate_shared_memory(gl.int32, [128, 64], words_layout())
    grad_smem = gl.allocate_shared_memory(gl.int32, [128, 64], words_layout())
    barriers = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = barriers.index(0)
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, 2 * hidden_desc.block_type.nbytes + grad_desc.block_type.nbytes)
    _load_halves(hidden_desc, row, column, width, gate_smem, up_smem, full)
    tma.async_copy_global_to_shared(grad_desc, [row, column // 2], full, grad_smem)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0])
    weight = (
        _chunk_weights(selections, weights, row, LAYOUT),
        _chunk_weights(selections, weights, row + _CHUNK, LAYOUT),
        _chunk_weights(selections, weights, row + 2 * _CHUNK, LAYOUT),
        _chunk_weights(selections, weights, row + 3 * _CHUNK, LAYOUT),
    )
    mbarrier.wait(full, 0)
    for chunk in gl.static_range(4):
        _differentiate_chunk(gate_smem, up_smem, grad_smem, weight[chunk], partial + column // 128, row, width // 128,
                             chunk, LAYOUT)  # fmt: skip
    _store_gradient(gate_smem, pairs_desc, row, column, row_scales, column_scales, num_rows, width, GROUP, FORM)
    _store_gradient(up_smem, pairs_desc, row, width + column, row_scales, column_scales, num_rows, width, GROUP,
                    FORM)  # fmt: skip
    across = grad_smem.load(column_layout())
    buffers = grad_smem._reinterpret(gl.int16, [2, 128, 64], codes_layout())
    store_columns(across, buffers.index(0), result_desc, column, row // 2, result_scales, result_scales, column,
                  row // 32, width, num_rows // 32, GROUP, False, RESULT_FORM)  # fmt: skip
    tma.store_wait(0)
    # Otherwise exchanges between threads would use the memory of the first two, which copies still read.
    gate_smem._keep_alive()
    up_smem._keep_alive()
    mbarrier.invalidate(full)  # here, see `quantize_tiles_kernel`


_launch_backward = Launcher(swiglu_quantized_backward_kernel, num_warps=WARPS, maxnreg=BACKWARD_REGISTERS)


def swiglu_quantized_backward(
    gate_up: Tensor,
    grad: Tensor,
    selections: Tensor,
    weights: Tensor,
    ends: Tensor,
    group: int,
    overwrite: bool,
    result_form: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `weights * swiglu(gate_up)`, and the weighted result again.

    Args:
        gate_up: [M, 2F] bfloat16; grad: [M, F] bfloat16, the gradient of the result divided by the row's weight.
        selections: [M] int32, which of `weights` [N, k] belongs to each row, -1 for none.
        overwrite: the codes of d gate_up take the memory of gate_up.
        result_form: of the scales of the weighted result, see `mxfp8.grouped`.
    Returns:
        Of d gate_up: pairs [M, 4F] (see `mxfp8.grouped`), tables of the scales of its rows and of its columns; of the
        weighted result: codes [F, M], scales; and partial [M, F / 128] float32, whose sum over a row is the gradient
        of its weight.
    """
    num_rows, width = grad.shape
    pairs = (
        gate_up.view(torch.float8_e4m3fn)
        if overwrite
        else gate_up.new_empty(num_rows, 4 * width, dtype=torch.float8_e4m3fn)
    )
    form = form_of(group, second=False)
    row_scales = gate_up.new_empty(width // 64, num_rows, dtype=TABLES[form])
    column_scales = gate_up.new_empty(num_rows // 128, 2 * width, dtype=TABLES[form])
    result_codes = grad.new_empty(width, num_rows, dtype=torch.float8_e4m3fn)
    result_scales = scales_like(result_codes, result_form)
    partial = grad.new_empty(num_rows, width // 128, dtype=torch.float32)
    if grad.numel():
        weights = weights.contiguous()
        _launch_backward(
            (num_rows // 128 * (width // 128), 1, 1),
            (grad.device, group, result_form, weights.dtype, *aligned(selections, weights, ends)),
            words_descriptor(gate_up),
            words_descriptor(grad),
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
    return pairs, row_scales, column_scales, result_codes, result_scales, partial
