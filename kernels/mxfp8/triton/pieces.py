"""Groups of rows cut into pieces, and the sums of pieces added up to those of groups; small Triton kernels.

Nothing waits for the device: the host knows the number of rows and of groups, and with them how many pieces there can
be. Pieces that there are not are empty and come last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned

_BLOCK = 2048  # elements that a program adds up


def cut(ends: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """(ends int32 [P] of the pieces, number int32 [E + 1] of each group's first piece and behind the last one).

    Groups with `ends` [E] in `rows` rows are cut into pieces of `length` rows, of which the last of a group may have
    fewer.
    """
    groups = ends.shape[0]
    pieces = (rows - 1) // length + groups
    both = torch.empty(-(-pieces // 4) * 4 + groups + 1, dtype=torch.int32, device=ends.device)
    piece_ends, firsts = both[:pieces], both[-groups - 1 :]
    width = triton.next_power_of_2(pieces)
    _cut(
        (1, 1, 1),
        (ends.device, ends.dtype, width, aligned(ends, firsts)),
        ends,
        piece_ends,
        firsts,
        groups,
        pieces,
        length,
        width,
    )
    return piece_ends, firsts


def add(sums: Tensor, firsts: Tensor, dtype: torch.dtype) -> Tensor:
    """[E, N, K] of `dtype`: float32 sums of pieces [P, N, K], each group's added up one after the other."""
    groups, size = firsts.shape[0] - 1, sums[0].numel()
    out = sums.new_empty(groups, *sums.shape[1:], dtype=dtype)
    _add(
        (-(-size // _BLOCK), groups, 1),
        (sums.device, dtype, aligned(firsts), size % 16 == 0),
        sums,
        out,
        firsts,
        size,
        _BLOCK,
    )
    return out


@triton.jit(do_not_specialize=["num_groups", "num_pieces", "length"])
def _cut_grouped_kernel(ends, piece_ends, firsts, num_groups, num_pieces, length, WIDTH: tl.constexpr):
    piece = tl.arange(0, WIDTH)
    end = tl.zeros((WIDTH,), tl.int32) + tl.load(ends + num_groups - 1).to(tl.int32)
    first = 0
    begin = 0
    for group in range(num_groups):
        stop = tl.load(ends + group).to(tl.int32)
        following = first + (stop - begin + length - 1) // length
        own = (piece >= first) & (piece < following)
        end = tl.where(own, tl.minimum(begin + (piece - first + 1) * length, stop), end)
        tl.store(firsts + group, first)
        first = following
        begin = stop
    tl.store(firsts + num_groups, first)
    tl.store(piece_ends + piece, end, piece < num_pieces)


@triton.jit
def _add_grouped_kernel(sums, out, firsts, size, BLOCK: tl.constexpr):
    group = tl.program_id(1)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    first = tl.load(firsts + group)
    sums += first.to(tl.int64) * size
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(tl.load(firsts + group + 1) - first):
        total += tl.load(sums + at, inside, 0.0)
        sums += size
    tl.store(out + group.to(tl.int64) * size + at, total.to(out.dtype.element_ty), inside)


_cut = Launcher(_cut_grouped_kernel, num_warps=4)
_add = Launcher(_add_grouped_kernel, num_warps=4)
