"""MXFP8 codes and scales beside torchao's, bit for bit. torchao is optional: `pip install --no-deps torchao`.

Its release 0.18 takes scales from a rounded logarithm, divides by 1 where the scale byte is 0, and clips infinities;
what holds of its later code alone is skipped beside it.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import mxfp8

mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed")
config = pytest.importorskip("torchao.prototype.mx_formats.config")

exact = pytest.mark.skipif(
    not hasattr(mx_tensor, "_f32_to_e8m0_rceil"), reason="torchao up to 0.18 rounds scales of boundaries and subnormals"
)


def random(dtype: torch.dtype) -> Tensor:
    """Blocks around all magnitudes whose scale byte is neither 0 nor 255."""
    generator = torch.Generator().manual_seed(0)
    magnitude = torch.linspace(-110, 120, 2048).round().exp2()
    return (torch.randn(2048, 256, generator=generator) * magnitude[:, None]).to(dtype)


def random_bits(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (512, 256), generator=generator)
    return bits.to(torch.int32).view(torch.float32).to(dtype)


def special(dtype: torch.dtype) -> Tensor:
    """Blocks that begin with 0, NaN, an infinity, a subnormal, the largest value or one around a boundary of scales."""
    ends = [-0.0, math.nan, math.inf, -math.inf, torch.finfo(torch.float32).max, 2.0**-149, 2.0**-127, 2.0**-126]
    # Not of 2^-127: there torchao's quotient by 448 is subnormal, and rounds away what is above the boundary.
    boundary = 448.0 * torch.arange(-126, 119).float().exp2()
    around = boundary.view(torch.int32)[:, None] + torch.arange(-8, 9)
    first = torch.cat([torch.tensor(ends), around.int().flatten().view(torch.float32)])
    others = torch.where(first.isfinite(), first, 1.0)[:, None] * torch.linspace(-1, 1, 31)
    return torch.cat([first[:, None], others], dim=1).to(dtype)


def every_bfloat16(dtype: torch.dtype) -> Tensor:
    return torch.arange(2**16).to(torch.int16).view(torch.bfloat16).view(-1, 32).to(dtype)


@pytest.mark.parametrize(
    "values",
    [
        random,
        pytest.param(random_bits, marks=exact),
        pytest.param(special, marks=exact),
        pytest.param(every_bfloat16, marks=exact),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_are_those_of_torchao(values, dtype) -> None:
    x = values(dtype)
    scales, codes = mx_tensor.to_mx(x, torch.float8_e4m3fn, 32, config.ScaleCalculationMode.RCEIL)
    ours = mxfp8.quantize(x)
    assert_same_bytes(ours.scales, scales.view(torch.uint8))
    # Of a NaN the sign is nobody's business.
    assert_same_bytes(*(torch.where(each.isnan(), 127, each.view(torch.uint8)) for each in (ours.codes, codes)))


def assert_same_bytes(ours: Tensor, theirs: Tensor) -> None:
    differ = (ours != theirs.view_as(ours)).nonzero()
    assert not len(differ), f"{len(differ)} of {ours.numel()} differ, first at {differ[:3].tolist()}"
