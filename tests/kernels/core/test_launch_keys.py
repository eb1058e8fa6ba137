"""Calls with one key are calls that Triton would compile the same kernel for, at all places that launch by key."""

from __future__ import annotations

import itertools
import pkgutil
from collections import Counter
from collections.abc import Hashable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime import jit
from triton.runtime.jit import JITFunction

import kernels
from kernels.attention.hopper import backward as hopper_attention_backward
from kernels.attention.hopper import forward as hopper_attention_forward
from kernels.attention.hopper import tables
from kernels.attention.triton import decode, pool, short_backward
from kernels.core import lengths, scheduling
from kernels.core.launch import Launcher
from kernels.core.mask import NO_MASK, Mask
from kernels.core.rows import Rows
from kernels.gdpa.hopper import backward as hopper_backward
from kernels.gdpa.hopper import forward as hopper_forward
from kernels.gdpa.triton import norms, short
from kernels.ikbo.hopper import lce_weight
from kernels.ikbo.triton import groups as triton_groups
from kernels.ikbo.triton import levels
from kernels.jagged.triton import bmm, bmm_narrow, gather, low_rank, moves, parts, segment
from kernels.jagged.triton import elementwise as triton_elementwise
from kernels.jagged.triton import softmax as triton_softmax
from kernels.mxfp8.grouped import BYTES, MATRIX, VALUES, WORDS
from kernels.mxfp8.hopper import dequantize
from kernels.mxfp8.hopper.grouped import bf16, fp8, strict
from kernels.mxfp8.hopper.grouped import pieces as grouped_pieces
from kernels.mxfp8.hopper.quantize import activation as quantized_activation
from kernels.mxfp8.hopper.quantize import tiles as quantize_tiles
from kernels.mxfp8.hopper.quantize import weights
from kernels.mxfp8.hopper.quantize.operators import scales_like
from kernels.mxfp8.triton import pieces as triton_pieces
from kernels.mxfp8.triton import scales as triton_grouped
from kernels.tokens.hopper import rotated_product, silu_products
from kernels.tokens.triton import activation, gradients, residual
from kernels.tokens.triton import bias as token_bias
from kernels.tokens.triton import tokens as triton_tokens

backend = pytest.importorskip("triton.backends.nvidia.compiler").CUDABackend
if not hasattr(jit, "native_specialize_impl"):
    pytest.skip("another Triton finds in another way what it compiles for", allow_module_level=True)
LAUNCHERS = (
    scheduling._launch_schedule,
    scheduling._launch_whole_rows,
    tables._launch_row_table,
    tables._launch_tile_table,
    tables._launch_wave_table,
    tables._launch_statistics,
    triton_groups._launch_join,
    levels._launch_join,
    levels._launch_sum,
    hopper_attention_forward._launch_forward,
    hopper_attention_backward._launch_backward,
    hopper_forward._launch_forward,
    hopper_backward._launch_backward,
    short._launch_forward,
    short._launch_backward,
    short_backward._launch,
    lengths._launch,
)
FOUND_AGAIN: set[Launcher] = set()
"""Launchers that some test of this file called twice with one key."""
# tests/kernels/moe/test_launch_keys_of_experts.py, and the launcher that was called last
ELSEWHERE = ("kernels.moe.", "kernels.ikbo.hopper.lce_forward", "kernels.core.launch._last")


def all_launchers() -> dict[str, Launcher]:
    """Every launcher of the kernels, by its name."""
    names = [found.name for found in pkgutil.walk_packages(kernels.__path__, "kernels.")]
    modules = [import_module(name) for name in names if not name.endswith("flash_attention_4")]  # has none of its own
    return {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, Launcher)
    }


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
def hits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[Launcher]]:
    """Launches that find what an earlier one compiled, which has to be what Triton would compile for them."""
    compiled: dict[tuple[Launcher, Hashable], tuple[Any, ...]] = {}
    found_again: Counter[Launcher] = Counter()

    def launch(self: Launcher, grid: tuple[int, int, int], key: Hashable, *arguments: Any, **options: Any) -> None:
        found = (*specialization(self.kernel, arguments), options)
        found_again[self] += (self, key) in compiled
        assert compiled.setdefault((self, key), found) == found, (self.kernel, key)

    monkeypatch.setattr(Launcher, "__call__", launch)
    yield found_again
    FOUND_AGAIN.update(+found_again)


def test_quantised_weights(hits: Counter[Launcher]) -> None:
    for shape, transpose, group in itertools.product(
        ((1, 128, 128), (2, 128, 128), (16, 128, 128), (3, 256, 384)), (False, True), (32, 128)
    ):
        weights.operand(torch.zeros(shape, dtype=torch.bfloat16), transpose, group)
    assert hits[weights._launch]
    assert hits[quantize_tiles._launch]


def test_quantised_activations(hits: Counter[Launcher]) -> None:
    for shape, dtype, elsewhere, rows, columns in itertools.product(
        ((1, 128), (16, 128), (300, 384), (2048, 128)), (torch.bfloat16, torch.float32), *[(False, True)] * 3
    ):
        z, bias = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape[1], dtype=dtype)
        bias = shifted(bias) if elsewhere else bias
        quantized_activation.silu_quantized(z, bias, columns)
        quantized_activation.silu_gradient_quantized(z, z, bias, rows, columns)
        quantized_activation.factor_gradient_quantized(z, z, bias, z, rows, columns)
    launchers = [value for value in vars(quantized_activation).values() if isinstance(value, Launcher)]
    assert len(launchers) == 3
    assert all(hits[launcher] for launcher in launchers), hits


def test_grouped_products(monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher]) -> None:
    products = (bf16, fp8, strict)
    for module in products:
        monkeypatch.setattr(module, "processors", lambda device: 132)
        monkeypatch.setattr(module, "counter", lambda device, size=1: torch.zeros(size, dtype=torch.int32))
    monkeypatch.setattr(grouped_pieces, "processors", lambda device: 132)

    def codes_of(form: int, *shape: int) -> tuple[Tensor, Tensor]:
        codes = torch.zeros(shape, dtype=torch.float8_e4m3fn)
        return codes, scales_like(codes, form).fill_(0)

    for sizes, (n, k), dtype, elsewhere in itertools.product(
        ((128,), (256, 0, 128), (128,) * 16),
        ((128, 128), (256, 1024)),
        (torch.bfloat16, torch.float32),
        (False, True),
    ):
        monkeypatch.setattr(grouped_pieces, "parts_of", lambda *facts, parts=3 if elsewhere else 1: parts)
        rows, experts = sum(sizes), len(sizes)
        ends = torch.tensor(sizes).cumsum(0)
        ends = shifted(ends) if elsewhere else ends.int()
        a, weight = torch.zeros(rows, k).bfloat16(), torch.zeros(experts, n, k).bfloat16()
        bf16.grouped_mm(a, weight, ends)
        bf16.grouped_mm(a, torch.zeros(experts, k, n).bfloat16().mT, ends)
        bf16.grouped_wgrad(torch.zeros(rows, n).bfloat16(), a, ends, dtype)
        for first, second in ((MATRIX, MATRIX), (BYTES, VALUES)):
            differ = None if second == MATRIX else torch.zeros(1, dtype=torch.int32)
            operands = *codes_of(first, rows, k), *codes_of(second, experts, n, k)
            fp8.grouped_mm(*operands, ends, differ=differ)
            operands = *codes_of(first, n, rows), *codes_of(second, k, rows)
            fp8.grouped_wgrad(*operands, ends, dtype)
        for form in (MATRIX, WORDS):
            strict.grouped_mm(*codes_of(form, rows, k), weight, ends)
            codes, scales = codes_of(MATRIX, experts, n, k)
            strict.grouped_mm(*codes_of(form, rows, k), codes, ends, b_scales=scales)
            columns = codes_of(form, n, rows)
            for transposed in (False, True):
                values = torch.zeros(k, rows).bfloat16()
                strict.grouped_wgrad(*columns, values, ends, dtype, transposed=transposed)
        dequantize.dequantize_interleaved(*codes_of(MATRIX, experts, n, k))
    launchers = [dequantize._launch, triton_grouped._launch, triton_pieces._cut, triton_pieces._add]
    launchers += [module._launch for module in products]
    assert all(hits[launcher] for launcher in launchers), hits


def test_tokens(monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher]) -> None:
    for module in (activation, token_bias):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    for shape, dtype, elsewhere, view in itertools.product(
        ((1, 2, 64), (5, 2, 64), (32, 4, 48), (3, 1, 2)),
        (torch.bfloat16, torch.float32),
        (False, True),
        (False, True),
    ):
        x = torch.zeros(shape[0], 3, *shape[1:], dtype=dtype)[:, 1] if view else torch.zeros(shape, dtype=dtype)
        x = shifted(x) if elsewhere else x
        for values in (x, x[:, 0]):
            triton_tokens.rms_norm(values, torch.float32, 1e-5)
            triton_tokens.rms_norm_backward(torch.zeros(values.shape, dtype=dtype), values, 1e-5)
            triton_tokens.rms_norm_backward(values, values, 1e-5)
            triton_tokens.move_rows(values, torch.arange(len(x)), torch.empty_like(values), scatter=view)
            triton_tokens.move_rows(
                values, torch.arange(1), torch.zeros(7, *values.shape[1:], dtype=dtype), scatter=view
            )
            for beside, more in itertools.product((None, values), (None, torch.zeros(values.shape, dtype=dtype))):
                triton_tokens.rms_norm_backward(values, values, 1e-5, beside, more)
        angles = torch.zeros(shape[0], shape[2] // 2)
        for inverse, positions in itertools.product((False, True), (None, torch.zeros(shape[0], dtype=torch.int64))):
            for more in (None, x):
                triton_tokens.rotate(x, angles, angles, positions, inverse, more=more)
                triton_tokens.copy_heads(x, torch.zeros(shape[0], 3, *shape[1:], dtype=dtype)[:, 2], more)
        rows = torch.arange(len(x)).view(1, -1)
        for change, places in ((values, rows), (None, rows), (values, None)):
            _, normed, picked = residual.add_rms_norm(values, change, places)
            for d_total, more in itertools.product((normed, None), (normed, None)):
                residual._add_rms_norm_backward(d_total, normed, more, picked, normed, places)
        for name, factor in itertools.product(("none", "silu"), (None, x)):
            token_bias.column_sum(x, torch.float32)
            bias = torch.zeros(shape[2])
            activation.activate(x, bias, name, factor)
            activation.activate_backward(x, x, bias, name, factor)
        for condition in (torch.zeros(()), torch.zeros((), dtype=torch.bool)):
            gradients.zero_unless_(x, condition)
            gradients.zero_unless_(x.flatten(1)[:, 1:], condition)
        gradients.concat_finite([x.flatten(1), x.flatten(1), x[:1].flatten(1).expand(3, -1)])
        gradients.concat_finite([x.flatten(1)[:, 1:], x.flatten(1)[:1, :-1]])
    launchers = [activation._launch_forward, activation._launch_backward, token_bias._launch]
    launchers += [gradients._launch, gradients._launch_concat]
    launchers += [
        getattr(triton_tokens, f"_launch_{name}") for name in ("norm", "norm_backward", "rotate", "copy", "move")
    ]
    launchers += [getattr(residual, f"_launch_{name}") for name in ("forward", "backward", "pick")]
    assert all(hits[launcher] for launcher in launchers), hits


def test_norms_around_gdpa(hits: Counter[Launcher]) -> None:
    for shape, dtype, elsewhere, given in itertools.product(
        ((1, 64), (7, 64), (5, 48), (3, 2)), (torch.bfloat16, torch.float32), (False, True), (False, True)
    ):
        x = shifted(torch.zeros(shape, dtype=dtype)) if elsewhere else torch.zeros(shape, dtype=dtype)
        norms.layer_norm(x, 16 * given * (shape[1] > 2))
        norms.layer_norm_backward(x, x, x if given else None, 2 * given)
        norms.add_norms(x, x, given)
        for grad, more in itertools.product((x, None), (x, None)):
            norms.add_norms_backward(grad, x if given or grad is None else None, more if given else None, x, x)
    names = ("layer_norm", "layer_norm_backward", "add_norms", "add_norms_backward")
    assert all(hits[getattr(norms, f"_launch_{name}")] for name in names), hits


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
        rest = (Rows(offsets, 2), Rows(offsets, 2), 0.5, NO_MASK)
        out, lse = decode.forward(q, k, v, *rest)
        decode.backward(grad, q, k, v, out, lse, *rest)
    assert hits[decode._launch_forward]
    assert hits[decode._launch_backward]


def test_pooling(hits: Counter[Launcher]) -> None:
    for rows, heads, width, dtype, layout, offsets_dtype in itertools.product(
        (1, 3, 16),
        (2, 4),
        (64, 512),
        (torch.bfloat16, torch.float16),
        ("plain", "heads first", "shifted", "wider"),
        (torch.int32, torch.int64),
    ):
        q, k, _, grad = inputs((heads, 1), width, dtype, layout, 2 * rows)
        offsets = (torch.arange(rows + 1) * 2).to(offsets_dtype)
        rest = Rows(offsets, 2), offsets, 0.5
        out, lse = pool.forward(q, k[:, 0], *rest)
        pool.backward(grad, q, k[:, 0], out, lse, *rest)
    assert all(hits[each] for each in (pool._launch_forward, pool._launch_backward, pool._launch_order))


@pytest.mark.parametrize("module", [decode, short_backward, short])
def test_strides_of_a_batch_make_no_key_of_its_own(module: ModuleType, hits: Counter[Launcher]) -> None:
    """With all rows of a head together the stride of heads is the number of rows."""
    for rows in (2, 4, 6):
        q, k, v, grad = inputs((2, 2), 64, torch.bfloat16, "heads first", 8 * rows)
        both = [Rows(torch.arange(rows + 1) * 8, 8)] * 2
        if module is decode:
            module.forward(q, k, v, *both, 0.5, NO_MASK)
        elif module is short:
            module.forward(torch.empty(8 * rows, 2, 64), q, k, v, *both, ("relu",) * 2, 0.5, 1.0, NO_MASK)
        else:
            lse, *results = torch.zeros(2, 8 * rows), *(torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
            module.backward(grad, q, k, v, q, lse, *results, *both, 0.5, NO_MASK, beside=False)
    assert sum(hits.values()) == 2


def test_weight_gradients_of_linear_compression(monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher]) -> None:
    monkeypatch.setattr(lce_weight, "processors", lambda device: 132)
    for (entries, rows, depth, width), dtype, elsewhere in itertools.product(
        ((1, 130, 64, 64), (16, 130, 40, 64), (3, 140, 41, 64), (16, 433, 872, 256)),
        (torch.float16, torch.bfloat16),
        (False, True),
    ):
        grad, x = torch.zeros(entries, rows, width, dtype=dtype), torch.zeros(entries, depth, width, dtype=dtype)
        lce_weight.weight_gradient(shifted(grad) if elsewhere else grad, x)
    assert hits[lce_weight._launch_weight]


def test_operators_on_jagged_values(monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher]) -> None:
    monkeypatch.setattr(low_rank, "processors", lambda device: 132)
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
        moves.to_padded(x, offsets, max(rows), 0.5, "first")
        for fill in (1, 16, -1, 2**31, -(2**31)):
            moves.to_padded(torch.zeros(total, dtype=torch.int64), offsets, max(rows), float(fill), "first")
        moves.to_jagged(padded, offsets, total, "last")
        moves.flip(x, offsets)
        moves.window(x, offsets, offsets[:-1], offsets.int(), total)
        triton_softmax.softmax(x, offsets)
        triton_softmax.softmax_gradient(y, x, offsets)
        segment.reduce(x, offsets, "mean", torch.float32)
        segment.largest(x, offsets)
        segment.spread(per_row, offsets, total, "sum")
        bmm.dense_bmm(x, offsets, matrices, max(rows))
        bmm.jagged_bmm(x, torch.zeros(total, 40, dtype=dtype), offsets, max(rows))
        bmm.dense_gradient(torch.zeros(total, 40, dtype=dtype), x, offsets, matrices, max(rows), True, True)
        left, weight = torch.zeros(count, 4, width, dtype=dtype), torch.zeros(300, 4, dtype=dtype)
        for several in (left, left[:, :3], left.mT.contiguous().mT):
            rank = several.shape[1]
            out, products = low_rank.low_rank(x, offsets, several, weight[:, :rank], max(rows))
            low_rank.gradient(out, x, offsets, several, weight[:, :rank], products, max(rows), True, True)
        gather.concat(x, offsets, y, offsets.int())
        gather.split(torch.cat([x, y]), offsets, offsets, total)
        chosen = torch.arange(count)
        gather.sum_selected(x, offsets, chosen, offsets, total)
        gather.slices(x, offsets, chosen, chosen.int(), 0)
        gather.index_select(x, offsets, chosen, total)
    modules = (
        triton_elementwise,
        gather,
        moves,
        triton_softmax,
        segment,
        bmm,
        parts,
        bmm_narrow,
        low_rank,
    )
    launchers = [value for module in modules for value in vars(module).values() if isinstance(value, Launcher)]
    assert len(launchers) == 18
    assert all(hits[launcher] for launcher in launchers), hits


def test_two_linear_layers(monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher]) -> None:
    monkeypatch.setattr(silu_products, "programs", lambda device, width, columns: 132)
    for rows, width, between, bias, elsewhere in itertools.product(
        (1, 16, 300), (8, 16, 40), (16, 264), (torch.bfloat16, torch.float32), (False, True)
    ):
        x, weight = (torch.zeros(count, width, dtype=torch.bfloat16) for count in (rows, between))
        offset = torch.zeros(between, dtype=bias)
        z, _ = silu_products.product_and_silu(x, weight, shifted(offset) if elsewhere else offset)
        silu_products.gradient_of_silu(x, weight.mT.contiguous(), z)
    assert hits[silu_products._launch_silu]


def test_rotated_projections(monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher]) -> None:
    monkeypatch.setattr(rotated_product, "programs", lambda device, width, columns: 132)
    for rows, width, head, dtype, positions, elsewhere in itertools.product(
        (1, 16, 300),
        (8, 16, 40),
        (64, 128),
        (torch.bfloat16, torch.float32),
        (None, torch.int32, torch.int64),
        (False, True),
    ):
        x, weight = (torch.zeros(count, width, dtype=torch.bfloat16) for count in (rows, 6 * head))
        angles = torch.zeros(rows, head // 2, dtype=dtype)
        places = None if positions is None else torch.zeros(rows, dtype=positions)
        if elsewhere:
            angles, places = shifted(angles), None if places is None else shifted(places)
        rotated_product.rotated_product(x, weight, angles, angles, places, head)
    assert hits[rotated_product._launch]


def test_integers_are_padded_with_an_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes a float for one of 32 bits, which does not hold every id."""
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Launcher, "__call__", lambda self, grid, key, *arguments: launched.append(arguments))
    padding = 50_000_001
    moves.to_padded(torch.arange(3), torch.tensor([0, 3]), 4, float(padding), "first")
    fill = dict(zip(moves._move_kernel.arg_names, launched[0], strict=True))["fill"]
    assert fill == padding
    assert isinstance(fill, int)


def test_a_key_says_what_is_compiled(monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher]) -> None:
    for module in (hopper_attention_forward, hopper_attention_backward, hopper_forward, hopper_backward):
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
        both = Rows(offsets, max(rows)), Rows(offsets.clone(), max(rows))
        for scale, mask in itertools.product((0.125, 1.0), (NO_MASK, Mask(True, 16), Mask(False, 1, 32))):
            out, lse = hopper_attention_forward.attention_forward(q, k, v, *both, scale, mask)
            hopper_attention_backward.attention_backward(grad, q, k, v, out, lse, *both, scale, mask)
            for groups in (1, 2, 3):
                levels.join_levels([out] * groups, [lse] * groups)
                levels.sum_of([out] * groups)
                for most in (1, 3, 16, 300, 2**40):
                    limits = [most] * groups, most
                    joined, _ = triton_groups.joined_groups([offsets] * groups, offsets, *limits)
                sums = (torch.cat([x] * groups, dim) for x, dim in ((grad, 0), (q, 0), (out, 0), (lse, 1)))
                own_grad, own_q, own_out, own_lse = sums
                queries = Rows(joined, groups * max(rows))
                hopper_attention_backward.attention_backward(
                    own_grad, own_q, k, v, own_out, own_lse, queries, both[1], scale, NO_MASK
                )
            activations = ("gelu",) * heads[0] if mask.causal else ("silu", "relu", "gelu", "relu")[: heads[0]]
            window = mask._replace(causal=False)
            hopper_forward.forward(q, k, v, *both, activations, scale, 1.0, window)
            hopper_backward.backward(grad, q, k, v, *both, activations, scale, 1.0, window)
        lengths.assert_lengths(offsets, max(rows))
    assert all(hits[launcher] for launcher in LAUNCHERS), hits


def test_no_launcher_is_left_out(request: pytest.FixtureRequest) -> None:
    """A kernel with a launcher of its own is one of those above, or of `ELSEWHERE`."""
    chosen = {item.name.partition("[")[0] for item in request.session.items if item.path == request.path}
    if chosen != {name for name in globals() if name.startswith("test_")}:
        pytest.skip("the other tests of this file say which launchers they called")
    assert {
        name
        for name, launcher in all_launchers().items()
        if not name.startswith(ELSEWHERE) and launcher not in FOUND_AGAIN
    } == set()
