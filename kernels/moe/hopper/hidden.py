"""From the rows of the experts' first product to those of the second one: with SwiGLU in the product, or in passes."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.moe.hopper import swiglu_product, swiglu_product_bf16
from kernels.moe.hopper.swiglu import swiglu
from kernels.moe.hopper.swiglu_quantized import Results, empty_results, swiglu_quantized
from kernels.mxfp8.grouped import Operand, Quantized, fprop, part_of

Hidden = tuple[Operand, Tensor, Tensor]
_LARGE = 2**17  # rows of which no more than half are there in bfloat16 while the rest is kept in MXINT8


def in_the_product(rows: Operand, gate_up: Operand, ends: Tensor, keep: bool) -> Hidden:
    """SwiGLU over h [M, 2F], the rows [M, D] times their experts' gate_up [E, 2F, D].

    Returns:
        The result [M, F], quantised as the rows are; h and the scales of h if it is kept, otherwise empty tensors. Of
        bfloat16 rows h is bfloat16 and has no scales, of quantised ones it is in MXINT8.
    """
    if isinstance(rows, Quantized):
        assert isinstance(gate_up, Quantized)
        return _hidden_of(swiglu_product.hidden(rows, gate_up, ends, keep), rows.group)
    assert isinstance(rows, Tensor)
    assert isinstance(gate_up, Tensor)
    return (*swiglu_product_bf16.hidden(rows, gate_up, ends, keep), _no_scales(rows))


def in_passes(rows: Operand, gate_up: Operand, ends: Tensor, keep: bool) -> Hidden:
    """As `in_the_product`.

    Many quantised rows that are kept come in two parts, so that h in bfloat16 is never there as a whole beside them.
    """
    if not isinstance(rows, Quantized):
        h = fprop(rows, gate_up, ends)
        return swiglu(h, ends), h if keep else h.new_empty(0, h.shape[1]), _no_scales(h)
    num_rows, double = rows.codes.shape[0], gate_up[0].shape[1]
    results = empty_results(num_rows, double // 2, rows.group, keep, ends.device)
    half = num_rows // 256 * 128
    for first, last in [(0, half), (half, num_rows)] if keep and num_rows >= _LARGE else [(0, num_rows)]:
        if last - first == num_rows:
            h = fprop(rows, gate_up, ends)
        else:
            h = fprop(part_of(rows, first, last), gate_up, (ends - first).clamp_(0, last - first))
        swiglu_quantized(h, ends, rows.group, results, first)
        del h
    return _hidden_of(results, rows.group)


def _hidden_of(results: Results, group: int) -> Hidden:
    return Quantized(results.codes, results.scales, group), results.kept, results.kept_scales


def _no_scales(like: Tensor) -> Tensor:
    return like.new_empty(0, 0, dtype=torch.int32)
