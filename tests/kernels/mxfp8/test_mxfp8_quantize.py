"""Groups of 128, and the GPU quantiser: bit for bit what the reference gives."""

from __future__ import annotations

import math
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from kernels import mxfp8
from kernels.mxfp8.grouped import BYTES, MATRIX, TABLES, TILES, VALUES, WORDS, Quantized, matrix_scales
from kernels.mxfp8.reference import swizzle_scales
from kernels.testing import compile_ahead, poisoned_empty, sqnr_db


def uneven(*shape: int, seed: int = 0) -> Tensor:
    """Rows of magnitudes 2^-12 to 2^12."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-12, 13, (*shape[:-1], 1), generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(powers.float())


def scale_bytes_of(x: Tensor, axis: int, **options) -> Tensor:
    return mxfp8.quantize(x, axis, backend="reference", **options).scales


@pytest.mark.parametrize("axis", [0, 1])
def test_a_group_has_the_scale_of_its_largest_block(axis: int) -> None:
    x = torch.randn(200, 300) * torch.exp2(torch.randint(-9, 9, (200, 300)).float())
    blocks, groups = scale_bytes_of(x, axis), scale_bytes_of(x, axis, block_size=128)
    for i in range(blocks.shape[axis]):
        four = blocks.narrow(axis, i // 4 * 4, min(4, blocks.shape[axis] - i // 4 * 4))
        assert torch.equal(groups.select(axis, i), four.amax(axis))


def test_groups_leave_gaussian_products_as_they_are() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    both = [mxfp8.dequantize(mxfp8.quantize(x, block_size=group)) for group in (32, 128)]
    # A scale that is a power of two too large changes only elements that become subnormal, 2^14 below the largest.
    assert sqnr_db(both[1], both[0]) > 60
    assert (both[0] != both[1]).float().mean() < 1e-3


@pytest.mark.parametrize("axis", [1, 2])
def test_a_square_shares_its_scale_unless_its_rows_are_too_different(axis: int) -> None:
    x = torch.randn(3, 300, 260, generator=torch.Generator().manual_seed(0))
    # Seen with the lines that are quantised as rows.
    lines = x.mT if axis == 1 else x
    lines[:, 130] *= 2.0**30  # one row of the second band of squares
    lines[:, 5] = 0
    across, along = lines.shape[1:]

    def seen(square: bool) -> Tensor:
        scales = scale_bytes_of(x, axis, block_size=128, square=square)
        return scales.mT if axis == 1 else scales

    scales, rows = seen(True), seen(False)
    assert scales.shape == (3, across, -(-along // 32))
    for first in range(0, across, 128):
        for block in range(0, scales.shape[2], 4):
            square = scales[:, first : first + 128, block : block + 4]
            if first == 128:
                assert torch.equal(square, rows[:, first : first + 128, block : block + 4])
            else:
                assert (square == rows[:, first : first + 128, block : block + 4].amax((1, 2), keepdim=True)).all()


def test_what_cannot_be_quantised_says_what_can() -> None:
    with pytest.raises(ValueError, match=r"block_size must be one of \(32, 128\), got 64"):
        mxfp8.quantize(torch.zeros(4, 4), block_size=64)
    with pytest.raises(ValueError, match="square needs block_size=128 and one of the last two axes"):
        mxfp8.quantize(torch.zeros(4, 4), square=True)
    with pytest.raises(ValueError, match="square needs block_size=128"):
        mxfp8.quantize(torch.zeros(4, 4, 4), 0, block_size=128, square=True)
    with pytest.raises(ValueError, match=r"axis 2 is not one of x \(4, 4\), which has axes -2 to 1"):
        mxfp8.quantize(torch.zeros(4, 4), 2)


@pytest.mark.parametrize("shape", [(40,), (5, 64), (0, 64), (2, 3, 40, 70), (3, 0, 32), (2, 5, 0)])
def test_the_backend_quantises_matrices_of_any_batch(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    from kernels.mxfp8.hopper.quantize import operators
    from tests.kernels.moe import moe_standins

    monkeypatch.setattr(operators, "quantize_both", moe_standins.quantize_both)
    x = uneven(*shape)
    for axis in range(-min(2, x.dim()), 0):
        for group, square in ((32, False), (128, False), (128, True))[: 1 + x.dim()]:
            actual = operators.quantize(x, axis, group, square)
            expected = mxfp8.quantize(x, axis, block_size=group, square=square, backend="reference")
            assert_same(actual[:2], expected[:2])
            assert actual.axis == expected.axis


def test_a_batch_of_any_number_of_matrices_is_a_grid_that_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from kernels.mxfp8.hopper.quantize import operators

    grids: list[tuple[int, ...]] = []
    kernel = MagicMock()
    kernel.__getitem__.side_effect = lambda grid: grids.append(grid) or kernel
    monkeypatch.setattr(operators, "quantize_kernel", kernel)
    operators.quantize_both(torch.zeros(70000, 130, 1), False, True, 32, False, MATRIX)
    assert grids == [(140000,)]  # of an axis of its own a batch may have 65535


@pytest.mark.parametrize("form", TABLES)
@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (2, 0, 0)])
def test_scales_of_nothing_have_tables_as_well(shape: tuple[int, ...], form: int) -> None:
    pytest.importorskip("triton")
    from kernels.mxfp8.hopper.quantize.operators import quantize_both

    group, square = 32 if form == WORDS else 128, form == VALUES
    codes, _, codes_t, _ = quantize_both(torch.empty(shape, dtype=torch.bfloat16), True, True, group, square, form)
    assert codes.shape == codes_t.mT.shape == shape


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Codes and scales are equal; a NaN may carry a sign."""
    assert torch.equal(actual[1].cpu(), expected[1])
    codes, reference = (t.cpu().contiguous().view(torch.uint8).int() for t in (actual[0], expected[0]))
    assert torch.equal(torch.where(codes & 127 == 127, 127, codes), torch.where(reference & 127 == 127, 127, reference))


def of_every_kind(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows of every magnitude, with NaN, infinity, a row of zeros and one of subnormals where there is room."""
    x = uneven(*shape)
    if x.shape[-2] > 4 and x.shape[-1] > 40:
        x[..., 3, 5] = math.nan
        x[..., 0, 40] = math.inf
        x[..., 4, :] = 0
        x[..., 2, :] *= 2.0**-126
    return x.to(dtype)


SHAPES = {
    torch.bfloat16: [
        (128, 256),
        (2, 256, 384),
        (2304, 128),
        (1, 32),
        (300, 260),
        (5, 7),
        (3, 130, 160),
        (0, 64),
        (3, 0, 32),
    ],
    torch.float32: [(256, 128), (2, 3, 70, 96)],
    torch.float16: [(129, 64)],
}


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "shape"), [(dtype, shape) for dtype, shapes in SHAPES.items() for shape in shapes])
def test_gpu_quantises_bit_for_bit_in_both_orientations(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from kernels.mxfp8.hopper.quantize.operators import quantize_both

    x = of_every_kind(shape, dtype)
    for group, square in ((32, False), (128, False), (128, True)):
        with poisoned_empty():
            codes, scales, codes_t, scales_t = quantize_both(x.cuda(), True, True, group, square, MATRIX)
        options = {"block_size": group, "square": square, "backend": "reference"}
        assert_same((codes, scales), mxfp8.quantize(x, -1, **options)[:2])
        assert_same((codes_t.mT, scales_t.mT), mxfp8.quantize(x, -2, **options)[:2])


@pytest.mark.gpu
def test_gpu_takes_transposed_and_sliced_tensors() -> None:
    x = uneven(200, 400)
    for view in (x.t(), x[:, 3:200], x[1::2]):
        for axis in (0, 1):
            actual = mxfp8.quantize(view.cuda(), axis, backend="hopper")
            assert_same(actual[:2], mxfp8.quantize(view, axis, backend="reference")[:2])
    assert_same(mxfp8.quantize(x[0].cuda(), backend="hopper")[:2], mxfp8.quantize(x[0], backend="reference")[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 300, 260), (2, 256, 384)])
def test_gpu_writes_both_orientations_and_tensor_core_tiles_of_scales(shape: tuple[int, ...]) -> None:
    from kernels.mxfp8.hopper.quantize.operators import quantize_both

    x = uneven(*shape).bfloat16()
    with poisoned_empty():
        codes, scales, codes_t, scales_t = quantize_both(x.cuda(), True, True, 32, False, TILES)
    along, across = (mxfp8.quantize(x, axis, backend="reference") for axis in (2, 1))
    assert torch.equal(scales.cpu(), swizzle_scales(along.scales))
    assert torch.equal(scales_t.cpu(), swizzle_scales(across.scales.mT.contiguous()))
    assert torch.equal(codes.cpu().view(torch.uint8), along.codes.view(torch.uint8))
    assert torch.equal(codes_t.cpu().view(torch.uint8), across.codes.mT.contiguous().view(torch.uint8))


@pytest.mark.gpu
def test_gpu_operator_passes_opcheck() -> None:
    from kernels.mxfp8.hopper.quantize.operators import quantize_both

    x = uneven(130, 96).bfloat16().cuda()
    torch.library.opcheck(quantize_both.definition, (x, True, True, 32, False, MATRIX))
    torch.library.opcheck(quantize_both.definition, (x.new_zeros(128, 256), True, True, 128, True, VALUES))


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "form"), [(32, WORDS), (128, BYTES), (128, VALUES)])
def test_gpu_writes_tables_of_scales(group: int, form: int) -> None:
    from kernels.mxfp8.hopper.quantize.operators import quantize_both

    x, square = uneven(256, 384).bfloat16(), form == VALUES
    # A square that shares its scale along both axes, and one that does along neither.
    x[:128, :128] = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    x[128:, 130] *= 2.0**-30
    with poisoned_empty():
        results = quantize_both(x.cuda(), True, True, group, square, form)
    for axis, codes, table in ((1, *results[:2]), (0, *results[2:])):
        expected = mxfp8.quantize(x if axis else x.t(), block_size=group, square=square, backend="reference")
        assert table.dtype is TABLES[form]
        assert_same((codes, matrix_scales(Quantized(codes, table, group))), expected[:2])
        if square:
            lines = expected.scales[:, ::4].unflatten(0, (-1, 128))
            shared = (lines == lines[:, :1]).all(1, keepdim=True).expand_as(lines).flatten(0, 1).t()
            assert torch.equal(table.view(torch.int16).cpu() < 0, shared)
            assert shared.any()
            assert not shared.all()


@pytest.mark.gpu
def test_gpu_says_which_scales_come_in_tables() -> None:
    from kernels.mxfp8.hopper.quantize.operators import quantize_both

    for x in (torch.zeros(128, 96, dtype=torch.bfloat16), torch.zeros(128, 128)):
        with pytest.raises(ValueError, match="multiples of 128"):
            quantize_both(x.cuda(), True, True, 32, False, WORDS)
    for form, square in ((VALUES, False), (BYTES, True)):
        with pytest.raises(ValueError, match="of squares if they are values"):
            quantize_both(torch.zeros(128, 128, dtype=torch.bfloat16).cuda(), True, True, 128, square, form)


@pytest.mark.parametrize(
    ("target", "dtype", "square", "spill_bytes"),
    [
        ("sm_90", "bf16", False, 16),
        ("sm_100", "bf16", False, 16),
        # Squares are known to lack this many registers, by Triton 3.6; by 3.7 they lack 64 and 12 bytes.
        ("sm_90", "bf16", True, 72),
        ("sm_90", "fp32", True, 20),
    ],
)
def test_quantiser_compiles_within_its_registers(target: str, dtype: str, square: bool, spill_bytes: int) -> None:
    pytest.importorskip("triton")
    from kernels.mxfp8.hopper.quantize.operators import launch_options, quantize_kernel

    pointers = {"row_codes": "*fp8e4nv", "row_scales": "*u8", "column_codes": "*fp8e4nv", "column_scales": "*u8"}
    sizes = ["num_rows", "num_columns", "row_scales_stride", "column_scales_stride"]
    constants = {
        "ROWS": True,
        "COLUMNS": True,
        "GROUP": 128 if square else 32,
        "SQUARE": square,
        "SWIZZLE": target == "sm_100",
        "EVEN": True,
    }
    options = launch_options()
    compiled = compile_ahead(
        quantize_kernel,
        {"x": f"*{dtype}", **pointers, **dict.fromkeys(sizes, "i32")},
        constants | {"R": options.pop("R")},
        target=target,
        gluon=True,
        divisible_by_16=sizes[:2],
        **options,
    )
    assert compiled.spill_bytes <= spill_bytes
    assert compiled.contains("cvt.rn.satfinite.e4m3x2.f32")
    # Rows of the tile come in whole 16-byte units.
    assert compiled.contains("ld.global.v4.b32")


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("group", "square"), [(32, False), (128, True)])
def test_quantiser_of_whole_tiles_compiles_to_pairs_and_tiles(target: str, group: int, square: bool) -> None:
    pytest.importorskip("triton")
    from kernels.mxfp8.hopper.quantize.pairs import REGISTERS, WARPS, codes_layout, words_layout
    from kernels.mxfp8.hopper.quantize.tiles import quantize_tiles_kernel

    words, codes = f"tensordesc<i32[128, 64],{words_layout()!r}>", f"tensordesc<i16[128, 64],{codes_layout()!r}>"
    tensors = {"x_desc": words, "row_desc": codes, "column_desc": codes, "row_scales": "*u8", "column_scales": "*u8"}
    tensors["differ"] = "*u8"
    sizes = ["num_rows", "num_columns", "tile_rows", "row_scales_stride", "column_scales_stride"]
    compiled = compile_ahead(
        quantize_tiles_kernel,
        {**tensors, **dict.fromkeys(sizes, "i32")},
        {
            "ROWS": True,
            "COLUMNS": True,
            "GROUP": group,
            "SQUARE": square,
            "ROW_FORM": TILES if target == "sm_100" else MATRIX,
            "COLUMN_FORM": TILES if target == "sm_100" else MATRIX,
        },
        target=target,
        gluon=True,
        num_warps=WARPS,
        maxnreg=REGISTERS,
        divisible_by_16=sizes[:2],
    )
    # Squares lack a few registers on Blackwell.
    assert compiled.spill_bytes <= (16 if square else 0)
    # Three programs share a multiprocessor.
    assert 3 * (compiled.shared_bytes + 1024) <= 228 * 1024
    for instruction in ("max.NaN.xorsign.abs.bf16x2", "mul.rn.bf16x2", "cp.async.bulk.tensor.2d.global.shared"):
        assert compiled.contains(instruction)
