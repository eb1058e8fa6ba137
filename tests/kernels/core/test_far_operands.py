"""Dense operands whose entries span more than 32 bits address: kernels get copies of these and of no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.core.triton import near
from kernels.jagged.triton import bmm_narrow


def outermost_last(batch: int, tall: int, wide: int) -> Tensor:
    """[batch, tall, wide], the whole batch of which is between two of `tall`, without memory."""
    return torch.empty(tall, batch, wide, device="meta").transpose(0, 1)


def test_entries_are_copied_only_when_32_bits_do_not_span_them() -> None:
    far = outermost_last(2**22, 65, 8)
    assert near(far).is_contiguous()
    for fits in (far[:, :64], far.contiguous(), torch.empty(1, 4, 8).expand(2**30, -1, -1)):
        assert near(fits) is fits


def test_narrow_products_get_matrices_within_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(bmm_narrow, "_launch", lambda *arguments, **_: launched.append(arguments))
    offsets, x = torch.empty(2**22 + 1, dtype=torch.int64, device="meta"), torch.empty(9, 65, device="meta")
    bmm_narrow.products(offsets, wide=x, matrix=outermost_last(2**22, 65, 8), to=("narrow",))
    _, _, wide, _, matrix, *rest = launched[0]
    assert wide is x
    assert matrix.is_contiguous()
    width, of_wide, *strides = [number for number in rest if type(number) is int][1:6]
    assert (width, of_wide, strides) == (65, 65, [65 * 8, 8, 1])
