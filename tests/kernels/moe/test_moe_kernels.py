"""The kernels around the products of the fused experts: places, gather, SwiGLU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from kernels.moe import reference
from kernels.moe.reference import NEIGHBOURS, ROWS, capacity_of
from kernels.moe.selection import top_k
from kernels.testing import Tolerance, assert_close_to_oracle, compile_ahead, poisoned_empty

pytest.importorskip("triton")
from kernels.moe.hopper import gather as hopper_gather
from kernels.moe.hopper import gather_quantized
from kernels.moe.hopper import swiglu as hopper_swiglu
from kernels.moe.hopper import swiglu_quantized as hopper_swiglu_quantized
from kernels.moe.hopper.swiglu_quantized import BACKWARD_REGISTERS, FORWARD_REGISTERS
from kernels.moe.triton import route
from kernels.moe.triton import top_k as triton_top_k
from kernels.mxfp8.grouped import (
    BYTES,
    VALUES,
    Quantized,
    column_codes,
    form_of,
    matrix_scales,
)
from kernels.mxfp8.hopper.quantize import tiles as quantize_tiles
from kernels.mxfp8.hopper.quantize import weights as quantized_weights
from kernels.mxfp8.hopper.quantize.int8 import scale_words_layout
from kernels.mxfp8.hopper.quantize.pairs import REGISTERS, WARPS, codes_layout, words_layout
from tests.kernels.core.devices import SHARED_LIMITS
from tests.kernels.core.interpreting import interpret
from tests.kernels.moe import moe_standins
from tests.kernels.moe.moe_cases import ROUTINGS, random, routing, same_codes


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "load"), ROUTINGS)
def test_places_are_stable_padded_and_inverse(num_tokens: int, num_experts: int, top_k: int, load: str) -> None:
    chosen = routing(num_tokens, num_experts, top_k, load)
    places = reference.permutation(chosen, num_experts)
    assert places.selections.shape == (capacity_of(chosen.numel(), num_experts),)
    selections, start = places.selections.tolist(), 0
    for expert, end in enumerate(places.ends.tolist()):
        own = [s for s, e in enumerate(chosen.flatten().tolist()) if e == expert]
        padding = -len(own) % ROWS
        assert selections[start:end] == own + [-1] * padding
        start = end
    flat = places.rows.flatten()
    assert torch.equal(places.selections[flat.long()].long(), torch.arange(len(flat)))
    assert len(selections) >= start
    order, tokens = places.order.tolist(), places.selections[::ROWS] // top_k
    assert sorted(order) == list(range(len(selections) // ROWS))
    whole = [tile for tile in order if tile % NEIGHBOURS == 0 and tile * ROWS < start][: len(order) // NEIGHBOURS]
    whole = [tile for tile in whole if tile + NEIGHBOURS <= len(order)]
    assert tokens[whole].tolist() == sorted(tokens[whole].tolist())


def test_the_capacity_fits_the_worst_division() -> None:
    for experts, sizes in itertools.product((1, 3, 5), ([0], [1, 1, 1], [129, 1], [128, 256], [5, 120, 130, 1, 1])):
        padded = sum(-(-size // ROWS) * ROWS for size in sizes[:experts])
        assert padded <= capacity_of(sum(sizes[:experts]), experts)


def assert_same_places(actual: reference.Permutation, expected: reference.Permutation) -> None:
    assert torch.equal(actual.rows.cpu(), expected.rows)
    assert torch.equal(actual.ends.cpu(), expected.ends)
    assert torch.equal(actual.order.cpu(), expected.order)
    # Behind the last end nothing is written.
    end = int(expected.ends[-1])
    assert torch.equal(actual.selections[:end].cpu(), expected.selections[:end])


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "load"), ROUTINGS[2:])
def test_route_kernels_interpreted(monkeypatch, num_tokens, num_experts, top_k, load) -> None:
    interpret(monkeypatch, route)
    monkeypatch.setattr(route, "_PROGRAMS", 5)
    chosen = routing(num_tokens, num_experts, top_k, load)
    places = route.permutation(chosen, num_experts)
    assert_same_places(places, reference.permutation(chosen, num_experts))
    values = random(places.selections.shape[0], 70)
    weights = random(num_tokens, top_k, seed=1)
    for factor in (weights, None):
        actual = route.combine(values, places.rows, factor, torch.float32)
        torch.testing.assert_close(actual, moe_standins.combine(values, places.rows, factor, torch.float32))
    partial = random(places.selections.shape[0], 5)
    actual = route.collect(partial, places.rows, torch.float32)
    torch.testing.assert_close(actual, moe_standins.collect(partial, places.rows, torch.float32))


def scores_of_every_kind() -> Tensor:
    scores = random(150, 20)
    scores[3] = 1.0
    scores[4, 7], scores[5, 9:12] = math.nan, -math.nan
    scores[6], scores[7, :18] = -math.inf, -math.inf
    scores[8, 0], scores[8, 5:] = -0.0, 0.0
    return scores


def check_top_k(chosen: Tensor, scores: Tensor, k: int) -> None:
    """Of equal scores the first, where torch.topk takes any."""
    assert torch.equal(chosen, scores.sort(dim=1, descending=True, stable=True).indices[:, :k])


@pytest.mark.parametrize("k", [1, 2, 8, 20])
def test_top_k_interpreted(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    interpret(monkeypatch, triton_top_k)
    scores = scores_of_every_kind()
    check_top_k(triton_top_k.top_k(scores, k), scores, k)
    assert triton_top_k.top_k(scores[:0], k).shape == (0, k)


def test_top_k_is_torchs_and_says_what_it_takes() -> None:
    scores = random(30, 7).requires_grad_()
    chosen = top_k(scores, 3)
    assert torch.equal(chosen, scores.topk(3).indices)
    assert not chosen.requires_grad
    for wrong, k in ((scores, 8), (scores, 0), (scores[0], 1)):
        with pytest.raises(ValueError, match=r"k in 1..E"):
            top_k(wrong, k)


@pytest.mark.gpu
def test_gpu_top_k() -> None:
    for scores in (scores_of_every_kind(), random(3000, 32), random(70, 16).bfloat16(), random(5, 1000)):
        for k in (1, 2, 8):
            with poisoned_empty():
                check_top_k(top_k(scores.cuda(), k, backend="triton").cpu(), scores, k)
    torch.library.opcheck(triton_top_k.top_k.definition, (random(40, 8).cuda(), 3))


def test_kernels_compile_within_their_registers() -> None:
    words, codes = f"tensordesc<i32[128, 64],{words_layout()!r}>", f"tensordesc<i16[128, 64],{codes_layout()!r}>"
    scales = {"row_scales": "*u8", "column_scales": "*i16", "result_scales": "*i16"}
    groups = {"ends": "*i32", "num_groups": "i32"}
    pointers = {"selections": "*i32", "weights": "*fp32", "partial": "*fp32", **groups, **scales}
    sizes = {"num_rows": "i32", "width": "i32"}
    kept_scales = f"tensordesc<i32[1, 128],{scale_words_layout()!r}>"
    descriptors = {"kept_desc": codes, "kept_scales_desc": kept_scales, "grad_desc": words}
    descriptors |= dict.fromkeys(("rows_desc", "columns_desc", "result_desc"), codes)
    forward = {"hidden_desc": words, "codes_desc": codes, "kept_desc": codes, "scales": "*u8", "kept_scales": "*i32"}
    forward |= {"first": "i32", "tile_rows": "i32"}
    gather = {
        "x": "*i32",
        "selections": "*i32",
        "order": "*i32",
        "row_desc": codes,
        "column_desc": codes,
        **groups,
        **scales,
    }
    gather |= {"stride": "i32", "num_rows": "i32", "num_columns": "i32"}
    quantize = {"x_desc": words, "row_desc": codes, "column_desc": codes, "differ": "*i32", **scales}
    quantize |= dict.fromkeys(("tile_rows", "num_rows", "num_columns"), "i32")
    quantize |= {"row_scales_stride": "i32", "column_scales_stride": "i32"}
    for kernel, signature, constants, registers, programs in (
        (
            hopper_swiglu_quantized.swiglu_quantized_backward_kernel,
            descriptors | pointers | sizes | {"column_scales": "*u8"},
            {"FORM": BYTES, "RESULT_FORM": VALUES},
            BACKWARD_REGISTERS,
            2,
        ),
        (
            hopper_swiglu_quantized.swiglu_quantized_forward_kernel,
            {**forward, **groups, **sizes},
            {"FORM": BYTES, "KEEP": True},
            FORWARD_REGISTERS,
            3,
        ),
        (
            gather_quantized.gather_quantized_kernel,
            gather,
            {"COLUMNS": True, "TOP_K": 2, "ROW_FORM": BYTES, "COLUMN_FORM": VALUES},
            REGISTERS,
            3,
        ),
        (
            quantize_tiles.quantize_tiles_kernel,
            quantize | {"row_scales": "*i16"},
            {"ROWS": False, "COLUMNS": True, "SQUARE": True, "ROW_FORM": VALUES, "COLUMN_FORM": VALUES},
            REGISTERS,
            3,
        ),
        (
            quantize_tiles.quantize_tiles_kernel,
            quantize | {"column_scales": "*i16"},
            {"ROWS": True, "COLUMNS": True, "SQUARE": False, "ROW_FORM": BYTES, "COLUMN_FORM": VALUES},
            REGISTERS,
            3,
        ),
        (quantized_weights.round_tiles_kernel, quantize | {"out_desc": words}, {"TRANSPOSE": True}, REGISTERS, 3),
    ):
        compiled = compile_ahead(
            kernel,
            {name: kind for name, kind in signature.items() if name in kernel.arg_names},
            {name: value for name, value in {"GROUP": 128, **constants}.items() if name in kernel.arg_names},
            target="sm_90",
            gluon=True,
            divisible_by_16=["num_rows", "num_columns", "width", "stride"],
            num_warps=WARPS,
            maxnreg=registers,
        )
        # Programs share the 228 KiB of a multiprocessor.
        assert programs * (compiled.shared_bytes + 1024) <= 228 * 1024
        assert compiled.spill_bytes == 0
        # Two elements at a time, and a whole tile of codes at once.
        assert compiled.contains("max.NaN.xorsign.abs.bf16x2")
        assert compiled.contains("cp.async.bulk.tensor.2d.global.shared")
        # Exchanges between threads may not take a barrier's memory, which is kept by invalidating it behind them.
        parts = compiled.ptx.split("mbarrier.inval")
        assert len(parts) == 1 + ("mbarrier.init" in parts[0])
        assert "st.shared" not in parts[-1] or len(parts) == 1


def assert_nearly_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """But for values between two codes, where one compilation fused a multiplication with an addition."""
    for own, other in zip(actual, expected, strict=True):
        different = own.cpu().contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)
        assert different.float().mean() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "load"), ROUTINGS)
def test_gpu_places(num_tokens: int, num_experts: int, top_k: int, load: str) -> None:
    chosen = routing(num_tokens, num_experts, top_k, load)
    actual = route.permutation(chosen.cuda(), num_experts)
    assert_same_places(actual, reference.permutation(chosen, num_experts))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [96, 256])
def test_gpu_gather_bit_for_bit(group: int, dtype: torch.dtype, dim: int) -> None:
    x, places = random(300, 2 * dim, dtype=dtype)[:, :dim], reference.permutation(routing(300, 5, 2), 5)
    end = int(places.ends[-1])
    for form in [form_of(group, second) for second in (False, True)] if group else [None]:
        expected = moe_standins.gather(x, places, group, form)
        with poisoned_empty():
            actual = hopper_gather.gather(x.cuda(), type(places)(*(t.cuda() for t in places)), group, form)
        assert same_codes(actual[0][:end], expected[0][:end])
        if group:
            assert torch.equal(matrix_scales(Quantized(*actual[:2]))[:end].cpu(), expected[1][:end])
            assert same_codes(actual[2][:, :end], expected[2][:, :end])
            column_scales = matrix_scales(Quantized(*actual[2:]))[:, : end // 32]
            assert torch.equal(column_scales.cpu(), expected[3][:, : end // 32])


# sigmoid by ex2 and a division of 2 ulp, products in float32, one rounding of the result.
ONE_ROUNDING = Tolerance("float32 within a few ulp, rounded once", roundings=2)


@pytest.mark.gpu
def test_gpu_swiglu_and_its_gradients() -> None:
    places = reference.permutation(routing(300, 5, 2), 5)
    on_gpu = type(places)(*(t.cuda() for t in places))
    rows, end = places.selections.shape[0], int(places.ends[-1])
    gate_up, grad, weights = random(rows, 512, dtype=torch.bfloat16), random(rows, 256, seed=1), torch.rand(300, 2)
    gate_up, grad = 3 * gate_up, grad.bfloat16()
    forward = hopper_swiglu.swiglu(gate_up.cuda(), on_gpu.ends)[:end].cpu()
    leaf = gate_up[:end].double().requires_grad_()
    result = reference.swiglu(leaf)
    assert_close_to_oracle(forward, result.detach(), ONE_ROUNDING)
    selections = places.selections[:end].long()
    weight = (weights.flatten()[selections.clamp(min=0)] * (selections >= 0))[:, None].double()
    (d_hidden,) = torch.autograd.grad(result, leaf, grad[:end].double() * weight)
    others = (on_gpu.selections, weights.cuda(), on_gpu.ends)
    products = (result * grad[:end].double()).detach().unflatten(1, (-1, ROWS))

    def check_partial(partial: Tensor) -> None:
        # Each term has a result that was rounded to bfloat16, twice where another exponential falls on the other side.
        errors = (partial[:end].cpu() - products.sum(2)).abs()
        assert (errors <= 2**-8 * products.abs().sum(2) + 1e-6).all()

    with poisoned_empty():
        kept = gate_up.cuda()
        d_gate_up, weighted, partial = hopper_swiglu.swiglu_backward(kept, grad.cuda(), *others, False)
        again = hopper_swiglu.swiglu_backward(kept, grad.cuda(), *others, True)
    assert torch.equal(again[0][:end], d_gate_up[:end])
    assert again[0].data_ptr() == kept.data_ptr()
    d_gate_up, weighted = d_gate_up[:end].cpu(), weighted[:end].cpu()
    assert_close_to_oracle(d_gate_up, d_hidden, ONE_ROUNDING, "d gate_up")
    assert_close_to_oracle(weighted, (result * weight).detach(), ONE_ROUNDING, "weighted result")
    check_partial(partial)
    # What is quantised is what is written without quantisation.
    for group in (32, 128):
        with poisoned_empty():
            results = hopper_swiglu_quantized.empty_results(rows, 256, group, True, on_gpu.ends.device)
            for part in (slice(0, 256), slice(256, rows)):
                hopper_swiglu_quantized.swiglu_quantized(gate_up[part].cuda(), on_gpu.ends, group, results, part.start)
            plain = hopper_swiglu_quantized.empty_results(rows, 256, group, False, on_gpu.ends.device)
            hopper_swiglu_quantized.swiglu_quantized(gate_up.cuda(), on_gpu.ends, group, plain)
        codes, scales, kept, kept_scales = results
        assert same_codes(plain.codes[:end], codes[:end].cpu())
        for actual, expected in zip(
            (kept[:end], kept_scales[:, :end]), moe_standins.mxint8(gate_up[:end]), strict=True
        ):
            assert torch.equal(actual.cpu(), expected)
        # The backward of what is kept, which is exact in float32 and which bfloat16 would round.
        rounded = moe_standins.mxint8_values(kept.cpu(), kept_scales.cpu())[:end]
        d_gate_up, weighted, _ = moe_standins.swiglu_backward(
            rounded, grad[:end].clone(), places.selections[:end], weights, places.ends, False
        )
        form = form_of(group, second=True)
        with poisoned_empty():
            grads = [grad.cuda() for _ in range(2)]
            backward, again = (
                hopper_swiglu_quantized.swiglu_quantized_backward(
                    kept, kept_scales, own, *others, group, overwrite, form
                )
                for own, overwrite in zip(grads, (False, True), strict=True)
            )
        row_codes, row_scales, pairs, column_scales, *weighted_codes, partial = backward
        assert same_codes(again[0][:end], row_codes[:end].cpu())
        assert same_codes(again[2][:end], pairs[:end].cpu())
        assert again[0].data_ptr() == kept.data_ptr()
        assert [each[2].data_ptr() for each in (backward, again)] == [each.data_ptr() for each in grads]
        products = (moe_standins.swiglu(rounded, places.ends).double() * grad[:end].double()).unflatten(1, (-1, ROWS))
        check_partial(partial)
        along = row_codes, row_scales
        across = column_codes(Quantized(pairs, column_scales, group, True))[:2]
        for (actual_codes, actual_scales), (expected_codes, expected_scales), transposed in (
            ((codes, scales), moe_standins.quantized(forward, 1, group), False),
            (along, moe_standins.quantized(d_gate_up, 1, group), False),
            (across, moe_standins.quantized(d_gate_up, 0, group), True),
            (weighted_codes, moe_standins.quantized(weighted, 0, group, group == 128), True),
        ):
            actual_scales = matrix_scales(Quantized(actual_codes, actual_scales, group))
            if transposed:
                actual_codes, actual_scales = actual_codes[:, :end], actual_scales[:, : end // 32]
            actual = actual_codes[: len(expected_codes)], actual_scales[: len(expected_scales)]
            assert_nearly_same(actual, (expected_codes, expected_scales))


def test_the_breakdown_knows_our_kernels_and_pytorchs() -> None:
    from kernels.bench.cases.moe_breakdown import kind_of

    kinds = {
        "void at::native::indexFuncLargeIndex<c10::BFloat16, long, unsigned int>": "combine",
        "triton_poi_fused_index_put_7": "combine",
        "triton_poi_fused_index_6": "gather and quantise",
        "gather_kernel": "gather and quantise",
        "gather_quantized_kernel": "gather and quantise",
        "dequantize_kernel": "products",
        "quantize_kernel": "weights",
        "quantize_tiles_kernel": "weights",
        "swiglu_backward_kernel": "SwiGLU",
        "_grouped_bf16_kernel": "products",
        "_transpose_kernel": "products",
        "_add_grouped_kernel": "products",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x>": "products",
        "triton_poi_fused_mul_silu_3": "SwiGLU",
        "void at::native::radixSortKVInPlace<2, -1, 32>": "places",
        "void at::native::vectorized_elementwise_kernel<4>": "other",
    }
    assert {kernel: kind_of(kernel) for kernel in kinds} == kinds


@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_top_k_compiles(target: str) -> None:
    types = {"scores": "*fp32", "chosen": "*i64", "num_rows": "i32", "num_columns": "i32"}
    compiled = compile_ahead(
        triton_top_k.top_k_kernel, types, {"K": 2, "COLUMNS": 32, "BLOCK": 128}, target=target, num_warps=4
    )
    assert compiled.spill_bytes == 0
