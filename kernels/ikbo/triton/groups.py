"""Offsets of several groups of queries over the same keys, as one list of rows, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kernels.core.caches import cached
from kernels.core.launch import Launcher, aligned

_BLOCK = 256


@triton.jit(do_not_specialize=["max_k", "num_offsets"])
def _join_groups_kernel(groups, k_offsets, queries, keys, max_q, max_k, num_offsets, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_offsets
    rows = index < num_offsets - 1
    own_keys = tl.load(k_offsets + index, inside)
    fits = tl.load(k_offsets + index + 1, rows, 0) - tl.load(k_offsets + index, rows, 0) <= max_k
    start = tl.zeros([1], queries.dtype.element_ty)
    for group in tl.static_range(len(groups)):
        offsets = groups[group] + index
        place = group * num_offsets + index
        tl.store(queries + place, tl.load(offsets, inside) + start, inside)
        tl.store(keys + place, own_keys, inside)
        start += tl.load(groups[group] + num_offsets - 1)
        fits &= tl.load(offsets + 1, rows, 0) - tl.load(offsets, rows, 0) <= max_q[group]
    tl.device_assert(fits, "a jagged row is longer than its maximum")


def joined_groups(
    q_offsets: Sequence[Tensor], k_offsets: Tensor, max_q: Sequence[int], max_k: int
) -> tuple[Tensor, Tensor]:
    """(queries, keys) [G * (R + 1)] of k_offsets' dtype: the offsets of each group in turn, as one jagged list.

    Group g follows the last offsets of the groups before it, and its requests have the keys of `k_offsets` [R + 1].
    Between the end of one group and the start of the next there is a row without queries, whatever keys it has. A
    request of more than max_q[g] queries of group g or max_k keys is a device assertion. Calls with the same offsets
    and equal maxima share the lists, which must not be written to.
    """
    limits = tuple(min(int(most), 2**31 - 1) for most in (*max_q, max_k))
    return cached(lambda: _joined(q_offsets, k_offsets, limits), ("groups", limits), *q_offsets, k_offsets)


def _joined(q_offsets: Sequence[Tensor], k_offsets: Tensor, limits: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    # Kernels read consecutive offsets, but an argument may be a view of every k-th one.
    *groups, k_offsets = (offsets.contiguous() for offsets in (*q_offsets, k_offsets))
    num_offsets = k_offsets.shape[0]
    queries, keys = (k_offsets.new_empty(len(groups) * num_offsets) for _ in range(2))
    # Triton specialises on integers in a tuple, despite do_not_specialize.
    special = tuple((most == 1, most % 16 == 0) for most in limits[:-1])
    _launch_join(
        (-(-num_offsets // _BLOCK), 1, 1),
        (keys.device, keys.dtype, *aligned(*groups, k_offsets), special),
        tuple(groups), k_offsets, queries, keys, limits[:-1], limits[-1], num_offsets, _BLOCK,
    )  # fmt: skip
    return queries, keys


# With assertions, except those for overflow.
_launch_join = Launcher(_join_groups_kernel, num_warps=4, debug=True, sanitize_overflow=False)
