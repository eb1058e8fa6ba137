"""Products by PyTorch's block-scaled ones, on a CPU that passes for sm_100, with stand-ins in their place.

A stand-in takes what PyTorch's documentation and checks allow, reads codes and scales where the kernels on such a chip
find them, and multiplies in float64. No such chip has run this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

from kernels import moe, mxfp8
from kernels.core import dispatch
from kernels.mxfp8 import grouped, reference, scaled
from kernels.mxfp8.grouped import Quantized
from kernels.mxfp8.reference import swizzle_scales
from kernels.testing import Tolerance

ARGUMENTS = (ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4)
CHIP: dict[str, Any] = {"device": "cuda", "capability": (10, 0)}
calls: list[str] = []


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """float64 of codes [lines, K] and of the bytes that are in tiles at the beginning of `scales`."""
    lines, k = codes.shape
    rows, columns = up(lines, 128) // 128, up(k, 128) // 128
    tiles = scales.flatten()[: rows * columns * 512].view(rows, columns, 32, 4, 4)
    exponents = tiles.permute(0, 3, 2, 1, 4).reshape(rows * 128, columns * 4)[:lines, : up(k, 32) // 32].double() - 127
    factors = torch.where(exponents == 128, math.nan, exponents.exp2())
    return reference._decode(codes).double() * factors.repeat_interleave(32, 1)[:, :k]


def check(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], settings: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """What both products ask for; -> the scales' bytes."""
    assert settings == ARGUMENTS * 2
    assert a.dtype is b.dtype is torch.float8_e4m3fn
    assert a.is_contiguous()
    assert b.mT.is_contiguous()
    assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    assert a.shape[-1] == b.shape[-2]
    assert all(size % 16 == 0 for size in (a.shape[-1], *b.shape[-2:]))
    assert all(each.dtype is torch.float8_e8m0fnu and each.is_contiguous() for each in scales)
    first, second = (each.view(torch.uint8) for each in scales)
    return first, second


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, recipe_b: Any, swizzle_a: Any,
    swizzle_b: Any, *, output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    a_scales, b_scales = check(a, b, (scale_a, scale_b), (recipe_a, swizzle_a, recipe_b, swizzle_b))
    (m, k), n = a.shape, b.shape[1]
    assert m > 0
    assert scale_a.numel() == up(m, 128) * up(k // 32, 4)
    assert scale_b.numel() == up(n, 128) * up(k // 32, 4)
    assert output_dtype in dispatch.FLOATS
    calls.append("mm")
    return (values(a, a_scales) @ values(b.t(), b_scales).t()).to(output_dtype)


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, recipe_b: Any, swizzle_a: Any,
    swizzle_b: Any, *, offs: Tensor, output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    a_scales, b_scales = check(a, b, (scale_a, scale_b), (recipe_a, swizzle_a, recipe_b, swizzle_b))
    assert output_dtype is torch.bfloat16
    assert offs.dtype is torch.int32
    assert offs.dim() == 1
    assert offs.is_contiguous()
    groups, (m, k), n = len(offs), a.shape, b.shape[-1]
    assert groups <= 1024
    assert a.dim() == scale_a.dim() == 2
    assert scale_a.shape[0] >= m
    edges = [0, *offs.tolist()]
    if b.dim() == 3:
        assert len(b) == groups <= m
        assert k % 32 == 0  # it counts blocks by k // 32
        assert scale_b.shape == (groups, up(n, 128) * up(k // 32, 4))
        out = torch.full((m, n), math.nan, dtype=torch.bfloat16)
        at = 0
        for group, (begin, end) in enumerate(pairwise(edges)):
            part = values(a[begin:end], a_scales.flatten()[at:]) @ values(b[group].t(), b_scales[group]).t()
            out[begin:end] = part.bfloat16()
            at += up(end - begin, 128) * up(k // 32, 4)
        calls.append("rows")
        return out
    assert scale_b.dim() == 2
    assert scale_b.shape[0] >= n
    out = torch.full((groups, m, n), math.nan, dtype=torch.bfloat16)
    tiles = 0
    for group, (begin, end) in enumerate(pairwise(edges)):
        assert (end - begin) % 16 == 0
        if end > begin:
            first = values(a[:, begin:end], a_scales.flatten()[up(m, 128) * tiles :])
            second = values(b.t()[:, begin:end], b_scales.flatten()[up(n, 128) * tiles :])
            out[group] = (first @ second.t()).bfloat16()
        tiles += up((end - begin) // 32, 4)
    calls.append("columns")
    return out


@pytest.fixture(autouse=True)
def sm_100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(functional, "scaled_grouped_mm", scaled_grouped_mm)
    monkeypatch.setattr(dispatch, "facts_of", lambda tensor: CHIP | {"dtype": tensor.dtype})
    dispatch.force("")  # forgets what has been chosen
    calls.clear()
    yield
    dispatch.force("")


def random(*shape: int) -> Tensor:
    """With scales that differ from block to block along both of the last axes, so that none can stand for another."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    rows, columns = torch.arange(shape[-2])[:, None], torch.arange(shape[-1])
    return x * torch.exp2(columns // 32 % 5 - rows // 32 % 3 + rows % 4.0)


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def agree(results: list[Tensor], expected: list[Tensor], tolerance: Tolerance, dtype: torch.dtype) -> None:
    for number, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        assert ours.dtype is theirs.dtype, number
        assert ours.shape == theirs.shape, number
        assert bool(((ours - theirs).abs() <= tolerance.bound(theirs.double(), dtype)).all()), number


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_g128"])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 32, 32), (77, 96, 160), (300, 288, 64), (0, 32, 64), (128, 160, 416)])
def test_linear_is_the_specification(recipe: str, m: int, k: int, n: int) -> None:
    x, weight, bias, dy = (
        each.requires_grad_() for each in (random(m, k), random(n, k), random(1, n)[0], random(m, n))
    )

    def run(backend: str | None, bias: Tensor | None) -> list[Tensor]:
        y = mxfp8.linear(x, weight, bias, recipe=recipe, backend=backend)
        leaves = [x, weight] if bias is None else [x, weight, bias]
        return [y, *torch.autograd.grad(y, leaves, dy)]

    sums = Tolerance("another order of float32 sums", 1, 512)
    for each in (bias, None):
        agree(run(None, each), run("reference", each), sums, torch.float32)
    assert calls == ["mm"] * (6 if m else 0)
    with torch.autocast("cpu", torch.bfloat16):
        y = mxfp8.linear(x, weight, bias, recipe=recipe)
    assert torch.equal(y, mxfp8.linear(x, weight, bias, recipe=recipe).bfloat16())  # rounded once


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_g128"])
@pytest.mark.parametrize("sizes", [[5, 0, 130], [0, 0], [128, 1, 40, 0], [0, 129, 0, 256]], ids=str)
def test_grouped_products_are_the_specification(recipe: str, sizes: list[int]) -> None:
    total, ends, (n, k) = sum(sizes), ends_of(sizes), (160, 288)
    x, weight, dy = random(total + 3, k), random(len(sizes), n, k).requires_grad_(), random(total + 3, n)
    x[total:] = math.nan  # belongs to no group
    x.requires_grad_()

    def run(backend: str | None) -> list[Tensor]:
        y = mxfp8.grouped_mm(x, weight, ends, recipe=recipe, backend=backend)
        return [y, *torch.autograd.grad(y, (x, weight), dy)]

    ours = run(None)
    assert calls == ["rows", "rows", "columns"]
    expected = run("reference")
    agree(ours, expected, Tolerance("results of products are rounded to bfloat16", 1, 512), torch.bfloat16)
    assert torch.equal(ours[0][total:], expected[0][total:])


def test_other_forms_of_scales_and_a_last_group_in_part() -> None:
    ends = torch.tensor([128, 128, 205])
    (a, a_scales, _), (b, b_scales, _) = mxfp8.quantize(random(210, 160)), mxfp8.quantize(random(3, 64, 160))
    a.view(torch.uint8)[205:] = 0x7F  # NaN: not to be read
    operand = Quantized(b, swizzle_scales(b_scales))
    out = [scaled.fprop(Quantized(a, each), operand, ends)[:205] for each in (a_scales, swizzle_scales(a_scales))]
    assert torch.equal(*out)
    assert not out[0].isnan().any()
    assert calls == ["rows", "rows"]


def test_more_groups_than_rows_are_left_to_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    def operand(*shape: int) -> Quantized:
        return Quantized(*mxfp8.quantize(random(*shape))[:2])

    a, b, ends = operand(2, 32), operand(3, 32, 32), torch.tensor([0, 0, 2])
    dispatch.force("reference")
    expected = grouped.fprop(a, b, ends)
    assert torch.equal(scaled.fprop(a, b, ends), expected)
    monkeypatch.setattr(scaled, "MOST_GROUPS", 2)
    dy, x = operand(32, 128), operand(64, 128)
    ends = torch.tensor([0, 128, 128])
    assert torch.equal(scaled.wgrad(dy, x, ends, torch.float32), grouped.wgrad(dy, x, ends, torch.float32))
    assert not calls


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_g128"])
def test_experts_go_through_them(recipe: str) -> None:
    x, weights = random(60, 64), torch.rand(60, 2, generator=torch.Generator().manual_seed(0))
    gate_up, down = (random(4, 192, 64) / 64).requires_grad_(), (random(4, 64, 96) / 64).requires_grad_()
    selected = torch.arange(120).view(60, 2) * 7 % 3  # the last has no rows
    out = moe.experts(x, selected, weights, gate_up, down, recipe=recipe)
    out.sum().backward()
    assert calls == ["rows"] * 2 + ["rows", "columns"] + ["columns"]
    dispatch.force("mxfp8_grouped_mm=reference")
    expected = moe.experts(x, selected, weights, gate_up, down, recipe=recipe)
    # The first product is rounded to bfloat16, so that some of the second one's operands round to another code.
    assert (out - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("group", [32, 128])
def test_what_multiplies_is_said(group: int) -> None:
    how = "torch: block-scaled products of codes by PyTorch, added in float32 (never run)"
    assert mxfp8.linear_execution(random(64, 32), group) == how
    assert mxfp8.grouped_execution(random(2, 64, 32)) == how
    assert mxfp8.experts_execution(random(2, 64, 96), "mxfp8", group) == how
    assert mxfp8.linear_execution(random(64, 30), group).startswith("reference: operands dequantised")


def test_a_compiler_sees_one_graph_without_reading_sizes() -> None:
    leaves, ends = [random(70, 64).requires_grad_(), random(3, 32, 64).requires_grad_()], ends_of([5, 0, 64])
    results = []
    for function in (mxfp8.grouped_mm, torch.compile(mxfp8.grouped_mm, backend="aot_eager", fullgraph=True)):
        y = function(*leaves, ends, recipe="mxfp8")
        results.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for ours, compiled in zip(*results, strict=True):
        assert torch.equal(ours, compiled)
