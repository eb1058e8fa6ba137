"""Offsets of several groups of queries over the same keys, as one list of rows, in one launch a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Launcher, aligned

_BLOCK = 256


@triton.jit(do_not_specialize=["num_offsets", "start", "place"])
def _group_kernel(q_offsets, k_offsets, queries, keys, num_offsets, start, place, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_offsets
    tl.store(queries + place + index, tl.load(q_offsets + index, inside) + start, inside)
    tl.store(keys + place + index, tl.load(k_offsets + index, inside), inside)


def joined_groups(q_offsets: Sequence[Tensor], k_offsets: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(queries, keys) [G * (R + 1)] of k_offsets' dtype: the offsets of each group in turn, as one jagged list.

    Group g lies behind sizes[0] + ... + sizes[g - 1] queries, and its requests have the keys of `k_offsets` [R + 1].
    From the end of one group to the start of the next is a row that has no queries, whatever keys it has.
    """
    num_offsets = k_offsets.shape[0]
    queries, keys = (
        torch.empty(len(sizes) * num_offsets, dtype=k_offsets.dtype, device=k_offsets.device) for _ in range(2)
    )
    start = 0
    for group, (offsets, size) in enumerate(zip(q_offsets, sizes, strict=True)):
        offsets = offsets.contiguous()
        _launch_group(
            (-(-num_offsets // _BLOCK), 1, 1),
            (keys.device, offsets.dtype, k_offsets.dtype, *aligned(offsets, k_offsets)),
            offsets, k_offsets, queries, keys, num_offsets, start, group * num_offsets, _BLOCK,
        )  # fmt: skip
        start += size
    return queries, keys


_launch_group = Launcher(_group_kernel, num_warps=4)
