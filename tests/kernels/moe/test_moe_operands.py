"""Operands of the products of the fused experts: pairs of codes, tables of scales, weights."""

from __future__ import annotations

import pytest
import torch

from kernels import mxfp8
from kernels.moe import reference
from kernels.mxfp8.grouped import (
    BYTES,
    MATRIX,
    TABLES,
    VALUES,
    WORDS,
    Quantized,
    Rounded,
    column_codes,
    form_of,
    fprop,
    matrix_scales,
    part_of,
    swaps,
    wgrad,
)
from kernels.testing import poisoned_empty

pytest.importorskip("triton")
from kernels.mxfp8.hopper import dequantize
from kernels.mxfp8.hopper.quantize import weights as quantized_weights
from tests.kernels.moe import moe_standins
from tests.kernels.moe.moe_cases import random, routing, same_codes


@pytest.mark.parametrize("steps", [3, 1])
def test_tables_of_scales_are_those_of_the_matrix(steps: int) -> None:
    scales = torch.randint(1, 255, (256, 4 * steps), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shared = scales[:, ::4].repeat_interleave(4, 1)
    codes = torch.zeros(256, 128 * steps, dtype=torch.float8_e4m3fn)
    tables = {
        WORDS: scales.view(torch.int32).t().contiguous(),
        BYTES: shared[:, ::4].t().contiguous().view(torch.float8_e8m0fnu),
        VALUES: torch.exp2(shared[:, ::4].t().float() - 127).bfloat16(),
    }
    for form, table in tables.items():
        assert table.dtype is TABLES[form]
        # A table of one step has the strides that it was made with, which are not those of its transpose.
        operand = Quantized(codes, table.clone(memory_format=torch.contiguous_format), 32 if form == WORDS else 128)
        assert operand.lines == 256
        assert torch.equal(matrix_scales(operand), scales if form == WORDS else shared)
    weights = Quantized(codes.view(2, 128, 128 * steps), -tables[VALUES], 128)
    assert torch.equal(matrix_scales(weights), shared.view(2, 128, 4 * steps))


@pytest.mark.gpu
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_gpu_weights_bit_for_bit(transpose: bool, apart: bool) -> None:
    weight = random(3, 256, 384)
    if apart:
        weight[1, 140:150, 130] *= 2.0**14
        weight[2, 7, 300:310] *= 2.0**14
    weight = weight.bfloat16()
    along = weight.mT.contiguous() if transpose else weight
    with poisoned_empty():
        quantized = quantized_weights.operand(weight.cuda(), transpose, 128)
        with_the_other = quantized_weights.operands(weight.cuda())[transpose]
        rounded = quantized_weights.operand(weight.cuda(), transpose, 32)
    codes, scales = moe_standins.quantized(along, -1, 128, True)
    squares = scales.view(3, -1, 128, scales.shape[-1])
    assert (squares != squares[:, :, :1]).any() == apart
    for operand in (quantized, with_the_other):
        assert same_codes(operand.codes, codes)
        assert torch.equal(matrix_scales(operand).cpu(), scales)
        assert operand.differ.item() == int(apart)
    exact = mxfp8.quantize(along, -1, backend="reference")
    values = mxfp8.dequantize(exact, torch.bfloat16, backend="reference")
    in_order = rounded.values.cpu().unflatten(-1, (-1, 4, 2, 4, 2)).movedim(-2, -4).flatten(-5)
    assert torch.equal(in_order, values)


def test_pairs_have_the_codes_of_the_columns_of_two_matrices() -> None:
    columns = random(768, 256).to(torch.float8_e4m3fn)
    pairs = moe_standins.pairs(columns)
    assert pairs.shape == (256, 768)
    # The second row of a tile in the second band, third column of tiles.
    assert same_codes(pairs[129, 512:640], columns[257, 128:256])
    assert same_codes(pairs[129, 640:768], columns[384 + 257, 128:256])
    scales = columns.new_zeros(768, 8, dtype=torch.uint8)
    assert same_codes(column_codes(Quantized(pairs, scales, 32, True)).codes, columns)


@pytest.mark.parametrize("form", [MATRIX, WORDS, BYTES])
def test_a_part_of_an_operand_has_its_scales(form: int) -> None:
    group = 128 if form == BYTES else 32
    whole = Quantized(*moe_standins.quantized(random(512, 256), 1, group), group)
    part = part_of(in_form(whole, form), 128, 384)
    assert same_codes(part.codes, whole.codes[128:384])
    assert torch.equal(matrix_scales(part), whole.scales[128:384])


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 128])
def test_gpu_products_of_pairs(group: int) -> None:
    """Equal to those of the two matrices of codes, to the last bit."""
    places = reference.permutation(routing(700, 5, 2), 5)
    ends = places.ends.cuda()
    # An odd number of tiles in each of the two matrices: a tile of the product has columns of both.
    d, x = random(places.selections.shape[0], 768), random(places.selections.shape[0], 256, seed=1)
    across, x_t = (Quantized(*(t.cuda() for t in moe_standins.quantized(value, 0, group)), group) for value in (d, x))
    paired = across._replace(codes=moe_standins.pairs(across.codes.cpu()).cuda(), paired=True)
    assert torch.equal(wgrad(paired, x_t, ends, torch.float32), wgrad(across, x_t, ends, torch.float32))


def in_form(operand: Quantized, form: int) -> Quantized:
    """With the scales of a matrix in another form."""
    scales = operand.scales.flatten(0, -2)
    shared = scales[:, ::4].t().contiguous()
    if form == WORDS:
        table = scales.contiguous().view(torch.int32).t().contiguous()
    elif form == VALUES:
        lines = shared.unflatten(1, (-1, 128))
        alike = (lines == lines[..., :1]).all(2, keepdim=True).expand_as(lines).flatten(1)
        table = (shared.short() << 7 | torch.where(alike, -(2**15), 0).short()).view(torch.bfloat16)
    else:
        table = shared.view(torch.float8_e8m0fnu) if form == BYTES else operand.scales
    differ = torch.zeros(1, dtype=torch.int32, device=scales.device) if form == VALUES else None
    return operand._replace(scales=table, differ=differ)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 128])
def test_gpu_products_with_tables_of_scales(group: int) -> None:
    """Equal to those with matrices of scales, to the last bit."""
    places = reference.permutation(routing(700, 5, 2), 5)
    ends, end = places.ends.cuda(), int(places.ends[-1])
    d, weight, x = random(places.selections.shape[0], 384), random(5, 256, 384), random(places.selections.shape[0], 256)
    along, across, weights, x_t = (
        Quantized(*(t.cuda() for t in moe_standins.quantized(value, axis, group, square and group == 128)), group)
        for value, axis, square in ((d, 1, False), (d, 0, False), (weight, 2, True), (x, 0, True))
    )
    first, second = form_of(group, second=False), form_of(group, second=True)
    product = fprop(along, weights, ends)[:end]
    assert torch.equal(fprop(in_form(along, first), in_form(weights, second), ends)[:end], product)
    # One in a table and one not: a plain operand comes from another dtype or width.
    assert torch.equal(fprop(along, in_form(weights, second), ends)[:end], product)
    assert torch.equal(fprop(in_form(along, first), weights, ends)[:end], product)
    for dy, other in ((across, x_t), (x_t, across)):
        gradient = wgrad(dy, other, ends, torch.float32)
        swapped = swaps(group, dy.lines, other.lines)
        forms = (second, first) if swapped else (first, second)
        tables = (in_form(operand, form) for operand, form in zip((dy, other), forms, strict=True))
        assert torch.equal(wgrad(*tables, ends, torch.float32), gradient)
    if group == 32:
        rounded = Rounded(dequantize.dequantize_interleaved(weights.codes, weights.scales))
        assert torch.equal(fprop(in_form(along, first), rounded, ends)[:end], product)
