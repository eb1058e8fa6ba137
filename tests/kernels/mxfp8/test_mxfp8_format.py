"""The MXFP8 format against an oracle in exact rational arithmetic that shares no code with the reference."""

from __future__ import annotations

import bisect
import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import mxfp8
from kernels.mxfp8.reference import BLOCK, scale_bytes
from kernels.testing import sqnr_db

# Every finite non-negative E4M3 value in order of its code: 8 subnormals, then 15 binades of 8, the last without NaN.
E4M3 = [Fraction(mantissa, 512) for mantissa in range(8)]
E4M3 += [Fraction(8 + code % 8, 8) * Fraction(2) ** (code // 8 - 7) for code in range(8, 127)]
TINY, LARGEST = 2.0**-149, float(torch.finfo(torch.float32).max)


def oracle_scale(amax: float) -> int:
    """The smallest byte b with amax <= 448 * 2^(b - 127)."""
    if not math.isfinite(amax):
        return 255
    return next(byte for byte in range(255) if Fraction(amax) <= 448 * Fraction(2) ** (byte - 127))


def oracle_code(value: float, scale: int) -> int:
    """Nearest E4M3 code, ties to the even code; the sign is the high bit."""
    sign = 128 * (math.copysign(1, value) < 0)
    magnitude = abs(Fraction(value)) / Fraction(2) ** (scale - 127)
    above = bisect.bisect_left(E4M3, magnitude)
    candidates = [code for code in (above - 1, above) if 0 <= code < len(E4M3)]
    return sign + min(candidates, key=lambda code: (abs(E4M3[code] - magnitude), code % 2))


def float32_from_bits(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def next_up(value: float) -> float:
    return float32_from_bits(struct.unpack("<I", struct.pack("<f", value))[0] + 1)


def assert_equals_oracle(block: list[float]) -> None:
    """One block of at most 32 float32 values."""
    codes, scales, _ = mxfp8.quantize(torch.tensor(block))
    scale = oracle_scale(max(abs(value) for value in block))
    assert scales.tolist() == [scale]
    assert codes.view(torch.uint8).tolist() == [oracle_code(value, scale) for value in block]


def test_oracle_table_is_e4m3() -> None:
    assert (E4M3[1], E4M3[8], E4M3[-1]) == (Fraction(1, 512), Fraction(1, 64), 448)
    assert sorted(set(E4M3)) == E4M3


def test_scale_at_every_exponent_around_the_boundary() -> None:
    # 448 * 2^k must not round up and its successor must, where a multiplication by a rounded 1 / 448 can go wrong.
    maxima = [
        float32_from_bits(exponent << 23 | mantissa)
        for exponent in range(255)
        for mantissa in (0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF)
    ]
    assert scale_bytes(torch.tensor(maxima)).tolist() == [oracle_scale(amax) for amax in maxima]


@pytest.mark.parametrize(
    "block",
    [
        [0.0] * 32,
        [-0.0, 0.0, -0.0],
        [TINY],
        [TINY, -3 * TINY, 0.0],
        [2.0**-127, 2.0**-136, -(2.0**-137), 1.5 * 2.0**-136],
        [2.0**-126, 2.0**-130],
        [448.0],
        [next_up(448.0), 448.0, -1.0],
        [448.0 * 2.0**-127, 2.0**-127],
        [next_up(448.0 * 2.0**-127)],
        [448.0 * 2.0**119, -1.0],
        [next_up(448.0 * 2.0**119)],
        [LARGEST, -LARGEST, LARGEST / 2**18, LARGEST / 2**19, TINY],
        [448.0, 17.0, 19.0, 18.0, 22.0, -17.0, 2.0**-10, 3 * 2.0**-10, -(2.0**-10), next_up(2.0**-10)],  # ties
        [448.0, 2.0**-6, 2.0**-6 - 2.0**-10, 2.0**-9, 2.0**-11],  # around the smallest normal
    ],
)
def test_edge_blocks_bit_for_bit(block: list[float]) -> None:
    assert_equals_oracle(block)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=BLOCK))
@settings(max_examples=150, deadline=None)
def test_any_block_bit_for_bit(block: list[float]) -> None:
    assert_equals_oracle(block)


def test_all_bfloat16_mantissas_and_a_wide_range_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-20, 1, (64, BLOCK), generator=generator).double()
    x = (torch.randn(64, BLOCK, generator=generator).double() * 2**exponents).bfloat16()
    codes, scales, _ = mxfp8.quantize(x)
    for row, row_codes, scale in zip(x.tolist(), codes.view(torch.uint8).tolist(), scales[:, 0].tolist(), strict=True):
        assert scale == oracle_scale(max(map(abs, row)))
        assert row_codes == [oracle_code(value, scale) for value in row]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_spoil_their_block_only(broken: float) -> None:
    x = torch.ones(3, BLOCK)
    x[1, 7] = broken
    quantized = mxfp8.quantize(x)
    assert quantized.scales[:, 0].tolist() == [119, 255, 119]
    values = mxfp8.dequantize(quantized)
    assert values[1].isnan().all()
    assert (values[[0, 2]] == 1).all()
    assert quantized.codes[1].float().isnan().all()


def test_nan_with_a_sign_or_a_payload_is_a_nan() -> None:
    bits = torch.tensor([-0x00400000, 0x7F800001, -0x007FFFFF], dtype=torch.int32)  # 0xFFC00000, 0x7F800001, 0xFF800001
    assert scale_bytes(bits.view(torch.float32)).tolist() == [255, 255, 255]


def test_scaled_values_never_exceed_the_largest_element() -> None:
    x = torch.randn(200, BLOCK, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 200)[:, None]
    codes = mxfp8.quantize(x).codes.float().abs().amax(1)
    # Rounding up never saturates and wastes at most one binade.
    assert ((codes <= 448) & (codes >= 224)).all()


def test_dequantised_values_and_errors() -> None:
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(2))
    quantized = mxfp8.quantize(x)
    values = mxfp8.dequantize(quantized)
    scale = 2.0 ** (quantized.scales.repeat_interleave(BLOCK, 1).float() - 127)
    # Half a unit in the last place: 2^-4 of a normal element's binade, 2^-10 of the scale below the normals.
    assert ((values - x).abs() <= torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10)).all()
    assert torch.equal(values, mxfp8.dequantize(quantized, torch.bfloat16).float())  # bfloat16 holds them exactly
    assert torch.equal(mxfp8.dequantize(mxfp8.quantize(values)), values)  # they are their own rounding


def test_signal_to_noise_of_gaussian_data() -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(3))
    # Elements m * 2^e with m uniform in [1, 2) round with a step of 2^(e - 3): E[m^2] / (step^2 / 12) = 32.5 dB. Less
    # when the mantissas of large elements crowd near 1, and the format cannot do better.
    assert 30.5 < sqnr_db(mxfp8.dequantize(mxfp8.quantize(x)), x) < 32.6


@pytest.mark.parametrize("length", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_any_axis_of_any_length(length: int, axis: int) -> None:
    shape = [3, 5, 4]
    shape[axis] = length
    x = torch.randn(shape, generator=torch.Generator().manual_seed(length))
    quantized = mxfp8.quantize(x, axis)
    last = mxfp8.quantize(x.movedim(axis, -1).contiguous())
    assert quantized.codes.shape == x.shape
    assert quantized.scales.shape[axis] == -(-length // BLOCK)
    assert torch.equal(quantized.codes.movedim(axis, -1).view(torch.uint8), last.codes.view(torch.uint8))
    assert torch.equal(quantized.scales.movedim(axis, -1), last.scales)
    assert torch.equal(mxfp8.dequantize(quantized).movedim(axis, -1), mxfp8.dequantize(last))


def test_short_last_block_is_as_if_zeros_followed() -> None:
    x = torch.randn(2, 40, generator=torch.Generator().manual_seed(4))
    short, padded = mxfp8.quantize(x), mxfp8.quantize(torch.nn.functional.pad(x, (0, 24)))
    assert torch.equal(short.codes.view(torch.uint8), padded.codes[:, :40].view(torch.uint8))
    assert torch.equal(short.scales, padded.scales)


def test_the_transpose_of_a_quantised_tensor_is_not_the_quantised_transpose() -> None:
    # E4M3 floats, so an orientation shows only where a block spans more than its 14 full-precision binades.
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(5)) * torch.tensor([2.0**-10, 2.0**10]).repeat(32)
    along_rows, along_columns = (mxfp8.dequantize(mxfp8.quantize(x, axis)) for axis in (1, 0))
    assert sqnr_db(along_rows[:, ::2], x[:, ::2]) < 5
    assert sqnr_db(along_columns[:, ::2], x[:, ::2]) > 30


@pytest.mark.parametrize("shape", [(0,), (0, 64), (64, 0), (2, 0, 3)])
def test_empty(shape: tuple[int, ...]) -> None:
    for axis in range(len(shape)):
        assert mxfp8.dequantize(mxfp8.quantize(torch.zeros(shape), axis)).shape == shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_input_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(6)).to(dtype)
    quantized, single = mxfp8.quantize(x), mxfp8.quantize(x.float())
    assert torch.equal(quantized.codes.view(torch.uint8), single.codes.view(torch.uint8))
    assert torch.equal(quantized.scales, single.scales)


def test_non_contiguous_input() -> None:
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(7)).t()
    view, copy = mxfp8.quantize(x), mxfp8.quantize(x.contiguous())
    assert torch.equal(mxfp8.dequantize(view), mxfp8.dequantize(copy))


def test_no_host_sync() -> None:
    # Meta tensors have no data: whoever asks for a number of theirs gets an exception.
    quantized = mxfp8.quantize(torch.empty(40, 70, device="meta"))
    assert mxfp8.dequantize(quantized).shape == (40, 70)
    assert mxfp8.unswizzle_scales(mxfp8.swizzle_scales(quantized.scales), 40, 3).shape == (40, 3)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"takes a floating tensor.*torch.int64"):
        mxfp8.quantize(torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (1, 1), (129, 5), (300, 9), (256, 3)])
def test_swizzle_follows_the_tile_layout(rows: int, columns: int) -> None:
    scales = torch.randint(1, 256, (rows, columns), generator=torch.Generator().manual_seed(8)).to(torch.uint8)
    swizzled = mxfp8.swizzle_scales(scales)
    tiles_per_row = -(-columns // 4)
    expected = torch.zeros(-(-rows // 128) * tiles_per_row * 512, dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * tiles_per_row + c // 4
            expected[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = scales[r, c]
    assert torch.equal(swizzled, expected)
    assert torch.equal(mxfp8.unswizzle_scales(swizzled, rows, columns), scales)


def test_swizzle_of_a_batch_is_the_batch_of_swizzles() -> None:
    scales = torch.randint(0, 256, (2, 3, 130, 6), generator=torch.Generator().manual_seed(9)).to(torch.uint8)
    swizzled = mxfp8.swizzle_scales(scales)
    each: list[Tensor] = [mxfp8.swizzle_scales(matrix) for matrix in scales.flatten(0, 1)]
    assert torch.equal(swizzled.flatten(0, 1), torch.stack(each))
    assert torch.equal(mxfp8.unswizzle_scales(swizzled, 130, 6), scales)
