"""Dequantising a product's second operand in the product itself, ahead of its tiles; device functions in Gluon.

Two warps of each program take chunks of codes, group by group, and write their values to memory in the order of
`hopper.dequantize`. Each group counts its finished chunks, and loaders of tiles wait for all of them before the group's
first tile. Memory has little else to do while tensor cores work, so nothing waits for the pass except the first groups.
Programs take the next free chunk instead of a fixed share, because they wait for all chunks of a group, and not all
programs need run at the same time.

The int32 counts of a launch: tiles (see `hopper.grouped.order.take`), chunks that were taken, programs that have loaded
everything, and each group's finished chunks. They are 0 before and after it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.core.hopper import barrier
from kernels.mxfp8.hopper.grouped.order import bounds
from kernels.mxfp8.hopper.quantize.pairs import power_bits

COUNTS = 3  # before those of the groups
_TAKEN = gl.constexpr(1)
_LOADED = gl.constexpr(2)
_THERE = gl.constexpr(COUNTS)

_LINES = gl.constexpr(64)  # of 64 elements, at a time
_CHUNK = gl.constexpr(256)  # lines; a matrix whose sides are multiples of 128 has whole chunks
_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [2, 1], [1, 0]))
_SEEN = gl.constexpr(64)  # groups, at a time
_GROUPS = gl.constexpr(gl.BlockedLayout([1], [32], [2], [0]))
# As in `hopper.dequantize`, of four elements.
_DECODE = gl.constexpr(
    """
    {
    .reg .b32 low, high, sign, unit;
    mov.b32 unit, 0x7b807b80;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    and.b32 sign, low, 0x80008000;
    shr.b32 low, low, 4;
    lop3.b32 low, low, 0x07f007f0, sign, 0xEA;
    and.b32 sign, high, 0x80008000;
    shr.b32 high, high, 4;
    lop3.b32 high, high, 0x07f007f0, sign, 0xEA;
    mul.rn.bf16x2 low, low, unit;
    mul.rn.bf16x2 high, high, unit;
    mul.rn.bf16x2 $0, low, $3;
    mul.rn.bf16x2 $1, high, $3;
    }
    """
)


@gluon.jit
def _fence(token):
    """Order earlier writes to global memory that are known to be complete before later reads of them by TMA."""
    gl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [token], gl.int32, False, 1)


@gluon.jit
def _dequantize(codes, scales, values, first):
    line = first + gl.arange(0, _LINES, gl.SliceLayout(1, _LAYOUT))
    place = gl.arange(0, 16, gl.SliceLayout(0, _LAYOUT))
    scale = gl.load(scales + line).to(gl.int32)
    # Word 4 a + b of a line goes to words 8 b + a and 8 b + 4 + a; a block of 32 has two values of a.
    line = gl.expand_dims(line, 1)
    code = gl.load(codes + (line * 16 + gl.expand_dims(place % 4 * 4 + place // 4, 0)))
    powers = gl.where(
        gl.expand_dims(place % 4 < 2, 0),
        gl.expand_dims(power_bits(scale & 0xFF) * 0x10001, 1),
        gl.expand_dims(power_bits((scale >> 8) & 0xFF) * 0x10001, 1),
    )
    low, high = gl.inline_asm_elementwise(
        _DECODE, "=r,=r,r,r", [code, powers], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    at = line * 32 + gl.expand_dims(place // 4 * 8 + place % 4, 0)
    gl.store(values + at, low)
    gl.store(values + at + 4, high)


@gluon.jit
def _take(counts):
    return gl.atomic_add(counts + _TAKEN, 1, sem="relaxed", scope="gpu")


@gluon.jit
def dequantize_ahead(codes, scales, values, counts, ends, num_groups, N, K):
    """codes int32 [num_groups, N, K / 4], scales int16 [num_groups, N, K / 64] -> values int32 [num_groups, N, K / 2].

    Groups without rows are left out.
    """
    chunks = K // 64 * N // _CHUNK
    chunk = _take(counts)
    while chunk < num_groups * chunks:
        group = chunk // chunks
        begin, end = bounds(ends, group)
        if begin < end:
            first = chunk.to(gl.int64) * _CHUNK
            for i in range(0, _CHUNK, _LINES):
                _dequantize(codes, scales, values, first + i)
            _fence(chunk)
            barrier()
            gl.atomic_add(counts + (_THERE + group), 1, sem="release", scope="gpu")
        chunk = _take(counts)
    gl.store(counts + _TAKEN, 0, chunk == num_groups * chunks + gl.num_programs(0) - 1)


@gluon.jit
def await_values(counts, known, group, num_groups, N, K):
    """Wait until all values of a group are written; those of groups with rows up to `known` are.

    Returns the last group of which this is known now: a check takes as long as a step or two of a product.
    """
    if group > known:
        chunks = K // 64 * N // _CHUNK
        while gl.atomic_add(counts + (_THERE + group), 0, sem="acquire", scope="gpu") < chunks:
            pass
        index = group + gl.arange(0, _SEEN, _GROUPS)
        there = gl.load(counts + (_THERE + index), mask=index < num_groups, other=0, volatile=True)
        known = gl.min(gl.where((index > group) & (there < chunks), index, group + _SEEN), 0) - 1
        # Each thread acquires what it has seen, before the one that has TMA read it.
        gl.inline_asm_elementwise("fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", [known], gl.int32, False, 1)
        barrier()
        _fence(known)
    return known


@gluon.jit
def clear_counts(counts, num_groups):
    """To be called by a program that waits for nothing more: the last one clears the counts."""
    if gl.atomic_add(counts + _LOADED, 1, sem="relaxed", scope="gpu") == gl.num_programs(0) - 1:
        for first in range(0, num_groups, _SEEN):
            group = first + gl.arange(0, _SEEN, _GROUPS)
            gl.store(counts + (_THERE + group), gl.zeros((_SEEN,), gl.int32, _GROUPS), group < num_groups)
        gl.store(counts + _LOADED, 0)
