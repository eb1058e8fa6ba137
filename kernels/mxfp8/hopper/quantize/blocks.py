"""Quantising a tile of 128 x 128 elements in registers, along rows, along columns or both; device functions in Gluon.

A thread holds R rows of 8 neighbouring columns. That serves both orientations without a transposition through shared
memory: a row of 32 columns lies in four lanes, and R elements of a column lie in one thread, which are R consecutive
bytes of the transposed codes. Along columns, the tile's registers are only in another order.

Shared with `moe`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.mxfp8 import reference

TILE = 128  # rows and columns
_TILE = gl.constexpr(TILE)
# Row maxima of a square may differ by this many powers of two before each row gets its own scale: e4m3 keeps its
# precision over 14 of them, so the smallest row has 4 left for differences within it.
SPREAD = gl.constexpr(reference.SPREAD)
# Rows of tiles that programs take together. Codes of rows and of columns run across each other in memory: if the tiles
# in flight form a square, both are written in long pieces.
_BAND = gl.constexpr(16)


@gluon.jit
def tile_place(tile, tile_rows, tile_columns, BAND: gl.constexpr = _BAND):
    """(first row, first column) of a tile by its number; BAND rows of tiles are taken together.

    A program has one tile: programs with more would drift apart, and the tiles in flight with them.
    """
    band = tile // (BAND * tile_columns)
    inside = tile - band * (BAND * tile_columns)
    rows = gl.minimum(tile_rows - band * BAND, BAND)
    return (band * BAND + inside % rows) * 128, inside // rows * 128


@gluon.constexpr_function
def tile_layout(rows):
    """[128, 128]: `rows` x 8 elements a thread, registers along rows of the tile."""
    return gl.BlockedLayout([rows, 8], [8, 4], [16 // rows, 4], [1, 0])


@gluon.constexpr_function
def column_layout(rows):
    """The same elements in the same threads, registers along columns of the tile."""
    registers = [[1 << bit, 0] for bit in range(rows.bit_length() - 1)] + [[0, 1], [0, 2], [0, 4]]
    lanes = [[0, 8], [0, 16], [rows, 0], [2 * rows, 0], [4 * rows, 0]]
    warps = [[0, 32], [0, 64]] + [[8 * rows << bit, 0] for bit in range((16 // rows).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [128, 128])


@gluon.jit
def tile_offsets(stride, R: gl.constexpr):
    """(row, column, offset) of the elements of a tile whose rows are `stride` apart."""
    LAYOUT: gl.constexpr = tile_layout(R)
    return _offsets(stride, LAYOUT)


@gluon.jit
def _offsets(stride, LAYOUT: gl.constexpr):
    row = gl.expand_dims(gl.arange(0, _TILE, gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, _TILE, gl.SliceLayout(0, LAYOUT)), 0)
    return row, column, row.to(gl.int64) * stride + column


@gluon.jit
def _magnitude_bits(x):
    """Magnitudes of float32 as integers, which are in the same order, with NaN above infinity."""
    return x.to(gl.int32, bitcast=True) & 0x7FFFFFFF


@gluon.jit
def scale_bytes_of(bits):
    """The RCEIL rule of `reference.scale_bytes` on magnitude bits."""
    exponent = bits >> 23
    rounded_up = gl.maximum(exponent - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32), 0)
    return gl.where(exponent == 255, 255, rounded_up)


@gluon.jit
def _reciprocal(scale_bytes):
    """2^(127 - byte), NaN for 255."""
    bits = gl.where(scale_bytes == 255, 0x7FC00000, (254 - scale_bytes) << 23)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def square_maxima(line):
    """Maxima of the 128 lines of a tile -> the tile's, or each line's own where they differ too much."""
    block = gl.max(line, 0)
    smallest = gl.min(gl.where(line == 0, 0x7FFFFFFF, line), 0)
    return gl.where((block >> 23) - (smallest >> 23) > SPREAD, line, block)


@gluon.jit
def widen(bits, AXIS: gl.constexpr, SQUARE: gl.constexpr):
    """Maxima of blocks of 32 [128, 4] or [4, 128] (AXIS says where the 4 are) -> those of the groups of 128."""
    line = gl.max(bits, AXIS)
    if SQUARE:
        line = square_maxima(line)
    return gl.maximum(bits, gl.expand_dims(line, AXIS))


@gluon.jit
def _scales_at(line, first_line, first_block, num_blocks, SWIZZLE: gl.constexpr):
    """The position of the four scales of a line of the tile, in [.., num_blocks] or in tiles of 128 x 4."""
    if SWIZZLE:
        tile = (first_line // 128).to(gl.int64) * ((num_blocks + 3) // 4) + first_block // 4
        at = tile * 512 + (line % 32) * 16 + (line // 32) * 4
    else:
        at = (first_line + line).to(gl.int64) * num_blocks + first_block
    return at


@gluon.jit
def store_scales(
    scales,
    scale_bytes,
    AXIS: gl.constexpr,
    first_line,
    first_block,
    num_lines,
    num_blocks,
    SWIZZLE: gl.constexpr,
    EVEN: gl.constexpr,
):
    """The scales of the tile's 128 lines, four each along AXIS, to [num_lines, num_blocks] or its tiles of 128 x 4."""
    LAYOUT: gl.constexpr = scale_bytes.type.layout
    block = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1 - AXIS, LAYOUT)), 1 - AXIS)
    line = gl.arange(0, 128, gl.SliceLayout(AXIS, LAYOUT))
    at = scales + _scales_at(line, first_line, first_block, num_blocks, SWIZZLE)
    if EVEN:
        # One word for the four of a line: single bytes would be as many writes to memory as the codes.
        gl.store(at.to(gl.pointer_type(gl.int32), bitcast=True), gl.sum(scale_bytes << (block * 8), AXIS))
    else:
        at = gl.expand_dims(at, AXIS) + block
        if SWIZZLE:
            gl.store(at, scale_bytes.to(gl.uint8))
        else:
            inside = gl.expand_dims(first_line + line < num_lines, AXIS) & (first_block + block < num_blocks)
            gl.store(at, scale_bytes.to(gl.uint8), mask=inside)


@gluon.jit
def quantize_rows(
    x,
    codes,
    scales,
    first_row,
    first_column,
    num_rows,
    num_columns,
    GROUP: gl.constexpr,
    SQUARE: gl.constexpr,
    SWIZZLE: gl.constexpr,
    EVEN: gl.constexpr,
    R: gl.constexpr,
):
    """Store the tile x at (first_row, first_column) as codes [num_rows, num_columns] with blocks along the rows."""
    blocks = gl.reshape(x.to(gl.float32), [128, 4, 32])
    bits = gl.max(_magnitude_bits(blocks), 2)
    if GROUP == 128:
        bits = widen(bits, 1, SQUARE)
    scale_bytes = scale_bytes_of(bits)
    quantized = (blocks * gl.expand_dims(_reciprocal(scale_bytes), 2)).to(gl.float8e4nv)
    # A row of the tile is a whole cache line, which a warp writes at once after this exchange.
    LINES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [64 // R, 1], [1, 0])
    quantized = gl.convert_layout(gl.reshape(quantized, [128, 128]), LINES)
    row, column, offset = _offsets(num_columns, LINES)
    at = codes + first_row.to(gl.int64) * num_columns + first_column + offset
    if EVEN:
        gl.store(at, quantized)
    else:
        gl.store(at, quantized, mask=(first_row + row < num_rows) & (first_column + column < num_columns))
    store_scales(
        scales, scale_bytes, 1, first_row, first_column // 32, num_rows, (num_columns + 31) // 32, SWIZZLE, EVEN
    )


@gluon.jit
def quantize_columns(
    x,
    codes,
    scales,
    first_row,
    first_column,
    num_rows,
    num_columns,
    GROUP: gl.constexpr,
    SQUARE: gl.constexpr,
    SWIZZLE: gl.constexpr,
    EVEN: gl.constexpr,
    R: gl.constexpr,
):
    """The same tile with blocks along its columns, transposed: codes [num_columns, num_rows]."""
    LAYOUT: gl.constexpr = column_layout(R)
    blocks = gl.reshape(gl.convert_layout(x.to(gl.float32), LAYOUT), [4, 32, 128])
    bits = gl.max(_magnitude_bits(blocks), 1)
    if GROUP == 128:
        bits = widen(bits, 0, SQUARE)
    scale_bytes = scale_bytes_of(bits)
    quantized = (blocks * gl.expand_dims(_reciprocal(scale_bytes), 1)).to(gl.float8e4nv)
    quantized = gl.convert_layout(gl.reshape(quantized, [128, 128]), LAYOUT)
    row = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, LAYOUT)), 0)
    at = codes + first_column.to(gl.int64) * num_rows + first_row + column.to(gl.int64) * num_rows + row
    if EVEN:
        gl.store(at, quantized)
    else:
        gl.store(at, quantized, mask=(first_row + row < num_rows) & (first_column + column < num_columns))
    store_scales(
        scales, scale_bytes, 0, first_column, first_row // 32, num_columns, (num_rows + 31) // 32, SWIZZLE, EVEN
    )
