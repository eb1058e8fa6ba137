"""Linear compression of float8 operands: its specification, and the Hopper kernel against it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.ikbo import Float8, float8_tokens, float8_weight, linear_compression, linear_compression_float8
from kernels.testing import Tolerance, assert_close_to_oracle, poisoned_empty, sqnr_db
from tests.kernels.core.devices import HOPPER


def make(
    counts: tuple[int, ...], num_out: int, depth: int, request_depth: int, width: int, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(candidate, request, w_candidate, w_request, offsets)."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    offsets = torch.tensor([0, *counts], device=device).cumsum(0)
    candidate, request = random(sum(counts), depth, width), random(len(counts), request_depth, width)
    sizes = row_sizes(num_out).to(device)
    return candidate, request, random(num_out, depth) * sizes, random(num_out, request_depth) * sizes, offsets


def row_sizes(num_out: int) -> Tensor:
    """Rows of a weight differ in size, because each has a scale: [M, 1]."""
    return 2.0 ** (torch.arange(num_out) % 13 - 6)[:, None]


def quantized(tensors: tuple[Tensor, ...]) -> tuple[Float8, Float8, Float8, Float8, Tensor]:
    candidate, request, w_candidate, w_request, offsets = tensors
    return (
        float8_tokens(candidate), float8_tokens(request), float8_weight(w_candidate), float8_weight(w_request), offsets
    )  # fmt: skip


def test_it_is_close_to_the_product_of_what_was_quantised() -> None:
    tensors = make((3, 0, 2), num_out=7, depth=50, request_depth=70, width=16)
    out = linear_compression_float8(*quantized(tensors), dtype=torch.float16)
    assert out.dtype == torch.float16
    expected = linear_compression(*tensors)
    for row in range(7):
        assert sqnr_db(out[:, row].float(), expected[:, row]) > 26  # three bits of mantissa of two operands


def test_codes_of_tokens_are_next_to_each_other_and_start_at_lines() -> None:
    with poisoned_empty():
        codes, scale = float8_tokens(torch.linspace(-3, 2, 120).reshape(2, 5, 12))
    assert codes.shape == (2, 5, 12)
    assert codes.stride() == (12 * 128, 1, 128)
    assert float(codes[0, 0, 0]) == -448
    torch.testing.assert_close(scale, torch.tensor(3 / 448))
    assert not float8_tokens(torch.zeros(1, 2, 3)).codes.float().any()
    assert float8_tokens(torch.zeros(0, 2, 3)).codes.shape == (0, 2, 3)
    assert float8_weight(torch.ones(3, 130)).codes.stride() == (256, 1)


def test_bad_operands_are_named() -> None:
    candidate, request, w_candidate, w_request, offsets = quantized(make((3, 2), 7, 5, 6, 4))
    for arguments, message in (
        (
            (Float8(candidate.codes.float(), candidate.scale), request, w_candidate, w_request, offsets),
            "codes of candidate",
        ),
        ((candidate, request, Float8(w_candidate.codes, request.scale), w_request, offsets), "w_candidate must have"),
        ((candidate, request, w_request, w_request, offsets), "candidate .* and w_candidate .* do not fit"),
        ((candidate, request, w_candidate, w_request, offsets[1:]), "2 requests need"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_compression_float8(*arguments)
    with pytest.raises(ValueError, match="float16 or torch.bfloat16"):
        linear_compression_float8(candidate, request, w_candidate, w_request, offsets, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("counts", "depth", "request_depth"),
    [((70, 0, 70, 5), 872, 1184), ((1,) * 100, 129, 70), ((0, 400, 0), 40, 1), ((1,), 1, 300)],
)
def test_hopper_kernel_against_the_specification(counts: tuple[int, ...], depth: int, request_depth: int) -> None:
    arguments = quantized(make(counts, 433, depth, request_depth, 256, "cuda"))
    with poisoned_empty():
        out = linear_compression_float8(*arguments, backend="hopper")
    candidate, request = (x.codes.double() * x.scale for x in arguments[:2])
    w_candidate, w_request = (x.codes.double() * x.scale.double()[:, None] for x in arguments[2:4])
    oracle = linear_compression(candidate, request, w_candidate, w_request, arguments[4], backend="reference")
    sizes = row_sizes(433).cuda()
    tolerance = Tolerance("tensor cores add up products of float8 with 14 bits", roundings=4, reduction=1 << 20)
    assert_close_to_oracle(out / sizes.to(out.dtype), oracle / sizes, tolerance)
