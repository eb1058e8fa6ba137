"""The grouped products for sm_100 on a machine in Python: tiles, addresses, scales, barriers.

No such chip has run them. The last test is what one should run first.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.mxfp8 import reference
from kernels.mxfp8.blackwell import grouped, operators
from kernels.mxfp8.grouped import TILES, Quantized
from kernels.mxfp8.hopper.quantize import blocks
from kernels.testing import Tolerance, assert_close_to_oracle, poisoned_empty
from tests.kernels.core.devices import BLACKWELL
from tests.kernels.core.simulated_gpu import Plain, launcher
from tests.kernels.mxfp8.simulated_blackwell import Blackwell

E4M3_NAN = 0x7F
FLOAT32_SUMS = Tolerance("one rounding of float32 sums", reduction=768)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    seed = request.node.callspec.params.get("seed", 0) if hasattr(request.node, "callspec") else 0
    monkeypatch.setattr(grouped, "_launch", launcher(grouped._grouped_block_scaled_kernel, {}, seed, Blackwell))
    monkeypatch.setattr(grouped, "processors", lambda device: 3)
    with poisoned_empty():
        yield


def quantized(*shape: int, seed: int) -> tuple[Quantized, Tensor]:
    """(operand with scales in TILES, what it stands for in float64); sums of products of such are exact in float64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x *= torch.exp2(torch.arange(shape[-1]) // 32 % 5 - torch.arange(shape[-2])[:, None] % 3)
    mx = reference.quantize(x, -1)
    operand = Quantized(mx.codes, reference.swizzle_scales(mx.scales))
    assert operand.in_tiles
    return operand, reference.dequantize(mx, torch.float64)


def spoil(operand: Quantized, start: int, axis: int) -> None:
    """NaNs where nothing may be read, or counts."""
    codes = operand.codes.view(torch.uint8)
    codes.narrow(axis, start, codes.shape[axis] - start).fill_(E4M3_NAN)


@pytest.mark.parametrize(
    ("ends", "rows", "n", "k"),
    [
        ([256, 256, 384, 768], 896, 272, 336),
        ([1], 1, 16, 32),
        ([0, 128, 128, 205], 205, 528, 128),
        ([0, 0], 128, 32, 48),
    ],
    ids=["groups of several tiles", "one row", "a last tile in part", "no rows"],
)
@pytest.mark.parametrize("seed", [0, 100])
@pytest.mark.usefixtures("simulated")
def test_rows_times_their_matrices(ends: list[int], rows: int, n: int, k: int, seed: int) -> None:
    a, a_values = quantized(rows, k, seed=1)
    b, b_values = quantized(len(ends), n, k, seed=2)
    spoil(a, ends[-1], 0)
    out = operators.fprop(a, b, torch.tensor(ends, dtype=torch.int32))
    begin = 0
    for group, end in enumerate(ends):
        expected = a_values[begin:end] @ b_values[group].t()
        assert torch.equal(out[begin:end], expected.bfloat16()), group
        begin = end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("simulated")
def test_weight_gradients_of_groups(dtype: torch.dtype) -> None:
    ends, rows, n, k = [128, 128, 640], 768, 144, 304
    (dy, dy_values), (x, x_values) = quantized(n, rows, seed=1), quantized(k, rows, seed=2)
    for operand in (dy, x):
        spoil(operand, ends[-1], 1)
    out = operators.wgrad(dy, x, torch.tensor(ends), dtype)
    begin = 0
    for group, end in enumerate(ends):
        expected = dy_values[:, begin:end] @ x_values[:, begin:end].t()
        assert torch.equal(out[group], expected.to(dtype)), group
        begin = end


@pytest.mark.usefixtures("simulated")
def test_other_forms_of_scales_are_brought_into_tiles() -> None:
    (a, _), (b, _) = quantized(128, 160, seed=1), quantized(1, 32, 160, seed=2)
    in_matrix = a._replace(scales=reference.unswizzle_scales(a.scales, 128, 5))
    ends = torch.tensor([128])
    assert torch.equal(operators.fprop(in_matrix, b, ends), operators.fprop(a, b, ends))


def test_scales_are_read_where_the_quantiser_writes_them() -> None:
    place = Plain({blocks.gl: torch})(blocks._scales_at)
    written = torch.empty(2 * 3 * 512, dtype=torch.int64)
    for line in range(256):
        for block in range(0, 12, 4):
            at = int(place(torch.tensor(line % 128), torch.tensor(line // 128 * 128), block, 12, True))
            written[at : at + 4] = torch.arange(block, block + 4) + 12 * line
    tiles = written.view(2, 3, 2, 256)
    for step in range(3):
        read = Plain({})(grouped._scale_matrix)(tiles[:, step : step + 1])
        assert torch.equal(read, torch.arange(256)[:, None] * 12 + torch.arange(4 * step, 4 * step + 4))


@pytest.mark.gpu
@pytest.mark.skipif(not BLACKWELL, reason="needs a GPU of compute capability 10.0")
@pytest.mark.parametrize("group", [32, 128])
def test_gpu_multiplies_what_it_has_quantised(group: int) -> None:
    from kernels.mxfp8.hopper.quantize.operators import quantize_both

    ends, rows, n, k = [256, 256, 640], 768, 384, 512
    on_gpu = torch.tensor(ends, dtype=torch.int32).cuda()
    generator = torch.Generator().manual_seed(0)
    x, dy, weight = (torch.randn(s, generator=generator).bfloat16() for s in ((rows, k), (rows, n), (len(ends), n, k)))

    def operand(matrix: Tensor, axis: int, square: bool = False) -> tuple[Quantized, Tensor]:
        results = quantize_both(matrix.cuda(), axis == -1, axis == -2, group, square, TILES)
        codes, scales = results[:2] if axis == -1 else results[2:]
        expected = reference.quantize(matrix, axis, group, square)
        expected_scales = expected.scales if axis == -1 else expected.scales.mT
        assert torch.equal(scales.cpu(), reference.swizzle_scales(expected_scales))
        return Quantized(codes, scales, group), reference.dequantize(expected, torch.float64)

    (a, a_values), (b, b_values) = operand(x, -1), operand(weight, -1, group == 128)
    (dy_t, dy_values), (x_t, x_values) = operand(dy, -2), operand(x, -2)
    with poisoned_empty():
        out = operators.fprop(a, b, on_gpu).cpu()
        gradients = operators.wgrad(dy_t, x_t, on_gpu, torch.float32).cpu()
    begin = 0
    for expert, end in enumerate(ends):
        part = slice(begin, end)
        assert_close_to_oracle(out[part], a_values[part] @ b_values[expert].t(), FLOAT32_SUMS, "out")
        assert_close_to_oracle(gradients[expert], dy_values[part].t() @ x_values[part], FLOAT32_SUMS, "gradient")
        begin = end
