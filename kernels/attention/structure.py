"""Masks of rows whose tokens are of several kinds: contextual tokens, the events of a history, targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.attention.bias import Bias
from kernels.core.mask import WIDEST, Mask
from kernels.core.offsets import derived


class Structure(NamedTuple):
    """What a row's tokens are, beside the window of a call; see `kernels.attention.jagged_attention`.

    `num_targets` is [B] int32, `target_window` -1 for all of the history.
    """

    num_targets: Tensor | None = None
    contextual: int = 0
    prefix: int = 0
    target_window: int = -1
    at_end: bool = False

    def sizes(self, mask: Mask) -> tuple[int, int, int, int]:
        """(left, right, keys that all may see, window of targets), WIDEST for no limit."""
        left, right, targets = (WIDEST if side < 0 else side for side in (*mask.window, self.target_window))
        return left, right, max(self.prefix, self.contextual), targets

    def of_rows(self, q_offsets: Tensor, k_offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(place of the first query, keys that are no targets, place of the first target), [B] each."""
        num_queries, num_keys = q_offsets.diff().long(), k_offsets.diff().long()
        shift = num_keys - num_queries if self.at_end else torch.zeros_like(num_keys)
        if self.num_targets is None:
            return shift, num_keys, torch.full_like(num_keys, WIDEST)
        history = num_keys - self.num_targets
        return shift, history, history

    def padded(self, mask: Mask, q_offsets: Tensor, k_offsets: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
        """(seen [B, Lq, Lk], places of queries [B, Lq, 1] and keys [B, 1, Lk] for biases); i is [Lq, 1], j is [Lk]."""
        left, right, prefix, near = self.sizes(mask)
        shift, history, first = (x[:, None, None] for x in self.of_rows(q_offsets, k_offsets))
        place, early = i + shift, j < prefix
        seen = ((j >= place - left) | early) & (j <= place + right)
        seen = seen | ((place >= 0) & (place < history.clamp(max=self.contextual)))
        target = place >= first
        seen = torch.where(target, (j >= history - near) | early, seen) & (j < history)
        # All targets stand at one place, right behind the history.
        return seen | (target & (j == place)), torch.minimum(place, first), torch.minimum(j, first)

    def pairs(self, mask: Mask, q_offsets: Tensor, k_offsets: Tensor) -> int:
        """How many pairs of a query and a key see each other. Waits for the device."""
        left, right, prefix, near = self.sizes(mask)
        q_offsets, k_offsets = q_offsets.cpu(), k_offsets.cpu()
        targets = None if self.num_targets is None else self.num_targets.cpu()
        queries = q_offsets.diff().long()
        rows = *self._replace(num_targets=targets).of_rows(q_offsets, k_offsets), k_offsets.diff(), q_offsets[:-1]
        shift, history, first, keys, begins = (x.repeat_interleave(queries) for x in rows)
        place = torch.arange(len(begins)) - begins + shift
        target = place >= first
        begin = torch.where(target, history - near, place - left).clamp(min=0)
        end = torch.where(target, history, torch.minimum(place + right + 1, history)).clamp(min=0)
        count = (end - begin).clamp(min=0) + torch.minimum(begin, end).clamp(max=prefix)
        contextual = (place >= 0) & (place < history.clamp(max=self.contextual))
        count = torch.where(contextual, history, count)
        return int((count + (target & (place < keys))).sum())


def checked_structure(
    mask: Mask,
    q_offsets: Tensor,
    k_offsets: Tensor,
    num_targets: Tensor | None,
    contextual: int,
    prefix: int,
    target_window: int | None,
    align: str,
) -> Structure | None:
    """The structure of a public function's arguments, None if they ask for nothing beyond `mask`."""
    if num_targets is None and not contextual and not prefix and target_window is None and align == "start":
        return None
    if align not in ("start", "end"):
        raise ValueError(f"align={align!r} must be 'start' or 'end'")
    for name, count in (("contextual", contextual), ("prefix", prefix)):
        if not 0 <= count <= WIDEST:
            raise ValueError(f"{name}={count} must be a number of a row's first tokens, from 0 to {WIDEST}")
    if target_window is not None and (target_window < -1 or num_targets is None):
        raise ValueError(f"target_window={target_window} must be at least 0 or None, and needs num_targets")
    if mask.block_size is not None:
        raise ValueError("block_size is not served with num_targets, contextual, prefix, target_window or align='end'")
    if num_targets is not None:
        if num_targets.shape != k_offsets[1:].shape or num_targets.dtype not in (torch.int32, torch.int64):
            given = f"{tuple(num_targets.shape)} {num_targets.dtype}"
            raise ValueError(f"num_targets must be [{len(k_offsets) - 1}] int32 or int64, a number a row, got {given}")
        num_targets = derived(lambda: _checked_targets(num_targets, k_offsets), "targets", num_targets, k_offsets)
    at_end = align == "end" and q_offsets is not k_offsets
    prefix = prefix if mask.left >= 0 or target_window is not None else 0
    if num_targets is None and not (contextual or prefix or at_end):
        return None
    window = -1 if target_window is None else min(target_window, WIDEST)
    return Structure(num_targets, contextual, prefix, window, at_end)


def _checked_targets(num_targets: Tensor, k_offsets: Tensor) -> Tensor:
    valid = ((num_targets >= 0) & (num_targets <= k_offsets.diff())).all()
    message = "num_targets must be from 0 to the number of keys of each row"
    if num_targets.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(valid, message)
    elif not valid:
        raise ValueError(message)
    return num_targets.to(torch.int32, copy=True)  # never the argument, which would keep itself


# Biases and structure as arguments of an operator of PyTorch, which takes only tensors and numbers.
FEATURES = (
    "Tensor? position, Tensor? time, Tensor? q_times, Tensor? k_times, Tensor? num_targets, float bucket_width, "
    "SymInt contextual, SymInt prefix, SymInt target_window, bool at_end, "
)
NUM_FEATURES, NUM_TENSORS = 10, 10  # of these, and of all tensors of a call with them


def packed_features(bias: Bias | None, structure: Structure | None) -> tuple[Any, ...]:
    """In the order of FEATURES."""
    *tensors, bucket_width = bias or Bias()
    num_targets, *numbers = structure or Structure()
    return *tensors, num_targets, bucket_width, *numbers


def unpacked_features(features: Sequence[Any]) -> tuple[Bias | None, Structure | None]:
    """(bias, structure) of `packed_features`, None for one that is empty."""
    *tensors, num_targets, bucket_width, contextual, prefix, target_window, at_end = features
    bias = Bias(*tensors, bucket_width) if tensors[0] is not None or tensors[1] is not None else None
    structured = num_targets is not None or contextual or prefix or at_end
    return bias, Structure(num_targets, contextual, prefix, target_window, at_end) if structured else None
