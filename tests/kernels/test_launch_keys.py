"""Calls with one key are calls that Triton would compile the same kernel for, at all places that launch by key."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime import jit
from triton.runtime.jit import JITFunction

from kernels import scheduling
from kernels.gdpa import gluon_backward, gluon_forward, triton_short
from kernels.ikbo import gluon_lce_weight, triton_groups, triton_levels
from kernels.jagged import (
    attention_rows,
    gluon_attention_backward,
    gluon_attention_forward,
    gluon_linear,
    gluon_linear_backward,
    gluon_linear_backward_single,
    gluon_linear_weight,
    gluon_square,
    gluon_square_inner,
    triton_attention_decode,
    triton_attention_short,
    triton_bmm,
    triton_checks,
    triton_elementwise,
    triton_gather,
    triton_moves,
    triton_narrow,
    triton_parts,
    triton_segment,
    triton_softmax,
)
from kernels.launch import Launcher
from kernels.mxfp8 import (
    gluon_dequantize,
    gluon_grouped_bf16,
    gluon_grouped_fp8,
    gluon_grouped_strict,
    gluon_quantize_tiles,
    gluon_weights,
    triton_grouped,
)
from kernels.mxfp8.gluon_quantize import scales_like
from kernels.mxfp8.grouped import BYTES, MATRIX, VALUES, WORDS
from kernels.tokens import triton_activation, triton_residual, triton_tokens

backend = pytest.importorskip("triton.backends.nvidia.compiler").CUDABackend
if not hasattr(jit, "native_specialize_impl"):
    pytest.skip("another Triton finds in another way what it compiles for", allow_module_level=True)
LAUNCHERS = (
    scheduling._launch_schedule,
    scheduling._launch_whole_rows,
    attention_rows._launch_row_table,
    attention_rows._launch_tile_table,
    attention_rows._launch_wave_table,
    attention_rows._launch_statistics,
    triton_groups._launch_join,
    triton_levels._launch_join,
    triton_levels._launch_sum,
    gluon_attention_forward._launch_forward,
    gluon_attention_backward._launch_backward,
    gluon_forward._launch_forward,
    gluon_backward._launch_backward,
    triton_short._launch_forward,
    triton_short._launch_backward,
    triton_attention_short._launch,
    triton_checks._launch,
)


def specialization(kernel: JITFunction[Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What Triton compiles for, of each argument."""
    return tuple(
        ("constexpr", argument)
        if parameter.is_constexpr
        else jit.native_specialize_impl(
            backend,
            argument,
            parameter.is_const,
            not parameter.do_not_specialize,
            not parameter.do_not_specialize_on_alignment,
        )
        for parameter, argument in zip(kernel.params, arguments, strict=True)
    )


def shifted(x: Tensor) -> Tensor:
    """x elsewhere, not at a multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def inputs(heads: tuple[int, int], dim: int, dtype: torch.dtype, layout: str, total: int) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the result."""
    shapes = [(total, count, dim) for count in (heads[0], heads[1], heads[1], heads[0])]
    if layout == "heads first":
        return tuple(torch.zeros(h, n, d, dtype=dtype).transpose(0, 1) for n, h, d in shapes)
    if layout == "shifted":
        return tuple(shifted(torch.zeros(shape, dtype=dtype)) for shape in shapes)
    if layout == "wider":
        return tuple(torch.zeros(n, h, d + 8, dtype=dtype)[..., :d] for n, h, d in shapes)
    return tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> Counter[Launcher]:
    """Launches that find what an earlier one compiled, which has to be what Triton would compile for them."""
    compiled: dict[tuple[Launcher, Hashable], tuple[Any, ...]] = {}
    found_again: Counter[Launcher] = Counter()

    def launch(self: Launcher, grid: tuple[int, int, int], key: Hashable, *arguments: Any, **options: Any) -> None:
        found = (*specialization(self.kernel, arguments), options)
        found_again[self] += (self, key) in compiled
        assert compiled.setdefault((self, key), found) == found, (self.kernel, key)

    monkeypatch.setattr(Launcher, "__call__", launch)
    return found_again


def test_quantised_weights(hits: Counter[Launcher]) -> None:
    for shape, transpose, group in itertools.product(
        ((1, 128, 128), (2, 128, 128), (16, 128, 128), (3, 256, 384)), (False, True), (32, 128)
    ):
        gluon_weights.operand(torch.zeros(shape, dtype=torch.bfloat16), transpose, group)
    assert hits[gluon_weights._launch]
    assert hits[gluon_quantize_tiles._launch]


def test_grouped_products(monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher]) -> None:
    products = (gluon_grouped_bf16, gluon_grouped_fp8, gluon_grouped_strict)
    for module in products:
        monkeypatch.setattr(module, "processors", lambda device: 132)
        monkeypatch.setattr(module, "counter", lambda device, size=1: torch.zeros(size, dtype=torch.int32))

    def codes_of(form: int, *shape: int) -> tuple[Tensor, Tensor]:
        codes = torch.zeros(shape, dtype=torch.float8_e4m3fn)
        return codes, scales_like(codes, form).fill_(0)

    for sizes, (n, k), dtype, elsewhere in itertools.product(
        ((128,), (256, 0, 128), (128,) * 16),
        ((128, 128), (256, 1024)),
        (torch.bfloat16, torch.float32),
        (False, True),
    ):
        rows, experts = sum(sizes), len(sizes)
        ends = torch.tensor(sizes).cumsum(0)
        ends = shifted(ends) if elsewhere else ends.int()
        a, weight = torch.zeros(rows, k).bfloat16(), torch.zeros(experts, n, k).bfloat16()
        gluon_grouped_bf16.grouped_mm(a, weight, ends)
        gluon_grouped_bf16.grouped_mm(a, torch.zeros(experts, k, n).bfloat16().mT, ends)
        gluon_grouped_bf16.grouped_wgrad(torch.zeros(rows, n).bfloat16(), a, ends, dtype)
        for first, second in ((MATRIX, MATRIX), (BYTES, VALUES)):
            differ = None if second == MATRIX else torch.zeros(1, dtype=torch.int32)
            operands = *codes_of(first, rows, k), *codes_of(second, experts, n, k)
            gluon_grouped_fp8.grouped_mm(*operands, ends, differ=differ)
            operands = *codes_of(first, n, rows), *codes_of(second, k, rows)
            gluon_grouped_fp8.grouped_wgrad(*operands, ends, dtype)
        for form in (MATRIX, WORDS):
            gluon_grouped_strict.grouped_mm(*codes_of(form, rows, k), weight, ends)
            codes, scales = codes_of(MATRIX, experts, n, k)
            gluon_grouped_strict.grouped_mm(*codes_of(form, rows, k), codes, ends, b_scales=scales)
            columns = codes_of(form, n, rows)
            for transposed in (False, True):
                values = torch.zeros(k, rows).bfloat16()
                gluon_grouped_strict.grouped_wgrad(*columns, values, ends, dtype, transposed=transposed)
        gluon_dequantize.dequantize_interleaved(*codes_of(MATRIX, experts, n, k))
    launchers = [gluon_dequantize._launch, triton_grouped._launch, *(module._launch for module in products)]
    assert all(hits[launcher] for launcher in launchers), hits


def test_tokens(monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher]) -> None:
    monkeypatch.setattr(triton_activation, "processors", lambda device: 132)
    for shape, dtype, elsewhere, view in itertools.product(
        ((1, 2, 64), (5, 2, 64), (32, 4, 48), (3, 1, 2)),
        (torch.bfloat16, torch.float32),
        (False, True),
        (False, True),
    ):
        x = torch.zeros(shape[0], 3, *shape[1:], dtype=dtype)[:, 1] if view else torch.zeros(shape, dtype=dtype)
        x = shifted(x) if elsewhere else x
        for values in (x, x[:, 0]):
            triton_tokens.rms_norm(values, torch.float32)
            triton_tokens.rms_norm_backward(torch.zeros(values.shape, dtype=dtype), values)
            triton_tokens.permute(values, torch.arange(len(x)), inverse=view)
        angles = torch.zeros(shape[0], shape[2] // 2)
        for inverse, positions in itertools.product((False, True), (None, torch.zeros(shape[0], dtype=torch.int64))):
            triton_tokens.rotate(x, angles, angles, positions, inverse)
        triton_tokens.copy_heads(x, torch.zeros(shape[0], 3, *shape[1:], dtype=dtype)[:, 2])
        rows = torch.arange(len(x)).view(1, -1)
        for change, places in ((values, rows), (None, rows), (values, None)):
            _, normed, picked = triton_residual.add_rms_norm(values, change, places)
            for d_total in (normed, None):
                triton_residual.add_rms_norm_backward(d_total, normed, picked, normed, places)
        for name, factor in itertools.product(("none", "silu"), (None, x)):
            bias = torch.zeros(shape[2])
            triton_activation.activate(x, bias, name, factor)
            triton_activation.activate_backward(x, x, bias, name, factor)
    launchers = [triton_activation._launch_forward, triton_activation._launch_backward]
    launchers += [
        getattr(triton_tokens, f"_launch_{name}") for name in ("norm", "norm_backward", "rotate", "copy", "permute")
    ]
    launchers += [getattr(triton_residual, f"_launch_{name}") for name in ("forward", "backward", "pick")]
    assert all(hits[launcher] for launcher in launchers), hits


def test_few_queries(hits: Counter[Launcher]) -> None:
    for rows, heads, dtype, layout, offsets_dtype in itertools.product(
        (1, 3, 16),
        ((2, 2), (4, 1)),
        (torch.bfloat16, torch.float16),
        ("plain", "heads first", "shifted", "wider"),
        (torch.int32, torch.int64),
    ):
        q, k, v, grad = inputs(heads, 64, dtype, layout, 2 * rows)
        offsets = (torch.arange(rows + 1) * 2).to(offsets_dtype)
        rest = (offsets, offsets, 2, 2, 0.5, False, (-1, -1))
        out, lse = triton_attention_decode.forward(q, k, v, *rest)
        triton_attention_decode.backward(grad, q, k, v, out, lse, *rest)
    assert hits[triton_attention_decode._launch_forward]
    assert hits[triton_attention_decode._launch_backward]


@pytest.mark.parametrize("module", [triton_attention_decode, triton_attention_short, triton_short])
def test_strides_of_a_batch_make_no_key_of_its_own(module: ModuleType, hits: Counter[Launcher]) -> None:
    """With all rows of a head together the stride of heads is the number of rows."""
    for rows in (2, 4, 6):
        q, k, v, grad = inputs((2, 2), 64, torch.bfloat16, "heads first", 8 * rows)
        offsets = torch.arange(rows + 1) * 8
        if module is triton_attention_decode:
            module.forward(q, k, v, offsets, offsets, 8, 8, 0.5, False, (-1, -1))
        elif module is triton_short:
            module.forward(
                torch.empty(8 * rows, 2, 64), q, k, v, offsets, offsets, 8, 8, ("relu",) * 2, 0.5, 1.0, (-1, -1)
            )
        else:
            lse, *results = torch.zeros(2, 8 * rows), *(torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
            module.backward(grad, q, k, v, q, lse, *results, offsets, offsets, 0.5, (-1, -1), beside=False)
    assert sum(hits.values()) == 2


def test_weight_gradients_of_linear_compression(monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher]) -> None:
    monkeypatch.setattr(gluon_lce_weight, "processors", lambda device: 132)
    for (entries, rows, depth, width), dtype, elsewhere in itertools.product(
        ((1, 130, 64, 64), (16, 130, 40, 64), (3, 140, 41, 64), (16, 433, 872, 256)),
        (torch.float16, torch.bfloat16),
        (False, True),
    ):
        grad, x = torch.zeros(entries, rows, width, dtype=dtype), torch.zeros(entries, depth, width, dtype=dtype)
        gluon_lce_weight.weight_gradient(shifted(grad) if elsewhere else grad, x)
    assert hits[gluon_lce_weight._launch_weight]


def test_layers(monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher]) -> None:
    for module in (gluon_linear, gluon_linear_backward, gluon_linear_backward_single, gluon_linear_weight):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    for rows, (inner, width), dtype, elsewhere in itertools.product(
        ((1,), (64, 0, 100), (3,) * 40),
        ((136, 256), (256, 136), (144, 144)),
        (torch.float16, torch.bfloat16),
        (False, True),
    ):
        total = sum(rows)
        x, grad, weight = (
            torch.zeros(shape, dtype=dtype) for shape in ((total, inner), (total, width), (width, inner))
        )
        bias, row_bias = torch.zeros(width, dtype=dtype), torch.zeros(len(rows), width, dtype=dtype)
        offsets = torch.tensor([0, *rows]).cumsum(0)
        if elsewhere:
            x, grad, bias, row_bias, offsets = (shifted(tensor) for tensor in (x, grad, bias, row_bias, offsets))
        gluon_linear.linear(x, offsets, weight, bias, row_bias, "gelu", True)
        gluon_linear.linear(x, offsets, weight.mT.contiguous().mT, None, None, "relu", False)
        for kind, sums in (("none", False), ("given", True), ("relu", True)):
            gluon_linear_backward.gradients(grad, grad, x, offsets, weight, kind, sums)
        grad, x = grad.float(), x.float()
        grad, weight = shifted(grad) if elsewhere else grad, weight.float()
        gluon_linear_weight.weight_gradient(grad, x)
        for kind, sums in (("none", False), ("given", True), ("relu", True)):
            gluon_linear_backward_single.gradients_single(grad, grad, x, offsets, weight, kind, sums)
    assert hits[gluon_linear._launch]
    assert hits[gluon_linear_weight._launch]
    for launcher in (
        gluon_linear_backward._launch,
        gluon_linear_backward._launch_finish,
        gluon_linear_backward_single._launch,
    ):
        assert hits[launcher]


def test_products_of_rows_with_themselves(
    monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher], allow_tf32: Callable[[bool], None]
) -> None:
    for module in (gluon_square, gluon_square_inner):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    for rows, width, dtype, elsewhere, wide, tf32 in itertools.product(
        ((1,), (64, 0, 100), (3,) * 40, (16,) * 16),
        (8, 16, 200),
        (torch.float16, torch.bfloat16, torch.float32),
        (False, True),
        (torch.int32, torch.int64),
        (False, True),
    ):
        allow_tf32(tf32)
        offsets = torch.tensor([0, *rows]).cumsum(0)
        squares = torch.tensor([0, *(count * count for count in rows)]).cumsum(0).to(wide)
        x, a = torch.zeros(sum(rows), width, dtype=dtype), torch.zeros(int(squares[-1]), dtype=dtype)
        if elsewhere:
            x, a, offsets, squares = (shifted(tensor) for tensor in (x, a, offsets, squares))
        if dtype is not torch.float32:
            gluon_square.outer(x, x, offsets, squares, sum(count * count for count in rows))
        gluon_square_inner.inner(a, x, offsets, squares, elsewhere)
        if dtype is not torch.float32 or tf32:
            gluon_square_inner.inner_gradients(x, a, x, offsets, squares, elsewhere)
    for module in (gluon_square, gluon_square_inner):
        assert hits[module._launch]


def test_operators_on_jagged_values(hits: Counter[Launcher]) -> None:
    for rows, width, dtype, elsewhere in itertools.product(
        ((1,), (20, 0, 3000), (16,) * 64, (3,) * 40),
        (1, 16, 40),
        (torch.bfloat16, torch.float32),
        (False, True),
    ):
        total, count = sum(rows), len(rows)
        offsets = torch.tensor([0, *rows]).cumsum(0)
        x, y, per_row, matrices, padded = (
            torch.zeros(shape, dtype=dtype)
            for shape in ((total, width), (total, width), (count, width), (count, width, 40), (count, max(rows), width))
        )
        if elsewhere:
            offsets = shifted(offsets.int())
            x, y, per_row, matrices, padded = (shifted(tensor) for tensor in (x, y, per_row, matrices, padded))
        for operands in ((x, y, None), (x, per_row, offsets)):
            for names in (("add", "none"), ("mul", "gelu")):
                triton_elementwise.elementwise(*operands, *names)
                triton_elementwise.gradient(x, *operands, *names)
        triton_moves.to_padded(x, offsets, max(rows), 0.5, "first")
        for fill in (1, 16, -1, 2**31, -(2**31)):
            triton_moves.to_padded(torch.zeros(total, dtype=torch.int64), offsets, max(rows), float(fill), "first")
        triton_moves.to_jagged(padded, offsets, total, "last")
        triton_moves.flip(x, offsets)
        triton_moves.window(x, offsets, offsets[:-1], offsets.int(), total)
        triton_softmax.softmax(x, offsets)
        triton_softmax.softmax_gradient(y, x, offsets)
        triton_segment.reduce(x, offsets, "mean", torch.float32)
        triton_segment.largest(x, offsets)
        triton_segment.spread(per_row, offsets, total, "sum")
        triton_bmm.dense_bmm(x, offsets, matrices, max(rows))
        triton_bmm.jagged_bmm(x, torch.zeros(total, 40, dtype=dtype), offsets, max(rows))
        triton_bmm.dense_gradient(torch.zeros(total, 40, dtype=dtype), x, offsets, matrices, max(rows), True, True)
        triton_gather.concat(x, offsets, y, offsets.int())
        triton_gather.split(torch.cat([x, y]), offsets, offsets, total)
        chosen = torch.arange(count)
        triton_gather.sum_selected(x, offsets, chosen, offsets, total)
        triton_gather.slices(x, offsets, chosen, chosen.int(), 0)
        triton_gather.index_select(x, offsets, chosen, total)
    modules = (
        triton_elementwise,
        triton_gather,
        triton_moves,
        triton_softmax,
        triton_segment,
        triton_bmm,
        triton_parts,
        triton_narrow,
    )
    launchers = [value for module in modules for value in vars(module).values() if isinstance(value, Launcher)]
    assert len(launchers) == 16
    assert all(hits[launcher] for launcher in launchers), hits


def test_integers_are_padded_with_an_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes a float for one of 32 bits, which does not hold every id."""
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Launcher, "__call__", lambda self, grid, key, *arguments: launched.append(arguments))
    padding = 50_000_001
    triton_moves.to_padded(torch.arange(3), torch.tensor([0, 3]), 4, float(padding), "first")
    fill = dict(zip(triton_moves._move_kernel.arg_names, launched[0], strict=True))["fill"]
    assert fill == padding
    assert isinstance(fill, int)


def test_a_key_says_what_is_compiled(monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher]) -> None:
    for module in (gluon_attention_forward, gluon_attention_backward, gluon_forward, gluon_backward):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    for heads, dim, dtype, layout, rows in itertools.product(
        ((4, 2), (1, 1)),
        (64, 128),
        (torch.float16, torch.bfloat16),
        ("plain", "heads first", "wider", "shifted"),
        ((1,), (500,), (496,), (0, 160, 340), (1,) * 500),
    ):
        q, k, v, grad = inputs(heads, dim, dtype, layout, sum(rows))
        offsets = torch.tensor([0, *rows]).cumsum(0)
        offsets = {"heads first": offsets.int(), "shifted": shifted(offsets)}.get(layout, offsets)
        for scale, (causal, window) in itertools.product(
            (0.125, 1.0), ((False, (-1, -1)), (True, (16, -1)), (False, (1, 32)))
        ):
            arguments = (offsets, offsets.clone(), max(rows), max(rows), scale, causal, window)
            out, lse = gluon_attention_forward.attention_forward(q, k, v, *arguments)
            gluon_attention_backward.attention_backward(grad, q, k, v, out, lse, *arguments)
            for groups in (1, 2, 3):
                triton_levels.join_levels([out] * groups, [lse] * groups)
                triton_levels.sum_of([out] * groups)
                for most in (1, 3, 16, 300, 2**40):
                    limits = [most] * groups, most
                    joined, _ = triton_groups.joined_groups([offsets] * groups, offsets, *limits)
                sums = (torch.cat([x] * groups, dim) for x, dim in ((grad, 0), (q, 0), (out, 0), (lse, 1)))
                own_grad, own_q, own_out, own_lse = sums
                gluon_attention_backward.attention_backward(
                    own_grad, own_q, k, v, own_out, own_lse, joined, offsets, groups * max(rows), max(rows), scale,
                    False, (-1, -1),
                )  # fmt: skip
            activations = ("gelu",) * heads[0] if causal else ("silu", "relu", "gelu", "relu")[: heads[0]]
            gluon_forward.forward(q, k, v, *arguments[:4], activations, scale, 1.0, window)
            gluon_backward.backward(grad, q, k, v, *arguments[:4], activations, scale, 1.0, window)
        triton_checks.assert_lengths(offsets, max(rows))
    assert all(hits[launcher] for launcher in LAUNCHERS), hits
