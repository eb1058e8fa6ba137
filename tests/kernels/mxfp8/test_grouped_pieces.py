"""Groups of weight gradients in pieces: where they are cut, when, and what their sums add up to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from kernels.core import dispatch
from kernels.mxfp8.grouped import Quantized
from kernels.mxfp8.hopper.grouped import bf16
from kernels.mxfp8.hopper.grouped import pieces as grouped_pieces
from kernels.mxfp8.triton import pieces
from kernels.testing import poisoned_empty
from tests.kernels.core.devices import on_hopper
from tests.kernels.core.interpreting import interpret
from tests.kernels.mxfp8.grouped_sizes import ALIGNED, RAGGED
from tests.kernels.mxfp8.test_grouped_gemm import (
    BACKENDS,
    _check,
    codes_of,
    ends_of,
    random,
    scales_of,
    sums,
    values_of,
)

SKEWED = {
    "shares of a trained router": [3840, 2560, 1920, 1280, 1280, 896, 640, 384],
    "the longest last": [128, 256, 128, 5120],
}
SIZES = [*ALIGNED.values(), *RAGGED.values(), *SKEWED.values()]


def cut(sizes: list[int], length: int) -> tuple[list[int], list[int]]:
    """(the ends of pieces, the number of each group's first piece and behind the last), in plain Python."""
    ends, firsts, begin = [], [0], 0
    for size in sizes:
        ends += [begin + min(row + length, size) for row in range(0, size, length)]
        firsts.append(len(ends))
        begin += size
    return ends, firsts


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("length", [128, 384, 8192])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_piece_is_of_one_group(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], length: int, dtype: torch.dtype
) -> None:
    interpret(monkeypatch, pieces)
    ends, firsts = cut(sizes, length)
    # No row may be left over, and there may be many that have no group.
    for rows in (max(sum(sizes), 1), sum(sizes) + 1000):
        with poisoned_empty():
            actual, actual_firsts = pieces.cut(torch.tensor(sizes).cumsum(0).to(dtype), rows, length)
        assert actual_firsts.tolist() == firsts
        assert actual.tolist() == ends + [sum(sizes)] * (len(actual) - len(ends))
        assert len(actual) <= rows // length + len(sizes)


def test_the_sums_of_pieces_are_added_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, pieces)
    firsts = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)
    values = torch.randn(11, 48, 80, generator=torch.Generator().manual_seed(0))
    values[9:] = math.nan  # pieces that there are not
    with poisoned_empty():
        total = pieces.add(values, firsts, torch.float32)
    expected = torch.zeros(4, 48, 80)
    for group, (first, last) in enumerate([(0, 3), (3, 3), (3, 4), (4, 9)]):
        for piece in range(first, last):
            expected[group] += values[piece]
    assert torch.equal(total, expected)


@pytest.mark.parametrize("parts", [1, 5])
def test_a_product_in_pieces_is_the_product(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    interpret(monkeypatch, pieces)
    monkeypatch.setattr(grouped_pieces, "processors", lambda device: 132)
    monkeypatch.setattr(grouped_pieces, "parts_of", lambda *facts: parts)
    sizes = SKEWED["shares of a trained router"]
    generator = torch.Generator().manual_seed(0)
    dy, x = (torch.randint(-8, 9, (sum(sizes), width), generator=generator).float() for width in (64, 128))
    asked = []

    def product(ends: Tensor, dtype: torch.dtype) -> Tensor:
        asked.append(len(ends))
        begins = [0, *ends.tolist()[:-1]]
        return torch.stack([dy[a:b].t() @ x[a:b] for a, b in zip(begins, ends.tolist(), strict=True)]).to(dtype)

    ends = torch.tensor(sizes).cumsum(0).int()
    dw = grouped_pieces.in_pieces(product, ends, sum(sizes), (64, 128), (128, 256), torch.float32, True)
    assert asked == [8 if parts == 1 else 12]
    # Integers, whose sums are exact in any order.
    assert torch.equal(dw, torch.stack([a.t() @ b for a, b in zip(dy.split(sizes), x.split(sizes), strict=True)]))


def test_weight_gradients_of_few_tiles_are_cut() -> None:
    tile = 256, 128
    # One group makes whole waves: 32 tiles for 132 multiprocessors.
    assert grouped_pieces.parts_of(1024, 1024, 1024, 1, tile, False, 132) == 4
    assert grouped_pieces.parts_of(16384, 8192, 1024, 1, tile, False, 132) == 1
    assert grouped_pieces.parts_of(256, 128, 1, 1, tile, False, 132) == 1
    # 8 experts of width 512 with a million rows: the longest group's 32 tiles would decide.
    assert grouped_pieces.parts_of(512, 2048, 8192, 8, tile, False, 132) > 8
    assert grouped_pieces.parts_of(512, 2048, 8192, 8, (128, 256), True, 132) > 8
    # Twice the tiles suffice if the longest groups come first.
    assert grouped_pieces.parts_of(4096, 512, 8192, 8, tile, False, 132) > 8
    assert grouped_pieces.parts_of(4096, 512, 8192, 8, (128, 256), True, 132) == 1
    # Many tiles, many experts, few rows: sums would cost more than waiting does.
    for n, k, steps, groups in ((1024, 8192, 1024, 8), (16384, 1024, 1024, 8), (1024, 512, 576, 64), (512, 512, 8, 8)):
        for longest_first in (False, True):
            assert grouped_pieces.parts_of(n, k, steps, groups, tile, longest_first, 132) == 1


@on_hopper
@pytest.mark.parametrize("parts", [1, 3, 16])
@pytest.mark.parametrize("sizes", [*ALIGNED.values(), *SKEWED.values()], ids=str)
def test_gpu_weight_gradients_in_pieces(monkeypatch: pytest.MonkeyPatch, sizes: list[int], parts: int) -> None:
    monkeypatch.setattr(grouped_pieces, "parts_of", lambda n, k, steps, *facts: min(parts, steps))
    n, k, rows, ends = 384, 640, sum(sizes), ends_of(sizes)
    dy, x = random(rows + 128, n), random(rows + 128, k)
    dy[rows:] = x[rows:] = math.nan
    oracle = sums(dy[:rows], x[:rows], sizes)
    for dtype in (torch.bfloat16, torch.float32):
        with poisoned_empty():
            dw, again = (bf16.grouped_wgrad(dy, x, ends, dtype) for _ in range(2))
        _check(dw, oracle, 32)
        assert torch.equal(dw, again)

    for group, (out_features, in_features) in ((32, (n, k)), (32, (k, n)), (128, (n, k))):
        operands = []
        for seed, features in enumerate((out_features, in_features)):
            codes = codes_of(features, rows + 128, device="cuda", seed=seed)
            codes.view(torch.uint8)[:, rows:] = 0x7F
            scales = scales_of(features, rows // 32 + 4, device="cuda", group=group)
            operands.append(Quantized(codes, scales, group))
        oracle = sums(*(values_of(each)[:, :rows].t() for each in operands), sizes)
        facts = {"group": group, "in_features": in_features, "out_features": out_features}
        choice = dispatch.choose("mxfp8_grouped_wgrad", BACKENDS[group], operands[0].codes, **facts)
        for dtype in (torch.bfloat16, torch.float32):
            with poisoned_empty():
                dw, again = (choice(*operands, ends, dtype) for _ in range(2))
            _check(dw, oracle, group)
            assert torch.equal(dw, again)
