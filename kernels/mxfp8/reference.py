"""MXFP8: the format, and the specification of every backend here.

**The format** (OCP Microscaling Formats v1.0). 32 consecutive elements share one scale. An element is E4M3: sign, 4
exponent bits, 3 mantissa bits, largest value 448, smallest normal 2^-6, smallest subnormal 2^-9, no infinity, NaN is
0x7f or 0xff. A scale is E8M0: one byte b that stands for 2^(b - 127), with 255 for NaN; it has no sign, no mantissa and
no zero. So an element costs 8.25 bits, and multiplying by its scale only moves an exponent: the single rounding of the
whole procedure is the one to E4M3, at most 2^-4 of an element's value while it stays normal.

**The scale** is rounded up ("RCEIL"): the smallest power of two S with amax / S <= 448, amax being the largest
magnitude of the block. With amax = m * 2^e and 1 <= m < 2, and since 448 = 1.75 * 2^8,

    S = 2^(e - 8) if m <= 1.75 else 2^(e - 7)

which is read off the bits of a float32: no logarithm, and no division whose rounding could move an exact boundary.
Nothing saturates. Rounding down, as the OCP text suggests, would clip up to an eighth of a block's range and is known
to make long trainings diverge. S is at least 2^-127; a block of zeros is not a special case: its scale byte is 0 and
its codes are 0. A block that holds a NaN or an infinity gets scale byte 255 and NaN codes and
dequantises to 32 NaNs, so that a broken value is seen and not clipped.

**The reduction axis.** A matrix product can only use scales that are constant along the blocks of its reduction axis,
so the two operands of each product are blocked along it, and one layer quantises three tensors six times
(Y = X W^T, X [M, K], W [N, K]):

    product              reduces over   operands, blocks along
    fprop  Y  = X W^T    K              X along K, W along K
    dgrad  dX = dY W     N              dY along N, W along N
    wgrad  dW = dY^T X   M              dY along M, X along M

The transpose of a quantised tensor is not the quantised transpose, and quantising twice adds two errors: every
operand is quantised from the high-precision tensor. Weights stay float32 masters and are quantised where they are used.

**On a chip without block-scaled matrix instructions** the same numbers come from multiplying dequantised operands: an
element times its scale has four significant bits, so bfloat16 holds it exactly, and accumulation is in float32.

**Groups of 128** (`block_size=128`, recipe "mxfp8_g128"). Four neighbouring blocks take the scale of the largest, so
that the tensor is MXFP8 like any other and a chip without block-scaled instructions needs to scale its sums only once
per 128 terms. e4m3 is a floating format: a scale that is too large by a power of two costs nothing until an element
becomes subnormal, 2^14 below the largest of its group. With `square` one scale serves 128 x 128 elements (rows are
those of the last two axes), except where the maxima of its rows differ by more than 2^10: there every row has its own,
so that small rows do not lose what large ones do not need. Rows of zeros don't count. Squares are for the second
operand of each product, W and in wgrad X, so that the sums of 128 outputs are scaled alike.

Blocks start at index 0 of the axis. When its length is not a multiple of 32 the last block is short, as if zeros
followed; codes keep the length of the input and scales have ceil(length / 32) entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 32
GROUPS = (32, 128)
SPREAD = 10  # powers of two between the row maxima that may share a scale of a square
SCALE_NAN = 255
TILE_ROWS, TILE_COLUMNS = 128, 4

# On the CPU even if the default device is another one during the import.
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()


class MXTensor(NamedTuple):
    """Codes float8_e4m3fn of the input's shape; scales uint8, equal in shape but for ceil(length / 32) along `axis`."""

    codes: Tensor
    scales: Tensor
    axis: int


def scale_bytes(amax: Tensor) -> Tensor:
    """Biased E8M0 exponents, uint8, of block maxima float32 >= 0: the RCEIL rule of the module docstring."""
    bits = amax.view(torch.int32)
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF  # a NaN may carry a sign
    above_1_75 = mantissa > 0x600000
    # Subnormal maxima have exponent field 0 and end at the lower clamp like every amax up to 1.75 * 2^-119.
    rounded_up = (exponent - 8 + above_1_75).clamp(min=0)
    return torch.where(exponent == 255, SCALE_NAN, rounded_up).to(torch.uint8)


def quantize(x: Tensor, axis: int, group: int = BLOCK, square: bool = False) -> MXTensor:
    axis = axis % x.dim()
    length = x.shape[axis]
    blocks = _blocks(x.float(), axis)
    amax = blocks.abs().amax(axis + 1)
    if group != BLOCK:
        # The other of the last two axes.
        amax = _group_maxima(amax, axis, group, 2 * x.dim() - 3 - axis if square else None)
    scales = scale_bytes(amax)
    # 2^(127 - b) is the E8M0 byte 254 - b, and NaN's 255 maps to itself modulo 256. The product is exact, and at most
    # 448 by the choice of the scale, so that the cast (round to nearest even) never has to saturate.
    codes = (blocks * _power_of_two(254 - scales).unsqueeze(axis + 1)).to(torch.float8_e4m3fn)
    return MXTensor(codes.flatten(axis, axis + 1).narrow(axis, 0, length), scales, axis)


def _group_maxima(amax: Tensor, axis: int, group: int, square_axis: int | None) -> Tensor:
    """Block maxima -> those of their groups of `group` elements along `axis`, or of the squares, in the same shape."""
    along = group // BLOCK
    wide = _blocks(amax, axis, along).amax(axis + 1).repeat_interleave(along, axis).narrow(axis, 0, amax.shape[axis])
    if square_axis is None:
        return wide
    rows = _blocks(wide, square_axis, group)
    largest = rows.amax(square_axis + 1, keepdim=True)
    smallest = rows.where(rows > 0, torch.inf).amin(square_axis + 1, keepdim=True)
    spread = _exponent(largest) - _exponent(smallest)
    shared = rows.where(spread > SPREAD, largest).flatten(square_axis, square_axis + 1)
    return shared.narrow(square_axis, 0, amax.shape[square_axis])


def _exponent(magnitude: Tensor) -> Tensor:
    return magnitude.contiguous().view(torch.int32) >> 23 & 0xFF


def dequantize(quantized: MXTensor, dtype: torch.dtype) -> Tensor:
    codes, scales, axis = quantized
    blocks = _blocks(_decode(codes), axis) * _power_of_two(scales).unsqueeze(axis + 1)
    return blocks.flatten(axis, axis + 1).narrow(axis, 0, codes.shape[axis]).to(dtype)


def _decode(codes: Tensor) -> Tensor:
    """The float32 values of E4M3 codes."""
    if codes.device.type != "cpu":
        return codes.float()
    # PyTorch's cast from float8 is scalar code on the CPU, five times slower than looking the 256 values up.
    return _E4M3_VALUES.index_select(0, codes.view(torch.uint8).int().flatten()).view(codes.shape)


def _power_of_two(scales: Tensor) -> Tensor:
    """2^(b - 127) in float32, from its bits: not all compilers support E8M0."""
    exponents = scales.int()
    bits = (exponents << 23).masked_fill(exponents == 0, 1 << 22).masked_fill(exponents == SCALE_NAN, 0x7FC00000)
    return bits.view(torch.float32)


def _blocks(x: Tensor, axis: int, size: int = BLOCK) -> Tensor:
    """[..., K, ...] -> [..., ceil(K / size), size, ...], zeros after the end."""
    missing = -x.shape[axis] % size
    after = x.dim() - 1 - axis
    return pad(x, (0, 0) * after + (0, missing)).unflatten(axis, (-1, size))


def swizzle_scales(scales: Tensor) -> Tensor:
    """[..., rows, K / 32] uint8 -> [..., bytes]: the tiles of 128 rows x 4 scales that tcgen05 block-scaled MMA reads.

    Within a tile of 512 bytes the scale of (row r, column c) lies at (r % 32) * 16 + (r // 32) * 4 + c; tiles are
    row-major, and rows and columns are padded to whole tiles with byte 0 (2^-127, harmless with zero codes).
    """
    *batch, rows, columns = scales.shape
    tiles = pad(scales, (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS))
    tiles = tiles.unflatten(-1, (-1, TILE_COLUMNS)).unflatten(-3, (-1, TILE_ROWS // 32, 32))
    row_block, row_group, row, column_block, column = range(len(batch), len(batch) + 5)
    order = (*range(len(batch)), row_block, column_block, row, row_group, column)
    return tiles.permute(order).flatten(len(batch))


def unswizzle_scales(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle_scales`: [..., bytes] -> [..., rows, columns]."""
    batch = swizzled.shape[:-1]
    row_blocks, column_blocks = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    tiles = swizzled.view(*batch, row_blocks, column_blocks, 32, TILE_ROWS // 32, TILE_COLUMNS)
    row_block, column_block, row, row_group, column = range(len(batch), len(batch) + 5)
    order = (*range(len(batch)), row_block, row_group, row, column_block, column)
    full = tiles.permute(order).reshape(*batch, row_blocks * TILE_ROWS, column_blocks * TILE_COLUMNS)
    return full[..., :rows, :columns]
