"""The check of row lengths on a GPU in one launch, where PyTorch's operators take four."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned

_ROWS = 512  # of a program


@triton.jit(do_not_specialize=["num_rows", "stride", "maximum"])
def _lengths_kernel(offsets, num_rows, stride, maximum, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    begin = offsets + rows.to(tl.int64) * stride
    length = tl.load(begin + stride, inside, 0) - tl.load(begin, inside, 0)
    tl.device_assert(length <= maximum, "a jagged row is longer than its maximum")


# With assertions, but without those that look for overflow.
_launch = Launcher(_lengths_kernel, num_warps=4, debug=True, sanitize_overflow=False)


def assert_lengths(offsets: Tensor, maximum: int) -> None:
    """A device assertion that no row of `offsets` [B + 1], B > 0, is longer than `maximum`."""
    num_rows = offsets.shape[0] - 1
    key = (offsets.device, offsets.dtype, *aligned(offsets))
    longest = min(int(maximum), 2**31 - 1)  # which is as good as no limit
    _launch((-(-num_rows // _ROWS), 1, 1), key, offsets, num_rows, offsets.stride(0), longest, _ROWS)
