"""Grouped products on the GPU, each against float64, and the kernels that prepare their scales and operands."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from kernels.core import counters, dispatch
from kernels.mxfp8 import grouped
from kernels.mxfp8.grouped import Quantized
from kernels.mxfp8.hopper import dequantize, operators
from kernels.mxfp8.hopper.grouped import bf16, dequantize_ahead
from kernels.mxfp8.hopper.quantize import operators as quantize
from kernels.mxfp8.triton import scales as triton_grouped
from kernels.testing import Tolerance, assert_close_to_oracle, check_gradients, poisoned_empty
from tests.kernels.core.devices import on_hopper
from tests.kernels.core.interpreting import interpret
from tests.kernels.core.on_gpu import without_waiting
from tests.kernels.mxfp8.grouped_sizes import ALIGNED, RAGGED


def codes_of(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn).to(device)


def scales_of(*shape: int, device: str = "cpu", group: int = 32, square: bool = False) -> Tensor:
    """Scale bytes of `shape`, of elements or blocks of 32 as the last axis counts."""
    across = 128 if square else 1
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = (*shape[:-2], shape[-2] // across, shape[-1] // (group // 32))
    scales = torch.randint(115, 135, sizes, dtype=torch.uint8, generator=generator)
    return scales.repeat_interleave(group // 32, -1).repeat_interleave(across, -2).to(device)


def values_of(quantized: Quantized) -> Tensor:
    """float64, exactly."""
    scales = torch.exp2(quantized.scales.double() - 127)
    return quantized.codes.to(torch.float32).double() * scales.repeat_interleave(32, -1)


def test_scales_are_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, triton_grouped)
    rows = scales_of(150, 72, group=128)
    for square, size in ((True, 256), (False, 200)):
        columns = scales_of(size, 72, group=128, square=square)
        row_table, column_table, differ = triton_grouped.transposed_scales(rows, columns)
        assert torch.equal(row_table, rows[:, ::4].t())
        assert row_table.stride(0) % 16 == 0
        values = torch.exp2(columns[:, ::4].t().float() - 127)
        assert torch.equal(column_table.float(), -values if square else values)
        assert differ.tolist() == [int(not square)]


def test_words_of_scales_are_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, triton_grouped)
    for size, columns in ((150, 20), (8, 72)):
        scales = scales_of(size, columns)
        words = triton_grouped.transposed_words(scales)
        assert words.stride(0) % 4 == 0
        assert torch.equal(words, scales.view(torch.int32).t())


def test_the_values_of_the_first_and_the_last_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, triton_grouped)
    scales = torch.tensor([[0] * 4 + [1] * 4 + [254] * 4 + [255] * 4], dtype=torch.uint8)
    values = triton_grouped.transposed_scales(scales, scales)[1].flatten().tolist()
    assert values == [0, -(2.0**-126), -(2.0**127), -math.inf]  # negative, as squares of a single row share theirs


def test_one_row_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, triton_grouped)
    scales = scales_of(384, 72, group=128, square=True)
    scales[130, 64:68] += 1
    _, values, differ = triton_grouped.transposed_scales(scales[:1], scales)
    assert differ.tolist() == [1]
    shared = (values < 0).view(18, 3, 128)
    assert not shared[16, 1].any()
    assert shared.sum() == shared.numel() - 128


def in_order(values: Tensor) -> Tensor:
    """What `dequantize_interleaved` gives, in the order of the codes."""
    return values.unflatten(-1, (-1, 4, 2, 4, 2)).movedim(-2, -4).flatten(-5)


@on_hopper
@pytest.mark.parametrize("lines", [1, 37, 300])
def test_codes_are_dequantised_exactly(lines: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(lines).view(lines, 256)
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes).view(torch.float8_e4m3fn).cuda()
    # Below, bits of the smallest elements are rounded off.
    scales = (torch.arange(8 * lines) % 236 + 11).to(torch.uint8).view(lines, 8).cuda()
    with poisoned_empty():
        values = in_order(dequantize.dequantize_interleaved(codes, scales))
    assert torch.equal(values.double(), values_of(Quantized(codes, scales)))


@on_hopper
def test_the_smallest_and_the_broken_scale() -> None:
    codes = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).cuda()[None, :64].contiguous()
    values = in_order(dequantize.dequantize_interleaved(codes, torch.tensor([[0, 255]], dtype=torch.uint8).cuda()))
    assert torch.equal(values[0, :32].double(), (codes[0, :32].double() * 2.0**-127).bfloat16().double())
    assert values[0, 32:].isnan().all()


def ends_of(sizes: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(sizes, device="cuda").cumsum(0).to(dtype)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape))).bfloat16()


def _check(out: Tensor, oracle: Tensor, group: int) -> None:
    if group == 32:
        assert_close_to_oracle(out, oracle, ROUNDED)
    else:
        assert_close_to_oracle(out.bfloat16(), oracle, FP8_SUMS)


def products(a: Tensor, b: Tensor, sizes: list[int]) -> Tensor:
    """Each group's rows of a times its b, transposed, in float64."""
    rows = zip(a.double().split(sizes), b.double(), strict=True)
    return torch.cat([group @ matrix.t() for group, matrix in rows])


def sums(dy: Tensor, x: Tensor, sizes: list[int]) -> Tensor:
    """Each group's dy^T x in float64."""
    rows = zip(dy.double().split(sizes), x.double().split(sizes), strict=True)
    return torch.stack([dy_group.t() @ x_group for dy_group, x_group in rows])


BACKENDS = {32: "hopper_strict", 128: "hopper"}
# Tensor cores truncate: twice the error of rounding.
ROUNDED = Tolerance("one rounding of truncated float32 sums of up to 5121 exact products", reduction=4 * 5121)
# FP8 instructions add up 32 products with 13 bits behind the point of the largest. Results are judged as bfloat16:
# after four such roundings, before a float32 sum takes 128 products over, and the rounding of the result.
FP8_SUMS = Tolerance(
    "sums of 128 products in FP8 instructions, then in float32; one rounding of the result", roundings=5
)


@on_hopper
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [*ALIGNED.values(), *RAGGED.values()], ids=str)
def test_bf16_products_and_gradients(sizes: list[int], transposed: bool) -> None:
    n, k, rows = 320, 192, sum(sizes)
    weight = random(len(sizes), k, n).mT if transposed else random(len(sizes), n, k)
    x, ends = random(rows + 40, k), ends_of(sizes)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return dispatch.choose("grouped_mm", "hopper", x, in_features=k, out_features=n)(x, weight, ends)

    def oracle(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([products(x[:rows], weight, sizes), x.new_zeros(40, n)])

    with poisoned_empty():
        check_gradients(function, oracle, {"x": x, "weight": weight}, ROUNDED)


@on_hopper
@pytest.mark.parametrize("sizes", ALIGNED.values(), ids=str)
@pytest.mark.parametrize(("n", "k"), [(320, 576), (1024, 2048), (64, 64)])
def test_bf16_weight_gradients(sizes: list[int], n: int, k: int) -> None:
    rows, ends = sum(sizes), ends_of(sizes)
    dy, x = random(rows + 64, n), random(rows + 64, k)
    dy[rows:] = x[rows:] = math.nan
    oracle = sums(dy[:rows], x[:rows], sizes)
    for dtype in (torch.bfloat16, torch.float32):
        with poisoned_empty():
            assert_close_to_oracle(bf16.grouped_wgrad(dy, x, ends, dtype), oracle, ROUNDED)


@on_hopper
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("sizes", ALIGNED.values(), ids=str)
def test_quantised_products(sizes: list[int], group: int, square: bool) -> None:
    n, k, rows, experts = 384, 640, sum(sizes), len(sizes)
    a = Quantized(
        codes_of(rows + 128, k, device="cuda"), scales_of(rows + 128, k // 32, device="cuda", group=group), group
    )
    b_scales = scales_of(experts, n, k // 32, device="cuda", group=group, square=square)
    b = Quantized(codes_of(experts, n, k, device="cuda", seed=1), b_scales, group)
    a.codes.view(torch.uint8)[rows:] = 0x7F
    oracle = products(values_of(a)[:rows], values_of(b), sizes)
    choice = dispatch.choose(
        "mxfp8_grouped_fprop", BACKENDS[group], a.codes, group=group, in_features=k, out_features=n
    )
    with poisoned_empty():
        out, again = (choice(a, b, ends_of(sizes))[:rows] for _ in range(2))
    _check(out, oracle, group)
    assert torch.equal(out, again)


@on_hopper
@pytest.mark.parametrize(
    "sizes", [*ALIGNED.values(), [0] * 40, [128] * 20 + [0] * 30], ids=lambda sizes: str(sizes[:6])
)
def test_codes_that_are_dequantised_ahead_are_those_that_were_before(sizes: list[int]) -> None:
    n, k, rows, experts = 1024, 640, sum(sizes) + 128, len(sizes)
    a = Quantized(codes_of(rows, k, device="cuda"), scales_of(rows, k // 32, device="cuda"))
    scales = torch.randint(0, 255, (experts, n, k // 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    b = Quantized(codes_of(experts, n, k, device="cuda", seed=1), scales.clamp(60, 160).cuda())
    values = grouped.Rounded(dequantize.dequantize_interleaved(b.codes, b.scales))
    ends = ends_of(sizes)
    expected = operators.strict_fprop(a, values, ends)[: sum(sizes)]
    for _ in range(10):
        with poisoned_empty():
            assert torch.equal(operators.strict_fprop(a, b, ends)[: sum(sizes)], expected)
    assert not counters.counter(ends.device, dequantize_ahead.COUNTS + experts).any()


@on_hopper
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(640, 384), (384, 640)])
@pytest.mark.parametrize("sizes", ALIGNED.values(), ids=str)
def test_quantised_weight_gradients(
    sizes: list[int], n: int, k: int, group: int, square: bool, dtype: torch.dtype
) -> None:
    rows = sum(sizes)
    length = rows + 128

    def operand(features: int, seed: int, square: bool = False) -> Quantized:
        codes = codes_of(features, length, device="cuda", seed=seed)
        codes.view(torch.uint8)[:, rows:] = 0x7F
        return Quantized(codes, scales_of(features, length // 32, device="cuda", group=group, square=square), group)

    dy, x = operand(n, 0), operand(k, 1, square)
    if square:  # some of the squares of a tile's sums do not share theirs
        x.scales[130] += (torch.arange(length // 32, device="cuda") // 4 % 3 == 1).byte()
    oracle = sums(values_of(dy)[:, :rows].t(), values_of(x)[:, :rows].t(), sizes)
    choice = dispatch.choose(
        "mxfp8_grouped_wgrad", BACKENDS[group], dy.codes, group=group, in_features=k, out_features=n
    )
    with poisoned_empty():
        out, again = (choice(dy, x, ends_of(sizes), dtype) for _ in range(2))
    _check(out, oracle, group)
    assert torch.equal(out, again)


@on_hopper
def test_operators_are_well_formed() -> None:
    sizes = [128, 0, 64]
    x, dy, weight, ends = random(200, 64), random(200, 128), random(3, 128, 64), ends_of(sizes)
    x, dy, weight = (tensor.requires_grad_() for tensor in (x, dy, weight))
    torch.library.opcheck(operators._grouped_mm.definition, (x, weight, ends))
    torch.library.opcheck(operators._grouped_wgrad.definition, (dy, x, ends))


@on_hopper
def test_operands_that_tma_cannot_address_are_copied() -> None:
    ends = ends_of([100, 28])
    memory = random(128 * 192 + 1)[1:]
    x, weight = memory.view(128, 192), random(2, 64, 384)[:, :, ::2]
    out = grouped.fprop(x, weight, ends)
    choice = dispatch.choose("grouped_mm", "hopper", x, in_features=192, out_features=64)
    assert_close_to_oracle(choice(x, weight, ends), products(x, weight, [100, 28]), ROUNDED)
    assert out.shape == (128, 64)


@on_hopper
def test_nothing_waits_for_the_device() -> None:
    sizes, n, k = [256, 0, 128], 128, 256
    x, weight, ends = random(512, k).requires_grad_(), random(3, n, k).requires_grad_(), ends_of(sizes)
    choice = dispatch.choose("grouped_mm", "hopper", x, in_features=k, out_features=n)
    without_waiting(lambda: choice(x, weight, ends).sum().backward())


@on_hopper
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_graphs_replayed_beside_each_other_count_their_own_tiles(recipe: str) -> None:
    sizes = [768, 0, 128, 3072]
    x, weight, ends = random(sum(sizes), 512), random(4, 1024, 512), ends_of(sizes)
    a, b = (Quantized(*quantize.quantize_both(t, True, False, 32, False, grouped.MATRIX)[:2]) for t in (x, weight))
    call = {
        "bf16": lambda: bf16.grouped_mm(x, weight, ends),
        "mxfp8": lambda: operators.strict_fprop(a, b, ends),
    }[recipe]
    expected = call()
    torch.cuda.synchronize()
    captured = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [call() for _ in range(3)]
        captured.append((graph, results, torch.cuda.Stream()))
    for _ in range(5):
        for graph, results, stream in captured:
            with torch.cuda.stream(stream):
                for result in results:
                    result.zero_()
                graph.replay()
    torch.cuda.synchronize()
    for _, results, _ in captured:
        assert all(torch.equal(result, expected) for result in results)
    assert int(counters.counter(x.device)[0]) == 0


@on_hopper
def test_a_launch_may_be_the_first_work_of_a_thread() -> None:
    sizes = [128, 64]
    x, weight, ends = random(sum(sizes), 512), random(2, 256, 512), ends_of(sizes)
    expected = bf16.grouped_mm(x, weight, ends)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(bf16.grouped_mm, x, weight, ends).result(), expected)
