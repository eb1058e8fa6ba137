"""The experts' first product and SwiGLU in two passes, for recipes and sizes that have no product with SwiGLU in it."""

from __future__ import annotations

from torch import Tensor

from kernels.moe.hopper.swiglu_quantized import Results, empty_results, swiglu_quantized
from kernels.mxfp8.grouped import Operand, Quantized, fprop, part_of

_LARGE = 2**17  # rows of which no more than half are there in bfloat16 while the rest is kept in MXINT8


def hidden(rows: Quantized, gate_up: Operand, ends: Tensor, width: int, keep: bool) -> Results:
    """See `swiglu_product.hidden`. Of many rows that are kept, in two parts, so that h in bfloat16 is never there as a
    whole beside what is kept.
    """
    num_rows = rows.codes.shape[0]
    results = empty_results(num_rows, width, rows.group, keep, ends.device)
    half = num_rows // 256 * 128
    for first, last in [(0, half), (half, num_rows)] if keep and num_rows >= _LARGE else [(0, num_rows)]:
        if last - first == num_rows:
            h = fprop(rows, gate_up, ends)
        else:
            h = fprop(part_of(rows, first, last), gate_up, (ends - first).clamp_(0, last - first))
        swiglu_quantized(h, ends, rows.group, results, first)
        del h
    return results
