"""Code that the grouped products for Hopper share: loading a tile's operands, storing its result.

A grouped product is `out[row, column] = sum over r of A[row, r] * B[column, r]`. Forward and input gradient have a
matrix B per group, and a group's rows are its rows of A and of the result. The weight gradient has a result per group,
and a group's rows are what it sums over.

Each of P programs starts with the tile of its own number, and takes the next free one whenever it has loaded one. Its
loading warpgroup finds the tile's position and announces it to the consumers.

Shared with `moe`.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.core.hopper import UncheckedDescriptor, barrier, halves, operand_layout, ring, swizzled_layout
from kernels.mxfp8.hopper.grouped.dequantize_ahead import await_values, clear_counts
from kernels.mxfp8.hopper.grouped.order import group_at, locate, order_of_groups, seek, take

ROWS = gl.constexpr(64)  # of one accumulator: a matrix instruction has 64
COLUMNS = gl.constexpr(64)  # of the pieces in which results are stored
SCALED = gl.constexpr(128)  # elements of a row whose scales are a word
# How an operand lies in memory: with r along its rows (0 and SHUFFLED, whose rows reach shared memory in the order of
# `shuffled_descriptor`), along its columns, or in `grouped` pairs.
TRANSPOSED = gl.constexpr(1)
PAIRED = gl.constexpr(2)
SHUFFLED = gl.constexpr(3)
STAGES = gl.constexpr(4)  # as many as shared memory has room for
LAG = gl.constexpr(2)  # steps between the consumers, so that products fill the time of epilogues; fewer than stages
# Three warpgroups at this limit fill the register file; the loader gives most of its share to the consumers.
MAX_REGISTERS = 168
CONSUMER_REGISTERS = gl.constexpr(240)
LOADER_REGISTERS = gl.constexpr(24)
PIECES = gl.constexpr(2)  # of a consumer in shared memory: one is written while the other is stored

_PLACE = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """TMA descriptor of blocks of a matrix that was allocated here or made addressable by the backends.

    In shared memory they are in the layout that matrix instructions read.
    """
    return UncheckedDescriptor(
        x, list(x.shape), list(x.stride()), [rows, columns], operand_layout(rows, columns, x.dtype)
    )


def shuffled_descriptor(x: Tensor) -> TensorDescriptor:
    """Of blocks of 128 x 128 codes, with row 32 t + 2 j + b in the place of row 8 j + 2 t + b.

    A thread t of the four that hold a row of a product with such an operand has its columns 8 j + 2 t + b, so in the
    operand's order it has 32 neighbours (`in_order`).
    """
    rows, depth = x.shape
    shape, strides = [rows // 128, 16, 4, 2, depth], [128 * depth, 2 * depth, 32 * depth, depth, 1]
    return UncheckedDescriptor(x, shape, strides, [1, 16, 4, 2, 128], swizzled_layout(128, x.element_size(), 5))


@gluon.jit
def in_order(sums):
    """Sums of 128 columns with a shuffled operand, the columns in its order; no register moves."""
    return sums.reshape((sums.shape[0], 16, 4, 2)).permute((0, 2, 1, 3)).reshape((sums.shape[0], 128))


def table_descriptor(table: Tensor, width: int) -> TensorDescriptor:
    """TMA descriptor of a part of a row of a table, which no matrix instruction reads."""
    layout = swizzled_layout(0, table.element_size(), 2)
    return UncheckedDescriptor(table, list(table.shape), list(table.stride()), [1, width], layout)


@gluon.jit
def announcements(CONSUMERS: gl.constexpr):
    """(two buffers in shared memory for the parameters of a tile, barriers for written ones, for read ones)."""
    places = gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    written = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(written.index(i), count=1)
        mbarrier.init(read.index(i), count=CONSUMERS)
    return places, written, read


@gluon.jit
def barriers():
    """(barriers of full stages, of empty ones and of the consumers' order, and the three of `announcements`)."""
    full, empty, order = ring(STAGES)
    places, written, read = announcements(2)
    fence_async_shared()
    return full, empty, order, places, written, read


@gluon.jit
def _announce(places, written, read, announced, row, count, column, steps):
    slot = announced % 2
    mbarrier.wait(read.index(slot), ((announced // 2) & 1) ^ 1)
    entry = gl.arange(0, 4, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    place = gl.where(entry == 0, row, gl.where(entry == 1, count, gl.where(entry == 2, column, steps)))
    places.index(slot).store(place)
    barrier()
    mbarrier.arrive(written.index(slot), count=1)


@gluon.jit
def _entry(place, index: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, 4, _PLACE) == index, place, 0), 0)


@gluon.jit
def await_tile(places, written, received):
    """The number of rows of the result in a consumer's next tile; 0 if there is none."""
    slot = received % 2
    mbarrier.wait(written.index(slot), (received // 2) & 1)
    return _entry(places.index(slot).load(_PLACE), 1)


@gluon.jit
def accept_tile(places, read, received):
    """The awaited tile's (first row of the result, first column, steps).

    To be called where they are used: MLIR treats a value that is carried around a loop only to bound an inner loop as
    dead, and every tile would do as many steps as the first.
    """
    slot = received % 2
    place = places.index(slot).load(_PLACE)
    barrier()
    mbarrier.arrive(read.index(slot), count=1)
    return _entry(place, 0), _entry(place, 2), _entry(place, 3)


@gluon.jit
def _block(desc, position, r, full, smem, lines, FORM: gl.constexpr):
    """Load the block at (position, r) of an operand of so many lines."""
    if FORM == TRANSPOSED:
        tma.async_copy_global_to_shared(desc, [r, position], full, smem)
    elif FORM == PAIRED:
        second = (position >= lines // 2).to(gl.int32)
        position -= second * (lines // 2)
        column = position // 128 * 256 + second * 128 + r % 128
        tma.async_copy_global_to_shared(desc, [r // 128 * 128 + position % 128, column], full, smem)
    elif FORM == SHUFFLED:
        place = smem._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
        tma.async_copy_global_to_shared(desc, [position // 128, 0, 0, 0, r], full, place)
    else:
        tma.async_copy_global_to_shared(desc, [position, r], full, smem)


@gluon.jit
def load_tiles(
    a_desc,
    b_desc,
    rows_desc,
    columns_desc,
    a_smem,
    b_smem,
    rows_smem,
    columns_smem,
    full,
    empty,
    ticket,
    places,
    written,
    read,
    ends,
    num_groups,
    tiles_m,
    tiles_n,
    M,
    N,
    K,
    TILE_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BAND: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    WGRAD: gl.constexpr,
    A_FORM: gl.constexpr,
    B_FORM: gl.constexpr,
    ROW_SCALES: gl.constexpr,
    COLUMN_SCALES: gl.constexpr,
    OUT_T: gl.constexpr,
    LONGEST_FIRST: gl.constexpr,
    AHEAD: gl.constexpr = False,
    HALVES: gl.constexpr = 1,
):
    """The loading warpgroup: the ring of stages never stops between tiles.

    A stage has BLOCKS blocks of ROWS rows of A, of which those beyond 128 are left out if the tile has no such rows,
    and TILE_N rows of B. A_FORM and B_FORM are the layouts of the operands in memory. ROW_SCALES and COLUMN_SCALES: a
    stage also has a row of a table of scales of A or of B, which have a row for each SCALED of r. OUT_T: of a tile of a
    weight gradient its place in the transposed result is announced, and the columns that are left instead of the rows.
    LONGEST_FIRST: a weight gradient of few tiles begins with the longest groups. AHEAD: B's values of a group are there
    when `await_values` says so; `ticket` has the counts of `hopper.grouped.dequantize_ahead`.
    HALVES: 2 if a group's N rows of B are two matrices, one below the other, of each of which a stage has TILE_N rows;
    not for a weight gradient.
    """
    ROW_BYTES: gl.constexpr = rows_desc.block_type.nbytes if ROW_SCALES else 0
    COLUMN_BYTES: gl.constexpr = columns_desc.block_type.nbytes if COLUMN_SCALES else 0
    FIXED: gl.constexpr = HALVES * (b_desc.block_type.nbytes + COLUMN_BYTES) + ROW_BYTES
    TILE_M: gl.constexpr = BLOCKS * ROWS
    tile = gl.program_id(0)
    zero = gl.to_tensor(0)
    order = zero
    if LONGEST_FIRST:
        order = order_of_groups(ends, num_groups, tiles_m * tiles_n, LONGEST_FIRST)
    turn, base = seek(tile, zero, zero, ends, num_groups, tiles_m, tiles_n, TILE_M, WGRAD)
    loaded = 0
    announced = 0
    known = gl.to_tensor(-1)
    while turn < num_groups:
        group = group_at(order, turn, num_groups, LONGEST_FIRST)
        row, count, column, first, last = locate(tile, group, base, ends, tiles_m, tiles_n, M, K, TILE_M, BAND, WGRAD)
        steps = gl.cdiv(last - first, BLOCK_K)
        if OUT_T:
            left = N - column * TILE_N
            _announce(places, written, read, announced, row, left, group * N + column * TILE_N, steps)
        else:
            out_row = row + group * M if WGRAD else row
            _announce(places, written, read, announced, out_row, count, column * TILE_N, steps)
        announced += 1
        if AHEAD:
            known = await_values(ticket, known, group, num_groups, N, K)
        for r in range(first, last, BLOCK_K):
            stage = loaded % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
            if count > 2 * ROWS:
                mbarrier.expect(bar, BLOCKS * a_desc.block_type.nbytes + FIXED)
                for c in gl.static_range(2, BLOCKS):
                    _block(a_desc, row + c * ROWS, r, bar, a_smem.index(stage * BLOCKS + c), M, A_FORM)
            else:
                mbarrier.expect(bar, 2 * a_desc.block_type.nbytes + FIXED)
            for c in gl.static_range(2):
                _block(a_desc, row + c * ROWS, r, bar, a_smem.index(stage * BLOCKS + c), M, A_FORM)
            if WGRAD:
                position = column * TILE_N
            else:
                position = group * N + column * TILE_N
            if ROW_SCALES:
                _block(rows_desc, row, r // SCALED, bar, rows_smem.index(stage), M, TRANSPOSED)
            for half in gl.static_range(HALVES):
                part = stage * HALVES + half
                if half > 0:
                    position += N // 2
                if COLUMN_SCALES:
                    _block(columns_desc, position, r // SCALED, bar, columns_smem.index(part), N, TRANSPOSED)
                if B_FORM == TRANSPOSED and not WGRAD:
                    _block(b_desc, column * TILE_N, group * K + r, bar, b_smem.index(part), N, TRANSPOSED)
                else:
                    _block(b_desc, position, r, bar, b_smem.index(part), N, B_FORM)
            loaded += 1
        tile, turn, base = take(ticket, turn, base, ends, num_groups, tiles_m, tiles_n, TILE_M, WGRAD)
    _announce(places, written, read, announced, zero, zero, zero, zero)
    if AHEAD:
        clear_counts(ticket, num_groups)


@gluon.jit
def clear_rest(out, ends, num_groups, num_rows, N):
    """Zero the rows of the result that have no group."""
    SIZE: gl.constexpr = 1024
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    begin = gl.load(ends + num_groups - 1).to(gl.int64) * N
    end = num_rows.to(gl.int64) * N
    for start in range(begin + gl.program_id(0) * SIZE, end, gl.num_programs(0) * SIZE):
        position = start + gl.arange(0, SIZE, LAYOUT)
        gl.store(out + position, gl.zeros((SIZE,), out.dtype.element_ty, LAYOUT), position < end)


@gluon.jit
def store_rows(out_desc, out, pieces, value, row, count, column, N, FIRST: gl.constexpr, PIECE: gl.constexpr):
    """Write the first `count` of ROWS rows of the result: bfloat16 through shared memory, float32 from registers.

    A consumer's pieces in shared memory begin at FIRST. PIECE counts what it has stored of this tile.
    """
    WIDTH: gl.constexpr = value.shape[1]
    if out_desc.dtype == gl.float32:
        # Four threads of a matrix instruction's result have a whole sector of 32 bytes.
        _store_masked(out, value, row, count, column, N)
    elif WIDTH > COLUMNS:
        left, right = halves(value)
        NEXT: gl.constexpr = PIECE + WIDTH // 2 // COLUMNS
        store_rows(out_desc, out, pieces, left, row, count, column, N, FIRST, PIECE)
        store_rows(out_desc, out, pieces, right, row, count, column + WIDTH // 2, N, FIRST, NEXT)
    elif count >= ROWS:
        tma.store_wait(PIECES - 1)
        piece = pieces.index(FIRST + PIECE % PIECES)
        piece.store(value.to(out_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row, column], piece)
    elif count > 0:  # a whole block would overwrite the next group's rows
        _store_masked(out, value.to(out_desc.dtype), row, count, column, N)


@gluon.jit
def store_transposed(out_desc, out, pieces, value, row, column, count, N, FIRST: gl.constexpr, PIECE: gl.constexpr):
    """Write the first `count` columns of ROWS whole rows as rows of the result from `column` of it on.

    As `store_rows`; `count` is a multiple of COLUMNS, and N the length of the result's rows.
    """
    WIDTH: gl.constexpr = value.shape[1]
    if WIDTH > COLUMNS:
        left, right = halves(value)
        NEXT: gl.constexpr = PIECE + WIDTH // 2 // COLUMNS
        store_transposed(out_desc, out, pieces, left, row, column, count, N, FIRST, PIECE)
        store_transposed(out_desc, out, pieces, right, row, column + WIDTH // 2, count - WIDTH // 2, N, FIRST, NEXT)
    elif count > 0:
        if out_desc.dtype == gl.float32:
            LAYOUT: gl.constexpr = value.type.layout
            rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
            gl.store(out + (gl.expand_dims(columns.to(gl.int64) * N, 0) + gl.expand_dims(rows, 1)), value)
        else:
            tma.store_wait(PIECES - 1)
            piece = pieces.index(FIRST + PIECE % PIECES)
            piece.permute((1, 0)).store(value.to(out_desc.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [column, row], piece)


@gluon.jit
def _store_masked(out, value, row, count, column, N):
    LAYOUT: gl.constexpr = value.type.layout
    rows = gl.arange(0, value.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT))
    pointers = out + gl.expand_dims((row + rows).to(gl.int64) * N, 1) + gl.expand_dims(columns, 0)
    gl.store(pointers, value, gl.expand_dims(rows < count, 1) & gl.expand_dims(columns < N, 0))
