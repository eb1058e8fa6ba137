"""Products of each row when one of three operands is narrow, as in pooling by a few weights; Triton.

    wide [N, W], narrow [N, T], matrix [B, W, T], and for each row b of places, with T of a few columns
    to narrow:  narrow[row b] = wide[row b] @ matrix[b]
    to wide:    wide[row b] = narrow[row b] @ matrix[b]^T
    to matrix:  matrix[b] = wide[row b]^T @ narrow[row b]

Nearly all the time is spent on reading and writing `wide`, so one kernel computes any two of the three results and
reads their common operand once: the two gradients of each product are two of them. A program has a part of a row and
the whole width, or some columns where no result is a sum over them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned
from kernels.core.triton import block_width, cdiv, flat, near, precision_of, steps_of
from kernels.jagged.triton.parts import PART, join, num_parts, part_of, part_size, slots

MAX_NARROW = 16  # columns of the least tile that tensor cores take
MAX_WIDE_BYTES = 1024  # bytes of a row of `wide`: three tiles must fit into shared memory


@triton.jit(do_not_specialize=["num_rows"])
def _bmm_narrow_kernel(
    wide,
    narrow,
    matrix,
    offsets,
    wide_out,
    narrow_out,
    matrix_out,
    parts,
    num_rows,
    W,
    wide_stride,
    matrix_stride_b,
    matrix_stride_w,
    matrix_stride_t,
    out_stride_w,
    out_stride_t,
    NARROW_STRIDE: tl.constexpr,
    T: tl.constexpr,
    TO_NARROW: tl.constexpr,
    TO_WIDE: tl.constexpr,
    TO_MATRIX: tl.constexpr,
    PART: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCKS_W: tl.constexpr,
):
    # Neighbours have the blocks of columns of one part.
    program = tl.program_id(0) // BLOCKS_W
    row, begin, end, first, last, slot = part_of(
        offsets, num_rows, program, PART, STEPS, tl.num_programs(0) // BLOCKS_W
    )
    idle = first >= last
    if TO_MATRIX:
        # The matrix of an empty row is zero.
        idle = idle & (program >= num_rows)
    if idle:
        return
    tall = (last - first).to(tl.int32)
    i = tl.arange(0, BLOCK_L)
    w = tl.program_id(0) % BLOCKS_W * BLOCK_W + tl.arange(0, BLOCK_W)
    t = tl.arange(0, BLOCK_T)
    # 64-bit arithmetic for the corner of a part, 32-bit within it.
    wide_at = wide + first * wide_stride
    narrow_at = narrow + first * NARROW_STRIDE
    wide_out += first * W
    narrow_out += first * T
    if TO_NARROW or TO_WIDE:
        at = matrix + row * matrix_stride_b + t[:, None] * matrix_stride_t + w[None, :] * matrix_stride_w
        weights = tl.load(at, mask=(t < T)[:, None] & (w < W)[None, :], other=0)
    total = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    for start in range(0, tall, BLOCK_L):
        place = start + i
        mask = (place < tall)[:, None] & (w < W)[None, :]
        if TO_NARROW or TO_MATRIX:
            x = tl.load(wide_at + place[:, None] * wide_stride + w[None, :], mask=mask, other=0)
        if TO_WIDE or TO_MATRIX:
            few = (place < tall)[:, None] & (t < T)[None, :]
            s = tl.load(narrow_at + place[:, None] * NARROW_STRIDE + t[None, :], mask=few, other=0)
        if TO_MATRIX:
            total = tl.dot(tl.trans(s), x, total, input_precision=PRECISION)
        if TO_NARROW:
            result = tl.dot(weights, tl.trans(x), input_precision=PRECISION)
            few = (t < T)[:, None] & (place < tall)[None, :]
            tl.store(narrow_out + place[None, :] * T + t[:, None], result.to(narrow_out.dtype.element_ty), mask=few)
        if TO_WIDE:
            result = tl.dot(s, weights, input_precision=PRECISION)
            tl.store(wide_out + place[:, None] * W + w[None, :], result.to(wide_out.dtype.element_ty), mask=mask)
    if TO_MATRIX:
        whole = end - begin <= PART
        inside = (t < T)[:, None] & (w < W)[None, :]
        at = t[:, None] * out_stride_t + w[None, :] * out_stride_w
        tl.store(matrix_out + row * T * W + at, total.to(matrix_out.dtype.element_ty), mask=inside & whole)
        tl.store(parts + slot * T * W + at, total, mask=inside & ~whole)


def serves(wide: int, narrow: int, dtype: torch.dtype, to: tuple[str, ...]) -> bool:
    """Whether `products` is the fastest way to the results `to` from operands of these widths.

    A matrix by itself is faster a block of columns at a time, and so is a narrow result from float32, whose tiles of a
    whole width are so large that few are in flight. Sums over a whole width as three tf32 products do not fit into
    registers.
    """
    if not narrow <= min(MAX_NARROW, wide):
        return False
    if wide * dtype.itemsize > MAX_WIDE_BYTES and to != ("wide", "matrix"):
        return False
    if len(to) == 1:
        return to == ("wide",) or (to == ("narrow",) and dtype is not torch.float32)
    return precision_of(dtype) != "tf32x3"


def config(dtype: torch.dtype, width: int, to: tuple[str, ...]) -> dict[str, int]:
    # A narrow result is a sum over the whole width; without one, programs have some columns of more places each.
    block_w = block_width(width) if "narrow" in to else block_width(width, 256 // dtype.itemsize)
    # Two of three stages of 16 KB are in flight while the third is multiplied.
    block_l = max(16, 16384 // (dtype.itemsize * block_w))
    return {
        "BLOCK_L": min(block_l, 64),
        "BLOCK_W": block_w,
        "BLOCK_T": MAX_NARROW,
        "BLOCKS_W": cdiv(width, block_w),
        "num_warps": 4,
        "num_stages": 3,
    }


def products(
    offsets: Tensor,
    *,
    wide: Tensor | None = None,
    narrow: Tensor | None = None,
    matrix: Tensor | None = None,
    to: tuple[str, ...],
    longest: int = 0,
    transposed: bool = False,
) -> dict[str, Tensor]:
    """The results named in `to`, 'narrow', 'wide' or 'matrix', from the operands that they need.

    A resulting matrix is [B, W, T], or with `transposed` [B, T, W], contiguous either way; `longest` is then the length
    that rows are expected not to exceed, see `part_size`. Given wide and narrow have rows of any stride, a given matrix
    has any strides.
    """
    num_rows = offsets.shape[0] - 1
    like = narrow if wide is None else wide
    total = like.shape[0]
    width = matrix.shape[1] if wide is None else wide.shape[1]
    few = matrix.shape[2] if narrow is None else narrow.shape[1]
    out = {}
    if "wide" in to:
        out["wide"] = like.new_empty(total, width)
    if "narrow" in to:
        out["narrow"] = like.new_empty(total, few)
    if "matrix" in to:
        out["matrix"] = like.new_empty(num_rows, *((few, width) if transposed else (width, few)))
    if all(tensor.numel() == 0 for tensor in out.values()):
        return out
    if total == 0 or width == 0 or few == 0:
        return {name: tensor.zero_() for name, tensor in out.items()}
    offsets, matrix = offsets.contiguous(), None if matrix is None else near(matrix)
    wide, narrow = (like if tensor is None else flat(tensor) for tensor in (wide, narrow))
    part = part_size(longest) if "matrix" in to else PART
    parts = slots(like, total if "matrix" in to else 0, part, few * width)
    inputs = (wide, narrow, like if matrix is None else matrix, offsets)
    results = [out.get(name, like) for name in ("wide", "narrow", "matrix")]
    *blocks, warps, stages = config(like.dtype, width, to).values()
    numbers = (
        width, wide.stride(0), *((0, 0, 0) if matrix is None else matrix.stride()),
        *((1, width) if transposed else (few, 1)), narrow.stride(0), few, "narrow" in to, "wide" in to, "matrix" in to,
        part, steps_of(num_rows), precision_of(like.dtype), *blocks,
    )  # fmt: skip
    _launch(
        (num_parts(total, num_rows, part) * blocks[-1], 1, 1),
        (like.device, *[tensor.dtype for tensor in inputs], *aligned(*inputs, like), *numbers, warps, stages),
        *inputs, *results, parts, num_rows, *numbers, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if "matrix" in to:
        join(parts, offsets, out["matrix"], total, part)
    return out


_launch = Launcher(_bmm_narrow_kernel)
