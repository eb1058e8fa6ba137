"""The softmax of a block of scores in registers, for the Hopper attention forward (Gluon).

Exponentials are taken relative to a reference of each row, in units of log 2. It need not be the maximum, and follows
only when that is more than 8 beyond it: probabilities of up to 2^8 fit into float16, and sums of them into float32.
After a tile's first block few references change, and where none does, sums of outputs need no correction.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.attention.hopper.items import ROWS
from kernels.core.hopper import turn_barrier

_LN_2 = gl.constexpr(0.6931471805599453)
_SLACK = gl.constexpr(8.0)  # how far, in log 2, a maximum may be above the reference


@gluon.jit
def _masked(s, block_start, position, k_length, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Scores with -inf where a query may not look; `position` is that of the first row within its row."""
    RS: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    columns = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)), 0)
    positions = position + gl.arange(0, s.shape[0], RS)
    if RIGHT:
        end = gl.minimum(positions + (right + 1), k_length) - block_start
        s = gl.where(columns < gl.expand_dims(end, 1), s, -float("inf"))
    else:
        s = gl.where(columns < k_length - block_start, s, -float("inf"))
    if LEFT:
        s = gl.where(columns >= gl.expand_dims(positions - left - block_start, 1), s, -float("inf"))
    return s


@gluon.jit
def masked_at_edges(
    s, start, position, k_length, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr, FIRST: gl.constexpr
):
    """`_masked` if the edge of what some query sees crosses the block; the row's end lies in the FIRST one taken."""
    crossed = False
    if FIRST:
        crossed |= start + s.shape[1] > k_length
    if RIGHT:
        crossed |= start + s.shape[1] - 1 > position + right
    if LEFT:
        crossed |= start < position + (ROWS - 1) - left
    if crossed:
        s = _masked(s, start, position, k_length, left, right, LEFT, RIGHT)
    return s


@gluon.jit
def exponents(s, m, scale, MASKED: gl.constexpr):
    """(exponents of the probabilities relative to the new reference, that reference, correction of older sums).

    `m` is the old reference, -inf for a query that has seen no key yet.
    """
    new = gl.max(s, 1) * scale
    new = gl.where(new > m + _SLACK, new, m)
    if MASKED:  # a query that has still seen no key has reference -inf, and -inf - -inf would be NaN
        reference = gl.where(new == -float("inf"), 0.0, new)
    else:
        reference = new
    return s * scale - gl.expand_dims(reference, 1), new, gl.exp2(m - reference)


@gluon.constexpr_function
def _powers_and_turn(registers, consumer):
    """PTX that makes 2^$0 of $0, and so on, and passes the turn on after one of the first, which is never 1e30."""
    powers = "".join(f"ex2.approx.ftz.f32 ${i}, ${i};\n" for i in range(registers))
    return f"""{{
    .reg .pred some;
    {powers}setp.neu.f32 some, $3, 0f7149F2CA;
    @some {turn_barrier("arrive", 1 - consumer)}
    }}"""


@gluon.constexpr_function
def _powers_operands(registers):
    return ",".join(["=f"] * registers + [str(i) for i in range(registers)])


@gluon.jit
def powers_and_turn(x, C: gl.constexpr):
    """2^x [64, n]; consumer C passes the turn on when a few of them are there.

    That is a little before the product in flight is complete. The turn must wait for a power: otherwise compilers move
    the maximum, which all powers wait for, behind the wait for that product.
    """
    REGISTERS: gl.constexpr = x.shape[1] // 2
    return gl.inline_asm_elementwise(
        _powers_and_turn(REGISTERS, C), _powers_operands(REGISTERS), [x], gl.float32, False, REGISTERS
    )


@gluon.jit
def times(x, factors):
    """x [rows, n] times a factor for each row."""
    return x * gl.expand_dims(gl.convert_layout(factors, gl.SliceLayout(1, x.type.layout)), 1)


@gluon.constexpr_function
def _correction(registers):
    """PTX that multiplies $0, $1 .. of a thread by as many factors, unless those of all threads of its warp are 1.

    An accumulator has two rows to a thread: two neighbours of the one, two of the other, and so on.
    """
    factor = 2 * registers
    products = "".join(f"mul.f32 ${i}, ${i}, ${factor + i};\n" for i in range(registers))
    return f"""{{
    .reg .pred some;
    setp.neu.f32 some, ${factor}, 0f3F800000;
    setp.neu.or.f32 some, ${factor + 2}, 0f3F800000, some;
    vote.sync.any.pred some, some, 0xffffffff;
    @!some bra.uni DONE;
    {products}DONE:
    }}"""


@gluon.constexpr_function
def _correction_operands(registers):
    return ",".join(["=f"] * registers + [str(i) for i in range(registers)] + ["f"] * registers)


@gluon.jit
def corrected(acc, factors):
    """An accumulator [64, n] times a factor for each row, most of which are 1."""
    REGISTERS: gl.constexpr = acc.shape[1] // 2
    factors = gl.expand_dims(gl.convert_layout(factors, gl.SliceLayout(1, acc.type.layout)), 1)
    return gl.inline_asm_elementwise(
        _correction(REGISTERS), _correction_operands(REGISTERS), [acc, factors], gl.float32, False, REGISTERS
    )


@gluon.jit
def sums(p):
    """[rows, 4]: the parts of a row's sum that its four threads hold, which are added once a tile."""
    return gl.sum(gl.sum(p.reshape((p.shape[0], p.shape[1] // 8, 4, 2)), 3), 1)


@gluon.jit
def rounded(p, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """p as a left operand, rounded two neighbours to a register: the product needs no more instructions for it."""
    if dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [p], gl.bfloat16, True, 2)
    else:
        y = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [p], gl.float16, True, 2)
    return gl.convert_layout(y, gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def normalization(total, m):
    """(1 / total, natural logarithm of the sum of which `total` is relative to 2^m); 0 and +inf for no sum at all.

    Of approximate instructions, whose errors of 2^-22 or so are below those of a float32 sum.
    """
    inverse = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [total], gl.float32, True, 1)
    log_total = gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [total], gl.float32, True, 1)
    empty = total == 0.0
    return gl.where(empty, 0.0, inverse), gl.where(empty, float("inf"), (m + log_total) * _LN_2)
