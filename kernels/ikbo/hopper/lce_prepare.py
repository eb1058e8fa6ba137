"""What the Hopper product of linear compression needs before it starts, made in one launch.

TMA reads a block of a weight by rows of 128 bytes. If these do not begin at a line of the L2 cache, each costs two
lines, and L2's bandwidth limits the product: a weight whose rows do not start at lines is therefore copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.triton import cdiv, row_of, steps_of
from kernels.ikbo.lce_torch import room

LINE = 128  # bytes of a line of the L2 cache, and of a row of a block
_PLACES = 256  # of a program, entries or flags
_COLUMNS = 1024  # of a weight, at a time


def prepare(
    weight: Tensor, w_user: Tensor, offsets: Tensor, num_entries: int, num_flags: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(weight and w_user with rows that start at lines; owners of the entries and cleared flags, both int32)."""
    owners = torch.empty(num_entries, dtype=torch.int32, device=weight.device)
    flags = torch.empty(num_flags, dtype=torch.int32, device=weight.device)
    weight_lines, user_lines = room(weight, LINE), room(w_user, LINE)
    copied = 0 if weight_lines is weight else weight.shape[0]
    copied_of_users = 0 if user_lines is w_user else w_user.shape[0]
    lookups = cdiv(max(num_entries, num_flags), _PLACES)
    num_users = offsets.shape[0] - 1
    _compress_prepare_kernel[(lookups + copied + copied_of_users,)](
        offsets, owners, flags, weight, weight_lines, w_user, user_lines, num_entries, num_users, num_flags, lookups,
        copied, weight.shape[1], w_user.shape[1], *weight.stride(), weight_lines.stride(0), *w_user.stride(),
        user_lines.stride(0), STEPS=steps_of(num_users), PLACES=_PLACES, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return weight_lines, user_lines, owners, flags


@triton.jit
def _copy_row(source, target, row, depth, row_stride, stride, target_stride, COLUMNS: tl.constexpr):
    for start in range(0, depth, COLUMNS):
        column = (start + tl.arange(0, COLUMNS)).to(tl.int64)
        values = tl.load(source + row.to(tl.int64) * row_stride + column * stride, mask=column < depth)
        tl.store(target + row.to(tl.int64) * target_stride + column, values, mask=column < depth)


@triton.jit(do_not_specialize=["num_entries", "num_rows", "num_flags", "lookups", "copied", "depth", "user_depth"])
def _compress_prepare_kernel(
    offsets, owners, flags, weight, weight_lines, w_user, user_lines, num_entries, num_rows, num_flags, lookups,
    copied, depth, user_depth, row_stride, stride, line_stride, user_row_stride, user_stride, user_line_stride,
    STEPS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The first `lookups` programs find owners and clear flags, then `copied` copy a row of the weight, others of
    w_user.
    """
    program = tl.program_id(0)
    if program < lookups:
        place = program.to(tl.int64) * PLACES + tl.arange(0, PLACES)
        tl.store(flags + place, 0, mask=place < num_flags)
        # Entries before offsets[0] belong to no row, but the value stored here is used as an index of flags.
        row = tl.maximum(row_of(offsets, num_rows, place, STEPS), 0)
        tl.store(owners + place, row.to(tl.int32), mask=place < num_entries)
    elif program < lookups + copied:
        _copy_row(weight, weight_lines, program - lookups, depth, row_stride, stride, line_stride, COLUMNS)
    else:
        row = program - lookups - copied
        _copy_row(w_user, user_lines, row, user_depth, user_row_stride, user_stride, user_line_stride, COLUMNS)
