"""Which queries of a row see which of its keys."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Wider than any row, and positions can be added to it in 32 bits.
WIDEST = 2**30


class Mask(NamedTuple):
    """Query i sees key j, both counted within their row, when all of the following hold that are set.

    - `causal`: j <= i;
    - `left`, `right`: i - left <= j <= i + right, -1 for no limit on a side;
    - `block_size`: i // block_size == j // block_size.
    """

    causal: bool = False
    left: int = -1
    right: int = -1
    block_size: int | None = None

    @property
    def window(self) -> tuple[int, int]:
        """(left, right), -1 for no limit, with the causal one: at most WIDEST."""
        causal, left, right, _ = self  # compared, not min(): every launch asks
        right = 0 if causal else right
        return left if left < WIDEST else WIDEST, right if right < WIDEST else WIDEST

    @property
    def windowed(self) -> bool:
        return self.causal or self.left >= 0 or self.right >= 0

    def restrict(self, seen: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The pairs of `seen` [..., Lq, Lk] bool that are not masked; i [Lq, 1], j [Lk] are positions."""
        left, right = self.window
        seen = seen & (j >= i - left) if left >= 0 else seen
        seen = seen & (j <= i + right) if right >= 0 else seen
        return seen & (i // self.block_size == j // self.block_size) if self.block_size is not None else seen


NO_MASK = Mask()


def checked_mask(
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_size: int | None = None,
) -> Mask:
    """The mask of a public function's arguments: `window` is w or (left, right), None or -1 for no limit on a side.

    ValueError for other negative numbers and for empty blocks.
    """
    if not causal and window is None and block_size is None:
        return NO_MASK
    sides = window if isinstance(window, tuple) else (window, window)
    limits = [-1 if side is None else side for side in sides]
    if len(limits) != 2 or min(limits) < -1:
        raise ValueError(
            f"window={window} must be w or (left, right), each at least 0 or None (also -1) for no limit, e.g. 128"
        )
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size={block_size} must be positive, or None for no blocks")
    return Mask(causal, *limits, block_size)
