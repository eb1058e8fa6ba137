"""Pairs that attention computes, against the mask itself."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import checked_structure
from kernels.core.mask import Mask, checked_mask
from kernels.core.offsets import attended_pairs
from tests.kernels.attention.attention_cases import STRUCTURES, sees, with_targets


@pytest.mark.parametrize("block_size", [None, 3])
@pytest.mark.parametrize("window", [(-1, -1), (2, 2), (0, 1), (-1, 0), (1, -1)])
@pytest.mark.parametrize("causal", [False, True])
def test_pairs_are_those_of_the_mask(causal: bool, window: tuple[int, int], block_size: int | None) -> None:
    q_lengths, k_lengths = [5, 0, 3, 7, 1], [5, 2, 0, 4, 9]
    expected = 0
    for num_q, num_k in zip(q_lengths, k_lengths, strict=True):
        i, j = torch.arange(num_q)[:, None], torch.arange(num_k)
        seen = (j <= i) if causal else torch.ones(num_q, num_k, dtype=torch.bool)
        left, right = window
        seen = seen & ((i - j <= left) | (left < 0)) & ((j - i <= right) | (right < 0))
        if block_size is not None:
            seen = seen & (i // block_size == j // block_size)
        expected += int(seen.sum())
    offsets = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (q_lengths, k_lengths)]
    assert attended_pairs(*offsets, Mask(causal, *window, block_size)) == expected


@pytest.mark.parametrize("name", STRUCTURES)
def test_pairs_are_those_of_a_structure(name: str) -> None:
    lengths = [5, 0, 3, 7, 1, 2], [5, 2, 0, 4, 9, 8]
    offsets = [torch.tensor([0, *each]).cumsum(0) for each in lengths]
    call = with_targets(STRUCTURES[name], offsets[1])
    window = call.pop("window", None)
    targets = call.pop("num_targets", None)
    arguments = dict.fromkeys(("contextual", "prefix"), 0) | {"target_window": None, "align": "start"} | call
    mask = checked_mask(window=window)
    structure = checked_structure(mask, *offsets, targets, **arguments)
    expected = 0
    for row, (num_q, num_k) in enumerate(zip(*lengths, strict=True)):
        own = call | {"window": window, "targets": None if targets is None else int(targets[row])}
        expected += sum(sees(i, j, num_q, num_k, **own)[0] for i in range(num_q) for j in range(num_k))
    assert structure is not None
    assert structure.pairs(mask, *offsets) == expected
