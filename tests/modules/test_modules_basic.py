"""Norm, rotation, MLP heads, broadcast and LCE against float64 oracles written out here."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from modules.broadcast import CandidateRows
from modules.layers.attention.rotary import BASE, rotate, rotation
from modules.layers.feed_forward.mlp import SharedLinear, TaskHeads
from modules.layers.interaction.dot_cross import DHENLayer
from modules.layers.interaction.lce import LCE, compress_together
from modules.layers.interaction.wukong import WukongLayer
from modules.layers.norms import QUIET, rms_norm, row_norm
from modules.precision import FP32Linear, apply_recipe, in_high_precision


def test_rms_norm_matches_its_formula_and_survives_zeros():
    x = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(rms_norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    assert gradcheck(rms_norm, x)
    zeros = torch.zeros(2, 8, requires_grad=True)
    rms_norm(zeros).sum().backward()
    assert (rms_norm(zeros) == 0).all()
    assert zeros.grad.isfinite().all()


def test_rms_norm_of_bf16_keeps_the_dtype_and_takes_statistics_in_fp32():
    # A mean of 4096 squares has no correct digit when summed in bf16, whose running sum stalls at 256 times a term.
    x = (torch.randn(2, 4096) * 300).bfloat16()
    out = rms_norm(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, rms_norm(x.double()).bfloat16(), rtol=2**-8, atol=0)  # one rounding to bf16


def test_rotation_is_multiplication_by_a_complex_phase():
    positions, head_dim = torch.tensor([0, 1, 7, 150]), 6
    x = torch.randn(4, 2, head_dim, dtype=torch.float64)
    frequencies = BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    phase = torch.polar(torch.ones(4, 3, dtype=torch.float64), positions[:, None] * frequencies)
    rotated = torch.complex(x[..., :3], x[..., 3:]) * phase[:, None]
    expected = torch.cat([rotated.real, rotated.imag], dim=-1)
    # Angles up to 150 are held in float32: 150 * 2^-24 = 9e-6.
    torch.testing.assert_close(rotate(x, *rotation(positions, head_dim)), expected, rtol=0, atol=1e-4)
    assert rotate(x.bfloat16(), *rotation(positions, head_dim)).dtype == torch.bfloat16


def test_rotated_products_depend_on_the_difference_of_positions_only():
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def product(i: int, j: int) -> torch.Tensor:
        return (rotate(q, *rotation(torch.tensor([i]), 8)) * rotate(k, *rotation(torch.tensor([j]), 8))).sum()

    torch.testing.assert_close(product(3, 1), product(12, 10), rtol=0, atol=1e-5)  # float32 angles
    assert (product(3, 1) - product(4, 1)).abs() > 1e-3


def test_task_heads_are_separate_and_give_logits_in_the_weights_dtype():
    heads = TaskHeads(6, [5, 4], num_tasks=3)
    x = torch.randn(7, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = heads(x)
    assert (logits.shape, logits.dtype) == ((7, 3), torch.float32)
    heads(x)[:, 1].sum().backward()
    touched = {name.split(".")[1] for name, p in heads.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched == {"1"}
    assert TaskHeads(6, [], num_tasks=2)(x).shape == (7, 2)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", ["plain", "fp32", "called", "quantised"])
def test_one_weight_over_features_of_both_equals_the_layer_on_copies(kind, ordered):
    rows = CandidateRows.of_offsets(torch.tensor([0, 2, 2, 5]), 5)
    order = torch.randperm(64) if ordered else None
    layer = FP32Linear if kind == "fp32" else nn.Linear
    linear = SharedLinear(40, 24, 32, layer=layer, one_weight=True, order=order)
    if kind == "called":
        linear.own.register_forward_hook(lambda *_: None)
    if kind == "quantised":
        apply_recipe(linear, "mxfp8", ["own"])
    candidate, request = torch.randn(5, 40), torch.randn(3, 24)
    features = torch.cat([request[rows.owner], candidate], dim=1)
    copies = torch.empty_like(features)
    copies[:, torch.arange(64) if order is None else order] = features
    torch.testing.assert_close(linear(candidate, request, rows), linear.own(copies))
    assert set(linear.state_dict()) == {"own.weight", "own.bias"}


@pytest.mark.parametrize("counts", [[2, 0, 3, 1], [0, 0], [1], [0, 4]])
def test_expand_repeats_rows_and_sums_their_gradients(counts):
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    rows = CandidateRows(owner, torch.nn.functional.pad(torch.tensor(counts).cumsum(0), (1, 0)))
    x = torch.randn(len(counts), 2, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(rows.expand(x), x[owner])
    weight = torch.randn(len(owner), 2, 3, dtype=torch.float64)
    (actual,) = torch.autograd.grad((rows.expand(x) * weight).sum(), x)
    (expected,) = torch.autograd.grad((x[owner] * weight).sum(), x)
    torch.testing.assert_close(actual, expected)


def test_expand_can_be_differentiated_twice():
    rows = CandidateRows.of_offsets(torch.tensor([0, 2, 2, 5]), 5)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(lambda x: rows.expand(x).pow(3), x)


def test_expand_sums_bf16_gradients_in_fp32():
    num_candidates = 1000
    rows = CandidateRows(torch.zeros(num_candidates, dtype=torch.int64), torch.tensor([0, num_candidates]))
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    rows.expand(x).sum().backward()
    # A running bf16 sum of ones stops at 256; 1000 is a bf16 number.
    assert x.grad.item() == num_candidates


def test_rows_of_another_batch_are_not_expanded():
    rows = CandidateRows.of_offsets(torch.tensor([0, 2, 2]), 2)
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"x has {count} rows and the offsets have 2"):
            rows.expand(torch.zeros(count, 4))


def test_identity_rows_give_each_candidate_its_own():
    rows = CandidateRows.identity(3, torch.device("cpu"))
    x = torch.randn(3, 2)
    assert torch.equal(rows.expand(x), x)
    assert rows.offsets.tolist() == [0, 1, 2, 3]


def test_lce_with_request_tokens_equals_one_map_over_all_tokens():
    lce = LCE(num_candidate=3, num_out=4, num_request=2).double()
    rows = CandidateRows(torch.tensor([0, 0, 2]), torch.tensor([0, 2, 2, 3]))
    candidate = torch.randn(3, 3, 5, dtype=torch.float64, requires_grad=True)
    request = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    inputs = (candidate, request, lce.candidate.weight, lce.request.weight)
    weight = torch.cat([lce.request.weight, lce.candidate.weight], dim=1)
    expected = torch.einsum("mk,ckd->cmd", weight, torch.cat([request[rows.owner], candidate], dim=1))
    actual = lce(candidate, request, rows)
    torch.testing.assert_close(actual, expected)
    cotangent = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, inputs, cotangent) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_lce_with_a_precision_recipe_multiplies_by_its_layers():
    lce = LCE(num_candidate=32, num_out=32, num_request=64)
    rows = CandidateRows(torch.tensor([0, 0, 2]), torch.tensor([0, 2, 2, 3]))
    candidate, request = torch.randn(3, 32, 8), torch.randn(3, 64, 8)
    expected = lce(candidate, request, rows)
    apply_recipe(lce, "mxfp8", ["candidate", "request"])
    quantised = lce(candidate, request, rows)
    assert 0 < (quantised - expected).norm() / expected.norm() < 0.1
    with in_high_precision(lce):
        torch.testing.assert_close(lce(candidate, request, rows), expected)


@pytest.mark.parametrize("num_request", [0, 4])
def test_lces_together_are_one_product_unless_a_layer_must_be_called(num_request: int):
    layers = nn.ModuleList(LCE(2, out, num_request) for out in (3, 5)).double()
    candidate = torch.randn(5, 2, 6).double().requires_grad_()
    request = torch.randn(3, num_request, 6).double().requires_grad_() if num_request else None
    rows = CandidateRows.of_offsets(torch.tensor([0, 2, 2, 5]), 5)
    leaves = [candidate, *([] if request is None else [request]), *layers.parameters()]

    def gradients(outs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(sum(out.sin().sum() for out in outs), leaves)

    expected = [layer(candidate, request, rows) for layer in layers]
    together = compress_together(layers, candidate, request, rows)
    torch.testing.assert_close(together, expected)
    torch.testing.assert_close(gradients(together), gradients(expected))
    calls = []
    layers[1].candidate.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(compress_together(layers, candidate, request, rows), expected)
    assert calls


def test_lce_of_candidate_tokens_alone():
    lce = LCE(3, 2).double()
    tokens = torch.randn(4, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(lce(tokens), torch.einsum("mk,ckd->cmd", lce.candidate.weight, tokens))
    assert lce(tokens[:0]).shape == (0, 2, 5)


def test_a_layer_over_rows_is_exported_with_them():
    layer, rows = LCE(2, 3, 4), CandidateRows.of_offsets(torch.tensor([0, 2, 5]), 5)
    inputs = torch.randn(5, 2, 6), torch.randn(2, 4, 6), rows
    torch.testing.assert_close(torch.export.export(layer, inputs).module()(*inputs), layer(*inputs))


def test_what_a_request_shares_is_neither_ignored_nor_missing():
    rows, options = CandidateRows.of_offsets(torch.tensor([0, 2, 3]), 3), {"rank": 2, "hidden": [4], "dropout": 0.0}
    layers = [
        lambda num: LCE(2, 3, num),
        lambda num: DHENLayer(2, 4, num_request=num, **options),
        lambda num: WukongLayer(2, 4, num_fmb=2, num_lcb=1, num_request=num, **options),
    ]
    own = torch.randn(3, 2, 4)
    for make in layers:
        for built, given in ((0, 5), (5, 0), (5, 4)):
            shared = torch.randn(2, given, 4) if given else None
            with pytest.raises(ValueError, match=f"built for {built} tokens of a request, got (none|a tensor)"):
                make(built)(own, shared, rows)
        with pytest.raises(ValueError, match="come with rows=CandidateRows.of_offsets"):
            make(5)(own, torch.randn(2, 5, 4))
    with pytest.raises(ValueError, match=r"built for 0 features of a request, got a tensor \[2, 5\]"):
        SharedLinear(4, 0, 3)(own[:, 0], torch.randn(2, 5), rows)


def test_row_norm_matches_its_formula_and_leaves_small_rows_small():
    x = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True)
    expected = x / (x.square().mean(-1, keepdim=True) + QUIET**2).sqrt()
    torch.testing.assert_close(row_norm(x), expected)
    assert gradcheck(row_norm, x)
    loud, quiet = torch.full((1, 8), 10.0), torch.full((1, 8), 0.01)
    assert row_norm(loud).square().mean().sqrt() > 0.99
    assert 0.09 < row_norm(quiet).square().mean().sqrt() < 0.11
    assert (row_norm(torch.zeros(2, 8)) == 0).all()
    assert row_norm(x.float(), torch.bfloat16).dtype == torch.bfloat16
